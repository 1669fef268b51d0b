"""Generates a video with LTX-Video and sparse attention."""

from generate import Example, main

LTX = Example(
    "LTXPipeline", "Lightricks/LTX-Video",
    dict(height=704, width=1216, num_frames=121, num_inference_steps=50,
         negative_prompt="worst quality, inconsistent motion, blurry, jittery, distorted"),
    fps=24, image_pipeline="LTXImageToVideoPipeline", image_model="Lightricks/LTX-Video")

if __name__ == "__main__":
    main(LTX, __doc__)
