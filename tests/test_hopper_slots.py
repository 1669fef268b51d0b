"""What surrounds the Hopper backward kernel: the rows that it reads, and how dQ comes out."""

import pytest
import torch

triton = pytest.importorskip("triton")

from ssta.kernels import BlockLists  # noqa: E402
from ssta.kernels.hopper_slots import QUERIES, fill_slots, finish_dq  # noqa: E402
from ssta.kernels.triton_chunks import q_cut  # noqa: E402

DEVICES = ["cpu"] if not torch.cuda.is_available() else [pytest.param("cuda", marks=pytest.mark.gpu)]


def offsets(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def patterns(device):
    """name -> (BlockLists, Hq, Hkv, Sq, Skv)"""
    def mask(*shape):
        return torch.rand(shape, device=device) < 0.6

    q_lengths = torch.tensor([40, 0, 130, 70], device=device, dtype=torch.int32)
    outside = torch.tensor([[-1, 0, 2], [1, 7, 0], [3, 5, 6], [2, 1, 0]], device=device, dtype=torch.int32).expand(1, 2, 4, 3)
    return {
        "uniform": (BlockLists.from_mask(mask(2, 2, 3, 4), 128, 256), 2, 2, 384, 1024),
        "short blocks": (BlockLists.from_mask(mask(4, 5, 2), 96, 200), 4, 2, 470, 333),
        "shared by heads": (BlockLists.from_mask(mask(3, 2), 130, 130), 4, 1, 300, 200),
        "ragged": (BlockLists.from_mask(mask(2, 4, 4), offsets([70, 0, 130, 90], device), offsets([133, 17, 0, 300], device),
                                        q_lengths=q_lengths), 2, 1, 290, 450),
        "ids out of range": (BlockLists(torch.full((1, 2, 4), 3, dtype=torch.int32, device=device), outside, 64, 64, num_kv_blocks=3),
                             2, 2, 256, 192),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["uniform", "short blocks", "ragged"])
def test_slots_hold_lse_and_delta_and_give_dq(device, name):
    blocks, heads, _, q_len, _ = patterns(device)[name]
    dim, scale = 64, 0.3
    cut = q_cut(blocks, q_len)
    out, dout = (torch.randn(2, q_len, heads, dim, device=device, dtype=torch.float16).transpose(1, 2) for _ in range(2))
    lse, dlse = torch.randn(2, 2, heads, q_len, device=device) * 9
    lse[:, :, ::7] = float("-inf")
    slots = fill_slots(dout, dlse, out, lse, scale, cut)
    delta = dlse - (out.float() * dout.float()).sum(-1)
    empty = lse == float("-inf")
    side = slots.side.float()
    firsts, sizes = (x.expand(1, 1, -1)[0, 0].tolist() for x in blocks.q_bounds(q_len))
    for block, (first, size) in enumerate(zip(firsts, sizes)):
        for part, start in enumerate(range(0, size, QUERIES)):
            rows, slot = min(size - start, QUERIES), first // QUERIES + block + part
            tokens = slice(first + start, first + start + rows)
            bias, change = side[:, :, slot, :, :3].sum(-1), side[:, :, slot, :, 8:11].sum(-1)
            here = empty[:, :, tokens]
            torch.testing.assert_close(bias[:, :, :rows][~here], -lse[:, :, tokens][~here] / scale, rtol=1e-6, atol=0)
            torch.testing.assert_close(change[:, :, :rows][~here], delta[:, :, tokens][~here], rtol=1e-6, atol=1e-5)
            # exp(scale * -1e30) is 0, and so must be what it is multiplied with.
            assert (bias[:, :, :rows][here] < -1e29).all() and (change[:, :, :rows][here] == 0).all()
            assert (bias[:, :, rows:] < -1e29).all() and (change[:, :, rows:] == 0).all()
            assert (slots.dq[:, :, slot] == 0).all()
            slots.dq[:, :, slot, :rows] = dout[:, :, tokens].float()
    dq = torch.zeros_like(dout)
    finish_dq(slots, dq, 2.0, cut)
    covered = torch.zeros(q_len, dtype=torch.bool, device=device)
    for first, size in zip(firsts, sizes):
        covered[first:first + size] = True
    torch.testing.assert_close(dq, torch.where(covered[:, None], 2 * dout, 0.0))
