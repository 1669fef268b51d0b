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
from .group import groups_of, settle
from .rings import shares_of
from .shards import alike
from .shares import Exchange, Sent, Shares
from .world import recorded

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup


def attend_in_group(
    query: Any, key: Any, value: Any, made: Callable[[], tuple[TokenLayout, SSTAConfig]], group: ProcessGroup | DeviceMesh, *,
    split: str = "video", **options: Any,
) -> LayerResult:
    """``ssta_attention`` of the ranks of ``group``, to which it says what is wrong with a layout or a configuration of one rank's.

    Args:
        made: makes the layout and the configuration, after their checks.
        options: as ``attend_shared`` takes them.
    """
    groups = groups_of(group)
    try:
        layout, config = made()
        shares = shares_of(group, layout, split)
    except (TypeError, ValueError) as error:
        settle(groups, None, None, _raising(error))
        raise
    return attend_shared(query, key, value, layout, config, shares, **options)


def attend_shared(
    query: Tensor | Sent, key: Tensor | Sent, value: Tensor | Sent, layout: TokenLayout, config: SSTAConfig, shares: Shares, *,
    text_mask: Tensor | TextMask | None = None, scale: float | None = None, deterministic: bool = True, impl: str = "auto",
    selection: Selection | None = None, note: Callable[[str], object] | None = None,
) -> LayerResult:
    """``ssta_attention`` of ranks. For use inside the package.

    Args:
        query, key, value: this rank's ``[B, H, S_r, D]``, or all three as ``shares.start`` sent them.
        shares: how ranks share ``layout`` out.
        selection: attend to what an earlier call with the same arguments selected, instead of selecting anew.
        note: called when "arrived" is launched, after which a rank has its heads, and when "attended" is, before they go back.
    """
    note = note or _silent
    options: dict[str, Any] = dict(text_mask=text_mask, scale=scale, deterministic=deterministic, impl=impl)
    exchange = exchanged(query, key, value, layout, config, shares, note=note, **options)
    del query, key, value
    shared_pattern = (config if layout.longest_video is None else config.for_canvas(layout.longest_video)).mask_share_within_head
    options |= dict(selection=selection, rows=exchange.rows, peers=exchange.peers if shared_pattern else None, returned=exchange.returned)
    # Held here by nobody, what arrived is gone once the layer has read it.
    result = attend(*exchange.take(), layout=layout, config=config, **options)  # type: ignore[misc]
    note("attended")
    return result._replace(out=exchange.back(result.out))


def exchanged(
    query: Tensor | Sent, key: Tensor | Sent, value: Tensor | Sent, layout: TokenLayout, config: SSTAConfig | None, shares: Shares, *,
    text_mask: Tensor | TextMask | None = None, scale: float | None = None, deterministic: bool = True, impl: str = "auto",
    note: Callable[[str], object] | None = None,
) -> Exchange:
    """The exchange before attention, once the ranks agree on what they attend to; arguments as of ``attend_shared``.

    Args:
        config: None = to everything.
    """
    sent = [isinstance(x, Sent) for x in (query, key, value)]
    if any(sent):
        if not all(sent):
            raise TypeError("query, key and value must all three be sent, or none, got "
                            f"{', '.join([type(x).__name__ for x in (query, key, value)])}")
        gradients = query.recorded or key.recorded or value.recorded  # type: ignore[union-attr]
    else:
        query, key, value = _as_autocast(query, key, value)
        gradients = recorded(query, key, value)
    call = (layout, config, scale, deterministic, impl, _kind_of(text_mask), gradients, *map(_kind_of, (query, key, value)))

    def check() -> dict[str, object]:
        if all(sent):
            inputs: dict[str, object] = {"query's heads": query.heads, "key's heads": key.heads, "dtype": query.dtype}  # type: ignore
        else:
            autocast_inputs(query=query, key=key, value=value)
            check_inputs(query, key, value, layout, SSTAConfig() if config is None else config, share=shares)
            inputs = {**alike("query", query), **alike("key", key)}  # type: ignore[arg-type]
        _check_options(config, text_mask, layout, query, scale, deterministic, impl)
        return {"layout": layout, **inputs, "config": config, "scale": scale, "deterministic": deterministic, "impl": impl,
                "gradients": gradients, "text_mask": "none" if text_mask is None else "given"}

    shares.agreed(call if _hashable(call) else None, check)
    return shares.exchange(query, key, value, note or _silent)


def _as_autocast(*xs: Any) -> Any:
    """In autocast's dtype where they are tensors that it casts; what is wrong with them is said by the check."""
    try:
        return autocast_inputs(query=xs[0], key=xs[1], value=xs[2])
    except (TypeError, ValueError):
        return xs


def _kind_of(x: Any) -> object:
    """All that is checked and compared of an input, as a plain value."""
    if x is None:
        return None
    if isinstance(x, Sent):
        return "sent", x.shape, x.dtype, x.device, x.deals
    if isinstance(x, TextMask):
        return "mask", x.tokens, x.valid.shape, x.valid.device
    if isinstance(x, Tensor):
        return type(x), x.shape, x.dtype, x.device, x.layout
    return type(x)


def _hashable(call: tuple) -> bool:
    try:
        hash(call)
    except TypeError:
        return False
    return True


def _check_options(config: SSTAConfig | None, text_mask: Any, layout: TokenLayout, query: Any, scale: Any, deterministic: Any, impl: Any
                   ) -> None:
    """What a rank's call says beside its tensors' shapes."""
    require_bool("deterministic", deterministic)
    require_impl(impl)
    resolve_scale(scale, query.shape[3])
    if text_mask is not None:
        TextMask.of(text_mask, query.shape[0], layout, query.device)
    if config is not None and config.mask_share_within_head and (callable(config.scored_by) or config.budget is not None):
        name, function = ("sampling_type", config.scored_by) if callable(config.scored_by) else ("budget", config.budget)
        raise ValueError(f"{name} must not be a function of your own where heads share a pattern and a group shares the heads out, because "
                         f"every rank would have to find the same pattern, got {function!r} with mask_share_within_head = True")


def _raising(error: Exception) -> Callable[[], dict[str, object]]:
    def check() -> dict[str, object]:
        raise error

    return check


def _silent(step: str) -> None:
    """Nobody listens."""
