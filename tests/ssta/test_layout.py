"""Token and tile layouts: round trips, the order of tiles, padding, gradients, what is remembered and what is rejected."""

import threading

import pytest
import ssta_oracle as oracle
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssta import DenseRun, TokenLayout, VideoGrid, tile_layout
from ssta.kernels.memo import remember

PADDINGS = ("none", "zero", "repeat")

triples = st.tuples(*[st.integers(1, 5)] * 3)
segments = st.lists(st.one_of(triples, st.integers(1, 30)), min_size=1, max_size=4)


def tokens_of(parts):
    return TokenLayout(tuple(DenseRun(part) if isinstance(part, int) else VideoGrid(*part) for part in parts))


@given(segments, triples, st.sampled_from(PADDINGS))
def test_tiles_are_those_of_the_definition(parts, tile_thw, padding):
    layout = tile_layout(tokens_of(parts), tile_thw, padding)
    tiles, videos = oracle.tiles_of(parts, tile_thw, padding)
    slots = [-1 if token is None else token for tile in tiles for token in tile.slots]
    assert layout.source.tolist() == slots
    assert layout.inverse.tolist() == [slots.index(token) for token in range(layout.tokens.length)]
    ends = torch.tensor([len(tile.slots) for tile in tiles]).cumsum(0).tolist()
    assert layout.offsets.tolist() == [0, *ends] and layout.offsets.dtype == torch.int32
    assert (layout.num_video_tiles, layout.num_dense_tiles) == (videos, len(tiles) - videos)
    assert layout.max_tile_length == max(len(tile.slots) for tile in tiles)
    assert layout.num_slots == ends[-1]


@given(segments, triples, st.sampled_from(PADDINGS))
def test_untile_undoes_tile_with_its_gradient(parts, tile_thw, padding):
    layout = tile_layout(tokens_of(parts), tile_thw, padding)
    x = torch.randn(2, layout.tokens.length, 3, 4, dtype=torch.float64).transpose(1, 2).requires_grad_()
    tiled = layout.tile(x)
    expected = [torch.zeros(2, 3, 4, dtype=torch.float64) if i < 0 else x[:, :, i] for i in layout.source.tolist()]
    assert torch.equal(tiled, torch.stack(expected, 2))
    assert torch.equal(layout.untile(tiled), x)
    # Every slot weighted differently: a repeated token collects the weights of all of its slots.
    weight = torch.randn_like(tiled)
    torch.testing.assert_close(torch.autograd.grad((tiled * weight).sum(), x)[0],
                               torch.autograd.grad((torch.stack(expected, 2) * weight).sum(), x)[0])
    back = torch.randn_like(x)
    tiled = tiled.detach().requires_grad_()
    expected = torch.zeros_like(tiled).index_copy(2, layout.inverse, back)
    assert torch.equal(torch.autograd.grad((layout.untile(tiled) * back).sum(), tiled)[0], expected)


@pytest.mark.parametrize("padding", PADDINGS)
def test_gradients_of_tile_and_untile_by_finite_differences(padding):
    layout = tile_layout(tokens_of([3, (2, 3, 3), 5]), (2, 2, 2), padding)
    x = torch.randn(1, 1, layout.tokens.length, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layout.tile, (x,))
    assert torch.autograd.gradgradcheck(layout.tile, (x,))
    assert torch.autograd.gradcheck(layout.untile, (layout.tile(x).detach().requires_grad_(),))


@pytest.mark.parametrize("padding, slots", [("none", 31 * 45 * 80 + 1985), ("zero", 366 * 384), ("repeat", 366 * 384)])
def test_the_720p_canvas(padding, slots):
    layout = tile_layout(TokenLayout.video_text((31, 45, 80), 1985), (6, 8, 8), padding)
    assert (layout.num_video_tiles, layout.num_dense_tiles, layout.num_slots) == (360, 6, slots)
    assert layout.tile_grids == ((6, 6, 10),) and layout.max_tile_length == 384
    assert layout.tile_length == (None if padding == "none" else 384)
    assert torch.equal(layout.source[layout.inverse], torch.arange(31 * 45 * 80 + 1985))
    assert int(layout.offsets[-1]) == slots


