"""FlashInfer's two wrappers of block-sparse attention, which plan once and run often, and its conversion of masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.checks import require_bool, require_int, require_integers
from ...kernels.routing import IMPLEMENTATIONS
from .plan import Options, WrapperPlan, bsr_places, plan_block_mask, plan_bsr, plan_variable, planned_dtype

# FlashInfer's names for its own kernels, which choose nothing here.
UPSTREAM_BACKENDS = ("auto", "fa2", "fa3", "cutile", "vsa_sm100_blk128", "vsa_sm100_blk64", "vsa_sm120_blk64", "vsa_blackwell",
                     "vsa_blackwell_blk64")
BACKENDS = tuple(name for name in IMPLEMENTATIONS if name not in ("auto", "reference"))
NO_SCALES = (None, None, None)


def convert_bsr_mask_layout(mask: Tensor, indptr: Tensor) -> Tensor:
    """The mask of each row of blocks as one matrix of its rows by its gathered columns; ``flashinfer.sparse.convert_bsr_mask_layout``.

    Args:
        mask: ``[nnz, R, C]``, any dtype.
        indptr: int32 or int64 ``[MB + 1]``: row i holds the blocks ``indptr[i]`` up to ``indptr[i + 1]``. Values are not read: what lies
            outside [0, nnz] is cut there, and a row that ends before it begins is empty.

    Returns:
        ``[nnz * R * C]`` in mask's dtype, on its device: for a row of n blocks R rows of n * C columns. Never synchronises, in one
        step for all rows. Blocks before the first row or behind the last one, which upstream leaves unwritten, are a row of their own.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 3:
        raise ValueError(f"mask must be a tensor [nnz, R, C], got {getattr(mask, 'shape', type(mask).__name__)}")
    if require_integers("indptr", indptr).dim() != 1 or len(indptr) < 1:
        raise ValueError(f"indptr must be [MB + 1], got shape {tuple(indptr.shape)}")
    places = bsr_places(indptr.to(mask.device), *mask.shape)
    return torch.empty(mask.numel(), dtype=mask.dtype, device=mask.device).scatter_(0, places.flatten(), mask.reshape(-1))


