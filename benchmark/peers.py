"""Other libraries' attention, called on the same tensors and the same pattern as ours.

Each is optional: one that is not installed is named in the results and left out. An adapter is a function of ``Inputs`` that returns
``Calls``. The arrangement of memory that a library asks for is made before anything is timed; the lists that it asks for are made by
``Calls.build``, which is timed by itself. All are called as their own documentation says, with their defaults.

On an H200 were run: SDPA and FlexAttention of torch 2.11, flash-attn-4 4.0.0b36, nvidia-cudnn-frontend 1.32.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


class Unsupported(Exception):
    """The library does not offer this."""


@dataclass(frozen=True)
class Tensors:
    """q, k, v and the output's gradient, all ``[B, H, S, D]`` and contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @cached_property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v that want gradients."""
        return tuple(x.detach().requires_grad_() for x in (self.q, self.k, self.v))

    @cached_property
    def tokens_first(self) -> Tensors:
        """The same as contiguous ``[B, S, H, D]``."""
        return Tensors(*(x.transpose(1, 2).contiguous() for x in (self.q, self.k, self.v, self.dout)))


@dataclass(frozen=True)
class Inputs:
    """One problem: tensors, and a bool mask ``[B or 1, H or 1, N, N]`` over blocks of ``block`` tokens, ``kept`` True in every row."""

    tensors: Tensors
    mask: Tensor
    kept: int
    block: int

    @property
    def full(self) -> bool:
        return self.kept == self.mask.shape[-1]

    def head_mask(self) -> Tensor:
        """bool ``[B, H, N, N]``, contiguous."""
        return self.mask.expand(*self.tensors.q.shape[:2], -1, -1).contiguous()

    def ids(self, parts: int = 1, rows: bool = True) -> Tensor:
        """int32 ``[B, H, N, kept]``: the ascending ids of the blocks in each row.

        ``parts`` cuts every key block into so many, and with ``rows`` every query block too.
        """
        ids = ascending_ids(self.head_mask(), self.kept)
        ids = (ids[..., None] * parts + torch.arange(parts, device=ids.device, dtype=torch.int32)).flatten(-2)
        return (ids.repeat_interleave(parts, 2) if rows else ids).contiguous()

    def parts(self, tokens: int) -> int:
        """In how many blocks of ``tokens`` one of ours is cut."""
        if self.block % tokens:
            raise Unsupported(f"blocks must be multiples of {tokens} tokens, these have {self.block}")
        return self.block // tokens


@dataclass(frozen=True)
class Calls:
    """What is measured of one library on one problem; outputs and gradients come as ``[B, H, S, D]``.

    ``build`` makes the lists from the mask; None where there is no pattern. ``backward`` runs the backward alone, over a forward that was
    run once; None, with the reason in ``no_backward``, where there is none. ``start_backward`` is called before the first backward.
    """

    build: Callable[[], object] | None
    forward: Callable[[], Tensor]
    start_backward: Callable[[], Callable[[], tuple[Tensor, Tensor, Tensor]]] | None = None
    no_backward: str = ""


@dataclass(frozen=True)
class Peer:
    """One library. ``dense``: it knows no patterns and computes everything. ``roundings``: how many roundings its results may be off."""

    name: str
    package: str
    module: str
    prepare: Callable[[Inputs], Calls]
    dense: bool = False
    roundings: float = 4

    @property
    def version(self) -> str:
        if self.package == "torch":
            return torch.__version__
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "unknown"

    def absent(self) -> str:
        """Empty, or why it cannot be called here."""
        if not torch.cuda.is_available() and self.name != SDPA_FLASH:
            return "needs an NVIDIA GPU"
        try:
            import_module(self.module)
        except ModuleNotFoundError as error:
            return f"not installed: no module {error.name}"
        except Exception as error:  # a library that does not load is its own fault, and no reason to stop
            return f"does not load: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return ""


def ascending_ids(mask: Tensor, kept: int) -> Tensor:
    """int32 ``[..., kept]``: where a bool mask with ``kept`` True in every row is True."""
    return mask.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :kept].to(torch.int32)


def counts_of(ids: Tensor) -> Tensor:
    return torch.full(ids.shape[:-1], ids.shape[-1], dtype=torch.int32, device=ids.device)


def by_autograd(attend: Callable[..., Tensor], leaves: tuple[Tensor, ...], dout: Tensor):
    """A function that runs the forward once and returns the backward alone."""

    def start():
        out = attend(*leaves)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return start


def heads_first(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def sdpa(backend: SDPBackend) -> Callable[[Inputs], Calls]:
    """torch.nn.functional.scaled_dot_product_attention with one backend and no other."""

    def prepare(inputs: Inputs) -> Calls:
        x = inputs.tensors

        def attend(q, k, v):
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v)

        return Calls(None, lambda: attend(x.q, x.k, x.v), by_autograd(attend, x.leaves, x.dout))

    return prepare


