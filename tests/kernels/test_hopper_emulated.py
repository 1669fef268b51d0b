"""The Hopper kernels on a CPU, through the emulator: their logic and their barriers, against the reference."""

import ast
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
from cases import INTERPRETED, LEVELS, OVERFLOW, inputs, levels, patterns, ragged, spread
from hopper_emulator import INLINE_ASM, module, run
from oracles import attention_with_gradients

import ssta.kernels
from ssta.kernels import BlockLists, notices
from ssta.kernels.hopper import spin_timeouts
from ssta.kernels.hopper.config import HopperForwardConfig
from ssta.kernels.reference import reference_attention

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(not INTERPRETED, reason="there is a GPU, so Triton's interpreter, which lowers the lists here, is off")]


@pytest.fixture
def walks(monkeypatch):
    """Of each warpgroup that walked over its list, whether it was for the second time."""
    mainloop, found = module("forward_mainloop"), []
    # FOLLOW, which in bfloat16 the second walk has, and float16's only one.
    monkeypatch.setattr(mainloop, "_walk", lambda *args, walk=mainloop._walk: (
        found.append(int(args[8] and args[3].dtype == torch.bfloat16)), walk(*args))[1])
    return found


def assert_right(q, k, v, blocks, causal, late, scale=0.125, **options):
    """Gives what the kernel gave."""
    out, lse = run("forward", q, k, v, blocks, scale, causal, late=late, **options)
    exact, exact_lse = reference_attention(q.double(), k.double(), v.double(), blocks, scale, causal)
    tolerance = 5e-3 if q.dtype == torch.float16 else 2e-2
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance * v.abs().max().item() / 4)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
    return out, lse


# (late, dtype): the first walk over a list is as float16 has it, but for the maxima.
SPEEDS = (False, torch.float16), (True, torch.bfloat16)


@pytest.fixture
def every_row_fails(monkeypatch):
    monkeypatch.setattr(module("softmax"), "LARGEST_SUM", 0.0)


@pytest.mark.parametrize("name, causal, speed", spread(patterns("cpu"), (False, True), SPEEDS))
def test_small_blocks(name, causal, speed, every_row_fails):
    (late, dtype), (blocks, heads, kv_heads, q_len, kv_len) = speed, patterns("cpu")[name]
    assert_right(*inputs(2, heads, kv_heads, q_len, kv_len, 64, dtype=dtype), blocks, causal, late)


