"""FlashInfer's two wrappers of block-sparse attention, which plan once and run often: their patterns as lists of blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention import block_sparse_attention
from ..blocks import BlockLists
from ..checks import DTYPES, check_tensor, require_bool, require_int, require_integers, require_mask, require_values, resolve_scale
from ..routing import IMPLEMENTATIONS, KERNEL_DTYPES
from .packed import heads_packed, pack_heads, unpack_heads

# FlashInfer's names for its own kernels, which choose nothing here.
UPSTREAM_BACKENDS = ("auto", "fa2", "fa3", "cutile", "cake", "vsa_sm100_blk128", "vsa_sm100_blk64", "vsa_sm120_blk64", "vsa_blackwell",
                     "vsa_blackwell_blk64")
BACKENDS = tuple(name for name in IMPLEMENTATIONS if name not in ("auto", "reference"))
# What a list of whole blocks does not say, by argument: the values that ask for nothing, and why no other is taken.
_UNSERVED: dict[str, tuple[tuple, str]] = {
    "mask": ((None,), "blocks are attended to as wholes"),
    "packed_mask": ((None,), "blocks are attended to as wholes"),
    "causal": ((False,), "listed blocks have no order"),
    "pos_encoding_mode": (("NONE",), "positions are encoded before attention here"),
    "use_fp16_qk_reduction": ((False,), "scores are summed in float32"),
    "logits_soft_cap": ((None, 0), "scores are as they are"),
    "scale_q": ((None,), "inputs have at least 16 bits"),
    "scale_k": ((None,), "inputs have at least 16 bits"),
    "scale_v": ((None,), "inputs have at least 16 bits"),
}


@dataclass(frozen=True)
class _Plan:
    """A pattern and everything else that running it needs."""

    blocks: BlockLists         # over rows of ``packed`` query heads to a token
    packed: int
    q_shape: tuple[int, ...]   # as the caller passes it
    k_shape: tuple[int, ...]
    heads_first: bool
    dtype: torch.dtype
    o_dtype: torch.dtype
    scale: float


class _Wrapper:
    """Base of both wrappers: the workspace, and running a plan."""

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        """
        Args:
            float_workspace_buffer: any tensor; where it lies is where the wrapper works. Nothing is ever written to it.
            backend: "torch", "triton", "cudnn" or "hopper" as ``impl`` of ``block_sparse_attention``. FlashInfer's own names ("auto",
                "fa2", "fa3", "vsa_sm100_blk128", ...) stand for kernels of FlashInfer's and all mean "auto".

        Raises:
            TypeError, ValueError: the argument's name, what was required and what came.
        """
        if backend not in UPSTREAM_BACKENDS + BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(map(repr, UPSTREAM_BACKENDS + BACKENDS))}, got {backend!r}")
        self.reset_workspace_buffer(float_workspace_buffer)
        self._impl = backend if backend in BACKENDS else "auto"
        self._plan: _Plan | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor | None = None) -> None:
        """Works from now on where ``float_workspace_buffer`` lies. The second buffer is FlashInfer's; none is needed here."""
        if not isinstance(float_workspace_buffer, Tensor):
            raise TypeError(f"float_workspace_buffer must be a tensor, got {type(float_workspace_buffer).__name__}")
        self.device = float_workspace_buffer.device

    def _run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, return_lse: bool
             ) -> Tensor | tuple[Tensor, Tensor]:
        """The result in the caller's layout, and with ``return_lse`` lse to the base 2."""
        plan = self._plan
        if plan is None:
            raise RuntimeError("plan() must be called before run()")
        device = plan.blocks.device
        for name, x, shape in (("q", q, plan.q_shape), ("k", k, plan.k_shape), ("v", v, plan.k_shape)):
            check_tensor(name, x, DTYPES, shape, "as planned", device)
            if x.dtype != plan.dtype:
                raise TypeError(f"{name} must have the planned dtype {plan.dtype}, got {x.dtype}; q_data_type of plan() says it")
            if x.stride(-1) != 1 and x.shape[-1] > 1:
                raise ValueError(f"{name} must have stride 1 in its last dimension, got {x.stride(-1)}; call .contiguous() on it")
        require_bool("return_lse", return_lse)
        _check_buffer("out", out, plan.q_shape, plan.o_dtype, device)
        _check_buffer("lse", lse, plan.q_shape[:-1], torch.float64 if plan.dtype == torch.float64 else torch.float32, device)
        if not plan.heads_first:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
            q = q.transpose(0, 1) if plan.packed == 1 else pack_heads(q[None], len(k))[0]
        # The planned dtype is what is computed in, under autocast too.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            found = block_sparse_attention(q[None], k[None], v[None], plan.blocks, scale=plan.scale, return_lse=True, impl=self._impl)
            new_out, new_lse = (x[0].contiguous() if plan.heads_first else unpack_heads(x, plan.packed)[0] for x in found)
            out = new_out.to(plan.o_dtype) if out is None else out.copy_(new_out)
            if not return_lse:
                return out
            new_lse = new_lse * math.log2(math.e)
            return out, new_lse if lse is None else lse.copy_(new_lse)


