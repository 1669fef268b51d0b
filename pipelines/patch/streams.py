"""From projections to attention: q, k and v of one or more streams of tokens, normed, rotated by RoPE, joined and tiled, in one pass.

The families that come this way differ in what a mean square is taken over (a head or all of them), in the class of their norms and its
roundings (which each family says, see ``Norms``), and in what RoPE is applied to and whether the angles are each head's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ssta.kernels import Deferred, Projection, RMSNorm, choose_backend
from ssta.kernels.operators import watched
from ssta.ranks import Sent

# Classes of RMSNorm that the kernel computes as they do -> whether they round to the weight's dtype before they multiply by the weight.
Norms = Mapping[type[nn.Module], bool]
TORCH_NORMS: Norms = {nn.RMSNorm: False}
# A projection's output [B, S, H * D], or the function that projects, which is called once, when it is needed.
Projected = Tensor | Callable[[], Tensor]
# q, k or v for attention: [B, S, H, D], projections whose norm and RoPE are still to be done, or what other ranks send.
Operand = Tensor | Deferred | Sent


class Stream(NamedTuple):
    """Consecutive tokens of q, k or v as their projection leaves them, and what is to be done to them.

    Attributes:
        projected: what is to be normed and rotated.
        norm: the model's own module, or a function for which no kernel stands in; None = no norm.
        angles: cosines and sines of RoPE on neighbouring channels, float32, which broadcast to ``[B, S, H, D]`` with both angles of a pair,
            which are the same, or to ``[B, S, H, D / 2]``; None = no RoPE.
        rotated: angles are for so many of the first tokens, others have none; None = for all.
        then: what the model does after that, for which no kernel stands in: ``[B, S, H, D]`` -> the same shape; None = nothing.
    """

    projected: Projected
    norm: Callable[[Tensor], Tensor] | None = None
    angles: tuple[Tensor, Tensor] | None = None
    rotated: int | None = None
    then: Callable[[Tensor], Tensor] | None = None


def joined(kinds: Sequence[Sequence[Stream]], *, heads: int, across_heads: bool = False, norms: Norms = TORCH_NORMS, impl: str = "auto"
           ) -> list[Tensor | Deferred]:
    """Each of ``kinds``, q, k and v or one of them, its streams one after the other: ``[B, S, H, D]``, or deferred where the kernel runs.

    One kernel makes each of them where nothing needs a gradient and the modules are of the classes ``norms``, unchanged: it computes as
    they do, but for the order in which squares are summed. Else the modules do it. A compiler gets the modules too, and fuses them itself.

    Projections that are still to be made are made first, q's, k's and v's of each stream, stream after stream, as diffusers' processors
    make them.

    Args:
        kinds: streams with the same B, H, D, dtype and device.
        heads: H.
        across_heads: whether the norms take all heads of a token at once.
        norms: classes of RMSNorm that the kernel may stand in for; another norm is left to its module.
        impl: which kernels may run, as ``ssta_attention`` takes it.
    """
    made = _made(kinds)
    if all(_by_kernel(stream, heads, across_heads, norms, impl) for streams in made for stream in streams):
        return [Deferred(tuple(_projection(stream, heads, across_heads, norms) for stream in streams)) for streams in made]
    return [_by_modules(streams, heads, across_heads) for streams in made]


def later(linear: Any, x: Tensor) -> Callable[[], Tensor]:
    """What ``linear``, a module, makes of x when it is called."""
    return partial(linear, x)


def apart(attn: Any, x: Tensor) -> tuple[Projected, Projected, Projected]:
    """q, k and v that an attention module makes of x ``[B, S, C]``, flat."""
    return later(attn.to_q, x), later(attn.to_k, x), later(attn.to_v, x)


def fused(attn: Any, x: Tensor) -> tuple[Projected, Projected, Projected]:
    """The same by one projection that all three were fused into."""
    q, k, v = attn.to_qkv(x).chunk(3, dim=-1)
    return q, k, v


def fusible(attn: Any, x: Tensor) -> tuple[Projected, Projected, Projected]:
    """The same by whichever the module says that it has."""
    return fused(attn, x) if attn.fused_projections else apart(attn, x)


def _made(kinds: Sequence[Sequence[Stream]]) -> list[list[Stream]]:
    """Each kind's streams, or parts of them, whose projections are there and whose angles are for all tokens."""
    made: list[list[Stream]] = [[] for _ in kinds]
    for number in range(max(len(streams) for streams in kinds)):
        for streams, into in zip(kinds, made):
            if number < len(streams):
                projected, norm, angles, rotated, then = streams[number]
                x = projected if isinstance(projected, Tensor) else projected()
                if rotated is None:
                    into.append(Stream(x, norm, angles, then=then))
                else:
                    into.extend((Stream(x[:, :rotated], norm, angles, then=then), Stream(x[:, rotated:], norm, then=then)))
    return made