@pytest.mark.parametrize("name, speed", [*zip(patterns("cpu"), cycle(SPEEDS))])
def test_a_result_in_the_place_of_q_is_the_same(name, speed):
    """Programs run one after another, so the later ones find rows beside their own overwritten."""
    (late, dtype), (blocks, heads, kv_heads, q_len, kv_len) = speed, patterns("cpu")[name]
    q, k, v = inputs(2, heads, kv_heads, q_len, kv_len, 64, dtype=dtype)
    expected = run("forward", q, k, v, blocks, 0.125, False, late=late)
    got = run("forward", q, k, v, blocks, 0.125, False, late=late, in_place=True)
    assert got[0].data_ptr() == q.data_ptr() and all(torch.equal(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("dim, causal, speed", spread((64, 128), (False, True), SPEEDS))
def test_long_blocks(dim, causal, speed, every_row_fails, walks):
    """More chunks a row than there are stages, full and partial ones; parts that a block fills, half fills and leaves empty."""
    late, dtype = speed
    blocks = BlockLists.from_mask(torch.rand(2, 4, 5) < 0.7, ragged([384, 200, 70, 331], "cpu"), ragged([384, 128, 300, 61, 129], "cpu"))
    assert_right(*inputs(1, 2, 1, 985, 1002, dim, dtype=dtype), blocks, causal, late)
    assert set(walks) == ({0, 1} if late else {0})


def split_in(parts):
    """All tiles but two are split into so many."""
    return lambda tiles, *_: (tiles - 2, parts) if parts > 1 else (0, 1)


@pytest.mark.parametrize("programs, speed", [*zip((1, 5), SPEEDS)])
def test_parts_of_lists_are_merged(programs, speed):
    """Parts without chunks, tiles without rows, rows without keys; as many programs as tiles or fewer."""
    (late, dtype), options = speed, dict(processors=programs, split=split_in(3))
    mask = torch.rand(2, 5, 5) < 0.6
    mask[:, 2] = False
    blocks = BlockLists.from_mask(mask, ragged([384, 200, 70, 331, 0], "cpu"), ragged([384, 128, 300, 61, 129], "cpu"))
    q, k, v = inputs(1, 2, 1, 985, 1002, 128, dtype=dtype)
    expected = assert_right(q, k, v, blocks, False, late, **options)
    got = run("forward", q, k, v, blocks, 0.125, False, late=late, in_place=True, **options)
    assert got[0].data_ptr() == q.data_ptr() and all(torch.equal(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("name", LEVELS)
def test_parts_that_overflow_are_walked_again(name, walks):
    assert_right(*levels(*LEVELS[name]), False, True, split=split_in(3))


@pytest.fixture
def programs(monkeypatch):
    """How many programs a call launched."""
    forward, found = module("forward"), []
    kernel = forward._forward_kernel

    class Counted:
        def __getitem__(self, grid):
            found.append(grid[0])
            return kernel[grid]

    monkeypatch.setattr(forward, "_forward_kernel", Counted())
    yield found


@pytest.mark.parametrize("dim, keys, parts, speed", spread((64, 128), (64, 128), (1, 3), SPEEDS))
def test_programs_share_a_multiprocessor_where_blocks_are_small(dim, keys, parts, speed, programs, every_row_fails):
    """Each takes tile after tile through memory for one tile's queries: lists that are longer than its rings and shorter ones, empty ones,
    blocks without rows, lists in parts, and all of them walked twice."""
    (late, dtype), options = speed, dict(processors=3, split=split_in(parts))
    mask = torch.rand(2, 6, 9) < 0.7
    mask[0, 2], mask[1, 3] = False, torch.arange(9) == 4
    sizes = [64, 50, 64, 0, 7, 64], [keys, 3, keys, 17, keys, 32, 0, keys, keys]
    blocks = BlockLists.from_mask(mask, *(ragged(x, "cpu") for x in sizes))
    q, k, v = inputs(1, 4, 2, 249, 5 * keys + 52, dim, dtype=dtype)
    expected = assert_right(q, k, v, blocks, False, late, **options)
    assert programs == [6 if dim == 128 else 9]
    got = run("forward", q, k, v, blocks, 0.125, False, late=late, in_place=True, **options)
    assert got[0].data_ptr() == q.data_ptr() and all(torch.equal(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("config", [
    (2, 64, 4, True, 1, True), (2, 128, 2, True, 1, True, 8), (2, 64, 5, False, 1, True), (3, 64, 3, True, 1, False, 2),
    (2, 64, 2, True, 2, False)])
def test_other_configurations_give_the_same(config, walks):
    """Queries in registers, any number of stages and of pieces, room for one tile's queries where warpgroups share them."""
    q, k, v, blocks = levels((128, 0), (384, 118), (200, 0))
    exact, exact_lse = reference_attention(q.double(), k.double(), v.double(), blocks, 0.125)
    out, lse = run("forward", q, k, v, blocks, 0.125, False, late=True, config=HopperForwardConfig(*config))
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
    assert 1 in walks


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_packed_chunks_hold_every_key_of_the_partial_ones_once(pieces, monkeypatch):
    """As they follow one another, each cut into pieces, and packed as densely as whole pieces allow."""
    lengths = torch.randint(0, 64, (300,)).tolist() + [64]
    blocks = BlockLists.from_mask(torch.ones(1, 301, dtype=torch.bool), 64, ragged(lengths, "cpu"))
    load, found = module("forward_load"), []
    take = load._take_tile
    monkeypatch.setattr(load, "_take_tile", lambda work, place: (found.append((work, take(work, place))), found[-1][1])[1])
    q, k, v = inputs(1, 1, 1, 64, sum(lengths), 64)
    config = HopperForwardConfig(1, 64, 3, False, 1, pieces=pieces)
    run("forward", q, k, v, blocks, 0.125, False, late=False, config=config)
    work, tile = found[0]
    chunks = [load.pieces_of(work, tile, torch.tensor(packed)) for packed in range(int(tile.partial))]
    got = [(int(start), int(size)) for starts, sizes in chunks for start, size in zip(starts, sizes) if size > 0]
    piece, first, wanted = 64 // pieces, 0, []
    for length in lengths[:-1]:
        wanted += [(first + before, min(length - before, piece)) for before in range(0, length, piece)]
        first += length
    assert got == wanted and len(chunks) == -(-len(wanted) // pieces)
    assert all(size <= 0 for size in load.pieces_of(work, tile, torch.tensor(-1))[1])


def test_every_block_has_its_place():
    """The longest lists of all heads first, then head after head, each block once."""
    number, heads = torch.tensor(37), torch.tensor(3)
    places = [tuple(map(int, module("forward_load")._scheduled(torch.tensor(place), number, heads))) for place in range(37 * 3)]
    assert sorted(places) == [(head, rank) for head in range(3) for rank in range(37)]
    assert places[:6] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)] and places[6:] == sorted(places[6:])


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_what_is_not_seen_changes_nothing(dtype, causal, late):
    """NaN in a key and its value, behind a block's real tokens and in another block, spoils the rows that see it and no others."""
    q, k, v = inputs(1, 1, 1, 300, 300, 64, dtype=dtype)
    blocks = BlockLists.from_mask(torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1]], dtype=torch.bool), 100, 100,
                                  kv_lengths=torch.tensor([90, 100, 100], dtype=torch.int32))
    clean = run("forward", q, k, v, blocks, 0.125, causal, late=late)[0]
    k[:, :, 90:100] = v[:, :, 90:100] = float("nan")
    v[:, :, 250, 3] = float("nan")
    dirty = run("forward", q, k, v, blocks, 0.125, causal, late=late)[0]
    sees = torch.arange(300) >= (250 if causal else 100)
    assert torch.equal(dirty[:, :, ~sees], clean[:, :, ~sees]) and dirty[:, :, sees, 3].isnan().all()
    others = torch.arange(64) != 3
    assert torch.equal(dirty[:, :, sees][..., others], clean[:, :, sees][..., others])


@pytest.mark.parametrize("name", LEVELS)
def test_scores_far_above_those_of_the_first_chunk(name, walks):
    """Only where weights overflow is a list walked twice, and nothing is lost then; nor in rows of low scores, which are measured from
    their own."""
    assert_right(*levels(*LEVELS[name]), False, False)
    assert (1 in walks) == (name in OVERFLOW)


def test_large_values_overflow_before_their_weights_do(walks):
    q, k, v, blocks = levels((128, 0), (384, 50))
    assert_right(q, k, v * 1e28, blocks, False, False)
    assert 1 in walks


def test_one_lane_sees_the_scores_and_another_the_values_that_overflow(walks):
    """Four lanes share a row: the first has keys 0, 1, 8, 9, ..., the last columns 6, 7, 14, 15, ... of the result."""
    q, k, v, blocks = levels((128, 0), (384, 0))
    k[:, :, 128::8, 0] = 50.0
    v[..., 6] *= 1e28
    out, _ = run("forward", q, k, v, blocks, 0.125, False, late=False)
    exact, _ = reference_attention(q.double(), k.double(), v.double(), blocks, 0.125)
    assert 1 in walks
    torch.testing.assert_close(out.double() / exact.abs().amax((0, 1, 2)), exact / exact.abs().amax((0, 1, 2)), rtol=2e-2, atol=2e-2)


def test_a_first_chunk_that_is_infinitely_far_below():
    assert_right(*levels((128, float("-inf")), (384, 0)), False, False)


@pytest.mark.parametrize("factor", [1e4, float("nan"), float("inf")])
def test_a_row_that_overflows_changes_no_bits_of_its_neighbours(factor, walks):
    """Though their warpgroups walk again, too."""
    q, k, v, blocks = levels(*((64, i % 4 * 20) for i in range(8)))
    before = run("forward", q, k, v, blocks, 0.125, False, late=False)[0]
    assert 1 not in walks
    q[:, :, 70] *= factor
    after = run("forward", q, k, v, blocks, 0.125, False, late=False)[0]
    others = torch.arange(200) != 70
    assert 1 in walks and torch.equal(after[:, :, others], before[:, :, others]) and after[:, :, 70].isnan().all() == (factor != 1e4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_keys_of_other_blocks_change_no_bits(value):
    """However large they are."""
    q, k, v = inputs(1, 1, 1, 200, 300, 64, dtype=torch.bfloat16)
    blocks = BlockLists.from_mask(torch.tensor([[1, 1, 0], [1, 0, 1]], dtype=torch.bool), 100, 100)
    before = run("forward", q, k, v, blocks, 0.125, False, late=False)[0]
    k[:, :, 250] = value
    after = run("forward", q, k, v, blocks, 0.125, False, late=False)[0]
    assert torch.equal(after[:, :, :100], before[:, :, :100]) and not torch.equal(after[:, :, 100:], before[:, :, 100:])


# Equal and ragged ones each with either dimension.
LITTLE_SHORTER = [120, 126, 100, 60, [126, 126, 42, 126, 126, 77], [60, 60, 30, 60, 60, 9], [105, 105, 35, 105, 105, 1], 240]


@pytest.mark.parametrize("lengths, dim, speed", [(of, *kind) for of, kind in zip(LITTLE_SHORTER, cycle(zip((64, 128), SPEEDS)))], ids=str)
def test_blocks_a_little_shorter_than_a_step(lengths, dim, speed, every_row_fails):
    """Equal ones fill the step of every chunk equally; NaN right behind them stays out."""
    late, dtype = speed
    sizes = [lengths] * 5 + [lengths // 2] if isinstance(lengths, int) else lengths
    cut = lengths if isinstance(lengths, int) else ragged(lengths, "cpu")
    mask = torch.tensor([[1, 0, 1, 0, 1, 1], [0, 0, 1, 0, 0, 1], [0] * 6, *[[1, 0, 1, 0, 1, 0]] * 3])
    blocks = BlockLists.from_mask(mask.bool(), cut, cut)
    q, k, v = inputs(1, 2, 1, sum(sizes), sum(sizes), dim, dtype=dtype)
    expected = assert_right(q, k, v, blocks, False, late)
    for block in (1, 3):
        k[:, :, sum(sizes[:block]):sum(sizes[:block + 1])] = v[:, :, sum(sizes[:block]):sum(sizes[:block + 1])] = float("nan")
    got = run("forward", q, k, v, blocks, 0.125, False, late=late)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def gradients(q, k, v, blocks, deterministic, late, dout, dlse, causal=False, processors=3, in_place=False):
    """(dq, dk, dv) of the kernel, as on a GPU with so many multiprocessors."""
    out, lse = reference_attention(q, k, v, blocks, 0.125, causal)
    return run("backward", dout, dlse, q, k, v, out, lse, blocks, 0.125, causal, deterministic, late=late, processors=processors,
               in_place=in_place)


def assert_right_gradients(q, k, v, blocks, deterministic, late, causal=False):
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[:3])
    # Also where dq takes the memory of dout.
    grads = gradients(q, k, v, blocks, deterministic, late, dout.clone(), dlse, causal, in_place=late)
    attend = partial(reference_attention, blocks=blocks, scale=0.125, causal=causal)
    exact = attention_with_gradients(attend, q.double(), k.double(), v.double(), dout, dlse)
    for grad, right in zip(grads, exact[2:]):
        torch.testing.assert_close(grad.double(), right, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("name, late, causal, deterministic", spread(patterns("cpu"), *[(False, True)] * 3))
def test_gradients_of_small_blocks(name, late, causal, deterministic):
    """Causal with more keys than queries and the other way round: blocks of which nothing is seen, a part, or everything."""
    blocks, heads, kv_heads, q_len, kv_len = patterns("cpu")[name]
    assert_right_gradients(*inputs(2, heads, kv_heads, q_len, kv_len, 64), blocks, deterministic, late, causal)


def test_gradients_of_one_program():
    """All tiles one after another: every barrier goes through many phases."""
    blocks, heads, kv_heads, q_len, kv_len = patterns("cpu")["ragged"]
    assert_right_gradients(*inputs(2, heads, kv_heads, q_len, kv_len, 64), blocks, True, True)


@pytest.mark.parametrize("dim, deterministic, causal, late", [(64, True, False, True), (64, False, True, False), (128, True, True, False),
                                                              (128, False, False, True)])
def test_gradients_of_long_blocks(dim, deterministic, causal, late):
    blocks = BlockLists.from_mask(torch.rand(2, 4, 5) < 0.7, ragged([384, 200, 70, 331], "cpu"), ragged([384, 128, 300, 61, 129], "cpu"))
    assert_right_gradients(*inputs(1, 2, 1, 985, 1002, dim), blocks, deterministic, late, causal)


@pytest.mark.parametrize("late, deterministic", [(False, True), (True, False)])
def test_gradients_of_blocks_that_end_within_a_chunk(late, deterministic):
    """They are right, and what follows in memory, NaN in rows of other blocks, changes no bits, though weights of rows beyond a block's end
    would be infinite if they were measured: all scores are about -200."""
    blocks = BlockLists.from_mask(torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool), 120, 120)
    q, k, v = inputs(1, 1, 1, 360, 360, 64)
    assert_right_gradients(q, k, v, blocks, deterministic, late)
    q[..., 0], k[..., 0] = 40, -40
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[:3])
    clean = gradients(q, k, v, blocks, deterministic, late, dout, dlse)
    for x in (q, k, v, dout):
        x[:, :, 240:] = float("nan")
    dirty = gradients(q, k, v, blocks, deterministic, late, dout, dlse)
    assert all(x[:, :, :240].isfinite().all() and torch.equal(x[:, :, :240], y[:, :, :240]) for x, y in zip(clean, dirty))


def test_a_deterministic_backward_gives_the_same_bits():
    """However its programs are interleaved."""
    blocks = BlockLists.from_mask(torch.rand(1, 7, 7) < 0.8, 64, 128)
    q, k, v = inputs(1, 1, 1, 448, 896, 64)
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[:3])
    first = gradients(q, k, v, blocks, True, True, dout, dlse, processors=5)
    for late in (True, False, True):
        again = gradients(q, k, v, blocks, True, late, dout, dlse, processors=5)
        assert all(torch.equal(x, y) for x, y in zip(first, again))


def test_a_list_that_names_a_block_twice_ends_and_is_not_silent(monkeypatch, recwarn):
    """Its locks never open, so after a while they are not waited for; that is counted, and the next backward warns, once."""
    backward = module("backward")
    monkeypatch.setattr(notices, "_said", set())
    monkeypatch.setattr(spin_timeouts, "_counters", {})
    monkeypatch.setattr(module("backward_partitions"), "SPIN_LIMIT", 20)
    once = BlockLists.from_mask(torch.ones(1, 2, 3, dtype=torch.bool), 64, 128)
    twice = BlockLists(once.counts, torch.tensor([0, 0, 2], dtype=torch.int32).expand(1, 1, 2, 3), 64, 128, num_kv_blocks=3)
    q, k, v = inputs(1, 1, 1, 128, 384, 64)
    counts = [backward.spin_timeouts("cpu")]
    for _ in range(3):
        assert all(x.isfinite().all() for x in gradients(q, k, v, twice, True, False, torch.randn_like(q), torch.randn(q.shape[:3])))
        counts.append(backward.spin_timeouts("cpu"))
    assert counts[0] == 0 and counts == sorted(set(counts))
    said = [str(warning.message) for warning in recwarn if "went on without it" in str(warning.message)]
    assert len(said) == 1 and f"went on without it, {counts[1]} times" in said[0]


@pytest.mark.parametrize("deterministic", [True, False])
def test_no_lock_is_given_up_on_without_need(deterministic):
    blocks, heads, kv_heads, q_len, kv_len = patterns("cpu")["ragged"]
    q, k, v = inputs(2, heads, kv_heads, q_len, kv_len, 64)
    before = module("backward").spin_timeouts("cpu")
    gradients(q, k, v, blocks, deterministic, True, torch.randn_like(q), None)
    assert module("backward").spin_timeouts("cpu") == before


def test_the_emulator_knows_all_inline_assembly():
    """Each piece by the name of its function; nothing else in the package has any."""
    folder = Path(ssta.kernels.__file__).with_name("hopper")
    having = {path.name for path in folder.glob("*.py") if "inline_asm_elementwise" in path.read_text()}
    functions = {node.name for node in ast.parse((folder / "inline_asm.py").read_text()).body if isinstance(node, ast.FunctionDef)}
    assert having == {"inline_asm.py"} and functions == set(INLINE_ASM)
