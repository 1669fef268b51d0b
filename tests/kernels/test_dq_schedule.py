"""In which order the Hopper backward's programs add to dQ: every lock opens, nobody waits for ever, and the work is shared fairly."""

import random
from functools import partial

import pytest
import torch
from oracles import assert_as_exact_as_torch, attention_with_gradients

triton = pytest.importorskip("triton")

from cases import DEVICES, dq_patterns, spread  # noqa: E402

from ssta.kernels import BlockLists, block_sparse_attention  # noqa: E402
from ssta.kernels.lowering import dq_schedule  # noqa: E402
from ssta.kernels.lowering.chunks import Listed  # noqa: E402
from ssta.kernels.lowering.dq_accum import KEYS, QUERIES  # noqa: E402
from ssta.kernels.lowering.dq_schedule import (  # noqa: E402
    BATCH,
    BLOCK,
    HEAD,
    ITERATIONS,
    LAST_TILES,
    NEXT,
    PART,
    ROTATION,
    ROTATION_UNITS,
    ROW,
    ROWS,
    STAGGER,
    bytes_of,
    heads_together,
    lock_values,
    schedule,
)


def made_of(blocks, q_len, kv_len, heads, kv_heads, programs, ordered, shift=None):
    """(the schedule, its tiles, lock values)"""
    listed, flipped = Listed.of(blocks, q_len, kv_len), Listed.of(blocks.transpose(), kv_len, q_len)
    made = schedule(flipped, 2, heads, kv_heads, programs, ordered, shift)
    return made, made.tiles, lock_values(made, listed, flipped, 2, heads, kv_heads) if ordered else None


def plan(blocks, heads, kv_heads, q_len, kv_len, programs, causal=False):
    """(tiles as lists of numbers, first tile of each program, lock_values)"""
    made, tiles, locks = made_of(blocks, q_len, kv_len, heads, kv_heads, programs or 5, programs > 0, kv_len - q_len if causal else None)
    tiles = tiles.tolist()
    return tiles[:made.number], [row[NEXT] for row in tiles[made.number + made.tail:]], locks


