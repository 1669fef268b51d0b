"""cuDNN's kernels as an implementation: blocks in slots and lists of slots against float64, what is refused and why, and the self-check.

On a CPU the package is a stand-in in plain torch that checks its documented contract; on a GPU it is itself.
"""

from importlib.metadata import PackageNotFoundError, version
from itertools import product

import cudnn_stand_in
import pytest
import torch
from cases import dq_patterns, inputs, patterns, ragged
from gpu_laws import assert_never_waits_and_fits_a_cuda_graph
from oracles import assert_as_exact_as_torch

from ssta import SSTAConfig, TokenLayout, VideoGrid, explain, ssta_attention
from ssta.kernels import BlockLists, PatternFacts, block_sparse_attention
from ssta.kernels.cudnn import check as cudnn_check
from ssta.kernels.cudnn import package
from ssta.kernels.op import RecordedAttention
from ssta.kernels.routing import LONG_BLOCKS, Problem, Route, Where, decide

GPU = torch.device("cuda", 0)
# Short, so that short blocks have several.
SLOTS = (16, 32)
DIRECT = Route("cudnn", "cudnn", (), "cpu")


def _missing():
    try:
        version(package.PACKAGE)
    except PackageNotFoundError:
        return True
    return False


needs_package = pytest.mark.skipif(_missing(), reason=f"{package.PACKAGE} is not installed: {package.INSTALL}")


def attention(blocks, scale, route=DIRECT):
    pytest.importorskip("triton")
    return lambda q, k, v: RecordedAttention.apply(q, k, v, blocks, scale, False, False, route)


def of_own_keys(blocks, heads, kv_heads, *rest):
    """The pattern with as many key heads as query heads, which the backward wants."""
    own = max([1, *(x.shape[1] for x in blocks._tensors().values())])
    return blocks, max(own, kv_heads), max(own, kv_heads), *rest


@pytest.fixture
def stand_in(monkeypatch):
    cudnn_stand_in.install(monkeypatch, SLOTS)


@pytest.mark.parametrize("name", [name for name in patterns("cpu") if name != "offsets per key head"])
@pytest.mark.slow
def test_all_patterns_are_as_exact_as_torch(name, stand_in):
    """Also the gradient of lse, rows without lists, blocks of no tokens, and key lengths of each batch element."""
    blocks, heads, _, q_len, kv_len = of_own_keys(*patterns("cpu")[name])
    q, k, v = inputs(2, heads, heads, q_len, kv_len, 16)
    assert PatternFacts.of(blocks).shared
    assert_as_exact_as_torch(attention(blocks, 0.25), q, k, v, blocks, 0.25)


