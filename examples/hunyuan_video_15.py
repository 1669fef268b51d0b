"""Generates a video with HunyuanVideo 1.5 and sparse attention. Its sparse checkpoint takes --preset hunyuan_video_15_sparse."""

from generate import Example, main

HUNYUAN_VIDEO_15 = Example(
    "HunyuanVideo15Pipeline", "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
    dict(height=720, width=1280, num_frames=121, num_inference_steps=50), fps=24,
    image_pipeline="HunyuanVideo15ImageToVideoPipeline", image_model="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v")

if __name__ == "__main__":
    main(HUNYUAN_VIDEO_15, __doc__)
