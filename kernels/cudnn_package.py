"""The package: what its block-sparse attention can do, and whether it may."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple

import torch

from .device import asked_once
from .operators import TRITON

if TYPE_CHECKING:
    from .cudnn_check import Verdict
    from .routing import Problem

PACKAGE = "nvidia-cudnn-frontend"
# The releases whose interface was read and whose results were looked at. It calls itself experimental, and each release may move something.
CHECKED = ("1.32.0",)
# Tokens of its blocks.
SLOTS = (64, 128)
# The extra "blackwell" in pyproject.toml installs this.
INSTALL = "pip install 'nvidia-cudnn-frontend[cutedsl]==1.32.*'"


class Kernels(NamedTuple):
    """What the package has for a GPU and blocks of one length."""

    head_dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    grouped: bool                     # several query heads to a key head
    backward_dims: tuple[int, ...]    # head_dims of the backward, which is for bfloat16 and heads of their own keys


_BOTH, _BF16 = (torch.float16, torch.bfloat16), (torch.bfloat16,)
_HOPPER, _CONSUMER = Kernels((64, 96, 128), _BOTH, True, (128,)), Kernels((128,), _BOTH, True, ())
_BLACKWELL = {128: Kernels((64, 96, 128), _BOTH, True, (64, 128)), 64: Kernels((128,), _BF16, False, (128,))}
# By compute capability and tokens of a block, as cudnn/block_sparse_attention/api.py of nvidia-cudnn-frontend 1.32.0 says it. On
# sm_110 the backward for 128 takes no sizes of blocks.
KERNELS = {(9, 0): {128: _HOPPER, 64: _HOPPER}, (10, 0): _BLACKWELL, (10, 3): _BLACKWELL,
           (11, 0): _BLACKWELL | {128: _BLACKWELL[128]._replace(backward_dims=())}, (12, 0): {128: _CONSUMER, 64: _CONSUMER}}


@asked_once
def installed(package: str) -> str | None:
    """The version of what is installed, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def slot_of(max_q_length: int, max_kv_length: int) -> int:
    """Tokens of the slots that blocks of up to so many tokens stand in."""
    return SLOTS[0] if max(max_q_length, max_kv_length) <= SLOTS[0] else SLOTS[1]


def cannot(problem: Problem) -> str | None:
    """As ``Implementation`` takes it."""
    where, facts = problem.where, problem.facts
    slots = KERNELS.get(where.capability) if where.capability else None
    if slots is None:
        gpus = ", ".join([f"{major}{minor}" for major, minor in KERNELS])
        return f"requires a GPU of sm_{gpus}, got {where.device}"
    if not TRITON:
        return "requires triton, which is not installed, for its lists"
    if installed(PACKAGE) is None:
        return f"requires {PACKAGE}, which is not installed: {INSTALL}"
    has = slots[_slot(problem)]
    if where.dtype not in has.dtypes or where.head_dim not in has.head_dims:
        return (f"requires {_either(has.dtypes)} and a head_dim of {_either(has.head_dims)} on {where.device} in blocks of "
                f"{_slot(problem)}, got {where.dtype} and {where.head_dim}")
    if problem.heads != problem.kv_heads and not has.grouped:
        return f"requires as many key heads as query heads in blocks of {_slot(problem)}, got {problem.kv_heads} and {problem.heads}"
    if problem.causal:
        return "has no causal mask"
    return None if facts.shared else "requires key blocks that lie at the same tokens for all heads"


def suits_not(problem: Problem) -> str | None:
    """As ``Implementation`` takes it. Runs the self-check where all else suits."""
    where, facts = problem.where, problem.facts
    if where.capability == (9, 0):
        return "is slower than this package's own kernels on a Hopper GPU"
    shortest = min(facts.max_q_length, facts.max_kv_length)
    if shortest < SLOTS[0]:
        return f"pays from blocks of {SLOTS[0]} tokens on, got {shortest}"
    if installed(PACKAGE) not in CHECKED:
        return f"was checked in {_either(CHECKED)}, got {installed(PACKAGE)}"
    return _verdict(problem).why_not


def backward_cannot(problem: Problem) -> str | None:
    """As ``Implementation`` takes it."""
    if problem.deterministic:
        return "adds gradients up in no fixed order, against deterministic=True"
    return _no_backward(problem)


def verdict(problem: Problem) -> str:
    """As ``Implementation`` takes it; where "auto" would not take it, the self-check is not run."""
    suits = not problem.where.capability == (9, 0) and installed(PACKAGE) in CHECKED
    return f"{PACKAGE} {installed(PACKAGE)}, {_verdict(problem).said if suits else 'without a self-check'}"


def _no_backward(problem: Problem) -> str | None:
    where = problem.where
    assert where.capability is not None, "cannot() has looked"
    has = KERNELS[where.capability][_slot(problem)]
    if not has.backward_dims:
        return f"has no backward for partial blocks on {where.device}"
    if where.dtype != torch.bfloat16 or where.head_dim not in has.backward_dims:
        return (f"has a backward for bfloat16 and a head_dim of {_either(has.backward_dims)} on {where.device}, got {where.dtype} and "
                f"{where.head_dim}")
    if problem.heads != problem.kv_heads:
        return f"has a backward for as many key heads as query heads, got {problem.kv_heads} and {problem.heads}"
    return None


def _verdict(problem: Problem) -> Verdict:
    from .cudnn_check import self_check

    where = problem.where
    assert where.capability is not None, "cannot() has looked"
    return self_check(where.capability, where.dtype, where.head_dim, _slot(problem), problem.heads != problem.kv_heads,
                      _no_backward(problem) is None)


def _slot(problem: Problem) -> int:
    return slot_of(problem.facts.max_q_length, problem.facts.max_kv_length)


def _either(values: Iterable) -> str:
    *others, last = [str(value).removeprefix("torch.") for value in values]
    return f"{', '.join(others)} or {last}" if others else last
