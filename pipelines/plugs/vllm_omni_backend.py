"""SSTA as an attention backend of vLLM-Omni; imported by it when a user selects the backend that SSTA stands in for."""

from __future__ import annotations

import logging
from dataclasses import fields
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from vllm_omni.diffusion.attention.backends.abstract import (
        AttentionBackend,
        AttentionImpl,
        AttentionMetadata,
        VideoTokenLayout,
        VideoTokenSpan,
    )
    from vllm_omni.diffusion.config import get_current_diffusion_config_or_none
    from vllm_omni.diffusion.forward_context import ForwardContext, get_forward_context, is_forward_context_available
    from vllm_omni.platforms import current_omni_platform
except ImportError as error:
    from .vllm_omni import misfit

    raise misfit(str(error)) from error

from ssta import SSTAConfig, TokenLayout
from ssta.attention import attend
from ssta.kernels import Route

from .vllm_omni import STANDS_IN_FOR, Settings, misfit, sequence_layout

# Below vLLM-Omni's own, so that its handlers show it.
logger = logging.getLogger("vllm_omni.ssta")
_said: set[Any] = set()

# The fields of metadata that are read here. Any other field that is set may mean anything, and keeps a layer dense.
_METADATA = {"attn_mask", "joint_attn_mask", "joint_query", "joint_key", "joint_value", "joint_strategy", "extra", "full_attn_spans",
             "query_ranges", "video_layout", "packed_padding"}
# Where these are set, more is at work than a sequence that attends to itself.
_OTHERWISE = ("joint_query", "joint_attn_mask", "full_attn_spans", "query_ranges")
_SIZE_UNKNOWN = -1


def _check() -> None:
    """Checks that this vLLM-Omni has what this file uses, under the same names, and no geometry that this file does not know."""
    wrong = []

    def expect(what: str, wanted: set[str], found: set[str], exactly: bool = False) -> None:
        if not wanted <= found or exactly and wanted != found:
            wrong.append(f"{what}: expected {sorted(wanted)}, found {sorted(found)}")

    def names(of: Any) -> set[str]:
        return {field.name for field in fields(of)}

    expect("fields of AttentionMetadata", _METADATA, names(AttentionMetadata))
    expect("fields of VideoTokenLayout", {"prefix_len", "latent_grid", "used_len", "video_spans"}, names(VideoTokenLayout), exactly=True)
    expect("fields of VideoTokenSpan", {"start", "latent_grid", "role"}, names(VideoTokenSpan), exactly=True)
    expect("fields of ForwardContext", {"denoise_step_idx", "total_denoise_steps"}, names(ForwardContext))
    expect("arguments of AttentionImpl.forward_cuda", {"self", "query", "key", "value", "attn_metadata"},
           set(signature(AttentionImpl.forward_cuda).parameters), exactly=True)
    expect("arguments of AttentionImpl", {"num_heads", "head_size", "softmax_scale", "causal", "num_kv_heads", "prefix", "qkv_layout",
                                          "backend_kwargs"}, set(signature(AttentionImpl.__init__).parameters))
    expect("class attributes of AttentionBackend", {"supported_platforms", "supports_attention_mask", "supports_packed_mask_free",
                                                    "supports_prefix_kv_slicing", "supports_piecewise_spans"}, set(dir(AttentionBackend)))
    expect("arguments of get_diffusion_attn_backend_cls", {"selected_backend", "head_size", "allow_trtllm_default"},
           set(signature(current_omni_platform.get_diffusion_attn_backend_cls).parameters))
    if wrong:
        raise misfit("; ".join(wrong))


_check()
_BLANK = AttentionMetadata()
_UNKNOWN = tuple(field.name for field in fields(AttentionMetadata) if field.name not in _METADATA)


