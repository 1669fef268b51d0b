"""Native sparse attention under fla's and tilelang's names: against float64 by loops, and what is promised beyond upstream."""

from functools import partial

import pytest
import torch
from gpu_laws import assert_never_waits_and_fits_a_cuda_graph
from token_oracle import INTERPRETED, assert_as_exact_as_torch, dense, everywhere

from ssta.interfaces import parallel_nsa, selected_attention
from ssta.interfaces.nsa import native_sparse_attention


def inputs(batch, tokens, heads, kv_heads, dim, v_dim, device, dtype=torch.float16, kv_tokens=None):
    make = partial(torch.randn, device=device, dtype=dtype)
    kv_tokens = kv_tokens or tokens
    return make(batch, tokens, heads, dim), make(batch, kv_tokens, kv_heads, dim), make(batch, kv_tokens, kv_heads, v_dim)


def visible_keys(indices, counts, block_size, heads, kv_tokens, bounds=None, whole_blocks=False):
    """bool [Hq, B * T, B * Tk] by loops over the definition; ``bounds`` are the (start, end) of sequences in a batch of one."""
    batch, tokens, kv_heads, slots = indices.shape
    visible = torch.zeros(heads, batch * tokens, batch * kv_tokens, dtype=torch.bool)
    for b in range(batch):
        for t in range(tokens):
            start, end = (0, kv_tokens) if bounds is None else next(pair for pair in bounds if pair[0] <= t < pair[1])
            place = t - start if bounds is not None else t + kv_tokens - tokens
            for h in range(kv_heads):
                limit = slots if counts is None else int(counts[b, t, h]) if isinstance(counts, torch.Tensor) else counts
                for slot in range(min(limit, slots)):
                    block = int(indices[b, t, h, slot])
                    for key in range(max(block, 0) * block_size, min((block + 1) * block_size, end - start)) if block >= 0 else ():
                        if key <= place or whole_blocks and block * block_size <= place:
                            group = heads // kv_heads
                            visible[h * group:(h + 1) * group, b * tokens + t, b * kv_tokens + start + key] = True
    return visible


CASES = {  # batch, tokens, kv_tokens, heads, kv_heads, dim, v_dim, block_size, slots, counts
    "one group": (2, 21, 21, 4, 1, 16, 16, 8, 2, None),
    "two heads, counts": (1, 40, 40, 6, 2, 32, 16, 16, 3, "tensor"),
    "int count, no pow2": (1, 19, 19, 5, 1, 24, 40, 5, 3, 2),
    "decode": (2, 3, 33, 4, 2, 16, 16, 8, 4, None),
    "group of one": (1, 12, 12, 2, 2, 16, 16, 4, 2, None),
    "whole blocks as tiles": (1, 5, 260, 4, 2, 16, 32, 64, 5, "tensor"),
}


