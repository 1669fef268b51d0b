"""The compressed branch of native sparse attention and the selection by it, against loops over the definition in float64."""


import pytest
import torch
from gpu_laws import assert_never_waits_and_fits_a_cuda_graph
from token_oracle import INTERPRETED, assert_as_exact_as_torch, dense

from ssta.interfaces import nsa as module
from ssta.interfaces import parallel_nsa, parallel_nsa_compression, parallel_nsa_topk, selected_attention

IMPLEMENTATIONS = [pytest.param("cpu", "torch", id="torch"), pytest.param("cuda", "triton", id="gpu-triton", marks=pytest.mark.gpu)]
everywhere = pytest.mark.parametrize("device, impl", IMPLEMENTATIONS)
# (batch, ends of the sequences' keys, how many last tokens of each are queries), blocks of 4.
LAYOUTS = {"batch": (2, [40], [40]), "batch, short tail": (2, [38], [38]), "decoding": (2, [40], [3]),
           "packed": (1, [13, 14, 40], [13, 1, 26]), "the last of packed": (1, [13, 14, 40], [2, 1, 9])}
SIZE = 4


def case(name, device, dtype=torch.float16):
    """(q, k, v, cu_seqlens, places): places are (sequence's first key, token's position in it) of each query of a batch element."""
    batch, ends, last = LAYOUTS[name]
    q = torch.randn(batch, sum(last), 4, 16, device=device, dtype=dtype)
    k, v = torch.randn(2, batch, ends[-1], 2, 16, device=device, dtype=dtype).unbind()
    starts = [0, *ends[:-1]]
    places = [(start, end - start - n + i) for start, end, n in zip(starts, ends, last) for i in range(n)]
    cu_seqlens = None
    if len(ends) > 1:
        cu_q, cu_k = (torch.tensor([0, *x], dtype=torch.int32, device=device).cumsum(0) for x in (last, torch.tensor([0, *ends]).diff()))
        cu_seqlens = cu_k if cu_q[-1] == cu_k[-1] else (cu_q, cu_k)
    return q, k, v, cu_seqlens, places


def means(x, name):
    """[B, blocks, H, D]: the mean of every block of x [B, T, H, D], short ones too; differentiable."""
    starts, ends = [0, *LAYOUTS[name][1][:-1]], LAYOUTS[name][1]
    return torch.cat([x[:, i:min(i + SIZE, end)].mean(1, keepdim=True) for start, end in zip(starts, ends)
                      for i in range(start, end, SIZE)], 1)


