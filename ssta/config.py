"""SSTAConfig: every choice that SSTA leaves open, checked once, and the settings of published checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from .checks import require_choice, require_function, require_int, require_share, require_tile, require_triple
from .kernels.checks import require_bool

SPARSE_TYPES = ("sta", "block_attn", "moba", "ssta")
# The names of rules, which are in ``scoring.RULES``.
SAMPLING_TYPES = ("similarity", "importance", "error")
COMPENSATIONS = ("none", "linear")
PAD_TYPES = ("none", "zero", "repeat")
# A tile has a mean for each cell.
MOST_CELLS = 4096
# Tiles of the budget where neither topk nor density is given.
TOPK = 64
# The window where one is kept and none is given, and what is no window.
WINDOW, NO_WINDOW = (3, 3, 3), (1, 1, 1)


@dataclass(frozen=True)
class SSTAConfig:
    """What each tile attends to. Immutable, hashable, checked at construction.

    Args:
        tile_thw: tokens of a tile along t, h, w. Dense runs are cut into tiles of as many tokens.
        kernel_thw: the local window, in tiles along t, h, w; an even entry k reaches as far as k + 1. It may exceed any video. None =
            (3, 3, 3) where a window is kept. Where the budget alone selects, there is none to give but (1, 1, 1), which is no window.
        topk: key tiles that the budget gives to each query tile (with ``threshold``: at most). It may exceed the tiles
            there are, which then are all kept. None = 64, or whatever ``density`` leaves to the budget.
        sparse_type: "sta" = window only, without topk, threshold and budget; "block_attn" (also spelled "moba") = budget only; "ssta" =
            both. None = "block_attn" with a compensation, which estimates most of a window well enough, else "ssta".
        threshold: cumulative softmax mass in [0, 1) at which the budget stops; 0 = always ``topk`` tiles. Not with importance. Of tiles
            whose softmax underflows the better scored come first; the published code leaves that to an unstable sort.
        lambda_: weight in [0, 1] of similarity against redundancy, for importance.
        sampling_type: "similarity", "importance", "error" (the estimated softmax mass of a tile times how far its estimate is off, for each
            of its tokens, see ``ssta.kernels.eager.estimate``; needs one), or a function ``f(q_descriptors, k_descriptors) -> scores`` from
            float32 ``[B, H, N, C]`` (H is 1 with ``mask_share_within_head``) to scores ``[B, H, N, N]`` of any
            floating-point dtype, higher is better, of which NaN counts as -inf. It may write to what it is given. None = "error" with a
            compensation, else "similarity".
        pad_type: "none" computes on real tokens only; "zero" and "repeat" pad partial tiles as published checkpoints did.
        mask_share_within_head: descriptors are averaged over the heads: one pattern for all of them.
        adaptive_pool: cells (t, h, w) of a tile's descriptor, at most 4,096; None = (2, 2, 2) with a threshold, else one mean.
        budget: a function ``f(scores) -> keep`` from float32 ``[B, H, N, N]`` to bool of the same shape, in place of ``topk``
            and ``threshold``. It may write to the scores, and keep nothing.
        density: instead of ``topk``, the share in (0, 1] of the video's tile pairs that is computed exactly, window included, whatever the
            canvas: the same number of key tiles for each query tile, to within one. A window that alone is more is computed whole.
        compensation: what the video tiles that are not computed exactly contribute: "none" = nothing, as published; "linear" = each an
            estimate from its means, with a first-order correction from its covariances. See ``ssta.kernels.eager.estimate``.
        compensation_parts: 1 or 2 estimates for each tile; with 2 its tokens are split by their keys' first principal direction.
        variants: ``(max_frames, {field: value, ...})`` in ascending order. ``for_canvas`` applies the first one whose
            ``max_frames`` is not exceeded.

    Raises:
        TypeError: a value of the wrong kind.
        ValueError: a value out of range, an unknown name, or a combination that has no meaning.
    """

    tile_thw: tuple[int, int, int] = (6, 8, 8)
    kernel_thw: tuple[int, int, int] | None = None
    topk: int | None = None
    sparse_type: str | None = None
    threshold: float = 0.0
    lambda_: float = 0.7
    sampling_type: str | Callable[[Tensor, Tensor], Tensor] | None = None
    pad_type: str = "none"
    mask_share_within_head: bool = False
    adaptive_pool: tuple[int, int, int] | None = None
    budget: Callable[[Tensor], Tensor] | None = None
    density: float | None = None
    compensation: str = "none"
    compensation_parts: int = 1
    variants: tuple[tuple[int, Mapping[str, object]], ...] = ()
    # The variants' configurations with their max_frames, and the one for more frames than any variant has.
    _resolved: tuple[tuple[int, SSTAConfig], ...] = field(init=False, repr=False, compare=False)
    _beyond: SSTAConfig | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._settle("tile_thw", require_tile("tile_thw", self.tile_thw))
        if self.kernel_thw is not None:
            self._settle("kernel_thw", require_triple("kernel_thw", self.kernel_thw))
        if self.topk is not None:
            self._settle("topk", require_int("topk", self.topk, 1))
        if self.sparse_type is not None:
            require_choice("sparse_type", self.sparse_type, SPARSE_TYPES)
            self._settle("sparse_type", "block_attn" if self.sparse_type == "moba" else self.sparse_type)
        for name, interval in (("threshold", "[0, 1)"), ("lambda_", "[0, 1]")):
            self._settle(name, require_share(name, getattr(self, name), interval))
        if callable(self.sampling_type):
            require_function("sampling_type", self.sampling_type, "q_descriptors", "k_descriptors")
        elif self.sampling_type is not None:
            require_choice("sampling_type", self.sampling_type, SAMPLING_TYPES, " or a function of (q_descriptors, k_descriptors)")
        require_choice("pad_type", self.pad_type, PAD_TYPES)
        require_bool("mask_share_within_head", self.mask_share_within_head)
        if self.adaptive_pool is not None:
            self._settle("adaptive_pool", require_triple("adaptive_pool", self.adaptive_pool))
            if prod(self.adaptive_pool) > MOST_CELLS:
                raise ValueError(f"adaptive_pool must have at most {MOST_CELLS} cells, got {self.adaptive_pool}")
        if self.budget is not None:
            if not callable(self.budget):
                raise TypeError(f"budget must be None or a function of the scores, got {self.budget!r}")
            require_function("budget", self.budget, "scores")
            for name, free in (("topk", None), ("threshold", 0)):
                if getattr(self, name) != free:
                    raise ValueError(f"{name} must be {free} with a budget of your own, which replaces it, got {getattr(self, name)}")
        self._check_compensation()
        self._check_window()
        self._check_density()
        if not isinstance(self.variants, (tuple, list)):
            raise TypeError(f"variants must be a tuple of (max_frames, overrides), got {self.variants!r}")
        checked = [self._check_variant(i, variant) for i, variant in enumerate(self.variants)]
        self._settle("variants", tuple([(frames, overrides) for frames, overrides, _ in checked]))
        self._settle("_resolved", tuple([(frames, varied) for frames, _, varied in checked]))
        self._settle("_beyond", replace(self, variants=()) if checked else None)

    def __hash__(self) -> int:
        # Every call of a layer looks itself up by it.
        found = vars(self).get("_hash")
        if found is None:
            found = vars(self)["_hash"] = hash(tuple([getattr(self, of.name) for of in fields(self) if of.compare]))
        return found

    def __getstate__(self) -> dict:
        # Strings have another hash in another process.
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_compensation(self) -> None:
        require_choice("compensation", self.compensation, COMPENSATIONS)
        parts = require_int("compensation_parts", self.compensation_parts, 1)
        if parts > 2 or parts > 1 and self.compensation == "none":
            raise ValueError(f"compensation_parts must be 1, or 2 with a compensation, got {parts} with compensation {self.compensation!r}")
        self._settle("compensation_parts", parts)
        if self.compensation != "none" and self.mask_share_within_head:
            raise ValueError("mask_share_within_head must be False with a compensation, whose estimates are each head's own, got True with "
                             f"compensation {self.compensation!r}")
        if self.threshold > 0 and self.scored_by in ("importance", "error"):
            chosen = "" if self.sampling_type else ", which a compensation chooses tiles by where no other is given"
            raise ValueError(f"threshold must be 0 with sampling_type {self.scored_by!r}{chosen}: a threshold is a share of the softmax of "
                             f"similarities, got {self.threshold}; sampling_type='similarity' has them, and density bounds any score")
        if self.scored_by == "error":
            if self.compensation == "none":
                raise ValueError("sampling_type 'error' must come with a compensation, whose error it is, got 'none'")
            if self.adaptive_pool is not None:
                raise ValueError("adaptive_pool must be None with sampling_type 'error', which has no descriptors, "
                                 f"got {self.adaptive_pool}")

    def _check_window(self) -> None:
        """That nothing was given of a window that is not kept, or of a budget that is not asked."""
        if self.selected_by == "block_attn" and self.kernel_thw not in (None, NO_WINDOW):
            estimated = "" if self.sparse_type else f" and compensation {self.compensation!r}"
            raise ValueError("kernel_thw must come with sparse_type='ssta' where no window is kept, got kernel_thw = "
                             f"{self.kernel_thw} with sparse_type {self.sparse_type!r}{estimated}")
        if self.selected_by == "sta":
            for name, free in (("topk", None), ("threshold", 0), ("budget", None)):
                if getattr(self, name) != free:
                    raise ValueError(f"{name} must be {free} with sparse_type 'sta', which selects by the window alone, got "
                                     f"{getattr(self, name)}")

    def _check_density(self) -> None:
        if self.density is None:
            return
        self._settle("density", require_share("density", self.density, "(0, 1]", "a share of the tile pairs"))
        for name, free in (("topk", None), ("threshold", 0.0), ("budget", None)):
            if getattr(self, name) != free:
                raise ValueError(f"{name} must be {free} with a density, which takes its place, got {name} = {getattr(self, name)} and "
                                 f"density = {self.density}")
        if self.sparse_type == "sta":
            raise ValueError("sparse_type must be 'ssta' or 'block_attn' with a density, for the window alone has its own, got 'sta' and "
                             f"density = {self.density}")

    def _check_variant(self, i: int, variant: tuple) -> tuple[int, tuple[tuple[str, object], ...], SSTAConfig]:
        """The variant with its overrides as sorted pairs, which can be hashed, and the configuration that it stands for."""
        if not isinstance(variant, (tuple, list)) or len(variant) != 2:
            raise TypeError(f"variants[{i}] must be (max_frames, overrides), got {variant!r}")
        frames, overrides = variant
        frames = require_int(f"variants[{i}] max_frames", frames, 1)
        if i and frames <= self.variants[i - 1][0]:
            raise ValueError(f"variants must ascend in max_frames, got {frames} after {self.variants[i - 1][0]}")
        pairs = list(overrides.items()) if isinstance(overrides, Mapping) else overrides
        if not isinstance(pairs, (tuple, list)) or not all(
                isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
            raise TypeError(f"variants[{i}] overrides must map fields of SSTAConfig to values, got {overrides!r}")
        unknown = sorted({name for name, _ in pairs} - {of.name for of in fields(self) if of.init and of.name != "variants"})
        if unknown:
            raise ValueError(f"variants[{i}] must override fields of SSTAConfig other than variants, got {unknown}")
        try:
            varied = replace(self, variants=(), **dict(pairs))
        except (TypeError, ValueError) as error:
            raise type(error)(f"variants[{i}]: {error}") from None
        return frames, tuple((name, getattr(varied, name)) for name in sorted(dict(pairs))), varied

    @property
    def pool_cells(self) -> tuple[int, int, int] | None:
        """The cells of a descriptor that ``adaptive_pool`` and ``threshold`` together ask for; None = one mean."""
        if self.adaptive_pool is None and self.threshold > 0:
            return (2, 2, 2)
        return self.adaptive_pool

    @property
    def selected_by(self) -> str:
        """``sparse_type``, or what None stands for: "sta", "block_attn" or "ssta"."""
        if self.sparse_type is None:
            return "ssta" if self.compensation == "none" else "block_attn"
        return self.sparse_type

    @property
    def scored_by(self) -> str | Callable[[Tensor, Tensor], Tensor]:
        """``sampling_type``, or what None stands for."""
        if self.sampling_type is None:
            return "similarity" if self.compensation == "none" else "error"
        return self.sampling_type

    @property
    def holds_functions(self) -> bool:
        """Whether tiles are scored or chosen by functions of the user's own."""
        return callable(self.sampling_type) or self.budget is not None

    @property
    def window(self) -> tuple[int, int, int]:
        """``kernel_thw``, or what None stands for."""
        return WINDOW if self.kernel_thw is None else self.kernel_thw

    @property
    def row_topk(self) -> int:
        """``topk``, or what None stands for without a density."""
        return TOPK if self.topk is None else self.topk

    @property
    def plain(self) -> tuple[tuple[str, object], ...]:
        """(field, value) of what is not the default, in plain values that ``from_plain`` reads; functions by their number here."""
        found = [(of.name, getattr(self, of.name)) for of in fields(self) if of.init and of.name != "variants"]
        return tuple([(name, _plain(value)) for name, value in found if value is not None and value != getattr(type(self), name)])

    @classmethod
    def from_plain(cls, plain: tuple[tuple[str, object], ...]) -> SSTAConfig:
        """What ``plain`` was taken of."""
        return cls(**{name: _from_plain(value) for name, value in plain})

    def for_canvas(self, thw: tuple[int, int, int]) -> SSTAConfig:
        """The settings for a canvas of ``thw`` latent tokens, without variants; a config that has none returns itself.

        Raises:
            TypeError, ValueError: ``thw`` is not three positive ints.
        """
        frames = require_triple("thw", thw)[0]
        for max_frames, varied in self._resolved:
            if frames <= max_frames:
                return varied
        return self if self._beyond is None else self._beyond

    @classmethod
    def hunyuan_video_15(cls) -> SSTAConfig:
        """HunyuanVideo-1.5's sparse checkpoint (tencent/HunyuanVideo-1.5, 720p).

        Half the budget from 2 to 31 latent frames (121 frames of video); a single frame has flat tiles of the same 384 tokens.
        """
        return cls(tile_thw=(6, 8, 8), kernel_thw=(3, 3, 3), topk=64, sparse_type="ssta", sampling_type="importance", lambda_=0.7,
                   pad_type="zero", mask_share_within_head=False,
                   variants=((1, {"tile_thw": (1, 16, 24), "kernel_thw": (1, 1, 1)}), (31, {"topk": 32})))