def case(name, device):
    batch, tokens, kv_tokens, heads, kv_heads, dim, v_dim, block_size, slots, counts = CASES[name]
    q, k, v = inputs(batch, tokens, heads, kv_heads, dim, v_dim, device, kv_tokens=kv_tokens)
    # Repeated, negative, future and absurd numbers among them.
    blocks = -(-kv_tokens // block_size)
    indices = torch.randint(-1, blocks + 2, (batch, tokens, kv_heads, slots), dtype=torch.int32)
    indices[:, 1::5, :, -1] = torch.iinfo(torch.int32).max
    indices[:, 2] = -3
    if counts == "tensor":
        counts = torch.randint(0, slots + 1, (batch, tokens, kv_heads))
    return (q, k, v), indices, counts, block_size


def flat(attention):
    """``attention`` of [B, T, H, D] as one of [B * T, H, D], for the oracle."""
    def run(shapes, *tensors):
        out = attention(*(x.unflatten(0, shape) for x, shape in zip(tensors, shapes)))
        return tuple(x.flatten(0, 1) for x in out) if isinstance(out, tuple) else out.flatten(0, 1)
    return run


def check(attention, qkv, visible, scale, with_lse=True):
    shapes = [x.shape[:2] for x in qkv]
    assert_as_exact_as_torch(partial(flat(attention), shapes), *(x.flatten(0, 1) for x in qkv), visible.to(qkv[0].device), scale, with_lse)


@everywhere
@pytest.mark.parametrize("name", CASES)
def test_against_float64(device, impl, name):
    qkv, indices, counts, block_size = case(name, device)
    visible = visible_keys(indices, counts, block_size, qkv[0].shape[2], qkv[1].shape[1])
    counts = counts.to(device) if isinstance(counts, torch.Tensor) else counts
    attend = partial(selected_attention, block_indices=indices.to(device), block_counts=counts, block_size=block_size, return_lse=True,
                     impl=impl)
    check(attend, qkv, visible, qkv[0].shape[-1] ** -0.5)


@everywhere
def test_packed_sequences(device, impl):
    bounds = [(0, 9), (9, 9), (9, 26), (26, 31)]
    q, k, v = inputs(1, 31, 4, 2, 16, 16, device)
    indices = torch.randint(-1, 4, (1, 31, 2, 3))
    counts = torch.randint(1, 4, (1, 31, 2))
    visible = visible_keys(indices, counts, 8, 4, 31, [pair for pair in bounds if pair[0] < pair[1]])
    cu_seqlens = torch.tensor([0, *(end for _, end in bounds)], device=device)
    attend = partial(selected_attention, block_indices=indices.to(device), block_counts=counts.to(device), block_size=8, scale=0.3,
                     cu_seqlens=cu_seqlens, return_lse=True, impl=impl)
    check(attend, (q, k, v), visible, 0.3)


@everywhere
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.slow
def test_the_last_tokens_of_packed_sequences(device, impl, window):
    """As fla decodes: fewer queries than keys in every sequence, with a cu_seqlens for each."""
    ends, last = [9, 26, 31], [2, 5, 1]
    q, k, v = inputs(1, 31, 4, 2, 16, 16, device)
    indices = torch.randint(-1, 4, (1, 31, 2, 3), device=device)
    cu_k = torch.tensor([0, *ends], device=device)
    cu_q = torch.tensor([0, 2, 7, 8], dtype=torch.int32, device=device)
    chosen = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, last)]).to(device)
    attend = partial(parallel_nsa, block_size=8, window_size=window, impl=impl)
    everything = attend(q, k, v, block_indices=indices, cu_seqlens=cu_k)
    few = attend(q[:, chosen], k, v, block_indices=indices[:, chosen], cu_seqlens=(cu_q, cu_k))
    torch.testing.assert_close(few, everything[:, chosen], atol=2e-3, rtol=2e-3)


@everywhere
@pytest.mark.parametrize("window", [1, 2, 7, 30])
def test_window_and_gates(device, impl, window, monkeypatch):
    from ssta.interfaces import nsa as module

    monkeypatch.setattr(module, "WINDOW_BLOCK", 4)
    (q, k, v), indices, _, block_size = case("one group", device)
    g_slc, g_swa = torch.rand(2, *q.shape[:3], device=device, dtype=q.dtype)
    tokens, selected = q.shape[1], visible_keys(indices, None, block_size, 4, 21)
    same = torch.arange(2 * tokens) // tokens
    reach = torch.arange(2 * tokens)[:, None] - torch.arange(2 * tokens)
    near = (same[:, None] == same) & (reach >= 0) & (reach < window)
    # The window does not take the scale.
    gated = partial(parallel_nsa, block_indices=indices.to(device), block_size=block_size, window_size=window, g_slc=g_slc, g_swa=g_swa,
                    scale=0.4, impl=impl)
    exact = [x.double().flatten(0, 1) for x in (q, k, v)]
    truth = sum(dense(*exact, visible.to(device), scale)[0] * gate.double().flatten(0, 1)[..., None]
                for visible, scale, gate in ((selected, 0.4, g_slc), (near.expand(4, -1, -1), 0.25, g_swa)))
    torch.testing.assert_close(gated(q, k, v).flatten(0, 1).double(), truth, atol=4e-3, rtol=4e-3)