class BlockSparseAttentionWrapper(_Wrapper):
    """Attention with a block-sparse matrix as its mask; ``flashinfer.sparse.BlockSparseAttentionWrapper``.

    Inference only: results carry no gradients. ``plan`` says what is attended to, ``run`` attends; one plan serves any number of runs,
    which never synchronise and may be captured in a CUDA graph.
    """

    def plan(
        self, indptr: Tensor | None, indices: Tensor | None, M: int, N: int, R: int, C: int, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, mask: None = None, packed_mask: None = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, o_data_type: str | torch.dtype = "float16", non_blocking: bool = True,
        block_mask: Tensor | None = None,
    ) -> None:
        """Prepares what ``run`` needs. Synchronises once, to read the bounds of indptr and indices; not at all where these are on a
        CPU or with ``block_mask``.

        Args:
            indptr: int32 or int64 ``[MB + 1]``, MB = ceil(M / R): row i of the block matrix holds the block columns
                ``indices[indptr[i]:indptr[i + 1]]``. The same for all heads.
            indices: int32 or int64 ``[nnz]``, each column at most once in a row.
            M, N: query and key tokens. N is a multiple of C.
            R, C: tokens of a block's rows and columns. The last row of blocks may be shorter.
            num_qo_heads, num_kv_heads, head_dim: of q, and of k and v; num_qo_heads is a multiple of num_kv_heads.
            mask, packed_mask, causal, pos_encoding_mode, use_fp16_qk_reduction, logits_soft_cap: as they are by default.
            rope_scale, rope_theta: not read, for they belong to another ``pos_encoding_mode``.
            sm_scale: factor on the scores; default 1 / sqrt(head_dim).
            q_data_type, kv_data_type: dtype of q, k and v: float16 or bfloat16, and on a CPU float32 and float64. The second is the first.
            o_data_type: dtype of what ``run`` returns; float16 unless said otherwise, whatever q's, as upstream.
            non_blocking: copies from the CPU to the device do not wait.
            block_mask: bool ``[num_qo_heads or num_kv_heads, MB, NB]``, in place of indptr and indices, which must then be None: a pattern
                for every head.

        Raises:
            TypeError, ValueError: the argument's name, what was required and what came.

        What differs from upstream: any head dimension, block_mask on any GPU with its own pattern for every query head, and rows without
        keys give zeros; whole blocks alone, as with FlashInfer's own kernels for blocks of 64 and 128 tokens.
        """
        _refuse(mask=mask, packed_mask=packed_mask, causal=causal, pos_encoding_mode=pos_encoding_mode,
                use_fp16_qk_reduction=use_fp16_qk_reduction, logits_soft_cap=logits_soft_cap)
        require_bool("non_blocking", non_blocking)
        dtype = _planned_dtype("q_data_type", q_data_type, self.device, kv_data_type)
        o_dtype = _planned_dtype("o_data_type", o_data_type, torch.device("cpu"))
        M, N, R, C = (require_int(name, value, 1) for name, value in (("M", M), ("N", N), ("R", R), ("C", C)))
        heads, kv_heads, head_dim = _check_heads(num_qo_heads, num_kv_heads, head_dim)
        if N % C:
            raise ValueError(f"N must be a multiple of C = {C}, got {N}")
        rows, columns, packed = -(-M // R), N // C, heads_packed(R, heads, kv_heads)
        if block_mask is None:
            indptr, indices = _integer_row("indptr", indptr), _integer_row("indices", indices)
            longest = _check_bsr(indptr, indices, rows, columns)
            indptr, indices = (x.to(self.device, non_blocking=non_blocking) for x in (indptr, indices))
            lists = BlockLists.from_bsr(indptr, indices, R * packed, C, num_kv_blocks=columns, capacity=longest)
        else:
            if indptr is not None or indices is not None:
                raise ValueError("indptr and indices must be None with block_mask, which says what is attended to in their place")
            require_values("block_mask", require_mask("block_mask", block_mask))
            if tuple(block_mask.shape) not in ((heads, rows, columns), (kv_heads, rows, columns)):
                raise ValueError(f"block_mask must be [{heads} or {kv_heads}, {rows}, {columns}], got shape {tuple(block_mask.shape)}")
            packed = packed if block_mask.shape[0] == kv_heads else 1
            lists = BlockLists.from_mask(block_mask.to(self.device, non_blocking=non_blocking), R * packed, C)
        self._plan = _Plan(lists, packed, (M, heads, head_dim), (N, kv_heads, head_dim), False, dtype, o_dtype,
                           resolve_scale(sm_scale, head_dim))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, scale_q: None = None, scale_k: None = None, scale_v: None = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends as planned. Never waits for the device (synchronises).

        Args:
            q: ``[M, num_qo_heads, head_dim]`` in the planned dtype.
            k, v: ``[N, num_kv_heads, head_dim]``.
            scale_q, scale_k, scale_v: None; upstream's are for float8 inputs.
            out: takes the result, in its shape and dtype, every element in memory of its own and without a gradient; default a new tensor.
            lse: takes the log-sum-exp, such a tensor too, with ``return_lse``.
            return_lse: also return the log-sum-exp of each row's scores.
            enable_pdl: a hint about how FlashInfer's kernels are launched, without a meaning here.

        Returns:
            out ``[M, num_qo_heads, head_dim]`` in ``o_data_type``; with ``return_lse`` also lse, float32 ``[M, num_qo_heads]``
            (float64 for float64 inputs), logarithm to the base 2. A row without keys gives out = 0 and lse = -inf.

        Raises:
            TypeError, ValueError: the argument's name, what was required and what came.
            RuntimeError: nothing is planned; FlashInfer's wrappers raise the same.
        """
        _refuse(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
        return self._run(q, k, v, out, lse, return_lse)


class VariableBlockSparseAttentionWrapper(_Wrapper):
    """Attention with blocks of any sizes, of their own for every key/value head; ``flashinfer.sparse.VariableBlockSparseAttentionWrapper``.

    Inference only, as ``BlockSparseAttentionWrapper``. Here heads come before tokens.
    """

    def plan(
        self, block_mask_map: Tensor, block_row_sz: Tensor, block_col_sz: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        causal: bool = False, pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None, non_blocking: bool = True,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Prepares what ``run`` needs. Synchronises once, to read the bounds of the block sizes; not where these are on a CPU.

        Args:
            block_mask_map: bool ``[num_kv_heads, MB, NB]``, on a CPU or the device; shared by the query heads of a key/value head.
            block_row_sz: int32 or int64 ``[num_kv_heads, MB]``, query tokens of each block of rows; the same sum for every head.
            block_col_sz: int32 or int64 ``[num_kv_heads, NB]``, key tokens of each block of columns; the same sum for every head.
            num_qo_heads, num_kv_heads, head_dim: of q, and of k and v; num_qo_heads is a multiple of num_kv_heads.
            causal, pos_encoding_mode, use_fp16_qk_reduction, logits_soft_cap, sm_scale, rope_scale, rope_theta, non_blocking: as in
                ``BlockSparseAttentionWrapper.plan``.
            q_data_type, kv_data_type: dtype of q, k, v and of the result.

        Raises:
            TypeError, ValueError: the argument's name, what was required and what came.

        What differs from upstream: sums of the block sizes are checked; blocks of 0 tokens and a map without any block are legal; the plan
        keeps lists of blocks, not of tokens, so it is as small as the map.
        """
        _refuse(causal=causal, pos_encoding_mode=pos_encoding_mode, use_fp16_qk_reduction=use_fp16_qk_reduction,
                logits_soft_cap=logits_soft_cap)
        require_bool("non_blocking", non_blocking)
        dtype = _planned_dtype("q_data_type", q_data_type, self.device, kv_data_type)
        heads, kv_heads, head_dim = _check_heads(num_qo_heads, num_kv_heads, head_dim)
        require_values("block_mask_map", require_mask("block_mask_map", block_mask_map))
        if block_mask_map.dim() != 3 or block_mask_map.shape[0] != kv_heads or 0 in block_mask_map.shape:
            raise ValueError(f"block_mask_map must be [{kv_heads}, MB, NB], got shape {tuple(block_mask_map.shape)}")
        named = (("block_row_sz", block_row_sz, block_mask_map.shape[1]), ("block_col_sz", block_col_sz, block_mask_map.shape[2]))
        for name, x, number in named:
            if tuple(require_values(name, require_integers(name, x)).shape) != (kv_heads, number):
                raise ValueError(f"{name} must be [{kv_heads}, {number}], got shape {tuple(x.shape)}")
        # All bounds are read back at once.
        bounds = [torch.stack([x.min(), x.max(), *x.sum(1).aminmax()]).to(block_row_sz.device) for _, x, _ in named]
        offsets, longest, lengths = [], [], []
        for (name, x, _), (least, most, least_sum, most_sum) in zip(named, torch.stack(bounds).tolist()):
            if least < 0:
                raise ValueError(f"{name} must not be negative, got {least}")
            if least_sum != most_sum or most_sum == 0:
                raise ValueError(f"{name} must have the same sum for every head, at least 1, got {least_sum} to {most_sum}")
            ends = x.to(self.device, non_blocking=non_blocking).cumsum(1, dtype=torch.int32)
            offsets.append(torch.nn.functional.pad(ends, (1, 0))[None])
            longest.append(most)
            lengths.append(most_sum)
        lists = BlockLists.from_mask(block_mask_map.to(self.device, non_blocking=non_blocking), *offsets, max_q_length=longest[0],
                                     max_kv_length=longest[1])
        self._plan = _Plan(lists, 1, (heads, lengths[0], head_dim), (kv_heads, lengths[1], head_dim), True, dtype, dtype,
                           resolve_scale(sm_scale, head_dim))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends as planned. Never waits for the device (synchronises).

        Args:
            q: ``[num_qo_heads, qo_len, head_dim]`` in the planned dtype.
            k, v: ``[num_kv_heads, kv_len, head_dim]``.
            The others, the result and the errors: as in ``BlockSparseAttentionWrapper.run``; out has the planned dtype, and out and lse
                have heads before tokens.

        What differs from upstream: ``out`` and ``lse`` have the result's shape and are what is returned, where upstream wants its internal
        layout there and returns copies.
        """
        return self._run(q, k, v, out, lse, return_lse)


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        nothing, why = _UNSERVED[name]
        if isinstance(value, Tensor) or value not in nothing:
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} must be {nothing[0]!r}, because {why}, got {got}")


def _planned_dtype(name: str, data_type: str | torch.dtype, device: torch.device, kv_data_type: str | torch.dtype | None = None
                   ) -> torch.dtype:
    """The torch dtype that FlashInfer's names stand for, checked to run on ``device``."""
    dtype = getattr(torch, data_type, data_type) if isinstance(data_type, str) else data_type
    allowed = DTYPES if device.type == "cpu" else KERNEL_DTYPES
    if not isinstance(dtype, torch.dtype) or dtype not in allowed:
        raise TypeError(f"{name} must be one of {', '.join(str(x).removeprefix('torch.') for x in allowed)} on {device.type}, "
                        f"got {data_type}")
    if kv_data_type is not None and _planned_dtype("kv_data_type", kv_data_type, device) != dtype:
        raise TypeError(f"kv_data_type must be q_data_type {dtype}, got {kv_data_type}")
    return dtype


def _check_heads(heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    heads, kv_heads = require_int("num_qo_heads", heads, 1), require_int("num_kv_heads", kv_heads, 1)
    if heads % kv_heads:
        raise ValueError(f"num_qo_heads must be a multiple of the {kv_heads} key/value heads, got {heads}")
    return heads, kv_heads, require_int("head_dim", head_dim, 1)


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
    if least < 0 or most >= columns:
        raise ValueError(f"indices must lie in [0, N // C) = [0, {columns}), got {least} to {most}")
    return longest


def _check_buffer(name: str, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if x is None:
        return
    check_tensor(name, x, (dtype,), shape, "the result's shape", device)
    if x.requires_grad:
        raise ValueError(f"{name} must not require a gradient, because results carry none, got requires_grad=True")
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride())):
        raise ValueError(f"{name} must hold every element in memory of its own, got an expanded tensor with strides {x.stride()}")
