"""Generates a video with HunyuanVideo 1.5 and sparse attention. Weights that were trained with SSTA take --dense-steps 0."""

from generate import Example, main

from ssta.pipelines import Schedule

# The published text-to-video weights were trained densely, so the first steps and the first layer stay dense.
HUNYUAN_VIDEO_15 = Example(
    "HunyuanVideo15Pipeline", "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
    dict(height=720, width=1280, num_frames=121, num_inference_steps=50), fps=24,
    image_pipeline="HunyuanVideo15ImageToVideoPipeline", image_model="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
    schedule=Schedule.warm_up())

if __name__ == "__main__":
    main(HUNYUAN_VIDEO_15, __doc__)