@everywhere
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.slow
def test_factory(device, impl, is_causal):
    """As tilelang's own example calls it: T as padding, sorted, int32."""
    batch, tokens, kv_heads, heads, dim, slots, block_size = 2, 24, 1, 16, 32, 1, 8
    kernel = native_sparse_attention(batch=batch, heads=heads, seq_len=tokens, dim=dim, is_causal=is_causal, block_size=block_size,
                                     groups=heads // kv_heads, selected_blocks=slots, scale=0.1)
    q, k, v = inputs(batch, tokens, heads, kv_heads, dim, dim, device)
    indices = torch.full((batch, tokens, kv_heads, slots), tokens)
    for b in range(batch):
        for t in range(tokens):
            chosen = torch.randperm(max(1, t // block_size + 1))[:slots]
            indices[b, t, 0, :len(chosen)] = chosen
    visible = visible_keys(indices, None, block_size, heads, tokens, whole_blocks=not is_causal)
    attend = partial(kernel, BlockIndices=indices.int().to(device), impl=impl)
    check(attend, (q, k, v), visible, 0.1, with_lse=False)
    # As its decode example does: the last token alone.
    last = kernel(q[:, -1:], k, v, indices[:, -1:].int().to(device), impl=impl)
    torch.testing.assert_close(last, attend(q, k, v)[:, -1:], atol=2e-3, rtol=2e-3)
    # As its examples do since its kernels take their sizes from the tensors.
    at_once = native_sparse_attention(q, k, v, indices.int().to(device), dim=dim, is_causal=is_causal, block_size=block_size,
                                      groups=heads // kv_heads, selected_blocks=slots, scale=0.1, impl=impl)
    assert torch.equal(at_once, attend(q, k, v))


@everywhere
def test_everything_selected_is_causal_attention(device, impl):
    q, k, v = inputs(1, 20, 4, 2, 16, 16, device)
    indices = torch.arange(4, device=device).flip(0).expand(1, 20, 2, 4)
    out = selected_attention(q, k, v, indices, block_size=5, impl=impl)
    heads_first = (x.transpose(1, 2).double() for x in (q, k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    assert (out.transpose(1, 2).double() - exact).abs().max() < 2e-3


@everywhere
@pytest.mark.slow
def test_same_bits_twice(device, impl):
    (q, k, v), indices, counts, block_size = case("two heads, counts", device)
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def step():
        out, lse = selected_attention(q, k, v, indices.to(device), counts.to(device), block_size, return_lse=True, impl=impl)
        return out, lse, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    for a, b in zip(step(), step()):
        assert torch.equal(a, b)


@everywhere
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_attended_to_changes_nothing(device, impl, poison):
    """A bad key and a bad query reach just the tokens that see them."""
    q, k, v = inputs(1, 16, 4, 2, 16, 16, device)
    indices = torch.zeros(1, 16, 2, 2, dtype=torch.int32, device=device)
    indices[0, :, :, 1] = -1
    indices[0, 8:, 1, 1] = 1
    clean = _grads(q, k, v, indices, impl)
    k2, v2, q2 = k.clone(), v.clone(), q.clone()
    # Head 0 never looks at block 1; of head 1, tokens 8 to 12 do not see key 13; token 4 sees keys 0 to 4.
    k2[0, 8:, 0], v2[0, 8:, 0], k2[0, 13, 1], v2[0, 13, 1], q2[0, 4, 0] = (poison,) * 5
    bad = _grads(q2, k2, v2, indices, impl)
    tokens = torch.arange(16, device=device)
    kept = torch.ones(16, 4, dtype=torch.bool, device=device)
    kept[4, 0] = False
    kept[tokens >= 13, 2:] = False
    for name in ("out", "dq"):
        torch.testing.assert_close(bad[name][0][kept], clean[name][0][kept])
    # Keys 5 to 7 and the whole of block 1 for head 0 are out of token 4's sight.
    for name in ("dk", "dv"):
        torch.testing.assert_close(bad[name][0, 5:8, 0], clean[name][0, 5:8, 0])
        assert (bad[name][0, 8:, 0] == 0).all()


def _grads(q, k, v, indices, impl):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = selected_attention(q, k, v, indices, block_size=8, impl=impl)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))))


@everywhere
def test_splits_change_nothing(device, impl):
    """A list shared by several programs, as few tokens on a large GPU have it."""
    if impl != "triton":
        return
    from ssta.interfaces.tokens.lists import Packed, lists_from_ids
    from ssta.interfaces.tokens.triton.forward import triton_token_forward

    q, k, v = (x[0] for x in inputs(1, 3, 4, 2, 16, 16, device, kv_tokens=300))
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (3, 300))
    packed = Packed(cu_q, cu_k, 3, 300)
    ids = torch.randint(-1, 40, (3, 2, 24), device=device)
    ids[1] = -1
    lists = lists_from_ids(ids, None, packed, packed.spans(), 8, impl)
    out, lse = triton_token_forward(q, k, v, lists, 0.25, splits=1)
    for splits in (2, 4, 8):
        for a, b in zip(triton_token_forward(q, k, v, lists, 0.25, splits=splits), (out, lse)):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)
    assert (out[1] == 0).all() and (lse[1] == float("-inf")).all()