def flex_attention(inputs: Inputs) -> Calls:
    """FlexAttention under torch.compile; all blocks are whole, so that the compiled kernel need not know how to mask."""
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    x = inputs.tensors
    inputs.parts(128)  # its own tiles have up to 128 tokens, and must divide the blocks

    def build():
        ids = ascending_ids(inputs.head_mask(), inputs.mask.shape[-1])
        none = torch.zeros(ids.shape[:-1], dtype=torch.int32, device=ids.device)
        return BlockMask.from_kv_blocks(none, torch.zeros_like(ids), none + inputs.kept, ids, BLOCK_SIZE=inputs.block, mask_mod=noop_mask,
                                        seq_lengths=(x.q.shape[2], x.k.shape[2]))

    block_mask = build()
    attend = _compiled_flex(x.q.shape)
    return Calls(build, lambda: attend(x.q, x.k, x.v, block_mask=block_mask),
                 by_autograd(lambda q, k, v: attend(q, k, v, block_mask=block_mask), x.leaves, x.dout))


_flex: dict[torch.Size, Callable] = {}


def _compiled_flex(shape: torch.Size) -> Callable:
    """One compilation for all patterns of a shape; torch limits how many one function may have."""
    if shape not in _flex:
        torch.compiler.reset()
        _flex.clear()
        _flex[shape] = torch.compile(import_module("torch.nn.attention.flex_attention").flex_attention, dynamic=False)
    return _flex[shape]


def flash_attention_4(inputs: Inputs) -> Calls:
    """flash_attn.cute, in [B, S, H, D]: query blocks as long as ours, key blocks of 128, which its sm_90 kernels ask for.

    Its backward iterates over the lists of query blocks that look at each key block. Where all is kept it is called without a pattern.
    """
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import flash_attn_func

    x = inputs.tensors.tokens_first
    parts = inputs.parts(128)

    def lists(counts, ids):
        # The second pair lists the whole blocks; the first one would be blocks that a mask_mod cuts.
        return BlockSparseTensorsTorch(mask_block_cnt=torch.zeros_like(counts), mask_block_idx=torch.zeros_like(ids), full_block_cnt=counts,
                                       full_block_idx=ids, block_size=(inputs.block, 128))

    def build():
        if inputs.full:
            return {}
        mask = inputs.head_mask()
        ids = torch.nn.functional.pad(inputs.ids(parts, rows=False), (0, (mask.shape[-1] - inputs.kept) * parts))
        forward = lists(torch.full_like(ids[..., 0], inputs.kept * parts), ids)
        seen_by = mask.mT.repeat_interleave(parts, 2)
        backward = lists(seen_by.sum(-1, dtype=torch.int32), ascending_ids(seen_by, mask.shape[-2]).contiguous())
        return dict(block_sparse_tensors=forward, block_sparse_tensors_bwd=backward)

    pattern = build()

    def attend(q, k, v):
        out = flash_attn_func(q, k, v, **pattern)
        return out[0] if isinstance(out, tuple) else out

    def start_backward():
        backward = by_autograd(attend, x.leaves, x.dout)()
        return lambda: heads_first(backward())

    return Calls(None if inputs.full else build, lambda: attend(x.q, x.k, x.v).transpose(1, 2), start_backward)


def cudnn_frontend(inputs: Inputs) -> Calls:
    """cudnn.block_sparse_attention with its blocks of 128 tokens; its backward on sm_90 is for head_dim 128 and bfloat16."""
    from cudnn.block_sparse_attention import block_sparse_attention_backward, block_sparse_attention_forward

    x = inputs.tensors
    parts = inputs.parts(128)
    ids = inputs.ids(parts)

    def forward():
        return block_sparse_attention_forward(x.q, x.k, x.v, ids, sparse_block_size=128)

    def start_backward():
        saved = forward()
        out, lse = saved["o_tensor"], saved["lse_tensor"]

        def backward():
            grads = block_sparse_attention_backward(x.dout, x.q, x.k, x.v, out, lse, ids, sparse_block_size=128)
            return grads["dq_tensor"], grads["dk_tensor"], grads["dv_tensor"]

        return backward

    head_dim = x.q.shape[-1]
    return Calls(lambda: inputs.ids(parts), lambda: forward()["o_tensor"], start_backward if head_dim == 128 else None,
                 "" if head_dim == 128 else f"not supported: its backward requires head_dim 128, got {head_dim}")


