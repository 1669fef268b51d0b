"""Generates a video with HunyuanVideo and sparse attention."""

from generate import Example, main

HUNYUAN_VIDEO = Example("HunyuanVideoPipeline", "hunyuanvideo-community/HunyuanVideo",
                        dict(height=720, width=1280, num_frames=129, num_inference_steps=50), fps=24)

if __name__ == "__main__":
    main(HUNYUAN_VIDEO, __doc__)
