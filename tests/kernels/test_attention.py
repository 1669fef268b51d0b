"""block_sparse_attention as a call: what it refuses, which implementation it takes, and how compilers, graphs and tracers see it."""

import pytest
import torch
from cases import INTERPRETED, inputs

from ssta.kernels import BlockLists, block_sparse_attention, take_tokens
from ssta.kernels.reference import reference_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("impl", ["reference", "torch", *(["triton"] if INTERPRETED else [])])
@pytest.mark.slow
def test_compiles_without_a_break(impl):
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 1, 40, 48, 16))
    mask = torch.rand(2, 3, 3) < 0.6

    def attend(q, k, v, mask):
        out, lse = block_sparse_attention(q, k, v, BlockLists.from_mask(mask, 16, 16), return_lse=True, impl=impl)
        return out * 2, lse

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(q, k, v, mask), attend(q, k, v, mask)):
        torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad(f(q, k, v, mask)[0].sum(), (q, k, v)) for f in (compiled, attend)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_whoever_watches_sees_the_operator():
    """Plain calls without gradients bypass the operator; those that modes, fake tensors and traces watch must not."""
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v = inputs(1, 2, 1, 40, 48, 16, dtype=torch.float32)
    blocks = BlockLists.from_mask(torch.rand(2, 3, 3) < 0.6, 16, 16)
    plain = block_sparse_attention(q, k, v, blocks)
    with Watch():
        watched = block_sparse_attention(q, k, v, blocks)
    assert "ssta.block_sparse_attention.default" in seen and torch.equal(watched, plain)
    with torch.inference_mode():
        assert torch.equal(block_sparse_attention(q, k, v, blocks), plain)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        lists = BlockLists(*(mode.from_tensor(x) for x in (blocks.counts, blocks.indices)), 16, 16, num_kv_blocks=3)
        assert block_sparse_attention(*fakes, lists).shape == q.shape
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda q, k, v: block_sparse_attention(q, k, v, blocks))(q, k, v)
    assert any("block_sparse_attention" in str(node.target) for node in traced.graph.nodes)
    mapped = torch.func.vmap(lambda q: block_sparse_attention(q, k, v, blocks))(torch.stack([q, -q]))
    assert torch.equal(mapped[0], plain) and torch.equal(mapped[1], block_sparse_attention(-q, k, v, blocks))


