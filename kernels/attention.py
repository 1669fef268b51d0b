"""block_sparse_attention: check the arguments, choose an implementation, call it; its torch.library registration."""

from __future__ import annotations

import math
import os
from functools import lru_cache, partial

import torch
from torch import Tensor

from .blocks import BlockLists
from .operators import watched
from .routing import brings_together

IMPLEMENTATIONS = ("auto", "reference", "gather", "triton", "hopper")
KERNELS = ("triton", "hopper")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KERNEL_DTYPES = (torch.float16, torch.bfloat16)
TRITON_HEAD_DIMS = range(16, 257)
HOPPER_HEAD_DIMS = (64, 128)
# Two warpgroups of 64 query rows; on shorter blocks one of them would idle.
HOPPER_QUERY_BLOCK = 128
# Its copy engine brings at least 64 neighbouring keys; the portable kernels gather shorter blocks than these key by key.
HOPPER_KEY_BLOCK = 16
HOPPER_BACKWARD_KEY_BLOCK = 128


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, *,
    scale: float | None = None, causal: bool = False, return_lse: bool = False, deterministic: bool = True, impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention in which every query block attends to its own list of key blocks.

    Args:
        q: ``[B, Hq, Sq, D]``, any strides whose last is 1, so ``[B, S, H, D].transpose(1, 2)`` costs nothing.
            float16 or bfloat16; on the gather and reference implementations float32 and float64 too. Under autocast q, k and v are
            cast to its dtype, as by ``torch.nn.functional.scaled_dot_product_attention``.
        k: ``[B, Hkv, Skv, D]``, q's dtype and device. Hq must be a multiple of Hkv; query head h reads head h // (Hq / Hkv).
        v: ``[B, Hkv, Skv, D]``.
        blocks: the pattern, on q's device.
        scale: factor on the scores, positive; default 1 / sqrt(D).
        causal: query i then sees the keys up to i + Skv - Sq, within the listed blocks.
        return_lse: also return the log-sum-exp of each row's scaled scores.
        deterministic: the backward pass gives the same bits for the same inputs. False lets "hopper" add up q's gradient in whatever order
            it comes, in 0.90 to 1.01 of the time; the other implementations have only one order.
        impl: which implementation runs; see ``resolve_impl``. A choice that cannot run raises.

    Returns:
        out with q's shape, dtype and memory order; with ``return_lse`` also lse, float32 ``[B, Hq, Sq]`` (float64 for float64 inputs),
        natural logarithm.
        A row that attends to nothing gives out = 0, lse = -inf and zero gradients.

    Differentiable in q, k and v, also through lse; not twice, and not under torch.func. Same inputs, same bits.
    Never waits for the device (the gather implementation on a CPU reads the counts, where there is nothing to wait for). The values in
    ``blocks`` are not read here: ``BlockLists.check_values`` checks them. Ids out of range are treated as absent.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    q, k, v = autocast_inputs(q=q, k=k, v=v)
    _check(q, k, v, blocks)
    scale = resolve_scale(scale, q.shape[-1])
    for name, flag in (("causal", causal), ("return_lse", return_lse), ("deterministic", deterministic)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {type(flag).__name__}")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    # A compiled graph asks the GPU when it runs, in the operator.
    if not torch.compiler.is_compiling():
        impl = resolve_impl(impl, q.device, q.dtype, q.shape[-1], blocks.max_q_length, _key_run(q, k, blocks, causal))
    if impl == "reference":
        from .reference import reference_attention

        out, lse = reference_attention(q, k, v, blocks, scale, causal)
    else:
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if not (needs_grad or watched(q, k, v)):
            out, lse = _run(q, k, v, blocks, scale, causal, impl)
            return (out, lse) if return_lse else out
        # The transpose is an input of the operator, so that lists used by many layers are transposed once.
        scatters = impl == "gather" or (impl == "auto" and q.device.type == "cpu")
        scatters = scatters or brings_together(blocks, q.shape[1], k.shape[1], causal, backward=True)
        flipped = _with_kv_blocks(blocks, k.shape[2]).transpose() if needs_grad and not scatters else None
        out, lse = _forward(q, k, v, *_flatten(blocks), *((flipped.counts, flipped.indices) if flipped else (None, None)),
                            float(scale), causal, deterministic, impl)
    return (out, lse) if return_lse else out


def attend_in_place(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, *, scale: float | None = None, deterministic: bool = True, impl: str = "auto",
) -> Tensor:
    """``block_sparse_attention`` for a caller that has made q itself and does not need it any more: without a gradient, and where
    kernels run, the result takes q's memory.

    For use inside the package: q's memory must be nobody else's, and no part of it may be q twice (an expanded dimension). The arguments,
    the result and what is raised are as there.
    """
    q, k, v = autocast_inputs(q=q, k=k, v=v)
    plain = not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad) or watched(q, k, v))
    if plain:
        _check(q, k, v, blocks)
        impl = resolve_impl(impl, q.device, q.dtype, q.shape[-1], blocks.max_q_length, blocks.max_kv_length)
    if not plain or impl not in KERNELS or brings_together(blocks, q.shape[1], k.shape[1], causal=False):
        return block_sparse_attention(q, k, v, blocks, scale=scale, deterministic=deterministic, impl=impl)
    return _run(q, k, v, blocks, resolve_scale(scale, q.shape[-1]), False, impl, in_place=True)[0]


