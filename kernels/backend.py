"""Backend: which implementation runs each step of a layer, decided once. A kind of GPU is a row of ROWS.

A layer of attention over tiles is seven steps:

    gather      tokens into the order of blocks, with norm and RoPE where projections are given, and blocks' means on the way
    estimate    what blocks that will not be computed are worth, from their means and covariances
    score       how much a key block matters to a query block, by means or by estimates
    select      lists of the best-scored blocks, and of those that are forced
    attend      block-sparse attention over the lists
    merge       the estimate of what no list names, added by log-sum-exp
    take        back to the order of tokens

Each row of ROWS names functions for the steps that it has; what a row lacks, or cannot do for a problem, the next row does, down to plain
torch, which can do everything. All implementations of a step have one signature, which ``Backend`` documents. They are plain functions of
tensors: none asks whether a compiler, a mode or autograd watches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_tensor, device_of, require_dtype
from .eager import moves, ranking
from .operators import TRITON, at_hand, watched
from .routing import Where, choose_route, require_impl, rows_from

STEPS = ("gather", "estimate", "score", "select", "attend", "merge", "take")


def _triton_cannot(where: Where) -> str | None:
    if not TRITON:
        return "requires triton, which is not installed"
    if where.why_no_triton is not None:
        return where.why_no_triton
    if where.dtype == torch.float64:
        return "requires float16, bfloat16 or float32, got torch.float64"
    if where.device_type == "cuda":
        return None
    # The interpreter computes with numpy, which has no bfloat16.
    return "requires float16 or float32 in Triton's interpreter, got torch.bfloat16" if where.dtype == torch.bfloat16 else None


def _triton_estimate_cannot(where: Where) -> str | None:
    reason = _triton_cannot(where)
    if reason is not None or where.device_type == "cuda":
        return reason
    right = _load("portable.interpreted:multiplies_bfloat16")()
    return None if right else "multiplies bfloat16, which Triton's interpreter here takes for integers"


def _hopper_merge_cannot(where: Where) -> str | None:
    if not where.capability == (9, 0):
        return "runs on compute capability 9.0 alone"
    if where.dtype != torch.bfloat16:
        return f"takes bfloat16, not {where.dtype}"
    return None if where.head_dim in (64, 128) else f"takes a head_dim of 64 or 128, not {where.head_dim}"


@dataclass(frozen=True)
class Row:
    """A kind of implementation.

    Args:
        name: as ``impl`` names it.
        functions: by name of a field of ``Backend``, "module:function" below ssta.kernels, imported when first chosen;
            "name=module:function" after it is an argument that the function is given.
        cannot: of a Where: why none of them can run, or None.
    """

    name: str
    functions: dict[str, str]
    cannot: Callable[[Where], str | None] = lambda where: None


# Best first. Hopper's kernel of the merge is one that the portable function is given.
ROWS = (
    Row("hopper", dict(
        merge="portable.estimate:merge kernel=hopper.estimate_merge:hopper_merge kernel_rows=hopper.estimate_merge:ROWS"),
        _hopper_merge_cannot),
    Row("triton", dict(
        gather="prologue.reorder_kernel:gather", gather_one="prologue.reorder_kernel:one",
        gather_into="prologue.reorder_kernel:gather_into", take="prologue.reorder_kernel:take",
        score="prologue.select_kernel:score", select="prologue.select_kernel:select", valid_lengths="prologue.select_kernel:valid_lengths",
        write_ring="portable.held:write_ring"), _triton_cannot),
    Row("triton", dict(
        key_statistics="portable.estimate:key_statistics", estimate="portable.estimate:estimate",
        merge="portable.estimate:merge", merge_backward="portable.estimate:merge_backward",
        room_for_statistics="portable.held:room_for_statistics", write_statistics="portable.held:write_statistics"),
        _triton_estimate_cannot),
    Row("torch", dict(
        gather="eager.moves:gather", gather_one="eager.moves:one", gather_into="eager.moves:gather_into",
        take="eager.moves:take", score="eager.ranking:score",
        select="eager.ranking:select", valid_lengths="eager.ranking:valid_lengths", estimate="eager.estimate:estimate",
        key_statistics="eager.estimate:key_statistics", merge="eager.estimate:merge",
        merge_backward="eager.estimate:merge_backward", room_for_statistics="eager.held:room_for_statistics",
        write_statistics="eager.held:write_statistics", write_ring="eager.held:write_ring")),
)
# Which step a function belongs to, where it is not named after it.
STEP_OF = {"gather_one": "gather", "gather_into": "gather", "valid_lengths": "select", "key_statistics": "estimate",
           "merge_backward": "merge", "room_for_statistics": "estimate", "write_statistics": "estimate",
           "write_ring": "gather"}


class Chosen(NamedTuple):
    """Which implementation a step has.

    Attributes:
        step: one of STEPS.
        name: of a row.
        rejected: (name, reason) of the faster rows that were not taken.
    """

    step: str
    name: str
    rejected: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Backend:
    """The implementations of a layer's steps. Made by ``choose_backend``.

    All functions want tensors on the current device that nobody differentiates, and give new ones on it; none waits for the device. q is
    ``[B, H, S, D]``, k and v ``[B, Hkv, S', D]``.

    Attributes:
        impl: what was asked for.
        chosen: which row each step but "attend" has, and why no faster one.
        gather: ``(q, k, v, q_move, kv_move) -> (q, k, v, q_means, k_means)``: tensors, or ``Deferred``, in the orders of ``Move``s, each in
            its memory order; float32 means ``[B, H, mean_blocks, D]``, rounded to q's dtype, over all places of a block, or None from plain
            torch, to which they would be a pass of their own.
        gather_one: ``(x, move) -> (x, means)``, one tensor by itself.
        gather_into: ``(q, k, v, move, k_out, v_out) -> (q, q_means, k_means)``, of tensors in one order, keys and values written to what is
            given, ``[B, Hkv, P, D]`` with a last stride of 1.
        take: ``(x, index) -> x[:, :, index]``, zeros where the int64 index is -1, in x's memory order.
        score: ``(q_means, k_means, lambda_) -> float32 [B, H, N, K]``. lambda_ None scores by the dot product; a number by importance, see
            ``eager.ranking``. Means that are not finite count as zero, and as key blocks score -inf.
        select: ``(forced, scores, k_per_row, active, beyond, room) -> (counts, indices)`` of BlockLists, ids ascending. forced: bool
            ``[T, T']``, True keeps the block for all batch elements and heads. scores: of the first N query and K key blocks; None = no
            more than forced, with H = 1. k_per_row: how many of the best each of the first N rows gets, at most K: an int or int32
            ``[B, H, N]``, or ``[1, 1, N]`` for all alike; of equal scores the first is better, NaN counts as -inf. active ``[B, T]`` or
            ``[B, 1, T]``, not 0 where a block is active: one that is not attends only to itself, and no other to it; needs T = T'.
            beyond: k_per_row counts blocks that are not forced, instead of the best whether forced or not. room: how many blocks a list
            holds; those past it are lost.
        valid_lengths: ``(valid, runs, before, lengths, least) -> int32 [B, 1, T]``: what of each block is left where in its run only so
            many tokens count as are valid, the first ones. valid: bool ``[B, L]`` of all runs, one after another; runs: int32 ``[2, T]``,
            where each block's run begins and ends in it, nowhere for a block of none; before: int32 ``[T]``, the run's tokens before the
            block, far below zero for a block of no run, which is left whole; lengths: int32 ``[T]``; least: tokens of a run that count at
            least.
        key_statistics, estimate, merge, merge_backward: see ``eager.estimate``. What the first finds may be given to the second.
        room_for_statistics, write_statistics, write_ring: of a cache, see ``eager.held``. What the first two make may be given to estimate.
    """

    impl: str
    chosen: tuple[Chosen, ...]
    gather: Callable
    gather_one: Callable
    gather_into: Callable
    take: Callable
    score: Callable
    select: Callable
    valid_lengths: Callable
    key_statistics: Callable
    estimate: Callable
    merge: Callable
    merge_backward: Callable
    room_for_statistics: Callable
    write_statistics: Callable
    write_ring: Callable

    def score_by(self, scorer: Callable[[Tensor, Tensor], Tensor], q_means: Tensor, k_means: Tensor) -> Tensor:
        """The step "score" by a function of the user's own, from which NaN and inf in one block cannot spread to another; see
        ``eager.ranking.finite_scores``, which says what it raises."""
        return ranking.finite_scores(q_means, k_means.repeat_interleave(q_means.shape[1] // k_means.shape[1], 1), scorer)

    def keep(self, forced: Tensor, kept: Tensor | None, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """The step "select" where the blocks are given, bool ``[B, H, N, K]``, in place of scores."""
        return ranking.keep_blocks(forced, kept, active)

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """(step, row) of each step but "attend"."""
        return tuple([(of.step, of.name) for of in self.chosen])

    def by_torch(self, step: str) -> bool:
        """Whether plain torch runs a step."""
        return any([of.name == "torch" for of in self.chosen if of.step == step])

    def explain(self) -> tuple[str, ...]:
        """A sentence for each step but "attend", of which the ``Route`` speaks."""
        return tuple([f"{step}: {name}" + "".join([f"; not {other}, which {reason}" for other, reason in rejected])
                      for step, name, rejected in self.chosen])


def choose_backend(impl: str, device: torch.device | str | int, dtype: torch.dtype, head_dim: int) -> Backend:
    """What ``impl`` stands for in every step: a pure function of its arguments and of the kind of GPU.

    "auto" takes the first row that can run a step. "hopper" and "triton" take theirs, and for what it lacks or cannot do those after it;
    "torch" and "reference" take plain torch for all steps, and "reference" attends by the specification.

    Raises:
        TypeError: device or dtype is none.
        ValueError: an unknown name, or one that cannot attend on such tensors.
    """
    require_impl(impl)
    device, dtype = device_of("device", device), require_dtype("dtype", dtype)
    if impl not in ("auto", "reference"):
        choose_route(impl, device, dtype, head_dim)
    where = Where.of(device, dtype, head_dim)
    return choose(impl, where._replace(interpreting=False) if impl == "auto" else where)


@lru_cache(maxsize=256)
def choose(impl: str, where: Where) -> Backend:
    """The same for plain facts; attention itself may be unable to run there."""
    names = {row.name for row in rows_from("torch" if impl == "reference" else impl)} if impl != "auto" else ()
    rows = [row for row in ROWS if impl == "auto" or row.name in names]
    reasons = [row.cannot(where) for row in rows]
    functions: dict[str, Callable] = {}
    chosen: dict[str, Chosen] = {}
    for name in ROWS[-1].functions:
        having = [(row, reason) for row, reason in zip(rows, reasons) if name in row.functions]
        number = next(number for number, (_, reason) in enumerate(having) if not reason)
        row = having[number][0]
        functions[name] = _load(row.functions[name])
        rejected = tuple([(before.name, reason) for before, reason in having[:number] if reason])
        chosen.setdefault(STEP_OF.get(name, name), Chosen(STEP_OF.get(name, name), row.name, rejected))
    return Backend(impl, tuple([chosen[step] for step in STEPS if step in chosen]), **functions)


def _load(path: str) -> Callable:
    path, *given = path.split()
    module, name = path.split(":")
    function = getattr(import_module(f".{module}", __package__), name)
    if not given:
        return function
    return partial(function, **{name: _load(of) for name, of in (argument.split("=") for argument in given)})


def take_tokens(x: Tensor, index: Tensor, impl: str = "auto") -> Tensor:
    """The step "take" of the backend that ``impl`` stands for; where somebody watches or wants a gradient in plain torch, which is
    differentiable.

    Args:
        x: ``[B, H, S, D]``.
        index: int64 ``[P]``, tokens of x, or -1 = zeros. Values are checked on a CPU alone: on a GPU the check would wait.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    check_tensor("x", x, None, (None,) * 4, "[batch, heads, tokens, head_dim]", None)
    check_tensor("index", index, (torch.int64,), (None,), "[tokens]", x.device)
    if index.numel() and at_hand(index) and not -1 <= int(index.min()) <= int(index.max()) < x.shape[2]:
        raise ValueError(f"index must lie in [-1, {x.shape[2]}), got {int(index.min())} to {int(index.max())}")
    if watched(x) or torch.is_grad_enabled() and x.requires_grad:
        return moves.take(x, index)
    return choose_backend(impl, x.device, x.dtype, x.shape[3]).take(x, index)