def fastvideo(inputs: Inputs) -> Calls:
    """fastvideo_kernel's block_sparse_attn_from_indices, with blocks of 64 tokens; batch 1.

    The wheel of 0.3.2 brings a libcuda of its own; on the H200, with another driver, its kernels failed and left the GPU unusable.
    """
    from fastvideo_kernel.block_sparse_attn import block_sparse_attn_from_indices

    x = inputs.tensors
    if x.q.shape[0] != 1:
        raise Unsupported(f"batch must be 1, got {x.q.shape[0]}")
    parts = inputs.parts(64)

    def build():
        ids = inputs.ids(parts)
        return ids, counts_of(ids)

    ids, counts = build()
    valid = torch.full((x.k.shape[2] // 64,), 64, dtype=torch.int32, device=ids.device)

    def attend(q, k, v):
        return block_sparse_attn_from_indices(q, k, v, ids, counts, valid)[0]

    return Calls(build, lambda: attend(x.q, x.k, x.v), by_autograd(attend, x.leaves, x.dout))


def flash_infer(inputs: Inputs) -> Calls:
    """flashinfer.BlockSparseAttentionWrapper, which has one pattern for all heads: the heads are laid one after the other as one sequence.

    Forward only. Not run here: it compiles its kernels from CUDA sources on first use. Written after its documentation (0.7).
    """
    import flashinfer

    x = inputs.tensors
    batch, heads, tokens, head_dim = x.q.shape
    flat = [tensor.view(-1, 1, head_dim) for tensor in (x.q, x.k, x.v)]
    wrapper = flashinfer.BlockSparseAttentionWrapper(torch.empty(128 * 2**20, dtype=torch.uint8, device=x.q.device))

    def build():
        ids = inputs.ids()
        blocks = inputs.mask.shape[-1]
        ids = ids + torch.arange(batch * heads, device=ids.device, dtype=torch.int32).view(batch, heads, 1, 1) * blocks
        rows = batch * heads * blocks
        indptr = torch.arange(rows + 1, device=ids.device, dtype=torch.int32) * inputs.kept
        wrapper.plan(indptr, ids.flatten(), batch * heads * tokens, batch * heads * tokens, inputs.block, inputs.block, 1, 1, head_dim,
                     q_data_type=x.q.dtype, o_data_type=x.q.dtype)

    build()
    return Calls(build, lambda: wrapper.run(*flat).view(x.q.shape), None, "not supported: inference only")


def sage_attention(inputs: Inputs) -> Calls:
    """sageattention.sageattn: dense, q and k in int8, forward only. Version 1 writes into k, so it gets its own. Not run here."""
    from sageattention import sageattn

    x = inputs.tensors
    k = x.k.clone()
    return Calls(None, lambda: sageattn(x.q, k, x.v, tensor_layout="HND", is_causal=False), None, "not supported: inference only")


def flex_block_attn(inputs: Inputs) -> Calls:
    """flex_block_attn_func: head_dim 128, bfloat16, blocks as long as ours. It waits for the device before and after every kernel.

    Not run here: it is built from source against CUDA 12.8. Written after its interface.
    """
    from flex_block_attn import flex_block_attn_func

    x = inputs.tensors
    if x.q.shape[-1] != 128:
        raise Unsupported(f"head_dim must be 128, got {x.q.shape[-1]}")
    inputs.parts(64)
    mask = inputs.head_mask()

    def attend(q, k, v):
        return flex_block_attn_func(q, k, v, inputs.block, inputs.block, mask)

    return Calls(inputs.head_mask, lambda: attend(x.q, x.k, x.v), by_autograd(attend, x.leaves, x.dout))


SDPA_FLASH = "SDPA flash"

PEERS = (
    Peer("FlexAttention", "torch", "torch.nn.attention.flex_attention", flex_attention),
    Peer("flash-attn-4", "flash-attn-4", "flash_attn.cute.interface", flash_attention_4),
    Peer("cuDNN frontend", "nvidia-cudnn-frontend", "cudnn.block_sparse_attention.api", cudnn_frontend),
    Peer("fastvideo-kernel", "fastvideo-kernel", "fastvideo_kernel.block_sparse_attn", fastvideo),
    Peer("flashinfer", "flashinfer-python", "flashinfer", flash_infer),
    Peer("flex-block-attn", "flex-block-attn", "flex_block_attn", flex_block_attn),
    Peer("SDPA cuDNN", "torch", "torch", sdpa(SDPBackend.CUDNN_ATTENTION), dense=True),
    Peer(SDPA_FLASH, "torch", "torch", sdpa(SDPBackend.FLASH_ATTENTION), dense=True),
    # Its int8 scores make it less exact than 16-bit arithmetic by design; the error column says by how much.
    Peer("sageattention", "sageattention", "sageattention", sage_attention, dense=True, roundings=32),
)
