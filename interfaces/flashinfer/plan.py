"""The plan of FlashInfer's wrappers and how it runs: lists of blocks, packed heads, options; their shapes seen as [B, S, H, D]."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels import BlockLists
from ...kernels.checks import DTYPES, check_tensor, require_bool, require_int, require_integers, require_mask, require_values, resolve_scale
from ...kernels.routing import KERNEL_DTYPES
from ..packed import ENOUGH_ROWS, pack_heads, require_groups, unpack_heads
from ..tokens import attention_within_blocks, block_attention, listed_keys

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Options:
    """Settings of a plan besides the pattern."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    soft_cap: float  # 0 = none
    scale: float

    @classmethod
    def checked(cls, heads: int, kv_heads: int, head_dim: int, causal: bool, pos_encoding_mode: str, use_fp16_qk_reduction: bool,
                logits_soft_cap: float | None, sm_scale: float | None) -> Options:
        """From FlashInfer's arguments; what is not there is refused."""
        if pos_encoding_mode != "NONE":
            raise ValueError(f"pos_encoding_mode must be 'NONE': positions are encoded before attention here, got {pos_encoding_mode!r}")
        if use_fp16_qk_reduction:
            raise ValueError(f"use_fp16_qk_reduction must be False, because scores are summed in float32, got {use_fp16_qk_reduction!r}")
        cap = 0.0 if logits_soft_cap is None else logits_soft_cap
        if isinstance(cap, bool) or not isinstance(cap, (int, float)):
            raise TypeError(f"logits_soft_cap must be a number or None, got {type(cap).__name__}")
        if not (math.isfinite(cap) and cap >= 0):
            raise ValueError(f"logits_soft_cap must be at least 0 and finite, got {cap}")
        heads, kv_heads = require_int("num_qo_heads", heads, 1), require_int("num_kv_heads", kv_heads, 1)
        require_groups(heads, kv_heads)
        head_dim = require_int("head_dim", head_dim, 1)
        return cls(heads, kv_heads, head_dim, require_bool("causal", causal), float(cap), resolve_scale(sm_scale, head_dim))

    def packed(self, block: int) -> int:
        """How many query heads of a token become rows of a block."""
        return self.heads // self.kv_heads if block < ENOUGH_ROWS else 1


