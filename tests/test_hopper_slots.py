"""What surrounds the Hopper backward kernel: who visits which query chunk, in which order dQ is added up, and how it comes out."""

import pytest
import torch

triton = pytest.importorskip("triton")

from ssta.kernels import BlockLists  # noqa: E402
from ssta.kernels.hopper_slots import KEYS, QUERIES, fill_slots, finish_dq, list_visits  # noqa: E402
from ssta.kernels.triton_chunks import kv_cut, q_cut  # noqa: E402

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


def expected_visits(blocks, heads, kv_heads, q_len, kv_len):
    """(batch, kv head, key block) -> {(query head, first token, tokens, chunk number in its block, block)}, from the mask alone."""
    mask = blocks.to_mask()
    batch = mask.shape[0]
    q_first, q_size = (x.expand(batch, -1, -1) for x in blocks.q_bounds(q_len))
    kv_size = blocks.kv_bounds(kv_len)[1].expand(batch, -1, -1)
    visits = {}
    for b in range(batch):
        for head in range(heads):
            group = heads // kv_heads

            def of(x, head=head, b=b):
                return x[b, head * x.shape[1] // heads]

            for block, listed in enumerate(of(mask)):
                first, size = int(of(q_first)[block]), int(of(q_size)[block])
                for key_block in listed.nonzero().flatten().tolist():
                    at = visits.setdefault((b, head // group, key_block), [])
                    if int(of(kv_size)[key_block]) > 0:
                        at += [(head, first + start, min(size - start, QUERIES), block) for start in range(0, size, QUERIES)]
    return visits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", patterns("cpu"))
def test_every_chunk_is_visited_once_and_in_turn(device, name):
    blocks, heads, kv_heads, q_len, kv_len = patterns(device)[name]
    queries, keys = q_cut(blocks, q_len), kv_cut(blocks, kv_len)
    slots = q_len // QUERIES + queries.number + 1
    visits = list_visits(blocks, blocks.transpose(), queries, keys, heads, kv_heads, slots, ranked=True)
    wanted = expected_visits(blocks, heads, kv_heads, q_len, kv_len)
    kv_size = blocks.kv_bounds(kv_len)[1]
    group = heads // kv_heads
    batch, own = visits.numbers.shape[:2]
    owners, turns = {}, {}
    for b in range(blocks.counts.shape[0]):
        for kv_head in range(kv_heads):
            for key_block in range(keys.number):
                row = (min(b, batch - 1), min(kv_head, own - 1), key_block)
                number = int(visits.numbers[row])
                got = set()
                parts = -(-int(kv_size[min(b, kv_size.shape[0] - 1), min(kv_head, kv_size.shape[1] - 1), key_block]) // KEYS)
                for chunk, slot, rank in zip(*(x[row][:number].tolist() for x in visits[:3])):
                    head, place = kv_head * group + slot // slots, slot % slots
                    start, size = chunk // QUERIES, chunk % QUERIES + 1
                    got.add((head, start, size))
                    # A slot belongs to one chunk.
                    assert owners.setdefault((b, head, place), (start, size)) == (start, size)
                    turns.setdefault((b, head, place), []).extend((rank + part, (key_block, parts - 1 - part)) for part in range(parts))
                assert len(got) == number
                assert got == {visit[:3] for visit in wanted.get((b, kv_head, key_block), ())}
    for taken in turns.values():
        # Turns count from 0 without a gap, and follow the launch: from the last program to the first.
        taken.sort()
        assert [turn for turn, _ in taken] == list(range(len(taken)))
        programs = [program for _, program in taken]
        assert programs == sorted(programs, reverse=True)


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
