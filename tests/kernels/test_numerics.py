"""What must not leak: NaN into gradients, half precision into sums under autocast, ids out of range into memory."""

from functools import partial

import pytest
import torch
from cases import INTERPRETED, LEVELS, OVERFLOW, everywhere, inputs, levels
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ssta import SSTAConfig, TokenLayout, ssta_attention
from ssta.kernels import BlockLists, block_sparse_attention
from ssta.kernels.reference import reference_attention


def ascending(*lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


@everywhere
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_stays_out_of_the_gradients_of_rows_that_do_not_see_it(device, impl, where):
    """Causal inside one block, where a mask and not a list keeps rows and keys apart."""
    q, k, v = inputs(1, 1, 1, 64, 64, 16, device, impl=impl)
    blocks = BlockLists.from_mask(torch.ones(4, 4, dtype=torch.bool, device=device).tril(), 16, 16)
    bad = dict(q=40, k=40, v=40)[where]
    dict(q=q, k=k, v=v)[where][:, :, bad] = float("nan")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = block_sparse_attention(*leaves, blocks, causal=True, impl=impl)
    dq, dk, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
    position = torch.arange(64, device=device)
    spoiled_rows = position == bad if where == "q" else position >= bad
    # A key is spoiled by a row that sees both it and the NaN.
    spoiled_keys = position <= bad if where == "q" else torch.ones_like(position, dtype=torch.bool)
    for gradient, spoiled in ((dq, spoiled_rows), (dk, spoiled_keys), (dv, spoiled_keys)):
        assert gradient[:, :, ~spoiled].isfinite().all()
    assert not dq[:, :, spoiled_rows].isfinite().all(-1).any(), "a row that sees a NaN must show it"


@everywhere
def test_an_empty_row_has_no_gradient_whatever_arrives_for_its_lse(device, impl):
    q, k, v = (x.requires_grad_() for x in inputs(1, 1, 1, 32, 32, 16, device, impl=impl))
    blocks = BlockLists.from_mask(torch.tensor([[True, True], [False, False]], device=device), 16, 16)
    _, lse = block_sparse_attention(q, k, v, blocks, return_lse=True, impl=impl)
    # Merging two empty rows: the derivative of logaddexp(-inf, -inf) is NaN.
    torch.logaddexp(lse, torch.full_like(lse, float("-inf"))).sum().backward()
    for x in (q, k, v):
        assert x.grad.isfinite().all()
    assert not q.grad[:, :, 16:].any() and q.grad[:, :, :16].any()


@everywhere
def test_ids_out_of_range_are_absent(device, impl):
    q, k, v = (x.requires_grad_() for x in inputs(1, 1, 1, 64, 64, 16, device, impl=impl))
    ids = torch.tensor([[0, -1], [1, 2], [3, -1], [2, 9]], device=device)
    kept = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 1, 0]], dtype=torch.bool, device=device)
    lists, clean = BlockLists.from_topk(ids, 16, 16, num_kv_blocks=4), BlockLists.from_mask(kept, 16, 16)
    assert torch.equal(lists.to_mask()[0, 0], kept) and lists.density() == 5 / 16
    for name in (impl, "reference"):
        a, b = (block_sparse_attention(q, k, v, blocks, impl=name) for blocks in (lists, clean))
        assert torch.equal(a, b)
        for x, y in zip(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (a, b))):
            assert torch.equal(x, y)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_autocast_casts_the_inputs_and_nothing_inside(impl):
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 1, 64, 64, 16, dtype=torch.float32))
    blocks = BlockLists.from_mask(torch.rand(4, 4) < 0.6, 16, 16)
    attend = partial(block_sparse_attention, blocks=blocks, return_lse=True, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attend(q, k, v)
    expected, expected_lse = attend(*(x.bfloat16() for x in (q, k, v)))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact = reference_attention(q.double(), k.double(), v.double(), blocks, 0.25)
    assert exact[0].dtype == exact[1].dtype == torch.float64


def test_ssta_under_autocast_takes_mixed_dtypes_like_sdpa():
    q, k, v = torch.randn(3, 1, 2, 60, 16).unbind()
    layout, config = TokenLayout.video_text((3, 4, 4), 12), SSTAConfig(tile_thw=(2, 2, 2), topk=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ssta_attention(q, k, v.bfloat16(), layout, config)
    assert torch.equal(out, ssta_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), layout, config))


def test_flex_attention_sees_the_same_blocks_without_torch_compile():
    q, k, v = inputs(1, 2, 2, 200, 330, 16, dtype=torch.float32)
    blocks = BlockLists.from_mask(torch.rand(1, 2, 4, 3) < 0.5, 64, 128)
    block_mask = blocks.to_block_mask(200, 330)
    out = flex_attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(out, block_sparse_attention(q, k, v, blocks), rtol=1e-4, atol=1e-5)
    assert torch.equal(BlockLists.from_block_mask(block_mask).to_mask(), blocks.to_mask())


