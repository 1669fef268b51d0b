"""From projections to attention: q or k of one or more streams of tokens is normed, turned by RoPE and joined, in one pass where it can be.

The families that come this way differ in what a mean square is taken over, in the roundings of their norms, and in what RoPE turns:

    family                      norm                            over            RoPE
    HunyuanVideo (all), Motif   diffusers' RMSNorm              a head          the video, the same in every head
    Mochi                       diffusers' MochiRMSNorm         a head          the video, angles of each head's own
    Wan, VACE, SkyReels V2      torch's RMSNorm                 all heads       everything, the same in every head
    LTX-Video                   torch's RMSNorm                 all heads       everything, angles of each head's own
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from diffusers.models import normalization as diffusers_norms
from torch import Tensor, nn

from ssta.kernels import kernels_run
from ssta.kernels.operators import watched
from ssta.kernels.rotary import RMSNorm, norm_and_turn

from .rope import turn_pairs

_NORMS = (nn.RMSNorm, diffusers_norms.RMSNorm, diffusers_norms.MochiRMSNorm)


class Stream(NamedTuple):
    """Consecutive tokens of q or k as their projection leaves them, and what is to be done to them.

    Attributes:
        projected: ``[B, S, H * D]``.
        norm: the model's own module; None = no norm.
        angles: cosines and sines of RoPE on neighbouring channels, float32, which broadcast to ``[B, S, H, D]`` with both angles of a pair,
            which are the same, or to ``[B, S, H, D / 2]``; None = no RoPE.
    """

    projected: Tensor
    norm: nn.Module | None
    angles: tuple[Tensor, Tensor] | None = None


def finished(*streams: Stream, heads: int, across_heads: bool = False) -> Tensor:
    """``[B, S, H, D]`` of all streams, one after the other.

    One kernel does it where nothing needs a gradient and the norms are the table's, unchanged: it computes as they do, but for the order in
    which squares are summed. Else the modules do it. A compiler gets the modules too, and fuses them itself.

    Args:
        streams: with the same B, H, D, dtype and device.
        heads: H.
        across_heads: whether the norms take all heads of a token at once.
    """
    if not all(_by_kernel(stream, heads, across_heads) for stream in streams):
        parts = [_by_modules(stream, heads, across_heads) for stream in streams]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    lengths = [stream.projected.shape[1] for stream in streams]
    first = streams[0].projected
    out = first.new_empty(len(first), sum(lengths), heads, first.shape[-1] // heads)
    for (x, norm, angles), part in zip(streams, out.split(lengths, dim=1)):
        norm_and_turn(x.unflatten(2, (heads, -1)).transpose(1, 2), part.transpose(1, 2),
                      norm and RMSNorm(norm.weight, norm.eps, rounds_twice=type(norm) is diffusers_norms.RMSNorm),
                      angles and tuple(of.transpose(-3, -2) for of in angles))
    return out


def _by_modules(stream: Stream, heads: int, across_heads: bool) -> Tensor:
    x, norm = stream.projected, stream.norm
    if norm is not None and across_heads:
        x = norm(x)
    x = x.unflatten(2, (heads, -1))
    if norm is not None and not across_heads:
        x = norm(x)
    if stream.angles is None:
        return x
    step = stream.angles[0].shape[-1] // (x.shape[-1] // 2)
    return turn_pairs(x, *(of[..., ::step] for of in stream.angles))


def _by_kernel(stream: Stream, heads: int, across_heads: bool) -> bool:
    """Whether the kernel runs here, does what the stream's modules do, and nobody wants a gradient."""
    x, norm, angles = stream
    if torch.compiler.is_compiling() or not kernels_run(x) or torch.is_autocast_enabled(x.device.type):
        return False
    tensors = [x, *(angles or ())]
    if norm is not None:
        channels = x.shape[-1] if across_heads else x.shape[-1] // heads
        if not _is_plain(norm) or norm.weight.shape != (channels,) or norm.weight.dtype != x.dtype:
            return False
        tensors.append(norm.weight)
    if any(of.dtype != torch.float32 for of in angles or ()) or any(tensor.device != x.device for tensor in tensors):
        return False
    return not watched(*tensors) and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def _is_plain(norm: nn.Module) -> bool:
    """Whether it is one of the table's norms with a weight, and nobody has changed what calling it does, as offloading and hooks do."""
    changed = "forward" in vars(norm) or norm._forward_hooks or norm._forward_pre_hooks
    return type(norm) in _NORMS and not changed and norm.weight is not None and norm.eps is not None and getattr(norm, "bias", None) is None
