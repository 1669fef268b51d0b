"""Route: which kernels run, decided once, from the GPU, the dtype, the head_dim and what is known of a pattern without reading a tensor.

A kind of GPU is a folder of kernels and a row of TABLE.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import BlockLists
from .checks import device_of, require_dtype
from .device import capability

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
# A tensor core multiplies by at least 16 keys: a tile of a shorter key block is masked for the most part.
SHORTEST_TILE = 16
# The first whose tensor cores multiply bfloat16 and whose loads go to shared memory by themselves; for those before it Triton multiplies
# without tensor cores.
TRITON_CAPABILITY = (8, 0)
# The query rows of a warpgroup. Over blocks of 64 Triton's forward takes 1.1 to 1.3 times as long, where none of them is partial.
HOPPER_QUERY_BLOCK = 64
# The Hopper backward's tiles are of 128 keys: those of blocks up to this long would be half empty.
HOPPER_BACKWARD_SHORT = 64


class PatternFacts(NamedTuple):
    """What routing knows of a pattern: plain numbers, no tensor is read."""

    max_q_length: int   # tokens of the longest query block
    max_kv_length: int  # tokens of the longest key block
    shared: bool = True  # key blocks lie at the same tokens for all heads

    @classmethod
    def of(cls, blocks: BlockLists) -> PatternFacts:
        shared = all([not isinstance(x, Tensor) or x.shape[1] == 1 for x in (blocks.kv_offsets, blocks.kv_lengths)])
        return cls(blocks.max_q_length, blocks.max_kv_length, shared)


# A pattern that nobody has described counts as blocks that fill every kernel's tiles.
LONG_BLOCKS = PatternFacts(2 * HOPPER_QUERY_BLOCK, 2 * HOPPER_BACKWARD_SHORT)


class Where(NamedTuple):
    """On what kernels would run."""

    device_type: str
    capability: tuple[int, int] | None  # of a GPU by NVIDIA
    interpreting: bool                  # Triton's interpreter, on a CPU
    dtype: torch.dtype
    head_dim: int

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> Where:
        # The environment is read only where it decides anything, which is not on the way to a GPU's kernels.
        gpu = device.type == "cuda"
        return cls(device.type, capability(device) if gpu else None, not gpu and interpreting(), dtype, head_dim)

    @property
    def device(self) -> str:
        """The device as a reason names it."""
        if self.device_type != "cuda":
            return f"tensors on {self.device_type}"
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.capability else "a GPU that is not NVIDIA's"

    @property
    def why_no_triton(self) -> str | None:
        """Why kernels in Triton do not run there, or None."""
        if self.device_type != "cuda":
            return None if self.interpreting else f"requires a GPU, got {self.device}"
        old = self.capability is not None and self.capability < TRITON_CAPABILITY
        return f"requires an Ampere GPU (sm_80) or a later one, got {self.device}" if old else None


class Problem(NamedTuple):
    """What decides which kernels attend."""

    where: Where
    heads: int
    kv_heads: int
    causal: bool
    facts: PatternFacts
    deterministic: bool = True


def _hopper_cannot(problem: Problem) -> str | None:
    where = problem.where
    # The device first: who has another one need not hear of dtypes. By ==, because Dynamo of torch 2.11 does not trace != of these.
    if not where.capability == (9, 0):
        return f"requires a Hopper GPU (sm_90), got {where.device}"
    if where.dtype not in KERNEL_DTYPES or where.head_dim not in (64, 128):
        return f"requires float16 or bfloat16 and a head_dim of 64 or 128, got {where.dtype} and {where.head_dim}"
    return None


def _hopper_suits_not(problem: Problem) -> str | None:
    facts = problem.facts
    # Under a causal mask a program has two warpgroups at least, one of which would idle.
    shortest = HOPPER_QUERY_BLOCK * (2 if problem.causal else 1)
    if facts.max_q_length < shortest:
        return f"pays from query blocks of {shortest} tokens on, got {facts.max_q_length}"
    if facts.max_kv_length < SHORTEST_TILE:
        return f"takes key blocks of at least {SHORTEST_TILE} tokens, got {facts.max_kv_length}"
    return None


def _hopper_backward_cannot(problem: Problem) -> str | None:
    longest = problem.facts.max_kv_length
    if longest > HOPPER_BACKWARD_SHORT:
        return None
    return f"has a backward for key blocks of more than {HOPPER_BACKWARD_SHORT} tokens, got {longest}"


def _triton_cannot(problem: Problem) -> str | None:
    where = problem.where
    if where.why_no_triton is not None:
        return where.why_no_triton
    if where.dtype not in KERNEL_DTYPES or not 16 <= where.head_dim <= 256:
        return f"requires float16 or bfloat16 and a head_dim of 16 to 256, got {where.dtype} and {where.head_dim}"
    if where.device_type == "cuda":
        return None
    # The interpreter computes with numpy, which has no bfloat16.
    return None if where.dtype == torch.float16 else f"requires float16 in Triton's interpreter, got {where.dtype}"


@dataclass(frozen=True)
class Implementation:
    """A row of TABLE.

    Args:
        name: as ``impl`` names it.
        forward, backward: "module:function" below ssta.kernels, imported when first chosen.
        cannot: why it cannot run at all, or None.
        suits_not: why "auto" skips it although it could run, or None.
        triton: whether its kernels are this package's own. Then its forward may write over q, and its backward over dout.
        deterministic: whether its backward takes that argument; others have only one order of summing, or refuse it.
        backward_cannot: why the backward is another row's although the forward runs, or None.
        verdict: where it was taken, what is known of its results, or None.
        outruns_dense: whether attention to all blocks takes less time this way than torch's SDPA.
    """

    name: str
    forward: str
    backward: str
    cannot: Callable[[Problem], str | None] = lambda problem: None
    suits_not: Callable[[Problem], str | None] = lambda problem: None
    triton: bool = True
    deterministic: bool = False
    backward_cannot: Callable[[Problem], str | None] = lambda problem: None
    verdict: Callable[[Problem], str | None] = lambda problem: None
    outruns_dense: bool = False


# Best first. On an H200 with 46,080 tokens and 16 heads, all blocks listed, Hopper's kernel takes 21.0 ms with heads of 128 and 13.8 with
# heads of 64, SDPA at best 26.1 and 17.9 (benchmark/results/kernels_h200.csv and sweep_h200.csv).
TABLE: tuple[Implementation, ...] = (
    Implementation("hopper", "hopper.forward:hopper_forward", "hopper.backward:hopper_backward", _hopper_cannot, _hopper_suits_not,
                   deterministic=True, backward_cannot=_hopper_backward_cannot, outruns_dense=True),
    Implementation("triton", "portable.forward:triton_forward", "portable.backward:triton_backward", _triton_cannot,
                   lambda problem: None if problem.where.device_type == "cuda" else "is interpreted on a CPU, for tests"),
    Implementation("torch", "eager.blocks:torch_forward", "eager.blocks:torch_backward", triton=False),
)
# The specification is not in the table: only an explicit choice takes it. Where autograd does not record it, as inside of an operator, its
# gradients are plain torch's.
_REFERENCE = Implementation("reference", "reference:reference_attention", "eager.blocks:torch_backward", triton=False)
_ROWS = {row.name: row for row in (*TABLE, _REFERENCE)}
IMPLEMENTATIONS: tuple[str, ...] = ("auto", "reference", *reversed([row.name for row in TABLE]))


def register(row: Implementation, before: str) -> None:
    """Puts a library's row into TABLE, ahead of another. A folder does it when it is loaded, which ``kernels/__init__.py`` sees to before
    anything reads the table."""
    global TABLE, IMPLEMENTATIONS
    number = [earlier.name for earlier in TABLE].index(before)
    TABLE = *TABLE[:number], row, *TABLE[number:]
    IMPLEMENTATIONS = "auto", "reference", *reversed([every.name for every in TABLE])
    _ROWS[row.name] = row


def rows_from(name: str) -> tuple[Implementation, ...]:
    """The row of a name, and those that its backward and a layer's steps can be left to."""
    # By names: a compiler that traces this compares no rows.
    names = [row.name for row in TABLE]
    return TABLE[names.index(name):] if name in names else (_ROWS[name],)