def test_a_flex_mask_whose_blocks_only_the_sequence_cuts_is_whole():
    kept = torch.rand(4, 3) < 0.5
    block_mask = create_block_mask(lambda b, h, i, j: kept[i // 64, j // 128], 1, 2, 200, 330, device="cpu", BLOCK_SIZE=(64, 128))
    assert torch.equal(BlockLists.from_block_mask(block_mask).to_mask()[0, 0], kept)
    with pytest.raises(TypeError, match="block_mask must be a BlockMask, got str"):
        BlockLists.from_block_mask("causal")


@pytest.mark.parametrize("fields, error, message", [
    (dict(max_q_length=0), ValueError, "max_q_length must be at least 1, got 0"),
    (dict(max_kv_length=1.5), TypeError, r"max_kv_length must be an int, got 1.5 \(float\)"),
    (dict(num_kv_blocks="4"), TypeError, r"num_kv_blocks must be an int, got '4' \(str\)"),
    (dict(q_offsets=ascending(8, 8), q_lengths=torch.ones(1, 4, 2, dtype=torch.int32)), None, None),
    (dict(q_offsets=ascending(8, 8).expand(1, 2, 3), q_lengths=torch.ones(1, 4, 2, dtype=torch.int32)), ValueError,
     "q_lengths must have q_offsets' batch and heads"),
])
def test_lists_with_fields_that_do_not_fit(fields, error, message):
    def build():
        return BlockLists(**(dict(counts=torch.ones(1, 4, 2, dtype=torch.int32), indices=torch.zeros(1, 4, 2, 1, dtype=torch.int32),
                                  q_offsets=8, kv_offsets=8) | fields))

    if error is None:
        build()
        return
    with pytest.raises(error, match=message):
        build()


def test_checked_lists_notice_a_bound_that_is_too_small():
    mask = torch.ones(2, 2, dtype=torch.bool)
    short = BlockLists.from_mask(mask, ascending(40, 24), 32, max_q_length=16)
    with pytest.raises(ValueError, match="max_q_length must be at least the longest block's 40 tokens, got 16"):
        short.check_values(64, 64)


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU, so Triton's interpreter is off")
def test_the_interpreter_refuses_bfloat16():
    q, k, v = inputs(1, 1, 1, 32, 32, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="impl='triton' requires float16 in Triton's interpreter, got torch.bfloat16"):
        block_sparse_attention(q, k, v, BlockLists.from_mask(torch.ones(2, 2, dtype=torch.bool), 16, 16), impl="triton")


# In the interpreter float32 stands for bfloat16, which it refuses, where the public call would refuse float32.
portable = pytest.mark.parametrize("device, dtype", ([pytest.param("cpu", torch.float32, id="interpreter")] if INTERPRETED else []) + [
    pytest.param("cuda", torch.bfloat16, id="gpu", marks=pytest.mark.gpu)])


@pytest.fixture
def walks(monkeypatch):
    """Of each program of the portable forward that walked over its list, in the interpreter, whether it was for the second time."""
    forward, found = pytest.importorskip("ssta.kernels.portable.forward"), []
    if INTERPRETED:
        monkeypatch.setattr(forward, "_walk", lambda *args, walk=forward._walk: (found.append(args[0] is not None), walk(*args))[1])
    return found


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@portable
@pytest.mark.parametrize("name", LEVELS)
def test_scores_far_above_those_of_the_first_chunk(device, dtype, name, walks):
    """Only where weights overflow is a list walked twice, and nothing is lost then; nor in rows of low scores."""
    from ssta.kernels.portable.forward import triton_forward

    q, k, v, blocks = levels(*LEVELS[name], device=device, dtype=dtype)
    found = triton_forward(q, k, v, blocks, 0.125, False)
    exact = reference_attention(q.double(), k.double(), v.double(), blocks, 0.125)
    for got, right, tolerance in zip(found, exact, (2e-2 if dtype == torch.bfloat16 else 5e-3, 1e-4)):
        torch.testing.assert_close(got.double(), right, rtol=tolerance, atol=tolerance)
    # Partial chunks come last, and there every row follows its scores.
    assert device != "cpu" or any(walks) == (name in OVERFLOW and name != "three at the end")


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@portable
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("factor", [1e4, float("nan"), float("inf")])
def test_a_row_that_overflows_changes_no_bits_of_its_neighbours(device, dtype, factor, causal, walks):
    from ssta.kernels.portable.forward import triton_forward

    q, k, v, blocks = levels(*((64, i % 4 * 20) for i in range(8)), device=device, dtype=dtype)
    before, _ = triton_forward(q, k, v, blocks, 0.125, causal)
    assert not any(walks)
    q[:, :, 70] *= factor
    after, _ = triton_forward(q, k, v, blocks, 0.125, causal)
    others = torch.arange(200, device=device) != 70
    assert torch.equal(after[:, :, others], before[:, :, others]) and after[:, :, 70].isnan().any() == (factor != 1e4)
    assert device != "cpu" or any(walks)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@portable
def test_large_values_overflow_before_their_weights_do(device, dtype):
    from ssta.kernels.portable.forward import triton_forward

    q, k, v, blocks = levels((128, 0), (384, 50), device=device, dtype=dtype)
    out, lse = triton_forward(q, k, v * 1e28, blocks, 0.125, False)
    exact, exact_lse = reference_attention(q.double(), k.double(), v.double(), blocks, 0.125)
    torch.testing.assert_close(out.double() / 1e28, exact, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
