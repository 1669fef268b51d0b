"""Generates a video with CogVideoX and sparse attention."""

from generate import Example, main

COGVIDEOX = Example("CogVideoXPipeline", "THUDM/CogVideoX-5b",
                    dict(height=480, width=720, num_frames=49, num_inference_steps=50, guidance_scale=6.0), fps=8,
                    image_pipeline="CogVideoXImageToVideoPipeline", image_model="THUDM/CogVideoX-5b-I2V")

if __name__ == "__main__":
    main(COGVIDEOX, __doc__)