@dataclass(frozen=True)
class WrapperPlan:
    """A pattern and everything else that running it needs; q, k and v ``[B, S, H, D]`` or as ``layout`` says."""

    blocks: BlockLists         # over rows of ``packed`` query heads to a token
    packed: int
    q_shape: tuple[int, ...]   # as the caller passes it
    k_shape: tuple[int, ...]
    layout: str                # "BNHD", "NHD" or "HND"
    dtype: torch.dtype
    o_dtype: torch.dtype
    options: Options
    mask: Tensor | None = None         # bool [nnz, R, C]
    first_entry: Tensor | None = None  # int32 [1, 1, MB]
    listed: tuple[Tensor, Tensor] | None = None  # causal plans only
    page: tuple[int, str] | None = None          # entries of a cache's page, and "NHD" or "HND"

    def with_options(self, pos_encoding_mode: str, use_fp16_qk_reduction: bool, logits_soft_cap: float | None,
                     sm_scale: float | None) -> WrapperPlan:
        """This plan with other options, as planned where None."""
        of = self.options
        return replace(self, options=Options.checked(
            of.heads, of.kv_heads, of.head_dim, of.causal, pos_encoding_mode, use_fp16_qk_reduction,
            of.soft_cap if logits_soft_cap is None else logits_soft_cap, of.scale if sm_scale is None else sm_scale))

    def run(self, q: Tensor, k: Tensor, v: Tensor, impl: str, scales: tuple, out: Tensor | None, lse: Tensor | None,
            return_lse: bool) -> Any:
        """The result in the caller's layout, and with ``return_lse`` lse to the base 2."""
        device = self.blocks.device
        if self.page is not None:
            k, v = self._entries(self.page, k, v)
        for name, x, shape in (("q", q, self.q_shape), ("k", k, self.k_shape), ("v", v, self.k_shape)):
            check_tensor(name, x, DTYPES + FLOAT8, (None,) * len(shape), f"[{', '.join(map(str, shape))}]", device)
            if tuple(x.shape) != shape:
                raise ValueError(f"{name} must have the planned shape {shape}, got {tuple(x.shape)}")
            if x.dtype != self.dtype:
                raise TypeError(f"{name} must have the planned dtype {self.dtype}, got {x.dtype}; q_data_type of plan() says it")
            if x.stride(-1) != 1 and x.shape[-1] > 1:
                raise ValueError(f"{name} must have stride 1 in its last dimension, got {x.stride(-1)}; call .contiguous() on it")
        q, k, v = (self._scaled(*x) for x in zip((q, k, v), ("scale_q", "scale_k", "scale_v"), scales))
        require_bool("return_lse", return_lse)
        lse_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        _check_buffer("out", out, self.q_shape, self.o_dtype, device)
        _check_buffer("lse", lse, self.q_shape[:-1], lse_dtype, device)
        # The planned dtype is what is computed in, under autocast too.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            q, k, v = map(self._from_caller, (q, k, v))
            new_out, new_lse = map(self._to_caller, self._attend(q, k, v, impl))
            out = new_out.to(self.o_dtype) if out is None else out.copy_(new_out)
            if not return_lse:
                return out
            new_lse = new_lse * math.log2(math.e)
            return out, new_lse if lse is None else lse.copy_(new_lse)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, impl: str) -> tuple[Tensor, Tensor]:
        """(out ``[B, S, Hq, D]``, lse ``[B, S, Hq]`` to the base e)."""
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        rows = pack_heads(q, k.shape[1]) if self.packed > 1 else q.transpose(1, 2)
        options = self.options
        if options.soft_cap or self.listed is not None or self.mask is not None:
            out, lse = attention_within_blocks(
                rows, k, v, self.blocks, options.scale, soft_cap=options.soft_cap, mask=self.mask, first_entry=self.first_entry,
                listed=self.listed, packed=self.packed, impl=impl)
        else:
            out, lse = block_attention(rows, k, v, self.blocks, scale=options.scale, impl=impl)
        return unpack_heads(out, self.packed), unpack_heads(lse, self.packed)

    def _scaled(self, x: Tensor, name: str, scale: Tensor | None) -> Tensor:
        """float8 inputs ``[S, H, D]`` times the scale of their head, in the dtype of the result; others as they are."""
        if self.dtype not in FLOAT8:
            if scale is not None:
                raise ValueError(f"{name} must be None where float8 inputs are not planned, got {type(scale).__name__}")
            return x
        dtype = self.o_dtype if x.device.type == "cpu" or self.o_dtype in KERNEL_DTYPES else torch.bfloat16
        if scale is None:
            return x.to(dtype)
        check_tensor(name, scale, (torch.float32,), (x.shape[1],), "[heads]", x.device)
        return (x.float() * scale[:, None]).to(dtype)

    def _entries(self, page: tuple[int, str], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The planned entries of two caches, as k and v without pages."""
        (size, layout), (entries, heads, dim) = page, self.k_shape
        flat = []
        for name, x in (("k", k), ("v", v)):
            check_tensor(name, x, DTYPES + FLOAT8, (None,) * 4,
                         f"[pages, {'entries, heads' if layout == 'NHD' else 'heads, entries'}, head_dim]", None)
            x = x if layout == "NHD" else x.transpose(1, 2)
            if x.shape[1] != size:
                raise ValueError(f"{name} must have the planned {size} entries per page, got {x.shape[1]}")
            if tuple(x.shape[2:]) != (heads, dim):
                raise ValueError(f"{name} must have {heads} heads and head_dim {dim}, got shape {tuple(x.shape)}")
            if x.shape[0] * size < entries:
                raise ValueError(f"{name} must hold the planned {entries} KV entries, got {x.shape[0]} pages of {size}")
            flat.append(x.flatten(0, 1)[:entries])
        if k.shape[0] != v.shape[0]:
            raise ValueError(f"v must have k's {k.shape[0]} pages, got {v.shape[0]}")
        return flat[0], flat[1]

    def _from_caller(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.layout == "HND" else x
        return x if self.layout == "BNHD" else x[None]

    def _to_caller(self, x: Tensor) -> Tensor:
        x = x if self.layout == "BNHD" else x[0]
        return x.transpose(0, 1).contiguous() if self.layout == "HND" else x


def plan_bsr(
    indptr: Tensor | None, indices: Tensor | None, M: int, N: int, R: int, C: int, mask: Tensor | None, packed_mask: Tensor | None,
    block_mask: Tensor | None, options: Options, dtype: torch.dtype, o_dtype: torch.dtype, non_blocking: bool, device: torch.device,
) -> WrapperPlan:
    """The plan of block-sparse rows, or of a mask of blocks for every head. Reads indptr and indices back."""
    heads, kv_heads, head_dim = options.heads, options.kv_heads, options.head_dim
    if N % C:
        raise ValueError(f"N must be a multiple of C = {C}, got {N}")
    rows, columns = -(-M // R), N // C
    shapes: dict[str, Any] = dict(q_shape=(M, heads, head_dim), k_shape=(N, kv_heads, head_dim), layout="NHD", dtype=dtype,
                                  o_dtype=o_dtype, options=options)
    if block_mask is not None:
        if mask is not None or packed_mask is not None:
            raise ValueError("mask and packed_mask must be None with block_mask, which has no stored blocks that they could name")
        if indptr is not None or indices is not None:
            raise ValueError("indptr and indices must be None with block_mask, which says what is attended to in their place")
        require_values("block_mask", require_mask("block_mask", block_mask))
        if tuple(block_mask.shape) not in ((heads, rows, columns), (kv_heads, rows, columns)):
            raise ValueError(f"block_mask must be [{heads} or {kv_heads}, {rows}, {columns}], got shape {tuple(block_mask.shape)}")
        packed = options.packed(R) if block_mask.shape[0] == kv_heads else 1
        lists = BlockLists.from_mask(block_mask.to(device, non_blocking=non_blocking), R * packed, C)
        return WrapperPlan(lists, packed, **shapes, listed=listed_keys(lists, N) if options.causal else None)
    indptr, indices = _integer_row("indptr", indptr), _integer_row("indices", indices)
    longest = _check_bsr(indptr, indices, rows, columns)
    indptr, indices = (x.to(device, non_blocking=non_blocking) for x in (indptr, indices))
    if packed_mask is not None:
        mask = _unpack_mask(packed_mask, indptr, (len(indices), R, C), device, non_blocking)
    elif mask is not None:
        if tuple(require_values("mask", require_mask("mask", mask)).shape) != (len(indices), R, C):
            raise ValueError(f"mask must be [nnz, R, C] = [{len(indices)}, {R}, {C}], got shape {tuple(mask.shape)}")
        # A plan shares no memory with its caller, who may fill the buffer for the next one.
        mask = mask.to(device, non_blocking=non_blocking, copy=True)
    if mask is not None and longest * R * C >= 2**31:
        raise ValueError(f"a row of blocks must have fewer than 2**31 mask elements, got {longest} blocks of {R} x {C}")
    packed = options.packed(R)
    lists = BlockLists.from_bsr(indptr, indices, R * packed, C, num_kv_blocks=columns, capacity=longest)
    if mask is not None:
        return WrapperPlan(lists, packed, **shapes, mask=mask, first_entry=indptr[None, None, :-1].to(torch.int32, copy=True))
    return WrapperPlan(lists, packed, **shapes, listed=listed_keys(lists, N) if options.causal else None)


def plan_block_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, block_size: int | None, options: Options, device: torch.device
                    ) -> WrapperPlan:
    """The plan of the loose form, by tensors like those that run: q ``[B, S, heads, head_dim]``, mask ``[B, Nq, Nk]``."""
    heads, kv_heads, head_dim = options.heads, options.kv_heads, options.head_dim
    size = require_int("block_size", block_size, 1)
    dims = "[batch, tokens, heads, head_dim]"
    check_tensor("q", q, DTYPES, (None, None, heads, head_dim), dims, device)
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, DTYPES, (len(q), None, kv_heads, head_dim), dims, device)
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    require_mask("the block mask", mask)
    shape = (-(-q.shape[1] // size), -(-k.shape[1] // size))
    mask = mask[:, None] if mask.dim() == 3 else mask
    if not 2 <= mask.dim() <= 4 or tuple(mask.shape[-2:]) != shape:
        raise ValueError(f"the block mask must be [{shape[0]}, {shape[1]}] with the batch, or batch and heads, in front, "
                         f"got shape {tuple(mask.shape)}")
    if mask.dim() == 4 and (mask.shape[0] not in (1, q.shape[0]) or mask.shape[1] not in (1, kv_heads, heads)):
        raise ValueError(f"the block mask must have batch 1 or {q.shape[0]} and heads 1, {kv_heads} or {heads}, "
                         f"got shape {tuple(mask.shape)}")
    packed = options.packed(size) if mask.dim() == 2 or mask.shape[1] in (1, kv_heads) else 1
    lists = BlockLists.from_mask(mask.to(device), size * packed, size)
    return WrapperPlan(lists, packed, tuple(q.shape), tuple(k.shape), "BNHD", q.dtype, q.dtype, options,
                       listed=listed_keys(lists, k.shape[1]) if options.causal else None)


def plan_variable(
    block_mask: Tensor, row_sizes: Tensor, column_sizes: Tensor, options: Options, dtype: torch.dtype, non_blocking: bool,
    device: torch.device,
) -> WrapperPlan:
    """The plan of blocks of any sizes. Reads the bounds of the sizes back, all at once."""
    kv_heads, head_dim = options.kv_heads, options.head_dim
    require_values("block_mask_map", require_mask("block_mask_map", block_mask))
    if block_mask.dim() != 3 or block_mask.shape[0] != kv_heads or 0 in block_mask.shape:
        raise ValueError(f"block_mask_map must be [{kv_heads}, MB, NB], got shape {tuple(block_mask.shape)}")
    named = (("block_row_sz", row_sizes, block_mask.shape[1]), ("block_col_sz", column_sizes, block_mask.shape[2]))
    for name, x, number in named:
        if tuple(require_values(name, require_integers(name, x)).shape) != (kv_heads, number):
            raise ValueError(f"{name} must be [{kv_heads}, {number}], got shape {tuple(x.shape)}")
    bounds = [torch.stack([x.min(), x.max(), *x.sum(1).aminmax()]).to(row_sizes.device) for _, x, _ in named]
    offsets, longest, lengths = [], [], []
    for (name, x, _), (least, most, least_sum, most_sum) in zip(named, torch.stack(bounds).tolist()):
        if least < 0:
            raise ValueError(f"{name} must not be negative, got {least}")
        if least_sum != most_sum or most_sum == 0:
            raise ValueError(f"{name} must have the same sum for every head, at least 1, got {least_sum} to {most_sum}")
        ends = x.to(device, non_blocking=non_blocking).cumsum(1, dtype=torch.int32)
        offsets.append(torch.nn.functional.pad(ends, (1, 0))[None])
        longest.append(most)
        lengths.append(most_sum)
    lists = BlockLists.from_mask(block_mask.to(device, non_blocking=non_blocking), *offsets, max_q_length=longest[0],
                                 max_kv_length=longest[1])
    return WrapperPlan(lists, 1, (options.heads, lengths[0], head_dim), (kv_heads, lengths[1], head_dim), "HND", dtype, dtype, options,
                       listed=listed_keys(lists, lengths[1]) if options.causal else None)


def planned_dtype(data_type: str | torch.dtype, kv_data_type: str | torch.dtype | None, device: torch.device,
                  name: str = "q_data_type", float8: bool = False) -> torch.dtype:
    """The torch dtype that FlashInfer's names stand for, checked to run on ``device``."""
    dtype = getattr(torch, data_type, data_type) if isinstance(data_type, str) else data_type
    allowed = (DTYPES if device.type == "cpu" else KERNEL_DTYPES) + (FLOAT8 if float8 else ())
    if dtype not in allowed:
        raise TypeError(f"{name} must be one of {', '.join(str(x).removeprefix('torch.') for x in allowed)} on {device.type}, "
                        f"got {data_type}")
    if kv_data_type is not None and planned_dtype(kv_data_type, None, device, "kv_data_type", float8) != dtype:
        raise TypeError(f"kv_data_type must be q_data_type {dtype}, got {kv_data_type}")
    return dtype


def bsr_places(indptr: Tensor, nnz: int, R: int, C: int) -> Tensor:
    """int64 ``[nnz, R, C]``: where each element stands once every row of blocks is one matrix of R rows, one row after the other.

    Every place is taken once, whatever indptr holds.
    """
    device = indptr.device
    ascending = indptr.long().clamp(0, nnz).cummax(0).values
    bounds = torch.cat([ascending.new_zeros(1), ascending, ascending.new_full((1,), nnz)])
    entry = torch.arange(nnz, device=device)
    row = torch.searchsorted(bounds, entry, right=True) - 1
    first, width = bounds[row], bounds.diff()[row]
    in_row = (entry - first)[:, None, None] * C + torch.arange(C, device=device)
    return first[:, None, None] * (R * C) + torch.arange(R, device=device)[:, None] * (width * C)[:, None, None] + in_row


def _integer_row(name: str, x: Tensor | None) -> Tensor:
    x = require_values(name, require_integers(name, x))
    if x.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(x.shape)}")
    return x


