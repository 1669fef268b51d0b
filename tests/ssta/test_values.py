"""Values between a layer's steps: what a selection says of itself, one text mask for many layers, exact attention; forms of arguments."""

import copy
import pickle
import sys

import numpy as np
import pytest
import torch
from backend_rows import backend_of

from ssta import (
    DenseRun,
    SSTAConfig,
    TextMask,
    TileCache,
    TokenLayout,
    VideoGrid,
    dense_attention,
    explain,
    sparse_linear_attention,
    ssta_3d_attention,
    ssta_attention,
    tile_layout,
    video_sparse_attention,
)
from ssta.attention import attend
from ssta.kernels import BlockLists, block_sparse_attention
from ssta.kernels.eager.ranking import topk_blocks
from ssta.selection import text_lengths
from ssta.text import tile_places

LAYOUT = TokenLayout((DenseRun(3), VideoGrid(2, 4, 4), DenseRun(9)))
CONFIG = SSTAConfig(tile_thw=(1, 2, 2), topk=2)
MASK = torch.tensor([[1] * 2 + [0] + [1] * 5 + [0] * 4, [1] * 12])


def inputs(layout=LAYOUT, dtype=torch.float32):
    return [torch.randn(2, heads, layout.length, 8, dtype=dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("padding", ["none", "zero"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_budget_is_a_mask_that_no_rank_decides(padding, masked):
    """Keeping what the best-scored budget keeps gives its lists, and its output to the bit."""
    base = SSTAConfig(tile_thw=(1, 2, 2), topk=3, pad_type=padding)
    own = SSTAConfig(tile_thw=(1, 2, 2), pad_type=padding, budget=lambda scores: topk_blocks(scores, 3))
    q, k, v = inputs()
    (a, by_rank), (b, by_mask) = (ssta_attention(q, k, v, LAYOUT, config, text_mask=MASK if masked else None, return_blocks=True)
                                  for config in (base, own))
    assert torch.equal(a, b) and torch.equal(by_rank.counts, by_mask.counts) and torch.equal(by_rank.to_mask(), by_mask.to_mask())


def test_a_layer_says_what_ran_and_what_it_attended_to():
    q, k, v = inputs()
    out, blocks = ssta_attention(q, k, v, LAYOUT, CONFIG, return_blocks=True)
    result = attend(q, k, v, LAYOUT, CONFIG)
    assert torch.equal(result.out, out) and torch.equal(result.selection.blocks.to_mask(), blocks.to_mask())
    assert result.route.name == "torch" and result.exact_mass is None
    assert attend(q, k, v, LAYOUT, CONFIG, impl="reference").route.name == "reference"


@pytest.mark.parametrize("padding", ["none", "zero"])
def test_layers_may_share_a_text_mask(padding):
    q, k, v = inputs()
    config = SSTAConfig(tile_thw=(1, 2, 2), topk=2, pad_type=padding)
    shared = TextMask.of(MASK, 2, LAYOUT, q.device)
    expected = ssta_attention(q, k, v, LAYOUT, config, text_mask=MASK)
    for _ in range(2):
        assert torch.equal(ssta_attention(q, k, v, LAYOUT, config, text_mask=shared), expected)
    layout = tile_layout(LAYOUT, config.tile_thw, padding)
    plain = backend_of("torch")
    assert shared.left(layout, plain) is shared.left(layout, plain)
    assert shared.valid_tokens() == (7, 12)
    assert shared.in_sequence.tolist() == [row[:3] + [True] * 32 + row[3:] for row in (MASK != 0).tolist()]
    with pytest.raises(ValueError, match="text_mask must be of this sequence, TokenLayout of 13 tokens.* got one of TokenLayout of 44"):
        TextMask.of(shared, 2, TokenLayout((VideoGrid(1, 1, 1), DenseRun(12))), q.device)
    with pytest.raises(ValueError, match=r"text_mask must be \[batch, dense tokens\] = \(3, 12\), got \(2, 12\)"):
        TextMask.of(shared, 3, LAYOUT, q.device)


def test_a_text_mask_of_inference_mode_serves_a_backward_pass():
    shared = TextMask.of(MASK, 2, LAYOUT, torch.device("cpu"))
    q, k, v = inputs()
    with torch.inference_mode():
        ssta_attention(q, k, v, LAYOUT, CONFIG, text_mask=shared)
    q.requires_grad_()
    ssta_attention(q, k, v, LAYOUT, CONFIG, text_mask=shared).sum().backward()
    assert q.grad.isfinite().all()


def test_what_a_text_mask_leaves_of_tiles():
    """Without padding tokens of a tile, with padding whole tiles, as many as hold a valid token and at least one of a run."""
    plain, text = backend_of("torch"), TextMask.of(MASK, 2, LAYOUT, torch.device("cpu"))
    layout = tile_layout(LAYOUT, (1, 2, 2))
    ends, starts = tile_places(layout)
    assert ends[:, 8:].tolist() == [[0, 3, 3, 3], [3, 12, 12, 12]] and starts[8:].tolist() == [0, 0, 4, 8]
    for mask in (text, MASK):
        active, lengths = text_lengths(layout, mask, plain)
        assert active is None and lengths[:, 0, 8:].tolist() == [[2, 4, 1, 0], [3, 4, 4, 1]] and (lengths[:, 0, :8] == 4).all()
        active, lengths = text_lengths(tile_layout(LAYOUT, (1, 2, 2), "zero"), mask, plain)
        assert lengths is None and (active != 0)[:, 0, 8:].tolist() == [[True, True, True, False], [True] * 4]
        assert (active != 0)[..., :8].all()
    assert text_lengths(layout, None, plain) == (None, None)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", [LAYOUT, TokenLayout.video_text((2, 3, 4)), TokenLayout((DenseRun(500),))])
def test_dense_attention_is_the_softmax_over_valid_tokens(layout, masked):
    q, k, v = inputs(layout, torch.float64)
    q.requires_grad_()
    mask = None
    if masked:
        mask = torch.arange(layout.dense_length)[None] < torch.tensor([[layout.dense_length - 1], [layout.dense_length]])
        if layout is LAYOUT:
            mask = MASK
    valid = torch.ones(2, layout.length, dtype=torch.bool) if mask is None else TextMask.of(mask, 2, layout, q.device).in_sequence
    result = dense_attention(q, k, v, layout, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=valid[:, None, None])
    expected = expected.masked_fill(~valid[:, None, :, None], 0)
    torch.testing.assert_close(result.out, expected, rtol=1e-12, atol=1e-12)
    assert result.route.name == "torch" and isinstance(result.selection.blocks, BlockLists)
    torch.testing.assert_close(torch.autograd.grad(result.out.sum(), q), torch.autograd.grad(expected.sum(), q), rtol=1e-9, atol=1e-9)


def test_dense_attention_refuses_what_is_no_layout():
    with pytest.raises(TypeError, match="layout must be a TokenLayout, got tuple"):
        dense_attention(*torch.zeros(3, 1, 2, 30, 4), (2, 3, 5))


@pytest.mark.parametrize("query, error, words", [
    ([1], TypeError, "query must be a tensor, got list"),
    (torch.tensor(1.0), ValueError, r"query must be \[batch, heads, tokens, head_dim\]"),
    (torch.zeros(2, 4, 20, 8), ValueError, "query must have the layout's 44 tokens, got 20")])
def test_dense_attention_looks_at_the_query_before_the_mask(query, error, words):
    with pytest.raises(error, match=words):
        dense_attention(query, *torch.zeros(2, 2, 2, 44, 8), LAYOUT, MASK)


@pytest.mark.parametrize("order", [[1, 0, 1] + [0] * 9, [0, 0, 1] + [1] * 9, [1, 1, 1] + [0] + [1] * 8])
def test_a_mask_whose_valid_tokens_are_not_first_is_refused_on_a_cpu(order):
    """At every call: the kind of mask has come before."""
    q, k, v = inputs()
    mask = torch.tensor([[1] * 12, order])
    for good in (MASK, None):
        ssta_attention(q, k, v, LAYOUT, CONFIG, text_mask=good)
    for call in (lambda: ssta_attention(q, k, v, LAYOUT, CONFIG, text_mask=mask), lambda: dense_attention(q, k, v, LAYOUT, mask),
                 lambda: TextMask.of(mask, 2, LAYOUT, q.device)):
        with pytest.raises(ValueError, match="text_mask must have the valid tokens of each dense run first, .* in batch element 1"):
            call()


@pytest.mark.parametrize("call", [lambda x: ssta_attention(x, x, x, TokenLayout.video_text((2, 3, 4)), CONFIG),
                                  lambda x: dense_attention(x, x, x, TokenLayout.video_text((2, 3, 4)))])
def test_other_dtypes_are_refused_by_the_names_of_those_that_are_taken(call):
    with pytest.raises(TypeError, match="query must be float16, bfloat16, float32 or float64, got torch.float8_e4m3fn"):
        call(torch.zeros(1, 2, 24, 16).to(torch.float8_e4m3fn))


CALLS = {
    "ssta_3d_attention": lambda x, impl: ssta_3d_attention(x, x, x, (2, 3, 4), tile_thw=(2, 2, 2), impl=impl),
    "ssta_attention": lambda x, impl: ssta_attention(x, x, x, TokenLayout.video_text((2, 3, 4)), CONFIG, impl=impl),
    "dense_attention": lambda x, impl: dense_attention(x, x, x, TokenLayout.video_text((2, 3, 4)), impl=impl),
    "explain": lambda x, impl: explain(x, x, (2, 3, 4), CONFIG, impl=impl),
    "TileCache": lambda x, impl: TileCache(CONFIG, window=2, impl=impl),
    "video_sparse_attention": lambda x, impl: video_sparse_attention(x, x, x, None, (2, 3, 4), 0.5, impl=impl),
    "sparse_linear_attention": lambda x, impl: sparse_linear_attention(x, x, x, torch.eye(8), None, density=0.5, impl=impl),
    "block_sparse_attention": lambda x, impl: block_sparse_attention(
        x, x, x, BlockLists.from_mask(torch.ones(3, 3, dtype=torch.bool), 8, 8), impl=impl),
}


@pytest.mark.parametrize("impl", [np.array(["auto"]), np.array(["auto", "torch"]), torch.zeros(2), torch.zeros(1), ["auto"], None, 1],
                         ids=lambda impl: type(impl).__name__ + str(getattr(impl, "shape", "")))
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_impl_that_is_no_string_is_named(call, impl):
    with pytest.raises(ValueError, match="impl must be one of 'auto', .*got "):
        call(torch.zeros(1, 2, 24, 8), impl)


@pytest.mark.parametrize("split", [np.array(["video"]), np.array(["video", "all"]), torch.zeros(2), None])
def test_a_split_that_is_no_string_is_named(split):
    x = torch.zeros(1, 2, 24, 8)
    with pytest.raises(ValueError, match="split must be 'video' without a group"):
        ssta_attention(x, x, x, TokenLayout.video_text((2, 3, 4)), CONFIG, split=split)


@pytest.mark.parametrize("sparse_type", ["sta", "ssta", "block_attn"])
@pytest.mark.parametrize("changes", [{}, {"threshold": 0.5}, {"pad_type": "zero"}])
def test_meta_tensors_have_a_shape_with_every_selection(sparse_type, changes):
    x = torch.empty(1, 2, 29, 8, device="meta")
    out = ssta_3d_attention(x, x, x, (2, 3, 4), tile_thw=(2, 2, 2), text_len=5, sparse_type=sparse_type,
                            text_mask=torch.empty(1, 5, dtype=torch.bool, device="meta"), **changes)
    assert out.shape == x.shape and out.is_meta


def test_numpys_integers_are_integers():
    q = torch.randn(1, 1, 29, 8)
    plain = ssta_3d_attention(q, q, q, (2, 3, 4), 2, (2, 2, 2), (1, 3, 3), 5)
    theirs = ssta_3d_attention(q, q, q, np.array([2, 3, 4]), np.int64(2), tuple(np.array([2, 2, 2])), torch.Size((1, 3, 3)), np.int32(5))
    assert torch.equal(plain, theirs)
    config = SSTAConfig(topk=np.int64(4), tile_thw=np.array([1, 2, 3]), lambda_=np.float32(0.5))
    assert config == SSTAConfig(topk=4, tile_thw=(1, 2, 3), lambda_=0.5)


def test_remembered_arguments_are_not_confused_with_equal_ones_of_another_kind():
    q = torch.randn(1, 1, 24, 8)
    arguments = dict(query=q, key=q, value=q, thw=(2, 3, 4), tile_thw=(2, 2, 2), topk=1)
    ssta_3d_attention(**arguments)
    for changes in ({"topk": True}, {"topk": 1.0}, {"tile_thw": (2, 2.0, 2)}, {"thw": (2, 3, 4.0)}, {"topk": [1]}):
        with pytest.raises(TypeError, match=next(iter(changes))):
            ssta_3d_attention(**{**arguments, **changes})


def test_layouts_say_what_they_are_and_survive_copying():
    layout = tile_layout(LAYOUT, (1, 2, 2), "zero")
    assert str(LAYOUT) == "TokenLayout of 44 tokens: dense 3 + video 2 x 4 x 4 + dense 9"
    assert "8 video tiles of 1 x 2 x 2 and 4 dense tiles, 4 slots each" in str(layout) and "tensor" not in repr(layout)
    for copied in (pickle.loads(pickle.dumps(LAYOUT)), copy.deepcopy(LAYOUT)):
        assert copied == LAYOUT and hash(copied) == hash(LAYOUT) and copied.length == 44 and copied.longest_video == (2, 4, 4)
    for copied in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert copied.num_slots == layout.num_slots and torch.equal(copied.source, layout.source)
    config = SSTAConfig.hunyuan_video_15()
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert copied == config and copied.for_canvas((31, 1, 1)) == config.for_canvas((31, 1, 1))
    assert config.for_canvas((31, 1, 1)) is config.for_canvas((20, 1, 1)), "variants are resolved once"


def test_what_follows_from_the_layout_and_the_configuration_is_found_once():
    q, k, v = inputs()
    seen = {}

    def count(frame, event, _):
        if event == "call":
            seen[frame.f_code.co_name] = seen.get(frame.f_code.co_name, 0) + 1

    for _ in range(2):
        seen.clear()
        sys.setprofile(count)
        try:
            ssta_attention(q, k, v, LAYOUT, CONFIG, text_mask=MASK)
        finally:
            sys.setprofile(None)
    repeated = {"settled_fields", "__post_init__", "cut_segments", "fixed_tiles", "near", "choose", "decide"} & set(seen)
    # BlockLists check what they are made of.
    assert repeated <= {"__post_init__"} and seen.get("__post_init__", 0) <= 2


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_returned_lists_are_the_callers_own(impl):
    """They serve tensors of another length, and what is written to them or to their copies holds."""
    torch.manual_seed(0)
    layout, config = TokenLayout.video_text((1, 3, 4), 3), SSTAConfig(tile_thw=(1, 2, 2), kernel_thw=(1, 1, 1), topk=1)
    x = torch.randn(1, 1, layout.length, 16).half()
    _, blocks = ssta_attention(x, x, x, layout, config, text_mask=torch.tensor([[True, True, False]]), impl=impl, return_blocks=True)
    slots = int(blocks.q_offsets[..., -1].max()) if isinstance(blocks.q_offsets, torch.Tensor) else blocks.q_offsets * blocks.num_q_blocks
    long = torch.randn(1, 1, slots + 9, 16).half()
    out, lse = block_sparse_attention(long, long, long, blocks, return_lse=True, impl=impl)
    assert not out[:, :, slots:].any() and (lse[:, :, slots:] == -torch.inf).all()
    for copied in (copy.copy(blocks), copy.deepcopy(blocks), pickle.loads(pickle.dumps(blocks))):
        assert torch.equal(block_sparse_attention(long, long, long, copied, impl=impl), out)
    written = copy.deepcopy(blocks)
    written.q_lengths.zero_()
    assert not block_sparse_attention(long, long, long, written, impl=impl).any()


def test_the_specification_has_gradients_where_an_operator_runs():
    """As compilers have it, and tensors that are read with the other sign; inside of an operator autograd does not record."""
    x = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)
    leaves = [of.detach().requires_grad_() for of in torch.complex(x, -x).conj().imag]
    assert leaves[0].is_neg()
    tiles = dict(topk=1, tile_thw=(1, 2, 2), kernel_thw=(1, 1, 1))
    outs = [ssta_3d_attention(*leaves, (2, 2, 2), impl=impl, **tiles) for impl in ("reference", "torch")]
    grads = [torch.autograd.grad(out.sum(), leaves) for out in outs]
    torch.testing.assert_close(*grads)