class _Wrapper:
    """Base of both wrappers: the workspace, and running a plan."""

    run: Callable[..., Any]

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto", kv_layout: str = "NHD") -> None:
        """
        Args:
            float_workspace_buffer: any tensor; where it lies is where the wrapper works. Nothing is ever written to it.
            backend: "torch", "triton", "cudnn" or "hopper" as ``impl`` of ``block_sparse_attention``. FlashInfer's own names ("auto",
                "fa2", "fa3", "vsa_sm100_blk128", ...) stand for kernels of FlashInfer's and all mean "auto".
            kv_layout: "NHD", tokens before heads; "HND" in pages of a cache, heads before entries, where ``plan`` is given their size.
        """
        if not isinstance(backend, str) or backend not in UPSTREAM_BACKENDS + BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(map(repr, UPSTREAM_BACKENDS + BACKENDS))}, got {backend!r}")
        if not isinstance(kv_layout, str) or kv_layout not in ("NHD", "HND"):
            raise ValueError(f"kv_layout must be 'NHD' or 'HND', got {kv_layout!r}")
        self._kv_layout = kv_layout
        self.reset_workspace_buffer(float_workspace_buffer)
        self._impl = backend if backend in BACKENDS else "auto"
        self._plan: WrapperPlan | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor | None = None) -> None:
        """Works from now on where ``float_workspace_buffer`` lies. The second buffer is FlashInfer's; none is needed here."""
        if not isinstance(float_workspace_buffer, Tensor):
            raise TypeError(f"float_workspace_buffer must be a tensor, got {type(float_workspace_buffer).__name__}")
        self.device = float_workspace_buffer.device

    def _check_layout(self) -> None:
        if self._kv_layout != "NHD":
            raise ValueError("kv_layout must be 'NHD' without pages of a cache, got 'HND'; transpose keys and values instead, which costs "
                             "nothing")

    def _planned(self) -> WrapperPlan:
        if self._plan is None:
            raise RuntimeError("plan() must be called before run()")
        return self._plan

    def run_return_lse(self, q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
        """``run(..., return_lse=True)``, which upstream's documentation names."""
        return self.run(q, k, v, return_lse=True, **options)

    def end_forward(self) -> None:
        """Does nothing, as upstream; deprecated there."""


class BlockSparseAttentionWrapper(_Wrapper):
    """Attention with a block-sparse matrix as its mask; ``flashinfer.sparse.BlockSparseAttentionWrapper``.

    Inference only: results carry no gradients. ``plan`` says what is attended to, ``run`` attends; one plan serves any number of runs,
    which never synchronise and may be captured in a CUDA graph.
    """

    def plan(
        self, indptr: Tensor | None, indices: Tensor | None, M: int | Tensor, N: int | Tensor, R: int | None = None, C: int | None = None,
        num_qo_heads: int = 0, num_kv_heads: int = 0, head_dim: int = 0, mask: Tensor | None = None, packed_mask: Tensor | None = None,
        causal: bool = False, pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype = "float16", non_blocking: bool = True, block_mask: Tensor | None = None,
        kv_cache_page_size: int | None = None, block_size: int | None = None,
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
            mask: bool ``[nnz, R, C]``: which query token of a stored block sees which of its keys; None = all.
            packed_mask: uint8 ``[ceil(nnz * R * C / 8)]``, in place of ``mask``: the bits of ``convert_bsr_mask_layout(mask, indptr)``, the
                first in the lowest place.
            causal: a row block of L query tokens and n listed keys, in the order in which they are listed: token u sees the first
                n - L + u + 1 of them. Not by positions in the sequence. Without effect where a mask is given, as upstream.
            pos_encoding_mode: must be "NONE"; rope_scale and rope_theta then have no meaning and are not read.
            use_fp16_qk_reduction: must be False: scores are summed in float32.
            logits_soft_cap: c > 0 caps a scaled score x to c * tanh(x / c); None and 0 do not.
            sm_scale: factor on the scores; default 1 / sqrt(head_dim).
            q_data_type, kv_data_type: dtype of q, k and v: float16 or bfloat16, and on a CPU float32 and float64. The second is the first.
                float8_e4m3fn and float8_e5m2 too: such inputs are scaled to o_data_type first, or to bfloat16 where no kernel takes that.
            o_data_type: dtype of what ``run`` returns; float16 unless said otherwise, whatever q's, as upstream.
            non_blocking: copies from the CPU to the device do not wait. Pinned buffers must keep their values until then; all others may
                be written to as soon as ``plan`` returns.
            block_mask: bool ``[num_qo_heads or num_kv_heads, MB, NB]``, in place of indptr and indices, which must then be None: a pattern
                for every head.
            kv_cache_page_size: p entries a page: keys lie in a cache of pages, of which the first N entries are planned for; column c is
                entry c % p of page c // p. C must be 1.

        The loose form ``plan(q, k, v, block_mask, num_qo_heads=..., num_kv_heads=..., head_dim=..., block_size=...)`` takes the first four
        in place of indptr, indices, M and N: q ``[B, S, num_qo_heads, head_dim]``, k and v ``[B, S, num_kv_heads, head_dim]``, block_mask
        bool ``[Nq, Nk]``, ``[B, Nq, Nk]`` or ``[B, H, Nq, Nk]``, and block_size tokens for both. dtypes are q's; ``run`` then takes and
        returns tensors of these shapes. It never synchronises.

        float8 inputs save no time, and products are as exact as the wider dtype's. Pages in "HND" layout are copied.
        """
        options = Options.checked(num_qo_heads, num_kv_heads, head_dim, causal, pos_encoding_mode, use_fp16_qk_reduction,
                                  logits_soft_cap, sm_scale)
        require_bool("non_blocking", non_blocking)
        if isinstance(M, Tensor) or block_size is not None:
            if any(x is not None for x in (mask, packed_mask, block_mask, kv_cache_page_size)):
                raise ValueError("mask, packed_mask, block_mask and kv_cache_page_size must be None where q, k, v and a block mask are "
                                 "planned with")
            self._check_layout()
            # Whether they are tensors is asked there.
            loose: tuple[Any, Any, Any, Any] = (indptr, indices, M, N)
            self._plan = plan_block_mask(*loose, block_size, options, self.device)
            return
        dtype = planned_dtype(q_data_type, kv_data_type, self.device, float8=True)
        M, N, R, C = (require_int(name, value, 1) for name, value in (("M", M), ("N", N), ("R", R), ("C", C)))
        if kv_cache_page_size is None:
            self._check_layout()
        elif require_int("kv_cache_page_size", kv_cache_page_size, 1) and C != 1:
            raise ValueError(f"C must be 1 with kv_cache_page_size, because columns are single entries of the cache, got {C}")
        plan = plan_bsr(indptr, indices, M, N, R, C, mask, packed_mask, block_mask, options, dtype,
                        planned_dtype(o_data_type, None, torch.device("cpu"), "o_data_type"), non_blocking, self.device)
        self._plan = replace(plan, page=None if kv_cache_page_size is None else (kv_cache_page_size, self._kv_layout))

    begin_forward = plan

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor | None = None, scale_k: Tensor | None = None, scale_v: Tensor | None = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends as planned. Never waits for the device (synchronises).

        Args:
            q: ``[M, num_qo_heads, head_dim]`` in the planned dtype.
            k, v: ``[N, num_kv_heads, head_dim]``; with ``kv_cache_page_size`` p the cache, ``[pages, p, num_kv_heads, head_dim]`` or for
                "HND" ``[pages, num_kv_heads, p, head_dim]``, of at least N entries.
            scale_q, scale_k, scale_v: float32 ``[num_qo_heads]``, ``[num_kv_heads]`` and ``[num_kv_heads]`` with float8 inputs, what each
                head's are to be multiplied with; None for 1, and for all others.
            out: takes the result, in its shape and dtype, every element in memory of its own and without a gradient; default a new tensor.
            lse: takes the log-sum-exp, such a tensor too, with ``return_lse``.
            return_lse: also return the log-sum-exp of each row's scores.
            enable_pdl: a hint about how FlashInfer's kernels are launched, without a meaning here.

        Returns:
            out ``[M, num_qo_heads, head_dim]`` in ``o_data_type``; with ``return_lse`` also lse, float32 ``[M, num_qo_heads]``
            (float64 for float64 inputs), logarithm to the base 2. A row without keys gives out = 0 and lse = -inf.

        Raises:
            RuntimeError: nothing is planned; FlashInfer's wrappers raise the same.
        """
        return self._planned().run(q, k, v, self._impl, (scale_q, scale_k, scale_v), out, lse, return_lse)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor | None = None, scale_k: Tensor | None = None, scale_v: Tensor | None = None,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    ) -> Tensor:
        """``run``, with options for this call in place of the planned ones; deprecated upstream.

        None leaves an option as planned, where upstream would forget what was planned, for this call and all that follow.
        """
        plan = self._planned().with_options(pos_encoding_mode, use_fp16_qk_reduction, logits_soft_cap, sm_scale)
        return plan.run(q, k, v, self._impl, (scale_q, scale_k, scale_v), None, None, False)


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
                ``BlockSparseAttentionWrapper.plan``; under ``causal`` listed keys stand in the order of the sequence.
            q_data_type, kv_data_type: dtype of q, k, v and of the result.
        """
        if isinstance(block_mask_map, Tensor) and block_mask_map.is_floating_point():
            raise ValueError("block_mask_map must be a bool tensor [num_kv_heads, MB, NB], got a floating-point one: plan takes "
                             "block_mask_map, block_row_sz and block_col_sz, because q, k and v do not say what attends to what")
        self._check_layout()
        options = Options.checked(num_qo_heads, num_kv_heads, head_dim, causal, pos_encoding_mode, use_fp16_qk_reduction,
                                  logits_soft_cap, sm_scale)
        dtype = planned_dtype(q_data_type, kv_data_type, self.device)
        self._plan = plan_variable(block_mask_map, block_row_sz, block_col_sz, options, dtype, require_bool("non_blocking", non_blocking),
                                   self.device)

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
        """
        return self._planned().run(q, k, v, self._impl, NO_SCALES, out, lse, return_lse)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """``run``, with options for this call as in ``BlockSparseAttentionWrapper.forward``; deprecated upstream."""
        plan = self._planned().with_options(pos_encoding_mode, use_fp16_qk_reduction, logits_soft_cap, sm_scale)
        return plan.run(q, k, v, self._impl, NO_SCALES, None, None, False)