def _check_bsr(indptr: Tensor, indices: Tensor, rows: int, columns: int) -> int:
    """The longest row. Reads both tensors back, at once."""
    if len(indptr) != rows + 1:
        raise ValueError(f"indptr must be [ceil(M / R) + 1] = [{rows + 1}], got shape {tuple(indptr.shape)}")
    counts = indptr.diff()
    ids = indices if len(indices) else indices.new_zeros(1)
    facts = torch.stack([counts.min(), counts.max(), indptr[0], indptr[-1], *(x.to(indptr) for x in ids.aminmax())])
    shortest, longest, first, last, least, most = facts.tolist()
    if first != 0 or last != len(indices) or shortest < 0:
        raise ValueError(f"indptr must ascend from 0 to the {len(indices)} indices, got {first} to {last}"
                         + (" with a descent between" if shortest < 0 else ""))
    if least < 0:
        raise ValueError(f"indices must be non-negative, got {least}")
    if most >= columns:
        raise ValueError(f"indices must lie in [0, N // C) = [0, {columns}), got {least} to {most}, which is out of bounds")
    return longest


def _unpack_mask(packed: Tensor, indptr: Tensor, shape: tuple[int, int, int], device: torch.device, non_blocking: bool) -> Tensor:
    """bool ``[nnz, R, C]`` from the bits of its flattened form."""
    bits = math.prod(shape)
    if not isinstance(packed, Tensor) or packed.dtype != torch.uint8:
        raise TypeError(f"packed_mask must be a uint8 tensor, got {getattr(packed, 'dtype', type(packed).__name__)}")
    if require_values("packed_mask", packed).dim() != 1 or len(packed) != -(-bits // 8):
        raise ValueError(f"packed_mask must be [ceil(nnz * R * C / 8)] = [{-(-bits // 8)}], got shape {tuple(packed.shape)}")
    packed = packed.to(device, non_blocking=non_blocking)
    flat = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1).flatten()[:bits].bool()
    return flat[bsr_places(indptr, *shape)]


def _check_buffer(name: str, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor or None, got {type(x).__name__}")
    if tuple(x.shape) != shape or x.dtype != dtype or x.device != device:
        raise ValueError(f"{name} must be {shape} in {dtype} on {device}, got {tuple(x.shape)} in {x.dtype} on {x.device}")
    if x.requires_grad:
        raise ValueError(f"{name} must not require a gradient, because results carry none, got requires_grad=True")
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride())):
        raise ValueError(f"{name} must hold every element in memory of its own, got an expanded tensor with strides {x.stride()}")