def first_block(name, start):
    """Where the blocks of the sequence that begins at key ``start`` begin."""
    starts, ends = [0, *LAYOUTS[name][1][:-1]], LAYOUTS[name][1]
    return sum(-(-(b - a) // SIZE) for a, b in zip(starts, ends) if a < start)


def visible_blocks(name, places, blocks):
    """bool [T, blocks]: those that end at the token or before."""
    seen = torch.zeros(len(places), blocks, dtype=torch.bool)
    for t, (start, position) in enumerate(places):
        first = first_block(name, start)
        seen[t, first:first + (position + 1) // SIZE] = True
    return seen


@pytest.mark.parametrize("device, impl", IMPLEMENTATIONS + INTERPRETED)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.slow
def test_attention_to_blocks(device, impl, name, monkeypatch):
    monkeypatch.setattr(module, "MEANS_AT_ONCE", 2)
    q, k, v, cu_seqlens, places = case(name, device)
    k, v = means(k, name), means(v, name)
    batch, blocks = k.shape[:2]
    seen = visible_blocks(name, places, blocks).to(device)
    visible = torch.block_diag(*[seen.float()] * batch).bool().expand(4, -1, -1)

    def attend(q, k, v):
        tensors = (x.unflatten(0, (batch, -1)) for x in (q, k, v))
        out, lse = parallel_nsa_compression(*tensors, LAYOUTS[name][1][-1], SIZE, 0.3, cu_seqlens, impl=impl)
        lse = lse.flatten(0, 1)
        unseen = ~visible[0].any(-1)
        assert (lse[unseen] == 0).all()
        return out.flatten(0, 1), lse.masked_fill(unseen[:, None], float("-inf"))

    assert_as_exact_as_torch(attend, *(x.flatten(0, 1) for x in (q, k, v)), visible, 0.3, with_lse=True)


def choice(q, k, name, places, count, scale):
    """[B, T, H, count] of lists, by the definition: importance in float64, the forced ones first, and the lowest number of equal ones."""
    chosen = torch.full((*q.shape[:2], k.shape[2], count), -1)
    for b in range(q.shape[0]):
        for t, (start, position) in enumerate(places):
            first, own = first_block(name, start), position // SIZE
            for h in range(k.shape[2]):
                over = range((position + 1) // SIZE)
                scores = torch.stack([q[b, t, 2 * h:2 * h + 2].double() @ k[b, first + n, h].double() * scale for n in over]) \
                    if over else torch.zeros(0, 2)
                importance = scores.softmax(0).sum(1)
                rank = sorted(range(own + 1), key=lambda n: (-9.0 if n in (0, own, own - 1) else -importance[n].item(), n))
                chosen[b, t, h, :min(count, own + 1)] = torch.tensor(rank[:count])
    return chosen


INTERPRETED_CASES = [(*case.values, name, 5) for case in INTERPRETED for name in ("decoding", "packed")]


@pytest.mark.parametrize("device, impl, name, count", INTERPRETED_CASES)
@pytest.mark.slow
def test_selection_interpreted(device, impl, name, count, monkeypatch):
    test_selection(device, impl, name, count, monkeypatch)


@everywhere
@pytest.mark.parametrize("count", [1, 3, 5, 20])
@pytest.mark.parametrize("name", LAYOUTS)
def test_selection(device, impl, name, count, monkeypatch):
    monkeypatch.setattr(module, "CHOICE_ELEMENTS", 4 * 11 * 7)  # seven or fourteen tokens at a time
    q, k, v, cu_seqlens, places = case(name, device, torch.float32 if impl == "torch" else torch.float16)
    k, v = means(k, name), means(v, name)
    arguments = dict(TK=LAYOUTS[name][1][-1], block_size=SIZE, scale=0.5, cu_seqlens=cu_seqlens, impl=impl)
    truth = choice(q, k, name, places, count, 0.5)
    lse = parallel_nsa_compression(q, k, v, **arguments)[1]
    for given in (None, lse):
        chosen = parallel_nsa_topk(q, k, lse=given, block_counts=count, **arguments)
        assert chosen.dtype == torch.int32 and torch.equal(chosen.long().cpu(), truth)
    counts = torch.randint(0, count + 1, truth.shape[:3])
    counts[0, 0, 0] = count
    chosen = parallel_nsa_topk(q, k, lse=None, block_counts=counts.to(device), **arguments)
    assert torch.equal(chosen.long().cpu(), truth.masked_fill(torch.arange(count) >= counts[..., None], -1))


def test_equal_blocks_are_taken_in_order():
    q, k = torch.randn(1, 32, 4, 16), torch.zeros(1, 8, 2, 16)
    assert parallel_nsa_topk(q, k, 32, None, 5, 4)[0, 31, 0].tolist() == [0, 6, 7, 1, 2]


@everywhere
def test_a_bad_block_does_not_displace_what_every_token_takes(device, impl):
    q, k = torch.randn(1, 32, 4, 16, device=device).half(), torch.randn(1, 8, 2, 16, device=device).half()
    k[0, 3, 0] = float("nan")
    chosen = parallel_nsa_topk(q, k, 32, None, 4, 4, impl=impl)
    assert (chosen[0, 20:, 0, :3] == torch.stack([torch.zeros(12), torch.arange(20, 32) // 4 - 1, torch.arange(20, 32) // 4], 1
                                                 ).to(chosen)).all()
    assert torch.equal(chosen[0, :, 1], parallel_nsa_topk(q, k.nan_to_num(), 32, None, 4, 4, impl=impl)[0, :, 1])


@everywhere
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_gated_branch_of_the_whole(device, impl, name):
    """In parallel_nsa, which makes the means; its gradients reach keys and values through them."""
    q, k, v, cu_seqlens, places = case(name, device)
    gate = torch.rand(q.shape[:3], device=device, dtype=q.dtype)
    nothing = torch.full((*q.shape[:2], 2, 1), -1, device=device)
    tensors = [x.detach().requires_grad_() for x in (q, k, v)]
    out = parallel_nsa(*tensors, g_cmp=gate, block_indices=nothing, block_size=SIZE, cu_seqlens=cu_seqlens, impl=impl)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    keys, values = (means(x, name) for x in exact[1:])
    seen = visible_blocks(name, places, keys.shape[1]).to(device).expand(4, -1, -1)
    truth = torch.stack([dense(exact[0][b], keys[b], values[b], seen, 0.25)[0] for b in range(q.shape[0])]) * gate[..., None]
    torch.testing.assert_close(out.double(), truth, atol=2e-3, rtol=4e-3)
    dout = torch.randn_like(out)
    for got, wanted in zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(truth, exact, dout.double())):
        torch.testing.assert_close(got.double(), wanted, atol=4e-3, rtol=4e-3)


@everywhere
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_whole_selects_by_itself(device, impl, gated, name):
    """What parallel_nsa selects is what the loops select, and what it then does is selected attention."""
    q, k, v, cu_seqlens, places = case(name, device, torch.float32 if impl == "torch" else torch.float16)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    g_cmp, g_slc, g_swa = torch.rand(3, *q.shape[:3], device=device, dtype=q.dtype).unbind()
    indices = choice(q.detach(), means(k.detach(), name), name, places, 5, 0.25)[:, :, :, :4].to(device)
    options = dict(block_size=SIZE, cu_seqlens=cu_seqlens, impl=impl)
    gates = dict(g_cmp=g_cmp if gated else None, g_slc=g_slc, g_swa=g_swa, window_size=0)
    alone = parallel_nsa(q, k, v, **gates, block_counts=4, **options)
    told = parallel_nsa(q, k, v, **gates, block_indices=indices, **options)
    # Means in float16 may order two near blocks otherwise; in float32 they do not here.
    same = (alone == told).flatten(2).all(-1)
    assert same.all() if impl == "torch" else same.float().mean() > 0.8
    if not gated:
        assert torch.equal(told, selected_attention(q, k, v, indices, **options) * g_slc[..., None])
    assert all(x.isfinite().all() for x in torch.autograd.grad(alone.sum(), (q, k, v)))


def test_a_chosen_implementation_runs_the_selection_too(monkeypatch):
    asked, resolve = [], module.choose_token_impl
    monkeypatch.setattr(module, "choose_token_impl", lambda impl, *facts: asked.append(impl) or resolve(impl, *facts))
    q, k, v = (torch.randn(1, 20, heads, 8) for heads in (2, 1, 1))
    parallel_nsa(q, k, v, block_counts=2, block_size=4, impl="torch")
    assert asked and set(asked) == {"torch"}


def test_sixteen_blocks_unless_told_otherwise():
    q, k, v = torch.randn(3, 1, 80, 2, 16).unbind()
    counted = [parallel_nsa(q, k, v, block_size=4, block_counts=count) for count in (None, 16, 15)]
    assert torch.equal(counted[0], counted[1]) and not torch.equal(counted[0], counted[2])


@pytest.mark.gpu
@pytest.mark.parametrize("heads, kv_heads, dim", [(16, 1, 128), (64, 4, 64), (6, 2, 100), (4, 4, 256), (256, 1, 32)])
def test_gpu_sizes(heads, kv_heads, dim):
    """The kernel against plain torch on the same inputs, of any groups and head dimensions; near blocks may change places."""
    q, k = (torch.randn(2, n, h, dim, device="cuda", dtype=torch.bfloat16) for n, h in ((900, heads), (57, kv_heads)))
    chosen, plain = (parallel_nsa_topk(q, k, 900, None, 9, 16, impl=impl) for impl in ("triton", "torch"))
    assert torch.equal(chosen[..., :3], plain[..., :3])
    assert (chosen.sort(-1).values == plain.sort(-1).values).all(-1).float().mean() > 0.98


@pytest.mark.gpu
def test_gpu_never_waits_and_fits_a_cuda_graph():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 500, 16, 64, device="cuda", dtype=torch.bfloat16).unbind())
    gate = torch.rand(1, 500, 16, device="cuda", dtype=torch.bfloat16)

    def step():
        out = parallel_nsa(q, k, v, g_cmp=gate, block_size=32)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    assert_never_waits_and_fits_a_cuda_graph(step)


@pytest.mark.parametrize("changes, error, message", [
    (dict(TK=0), ValueError, "TK must be at least 1, got 0"),
    (dict(TK=33), ValueError, r"k must have ceil\(TK / block_size\) = 9 blocks, got 8"),
    (dict(block_size=0), ValueError, "block_size must be at least 1, got 0"),
    (dict(lse=torch.zeros(1, 32, 2)), ValueError, r"lse must be \[B, T, HQ\] = \[1, 32, 4\]"),
    (dict(block_counts=0), ValueError, "block_counts must be at least 1, got 0"),
    (dict(block_counts=torch.zeros(1, 32, 4, dtype=torch.int32)), ValueError, r"block_counts must be \[B, T, H\] = \[1, 32, 2\]"),
    (dict(scale=-1.0), ValueError, "scale must be positive and finite"),
    (dict(q=torch.randn(1, 40, 4, 16)), ValueError, "k must have at least q's 40 tokens, got 32"),
    (dict(k=torch.randn(2, 8, 2, 16)), ValueError, "k must have q's batch 1, got 2"),
])
def test_refuses(changes, error, message):
    arguments = dict(q=torch.randn(1, 32, 4, 16), k=torch.randn(1, 8, 2, 16), TK=32, lse=None, block_counts=3, block_size=4)
    with pytest.raises(error, match=message):
        parallel_nsa_topk(**(arguments | changes))


def test_forward_under_its_own_name():
    from ssta.interfaces import parallel_nsa_fwd

    q, k, v, cu_seqlens, _ = case("the last of packed", "cpu", torch.float32)
    indices = torch.randint(-1, 4, (*q.shape[:2], 2, 3))
    wanted = selected_attention(q, k, v, indices, block_size=SIZE, cu_seqlens=cu_seqlens, return_lse=True)
    for got, want in zip(parallel_nsa_fwd(q, k, v, indices, 3, SIZE, None, *cu_seqlens), wanted):
        assert torch.equal(got, want)
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_k must be given together"):
        parallel_nsa_fwd(q, k, v, indices, 3, SIZE, None, cu_seqlens[0])