@dataclass(frozen=True)
class Route:
    """Which kernels run, and why no faster ones. Made by ``choose_route``.

    Args:
        name: a row of TABLE, or "reference"; of the forward.
        backward: the row of the backward.
        rejected: (name, reason) of the faster implementations that were not taken; empty where ``impl`` named one.
        device_type: where it runs.
        verdict: what is known of a library's results, or None.
        backward_rejected: (name, reason) of the implementations from the forward's on that do not run the backward.
    """

    name: str
    backward: str
    rejected: tuple[tuple[str, str], ...]
    device_type: str
    verdict: str | None = None
    backward_rejected: tuple[tuple[str, str], ...] = ()

    @property
    def in_place(self) -> bool:
        """Whether the forward can write its result over q."""
        return _ROWS[self.name].triton

    @property
    def takes_deterministic(self) -> bool:
        """Whether the backward can give up the order in which it sums."""
        return _ROWS[self.backward].deterministic

    @property
    def outruns_dense(self) -> bool:
        """Whether exact attention over all blocks takes less time this way than torch's SDPA."""
        return _ROWS[self.name].outruns_dense

    @property
    def slow_fallback(self) -> str | None:
        """The sentence to warn with where no kernel fits tensors on a GPU and plain torch runs, many times slower."""
        if self.name != "torch" or self.device_type != "cuda" or not self.rejected:
            return None
        name, reason = self.rejected[-1]
        return f"attention runs in plain torch on a GPU, many times slower than with kernels: {name!r} {reason}"

    def explain(self) -> tuple[str, ...]:
        """A sentence for each faster implementation that was not taken, also in the backward, and one on a library's results."""
        return (*[f"not {name!r}, which {reason}" for name, reason in self.rejected],
                *[f"backward not {name!r}, which {reason}" for name, reason in self.backward_rejected],
                *([f"{self.name!r}: {self.verdict}"] if self.verdict else []))

    def run(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool = False, *, in_place: bool = False
            ) -> tuple[Tensor, Tensor]:
        """(out, lse), for tensors on the current device, without autocast and gradients. ``in_place``: q is given away, and out takes its
        memory where the kernels can do that."""
        forward = load(self.name, _ROWS[self.name].forward)
        if in_place and self.in_place:
            return forward(q, k, v, blocks, scale, causal, in_place=True)
        return forward(q, k, v, blocks, scale, causal)

    def run_backward(self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                     blocks: BlockLists, scale: float, causal: bool, deterministic: bool, *, in_place: bool = False
                     ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), likewise. ``in_place``: dout is given away, and dq takes its memory where the kernels can do that."""
        order = (deterministic,) if self.takes_deterministic else ()
        backward = load(self.backward, _ROWS[self.backward].backward)
        if in_place and _ROWS[self.backward].triton:
            return backward(dout, dlse, q, k, v, out, lse, blocks, scale, causal, *order, in_place=True)
        return backward(dout, dlse, q, k, v, out, lse, blocks, scale, causal, *order)

    def __str__(self) -> str:
        return self.name if self.backward == self.name else f"{self.name}, backward {self.backward}"


def choose_route(
    impl: str, device: torch.device | str | int, dtype: torch.dtype, head_dim: int, facts: PatternFacts = LONG_BLOCKS, *, heads: int = 1,
    kv_heads: int = 1, causal: bool = False, deterministic: bool = True,
) -> Route:
    """What ``impl`` stands for: a pure function of its arguments, of the kind of GPU and of what is installed.

    "auto" takes the first row of TABLE that can run and suits. On a GPU with float16 or bfloat16 that is "hopper" on a Hopper GPU (sm_90)
    with head_dim 64 or 128, a longest query block of at least 64 tokens (causal 128) and a longest key block of at least 16; then a
    library's row that is registered, if a release of it is installed that was checked, has kernels for the problem and passes its
    self-check, which runs when it is first asked for; else "triton" with head_dim 16 to 256 from sm_80 on. "torch" for everything else. The
    backward of "hopper" is the portable one for key blocks of up to 64 tokens, that of a library where it has none for the problem or
    ``deterministic`` asks for gradients of the same bits every time. Under Triton's interpreter (TRITON_INTERPRET=1 when Triton is first
    imported) an explicit "triton" also runs on a CPU, with float16.

    Raises:
        TypeError: device or dtype is none.
        ValueError: an unknown name, or an explicit choice that cannot run on such tensors.
    """
    device, dtype = device_of("device", device), require_dtype("dtype", dtype)
    # A compiler traces what is not cached.
    decided = decide if torch.compiler.is_compiling() else _decided
    problem = Problem(Where.of(device, dtype, head_dim), heads, kv_heads, causal, facts, deterministic)
    try:
        return decided(require_impl(impl), problem)
    except TypeError:
        # The numbers of a symbolic trace cannot be hashed.
        return decide(require_impl(impl), problem)


def require_impl(impl: str, choices: tuple[str, ...] | None = None) -> str:
    """``impl``, which must be one of ``choices``; None = of IMPLEMENTATIONS."""
    choices = IMPLEMENTATIONS if choices is None else choices
    # Other things than strings may compare by elements, as arrays do.
    if not isinstance(impl, str) or impl not in choices:
        raise ValueError(f"impl must be one of {', '.join(map(repr, choices))}, got {impl!r}")
    return impl


def decide(name: str, problem: Problem) -> Route:
    """``choose_route`` for plain facts, of a GPU that need not be there."""
    rejected = []
    for row in TABLE if name == "auto" else (_ROWS[name],):
        reason = row.cannot(problem)
        if reason and name != "auto":
            raise ValueError(f"impl={name!r} {reason}")
        reason = reason or (row.suits_not(problem) if name == "auto" else None)
        if not reason:
            break
        rejected.append((row.name, reason))
    backward_rejected = []
    for backward in rows_from(row.name):
        reason = None if backward is row else backward.cannot(problem) or backward.suits_not(problem)
        reason = reason or backward.backward_cannot(problem)
        if not reason:
            break
        backward_rejected.append((backward.name, reason))
    return Route(row.name, backward.name, tuple(rejected), problem.where.device_type, row.verdict(problem), tuple(backward_rejected))


_decided = lru_cache(maxsize=1024)(decide)


@lru_cache
def load(name: str, path: str) -> Callable:
    """The function at a path of the row ``name``, imported when first asked for."""
    if _ROWS[name].triton:
        try:
            import triton  # noqa: F401
        except ImportError as error:
            raise ImportError(f"impl={name!r} requires triton: pip install triton, or choose impl='torch'") from error
    module, function = path.split(":")
    return getattr(import_module(f".{module}", __package__), function)


def interpreting() -> bool:
    """As Triton itself reads it, without importing Triton."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
