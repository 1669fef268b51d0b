"""Generates a video with Wan 2.1 and sparse attention, or with Wan 2.2 and both of its transformers: --model
Wan-AI/Wan2.2-T2V-A14B-Diffusers."""

from diffusers import UniPCMultistepScheduler
from generate import Example, main


def shift_for_720p(pipe) -> None:
    """Wan's own noise schedule at this resolution."""
    pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=5.0)


WAN = Example(
    "WanPipeline", "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    dict(height=720, width=1280, num_frames=81, num_inference_steps=50, guidance_scale=5.0), fps=16,
    image_pipeline="WanImageToVideoPipeline", image_model="Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", prepare=shift_for_720p)

if __name__ == "__main__":
    main(WAN, __doc__)