def in_effect(kernel_thw: tuple[int, int, int] | None, topk: int | None, threshold: float, sparse_type: str | None
              ) -> tuple[tuple[int, int, int] | None, int | None, float]:
    """(kernel_thw, topk, threshold) of ``ssta_3d_attention``, checked. Published code always gives all three, so those without an effect
    under a named ``sparse_type`` are left out. Without a name all stay, and ``SSTAConfig`` refuses them."""
    named = sparse_type if isinstance(sparse_type, str) else ""
    if named in ("block_attn", "moba") and kernel_thw is not None:
        require_triple("kernel_thw", kernel_thw)
        kernel_thw = None
    if named == "sta":
        if topk is not None:
            require_int("topk", topk, 1)
        require_share("threshold", threshold, "[0, 1)")
        topk, threshold = None, 0.0
    return kernel_thw, topk, threshold


# Functions that configurations name and compiled graphs call by their numbers, for as long as the process lives.
_FUNCTIONS: list[Callable] = []
# Whose numbers they are: another process has other functions.
_PROCESS = uuid4().hex


def _number_of(function: Callable) -> int:
    for number, known in enumerate(_FUNCTIONS):
        if known is function:
            return number
    _FUNCTIONS.append(function)
    return len(_FUNCTIONS) - 1


# torch.compiler.assume_constant_result does the same, but loads the whole compiler.
_number_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _plain(value: object) -> object:
    # A compiler takes floats for variables, but not their text.
    if isinstance(value, (float, torch.SymFloat)):
        return "float", value.hex()
    return ("function", _number_of(value), _PROCESS) if callable(value) else value


def _from_plain(value: Any) -> Any:
    if not isinstance(value, tuple) or value[0] not in ("float", "function"):
        return value
    if value[0] == "float":
        return float.fromhex(value[1])
    if value[2] != _PROCESS:
        raise ValueError("sampling_type and budget must be named ones in a program that another process runs, got function number "
                         f"{value[1]}")
    return _FUNCTIONS[value[1]]