def resolve_impl(
    impl: str, device: torch.device, dtype: torch.dtype, head_dim: int, q_block: int = HOPPER_QUERY_BLOCK, kv_block: int = HOPPER_KEY_BLOCK,
) -> str:
    """The implementation that ``impl`` stands for: a function of its arguments and of the kind of GPU alone.

    "auto" on a GPU with float16 or bfloat16: "hopper" on a Hopper GPU (sm_90) with head_dim 64 or 128, a longest query block (``q_block``,
    in tokens) of at least 128 and a longest key block (``kv_block``) of at least 16, or shorter ones whose keys are copied together before
    they are attended to (``routing.brings_together``); else "triton" with head_dim 16 to 256. "gather" for everything else. The backward
    of "hopper" is the portable one for key blocks of up to 64 tokens that are not copied together. Under Triton's interpreter
    (TRITON_INTERPRET=1 when Triton is first imported) an explicit "triton" also runs on a CPU, with float16.

    Raises:
        ValueError: an unknown name, or an explicit choice that cannot run on such tensors.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    fits_triton = dtype in KERNEL_DTYPES and head_dim in TRITON_HEAD_DIMS
    fits_hopper = dtype in KERNEL_DTYPES and head_dim in HOPPER_HEAD_DIMS
    if impl == "auto":
        if fits_hopper and q_block >= HOPPER_QUERY_BLOCK and kv_block >= HOPPER_KEY_BLOCK and _is_hopper(device):
            return "hopper"
        return "triton" if device.type == "cuda" and fits_triton else "gather"
    if impl == "triton":
        if not fits_triton:
            raise ValueError(f"impl='triton' requires float16 or bfloat16 and a head_dim of 16 to 256, got {dtype} and {head_dim}")
        if device.type != "cuda" and not _interpreting():
            raise ValueError(f"impl='triton' requires a GPU, got tensors on {device}")
        # The interpreter computes with numpy, which has no bfloat16.
        if device.type != "cuda" and dtype != torch.float16:
            raise ValueError(f"impl='triton' requires float16 in Triton's interpreter, got {dtype}")
    if impl == "hopper":
        if not fits_hopper:
            raise ValueError(f"impl='hopper' requires float16 or bfloat16 and a head_dim of 64 or 128, got {dtype} and {head_dim}")
        if not _is_hopper(device):
            raise ValueError(f"impl='hopper' requires a Hopper GPU (sm_90), got {_describe(device)}")
    return impl


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """The factor on the scores that ``scale`` stands for: 1 / sqrt(head_dim) for None.

    Raises:
        TypeError: not a number.
        ValueError: not positive and finite, or no head_dim of at least 1.
    """
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}")
    if scale is None:
        return head_dim ** -0.5
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return float(scale)


def autocast_inputs(**inputs: Tensor) -> tuple[Tensor, ...]:
    """The inputs in autocast's dtype where autocast is on for their device, float64 left alone; checked to be floating-point tensors.

    Raises:
        TypeError: the input's name, and what came.
    """
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
    device = next(iter(inputs.values())).device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tuple(inputs.values())
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in inputs.values())


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"tensors on {device}"


def _interpreting() -> bool:
    """As Triton itself reads it, without importing Triton."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def _check(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists) -> None:
    # Asked for once: every question to a tensor costs a tenth of a microsecond, and there are fifty.
    dtype, device, q_shape, k_shape = q.dtype, q.device, q.shape, k.shape
    for name, x, shape in (("q", q, q_shape), ("k", k, k_shape), ("v", v, v.shape)):
        if len(shape) != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, head_dim], got shape {tuple(shape)}")
        if x.dtype != dtype:
            raise TypeError(f"{name} must have q's dtype {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on q's device {device}, got {x.device}")
        if shape[0] != q_shape[0] or shape[3] != q_shape[3]:
            raise ValueError(f"{name} must have q's batch and head_dim {q_shape[0]} and {q_shape[3]}, got shape {tuple(shape)}")
        if x.stride(-1) != 1 and shape[3] > 1 and x.numel():
            raise ValueError(f"{name} must have stride 1 in its last dimension, got {x.stride(-1)}; call .contiguous() on it")
    if shape != k_shape:
        raise ValueError(f"v must have k's shape {tuple(k_shape)}, got {tuple(shape)}")
    batch, heads, q_len, _ = q_shape
    kv_heads, kv_len = k_shape[1], k_shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q's heads must be a multiple of k's {kv_heads}, got {heads}")
    if not isinstance(blocks, BlockLists):
        raise TypeError(f"blocks must be BlockLists, got {type(blocks).__name__}")
    if blocks.device != device:
        raise ValueError(f"blocks must be on q's device {device}, got {blocks.device}")
    for name, allowed in (("counts", (1, kv_heads, heads)), ("q_offsets", (1, kv_heads, heads)), ("q_lengths", (1, kv_heads, heads)),
                          ("kv_offsets", (1, kv_heads)), ("kv_lengths", (1, kv_heads))):
        x = getattr(blocks, name)
        if isinstance(x, Tensor) and (x.shape[0] not in (1, batch) or x.shape[1] not in allowed):
            choices = " or ".join(map(str, sorted(set(allowed))))
            raise ValueError(f"blocks.{name} must have batch 1 or {batch} and heads {choices}, got shape {tuple(x.shape)}")
    for axis, offsets, count, tokens in (("q", blocks.q_offsets, blocks.num_q_blocks, q_len),
                                         ("kv", blocks.kv_offsets, blocks.num_kv_blocks, kv_len)):
        if isinstance(offsets, int) and count is not None and count != -(-tokens // offsets):
            raise ValueError(f"blocks must have {-(-tokens // offsets)} {axis} blocks of {offsets} for {tokens} tokens, got {count}")


def _with_kv_blocks(blocks: BlockLists, kv_len: int) -> BlockLists:
    """``blocks`` itself, or with the number of key blocks that ``kv_len`` implies where it was left out."""
    if blocks.num_kv_blocks is not None:
        return blocks
    return BlockLists(blocks.counts, blocks.indices, blocks.q_offsets, blocks.kv_offsets, blocks.q_lengths,
                      num_kv_blocks=-(-kv_len // blocks.kv_offsets), max_q_length=blocks.max_q_length)


# The operator takes tensors and numbers only, so BlockLists travels as its fields; offsets None means uniform, of the longest's size.


def _flatten(blocks: BlockLists) -> tuple:
    ragged = [x if isinstance(x, Tensor) else None for x in (blocks.q_offsets, blocks.kv_offsets)]
    return (blocks.counts, blocks.indices, *ragged, blocks.q_lengths, blocks.kv_lengths, blocks.num_kv_blocks, blocks.max_q_length,
            blocks.max_kv_length)


def _unflatten(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length, max_kv_length) -> BlockLists:
    q_offsets = max_q_length if q_offsets is None else q_offsets
    kv_offsets = max_kv_length if kv_offsets is None else kv_offsets
    return BlockLists(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length, max_kv_length)


def _key_run(q: Tensor, k: Tensor, blocks: BlockLists, causal: bool) -> int:
    """Neighbouring keys that an implementation finds in memory: those of a block, or of a whole list that is brought together first."""
    return HOPPER_KEY_BLOCK if brings_together(blocks, q.shape[1], k.shape[1], causal) else blocks.max_kv_length


def _run(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool, impl: str,
         **options) -> tuple[Tensor, Tensor]:
    device = q.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        # Triton launches on the current GPU.
        with torch.cuda.device(device):
            return _run(q, k, v, blocks, scale, causal, impl, **options)
    forward = _implementation(impl, brings_together(blocks, q.shape[1], k.shape[1], causal))[0]
    if not torch.is_autocast_enabled(device.type):
        return forward(q, k, v, blocks, scale, causal, **options)
    # What is summed in float32 must stay so under autocast.
    with torch.autocast(device.type, enabled=False):
        return forward(q, k, v, blocks, scale, causal, **options)


@lru_cache
def _implementation(impl: str, together: bool = False):
    """(forward, backward) of an implementation, imported when first chosen; with ``together`` over keys that are first copied together."""
    if impl == "gather":
        from .eager.blocks import gather_backward, gather_forward

        return gather_forward, gather_backward
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(f"impl={impl!r} requires triton: pip install triton, or choose impl='gather'") from error
    if together:
        from .portable.compacted import compacted_backward, compacted_forward

        return tuple(map(partial, (compacted_forward, compacted_backward), _implementation(impl)))
    if impl == "hopper":
        from .hopper.backward import hopper_backward
        from .hopper.forward import hopper_forward

        return hopper_forward, hopper_backward
    from .portable.backward import triton_backward
    from .portable.forward import triton_forward

    return triton_forward, triton_backward


@torch.library.custom_op("ssta::block_sparse_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, indices: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor | None,
    q_lengths: Tensor | None, kv_lengths: Tensor | None, num_kv_blocks: int | None, max_q_length: int, max_kv_length: int,
    counts_t: Tensor | None, indices_t: Tensor | None, scale: float, causal: bool, deterministic: bool, impl: str,
) -> tuple[Tensor, Tensor]:
    blocks = _unflatten(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length, max_kv_length)
    impl = resolve_impl(impl, q.device, q.dtype, q.shape[-1], max_q_length, _key_run(q, k, blocks, causal))
    return _run(q, k, v, blocks, scale, causal, impl)


@_forward.register_fake
def _(q, k, v, *_):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


@torch.library.custom_op("ssta::block_sparse_attention_backward", mutates_args=())
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, counts: Tensor, indices: Tensor,
    q_offsets: Tensor | None, kv_offsets: Tensor | None, q_lengths: Tensor | None, kv_lengths: Tensor | None, num_kv_blocks: int | None,
    max_q_length: int, max_kv_length: int, counts_t: Tensor | None, indices_t: Tensor | None, scale: float, causal: bool,
    deterministic: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = _unflatten(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length, max_kv_length)
    flipped = None
    if counts_t is not None:
        flipped = _unflatten(counts_t, indices_t, kv_offsets, q_offsets, kv_lengths, q_lengths, blocks.num_q_blocks, max_kv_length,
                             max_q_length)
    impl = resolve_impl(impl, q.device, q.dtype, q.shape[-1], max_q_length, _key_run(q, k, blocks, causal))
    together = brings_together(blocks, q.shape[1], k.shape[1], causal, backward=True)
    # The Hopper backward's tiles of 128 keys would be half empty; both forwards save the same.
    if impl == "hopper" and max_kv_length <= HOPPER_BACKWARD_KEY_BLOCK // 2 and not together:
        impl = "triton"
    # The others have only one order in which they add up.
    order = (deterministic,) if impl == "hopper" else ()
    with torch.autocast(q.device.type, enabled=False):
        return _implementation(impl, together)[1](dout, dlse, q, k, v, out, lse, blocks, flipped, scale, causal, *order)


@_backward.register_fake
def _(dout, dlse, q, k, v, *_):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output) -> None:
    *tensors, num_kv_blocks, max_q_length, max_kv_length, counts_t, indices_t, scale, causal, deterministic, impl = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:], counts_t, indices_t)
    ctx.sizes, ctx.options = (num_kv_blocks, max_q_length, max_kv_length), (scale, causal, deterministic, impl)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    q, k, v, out, lse, *pattern, counts_t, indices_t = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 18
    dout = torch.zeros_like(out) if dout is None else dout
    grads = _backward(dout, dlse, q, k, v, out, lse, *pattern, *ctx.sizes, counts_t, indices_t, *ctx.options)
    return (*grads, *(None,) * 15)


_forward.register_autograd(_differentiate, setup_context=_save)