def test_several_query_heads_to_a_key_head(stand_in):
    blocks = BlockLists.from_mask(torch.rand(4, 3, 2) < 0.7, ragged([40, 3, 21], "cpu"), ragged([33, 20], "cpu"))
    q, k, v = inputs(1, 4, 2, 64, 53, 16)
    out, lse = DIRECT.run(q, k, v, blocks, 0.25)
    expected, expected_lse = block_sparse_attention(q, k, v, blocks, scale=0.25, return_lse=True, impl="reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-5)
    assert out.stride() == q.stride()


@pytest.mark.parametrize("block", [20, 32])
def test_a_gradient_that_is_one_number_for_all(block, stand_in):
    """As of a sum, whose strides are zero."""
    blocks = BlockLists.from_mask(torch.ones(-(-64 // block), -(-64 // block), dtype=torch.bool), block, block)
    q, k, v = (x.requires_grad_() for x in inputs(1, 1, 1, 64, 64, 16))
    out, _ = attention(blocks, 0.25)(q, k, v)
    one, ones = torch.ones((), dtype=out.dtype), torch.ones_like(out)
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for dout in (one.expand(out.shape), ones))):
        assert torch.equal(a, b) and a.isfinite().all()


@pytest.mark.parametrize("block", [32, 40])
def test_a_gradient_of_lse_is_folded_into_the_results(block):
    """sum(dout * out) is less by it, also where dout is zero or tiny; dout itself stays, but for what cannot be seen."""
    slots = pytest.importorskip("ssta.kernels.cudnn.slots")
    q, _, _ = inputs(2, 2, 2, 96, 96, 16)
    out, dout, lse, dlse = torch.randn(2, 2, 96, 16), torch.randn(2, 2, 96, 16), torch.randn(2, 2, 96), torch.randn(2, 2, 96)
    dout[:, :, ::3], dout[:, :, 1::3], dlse[:, :, ::6] = 0, dout[:, :, 1::3] * 1e-6, 0
    rows = slots.slot_lists(BlockLists.from_mask(torch.ones(-(-96 // block), 1, dtype=torch.bool), block, 96), q, q, 32).rows
    out_, dout_, lse_ = rows.fill_results(out, dout, lse, dlse)
    assert torch.equal(rows.empty(lse_[..., None], lse[..., None])[..., 0], lse)
    out_, dout_ = rows.empty(out_, out), rows.empty(dout_, dout)
    torch.testing.assert_close((out_ * dout_).sum(-1), (out * dout).sum(-1) - dlse, rtol=1e-5, atol=1e-5)
    assert ((dout_ - dout).norm(dim=-1) <= 2.0 ** -29 * dlse.abs()).all()


def test_what_lies_in_slots_is_not_copied(stand_in):
    slots = pytest.importorskip("ssta.kernels.cudnn.slots")
    # At multiples of 128 bytes, as a GPU's memory is.
    room = torch.randn(2 * 96 * 16 + 2 * 64 * 16 + 64, dtype=torch.float16)
    room = room[-room.data_ptr() % 128 // 2:]
    q, k = room[:2 * 96 * 16].view(1, 2, 96, 16), room[2 * 96 * 16:][:2 * 64 * 16].view(1, 2, 64, 16)
    lists = slots.slot_lists(BlockLists.from_mask(torch.tensor([[True, True], [False, True]]), 64, 32), q, k, 32)
    assert lists.rows.fill(q) is q and lists.items.fill(k) is k and lists.rows.empty(k, k) is k
    assert lists.counts[0].tolist() == [[2, 2, 1]] * 2 and lists.sizes.tolist() == [32, 32]
    assert lists.indices[0, 0].tolist()[:2] == [[0, 1], [0, 1]] and lists.indices[0, 0, 2, 0] == 1
    for crooked in (torch.randn(1, 2, 96, 18, dtype=torch.float16)[..., :16], room[8:][:2 * 96 * 16].view(1, 2, 96, 16)):
        assert lists.rows.fill(crooked) is not crooked and torch.equal(lists.rows.fill(crooked), crooked)


# What is refused, and why: (what is changed, the reason).
REFUSED = [
    (dict(capability=(8, 9)), "requires a GPU of sm_90, 100, 103, 110, 120, got sm_89"),
    (dict(capability=None), "requires a GPU of sm_.*, got a GPU that is not NVIDIA's"),
    (dict(installed=None), r"requires nvidia-cudnn-frontend, which is not installed: pip install 'nvidia-cudnn-frontend\[cutedsl\]==1.32"),
    (dict(dim=80), "requires float16 or bfloat16 and a head_dim of 64, 96 or 128 on sm_100 in blocks of 128, got torch.bfloat16 and 80"),
    (dict(dim=64, facts=dict(max_q_length=64, max_kv_length=64)), "a head_dim of 128 on sm_100 in blocks of 64, got torch.bfloat16 and 64"),
    (dict(capability=(12, 0), dim=64), "a head_dim of 128 on sm_120"),
    (dict(heads=8, facts=dict(max_q_length=64, max_kv_length=64)), "as many key heads as query heads in blocks of 64, got 4 and 8"),
    (dict(causal=True), "has no causal mask"),
    (dict(facts=dict(shared=False)), "requires key blocks that lie at the same tokens for all heads"),
]
SUITS_NOT = [
    (dict(capability=(9, 0)), "is slower than this package's own kernels on a Hopper GPU"),
    (dict(installed="1.33.0"), "was checked in 1.32.0, got 1.33.0"),
    (dict(facts=dict(max_q_length=32)), "pays from blocks of 64 tokens on, got 32"),
    (dict(said="failed its self-check: off"), "failed its self-check: off"),
]
BACKWARD = [
    (dict(), None),
    (dict(deterministic=True), "adds gradients up in no fixed order, against deterministic=True"),
    (dict(dtype=torch.float16), "has a backward for bfloat16 and a head_dim of 64 or 128 on sm_100, got torch.float16 and 128"),
    (dict(dim=96), "got torch.bfloat16 and 96"),
    (dict(heads=8), "has a backward for as many key heads as query heads, got 4 and 8"),
    (dict(capability=(12, 0)), "has no backward for partial blocks on sm_120"),
    (dict(capability=(11, 0)), "has no backward for partial blocks on sm_110"),
]


@pytest.fixture
def route(monkeypatch):
    """A route on a GPU that is not there, with the package or without."""
    pytest.importorskip("triton")

    def choose(impl="auto", capability=(10, 0), dtype=torch.bfloat16, dim=128, heads=4, causal=False, deterministic=False,
               installed="1.32.0", said=None, facts=None):
        monkeypatch.setattr(package, "installed", lambda name: installed)
        # As after a self-check of such tensors.
        for kind in product((64, 128), (False, True), (False, True)):
            monkeypatch.setitem(cudnn_check._verdicts, (capability, dtype, dim, *kind), cudnn_check.Verdict(said, "its self-check passed"))
        where = Where("cuda", capability, False, dtype, dim)
        return decide(impl, Problem(where, heads, 4, causal, LONG_BLOCKS._replace(**facts or {}), deterministic))

    return choose


@pytest.mark.parametrize("changed, reason", REFUSED)
def test_what_it_cannot_do_is_refused_with_a_reason(changed, reason, route):
    with pytest.raises(ValueError, match=f"impl='cudnn' .*{reason}"):
        route("cudnn", **changed)
    assert route(**changed).name in ("hopper", "triton")


@pytest.mark.parametrize("changed, reason", SUITS_NOT)
def test_where_auto_leaves_it(changed, reason, route):
    """An explicit choice does not."""
    if changed.get("capability") == (9, 0):
        changed = changed | dict(dim=96)  # for which there is no kernel in Gluon
    taken = route(**changed)
    assert taken.name == taken.backward == "triton" and dict(taken.rejected)["cudnn"] == reason
    assert f"not 'cudnn', which {reason}" in taken.explain()
    assert route("cudnn", **changed).name == "cudnn"


@pytest.mark.parametrize("changed, reason", BACKWARD)
def test_whose_backward_runs(changed, reason, route):
    taken = route(**changed)
    assert taken.name == "cudnn" and taken.rejected[0][0] == "hopper"
    assert "'cudnn': nvidia-cudnn-frontend 1.32.0, its self-check passed" in taken.explain()
    assert taken.backward == ("cudnn" if reason is None else "triton") and not taken.in_place and not taken.takes_deterministic
    assert [of for of, _ in taken.backward_rejected] == ([] if reason is None else ["cudnn"])
    if reason:
        assert taken.backward_rejected[0][1].endswith(reason)


@pytest.mark.slow
def test_the_self_check_sees_what_is_wrong(monkeypatch):
    """A list that is cut short in one row, a package that does not load; and passes what is right."""
    pytest.importorskip("triton")

    def verdict(**options):
        cudnn_stand_in.install(monkeypatch, SLOTS, **options)
        return cudnn_check._verdict(torch.device("cpu"), torch.float16, 16, 32, False, not options)

    passed = verdict()
    assert passed.why_not is None and "of out, lse, dq, dk, dv, the token furthest off" in passed.said

    def one_row(out, lse):
        out[:, :, 5] *= 0.9
        return out, lse

    assert "failed its self-check: off by more than" in verdict(spoil=one_row).why_not
    assert "out by inf" in verdict(spoil=lambda out, lse: (out * torch.nan, lse)).why_not

    def broken(*results):
        raise RuntimeError("no kernel image\nis available")

    assert verdict(spoil=broken).why_not == "failed its self-check: RuntimeError: no kernel image"


def test_a_self_check_is_run_once_and_not_while_a_graph_is_recorded(monkeypatch):
    calls = []
    monkeypatch.setattr(cudnn_check, "_verdicts", {})
    monkeypatch.setattr(cudnn_check, "_gpu", lambda capability: GPU)
    monkeypatch.setattr(cudnn_check, "_verdict", lambda *kind: calls.append(kind) or cudnn_check.Verdict(None))
    kind = (10, 0), torch.bfloat16, 128, 128, False, True
    monkeypatch.setattr(cudnn_check, "captured", lambda: True)
    assert "while a graph is recorded" in cudnn_check.self_check(*kind).why_not and not calls
    monkeypatch.setattr(cudnn_check, "captured", lambda: False)
    assert cudnn_check.self_check(*kind).why_not is cudnn_check.self_check(*kind).why_not is None and len(calls) == 1


# With the package itself, on a GPU that it has kernels for.

@needs_package
@pytest.mark.gpu
@pytest.mark.parametrize("dim, dtype", [(128, torch.bfloat16), (64, torch.float16)])
@pytest.mark.parametrize("name", dq_patterns("cpu"))
def test_it_is_as_exact_as_torch(name, dim, dtype):
    blocks, heads, _, q_len, kv_len = of_own_keys(*dq_patterns("cuda")[name])
    q, k, v = inputs(2, heads, heads, q_len, kv_len, dim, "cuda", dtype)

    def attend(q, k, v):
        return block_sparse_attention(q, k, v, blocks, return_lse=True, deterministic=False, impl="cudnn")

    assert_as_exact_as_torch(attend, q, k, v, blocks, block=64)


@needs_package
@pytest.mark.gpu
@pytest.mark.parametrize("block", [64, 128])
def test_its_self_check_passes_and_says_so(block):
    for dtype, backward in ((torch.bfloat16, True), (torch.float16, False)):
        for grouped in (False, not backward):
            verdict = cudnn_check.self_check(torch.cuda.get_device_capability(), dtype, 128, block, grouped, backward)
            assert verdict.why_not is None, verdict.why_not


@needs_package
@pytest.mark.gpu
def test_it_never_waits_and_fits_a_cuda_graph():
    """Ragged blocks; the forward's bits are the same every time, the backward's are not."""
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, 470, 470, 128, "cuda", torch.bfloat16))
    blocks = BlockLists.from_mask(torch.rand(1, 2, 4, 4, device="cuda") < 0.7, *[ragged([128, 17, 200, 125], "cuda")] * 2,
                                  max_q_length=200, max_kv_length=200)

    def forward():
        return block_sparse_attention(q.detach(), k.detach(), v.detach(), blocks, return_lse=True, impl="cudnn")

    def backward():
        out = block_sparse_attention(q, k, v, blocks, deterministic=False, impl="cudnn")
        return [torch.zeros_like(x) for x in torch.autograd.grad(out.sum(), (q, k, v))]

    assert_never_waits_and_fits_a_cuda_graph(forward)
    assert_never_waits_and_fits_a_cuda_graph(backward)


@needs_package
@pytest.mark.gpu
@pytest.mark.parametrize("compensation", ["none", "linear"])
def test_a_layer_runs_on_it(compensation):
    """With partial tiles, forward and backward, as near to plain torch in float64 as this package's own kernels; and it says what runs."""
    config = SSTAConfig(tile_thw=(4, 4, 8), kernel_thw=(1, 1, 1), sparse_type="block_attn", density=0.4, compensation=compensation)
    layout = TokenLayout((VideoGrid(6, 9, 20),))
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, layout.length, layout.length, 128, "cuda", torch.bfloat16))
    dout = torch.randn_like(q)

    def results(impl):
        out = ssta_attention(q, k, v, layout, config, deterministic=False, impl=impl)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    for mine, own in zip(results("cudnn"), results("triton")):
        assert (mine - own).norm() <= 0.02 * own.norm()
    report = explain(q.detach(), k.detach(), layout, config, impl="cudnn")
    assert report.implementation == "cudnn" and any("nvidia-cudnn-frontend" in sentence for sentence in report.why_not)
