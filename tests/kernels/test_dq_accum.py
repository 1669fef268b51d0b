"""What surrounds the Hopper backward kernel: the rows that it reads, and how dQ comes out."""

import pytest
import torch

triton = pytest.importorskip("triton")

from cases import DEVICES, dq_patterns  # noqa: E402

from ssta.kernels.lowering.chunks import q_partition  # noqa: E402
from ssta.kernels.lowering.dq_accum import QUERIES, backward_postprocess, backward_preprocess  # noqa: E402


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, ordered", [("uniform", False), ("short blocks", True), ("ragged", False), ("ragged", True)])
def test_preprocess_gives_lse_and_dpsum_and_postprocess_dq(device, name, ordered):
    """Ordered, what nobody has added to is undefined, and comes out as zeros; here every other chunk."""
    blocks, heads, _, q_len, _ = dq_patterns(device)[name]
    dim, scale = 64, 0.3
    queries = q_partition(blocks, q_len)
    out, dout = (torch.randn(2, q_len, heads, dim, device=device, dtype=torch.float16).transpose(1, 2) for _ in range(2))
    lse, dlse = torch.randn(2, 2, heads, q_len, device=device) * 9
    lse[:, :, ::7] = float("-inf")
    accum = backward_preprocess(dout, dlse, out, lse, scale, queries, ordered)
    delta = dlse - (out.float() * dout.float()).sum(-1)
    empty = lse == float("-inf")
    lse_dpsum = accum.lse_dpsum.float()
    firsts, sizes = (x.expand(1, 1, -1)[0, 0].tolist() for x in blocks.q_bounds(q_len))
    for block, (first, size) in enumerate(zip(firsts, sizes)):
        for part, start in enumerate(range(0, size, QUERIES)):
            rows, slot = min(size - start, QUERIES), first // QUERIES + block + part
            tokens = slice(first + start, first + start + rows)
            bias, neg_dpsum = lse_dpsum[:, :, slot, :, :3].sum(-1), lse_dpsum[:, :, slot, :, 8:11].sum(-1)
            here = empty[:, :, tokens]
            torch.testing.assert_close(bias[:, :, :rows][~here], -lse[:, :, tokens][~here] / scale, rtol=1e-6, atol=0)
            torch.testing.assert_close(neg_dpsum[:, :, :rows][~here], delta[:, :, tokens][~here], rtol=1e-6, atol=1e-5)
            # exp(scale * -1e30) is 0, and so must be what it is multiplied with.
            assert (bias[:, :, :rows][here] < -1e29).all() and (neg_dpsum[:, :, :rows][here] == 0).all()
            assert (bias[:, :, rows:] < -1e29).all() and (neg_dpsum[:, :, rows:] == 0).all()
            if ordered:
                assert (accum.dq_semaphore[:, :, slot] == 0).all()
                if part % 2:
                    accum.dq_accum[:, :, slot] = float("nan")
                    dout[:, :, tokens] = 0
                    continue
                accum.dq_semaphore[:, :, slot] = 3
            else:
                assert (accum.dq_accum[:, :, slot] == 0).all() and accum.dq_semaphore is None
            x = torch.nn.functional.pad(dout[:, :, tokens].float(), (0, 0, 0, QUERIES - rows))
            # As the dQ partition's threads hold it.
            x = x.view(2, heads, 4, 2, 8, dim // 64, 8, 4, 2).permute(0, 1, 5, 6, 2, 4, 7, 3, 8)
            accum.dq_accum[:, :, slot] = x.reshape(2, heads, -1)
    dq = torch.zeros_like(dout)
    backward_postprocess(accum.dq_accum, accum.dq_semaphore, dq, 2.0, queries)
    covered = torch.zeros(q_len, dtype=torch.bool, device=device)
    for first, size in zip(firsts, sizes):
        covered[first:first + size] = True
    torch.testing.assert_close(dq, torch.where(covered[:, None], 2 * dout, 0.0))
