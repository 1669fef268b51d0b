"""The tail: what blocks that no list names would have added to attention, estimated from their means and covariances.

Here is what its implementations share; ``eager/tail.py`` has the formulas. ``eager/`` and ``portable/`` have the same five functions, to be
called without autograd and outside of autocast: ``key_statistics``, ``estimate``, ``scores``, ``combine`` and ``combine_backward``.
Hopper's kernels take the place of launches in the portable functions.

The estimate is two parts with a value between: ``key_statistics`` of keys and values gives ``KeyStatistics``, and ``estimate`` of queries
takes them, or makes them by the way.
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


# Those of an axis' blocks that the tail is about, which come first: (offsets, int32 [T + 1]: block i owns the places from offsets[i] up to
# offsets[i + 1]; how many of the T, at least one: N of the queries' blocks, whose rows get an estimate, or K of the keys', which may be
# estimated; an upper bound on their tokens).
Blocks = tuple[Tensor, int, int]


@dataclass(frozen=True, eq=False)
class KeyStatistics:
    """What the estimate reads of K key blocks' tokens, whatever the queries, so that it can be kept as long as the keys are; constants to
    autograd. U = parts * K units, those of a block next to each other: statistics of some blocks and of others, one behind the other, are
    those of all, but for ``order``, which counts tokens from the first one's.

    Attributes:
        parts: units of a block.
        log_count, order, k_mean, v_mean: as of ``BlockEstimates``.
        moments: ``[B, Hkv, U, ...]``, the keys' covariances: bfloat16 of half of a symmetric matrix from kernels, float32 or float64
            ``[B, Hkv, U, D, D]`` from plain torch.
        covariances: ``[B, Hkv, U, D * D]``, of keys with values, bfloat16 from kernels, or None: then ``combine`` computes them of k and v.
        scales: of moments and covariances that a cache holds in two bits an entry, see ``portable/coded.py``; else None.
    """

    parts: int
    log_count: Tensor
    order: Tensor | None
    k_mean: Tensor
    v_mean: Tensor
    moments: Tensor
    covariances: Tensor | None = None
    scales: Tensor | None = None

    @property
    def held(self) -> dict[str, Tensor]:
        """What a cache holds of them, by name: only a backward asks which tokens are of which unit."""
        found = {name: getattr(self, name) for name in ("log_count", "k_mean", "v_mean", "moments", "covariances", "scales")}
        return {name: x for name, x in found.items() if x is not None}

    def of(self, tensors: Iterable[Tensor]) -> KeyStatistics:
        """Such of other units, of which these are ``held``."""
        given: dict[str, Any] = dict(zip(self.held, tensors))
        return replace(self, **given)


@dataclass(frozen=True, eq=False)
class BlockEstimates:
    """What is known of K key blocks before any is selected, and of what N query blocks see in them; constants to autograd. U = parts * K
    units, of block u // parts.

    Plain torch has float32 or float64 where Triton's kernels have bfloat16 or the dtype that they multiply.

    Attributes:
        parts: units of a block.
        log_count: float32 ``[B, Hkv, U]``, log of a unit's tokens; -inf where it has none, or its block holds NaN or inf: nothing is
            estimated of that.
        half_variance: h, ``[B, H, N, U]``, half the variance of a unit's scores as a query block sees it. bfloat16, because it waits while
            attention runs.
        mass: likewise, the softmax over all units, mean of a query block's ``sampled_queries``, spread over it.
        order: int32 ``[B, Hkv, P]``, which token each place of the compensated blocks takes when units divide them, ascending in each
            unit; None where that is its own.
        k_mean, v_mean: ``[B, Hkv, U, D]`` in the dtype that kernels multiply; 0 where nothing is estimated.
        useful: bool ``[B, H]``, the heads that are compensated.
        covariances, scales: as of the ``KeyStatistics`` that the estimate was given; else None.
    """

    parts: int
    log_count: Tensor
    half_variance: Tensor
    mass: Tensor
    order: Tensor | None
    k_mean: Tensor
    v_mean: Tensor
    useful: Tensor
    covariances: Tensor | None = None
    scales: Tensor | None = None


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
