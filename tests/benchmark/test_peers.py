"""Other libraries in the benchmarks: every adapter asks for the pattern that ours computes, and what is absent says so."""

import importlib
import sys
import types
from typing import NamedTuple

import pytest
import torch

from ssta.kernels import BlockLists


def expanded(mask, tokens):
    """bool [..., N, M] -> [..., N * tokens[0], M * tokens[1]]."""
    return mask.repeat_interleave(tokens[0], -2).repeat_interleave(tokens[1], -1)


def listed(ids, counts, blocks):
    """bool [..., blocks]: the first ``counts`` entries of ``ids``."""
    used = torch.arange(ids.shape[-1]) < counts[..., None]
    return torch.zeros(*ids.shape[:-1], blocks + 1, dtype=torch.bool).scatter(-1, torch.where(used, ids, blocks).long(), True)[..., :-1]


def attend(q, k, v, mask):
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1) @ v


class Lists(NamedTuple):
    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    block_size: tuple


def fake_flash_attn_4():
    def mask_of(lists, rows, columns):
        assert not lists.mask_block_cnt.any() and lists.full_block_idx.shape[-1] == columns
        return listed(lists.full_block_idx, lists.full_block_cnt, columns)

    def flash_attn_func(q, k, v, block_sparse_tensors=None, block_sparse_tensors_bwd=None):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if block_sparse_tensors is None:
            return attend(q, k, v, torch.ones((), dtype=torch.bool)).transpose(1, 2), None
        rows, columns = block_sparse_tensors.block_size
        assert columns == 128 and block_sparse_tensors_bwd.block_size == (rows, columns)
        forward = mask_of(block_sparse_tensors, q.shape[2] // rows, k.shape[2] // columns)
        backward = mask_of(block_sparse_tensors_bwd, k.shape[2] // columns, q.shape[2] // rows)
        assert torch.equal(forward, backward.mT)
        return attend(q, k, v, expanded(forward, (rows, columns))).transpose(1, 2), None

    return {"flash_attn": {}, "flash_attn.cute": {}, "flash_attn.cute.interface": dict(flash_attn_func=flash_attn_func),
            "flash_attn.cute.block_sparsity": dict(BlockSparseTensorsTorch=Lists)}


def fake_cudnn():
    def mask_of(q, ids, size):
        assert size == 128 and ids.dtype == torch.int32 and ids.is_contiguous() and ids.shape[2] == q.shape[2] // size
        return expanded(listed(ids, torch.full(ids.shape[:-1], ids.shape[-1]), q.shape[2] // size), (size, size))

    def block_sparse_attention_forward(q, k, v, ids, sparse_block_size):
        return dict(o_tensor=attend(q, k, v, mask_of(q, ids, sparse_block_size)), lse_tensor="lse")

    def block_sparse_attention_backward(dout, q, k, v, out, lse, ids, sparse_block_size):
        assert lse == "lse" and out.shape == q.shape
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        grads = torch.autograd.grad(attend(*leaves, mask_of(q, ids, sparse_block_size)), leaves, dout)
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), grads))

    return {"cudnn": {}, "cudnn.block_sparse_attention": dict(block_sparse_attention_forward=block_sparse_attention_forward,
                                                              block_sparse_attention_backward=block_sparse_attention_backward)}


def fake_fastvideo():
    def block_sparse_attn_from_indices(q, k, v, ids, counts, sizes):
        assert ids.dtype == counts.dtype == sizes.dtype == torch.int32 and bool((sizes == 64).all())
        return attend(q, k, v, expanded(listed(ids, counts, len(sizes)), (64, 64))), "lse"

    return {"fastvideo_kernel": {},
            "fastvideo_kernel.block_sparse_attn": dict(block_sparse_attn_from_indices=block_sparse_attn_from_indices)}


def fake_flashinfer():
    class BlockSparseAttentionWrapper:
        def __init__(self, workspace):
            assert workspace.dtype == torch.uint8

        def plan(self, indptr, indices, M, N, R, C, num_qo_heads, num_kv_heads, head_dim, q_data_type, o_data_type):
            counts = indptr.diff()
            ids = indices.view(len(counts), -1)
            self.mask = expanded(listed(ids, counts, N // C), (R, C))
            assert len(counts) == M // R and (num_qo_heads, num_kv_heads) == (1, 1) and q_data_type == o_data_type

        def run(self, q, k, v):
            return attend(*(x.transpose(0, 1) for x in (q, k, v)), self.mask).transpose(0, 1)

    return {"flashinfer": dict(BlockSparseAttentionWrapper=BlockSparseAttentionWrapper)}


def fake_flex_block_attn():
    def flex_block_attn_func(q, k, v, q_block_size, kv_block_size, block_mask):
        assert block_mask.is_contiguous() and block_mask.shape[:2] == q.shape[:2]
        return attend(q, k, v, expanded(block_mask, (q_block_size, kv_block_size)))

    return {"flex_block_attn": dict(flex_block_attn_func=flex_block_attn_func)}


def fake_sageattention():
    def sageattn(q, k, v, tensor_layout, is_causal):
        assert tensor_layout == "HND" and not is_causal
        k -= k.mean(2, keepdim=True)  # as version 1 does, in the caller's memory
        return attend(q, k, v, torch.ones((), dtype=torch.bool))

    return {"sageattention": dict(sageattn=sageattn)}


FAKES = {"flash-attn-4": fake_flash_attn_4, "cuDNN frontend": fake_cudnn, "fastvideo-kernel": fake_fastvideo, "flashinfer": fake_flashinfer,
         "flex-block-attn": fake_flex_block_attn, "sageattention": fake_sageattention}


def install(monkeypatch, modules):
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def named(name):
    from peers import PEERS

    return next(peer for peer in PEERS if peer.name == name)


def peer_inputs(pattern, head_dim=128, block=256, heads=2):
    """Inputs of 5 blocks, and the lists that stand for the same."""
    from peers import Inputs, Tensors
    from shapes import Problem, full, kept, window

    problem = Problem(5 * block, heads, head_dim, block)
    pattern = {"full": full, "window": window, "random": lambda problem: kept(problem, 2)}[pattern](problem)
    mask = pattern.mask(problem, "cpu")
    tensors = Tensors(*(torch.randn(1, heads, problem.tokens, head_dim) for _ in range(4)))
    return Inputs(tensors, mask, pattern.kept, block), BlockLists.from_mask(mask, block, block)


@pytest.mark.parametrize("pattern", ["full", "window", "random"])
@pytest.mark.parametrize("name", FAKES)
def test_an_adapter_asks_for_the_same_pattern(monkeypatch, name, pattern):
    """Each library is replaced by plain code that reads the lists as the library's documentation says."""
    from truth import truth

    peer = named(name)
    if peer.dense and pattern != "full":
        return
    install(monkeypatch, FAKES[name]())
    inputs, blocks = peer_inputs(pattern)
    x = inputs.tensors
    before = [tensor.clone() for tensor in (x.q, x.k, x.v, x.dout)]
    exact = truth(x.q, x.k, x.v, blocks, x.dout)
    calls = peer.prepare(inputs)
    assert exact.forward_error(name, calls.forward()) < 1e-5
    if calls.start_backward:
        assert exact.backward_error(name, calls.start_backward()()) < 1e-5
    else:
        assert calls.no_backward == "not supported: inference only"
    assert (calls.build is None) == (peer.dense or (name == "flash-attn-4" and pattern == "full"))
    if calls.build:
        calls.build()
    for tensor, original in zip((x.q, x.k, x.v, x.dout), before):
        assert torch.equal(tensor, original), "an adapter must not let a library write into what all share"


@pytest.mark.parametrize("name, options, message", [
    ("flash-attn-4", dict(block=64), "blocks must be multiples of 128 tokens, these have 64"),
    ("FlexAttention", dict(block=64), "blocks must be multiples of 128 tokens, these have 64"),
    ("fastvideo-kernel", dict(block=32), "blocks must be multiples of 64 tokens, these have 32"),
    ("flex-block-attn", dict(head_dim=64), "head_dim must be 128, got 64")])
def test_what_a_library_does_not_offer(monkeypatch, name, options, message):
    from peers import Unsupported

    install(monkeypatch, FAKES.get(name, dict)())
    with pytest.raises(Unsupported, match=message):
        named(name).prepare(peer_inputs("random", **options)[0])


def test_cudnn_backward_needs_head_dim_128(monkeypatch):
    install(monkeypatch, fake_cudnn())
    calls = named("cuDNN frontend").prepare(peer_inputs("random", head_dim=64)[0])
    assert calls.start_backward is None and calls.no_backward == "not supported: its backward requires head_dim 128, got 64"


def test_why_a_library_is_absent(monkeypatch):
    import peers

    assert named("SDPA flash").absent() == ""
    if not torch.cuda.is_available():
        assert named("flash-attn-4").absent() == "needs an NVIDIA GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for peer, reason in ((peers.Peer("x", "x", "no_such_library", None), "not installed: no module no_such_library"),
                         (peers.Peer("x", "x", "broken", None), "does not load: RuntimeError: built for another torch")):
        monkeypatch.setattr(peers, "import_module", broken_import)
        assert peer.absent() == reason
        assert peer.version == "unknown"


def broken_import(name):
    if name == "broken":
        raise RuntimeError("built for another torch\nand more")
    return importlib.import_module(name)
