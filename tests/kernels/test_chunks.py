"""Lists of blocks become lists of chunks, and these a queue of work, in Triton's interpreter."""

import pytest
import torch
from cases import INTERPRETED, ragged

from ssta.kernels import BlockLists
from ssta.kernels.lowering.chunks import ENTRY, HEADER, Listed, chunk_lists, extent, full_chunk, work_queue

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU, so Triton's interpreter is off")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_queue_holds_every_row_once_and_the_longest_lists_first(causal):
    blocks = BlockLists.from_mask(torch.rand(2, 3, 5, 6) < 0.5, 16, ragged([40, 7, 0, 33, 16, 20], "cpu"))
    listed, shift = Listed.of(blocks, 70, 116), 116 - 70 if causal else None
    chunks = chunk_lists(listed, 3, 16, shift)
    batch, heads, width = extent(listed, 16)
    assert (batch, heads, width) == (2, 3, chunks.starts.shape[3])
    sizes = [HEADER.value, 2 * 3 * 5 * ENTRY.value, chunks.starts.numel(), chunks.starts.numel()]
    header, entries, starts, lengths = work_queue(listed, 16, shift, 16).split(sizes)
    entries = entries.view(2, 3, 5, ENTRY.value)
    row = entries[..., 4].long()
    assert header[0] == 0 and torch.equal(row.sort(-1).values, torch.arange(5).expand(2, 3, 5))
    counts = blocks.counts.gather(-1, row)
    ties = counts[..., 1:] == counts[..., :-1]
    assert ((counts[..., 1:] < counts[..., :-1]) | (ties & (row[..., 1:] < row[..., :-1]))).all()
    assert torch.equal(entries[..., 0], row.int() * 16) and torch.equal(entries[..., 1], (70 - row.int() * 16).clamp(max=16))
    assert torch.equal(entries[..., 2], chunks.full.gather(-1, row)) and torch.equal(entries[..., 3], chunks.partial.gather(-1, row))
    place = torch.arange(width)
    full, partial = place < chunks.full[..., None], place >= width - chunks.partial[..., None]
    assert torch.equal(starts.view_as(chunks.starts)[full | partial], chunks.starts[full | partial])
    assert torch.equal(lengths.view_as(chunks.sizes)[partial], chunks.sizes[partial])


@pytest.mark.parametrize("tokens, causal, sizes", [(144, False, 0), (132, False, 1), (144, True, 1)])
def test_the_queue_has_no_room_for_partial_chunks_where_there_are_none(tokens, causal, sizes):
    blocks = BlockLists.from_mask(torch.ones(3, 3, dtype=torch.bool), 48, 48, capacity=3)
    queue = work_queue(Listed.of(blocks, tokens, tokens), 16, 0 if causal else None, 16)
    entries = queue[HEADER.value:HEADER.value + 3 * ENTRY.value].view(3, -1)
    assert queue.numel() == HEADER.value + 3 * (ENTRY.value + (1 + sizes) * 3 * 3)
    assert bool((entries[:, 3] > 0).any()) == bool(sizes)


@pytest.mark.parametrize("length, room, expected", [
    (128, 128, 128), (384, 128, 128), (120, 128, 120), (120, 64, 60), (126, 128, 126), (360, 64, 60), (240, 128, 120), (97, 128, 97),
    (96, 128, 128), (75, 64, 64), (1, 64, 64), (130, 128, 128)])
def test_a_full_chunk_is_an_equal_share_of_the_longest_blocks_or_fills_a_step(length, room, expected):
    assert full_chunk(length, room) == expected


def test_every_call_has_a_queue_of_its_own():
    blocks = BlockLists.from_mask(torch.ones(3, 3, dtype=torch.bool), 16, 16)
    listed = Listed.of(blocks, 48, 48)
    # Whoever takes rows counts here.
    work_queue(listed, 16, None, 16)[0] += 3
    assert work_queue(listed, 16, None, 16)[0] == 0
