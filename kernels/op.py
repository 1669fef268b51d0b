"""Block-sparse attention as operators of torch.library: what torch.compile and autograd see, and how a Route is run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .blocks import BlockLists
from .operators import NAMESPACE, differentiable_once, differentiate_by, on_device, watched
from .routing import PatternFacts, Route, choose_route


def route_of(impl: str, q: Tensor, k: Tensor, blocks: BlockLists, causal: bool, deterministic: bool) -> Route:
    """``choose_route`` for these tensors. Forward and backward of a call ask with the same arguments and so get the same Route."""
    return choose_route(impl, q.device, q.dtype, q.shape[3], PatternFacts.of(blocks), heads=q.shape[1], kv_heads=k.shape[1], causal=causal,
                        deterministic=deterministic)


def run_forward(route: Route, q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """``route.run`` on q's device and without autocast, whatever the current one is."""
    with on_device(q):
        return route.run(q, k, v, blocks, scale, causal)


class RecordedAttention(torch.autograd.Function):
    """``run_forward`` with a gradient, for tensors that nobody watches: the operators below without the dispatcher, which takes longer than
    all else before a launch."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool, deterministic: bool, route: Route,
    ) -> tuple[Tensor, Tensor]:
        out, lse = run_forward(route, q, k, v, blocks, scale, causal)
        pattern = blocks.to_fields()
        # All are saved, so that writing to one of them before the backward is an error.
        ctx.save_for_backward(q, k, v, out, lse, *pattern[:6])
        ctx.sizes, ctx.options = pattern[6:], (scale, causal, deterministic)
        ctx.route = route
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once("block_sparse_attention")
    def backward(ctx, saved: tuple[Any, ...], dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 8
        q, k, v, out, lse, *pattern = saved
        dout = torch.zeros_like(out) if dout is None else dout
        if watched(dout, q, k, v) or dlse is not None and watched(dlse):
            grads = _backward(dout, dlse, q, k, v, out, lse, *pattern, *ctx.sizes, *ctx.options, ctx.route.name)
            return *grads, *(None,) * 5
        blocks = BlockLists.from_fields(*pattern, *ctx.sizes)
        with on_device(q):
            return *ctx.route.run_backward(dout, dlse, q, k, v, out, lse, blocks, *ctx.options), *(None,) * 5


@torch.library.custom_op(f"{NAMESPACE}::block_sparse_attention", mutates_args=())
def attention_operator(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, indices: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor | None,
    q_lengths: Tensor | None, kv_lengths: Tensor | None, num_kv_blocks: int | None, max_q_length: int, max_kv_length: int,
    scale: float, causal: bool, deterministic: bool, impl: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse). ``impl`` is a route's name, or "auto" in a graph that was compiled before its GPU was known."""
    blocks = BlockLists.from_fields(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length,
                                    max_kv_length)
    return run_forward(route_of(impl, q, k, blocks, causal, deterministic), q, k, v, blocks, scale, causal)


@attention_operator.register_fake
def _(q, k, v, *_):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::block_sparse_attention_backward", mutates_args=())
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, counts: Tensor, indices: Tensor,
    q_offsets: Tensor | None, kv_offsets: Tensor | None, q_lengths: Tensor | None, kv_lengths: Tensor | None, num_kv_blocks: int | None,
    max_q_length: int, max_kv_length: int, scale: float, causal: bool, deterministic: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = BlockLists.from_fields(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length,
                                    max_kv_length)
    with on_device(q):
        route = route_of(impl, q, k, blocks, causal, deterministic)
        return route.run_backward(dout, dlse, q, k, v, out, lse, blocks, scale, causal, deterministic)


differentiate_by(_backward, attention_operator, "block_sparse_attention")
