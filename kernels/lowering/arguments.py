"""NamedTuples as arguments of Triton kernels, whose members are specialised on as flat arguments are.

``do_not_specialize`` does not reach members of a tuple (Triton 3.6 to 3.9), so kernels that need it keep their numbers flat; nor is a
descriptor found in one, so those stand by themselves everywhere. A member that is None is a constant: ``if bounds.starts is None``.
A tuple costs about a microsecond of a launch and each argument less saves a seventh: it pays from half a dozen members on.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class View(NamedTuple):
    """A tensor [B, H, tokens, ...] whose last stride, of further dimensions, is 1."""

    ptr: Tensor
    batch: int   # strides, in elements
    head: int
    row: int


class Bounds(NamedTuple):
    """Where the blocks of an axis lie: entry ``batch * its stride + head // group * its stride + block`` of starts and sizes."""

    starts: Tensor | None   # None: every block has ``length`` tokens, but for the last one
    sizes: Tensor | None
    batch: int
    head: int
    group: int              # heads that share one entry
    length: int             # tokens of the longest block
    tokens: int             # tokens of the whole axis


class Lists(NamedTuple):
    """Block lists of (batch, head, row), strides as in ``Bounds``; ids stand in rows of ``capacity``."""

    counts: Tensor
    indices: Tensor
    batch: int
    head: int
    group: int
    capacity: int
    items: int              # blocks that can be listed; ids that are not among them count as absent


class ChunkLists(NamedTuple):
    """For each (batch, head, row) of the lists: full chunks from the front of ``starts``, partial ones from its back, their token counts in
    ``sizes``; strides as in ``Bounds``."""

    starts: Tensor   # int32 [B|1, H|1, rows, width], first token of a chunk
    sizes: Tensor    # int32, same shape, tokens of a partial chunk; not written for full ones
    full: Tensor     # int32 [B|1, H|1, rows]
    partial: Tensor  # int32 [B|1, H|1, rows]
    batch: int
    head: int
    group: int
    width: int


def view(x: Tensor) -> View:
    return View(x, *x.stride()[:3])
