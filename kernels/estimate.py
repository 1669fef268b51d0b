"""The estimate: what blocks that no list names would have added to attention, from their means and covariances.

Its implementations share this file; ``eager/estimate.py`` has the formulas. ``eager/`` and ``portable/`` have the same four functions,
called without autograd and outside of autocast: ``key_statistics``, ``estimate``, ``merge`` and ``merge_backward``.
Hopper's kernel takes the place of a launch in the portable ``merge``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

# Where h is larger, the estimate is damped.
CAP = 1.0
# Heads in which the mean of h, weighted by mass, is larger are not compensated.
USELESS = 3.0
# Steps of the power iteration that finds a block's first principal direction.
ITERATIONS = 10
# Steps of the iteration that finds where two units of a block meet: k-means of two means, along that direction.
CUTS = 4


# The blocks of an axis that the estimate is about, which come first: (offsets, int32 [T + 1]: block i owns the places from offsets[i] up to
# offsets[i + 1]; how many of the T, at least one: N of the queries' blocks, whose rows get an estimate, or K of the keys', which may be
# estimated; an upper bound on their tokens).
Blocks = tuple[Tensor, int, int]


@dataclass(frozen=True, eq=False)
class Estimate:
    """The estimate of K key blocks before any is selected, and how N query blocks see them; constants to autograd. U = parts * K units, of
    block u // parts.

    ``key_statistics`` fills the fields of keys, which are worth keeping as long as the keys are: two estimates can be concatenated along U,
    but for ``order``, which counts tokens from the first one's. ``estimate`` adds the fields of queries. Plain torch has float32 or float64
    where Triton's kernels have bfloat16 or the dtype that they multiply.

    Attributes:
        parts: units of a block.
        log_count: float32 ``[B, Hkv, U]``, log of a unit's tokens; -inf where it has none, or its block holds NaN or inf: nothing is
            estimated of that.
        order: int32 ``[B, Hkv, P]``, which token each place of the compensated blocks takes when units divide them, ascending in each
            unit; None where that is its own.
        k_mean, v_mean: ``[B, Hkv, U, D]`` in the dtype that kernels multiply; 0 where nothing is estimated.
        moments: ``[B, Hkv, U, ...]``, the keys' covariances: bfloat16 of half of a symmetric matrix from kernels, float32 or float64
            ``[B, Hkv, U, D, D]`` from plain torch. None once queries have been compared with them.
        covariances: ``[B, Hkv, U, D * D]``, of keys with values, bfloat16 from kernels, or None: then ``merge`` computes them of k and v.
        scales: of moments and covariances that a cache holds in two bits an entry, see ``portable/coded.py``; else None.
        half_variance: h, ``[B, H, N, U]``, half the variance of a unit's scores as a query block sees it. bfloat16, because it waits while
            attention runs. None without queries, as mass and useful are.
        mass: likewise, the softmax over all units, mean of a query block's ``sampled_queries``, spread over it.
        useful: bool ``[B, H]``, the heads that are compensated.
        scores: float32 ``[B, H, N, K]`` or float64, mass x h of each key block over its tokens, by which the rule "error" selects; -inf
            where nothing is estimated of a block. A layer drops them once it has selected.
    """

    parts: int
    log_count: Tensor
    order: Tensor | None
    k_mean: Tensor
    v_mean: Tensor
    moments: Tensor | None = None
    covariances: Tensor | None = None
    scales: Tensor | None = None
    half_variance: Tensor | None = None
    mass: Tensor | None = None
    useful: Tensor | None = None
    scores: Tensor | None = None

    @property
    def of_queries(self) -> tuple[Tensor, Tensor, Tensor]:
        """half_variance, mass and useful, which ``estimate`` has filled."""
        assert self.half_variance is not None and self.mass is not None and self.useful is not None, "keys alone have none"
        return self.half_variance, self.mass, self.useful

    @property
    def cached(self) -> dict[str, Tensor]:
        """The fields of keys that a cache holds, by name: only a backward asks which tokens are of which unit."""
        fields = {name: getattr(self, name) for name in ("log_count", "k_mean", "v_mean", "moments", "covariances", "scales")}
        return {name: x for name, x in fields.items() if x is not None}

    def with_cached(self, tensors: Iterable[Tensor]) -> Estimate:
        """The same with other values of ``cached``."""
        fields: dict[str, Any] = dict(zip(self.cached, tensors))
        return replace(self, **fields)


def sampled_queries(longest: int) -> int:
    """How many of a block's queries say what mass and what variance it sees in units, where blocks have up to ``longest``.

    Of models of a few minutes' training, at tiles of 128, 256 and 384 tokens, errors of the output are the same within 1 % as where all do.
    """
    return 32 if longest <= 128 else 64


def useful_heads(error: Tensor) -> Tensor:
    """bool ``[B, H]``: the heads whose blocks can be estimated. ``error``: ``[B, H, N]``, the sum of mass x h over units."""
    return error.mean(-1) <= USELESS


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """``[B, H, N, n]`` -> ``[B * Hkv, H / Hkv * N, n]``, a view."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3).flatten(0, 1)
