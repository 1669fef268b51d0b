"""Generates a video with Mochi and sparse attention."""

from generate import Example, main

MOCHI = Example("MochiPipeline", "genmo/mochi-1-preview",
                dict(height=480, width=848, num_frames=163, num_inference_steps=64, guidance_scale=4.5), fps=30)

if __name__ == "__main__":
    main(MOCHI, __doc__)
