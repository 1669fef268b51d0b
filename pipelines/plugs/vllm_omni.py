"""SSTA in vLLM-Omni, without importing it: the plug-in's entry point, its settings, and where the video lies in a sequence."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid
from ssta.checks import require_share

from ..schedule.changes import changed
from ..schedule.presets import small_tiles

# Set by whoever wants SSTA there: a JSON object of fields of SSTAConfig, {} for the defaults.
VARIABLE = "SSTA_VLLM_OMNI"
# The backend that SSTA stands in for: its names are an enumeration to which a plug-in cannot add. This one's own kernels run on Ascend
# NPUs alone, so that on a GPU nothing is lost, and its options are the ones that SSTA needs.
STANDS_IN_FOR = "RAINFUSION_ATTN"
FIELDS = ("adaptive_pool", "compensation", "compensation_parts", "kernel_thw", "lambda_", "mask_share_within_head",
          "pad_type", "sampling_type", "sparse_type", "tile_thw")
OPTIONS = ("sparsity", "start_step", "end_step", "precision", "skip_layers")


@dataclass(frozen=True)
class Settings:
    """What a user asked for.

    Attributes:
        config: what is attended to in the sparse steps and layers; None = dense everywhere.
        first_steps, last_steps: denoising steps at the beginning and at the end that are dense.
        dense_layers: numbers of the transformer blocks that are dense.
    """

    config: SSTAConfig | None
    first_steps: int
    last_steps: int
    dense_layers: frozenset[int]

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Settings:
        """From vLLM-Omni's ``block_sparse`` options, as a backend is given them, and from the environment."""
        given = dict(options or {})
        if "sparsity" not in given or given.keys() - set(OPTIONS):
            raise ValueError(f"block_sparse must come with sparsity and nothing beside {', '.join(OPTIONS)}, got {sorted(given)}")
        if given.get("precision", "bf16") != "bf16":
            raise ValueError("block_sparse.precision must be 'bf16' with SSTA, which computes in the tensors' own dtype, got "
                             f"{given['precision']!r}")
        sparsity = require_share("block_sparse.sparsity", float(given["sparsity"]), "[0, 1)",
                                 "the share of the tile pairs that is not computed exactly")
        # 1 - 0.8 is meant to be 0.2.
        config = changed(config_from(os.environ.get(VARIABLE, "{}")), density=round(1 - sparsity, 9))
        return cls(config if sparsity else None, int(given.get("start_step", 0)), int(given.get("end_step", 0)),
                   frozenset(given.get("skip_layers", ())))

    def __str__(self) -> str:
        if self.config is None:
            return "sparsity 0, dense in all steps and layers"
        layers = ", ".join(map(str, sorted(self.dense_layers))) or "none"
        return (f"density {self.config.density}, compensation {self.config.compensation!r}, dense steps: first {self.first_steps}, "
                f"last {self.last_steps}, dense layers: {layers}")


def config_from(text: str) -> SSTAConfig:
    """The configuration that ``SSTA_VLLM_OMNI`` stands for: ``small_tiles`` with its fields; a tile that it names is that of every canvas.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f'{VARIABLE} must be a JSON object such as {{"tile_thw": [2, 8, 8]}}, got {text!r}: {error}') from None
    if not isinstance(given, dict):
        raise TypeError(f'{VARIABLE} must be a JSON object such as {{"tile_thw": [2, 8, 8]}}, got {text!r}')
    unknown = sorted(given.keys() - set(FIELDS))
    if unknown:
        raise ValueError(f"{VARIABLE} must have fields among {', '.join(FIELDS)}, got {', '.join(unknown)}; the density is "
                         "1 - block_sparse.sparsity of vLLM-Omni's attention configuration")
    try:
        return changed(small_tiles(), **given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{VARIABLE}: {error}") from None


def sequence_layout(video: Any, tokens: int) -> TokenLayout | str:
    """What a sequence consists of, its padding left out.

    Args:
        video: vLLM-Omni's ``VideoTokenLayout``, or None.
        tokens: length of the sequence, padding included.

    Returns:
        TokenLayout: ``[dense | grid | dense | grid ... | dense]``; rows past its length are padding. Or, in a few words, why it is unknown.
    """
    if video is None:
        return "it comes without a video layout"
    if video.video_spans:
        spans = sorted([(span.start, tuple(span.latent_grid)) for span in video.video_spans])
    elif video.latent_grid is not None and video.prefix_len is not None:
        spans = [(video.prefix_len, tuple(video.latent_grid))]
    else:
        return "its video layout has no grid"
    segments: list[VideoGrid | DenseRun] = []
    end = 0
    for start, thw in spans:
        if start < end:
            raise ValueError(f"video_layout must have grids that follow one another, got one that starts at {start} before {end}, where "
                             f"another ends: {video}")
        if start > end:
            segments.append(DenseRun(start - end))
        segments.append(grid := VideoGrid(*thw))
        end = start + grid.length
    used = end if video.used_len is None else video.used_len
    if not end <= used <= tokens:
        raise ValueError(f"video_layout must lie within its used_len and that within the sequence, got a video that ends at {end}, "
                         f"used_len {used} and {tokens} tokens: {video}")
    if used > end:
        segments.append(DenseRun(used - end))
    return TokenLayout(tuple(segments))


def register() -> None:
    """vLLM-Omni's plug-in entry point: enters SSTA for ``RAINFUSION_ATTN`` if the environment has ``SSTA_VLLM_OMNI``; else does nothing.

    Raises:
        ImportError: this vLLM-Omni has no such backend, or registers backends in another way.
        TypeError, ValueError: ``SSTA_VLLM_OMNI`` says something impossible.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return
    config_from(text)
    from vllm_omni.diffusion.attention.backends import registry

    backends: Any = getattr(registry, "DiffusionAttentionBackendEnum", None)
    names = list(getattr(backends, "__members__", ()))
    if STANDS_IN_FOR not in names or not hasattr(registry, "register_diffusion_backend"):
        raise misfit(f"DiffusionAttentionBackendEnum.{STANDS_IN_FOR} and register_diffusion_backend expected in {registry.__name__}, found "
                     f"the backends {names}")
    registry.register_diffusion_backend(backends[STANDS_IN_FOR], f"{__name__}_backend.SSTABackend")


def misfit(found: str) -> ImportError:
    """The error for a vLLM-Omni that is not as it was."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("vllm-omni")
    except PackageNotFoundError:
        installed = "of an unknown version"
    return ImportError(f"ssta.pipelines.plugs.vllm_omni was written for vLLM-Omni 0.30 and does not fit vLLM-Omni {installed}: {found}")