def _projection(stream: Stream, heads: int, across_heads: bool, norms: Norms) -> Projection:
    norm: Any = stream.norm
    x: Any = stream.projected
    x = x.unflatten(2, (heads, -1)).transpose(1, 2)
    if norm is not None:
        casts = norms[type(norm)]
        weight, eps = norm.weight, norm.eps
        norm = RMSNorm.across_heads(x, weight.view(heads, -1), eps, casts) if across_heads else RMSNorm(weight, eps, casts)
    angles = None
    if stream.angles is not None:
        cos, sin = (of.transpose(-3, -2).expand(-1 if of.dim() == 4 else 1, -1, -1, -1) for of in stream.angles)
        angles = cos, sin
    return Projection(x, norm, angles)


def _by_modules(streams: list[Stream], heads: int, across_heads: bool) -> Tensor:
    """Empties ``streams``: nobody holds a projection once it is normed, nor what is normed once it is rotated."""
    parts: list[Tensor] = []
    while streams:
        x: Any
        x, norm, angles, _, then = streams.pop(0)
        if norm is not None and across_heads:
            x = norm(x)
        x = x.unflatten(2, (heads, -1))
        if norm is not None and not across_heads:
            x = norm(x)
        if angles is not None:
            step = angles[0].shape[-1] // (x.shape[-1] // 2)
            x = apply_rope(x, *(of[..., ::step] for of in angles))
        parts.append(x if then is None else then(x))
        del x
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _by_kernel(stream: Stream, heads: int, across_heads: bool, norms: Norms, impl: str) -> bool:
    """Whether the kernel runs here, does what the stream's modules do, and nobody wants a gradient."""
    x: Any
    norm: Any
    x, norm, angles, _, then = stream
    if then is not None or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return False
    if choose_backend(impl, x.device, x.dtype, x.shape[-1] // heads).by_torch("gather"):
        return False
    tensors = [x, *(angles or ())]
    if norm is not None:
        channels = x.shape[-1] if across_heads else x.shape[-1] // heads
        if type(norm) not in norms or not _is_plain(norm) or norm.weight.shape != (channels,) or norm.weight.dtype != x.dtype:
            return False
        tensors.append(norm.weight)
    if any(of.dtype != torch.float32 for of in angles or ()) or any(tensor.device != x.device for tensor in tensors):
        return False
    return not watched(*tensors) and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def _is_plain(norm: nn.Module) -> bool:
    """Whether it has a weight and no bias, and nobody has changed what calling it does, as offloading and hooks do."""
    changed = "forward" in vars(norm) or norm._forward_hooks or norm._forward_pre_hooks
    return not changed and norm.weight is not None and norm.eps is not None and getattr(norm, "bias", None) is None


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channels 2i and 2i + 1 are a point in the plane, rotated by the angle i.

    Args:
        x: ``[..., D]``.
        cos: float32, broadcasts to ``[..., D / 2]``.
        sin: as cos.

    Returns:
        x's shape and dtype; computed in float32 or wider, rounded once.
    """
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.addcmul(even * cos, odd, sin, value=-1), torch.addcmul(even * sin, odd, cos)
    return torch.stack([half.to(x.dtype) for half in rotated], dim=-1).flatten(-2)


def apply_rope_of_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``apply_rope`` where a point in the plane are channels i and D / 2 + i."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(first * sin, second, cos)
    return torch.cat([half.to(x.dtype) for half in rotated], dim=-1)
