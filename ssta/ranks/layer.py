"""A layer whose sequence ranks share out: agreement, exchange in, the layer of one process, exchange out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..config import SSTAConfig
from ..inputs import check_inputs
from ..kernels.checks import autocast_inputs, require_bool, resolve_scale
from ..kernels.routing import require_impl
from ..op import LayerResult, attend
from ..selection import Selection
from ..sequence import TokenLayout
from ..text import TextMask
from .exchange import wants_gradient
from .rings import shares_of
from .shards import Sent, alike

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from .rings import Rings
    from .shards import Shards


def attend_shared(
    query: Tensor | Sent, key: Tensor | Sent, value: Tensor | Sent, layout: TokenLayout, config: SSTAConfig, *,
    group: ProcessGroup | DeviceMesh | None = None, split: str = "video", shares: Shards | Rings | None = None,
    text_mask: Tensor | TextMask | None = None, scale: float | None = None, deterministic: bool = True, impl: str = "auto",
    selection: Selection | None = None, note: Callable[[str], object] | None = None,
) -> LayerResult:
    """``ssta_attention`` of ranks. For use inside the package.

    Args:
        query, key, value: this rank's ``[B, H, S_r, D]``, or all three as ``Shards.start`` sent them.
        shares: how ranks share ``layout`` out; None = as ``group`` and ``split`` say.
        selection: attend to what an earlier call with the same arguments selected, instead of selecting anew.
        note: called when "arrived" is launched, after which a rank has its heads, and when "attended" is, before they go back.
    """
    note = note or _silent
    shares = shares_of(group, layout, split) if shares is None else shares
    sent = [isinstance(x, Sent) for x in (query, key, value)]
    if any(sent) and not all(sent):
        raise TypeError("query, key and value must all three be sent, or none, got "
                        f"{', '.join([type(x).__name__ for x in (query, key, value)])}")
    if not any(sent):
        inputs: dict[str, Any] = dict(query=query, key=key, value=value)

        def check() -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = autocast_inputs(**inputs)
            check_inputs(q, k, v, layout, config, share=shares)
            _check_options(config, text_mask, q.shape[0], layout, q, scale, deterministic, impl)
            return q, k, v

        query, key, value = shares.agreed(check, lambda qkv: {
            **alike("query", qkv[0]), **alike("key", qkv[1]), "config": config, "impl": impl, "scale": scale,
            "deterministic": deterministic, "gradients": wants_gradient(*qkv), "text_mask": text_mask is not None})
        del inputs
    exchange = shares.exchange(query, key, value, note)
    del query, key, value
    q, k, v = exchange.arriving
    exchange.arriving = ()
    peers = exchange.peers if config.mask_share_within_head else None
    result = attend(q, k, v, layout, config, text_mask=text_mask, scale=scale, deterministic=deterministic, impl=impl, selection=selection,
                    rows=exchange.rows, peers=peers, returned=exchange.returned)
    note("attended")
    return result._replace(out=exchange.back(result.out))


def _check_options(config: SSTAConfig, text_mask: Any, batch: int, layout: TokenLayout, query: Tensor, scale: Any, deterministic: Any,
                   impl: Any) -> None:
    """What a rank's call says beside its tensors' shapes."""
    require_bool("deterministic", deterministic)
    require_impl(impl)
    resolve_scale(scale, query.shape[3])
    if text_mask is not None:
        TextMask.of(text_mask, batch, layout, query.device)
    if config.mask_share_within_head and (callable(config.scored_by) or config.budget is not None):
        name, function = ("sampling_type", config.scored_by) if callable(config.scored_by) else ("budget", config.budget)
        raise ValueError(f"{name} must not be a function of your own where heads share a pattern and a group shares the heads out, because "
                         f"every rank would have to find the same pattern, got {function!r} with mask_share_within_head = True")


def _silent(step: str) -> None:
    """Nobody listens."""
