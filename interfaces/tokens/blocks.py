"""Attention to listed blocks that no tile fits: key blocks shorter than a tile, and blocks that a token sees in part.

A tile has at least 16 keys. ``kernels.block_sparse_attention`` takes a shorter key block as a tile that is mostly masked. Here its keys are
gathered one by one, or compacted: copied behind one another, then taken as tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import BlockLists, PatternFacts, Route, block_sparse_attention, choose_route
from ...kernels.attention import check_inputs
from ...kernels.block_forms import in_range, prefix_mask
from ...kernels.checks import autocast_inputs, require_bool, resolve_scale
from ...kernels.operators import NAMESPACE, differentiate_by, on_device, recorded, refuse_transforms, watched
from ...kernels.routing import SHORTEST_TILE, require_impl
from .attention import TOKEN_IMPLEMENTATIONS

# Where this many query rows share a list of short blocks, the forward compacts its keys. The backward always does.
COMPACTED_ROWS = 512
# The key blocks of copies, as long as any kernel wants them.
COPIED = 128


class ShortRoute(NamedTuple):
    """How lists of short key blocks are attended to.

    Attributes:
        tiles: attends with each block as a tile.
        copies: attends to compacted keys; None where these cannot be compacted.
        forward: "gathered", "compacted" or "tiles".
    """

    tiles: Route
    copies: Route | None
    forward: str

    def run(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """As ``Route.run``."""
        if self.forward == "tiles":
            return self.tiles.run(q, k, v, blocks, scale, causal)
        from .triton import compacted, gathered

        if self.forward == "compacted" and self.copies is not None:
            return compacted.compacted_forward(self.copies, q, k, v, blocks, scale)
        return gathered.gathered_forward(q, k, v, blocks, scale, causal)

    def run_backward(self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                     blocks: BlockLists, scale: float, causal: bool, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
        """As ``Route.run_backward``."""
        if self.copies is None:
            return self.tiles.run_backward(dout, dlse, q, k, v, out, lse, blocks, scale, causal, deterministic)
        from .triton.compacted import compacted_backward

        return compacted_backward(self.copies, dout, dlse, q, k, v, out, lse, blocks, scale, deterministic)


def short_route(impl: str, q: Tensor, k: Tensor, blocks: BlockLists, causal: bool, deterministic: bool) -> ShortRoute:
    """The kernels that ``impl`` stands for over key blocks of less than 16 tokens; errors as of ``choose_route``."""
    (heads, kv_heads), facts = (q.shape[1], k.shape[1]), PatternFacts.of(blocks)

    def routed(name: str, max_kv_length: int) -> Route:
        return choose_route(name, q.device, q.dtype, q.shape[3], facts._replace(max_kv_length=max_kv_length), heads=heads,
                            kv_heads=kv_heads, causal=causal, deterministic=deterministic)

    tiles = routed(impl, facts.max_kv_length)
    if tiles.name not in ("hopper", "triton"):
        return ShortRoute(tiles, None, "tiles")
    uniform = isinstance(blocks.q_offsets, int) and isinstance(blocks.kv_offsets, int) and blocks.q_lengths is blocks.kv_lengths is None
    # Copies know no positions, and parts of equal size need uniform blocks.
    if causal or not uniform or blocks.capacity < 1:
        return ShortRoute(tiles, None, "tiles" if tiles.name == "hopper" else "gathered")
    many = facts.max_q_length * (heads // max(kv_heads, blocks.counts.shape[1])) >= COMPACTED_ROWS
    name = "hopper" if many and impl == "auto" and routed("auto", COPIED).name == "hopper" else tiles.name
    return ShortRoute(tiles, routed(name, COPIED), "compacted" if many else "tiles" if name == "hopper" else "gathered")


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, *, scale: float | None = None, causal: bool = False, deterministic: bool = True,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them, for key blocks of any length. Arguments and errors as there."""
    plain = not isinstance(blocks, BlockLists) or blocks.max_kv_length >= SHORTEST_TILE or impl not in ("auto", "triton", "hopper")
    route = None
    if not plain:
        require_bool("causal", causal)
        require_bool("deterministic", deterministic)
        q, k, v = autocast_inputs(q=q, k=k, v=v)
        check_inputs(q, k, v, blocks)
        # Who watches sees an operator, which asks the GPU when it runs.
        if not watched(q, k, v):
            route = short_route(impl, q, k, blocks, causal, deterministic)
            plain = route.tiles.name == "torch"
    if plain:
        return block_sparse_attention(q, k, v, blocks, scale=scale, causal=causal, return_lse=True, deterministic=deterministic, impl=impl)
    scale = resolve_scale(scale, q.shape[3])
    if route is not None and not recorded(q, k, v):
        with on_device(q):
            return route.run(q, k, v, blocks, scale, causal)
    refuse_transforms("block_sparse_attention", q=q, k=k, v=v)
    return _short(q, k, v, *blocks.to_fields(), scale, causal, deterministic, impl)