@everywhere
def test_long_lists_are_split(device, impl, monkeypatch):
    """All tokens look at the first block, as at an attention sink, so that its list is split into pieces and others are not."""
    if impl != "triton":
        return
    from ssta.interfaces.tokens.lists import KeyLists
    from ssta.interfaces.tokens.triton import backward

    monkeypatch.setattr(backward, "PIECES", 4)
    monkeypatch.setattr(backward, "SHORTEST_PIECE", 4)
    q, k, v = inputs(1, 40, 4, 2, 16, 16, device)
    indices = torch.randint(-1, 5, (1, 40, 2, 2))
    indices[..., 0] = 0
    counts = torch.tensor([[40, 3, 0], [0, 21, 40]])
    pieces, slots = backward._pieces(KeyLists(None, None, torch.empty(160, dtype=torch.int32), None, counts))
    assert pieces.number.tolist() == [2, 1, 1, 1, 1, 2] and slots == 8
    attend = partial(selected_attention, block_indices=indices.to(device), block_size=8, return_lse=True, impl=impl)
    check(attend, (q, k, v), visible_keys(indices, None, 8, 4, 40), 0.25)


def test_gradients_by_differences():
    """float64 all the way: against finite differences, which share nothing with the formulas."""
    q, k, v = (x.requires_grad_() for x in inputs(1, 9, 2, 1, 4, 3, "cpu", torch.float64))
    indices = torch.randint(-1, 3, (1, 9, 1, 2))
    indices[..., 0] = 0  # an empty row's lse of -inf has no differences
    assert torch.autograd.gradcheck(partial(selected_attention, block_indices=indices, block_size=4, return_lse=True), (q, k, v))


@pytest.mark.parametrize("impl", ["torch", *(["triton"] if INTERPRETED else [])])
@pytest.mark.slow
def test_compiles_without_a_break(impl):
    (q, k, v), indices, counts, block_size = case("two heads, counts", "cpu")
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def attend(q, k, v, indices):
        return selected_attention(q * 2, k, v, indices, counts, block_size, impl=impl).float().square()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(f(q, k, v, indices).sum(), (q, k, v)) for f in (compiled, attend)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_operator_registration():
    """torch's own checks of schema, fake tensors and autograd registration."""
    from ssta.interfaces.tokens.attention import _forward
    from ssta.interfaces.tokens.lists import Packed, lists_from_ids

    q, k, v = (x[0].requires_grad_() for x in inputs(1, 12, 4, 2, 16, 8, "cpu", torch.float32))
    cu = torch.tensor([0, 12], dtype=torch.int32)
    packed = Packed(cu, cu, 12, 12)
    lists = lists_from_ids(torch.randint(-1, 3, (12, 2, 2)), None, packed, packed.spans(), 4, "torch")
    torch.library.opcheck(_forward, (q, k, v, lists.ids, lists.counts, lists.spans, *(None,) * 7, 4, 0.25, "torch"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("heads, kv_heads, dim, block_size", [(16, 1, 128, 64), (64, 4, 64, 32), (32, 2, 100, 64), (8, 1, 256, 64),
                                                              (128, 1, 128, 16), (4, 4, 128, 128)])
def test_gpu_sizes(heads, kv_heads, dim, block_size, dtype):
    q, k, v = inputs(1, 300, heads, kv_heads, dim, dim, "cuda", dtype)
    indices = torch.randint(-1, 300 // block_size + 2, (1, 300, kv_heads, 4))
    visible = visible_keys(indices, None, block_size, heads, 300)
    attend = partial(selected_attention, block_indices=indices.cuda(), block_size=block_size, return_lse=True)
    check(attend, (q, k, v), visible, dim ** -0.5)


@pytest.mark.gpu
def test_gpu_never_waits_and_fits_a_cuda_graph():
    q, k, v = (x.requires_grad_() for x in inputs(1, 500, 16, 1, 128, 128, "cuda", torch.bfloat16))
    indices = torch.randint(0, 8, (1, 500, 1, 4), device="cuda")

    def step():
        out = selected_attention(q, k, v, indices)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    assert_never_waits_and_fits_a_cuda_graph(step)
