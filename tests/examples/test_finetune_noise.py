"""examples/finetune_noise.py: what is added by any kind of scheduler comes away again."""

import diffusers
import pytest
import torch
from tiny_pipelines import unipc


@pytest.mark.parametrize("name, make", [
    ("flow", lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)), ("unipc", unipc),
    ("dynamic", lambda: diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)),
    ("inverted", lambda: diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)),
    ("ddim", lambda: diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction")),
    ("dpm", lambda: diffusers.CogVideoXDPMScheduler(prediction_type="v_prediction")),
    ("epsilon", lambda: diffusers.CogVideoXDDIMScheduler(prediction_type="epsilon")),
    ("sample", lambda: diffusers.CogVideoXDDIMScheduler(prediction_type="sample"))])
def test_a_model_that_hits_its_target_is_sampled_from_exactly(script, name, make):
    """One whose prediction is always right: any scheduler's steps then lead to the latents."""
    noise = script.noise.Noise(make(), tokens=1000)
    latents = torch.randn(1, 4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    draws = torch.Generator().manual_seed(1)
    levels = [noise.level(draws) for _ in range(200)]
    assert all(0 < level < 1 for level in levels) if noise.flow else {0 <= level < 1000 for level in levels} == {True}
    if name == "flow":
        assert 0.68 < sum(levels) / 200 < 0.8

    def right(hidden_states, timestep, return_dict):
        """What the target was where the noisy latents were these."""
        time = float(timestep)
        if noise.flow:
            level = 1 - time / 1000 if noise.inverted else time / 1000
            given = (hidden_states - (1 - level) * latents) / max(level, 1e-3)
        else:
            level = time
            share = noise.scheduler.alphas_cumprod[int(time)]
            given = (hidden_states - share.sqrt() * latents) / (1 - share).sqrt().clamp(min=1e-3)
        noisy, at, target = noise.noised(latents, given, level)
        assert float(at) == pytest.approx(time) and torch.allclose(noisy, hidden_states, atol=2e-2)
        return (target,)

    found = script.noise.generate(right, noise, script.clips.Sample(latents, {}), None, 8, 1.0, 0, torch.float32)
    torch.testing.assert_close(found, latents, rtol=0, atol=2e-2)


def test_other_schedulers_are_refused(script):
    with pytest.raises(ValueError, match="--model must have a scheduler of flow matching or of diffusion, got EDMEulerSch"):
        script.noise.Noise(diffusers.EDMEulerScheduler(), 10)
