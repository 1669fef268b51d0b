"""The benchmarks: their gate refuses wrong results, their arguments refuse nonsense, and README shows what was measured."""

import importlib
import sys

import pytest
import torch
from rows import read_rows

from ssta.kernels import BlockLists, block_sparse_attention
from ssta.kernels.reference import reference_attention

TINY = "64,2,16,2,32"  # tokens, kept, block, heads, head_dim


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Imports a file of benchmark/ with its CSVs going to tmp_path."""

    def load(name):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "RESULTS", tmp_path)
        return module

    return load


def test_streaming_is_checked_and_measured(script, tmp_path, monkeypatch, capsys):
    bench = script("bench_streaming")
    bench.main(["--rounds", "1", "--csv", "streaming"])
    rows = read_rows(tmp_path / "streaming.csv")
    steps = {"step", "step, graph", "dense step", "dense step, graph"}
    assert {row["what"] for row in rows} == {"call", "call that keeps", "all tiles", "stateless", "dense"} | steps
    # A step's time is reckoned from those of one and of two blocks, of which noise may make anything.
    assert all((float(row["median_ms"]) > 0 or row["what"] in steps) and float(row["of_plain"]) > 1 and row["note"] in ("", "from 2 blocks")
               for row in rows)
    real = bench.TileCache.attend
    monkeypatch.setattr(bench.TileCache, "attend", lambda *args, **options: real(*args, **options) * 1.01)
    with pytest.raises(SystemExit, match="small, all tiles, is wrong"):
        bench.main(["--rounds", "1"])


# Other libraries' interfaces


def test_interfaces_are_checked_and_measured(script, tmp_path, monkeypatch, capsys):
    bench = script("bench_interfaces")
    monkeypatch.setattr(bench, "MAGI_BLOCKS", ((64, 64), (128, 1)))
    bench.main(["--tokens", "384", "--density", "0.4", "--rounds", "1", "--csv", "interfaces"])
    rows = read_rows(tmp_path / "interfaces.csv")
    assert [(row["system"], row["q_block"], row["k_block"], row["what"]) for row in rows if row["provider"] == "ssta"] == [
        ("flex-block-attn", "384", "384", "forward"), ("flex-block-attn", "384", "384", "backward"),
        ("MagiAttention", "64", "64", "forward"), ("MagiAttention", "64", "64", "backward"),
        ("MagiAttention", "128", "1", "forward"), ("MagiAttention", "128", "1", "backward"),
        ("Block-Sparse-Attention", "128", "128", "forward"), ("Block-Sparse-Attention", "128", "128", "backward"),
        ("FlashInfer", "64", "64", "forward"), ("FlashInfer", "128", "128", "forward")]
    assert all(float(row["median_ms"]) > 0 and 0 <= float(row["error"]) < 1e-4 for row in rows)

    def wrong(*arguments, **options):
        out, lse = real(*arguments, **options)
        return out * 1.01, lse

    real = bench.block_sparse_attn
    monkeypatch.setattr(bench, "block_sparse_attn", wrong)
    with pytest.raises(SystemExit, match="MagiAttention .* is wrong: .*; no time is taken"):
        bench.main(["--tokens", "384", "--rounds", "1"])
    with pytest.raises(SystemExit):
        bench.main(["--tokens", "100"])
    assert "--tokens must be a multiple of 384" in capsys.readouterr().err


# The gate


def ragged_lists(heads=3):
    offsets, real = torch.tensor([0, 7, 7, 30, 40]).int(), torch.tensor([5, 0, 20, 10]).int()
    mask = torch.rand(2, heads, 4, 4) < 0.6
    mask[..., 2] = True
    return BlockLists.from_mask(mask, offsets, offsets, kv_lengths=real)


@pytest.mark.parametrize("blocks", [lambda: BlockLists.from_mask(torch.rand(2, 3, 3, 3) < 0.9, 16, 16),
                                    lambda: BlockLists.from_mask(torch.ones(3, 3, dtype=torch.bool), 16, 16),
                                    ragged_lists], ids=["uniform", "shared by heads", "ragged"])
def test_the_samples_are_those_blocks_of_the_whole(blocks):
    from truth import truth

    blocks = blocks()
    q, k, v, dout = (torch.randn(2, 3, 40, 8) for _ in range(4))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = reference_attention(*leaves, blocks, 8**-0.5)
    grads = torch.autograd.grad(out, leaves, dout.double())
    exact = truth(q, k, v, blocks, dout)
    assert len({(spot.batch, spot.head, int(spot.rows[0])) for spot in exact.queries}) >= 2
    for spot in exact.queries:
        for got, whole in zip(spot.values, (out.detach(), grads[0])):
            assert got.dtype == torch.float64
            torch.testing.assert_close(got, whole[spot.batch, spot.head, spot.rows], rtol=0, atol=1e-14)
    for got, whole in zip(exact.keys.values, grads[1:]):
        torch.testing.assert_close(got, whole[exact.keys.batch, exact.keys.head, exact.keys.rows], rtol=0, atol=1e-14)
    assert exact.forward_error("whole", out.detach()) < 1e-14 and exact.backward_error("whole", grads) < 1e-13
    assert truth(q, k, v, blocks).keys is None


def test_the_gate_tells_rounding_from_wrong():
    from truth import Wrong, check

    exact = torch.linspace(-2, 2, 65, dtype=torch.float64)
    assert check("exact", exact.float(), exact) == 0
    assert check("rounded", (exact + 0.004).bfloat16(), exact) == pytest.approx(0.003, abs=0.003)
    assert check("coarse", exact.bfloat16() * 1.05, exact, roundings=32) == pytest.approx(0.05, abs=0.01)
    for wrong in (exact.float() + 1e-4, exact.bfloat16() * 1.05, exact.float().masked_fill(exact == 0, float("nan"))):
        with pytest.raises(Wrong, match="ours is wrong: off by .* is allowed"):
            check("ours", wrong, exact)
    # Of keys that no list names.
    assert check("nothing", torch.zeros(3), torch.zeros(3, dtype=torch.float64)) == 0
    with pytest.raises(Wrong, match="ours is wrong"):
        check("ours", torch.tensor([0, 1e-30, 0]), torch.zeros(3, dtype=torch.float64))


def wrong_forward(q, k, v, blocks, impl):
    return block_sparse_attention(q, k, v, blocks, impl=impl) * 1.1


def wrong_dq(q, k, v, blocks, impl):
    return block_sparse_attention(q * 0.9 + q.detach() * 0.1, k, v, blocks, impl=impl)


def wrong_dv(q, k, v, blocks, impl):
    return block_sparse_attention(q, k, v * 0.9 + v.detach() * 0.1, blocks, impl=impl)


@pytest.mark.parametrize("wrong, what", [(wrong_forward, "forward"), (wrong_dq, "dq"), (wrong_dv, "dv")])
def test_a_wrong_kernel_gets_no_time(script, monkeypatch, capsys, tmp_path, wrong, what):
    bench = script("bench_kernels")
    monkeypatch.setattr(bench, "block_sparse_attention", wrong)
    with pytest.raises(SystemExit, match=f"ssta \\w+, {what}, is wrong: .*; no time is printed"):
        bench.main(["--shape", TINY, "--rounds", "1", "--csv", "refused"])
    assert "_ms" not in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_choice_is_measured_in_the_directions_that_it_changes(script, monkeypatch, tmp_path):
    bench = script("bench_kernels")
    monkeypatch.setattr(bench, "CHOICES", {"torch": (("non-deterministic dQ", dict(deterministic=False), ("backward",)),)})
    bench.main(["--shape", TINY, "--rounds", "1", "--impl", "torch", "--peers", "--csv", "mine"])
    rows = read_rows(tmp_path / "mine.csv")
    assert [(row["what"], row["provider"]) for row in rows] == [
        ("lists", "ssta torch"), ("forward", "ssta torch"), ("backward", "ssta torch"), ("backward", "ssta torch, non-deterministic dQ")]
    assert all(float(row["median_ms"]) > 0 for row in rows)


# Patterns


def test_patterns_keep_the_same_number_in_every_row():
    from shapes import Problem, full, kept, tile_grid, window

    problem = Problem(46_080)
    for pattern, number in ((full(problem), 120), (window(problem), 27), (kept(problem, 0.4), 48), (kept(problem, 24), 24),
                            (window(Problem(11_520)), 18), (kept(Problem(384), 0.2), 1)):
        whose = problem if pattern.kept != 18 and pattern.kept != 1 else Problem(11_520 if pattern.kept == 18 else 384)
        mask = pattern.mask(whose, "cpu")
        assert pattern.kept == number and mask.dtype == torch.bool and bool((mask.sum(-1) == number).all())
    assert [tile_grid(n) for n in (1, 30, 120, 360, 7)] == [(1, 1, 1), (2, 3, 5), (4, 5, 6), (6, 6, 10), (1, 1, 7)]
    heads = kept(problem, 0.2).mask(problem, "cpu")[0]
    assert not torch.equal(heads[0], heads[1])


def test_what_queries_and_keys_hold():
    from shapes import INPUTS, Problem, draw

    drawn = {}
    for kind in INPUTS:
        torch.manual_seed(0)
        drawn[kind] = draw(Problem(2_000, heads=2, head_dim=16, inputs=kind), "cpu", torch.float32)
    randn, long, outlier = drawn.values()
    assert [torch.equal(x, y * factor) for x, y, factor in zip(long, randn, (3, 3, 1, 1))] == [True] * 4
    longer = (outlier[1] == 10 * randn[1]).all(-1)
    assert 5 <= longer.sum() <= 40 and torch.equal(outlier[1][~longer], randn[1][~longer])
    assert all(torch.equal(outlier[i], randn[i]) for i in (0, 2, 3))


# The scripts from their arguments to their CSVs


def test_kernels_end_to_end(script, capsys, tmp_path):
    shapes = ["--shape", TINY, "--shape", "64,full,16,2,32", "--shape", "32,1,16,1,16"]
    script("bench_kernels").main([*shapes, "--rounds", "2", "--csv", "mine"])
    assert "median_ms" in capsys.readouterr().out
    rows = read_rows(tmp_path / "mine.csv")
    timed = [row for row in rows if row["median_ms"]]
    assert [(row["tokens"], row["pattern"], row["kept"], row["what"]) for row in timed if row["provider"].startswith("ssta")] == [
        ("64", "random", "2", "lists"), ("64", "full", "4", "lists"), ("64", "random", "2", "forward"), ("64", "full", "4", "forward"),
        ("64", "random", "2", "backward"), ("64", "full", "4", "backward"),
        *(("32", "random", "1", what) for what in ("lists", "forward", "backward"))]
    dense = [(row["tokens"], row["pattern"], row["kept"], row["what"]) for row in timed if row["provider"] == "SDPA flash"]
    assert dense == [("64", "full", "4", "forward"), ("64", "full", "4", "backward"), ("32", "full", "2", "forward"),
                     ("32", "full", "2", "backward")]
    for row in timed:
        assert 0 < float(row["q1_ms"]) <= float(row["median_ms"]) <= float(row["q3_ms"]) and float(row["host_ms"]) > 0
        assert (row["what"] == "lists") == (row["error"] == "") == (row["tflops"] == "")
    for row in rows:
        assert row["torch"] == torch.__version__ and all(row[name] for name in ("device", "driver", "triton", "commit", "date"))
    if not torch.cuda.is_available():
        absent = [row for row in rows if row["what"] == "absent"]
        assert len(absent) == 8 and {row["note"] for row in absent} == {"needs an NVIDIA GPU"}


def test_kernels_on_other_inputs(script, tmp_path):
    script("bench_kernels").main(["--shape", TINY, "--inputs", "long", "outlier", "--rounds", "1", "--impl", "torch", "--peers",
                                  "--csv", "mine"])
    rows = read_rows(tmp_path / "mine.csv")
    assert [(row["inputs"], row["what"]) for row in rows] == [
        (kind, what) for kind in ("long", "outlier") for what in ("lists", "forward", "backward")]


def test_only_the_libraries_that_were_asked_for(script, tmp_path):
    script("bench_kernels").main(["--shape", TINY, "--rounds", "1", "--peers", "--csv", "mine"])
    assert {row["provider"].split()[0] for row in read_rows(tmp_path / "mine.csv")} == {"ssta"}


@pytest.mark.gpu
def test_kernels_beside_every_library_that_is_installed(script, monkeypatch, tmp_path):
    bench = script("bench_kernels")

    def start_again(lost, argv):
        raise lost

    monkeypatch.setattr(bench, "start_again", start_again)  # which would take the place of the tests
    bench.main(["--shape", "1536,2", "--shape", "1536,full", "--rounds", "1", "--csv", "mine"])
    rows = read_rows(tmp_path / "mine.csv")
    measured = {row["provider"] for row in rows if row["median_ms"]}
    assert {"ssta triton", "FlexAttention", "SDPA cuDNN", "SDPA flash"} <= measured
    assert not [row for row in rows if row["note"] and row["what"] != "absent" and not row["note"].startswith("not supported")]
    assert all(float(row["extra_mib"]) > 0 for row in rows if row["what"] in ("forward", "backward") and row["median_ms"])


def failing(kind):
    """A peer that is there, and goes wrong as ``kind`` says."""
    from peers import Calls, Peer, Unsupported

    def prepare(inputs):
        x = inputs.tensors
        forward = {"wrong": lambda: x.q * 2, "raises": lambda: 1 / 0}.get(kind)
        if kind == "unsupported":
            raise Unsupported("blocks must be round")
        return Calls(None, forward, None, "not supported: inference only")

    return Peer("SDPA flash", "torch", "torch", prepare, dense=False)


@pytest.mark.parametrize("kind, note", [("wrong", "SDPA flash, forward, is wrong: off by"), ("unsupported", "blocks must be round"),
                                        ("raises", "failed: ZeroDivisionError: division by")])
def test_a_library_that_fails_is_named_and_ends_nothing(script, monkeypatch, tmp_path, kind, note):
    bench = script("bench_kernels")
    monkeypatch.setattr(bench, "PEERS", (failing(kind),))
    bench.main(["--shape", TINY, "--rounds", "1", "--csv", "mine"])
    rows = read_rows(tmp_path / "mine.csv")
    assert [row["what"] for row in rows if row["provider"].startswith("ssta")] == ["lists", "forward", "backward"]
    theirs = [row for row in rows if row["provider"] == "SDPA flash"]
    assert len(theirs) == 1 and theirs[0]["note"].startswith(note) and not theirs[0]["median_ms"] and not theirs[0]["error"]


def test_a_library_that_takes_the_gpu_with_it_is_left_out_in_a_new_process(script, monkeypatch, capsys, tmp_path):
    bench = script("bench_kernels")
    monkeypatch.setattr(bench, "PEERS", (failing("raises"),))
    started = []

    class Gone(Exception):
        """What stands here for the end of the process."""

    def execv(program, command):
        started.append(command)
        raise Gone

    def dead(name):
        raise bench.Lost(name, "left the GPU unusable: illegal instruction")

    monkeypatch.setattr(bench.os, "execv", execv)
    monkeypatch.setattr(bench, "still_alive", dead)
    arguments = ["--shape", TINY, "--rounds", "1", "--csv", "mine"]
    with pytest.raises(Gone):
        bench.main(arguments)
    assert started[0][:2] == [sys.executable, bench.__file__]
    bench.main(started[0][2:])
    lost, *rest = read_rows(tmp_path / "mine.csv")
    assert (lost["provider"], lost["what"], lost["note"]) == ("SDPA flash", "absent", "left the GPU unusable: illegal instruction")
    assert {row["provider"].split()[0] for row in rest} == {"ssta"}


def test_what_fails_while_it_is_timed(script, monkeypatch):
    bench = script("bench_kernels")
    pattern = bench.full(bench.Problem(64, block=16))
    with pytest.raises(SystemExit, match="ssta triton, full, while it was timed: failed: x"):
        bench.failed_in_time(("ssta triton", pattern), "failed: x")
    bench.failed_in_time(("flash-attn-4", pattern), "failed: x")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def dead():
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    with pytest.raises(bench.Lost, match="flash-attn-4.*left the GPU unusable: failed: RuntimeError: illegal instruction"):
        bench.failed_in_time(("flash-attn-4", pattern), "failed: x")


def test_errors_end_to_end(script, monkeypatch, tmp_path):
    bench = script("bench_errors")
    from shapes import ErrorShape

    for name in ("ERRORS", "ERRORS_CPU"):
        monkeypatch.setattr(bench, name, (ErrorShape("ragged", (16, 9, 0, 20), 2, 1, 16, real=(16, 9, 0, 12)),))
    bench.main(["--csv", "mine"])
    rows = read_rows(tmp_path / "mine.csv")
    measured = [(row["dtype"], row["impl"]) for row in rows[::5]]
    assert {("float16", "torch"), ("float16", "triton"), ("bfloat16", "torch"), ("float32", "torch")} <= set(measured)
    assert all(impl not in ("auto", "reference") for _, impl in measured)
    assert [row["tensor"] for row in rows] == ["out", "lse", "dq", "dk", "dv"] * len(measured)
    for row in rows:
        eps = torch.finfo(getattr(torch, row["dtype"])).eps
        assert 0 < float(row["rms_error"]) <= float(row["max_error"]) < 2 * eps + 2e-5
        assert 0 < float(row["eager_rms_error"]) <= float(row["eager_max_error"]) < 8 * eps


def test_the_yardstick_of_errors_is_attention():
    from bench_errors import eager_attention, relative_errors, with_gradients

    blocks = ragged_lists()
    q, k, v, dout = (torch.randn(2, 3, 40, 8, dtype=torch.float64) for _ in range(4))
    results = (with_gradients(lambda *x, attend=attend: attend(*x, blocks, 0.3), q, k, v, dout, dout[..., 0])
               for attend in (eager_attention, reference_attention))
    for got, exact in zip(*results):
        assert relative_errors(got, exact)[0] < 1e-6  # eager lse is float32
    lse = torch.tensor([1.0, float("-inf")], dtype=torch.float64)
    assert relative_errors(lse, lse) == (0, 0)
    assert relative_errors(lse.masked_fill(lse < 0, 0.0), lse)[0] == float("inf")
    assert relative_errors(torch.tensor([1.0, 5.0]), torch.tensor([4.0, 5.0], dtype=torch.float64)) == pytest.approx((0.6, 0.18**0.5))


@pytest.mark.parametrize("name, arguments, message", [
    ("bench_kernels", ["--shape", "64"], "must be TOKENS,KEPT[,BLOCK[,HEADS[,HEAD_DIM]]], got '64'"),
    ("bench_kernels", ["--shape", "1,2,3,4,5,6"], "must be TOKENS,KEPT"),
    ("bench_kernels", ["--shape", "768,0.0"], "KEPT must be a whole number, got '0.0'"),
    ("bench_kernels", ["--inputs", "short"], "--inputs: invalid choice: 'short'"),
    ("bench_kernels", ["--peers", "flash"], "--peers: invalid choice: 'flash'"),
    ("tune", ["--kernel", "softmax"], "--kernel: invalid choice: 'softmax'"),
    ("bench_layer", ["--layer", "sora"], "--layer must be part of one of"),
    ("bench_kernels", ["--shape", "768,x"], "KEPT must be a whole number, got 'x'"),
    ("bench_kernels", ["--shape", "768,1,384,0"], "HEADS must be at least 1, got 0"),
    ("bench_kernels", ["--shape", "1000,1"], "TOKENS must be a multiple of BLOCK 384, got 1000"),
    ("bench_kernels", ["--shape", "768,3"], "KEPT must be at most the 2 blocks of 768 tokens, got 3"),
    ("bench_kernels", ["--impl", "flash"], "impl must be one of 'auto'"),
    ("bench_kernels", ["--impl", "triton", "--shape", "64,1,16,1,300"], "impl='triton' requires"),
    ("bench_kernels", ["--rounds", "0"], "a number of rounds must be at least 1, got 0"),
    ("bench_kernels", ["--csv", "../mine.csv"], "NAME must be letters, digits, _ and -"),
    ("bench_layer", ["--rounds", "many"], "a number of rounds must be a whole number, got 'many'"),
    ("bench_layer", ["--pad", "reflect"], "--pad: invalid choice: 'reflect'"),
    ("bench_errors", ["--csv", ""], "NAME must be letters, digits, _ and -"),
])
def test_arguments_that_are_refused(script, capsys, name, arguments, message):
    with pytest.raises(SystemExit) as stop:
        script(name).main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


# What the host needs


@pytest.fixture
def host(script, monkeypatch):
    bench_host = script("bench_host")
    from shapes import HUNYUAN, LayerShape

    for name in ("HOST", "HOST_CPU"):
        monkeypatch.setattr(bench_host, name, (LayerShape("tiny", (3, 9, 10), 130, 120, 1, 64, HUNYUAN),))
    return bench_host


def test_host_times_end_to_end(host, tmp_path):
    host.main(["--calls", "2", "--rounds", "2", "--csv", "mine"])
    rows = read_rows(tmp_path / "mine.csv")
    assert [row["what"] for row in rows] == list(host.CALLS) and {row["calls"] for row in rows} == {"4"}
    assert all(0 < float(row["min_us"]) <= float(row["q1_us"]) <= float(row["host_us"]) <= float(row["q3_us"]) for row in rows)
    assert all((row["extra_over_qkvo"] != "") == torch.cuda.is_available() for row in rows)


def test_host_times_are_medians_over_all_warm_calls(host, monkeypatch):
    # Calls of three rounds, the first of which is not counted: 9, 9, 9, then 1, 2, 6 and 3, 4, 8 ms. The device is idle before each.
    clock = iter([x for ms in (9, 9, 9, 1, 2, 6, 3, 4, 8) for x in (0.0, ms / 1e3)])
    waits = []
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(host.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host.torch.cuda, "synchronize", lambda: waits.append("wait"))
    found = host.host_times({"a": lambda: waits.append("call")}, 3, 2)["a"]
    assert found == pytest.approx(dict(host_us=3500, q1_us=2250, q3_us=5500, min_us=1000)) and waits == ["wait", "call"] * 9


def test_only_some_calls(host, tmp_path):
    host.main(["--calls", "1", "--rounds", "1", "--only", "layer, default", "--csv", "mine"])
    assert [row["what"] for row in read_rows(tmp_path / "mine.csv")] == [name for name in host.CALLS if name.startswith("layer, default")]
    host.main(["--calls", "1", "--rounds", "1", "--only", "backward", "--csv", "mine"])
    assert [row["what"] for row in read_rows(tmp_path / "mine.csv")] == ["its backward"]
    with pytest.raises(SystemExit):
        host.main(["--only", "sora"])


def test_a_wrong_call_gets_no_host_time(host, monkeypatch, capsys):
    right = host.ssta_attention

    def wrong(*args, **options):
        out, blocks = right(*args, **options)
        return 1.01 * out, blocks

    monkeypatch.setattr(host, "ssta_attention", wrong)
    with pytest.raises(SystemExit, match="is wrong: .*; no time is printed"):
        host.main(["--calls", "1", "--rounds", "1"])
    assert "_us" not in capsys.readouterr().out


# Lists of single tokens


def test_tokens_are_checked_and_measured(script, tmp_path, monkeypatch):
    bench_tokens = script("bench_tokens")
    bench_tokens.main(["--tokens", "128", "--rounds", "1", "--csv", "tokens"])
    rows = {row["what"]: row for row in read_rows(tmp_path / "tokens.csv")}
    assert {"selected blocks, forward", "selected blocks, backward", "seer 1-D, backward", "selection", "copy"} <= set(rows)
    assert all(float(row["median_ms"]) > 0 and float(row["rate"]) > 0 for row in rows.values())

    right = bench_tokens.selected_attention
    monkeypatch.setattr(bench_tokens, "selected_attention", lambda *args, **options: 1.01 * right(*args, **options))
    with pytest.raises(SystemExit, match="selected blocks, token 0, is wrong"):
        bench_tokens.main(["--tokens", "128", "--rounds", "1"])
