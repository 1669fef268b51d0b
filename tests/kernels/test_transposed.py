"""Lists the other way round, by kernels: those of ``BlockLists.transpose``."""

import pytest
import torch

triton = pytest.importorskip("triton")

from cases import DEVICES  # noqa: E402

from ssta.kernels import BlockLists  # noqa: E402
from ssta.kernels.block_forms import prefix_mask  # noqa: E402
from ssta.kernels.lowering.chunks import Listed  # noqa: E402
from ssta.kernels.lowering.transposed import transposed  # noqa: E402


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows, items", [(70, 300), (65, 33), (3, 0)])
def test_transposed(device, rows, items):
    """In any order, with repeated ids, ids out of range and empty lists; more blocks than a program reads at once."""
    counts = torch.randint(0, items + 1, (2, 3, rows), device=device, dtype=torch.int32)
    counts[0, 0, 1:3] = 0
    indices = torch.randint(-2, items + 3, (2, 3, rows, items), device=device, dtype=torch.int32)
    blocks = BlockLists(counts, indices, 2, 4, num_kv_blocks=items)
    wanted = blocks.transpose()
    found, ids, *_ = transposed(Listed.of(blocks, 2 * rows, 4 * items))
    assert torch.equal(found, wanted.counts) and ids.shape == wanted.indices.shape and ids.dtype == torch.int32
    used = prefix_mask(found, ids.shape[3])
    assert torch.equal(ids[used], wanted.indices[used])