@pytest.mark.parametrize("impl", ["torch", *(["triton"] if INTERPRETED else [])])
def test_a_recorded_call_has_the_gradients_of_the_operator(impl):
    """Plain calls bypass the dispatcher with a gradient too; ragged blocks, valid lengths and lse included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    leaves = [x.requires_grad_() for x in inputs(1, 2, 1, 40, 40, 16)]
    offsets, lengths = torch.tensor([0, 16, 25, 40], dtype=torch.int32), torch.tensor([16, 5, 15], dtype=torch.int32)
    blocks = BlockLists.from_mask(torch.rand(2, 3, 3) < 0.6, offsets, offsets, q_lengths=lengths, kv_lengths=lengths)

    def grads(watch_forward, watch_backward):
        with Watch() if watch_forward else torch.enable_grad():
            out, lse = block_sparse_attention(*leaves, blocks, return_lse=True, impl=impl)
        with Watch() if watch_backward else torch.enable_grad():
            return torch.autograd.grad(out.float().square().sum() + lse.masked_fill(lse.isinf(), 0).sum(), leaves)

    plain = grads(False, False)
    assert not seen
    for watched in ((True, True), (False, True)):
        seen.clear()
        for a, b in zip(plain, grads(*watched)):
            assert torch.equal(a, b)
        assert "ssta.block_sparse_attention_backward.default" in seen


def test_a_recorded_call_is_a_good_citizen_of_autograd():
    leaves = [x.requires_grad_() for x in inputs(1, 2, 1, 40, 48, 16, dtype=torch.float32)]
    blocks = BlockLists.from_mask(torch.rand(2, 3, 3) < 0.6, 16, 16)
    out = block_sparse_attention(*leaves, blocks)
    plain = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    with torch.autograd.graph.save_on_cpu():
        offloaded = torch.autograd.grad(block_sparse_attention(*leaves, blocks).sum(), leaves)
    recomputed = torch.autograd.grad(
        torch.utils.checkpoint.checkpoint(block_sparse_attention, *leaves, blocks, use_reentrant=False).sum(), leaves)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, offloaded, recomputed))
    batched = torch.autograd.grad(out, leaves, torch.ones(2, *out.shape), is_grads_batched=True, retain_graph=True)
    assert all(torch.equal(a, part) for a, parts in zip(plain, batched) for part in parts)
    assert block_sparse_attention(leaves[0], *[x.detach() for x in leaves[1:]], blocks).requires_grad
    grad, = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="block_sparse_attention and what is built on it must be differentiated at most once"):
        torch.autograd.grad(grad.sum(), leaves)
    for number in range(3):
        again = block_sparse_attention(*leaves, blocks)
        (blocks.counts, blocks.indices, again.detach())[number].add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            again.sum().backward()


def test_a_call_like_one_before_is_still_checked():
    """What is known of earlier calls holds for these shapes, strides, dtypes and lists, and for nothing that is equal to them by chance."""
    q, k, v = inputs(1, 2, 1, 32, 48, 16, dtype=torch.float32)
    blocks = full_lists(2, 3)
    for _ in range(2):
        plain = block_sparse_attention(q, k, v, blocks, causal=True)
    for changes, error in (
        (dict(causal=1), TypeError), (dict(scale=-1.0), ValueError), (dict(blocks=full_lists(3, 3)), ValueError),
        (dict(v=v.double()), TypeError), (dict(v=v[:, :, :47]), ValueError), (dict(k=k.mT.contiguous().mT), ValueError),
        (dict(k=k.to_sparse()), TypeError), (dict(impl="hopper"), ValueError), (dict(deterministic=1), TypeError),
    ):
        with pytest.raises(error):
            block_sparse_attention(**(dict(q=q, k=k, v=v, blocks=blocks, causal=True) | changes))
    assert torch.equal(block_sparse_attention(torch.nn.Parameter(q), k, v, blocks, causal=True), plain)


def test_operator_registration():
    """torch's own checks of schema, fake tensors and autograd registration."""
    from ssta.kernels.op import attention_operator

    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 1, 40, 48, 16, dtype=torch.float32))
    blocks = BlockLists.from_mask(torch.rand(2, 3, 3) < 0.6, 16, 16)
    torch.library.opcheck(attention_operator, (q, k, v, *blocks.to_fields(), 0.25, False, True, "torch"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_gpu_that_is_not_the_current_one(impl):
    blocks = BlockLists.from_mask(torch.rand(2, 3, 4) < 0.6, 64, 64)
    given = inputs(1, 2, 1, 384, 512, 64)
    outs = []
    for device in ("cuda:0", "cuda:1"):
        there = BlockLists(blocks.counts.to(device), blocks.indices.to(device), 128, 128, num_kv_blocks=4)
        for _ in range(2):
            outs.append(block_sparse_attention(*(x.to(device) for x in given), there, impl=impl).cpu())
    assert torch.cuda.current_device() == 0 and all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.gpu
def test_gpu_compiles_without_a_break():
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 1, 400, 480, 64, "cuda", torch.bfloat16))
    mask = torch.rand(2, 4, 4, device="cuda") < 0.6

    def attend(q, k, v, mask):
        return block_sparse_attention(q * 2, k, v, BlockLists.from_mask(mask, 128, 128)).float().square()

    compiled = torch.compile(attend, fullgraph=True)
    grads = [torch.autograd.grad(f(q, k, v, mask).sum(), (q, k, v)) for f in (compiled, attend)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def full_lists(*shape):
    return BlockLists.from_mask(torch.ones(shape, dtype=torch.bool), 16, 16)


def _call(dtype=torch.float32, **changes):
    q, k, v = inputs(1, 4, 2, 32, 48, 16, dtype=dtype)
    arguments = dict(q=q, k=k, v=v, blocks=full_lists(2, 3))
    return block_sparse_attention(**(arguments | changes))


@pytest.mark.parametrize("changes, error, message", [
    (dict(q=[1]), TypeError, "q must be a tensor, got list"),
    (dict(k=torch.zeros(2, 48, 16)), ValueError, r"k must be \[batch, heads, tokens, head_dim\], got shape \(2, 48, 16\)"),
    (dict(v=torch.zeros(1, 2, 48, 16, dtype=torch.int32)), TypeError, "v must be a floating-point tensor"),
    (dict(k=torch.zeros(1, 2, 48, 16, dtype=torch.float64)), TypeError, "k must have q's dtype torch.float32, got torch.float64"),
    (dict(v=torch.zeros(1, 2, 48, 16, device="meta")), ValueError, "v must be on q's device cpu, got meta"),
    (dict(k=torch.zeros(2, 2, 48, 16)), ValueError, "k must have q's batch and head_dim 1 and 16"),
    (dict(v=torch.zeros(1, 2, 47, 16)), ValueError, r"v must have k's shape \(1, 2, 48, 16\), got \(1, 2, 47, 16\)"),
    (dict(k=torch.zeros(1, 3, 48, 16), v=torch.zeros(1, 3, 48, 16)), ValueError, "q's heads must be a multiple of k's 3, got 4"),
    (dict(q=torch.zeros(1, 4, 16, 32).mT), ValueError, "q must have stride 1 in its last dimension, got 32"),
    (dict(blocks="all"), TypeError, "blocks must be BlockLists, got str"),
    (dict(blocks=full_lists(3, 2, 3)), ValueError, "blocks.counts must have batch 1 and heads 1 or 2 or 4"),
    (dict(blocks=full_lists(2, 1, 2, 3)), ValueError, "blocks.counts must have batch 1"),
    (dict(blocks=full_lists(3, 3)), ValueError, "blocks must have 2 q blocks of 16 for 32 tokens, got 3"),
    (dict(blocks=full_lists(2, 4)), ValueError, "blocks must have 3 kv blocks of 16 for 48 tokens, got 4"),
    (dict(scale=0.0), ValueError, "scale must be positive and finite, got 0.0"),
    (dict(scale="big"), TypeError, r"scale must be a number, got 'big' \(str\)"),
    (dict(impl="cuda"), ValueError, "impl must be one of 'auto', 'reference', 'torch', 'triton', 'cudnn', 'hopper', got 'cuda'"),
    (dict(impl="hopper"), ValueError, r"impl='hopper' requires a Hopper GPU \(sm_90\), got"),
    (dict(impl="triton"), ValueError, "impl='triton' requires float16 or bfloat16 and a head_dim of 16 to 256, got torch.float32 and 16"),
])
def test_refuses_before_any_kernel_runs(changes, error, message):
    with pytest.raises(error, match=message):
        _call(**changes)


@pytest.mark.parametrize("pattern, words", [((4, 4), "blocks must have 1 q blocks of 16 for 2 tokens, got 4"),
                                            ((2, 4, 4), "blocks.counts must have batch 1 and heads 1 or 64, got shape")])
def test_tokens_before_heads_are_seen(pattern, words):
    x, blocks = torch.zeros(1, 64, 2, 16), BlockLists.from_mask(torch.ones(*pattern, dtype=torch.bool), 16, 16)
    with pytest.raises(ValueError, match=rf"{words}.*; the order of axes is \[batch, heads, tokens, head_dim\], so transpose\(1, 2\)"):
        block_sparse_attention(x, x, x, blocks)
    assert block_sparse_attention(*[x.transpose(1, 2)] * 3, blocks).shape == (1, 2, 64, 16)


@pytest.mark.parametrize("index, error, words", [
    (torch.zeros(3), TypeError, "index must be int64, got torch.float32"),
    (torch.tensor([0, 5]), ValueError, r"index must lie in \[-1, 5\), got 0 to 5"),
    (torch.tensor([-2, 1]), ValueError, r"index must lie in \[-1, 5\), got -2 to 1"),
    ([0], TypeError, "index must be a tensor, got list")])
def test_tokens_are_taken_by_numbers_that_are_there(index, error, words):
    with pytest.raises(error, match=words):
        take_tokens(torch.zeros(1, 2, 5, 4), index)


def test_what_torch_jit_traces_is_refused_in_words_that_help():
    blocks = BlockLists.from_mask(torch.ones(2, 2, dtype=torch.bool), 16, 16)
    with pytest.raises(TypeError, match="must be an int, got tensor.*; torch.jit.trace cannot trace this package, torch.export can"):
        torch.jit.trace(lambda q: block_sparse_attention(q, q, q, blocks), (torch.zeros(1, 1, 32, 16),))


def test_triton_refuses_a_cpu_when_not_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="impl='triton' requires a GPU, got tensors on cpu"):
        _call(dtype=torch.float16, impl="triton")


def test_scale_and_default_scale():
    q, k, v = inputs(1, 2, 2, 32, 32, 16, dtype=torch.float64)
    blocks = BlockLists.from_mask(torch.ones(2, 2, dtype=torch.bool), 16, 16)
    exact, _ = reference_attention(q, k, v, blocks, 0.25)
    assert torch.allclose(block_sparse_attention(q, k, v, blocks), exact)
    assert not torch.allclose(block_sparse_attention(q, k, v, blocks, scale=1.0), exact)


def test_a_scale_may_be_one_of_numpys_numbers():
    numpy = pytest.importorskip("numpy")
    q, k, v = torch.randn(3, 1, 1, 8, 4).unbind()
    blocks = BlockLists.from_mask(torch.ones(2, 2, dtype=torch.bool), 4, 4)
    first, second = (block_sparse_attention(q, k, v, blocks, scale=scale) for scale in (numpy.float32(0.5), 0.5))
    assert torch.equal(first, second)
