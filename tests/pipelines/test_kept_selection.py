"""Selections that are kept for a recomputation: as bits, in place of what was kept before, each thread its own, and never in a copy."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

from ssta.kernels import BlockLists
from ssta.pipelines.patch.holder import Holder
from ssta.pipelines.training.kept_selection import KeptSelection, _packed, _unpacked
from ssta.selection import Selection


def some(tiles: int, size: int, ragged: bool, seed: int = 0) -> Selection:
    """A random selection among blocks of ``size`` tokens, or, ragged, of which every second has one more."""
    mask = torch.rand(1, 2, tiles, tiles, generator=torch.Generator().manual_seed(seed)) < 0.4
    if not ragged:
        return Selection(BlockLists.from_mask(mask, size, size))
    lengths = torch.tensor([size + i % 2 for i in range(tiles)], dtype=torch.int32)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    return Selection(BlockLists.from_mask(mask, offsets, offsets, max_q_length=size + 1, max_kv_length=size + 1))


def assert_same(found: Selection | None, selection: Selection) -> None:
    assert found is not None
    ours, theirs = found.blocks, selection.blocks
    assert torch.equal(ours.to_mask(), theirs.to_mask())
    for name in ("q_offsets", "kv_offsets", "max_q_length", "max_kv_length"):
        assert torch.equal(torch.as_tensor(getattr(ours, name)), torch.as_tensor(getattr(theirs, name))), name


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("compiled_first", [False, True])
def test_what_is_kept_takes_the_place_of_what_was(ragged, compiled_first):
    """Also where one of the two was kept inside a compiled graph: another number of tiles, of another size."""
    kept, selections = KeptSelection(), [some(5, 16, ragged), some(7, 32, ragged, seed=1)]

    def keep(selection: Selection, x: torch.Tensor) -> torch.Tensor:
        kept.keep(selection, (1, 2, 3))
        return x + 1

    torch._dynamo.reset()
    for selection, compiled in zip(selections, (compiled_first, not compiled_first)):
        (torch.compile(keep, backend="eager", fullgraph=True) if compiled else keep)(selection, torch.ones(1))
        assert kept.selection((1, 2, 4)) is None
        assert_same(kept.selection((1, 2, 3)), selection)


def test_a_holder_has_what_its_own_thread_kept_and_a_copy_nothing():
    holder, seen = Holder(), []
    assert holder.frozen is None
    holder.frozen = KeptSelection()
    thread = threading.Thread(target=lambda: seen.append(holder.frozen))
    thread.start(), thread.join()
    assert seen == [None]
    assert copy.deepcopy(holder).frozen is None and pickle.loads(pickle.dumps(holder)).frozen is None


@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
def test_bits_are_what_was_packed(length):
    mask = torch.rand(2, 3, 5, length, generator=torch.Generator().manual_seed(0)) < 0.4
    bits = _packed(mask)
    assert bits.shape == (2, 3, 5, -(-length // 8)) and bits.dtype == torch.uint8 and torch.equal(_unpacked(bits, length), mask)
