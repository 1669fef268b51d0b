"""The canvas under torch.inference_mode, whose tensors do not say whether they were changed."""

from __future__ import annotations

import pytest
import torch
from tiny_hunyuan import CANVAS, SPARSE
from tiny_models import TINY, run

from ssta.pipelines import Schedule, apply_ssta
from ssta.pipelines.canvas import from_coordinates, from_numbers


def made_in_inference_mode(call: dict) -> dict:
    with torch.inference_mode():
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in call.items()}


@pytest.mark.parametrize("name", TINY)
def test_every_family_under_inference_mode(name):
    tiny = TINY[name]
    model = tiny.build()
    with apply_ssta(model, SPARSE, schedule=Schedule()) as handle:
        for thw in (CANVAS, (2, 8, 8)):
            call = tiny.call(thw)
            expected = run(model, call)
            with torch.inference_mode():
                assert torch.equal(run(model, made_in_inference_mode(call)), expected)
            assert {layer.thw for layer in handle.report()} == {thw}


def test_ltx_with_conditions_under_inference_mode():
    tiny, (t, h, w) = TINY["ltx"], CANVAS
    model, call = tiny.build(), tiny.call()
    for name in ("num_frames", "height", "width"):
        del call[name]
    grid = torch.stack(torch.meshgrid(*(torch.arange(n) * 1.5 for n in CANVAS), indexing="ij")).flatten(1)
    condition = torch.stack([torch.full((h * w,), 2.0), grid[1, : h * w], grid[2, : h * w]])
    call |= {"video_coords": torch.cat([condition, grid], dim=1)[None], "hidden_states": torch.randn(1, (t + 1) * h * w, 4)}
    with apply_ssta(model, SPARSE, schedule=Schedule()) as handle:
        expected = run(model, call)
        with torch.inference_mode():
            assert torch.equal(run(model, made_in_inference_mode(call)), expected)
        assert {(layer.thw, layer.tokens) for layer in handle.report()} == {(CANVAS, (t + 1) * h * w)}


def test_coordinates_that_are_changed_in_place_are_read_again():
    frame = torch.cartesian_prod(torch.arange(3.0), torch.arange(4.0))
    with torch.inference_mode():
        points = torch.cat([torch.tensor([0.0, 1.0, 9.0]).repeat_interleave(12)[:, None], frame.repeat(3, 1)], dim=1)
        assert from_coordinates(points, lambda: points) == (3, 3, 4)
        points[:12, 0] = 5.0
        assert from_coordinates(points, lambda: points) == (2, 3, 4)


def test_coordinates_that_do_not_say_where_the_video_ends_are_refused():
    coordinates = torch.zeros(1, 3, 24, 2)
    with pytest.raises(ValueError, match=r"num_frames, height and width must be given .* got video_coords of shape \(1, 3, 24, 2\)"):
        from_numbers(torch.nn.Module(), dict(video_coords=coordinates))
    assert from_numbers(torch.nn.Module(), dict(video_coords=coordinates, num_frames=2, height=3, width=4)) == (2, 3, 4)