@torch.library.custom_op(f"{NAMESPACE}::short_block_attention", mutates_args=())
def _short(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, indices: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor | None,
    q_lengths: Tensor | None, kv_lengths: Tensor | None, num_kv_blocks: int | None, max_q_length: int, max_kv_length: int,
    scale: float, causal: bool, deterministic: bool, impl: str,
) -> tuple[Tensor, Tensor]:
    blocks = BlockLists.from_fields(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length,
                                    max_kv_length)
    with on_device(q):
        return short_route(impl, q, k, blocks, causal, deterministic).run(q, k, v, blocks, scale, causal)


@torch.library.custom_op(f"{NAMESPACE}::short_block_attention_backward", mutates_args=())
def _short_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, counts: Tensor, indices: Tensor,
    q_offsets: Tensor | None, kv_offsets: Tensor | None, q_lengths: Tensor | None, kv_lengths: Tensor | None, num_kv_blocks: int | None,
    max_q_length: int, max_kv_length: int, scale: float, causal: bool, deterministic: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = BlockLists.from_fields(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length,
                                    max_kv_length)
    with on_device(q):
        route = short_route(impl, q, k, blocks, causal, deterministic)
        return route.run_backward(dout, dlse, q, k, v, out, lse, blocks, scale, causal, deterministic)


def attention_within_blocks(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, *, soft_cap: float = 0.0, mask: Tensor | None = None,
    first_entry: Tensor | None = None, listed: tuple[Tensor, Tensor] | None = None, packed: int = 1, impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them, of scores and keys that are further limited. Arguments are not checked.

    Args:
        q: ``[B, Hq, Sq, D]``; k and v ``[B, Hkv, Skv, D]``; ``blocks`` as in ``block_sparse_attention``.
        soft_cap: c > 0 caps a scaled score x to c * tanh(x / c); 0 does not.
        mask: bool ``[entries, R, C]``: of its e-th listed block, token u of query block i sees token c where
            ``mask[first_entry[i] + e, u, c]``.
        first_entry: int32 ``[Nq]``, with ``mask``; lists shared by batch and heads.
        listed: ``listed_keys(blocks, Skv)``: of a query block of L tokens with n listed keys, in the order of the list, token u sees the
            first n - L + u + 1.
        packed: that many neighbouring rows of q are one token, seen by several heads; q's block sizes are in rows.
        impl: "auto" is "triton" on a GPU and "torch", a loop in plain torch, on a CPU. No other is there.
    """
    if require_impl(impl) not in TOKEN_IMPLEMENTATIONS:
        raise ValueError(f"backend must be 'auto', 'triton' or 'torch' with a soft cap, masks inside blocks or causal order, got {impl!r}")
    if impl == "auto":
        impl = "torch" if q.device.type == "cpu" else "triton"
    if impl == "triton":
        choose_route(impl, q.device, q.dtype, q.shape[-1])
    order, total = listed or (None, None)
    with torch.no_grad():
        return _within_blocks(q, k, v, *blocks.to_fields(), mask, first_entry, order, total, scale, soft_cap, packed, impl)


def listed_keys(blocks: BlockLists, kv_len: int) -> tuple[Tensor, Tensor]:
    """(listed keys before each listed block, int32 as the indices; listed keys, int32 as the counts). The lists' heads are those of the
    key blocks' bounds, where these have several."""
    sizes = blocks.kv_bounds(kv_len)[1].expand(*blocks.counts.shape[:2], -1)
    ids = blocks.indices
    known = in_range(ids, prefix_mask(blocks.counts, blocks.capacity), sizes.shape[-1])
    size = sizes.gather(2, ids.where(known, 0).flatten(2).long()).view(ids.shape).where(known, 0)
    behind = size.cumsum(-1, dtype=torch.int32)
    return behind - size, size.sum(-1, dtype=torch.int32)


@torch.library.custom_op(f"{NAMESPACE}::attention_within_blocks", mutates_args=())
def _within_blocks(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, indices: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor | None,
    q_lengths: Tensor | None, kv_lengths: Tensor | None, num_kv_blocks: int | None, max_q_length: int, max_kv_length: int,
    mask: Tensor | None, first_entry: Tensor | None, order: Tensor | None, total: Tensor | None,
    scale: float, soft_cap: float, packed: int, impl: str,
) -> tuple[Tensor, Tensor]:
    blocks = BlockLists.from_fields(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length,
                                    max_kv_length)
    with on_device(q):
        if impl == "triton":
            from .triton.gathered import gathered_forward

            return gathered_forward(q, k, v, blocks, scale, False, soft_cap=soft_cap, mask=mask, first_entry=first_entry, order=order,
                                    total=total, packed=packed)
        from .eager import torch_within

        return torch_within(q, k, v, blocks, scale, soft_cap, mask, first_entry, total, packed)


def _fake(q: Tensor, k: Tensor, v: Tensor, *_) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


_short.register_fake(_fake)
_within_blocks.register_fake(_fake)
differentiate_by(_short_backward, _short, "block_sparse_attention")