def test_a_single_frame_and_an_axis_shorter_than_the_tile():
    layout = tile_layout(TokenLayout.video_text((1, 3, 20)), (6, 8, 8), "none")
    assert layout.tile_grids == ((1, 1, 3),)
    assert layout.offsets.tolist() == [0, 24, 48, 60] and layout.max_tile_length == 24


def test_video_text_is_video_then_text():
    assert TokenLayout.video_text((2, 3, 4), 5) == TokenLayout((VideoGrid(2, 3, 4), DenseRun(5)))
    assert TokenLayout.video_text([2, 3, 4]) == TokenLayout([VideoGrid(2, 3, 4)])
    layout = TokenLayout((DenseRun(5), VideoGrid(2, 3, 4), DenseRun(7)))
    assert (layout.length, layout.video_length, layout.dense_length) == (36, 24, 12)
    assert hash(layout) == hash(TokenLayout((DenseRun(5), VideoGrid(2, 3, 4), DenseRun(7))))


@pytest.mark.parametrize("make, error, words", [
    (lambda: VideoGrid(0, 2, 2), ValueError, "VideoGrid.t must be at least 1, got 0"),
    (lambda: VideoGrid(2, 2.0, 2), TypeError, "VideoGrid.h must be an int, got 2.0"),
    (lambda: VideoGrid(2, 2, True), TypeError, "VideoGrid.w must be an int, got True"),
    (lambda: DenseRun(0), ValueError, "DenseRun.length must be at least 1, got 0"),
    (lambda: TokenLayout(()), ValueError, "at least one"),
    (lambda: TokenLayout((VideoGrid(1, 1, 1), 7)), TypeError, r"segments\[1\]"),
    (lambda: TokenLayout.video_text((2, 2)), ValueError, "thw must have three entries"),
    (lambda: TokenLayout.video_text((2, 2, 2), -1), ValueError, "text_len must be at least 0, got -1"),
    (lambda: tile_layout((2, 2, 2), (1, 1, 1)), TypeError, "tokens must be a TokenLayout, got tuple"),
    (lambda: tile_layout(TokenLayout.video_text((2, 2, 2)), (1, 0, 1)), ValueError, r"tile_thw\[1\] must be at least 1, got 0"),
    (lambda: tile_layout(TokenLayout.video_text((2, 2, 2)), (1, 1, 1), "edge"), ValueError, "padding must be one of .*'edge'"),
    (lambda: tile_layout(TokenLayout.video_text((2, 2, 2)), (1, 1, 1)).tile(torch.zeros(1, 1, 7, 4)), ValueError, r"= \[any, any, 8"),
    (lambda: tile_layout(TokenLayout.video_text((2, 2, 2)), (1, 1, 1)).untile(torch.zeros(1, 8, 4)), ValueError, r"= \[any, any, 8, any\]"),
])
def test_bad_layouts_say_what_is_wrong(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_layout_is_made_once_and_usable_for_training_even_if_first_made_in_inference_mode():
    tokens = TokenLayout.video_text((3, 4, 5), 6)
    with torch.inference_mode():
        layout = tile_layout(tokens, (2, 3, 2), "repeat")
    assert tile_layout(tokens, (2, 3, 2), "repeat", torch.device("cpu")) is layout
    assert tile_layout(tokens, (2, 3, 2), "zero") is not layout
    x = torch.randn(1, 1, tokens.length, 2, requires_grad=True)
    layout.untile(layout.tile(x)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_memory_is_bounded_and_keeps_what_was_used_last():
    made = []

    @remember(2)
    def make(key):
        made.append(key)
        return torch.full((1,), key)

    for key in (1, 2, 1, 3, 1, 2):
        assert int(make(key)) == key
    assert made == [1, 2, 3, 2]


def test_memory_keeps_no_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    tokens = TokenLayout.video_text((2, 3, 7))
    with FakeTensorMode():
        assert type(tile_layout(tokens, (2, 2, 2)).source) is not torch.Tensor
    assert type(tile_layout(tokens, (2, 2, 2)).source) is torch.Tensor


def test_memory_holds_what_a_captured_graph_reads(monkeypatch):
    capturing = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    made = []

    @remember(1)
    def make(key):
        made.append(key)
        return torch.full((1,), key)

    first = make(1)
    capturing.append(True)
    assert make(1) is first
    make(2), make(2)
    assert made == [1, 2, 2], "what is made during a capture belongs to the graph"
    capturing.clear()
    make(3), make(4)
    assert make(1) is first, "evicted from the memory, but a graph reads it"


def test_memory_is_shared_by_threads():
    tokens, layouts = TokenLayout.video_text((4, 4, 4), 3), []
    threads = [threading.Thread(target=lambda: layouts.append(tile_layout(tokens, (3, 3, 3), "zero"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(layouts) == 8 and all(torch.equal(layout.source, layouts[0].source) for layout in layouts)


@pytest.mark.parametrize("padding", PADDINGS)
def test_projections_seen_through_a_transpose_give_the_same_and_keep_their_memory_order(padding):
    layout = tile_layout(TokenLayout((VideoGrid(3, 5, 4), DenseRun(7), VideoGrid(2, 3, 3))), (2, 2, 3), padding)
    projected = torch.randn(2, layout.tokens.length, 3, 8, dtype=torch.float64)
    weight = torch.randn(2, 3, layout.num_slots, 8, dtype=torch.float64)
    results = []
    for x in (projected.transpose(1, 2), projected.transpose(1, 2).contiguous()):
        x = x.detach().requires_grad_()
        tiled = layout.tile(x)
        back = layout.untile(tiled * weight)
        results.append((tiled, back, *torch.autograd.grad((back * back).sum(), x)))
    for view, plain in zip(*results):
        torch.testing.assert_close(view, plain, rtol=0, atol=1e-12)
    tiled, back, _ = results[0]
    assert tiled.transpose(1, 2).is_contiguous()
    assert layout.untile(tiled).transpose(1, 2).is_contiguous() and torch.equal(layout.untile(tiled), projected.transpose(1, 2))


@pytest.mark.parametrize("device, error, words", [
    ("gpu", ValueError, "device must be a device that torch knows, such as 'cpu' or 'cuda:0', got 'gpu'"),
    ("cuda:99", ValueError, "device must be a GPU that torch sees .*got 'cuda:99'"),
    (3.5, TypeError, r"device must be a torch.device, a string or a GPU's number, got 3.5 \(float\)"),
    (None, TypeError, "device must be a torch.device")])
def test_a_device_that_is_not_there_is_named(device, error, words):
    with pytest.raises(error, match=words):
        tile_layout(TokenLayout.video_text((2, 2, 2)), (2, 2, 2), device=device)


@pytest.mark.parametrize("way", ["tile", "untile"])
def test_what_cannot_be_tiled_is_refused(way):
    layout = tile_layout(TokenLayout.video_text((2, 2, 2)), (2, 2, 2))
    x = torch.randn(1, 1, 8, 4)
    with pytest.raises(ValueError, match="x must be on cpu, got meta"):
        getattr(layout, way)(x.to("meta"))
    with pytest.raises(TypeError, match="x must be a dense, strided tensor, got torch.sparse_coo"):
        getattr(layout, way)(x.to_sparse())


def test_padding_may_be_much_but_not_nearly_everything():
    few = TokenLayout.video_text((1, 1, 1), 1)
    assert tile_layout(few, (6, 8, 8), "zero").num_slots == 768, "one token in a tile of the usual size is legal"
    assert tile_layout(few, (2000, 1000, 1)).num_slots == 2, "and without padding any tile is"
    with pytest.raises(ValueError, match="tile_thw must not be so large that padding 'repeat' makes more than 64 slots of a token"):
        tile_layout(few, (2000, 1000, 1), "repeat")


def test_the_move_is_one_object():
    """By which the step "gather" knows that queries and keys have one order."""
    layout = tile_layout(TokenLayout.video_text((2, 4, 4), 3), (2, 2, 2), "none")
    assert layout.move is layout.move
