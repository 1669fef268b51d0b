"""What the tail's steps hold at once, counted without a GPU: their plans say it."""

import pytest
import torch

from ssta.kernels.lowering.plans import Plan
from ssta.kernels.portable import tail, tail_combine, tail_rows

HEADS, TOKENS, DIM = 16, 113585, 128


def nbytes(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


def needed(plan):
    """Bytes that a call works in, beside what it is given and what it returns and keeps."""
    return sum(room.size for room in plan.rooms()[2])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("blocks, longest", [(360, 384), (888, 128), (960, 128)])
def test_a_layer_holds_no_more_than_a_quarter_of_its_tensors(blocks, longest, parts):
    """Of HunyuanVideo 1.5 at 720p. Of the quarter, one times q's bytes, attention's own lists take up to 0.64 at 960 blocks."""
    q, k, v, out = (torch.empty(1, HEADS, TOKENS, DIM, dtype=torch.bfloat16, device="meta") for _ in range(4))
    lse = torch.empty(1, HEADS, TOKENS, device="meta")
    offsets = torch.empty(blocks + 2, dtype=torch.int32, device="meta")
    counts, indices = (torch.empty(1, HEADS, blocks + 1, *more, dtype=torch.int32, device="meta") for more in ((), (blocks + 1,)))
    sizes, cpu = (blocks, longest), torch.device("cpu")
    bytes_of_q = nbytes([q])

    plan = Plan(cpu, (q, k, v, offsets, offsets))
    tail._write_estimate(plan, plan.inputs[:3], plan.inputs[3:], sizes, sizes, 0.1, parts, True,
                         (tail._half_variances, tail_rows.sampled_mass), tail.ESTIMATE_ROOM)
    waiting = nbytes(plan.results)
    assert waiting + needed(plan) <= 2 * bytes_of_q, "out is not there yet"
    assert waiting <= 0.35 * bytes_of_q, "waits while attention runs"

    log_count, k_mean, v_mean, half_variance, mass, useful, *order = plan.results
    given = lse, offsets, offsets, counts, indices, log_count, half_variance, mass, k_mean, v_mean, useful, *order
    plan = Plan(cpu, (out, q, k, v, *given))
    others = *plan.inputs[4:], *[None] * (3 - len(order))
    tail_combine._write_combine(plan, plan.inputs[:4], others, sizes, sizes, 0.1, parts, False, tail_rows.merge, None,
                                tail_combine._matrices, tail_combine.MERGE_ROOM)
    assert waiting + nbytes(plan.results) + needed(plan) + nbytes([lse, indices]) <= bytes_of_q
    assert needed(plan) > 0.1 * bytes_of_q, "matrices of several heads at once"