@cache
def dense_backend(head_size: int = _SIZE_UNKNOWN) -> Any:
    """The backend class that vLLM-Omni takes by itself, for what is dense. Not TensorRT-LLM's, which has no masks."""
    path = current_omni_platform.get_diffusion_attn_backend_cls(selected_backend=None, head_size=head_size, allow_trtllm_default=False)
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


class _AsDense:
    """A class attribute that is the dense backend's, because its inputs are what this one passes on."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return getattr(dense_backend(), self.name)


class SSTABackend(AttentionBackend):
    """Stands in for RAINFUSION_ATTN on NVIDIA GPUs. What it can do beside SSTA is what the dense backend can."""

    supported_platforms = ("cuda",)
    supports_prefix_kv_slicing = _AsDense()
    supports_piecewise_spans = _AsDense()

    @classmethod
    def supports_packed_mask_free(cls) -> bool:
        return dense_backend().supports_packed_mask_free()

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        return dense_backend().supports_attention_mask()

    @staticmethod
    def get_name() -> str:
        return "SSTA"

    @staticmethod
    def get_impl_cls() -> type[SSTAImpl]:
        return SSTAImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> None:
        return None

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return []  # all


class SSTAImpl(AttentionImpl):
    """Attention of one layer: sparse where the sequence's video is known and the user's settings say so, else vLLM-Omni's own.

    Raises:
        TypeError, ValueError: settings that are out of range, or ring or all-gather parallelism, in which no rank sees the whole sequence.
    """

    def __init__(
        self, num_heads: int, head_size: int, softmax_scale: float, causal: bool = False, num_kv_heads: int | None = None, prefix: str = "",
        qkv_layout: str | None = None, backend_kwargs: dict[str, Any] | None = None, **extra_impl_args: Any,
    ) -> None:
        self.settings = Settings.of(backend_kwargs)
        self.scale, self.causal, self.qkv_layout = softmax_scale, causal, qkv_layout
        self.role = extra_impl_args.get("role", "self")
        numbers = [int(part) for part in prefix.split(".") if part.isdigit()]
        self.layer = numbers[0] if len(numbers) == 1 else None
        if self.settings.config is None:
            _say_once(self.settings, logging.INFO, f"SSTA stands in for {STANDS_IN_FOR}: {self.settings}")
        else:
            _check_parallel()
        backend = dense_backend(head_size)
        self.dense_name = backend.get_name()
        self.dense = backend.get_impl_cls()(num_heads=num_heads, head_size=head_size, softmax_scale=softmax_scale, causal=causal,
                                            num_kv_heads=num_kv_heads, prefix=prefix, qkv_layout=qkv_layout)

    # vLLM-Omni compiles with symbolic sizes, and layouts are remembered by plain ones.
    @torch.compiler.disable
    def forward_cuda(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: AttentionMetadata | None = None) -> Tensor:
        """``[B, S, H, D]`` in and out, key and value ``[B, S, Hkv, D]``; rows of padding give zeros where it is sparse."""
        found = self._layout(query, key, attn_metadata)
        if not isinstance(found, TokenLayout):
            if found is not None:
                _say_once((self.role, found), logging.WARNING,
                          f"SSTA leaves attention of role {self.role!r} to {self.dense_name}, dense: {found}")
            return self.dense.forward(query, key, value, attn_metadata)
        config = self.settings.config
        assert config is not None
        q, k, v = [x[:, :found.length].transpose(1, 2) for x in (query, key, value)]
        result = attend(q, k, v, found, config, scale=self.scale)
        if (self.settings, found) not in _said:
            _say_once((self.settings, found), logging.INFO,
                      f"SSTA stands in for {STANDS_IN_FOR}: {self.settings}; {_ran(query, found, config, result.route)}")
        padding = query.shape[1] - found.length
        out = result.out.transpose(1, 2)
        return F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out

    def _layout(self, query: Tensor, key: Tensor, metadata: AttentionMetadata | None) -> TokenLayout | str | None:
        """What the sequence consists of; or, in a few words, why it is dense; or None where it is dense because the user said so."""
        settings = self.settings
        if settings.config is None or self.layer in settings.dense_layers:
            return None
        if metadata is None:
            return "it comes without a video layout"
        if self.causal or query.ndim != 4 or key.shape[:2] != query.shape[:2]:
            return "it is causal, or its queries and keys are not one sequence"
        layout = sequence_layout(metadata.video_layout, query.shape[1])
        if isinstance(layout, str):
            return layout
        if (self.qkv_layout or "").upper() != "BSND":
            return f"it must say qkv_layout 'BSND', and says {self.qkv_layout!r}"
        why = _unlike(metadata, layout)
        if why is None and settings.dense_layers and self.layer is None:
            why = "block_sparse.skip_layers is set, and the layer does not say its number"
        if why is not None or not settings.first_steps and not settings.last_steps:
            return why or layout
        context = get_forward_context() if is_forward_context_available() else None
        step, total = (None, None) if context is None else (context.denoise_step_idx, context.total_denoise_steps)
        if step is None:
            return "block_sparse.start_step or end_step is set, and the pipeline does not say which step it is at"
        if step < settings.first_steps:
            return None
        if not settings.last_steps:
            return layout
        if total is None:
            return "block_sparse.end_step is set, and the pipeline does not say how many steps there are"
        return None if step >= total - settings.last_steps else layout


def _unlike(metadata: AttentionMetadata, layout: TokenLayout) -> str | None:
    """What the metadata asks for beside attention of ``layout`` to itself; None if nothing."""
    asked = [name for name in _OTHERWISE if getattr(metadata, name) is not None]
    for name in _UNKNOWN:
        value, blank = getattr(metadata, name), getattr(_BLANK, name)
        if value is not blank and (isinstance(value, Tensor) or value != blank):
            asked.append(name)
    if asked:
        return f"its metadata has {', '.join(asked)}"
    # A model that publishes a layout says that its mask is of the padding behind it. A mask of other kind or shape is something else.
    mask = metadata.attn_mask
    if mask is not None and (mask.ndim != 2 or mask.dtype != torch.bool):
        return f"its mask must be bool [B, S] for the padding, and is {mask.dtype} with {mask.ndim} dimensions"
    document = metadata.extra.get("max_seqlen_q") if metadata.packed_padding is None else metadata.packed_padding.q_length
    if "cu_seqlens_q" in metadata.extra and document is None or document is not None and document != layout.length:
        return f"its video layout must be that of the packed document, and has {layout.length} tokens of {document}"
    return None


def _check_parallel() -> None:
    """Checks that every rank sees the whole sequence, as it does with Ulysses. With a ring vLLM-Omni silently bypasses its backends."""
    config = get_current_diffusion_config_or_none()
    if config is None:
        return
    for name in ("ring_degree", "allgather_degree"):
        degree = getattr(config.parallel_config, name, None)
        if degree is None:
            raise misfit(f"parallel_config.{name} expected, found {type(config.parallel_config).__name__} without it")
        if degree > 1:
            raise ValueError(f"{name} must be 1 with SSTA, which selects among all tiles of a sequence, got {degree}; use Ulysses")


def _ran(query: Tensor, layout: TokenLayout, config: SSTAConfig, route: Route | None) -> str:
    """The end of the line that says what runs: canvas, tiles, kernels, and why no faster ones."""
    assert route is not None and layout.longest_video is not None
    canvas = " and ".join(" x ".join(map(str, grid.thw)) for grid in layout.video)
    tile = " x ".join(map(str, config.for_canvas(layout.longest_video).tile_thw))
    where = torch.cuda.get_device_name(query.device) if query.is_cuda else query.device.type
    reasons = "".join(f"; {reason}" for reason in route.explain())
    return f"canvas {canvas} in tiles of {tile}, kernel {route} on {where}{reasons}"


def _say_once(key: Any, level: int, text: str) -> None:
    if key not in _said:
        _said.add(key)
        logger.log(level, text)
