"""SSTAConfig: every choice that SSTA leaves open, checked once, and the settings of published checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from torch import Tensor

from .checks import require_choice, require_int, require_number, require_triple

SPARSE_TYPES = ("sta", "block_attn", "moba", "ssta")
SAMPLING_TYPES = ("similarity", "importance")
PAD_TYPES = ("none", "zero", "repeat")


@dataclass(frozen=True)
class SSTAConfig:
    """What each tile attends to. Immutable, hashable, checked at construction.

    Args:
        tile_thw: tokens of a tile along t, h, w. Dense runs are cut into tiles of as many tokens.
        kernel_thw: the local window, in tiles along t, h, w; an even entry k reaches as far as k + 1.
        topk: key tiles that the budget gives to each query tile (with ``threshold``: at most).
        sparse_type: "sta" = window only; "block_attn" (also spelled "moba") = budget only; "ssta" = both.
        threshold: cumulative softmax mass in [0, 1) at which the budget stops; 0 = always ``topk`` tiles. Not with importance.
        lambda_: weight in [0, 1] of similarity against redundancy, for importance.
        sampling_type: "similarity", "importance", or a function ``f(q_descriptors, k_descriptors) -> scores`` from float32
            ``[B, H, N, C]`` (H is 1 with ``mask_share_within_head``) to scores ``[B, H, N, N]``, higher is better.
        pad_type: "none" computes on real tokens only; "zero" and "repeat" pad partial tiles as published checkpoints did.
        mask_share_within_head: descriptors are averaged over the heads: one pattern for all of them.
        adaptive_pool: cells (t, h, w) of a tile's descriptor; None = (2, 2, 2) with a threshold, else one mean.
        budget: a function ``f(scores) -> keep`` from float32 ``[B, H, N, N]`` to bool of the same shape, in place of ``topk``
            and ``threshold``.
        variants: ``(max_frames, {field: value, ...})`` in ascending order. ``for_canvas`` applies the first one whose
            ``max_frames`` is not exceeded.

    Raises:
        TypeError: a value of the wrong kind.
        ValueError: a value out of range, an unknown name, or a combination that has no meaning.
    """

    tile_thw: tuple[int, int, int] = (6, 8, 8)
    kernel_thw: tuple[int, int, int] = (3, 3, 3)
    topk: int = 64
    sparse_type: str = "ssta"
    threshold: float = 0.0
    lambda_: float = 0.7
    sampling_type: str | Callable[[Tensor, Tensor], Tensor] = "similarity"
    pad_type: str = "none"
    mask_share_within_head: bool = False
    adaptive_pool: tuple[int, int, int] | None = None
    budget: Callable[[Tensor], Tensor] | None = None
    variants: tuple[tuple[int, Mapping[str, object]], ...] = ()

    def __post_init__(self) -> None:
        self._settle("tile_thw", require_triple("tile_thw", self.tile_thw))
        self._settle("kernel_thw", require_triple("kernel_thw", self.kernel_thw))
        require_int("topk", self.topk, 1)
        require_choice("sparse_type", self.sparse_type, SPARSE_TYPES)
        self._settle("sparse_type", "block_attn" if self.sparse_type == "moba" else self.sparse_type)
        if not 0 <= require_number("threshold", self.threshold) < 1:
            raise ValueError(f"threshold must lie in [0, 1), got {self.threshold}")
        if not 0 <= require_number("lambda_", self.lambda_) <= 1:
            raise ValueError(f"lambda_ must lie in [0, 1], got {self.lambda_}")
        if not callable(self.sampling_type):
            require_choice("sampling_type", self.sampling_type, SAMPLING_TYPES, " or a function of (q_descriptors, k_descriptors)")
        if self.threshold > 0 and self.sampling_type == "importance":
            raise ValueError(f"threshold must be 0 with sampling_type 'importance', whose scores are no logits, got {self.threshold}")
        require_choice("pad_type", self.pad_type, PAD_TYPES)
        if not isinstance(self.mask_share_within_head, bool):
            raise TypeError(f"mask_share_within_head must be a bool, got {self.mask_share_within_head!r} "
                            f"({type(self.mask_share_within_head).__name__})")
        if self.adaptive_pool is not None:
            self._settle("adaptive_pool", require_triple("adaptive_pool", self.adaptive_pool))
        if self.budget is not None and not callable(self.budget):
            raise TypeError(f"budget must be None or a function of the scores, got {self.budget!r}")
        if self.budget is not None and self.threshold > 0:
            raise ValueError(f"threshold must be 0 with a budget of your own, which replaces it, got {self.threshold}")
        if not isinstance(self.variants, (tuple, list)):
            raise TypeError(f"variants must be a tuple of (max_frames, overrides), got {self.variants!r}")
        self._settle("variants", tuple(self._check_variant(i, variant) for i, variant in enumerate(self.variants)))

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_variant(self, i: int, variant: tuple) -> tuple[int, tuple[tuple[str, object], ...]]:
        """The variant with its overrides as sorted pairs, which can be hashed."""
        if not isinstance(variant, (tuple, list)) or len(variant) != 2:
            raise TypeError(f"variants[{i}] must be (max_frames, overrides), got {variant!r}")
        max_frames, overrides = variant
        if not isinstance(overrides, (dict, tuple, list)):
            raise TypeError(f"variants[{i}] overrides must map fields of SSTAConfig to values, got {overrides!r}")
        require_int(f"variants[{i}] max_frames", max_frames, 1)
        if i and max_frames <= self.variants[i - 1][0]:
            raise ValueError(f"variants must ascend in max_frames, got {max_frames} after {self.variants[i - 1][0]}")
        overrides = dict(overrides)
        unknown = sorted(set(overrides) - {field.name for field in fields(self) if field.name != "variants"})
        if unknown:
            raise ValueError(f"variants[{i}] must override fields of SSTAConfig other than variants, got {unknown}")
        try:
            varied = replace(self, variants=(), **overrides)
        except (TypeError, ValueError) as error:
            raise type(error)(f"variants[{i}]: {error}") from None
        return max_frames, tuple((name, getattr(varied, name)) for name in sorted(overrides))

    @property
    def pool_cells(self) -> tuple[int, int, int] | None:
        """The cells of a descriptor that ``adaptive_pool`` and ``threshold`` together ask for; None = one mean."""
        if self.adaptive_pool is None and self.threshold > 0:
            return (2, 2, 2)
        return self.adaptive_pool

    def for_canvas(self, thw: tuple[int, int, int]) -> SSTAConfig:
        """The settings for a canvas of ``thw`` latent tokens, without variants; a config that has none returns itself.

        Raises:
            TypeError, ValueError: ``thw`` is not three positive ints.
        """
        frames = require_triple("thw", thw)[0]
        for max_frames, overrides in self.variants:
            if frames <= max_frames:
                return replace(self, variants=(), **dict(overrides))
        return replace(self, variants=()) if self.variants else self

    @classmethod
    def hunyuan_video_15(cls) -> SSTAConfig:
        """HunyuanVideo-1.5's sparse checkpoint (tencent/HunyuanVideo-1.5, 720p).

        Half the budget up to 31 latent frames (121 frames of video); a single frame has flat tiles of the same 384 tokens.
        """
        return cls(tile_thw=(6, 8, 8), kernel_thw=(3, 3, 3), topk=64, sparse_type="ssta", sampling_type="importance", lambda_=0.7,
                   pad_type="zero", mask_share_within_head=False,
                   variants=((1, {"tile_thw": (1, 16, 24), "kernel_thw": (1, 1, 1), "topk": 32}), (31, {"topk": 32})))
