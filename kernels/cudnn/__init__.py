"""Block-sparse attention of NVIDIA's cuDNN frontend (``cudnn.BSA``) behind this package's lists of blocks: a row of the routes' table."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..operators import TRITON
from ..routing import Implementation, Problem, register
from . import package
from .check import Verdict, self_check


def _cannot(problem: Problem) -> str | None:
    """As ``Implementation`` takes it."""
    where, facts = problem.where, problem.facts
    slots = package.KERNELS.get(where.capability) if where.capability else None
    if slots is None:
        gpus = ", ".join([f"{major}{minor}" for major, minor in package.KERNELS])
        return f"requires a GPU of sm_{gpus}, got {where.device}"
    if not TRITON:
        return "requires triton, which is not installed, for its lists"
    if package.installed(package.PACKAGE) is None:
        return f"requires {package.PACKAGE}, which is not installed: {package.INSTALL}"
    has = slots[_slot(problem)]
    if where.dtype not in has.dtypes or where.head_dim not in has.head_dims:
        return (f"requires {_either(has.dtypes)} and a head_dim of {_either(has.head_dims)} on {where.device} in blocks of "
                f"{_slot(problem)}, got {where.dtype} and {where.head_dim}")
    if problem.heads != problem.kv_heads and not has.grouped:
        return f"requires as many key heads as query heads in blocks of {_slot(problem)}, got {problem.kv_heads} and {problem.heads}"
    if problem.causal:
        return "has no causal mask"
    return None if facts.shared else "requires key blocks that lie at the same tokens for all heads"


def _suits_not(problem: Problem) -> str | None:
    """As ``Implementation`` takes it. Runs the self-check where all else suits."""
    where, facts = problem.where, problem.facts
    if where.capability == (9, 0):
        return "is slower than this package's own kernels on a Hopper GPU"
    shortest = min(facts.max_q_length, facts.max_kv_length)
    if shortest < package.SLOTS[0]:
        return f"pays from blocks of {package.SLOTS[0]} tokens on, got {shortest}"
    if package.installed(package.PACKAGE) not in package.CHECKED:
        return f"was checked in {_either(package.CHECKED)}, got {package.installed(package.PACKAGE)}"
    return _checked(problem).why_not


def _backward_cannot(problem: Problem) -> str | None:
    """As ``Implementation`` takes it."""
    if problem.deterministic:
        return "adds gradients up in no fixed order, against deterministic=True"
    return _no_backward(problem)


def _verdict(problem: Problem) -> str:
    """As ``Implementation`` takes it; where "auto" would not take it, the self-check is not run."""
    suits = not problem.where.capability == (9, 0) and package.installed(package.PACKAGE) in package.CHECKED
    return f"{package.PACKAGE} {package.installed(package.PACKAGE)}, {_checked(problem).said if suits else 'without a self-check'}"


def _no_backward(problem: Problem) -> str | None:
    where = problem.where
    assert where.capability is not None, "_cannot has looked"
    has = package.KERNELS[where.capability][_slot(problem)]
    if not has.backward_dims:
        return f"has no backward for partial blocks on {where.device}"
    if where.dtype != torch.bfloat16 or where.head_dim not in has.backward_dims:
        return (f"has a backward for bfloat16 and a head_dim of {_either(has.backward_dims)} on {where.device}, got {where.dtype} and "
                f"{where.head_dim}")
    if problem.heads != problem.kv_heads:
        return f"has a backward for as many key heads as query heads, got {problem.kv_heads} and {problem.heads}"
    return None


def _checked(problem: Problem) -> Verdict:
    where = problem.where
    assert where.capability is not None, "_cannot has looked"
    return self_check(where.capability, where.dtype, where.head_dim, _slot(problem), problem.heads != problem.kv_heads,
                      _no_backward(problem) is None)


def _slot(problem: Problem) -> int:
    return package.slot_of(problem.facts.max_q_length, problem.facts.max_kv_length)


def _either(values: Iterable) -> str:
    *others, last = [str(value).removeprefix("torch.") for value in values]
    return f"{', '.join(others)} or {last}" if others else last


# On Blackwell GPUs its kernels are faster than Triton's.
register(Implementation("cudnn", "cudnn.attention:cudnn_forward", "cudnn.attention:cudnn_backward", _cannot, _suits_not, triton=False,
                        backward_cannot=_backward_cannot, verdict=_verdict), before="triton")
