"""The canvas under torch.inference_mode, whose tensors do not say whether they were changed."""

from __future__ import annotations

import math

import pytest
import torch
from graphs import Graphs
from tiny_hunyuan import CANVAS, SPARSE
from tiny_models import TINY, run

from ssta import DenseRun, TokenLayout, VideoGrid
from ssta.pipelines import Schedule, SSTAProcessor, apply_ssta
from ssta.pipelines.patch.canvas import from_coordinates, from_numbers


def made_in_inference_mode(call: dict) -> dict:
    with torch.inference_mode():
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def with_coordinates_alone() -> dict:
    """A call of LTX-Video without the numbers of the canvas."""
    call = TINY["ltx"].call()
    for name in ("num_frames", "height", "width"):
        del call[name]
    grid = torch.stack(torch.meshgrid(*(torch.arange(n) * 1.5 for n in CANVAS), indexing="ij")).flatten(1)
    return call | {"video_coords": grid[None]}


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
    model, call, (t, h, w) = TINY["ltx"].build(), with_coordinates_alone(), CANVAS
    grid = call["video_coords"][0]
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


@pytest.mark.parametrize("thw", [(5, 3, 4), (3, 1, 4), (3, 4, 1), (7, 1, 1), (1, 3, 4)], ids=str)
def test_frames_at_any_times_are_a_canvas_where_the_numbers_are_one(thw):
    t, h, w = thw
    grid = torch.stack(torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")).flatten(1) * 32.0
    # The last frames stand for others, as a window of LTXI2VLongMultiPromptPipeline has its overlap and negative index.
    grid[0, -h * w:] = -1.0
    numbers = dict(num_frames=1, height=1, width=1)
    assert from_numbers(torch.nn.Module(), numbers | dict(video_coords=grid[None])) == thw
    assert from_numbers(torch.nn.Module(), numbers) == (1, 1, 1)
    if h * w > 1:
        with pytest.raises(ValueError, match="video_coords must be those of frames alike in height and width"):
            from_numbers(torch.nn.Module(), numbers | dict(video_coords=torch.cat([grid, grid[:, :1]], 1)[None]))


def test_the_windows_of_ltx_long_videos_are_sparse():
    tiny, (t, h, w) = TINY["ltx"], CANVAS
    model, call = tiny.build(), tiny.call()
    grid = torch.stack(torch.meshgrid(*(torch.arange(n) * 1.5 for n in CANVAS), indexing="ij")).flatten(1)
    call |= {"video_coords": torch.cat([grid, grid[:, :h * w]], 1)[None], "hidden_states": torch.randn(1, (t + 1) * h * w, 4),
             "num_frames": 1, "height": 1, "width": 1}
    with apply_ssta(model, SPARSE, schedule=Schedule()) as handle:
        run(model, call)
        assert {layer.thw for layer in handle.report()} == {(t + 1, h, w)} and all(layer.density < 1 for layer in handle.report())


@pytest.mark.parametrize("thw, size", [(CANVAS, (2, 5)), ((1, 6, 8), (2, 5)), ((1, 6, 8), (6, 8))], ids=["video", "frame", "frames"])
@pytest.mark.parametrize("before", [True, False], ids=["memory", "keyframes"])
def test_ltx2_finds_other_tokens_on_either_side_of_the_video(before, thw, size):
    """Echo's transformer has memory tokens before the video, LTX-2's own pipelines have key frames after it."""
    tiny, (t, h, w), others = TINY["ltx2"], thw, math.prod(size)
    model, call = tiny.build(), tiny.call(thw)
    coords = model.rope.prepare_video_coords(1, t, h, w, torch.device("cpu"), fps=25.0)
    more = model.rope.prepare_video_coords(1, 1, *size, torch.device("cpu"), fps=25.0)
    more[:, 0] += 500 if before else 0.2
    coords = torch.cat([more, coords] if before else [coords, more], dim=2)
    call |= {"video_coords": coords, "hidden_states": torch.randn(1, t * h * w + others, 4)}
    layouts, attend = [], SSTAProcessor.attend

    def noted(processor, query, key, value, layout, text_mask=None):
        layouts.append(layout.segments)
        return attend(processor, query, key, value, layout, text_mask)

    with apply_ssta(model, SPARSE, schedule=Schedule()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SSTAProcessor, "attend", noted)
        run(model, call)
    video, dense = VideoGrid(*thw), DenseRun(others)
    assert set(layouts) == {(dense, video) if before else (video, dense)}


@pytest.mark.parametrize("name, call", [("minimax_h3", lambda: TINY["minimax_h3"].call()), ("ltx", with_coordinates_alone)],
                         ids=["minimax_h3", "ltx"])
def test_a_canvas_of_coordinates_says_why_it_leaves_the_graph(name, call):
    model, call = TINY[name].build(layers=1), call()
    with apply_ssta(model, SPARSE, schedule=Schedule()):
        expected = run(model, call)
        torch.testing.assert_close(run(torch.compile(model, backend=Graphs()), call), expected)
        with pytest.raises(Exception, match="SSTA reads the video's canvas from the values of a tensor of coordinates"):
            run(torch.compile(model, backend=Graphs(), fullgraph=True), call)


def test_coordinates_that_do_not_say_where_the_video_ends_are_refused():
    coordinates = torch.zeros(1, 3, 24, 2)
    with pytest.raises(ValueError, match=r"num_frames, height and width must be given .* got video_coords of shape \(1, 3, 24, 2\)"):
        from_numbers(torch.nn.Module(), dict(video_coords=coordinates))
    assert from_numbers(torch.nn.Module(), dict(video_coords=coordinates, num_frames=2, height=3, width=4)) == (2, 3, 4)


def test_where_the_video_lies_in_a_sequence():
    """By the tokens that there are, or by as many conditions as a processor says; histories of the family's come before the video only."""
    tiny, video, text, history = TINY["wan"], VideoGrid(*CANVAS), DenseRun(5), VideoGrid(1, 3, 4)
    model = tiny.build()
    with apply_ssta(model, SPARSE, schedule=Schedule()) as handle:
        run(model, tiny.call())
        (_, _, context, ((_, processor), *_)), = handle.layers()
        alone, more = video.length, video.length + text.length
        assert processor.video_alone(alone) == processor.video_then(alone) == processor.video_after(alone) == TokenLayout((video,))
        assert processor.video_then(more) == processor.video_then(more, 5) == TokenLayout((video, text))
        assert processor.video_after(more) == processor.video_after(more, 5) == TokenLayout((text, video))
        for layout, *conditions in ((processor.video_alone,), (processor.video_then, 4), (processor.video_after, 4)):
            with pytest.raises(ValueError, match="hidden_states must have the canvas' 3 x 6 x 8 tokens, got 14[59] video tokens"):
                layout(more, *conditions)
        with context.resumed(context.call._replace(before=(history,))):
            assert processor.video_alone(history.length + alone) == TokenLayout((history, video))
            assert processor.video_then(history.length + more) == TokenLayout((history, video, text))
            assert processor.video_after(more) == TokenLayout((text, video))
