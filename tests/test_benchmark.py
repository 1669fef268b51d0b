"""The benchmarks: their gate refuses wrong results, their arguments refuse nonsense, and README shows what was measured."""

import csv
import importlib
import random
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ssta.kernels import BlockLists, block_sparse_attention
from ssta.kernels.reference import reference_attention, token_mask

BENCHMARK = Path(__file__).parent.parent / "benchmark"
TINY = "64,2,16,2,32"  # tokens, kept, block, heads, head_dim


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARK)


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Imports a file of benchmark/ with its CSVs going to tmp_path."""

    def load(name):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "RESULTS", tmp_path)
        return module

    return load


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# The gate


def ragged_lists(heads=3):
    offsets, real = torch.tensor([0, 7, 7, 40]).int(), torch.tensor([5, 0, 33]).int()
    mask = torch.rand(2, heads, 3, 3) < 0.6
    mask[..., 0, 2] = True
    return BlockLists.from_mask(mask, offsets, offsets, kv_lengths=real)


@pytest.mark.parametrize("blocks, tokens", [(lambda: BlockLists.from_mask(torch.rand(2, 3, 3, 3) < 0.9, 16, 16), 16),
                                            (lambda: BlockLists.from_mask(torch.ones(3, 3, dtype=torch.bool), 16, 16), 16),
                                            (ragged_lists, 7)], ids=["uniform", "shared by heads", "ragged"])
def test_the_sample_is_that_block_of_the_whole(blocks, tokens):
    from truth import exact_first_block, first_block

    blocks = blocks()
    q, k, v, dout = (torch.randn(2, 3, 40, 8) for _ in range(4))
    out, dq = exact_first_block(q, k, v, blocks, dout)
    leaf = q.double().requires_grad_()
    whole, _ = reference_attention(leaf, k.double(), v.double(), blocks, 8**-0.5)
    torch.testing.assert_close(out, first_block(whole.detach(), tokens), rtol=0, atol=1e-14)
    torch.testing.assert_close(dq, first_block(torch.autograd.grad(whole, leaf, dout.double())[0], tokens), rtol=0, atol=1e-14)
    assert out.dtype == torch.float64 and out.shape == (2, 1, tokens, 8)
    assert exact_first_block(q, k, v, blocks)[1] is None


def test_the_gate_tells_rounding_from_wrong():
    from truth import check

    exact = torch.linspace(-2, 2, 65, dtype=torch.float64)
    assert check("exact", exact.float(), exact) == 0
    assert check("rounded", (exact + 0.004).bfloat16(), exact) == pytest.approx(0.003, abs=0.003)
    for wrong in (exact.float() + 1e-4, exact.bfloat16() * 1.05, exact.float().masked_fill(exact == 0, float("nan"))):
        with pytest.raises(SystemExit, match="ours is wrong: off by .* no time is printed"):
            check("ours", wrong, exact)


def wrong_forward(q, k, v, blocks, impl):
    return block_sparse_attention(q, k, v, blocks, impl=impl) * 1.1


def wrong_backward(q, k, v, blocks, impl):
    return block_sparse_attention(q * 0.9 + q.detach() * 0.1, k, v, blocks, impl=impl)


@pytest.mark.parametrize("wrong, what", [(wrong_forward, "forward"), (wrong_backward, "backward")])
def test_a_wrong_kernel_gets_no_time(script, monkeypatch, capsys, tmp_path, wrong, what):
    bench = script("bench_kernels")
    monkeypatch.setattr(bench, "block_sparse_attention", wrong)
    with pytest.raises(SystemExit, match=f"ssta \\w+, {what}, is wrong"):
        bench.main(["--shape", TINY, "--rounds", "1", "--csv", "refused"])
    assert "_ms" not in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_layer_that_differs_from_its_stages_gets_no_time(script, monkeypatch):
    bench = tiny_layer(script, monkeypatch)
    whole = bench.ssta_attention
    monkeypatch.setattr(bench, "ssta_attention", lambda *args, **options: whole(*args, **options) * 1.0001)
    with pytest.raises(SystemExit, match="padding 'none' differs from its stages"):
        bench.main(["--rounds", "1"])


# The scripts from their arguments to their CSVs


def test_kernels_end_to_end(script, capsys, tmp_path):
    script("bench_kernels").main(["--shape", TINY, "--shape", "32,1,16,1,16", "--rounds", "1", "--csv", "mine"])
    assert "median_ms" in capsys.readouterr().out
    rows = read(tmp_path / "mine.csv")
    assert [row["what"] for row in rows] == ["forward", "forward", "backward", "backward"] * 2
    assert [row["kept"] for row in rows if row["provider"] == "dense SDPA"] == ["4", "4", "2", "2"]
    assert [(row["tokens"], row["kept"], row["blocks"]) for row in rows[::4]] == [("64", "2", "4"), ("32", "1", "2")]
    assert all(float(row["median_ms"]) > 0 and float(row["error"]) < 0.05 and row["torch"] == torch.__version__ for row in rows)


@pytest.mark.gpu
def test_kernels_beside_flex_attention(script, tmp_path):
    script("bench_kernels").main(["--shape", "1536,2", "--rounds", "1", "--csv", "mine"])
    assert [row["provider"] for row in read(tmp_path / "mine.csv")][1::3] == ["FlexAttention"] * 2


def tiny_layer(script, monkeypatch):
    bench = script("bench_layer")
    from shapes import LayerShape

    for name in ("LAYERS", "LAYERS_CPU"):
        monkeypatch.setattr(bench, name, (LayerShape("tiny", (3, 9, 10), 20, 12, 1, 32),))
    return bench


def test_layer_end_to_end(script, monkeypatch, tmp_path):
    tiny_layer(script, monkeypatch).main(["--rounds", "1", "--csv", "mine"])
    rows = read(tmp_path / "mine.csv")
    stages = ["tile", "select", "attend", "untile", "total"]
    assert [(row["padding"], row["stage"]) for row in rows] == [("dense", "total"), *((pad, s) for pad in ("none", "zero") for s in stages)]
    assert [row["stage"] for row in rows if row["error"]] == ["attend", "attend"]
    assert [row["stage"] for row in rows if row["extra_mib"]] == ["total"] * 3


def test_errors_end_to_end(script, monkeypatch, tmp_path):
    bench = script("bench_errors")
    from shapes import ErrorShape

    for name in ("ERRORS", "ERRORS_CPU"):
        monkeypatch.setattr(bench, name, (ErrorShape("ragged", (16, 9, 0, 20), 2, 1, 16, real=(16, 9, 0, 12)),))
    bench.main(["--csv", "mine"])
    rows = read(tmp_path / "mine.csv")
    measured = [(row["dtype"], row["impl"]) for row in rows[::5]]
    assert {("float16", "gather"), ("float16", "triton"), ("bfloat16", "gather"), ("float32", "gather")} <= set(measured)
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
    ("bench_kernels", ["--shape", "768,x"], "KEPT must be a whole number, got 'x'"),
    ("bench_kernels", ["--shape", "768,1,384,0"], "HEADS must be at least 1, got 0"),
    ("bench_kernels", ["--shape", "1000,1"], "TOKENS must be a multiple of BLOCK 384, got 1000"),
    ("bench_kernels", ["--shape", "768,3"], "KEPT must be at most the 2 blocks of 768 tokens, got 3"),
    ("bench_kernels", ["--impl", "flash"], "--impl: invalid choice: 'flash'"),
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


# How it is measured


def test_interleaved_calls_each_the_same_number_of_times():
    from measure import interleaved

    calls = []
    times = interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=5, warm=2)
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert len(rounds) == 7 and all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(map(tuple, rounds))) > 1, "the order never changes"
    assert list(times) == ["a", "b", "c"]
    assert all(0 <= t["min_ms"] <= t["median_ms"] <= t["max_ms"] for t in times.values())


def test_interleaved_reports_the_median_without_the_warm_rounds(monkeypatch):
    import measure

    clock = iter([100.0, 3.0, 1.0, 2.0, 8.0])
    monkeypatch.setattr(measure, "_milliseconds", lambda call: next(clock))
    assert measure.interleaved({"a": None}, rounds=4, warm=1) == {"a": {"median_ms": 2.5, "min_ms": 1.0, "max_ms": 8.0}}


def test_flops_are_those_of_the_products():
    from measure import backward_flops, forward_flops

    q, k, v = torch.randn(3, 1, 2, 48, 16).requires_grad_().unbind()
    pairs = 2 * 48 * 48
    with FlopCounterMode(display=False) as forward:
        out = torch.softmax(q @ k.mT, -1) @ v
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
        q @ k.mT  # the scores, which a sparse backward computes again
    assert forward_flops(pairs, 16) == forward.get_total_flops()
    assert backward_flops(pairs, 16) == backward.get_total_flops()


def test_pairs_are_what_the_mask_keeps():
    from arguments import kernel_shape

    shape = kernel_shape(TINY)
    q = torch.empty(shape.batch, shape.heads, shape.tokens, shape.head_dim)
    lists = torch.stack([torch.tensor(random.Random(i).sample(range(shape.blocks), shape.kept)) for i in range(shape.blocks)])
    assert shape.pairs == token_mask(q, q, BlockLists.from_topk(lists, shape.block, shape.block)).sum()


# README's tables


def test_readme_shows_what_was_measured():
    import table

    table.main(["--check"])


def kernel_row(what, provider, ms, kept):
    return dict(what=what, provider=provider, tokens=46080, kept=kept, blocks=120, median_ms=ms)


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A README with one place, and a CSV of another machine for it."""
    import measure
    import table

    where = dict(device="Card", driver="1", torch="2.9", triton="3.5", commit="abc", date="2026-01-02")
    monkeypatch.setattr(measure, "machine", lambda: where)
    measure.write_rows(tmp_path / "kernels_card.csv", [
        kernel_row("forward", "ssta triton", 7.9961, 48), kernel_row("forward", "FlexAttention", 10.0, 48),
        kernel_row("forward", "dense SDPA", 1234.5, 120),
        kernel_row("backward", "ssta triton", 20.0, 48), kernel_row("backward", "dense SDPA", 99.96, 120)])
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- table:kernels -->\nstale\n<!-- /table -->\nafter\n<!-- table:errors -->\nkept\n<!-- /table -->\n")
    monkeypatch.setattr(table, "README", readme)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    return table, readme