def of(x, batch, head, heads):
    """What belongs to a query head of ``heads`` in x [B|1, H|1, ...]."""
    return x[min(batch, x.shape[0] - 1), head * x.shape[1] // heads]


def iterations(blocks, heads, kv_heads, q_len, kv_len, causal):
    """((batch, query head, query block), place in the list, chunks) of each tile that is asked for, from the mask alone, before its list
    is rotated."""
    mask, bounds = blocks.to_mask(), blocks.q_bounds(q_len)
    lists = {(batch, head): (of(mask, batch, head, heads).T.tolist(), *(of(x, batch, head, heads).tolist() for x in bounds))
             for batch in range(2) for head in range(heads)}
    group = heads // kv_heads

    def of_tile(tile):
        key = tile[ROW] - tile[PART] * KEYS
        found = []
        for head in range(tile[HEAD] * group, (tile[HEAD] + 1) * group):
            listed, start, size = lists[tile[BATCH], head]
            listed = [block for block, there in enumerate(listed[tile[BLOCK]]) if there]
            seen = [not causal or start[block] + size[block] - 1 + kv_len - q_len >= key for block in listed]
            chunks = [max(-(-size[block] // QUERIES), 0) * seen[at] for at, block in enumerate(listed)]
            found.append([((tile[BATCH], head, block), at, chunks[at]) for at, block in enumerate(listed)])
        return found

    return of_tile


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", dq_patterns("cpu"))
def test_every_tile_is_listed_once(device, name, causal):
    blocks, heads, kv_heads, q_len, kv_len = dq_patterns(device)[name]
    tiles, first, lock_values = plan(blocks, heads, kv_heads, q_len, kv_len, 0, causal)
    starts, sizes = blocks.kv_bounds(kv_len)
    wanted = set()
    for batch in range(2):
        for head in range(kv_heads):
            bounds = zip(*(of(x, batch, head, kv_heads).tolist() for x in (starts, sizes)))
            for block, (start, size) in enumerate(bounds):
                wanted |= {(batch, head, block, part, start + part * KEYS, size - part * KEYS) for part in range(-(-size // KEYS))}
    here = [tile for tile in tiles if tile[ROWS] > 0]
    assert sorted((tile[BATCH], tile[HEAD], tile[BLOCK], tile[PART], tile[ROW], tile[ROWS]) for tile in here) == sorted(wanted)
    of_tile = iterations(blocks, heads, kv_heads, q_len, kv_len, causal)
    for tile in tiles:
        chunks = sum(iteration[2] for member in of_tile(tile) for iteration in member)
        assert tile[ITERATIONS] == (chunks if tile[ROWS] > 0 else -1) and tile[NEXT] == -1 and tile[ROTATION] == 0
    assert not first and lock_values is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, causal, programs", spread(dq_patterns("cpu"), (False, True), (1, 3, 7)))
@pytest.mark.slow
def test_every_lock_opens(device, name, programs, causal):
    """Programs do their tiles at random paces, each waiting for its lock value at every query block: all come to their end."""
    assert_every_lock_opens(*dq_patterns(device)[name], programs, causal)


def assert_every_lock_opens(blocks, heads, kv_heads, q_len, kv_len, programs, causal):
    tiles, first, lock_values = plan(blocks, heads, kv_heads, q_len, kv_len, programs, causal)
    lock_values, of_tile, paces = lock_values.tolist(), iterations(blocks, heads, kv_heads, q_len, kv_len, causal), random.Random(0)
    paths, assigned = [], []
    for at in first:
        path = []
        while at >= 0:
            assigned.append(at)
            tile = tiles[at]
            for member in of_tile(tile):
                begin = tile[ROTATION] * len(member) // ROTATION_UNITS.value
                for (batch, head, block), place, chunks in member[begin:] + member[:begin]:
                    if chunks:
                        path.append(((batch, head, block), lock_values[batch][head][tile[BLOCK]][tile[PART]][place]))
            at = tile[NEXT]
        paths.append(path)
    assert sorted(assigned) == [at for at, tile in enumerate(tiles) if tile[ROWS] > 0]
    semaphores, done = {}, [0] * programs
    while any(at < len(path) for at, path in zip(done, paths)):
        following = [(program, *path[at]) for program, (at, path) in enumerate(zip(done, paths)) if at < len(path)]
        ready = [program for program, block, lock_value in following if semaphores.get(block, 0) == lock_value]
        assert ready, "everyone waits"
        program = paces.choice(ready)
        block, lock_value = paths[program][done[program]]
        semaphores[block] = lock_value + 1
        done[program] += 1
    for block, number in semaphores.items():
        assert number == sum(block == iteration[0] for path in paths for iteration in path)


def adversarial(device):
    """name -> mask of 12 query blocks and key blocks over which programs might come to wait for one another in a circle"""
    whole = torch.ones(12, 12, dtype=torch.bool, device=device)
    nothing, arrow, number = ~whole, torch.eye(12, dtype=torch.bool, device=device), torch.arange(12, device=device)
    arrow[0] = arrow[:, -1] = True
    return {"all": whole, "antidiagonal": whole.triu().flip(1), "arrow": arrow, "every other": (number[:, None] + number) % 2 == 0,
            "one row": nothing.index_fill(0, torch.tensor([7], device=device), True),
            "one column": nothing.index_fill(1, torch.tensor([3], device=device), True)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, programs", spread(adversarial("cpu"), (2, 5, 16)))
def test_every_lock_opens_over_adversarial_lists(device, name, programs):
    """Whatever the programs' paces."""
    blocks = BlockLists.from_mask(adversarial(device)[name].expand(1, 3, -1, -1), 128, 128)
    assert_every_lock_opens(blocks, 3, 3, 12 * 128, 12 * 128, programs, False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.slow
def test_work_is_shared_fairly(device):
    """A few key blocks, as text, have far longer lists than the others, and yet no program has much more to do than the average."""
    mask = torch.rand(2, 16, 16, device=device) < 0.3
    mask[:, :, -2:] = True
    blocks = BlockLists.from_mask(mask, 64, 128)
    programs = 6
    tiles, first, _ = plan(blocks, 2, 2, 16 * 64, 16 * 128, programs)
    work = []
    for at in first:
        work.append(0)
        while at >= 0:
            work[-1] += tiles[at][ITERATIONS]
            at = tiles[at][NEXT]
    lengths = [tile[ITERATIONS] for tile in tiles]
    assert sum(work) == sum(lengths) and max(work) <= sum(work) / programs + max(lengths) + sum(lengths) / len(lengths)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ordered", [False, True])
def test_the_last_tiles_are_taken_the_longest_first(device, ordered):
    """Lists of very different lengths, and yet all programs end at about the same time."""
    length, programs = 128 * 40, 6
    share = torch.arange(1, 41, device=device) / 41
    blocks = BlockLists.from_mask(torch.rand(2, 2, 40, 40, device=device) < share[torch.randperm(40, device=device)], 128, 128)
    made, tiles, _ = made_of(blocks, length, length, 2, 2, programs, ordered)
    iterations = tiles[:made.number, ITERATIONS.value].tolist()
    last = tiles[made.number:made.number + made.tail, NEXT.value].tolist()
    assert sorted(last) == list(range(made.number - made.tail, made.number)) and len(last) == LAST_TILES * programs
    assert [iterations[tile] for tile in last] == sorted((iterations[tile] for tile in last), reverse=True)
    following = tiles[:, NEXT.value].tolist()
    work = []
    for tile in following[made.number + made.tail:]:
        work.append(0)
        while tile >= 0:
            work[-1] += iterations[tile] + 1
            tile = following[tile]
    assert len(work) == programs * ordered
    assert not ordered or max(work) <= 1.05 * sum(work) / programs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [4096, 1024], ids=["all around", "near one another"])
@pytest.mark.slow
def test_programs_sweep_over_the_queries_at_the_same_pace(device, share, monkeypatch):
    """At any time all programs are where their places say, to within what lists of different lengths let them drift."""
    number, programs = 20, 6
    monkeypatch.setattr(dq_schedule, "CACHE", 0)
    monkeypatch.setattr(dq_schedule, "NEAR", bytes_of(number * 128, 128) * share // ROTATION_UNITS.value)
    blocks = BlockLists.from_mask(torch.rand(2, 3, number, number, device=device) < 0.5, 128, 128)
    tiles, first, _ = plan(blocks, 3, 3, number * 128, number * 128, programs)
    period = sum(tile[ITERATIONS] for tile in tiles) // len(tiles) + 1
    span = period * share // ROTATION_UNITS.value
    begins = set()
    for program, at in enumerate(first):
        work = 0
        while at >= 0:
            clock, place = (iterations % period * ROTATION_UNITS.value // period for iterations in (work, program * STAGGER % span))
            assert tiles[at][ROTATION] == (clock + place) % ROTATION_UNITS.value
            begins.add(tiles[at][ROTATION])
            work += tiles[at][ITERATIONS] + 1
            at = tiles[at][NEXT]
    assert len(begins) > min(programs, span)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("batch, block", [(2, 64), (1, 200), (1, 384)])
def test_more_tiles_than_multiprocessors(batch, block, dim):
    """Each program takes several, with lists of many lengths, and all wait for one another: right gradients, the same bits each time."""
    length = 20 * block - 31
    blocks = BlockLists.from_mask(torch.rand(batch, 8, 20, 20, device="cuda") < torch.rand(20, device="cuda"), block, block)
    q, k, v = (torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for heads in (8, 4, 4))
    attend = partial(block_sparse_attention, blocks=blocks, return_lse=True, impl="hopper")
    assert_as_exact_as_torch(attend, q, k, v, blocks, block=64)
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[:3], device="cuda")
    first = attention_with_gradients(attend, q, k, v, dout, dlse)
    for _ in range(5):
        assert all(torch.equal(x, y) for x, y in zip(first, attention_with_gradients(attend, q, k, v, dout, dlse)))


@pytest.mark.parametrize("pairs, rows, dim, expected", [(16, 11520, 128, 2), (16, 11520, 64, 4), (15, 5000, 128, 3), (7, 4000, 128, 1),
                                                        (2, 100, 64, 2), (16, 200_000, 128, 1), (3, 0, 64, 3)])
def test_heads_take_turns_as_far_as_the_cache_goes(pairs, rows, dim, expected):
    """In groups of one size."""
    assert heads_together(pairs, rows, dim) == expected
