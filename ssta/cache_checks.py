"""What a cache is given and cannot follow: settings, and text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import SSTAConfig
from .kernels.checks import require_int
from .ring import Counts, Geometry


class Kind(NamedTuple):
    """The kind of tensors whose keys and values a cache holds."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> Kind:
        return cls(key.shape[0], query.shape[1], key.shape[1], key.shape[3], key.dtype, key.device)


def checked_config(config: SSTAConfig) -> SSTAConfig:
    """A configuration that a cache can follow."""
    if not isinstance(config, SSTAConfig):
        raise TypeError(f"config must be an SSTAConfig or None, got {type(config).__name__}")
    for of in (config, *[variant for _, variant in config._resolved]):
        for name, free in (("pad_type", "none"), ("threshold", 0), ("adaptive_pool", None), ("budget", None)):
            if (value := getattr(of, name)) != free:
                raise ValueError(f"{name} must be {free!r} in a cache, got {value!r}")
        if of.selected_by == "sta" or of.scored_by == "importance":
            raise ValueError("sparse_type must not be 'sta' nor sampling_type 'importance' in a cache, whose tiles come and go, got "
                             f"{of.selected_by!r} and {of.scored_by!r}")
    return config


def check_text(text: tuple[Tensor, Tensor], key: Tensor, most: int) -> None:
    """That keys and values of text fit keys of a chunk, in a cache with room for ``most`` tokens."""
    if not isinstance(text, tuple) or len(text) != 2 or not all([isinstance(x, Tensor) for x in text]):
        raise TypeError(f"text must be a tuple of its keys and values, got {type(text).__name__}")
    wanted = key.shape[0], key.shape[1], key.shape[3], key.dtype, key.device
    for x in text:
        came = x.dim() == 4 and (x.shape[0], x.shape[1], x.shape[3], x.dtype, x.device)
        if came != wanted or x.shape[2] > most or x.shape != text[0].shape:
            raise ValueError(f"text must have keys and values of at most the cache's {most} tokens, and key's batch, heads, "
                             f"head_dim, dtype and device {wanted}, got shape {tuple(x.shape)}, {x.dtype} on {x.device}")


def check_state(state: Mapping[str, Any], raw_sink: bool) -> None:
    """That it has what ``TileCache.state_dict`` gives, which is nothing or all; ``raw_sink``: of a cache with a rotary and a sink."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what state_dict() gave, got {type(state).__name__}")
    names = {"key", "value", *Counts._fields, "geometry", "heads", "first", "number", *(["raw_sink"] if raw_sink else [])}
    if state and state.keys() != names:
        raise ValueError(f"state must have {sorted(names)}, with a raw_sink where a cache has a rotary and a sink, got "
                         f"{sorted(map(str, state))}")
    if not state:
        return
    key, geometry = state["key"], state["geometry"]
    if not isinstance(key, Tensor) or key.dim() != 4 or not isinstance(geometry, (tuple, list)) or len(geometry) != len(Geometry._fields):
        raise ValueError(f"state must have a key [B, Hkv, P, D] and a geometry of {len(Geometry._fields)} entries, got "
                         f"{getattr(key, 'shape', type(key).__name__)} and {geometry}")
    for name, value in zip(("chunk", "height", "width"), geometry):
        require_int(f"state['geometry']'s {name}", value, 1)
    for name, least in (("heads", 1), ("first", 0), ("number", 0)):
        require_int(f"state[{name!r}]", state[name], least)
    if state["heads"] % max(key.shape[1], 1):
        raise ValueError(f"state['heads'] must be a multiple of the key's {key.shape[1]}, got {state['heads']}")