def test_a_table_from_a_made_up_csv(made_up, capsys):
    table, readme = made_up
    before = readme.read_text()
    with pytest.raises(SystemExit, match="benchmark/results holds for kernels: run python benchmark/table.py"):
        table.main(["--check"])
    assert readme.read_text() == before
    table.main([])
    assert readme.read_text() == """before
<!-- table:kernels -->
| tokens | blocks kept | direction | kernel | SSTA, ms | FlexAttention, ms | FlexAttention / SSTA | dense SDPA, ms |
|---:|---:|---|---|---:|---:|---:|---:|
| 46,080 | 48 of 120 | forward | triton | 8.00 | 10.0 | 1.25 | 1,230 |
| 46,080 | 48 of 120 | backward | triton | 20.0 | – | – | 100 |

Card, torch 2.9, triton 3.5, 2026-01-02
<!-- /table -->
after
<!-- table:errors -->
kept
<!-- /table -->
"""
    table.main(["--check"])
    table.main([])
    assert "every table shows" in capsys.readouterr().out


def test_the_other_tables(tmp_path):
    import measure
    import table
    from shapes import LAYERS

    measure.write_rows(tmp_path / "layer_a.csv", [
        dict(layer=LAYERS[0].name, padding="dense", stage="total", median_ms=200.0, extra_mib=444.4, extra_over_qkvo=0.25),
        dict(layer=LAYERS[0].name, padding="none", stage="attend", median_ms=44.0, extra_mib="", extra_over_qkvo=""),
        dict(layer=LAYERS[0].name, padding="none", stage="total", median_ms=50.0, extra_mib=1889.3, extra_over_qkvo=1.0645)])
    measure.write_rows(tmp_path / "layer_small.csv", [dict(layer="small", padding="dense", stage="total", median_ms=1.0)])
    measure.write_rows(tmp_path / "errors_a.csv", [
        dict(impl="gather", dtype="float16", pattern="ragged", tensor=name, max_error=0.00012345, eager_max_error=0.5)
        for name in ("out", "lse", "dq", "dk", "dv")])
    filled = table.filled("".join(f"<!-- table:{name} -->\n<!-- /table -->\n" for name in ("layer", "stages", "errors")), tmp_path)
    layer, stages, errors = filled.split("<!-- /table -->\n")[:3]
    assert "| dense (torch SDPA) | 200 | 1.00 | 444 MiB (0.250 x) |\n" in layer
    assert '| SSTA, `pad_type="none"` | 50.0 | 4.00 | 1,890 MiB (1.06 x) |\n' in layer
    assert layer.count("torch ") == 2, "a CSV without the layer gives no table"
    assert f'| {LAYERS[0].name} | `pad_type="none"` | – | – | 44.0 | – | 50.0 |\n' in stages and "| small |" in stages
    assert f"| gather | float16 | ragged |{' 0.000123 (0.500) |' * 5}\n" in errors


@pytest.mark.parametrize("text, message", [
    ("<!-- table:speed -->\n<!-- /table -->", "table:NAME must be one of kernels, layer, stages, errors, got 'speed'"),
    ("<!-- table:kernels -->\n", "followed by <!-- /table -->"),
    ("<!-- table:kernels --><!-- /table -->", "at the end of its line")])
def test_places_that_cannot_be_filled(tmp_path, text, message):
    import table

    with pytest.raises(ValueError, match=message):
        table.filled(text, tmp_path)
