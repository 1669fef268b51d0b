"""bench_recipe.py: each part of the recipe is measured, its error that of its own recipe; wrong compiled attention gets no time."""


import bench_on_ranks
import pytest
import torch
from rows import read_rows


@pytest.fixture
def bench(monkeypatch, tmp_path):
    import bench_recipe

    torch._dynamo.reset()
    monkeypatch.setattr(bench_recipe, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return bench_recipe


def small(bench, quantized="int8"):
    """(how it is measured, the small model)."""
    return bench.Bench(torch.device("cpu"), torch.float32, 1, quantized, "aot_eager"), bench.MODELS_CPU[1]


@pytest.mark.slow
def test_each_part_end_to_end(bench, tmp_path):
    # What comes after the graphs is no matter here.
    bench.main(["--rounds", "1", "--csv", "recipe_mine", "--backend", "eager"])
    path = tmp_path / "recipe_mine.csv"
    rows = {row["what"]: row for row in read_rows(path)}
    # Only Inductor tunes.
    whats = [what for what in bench.WHAT if "tuned" not in what]
    assert list(rows) == whats and all(float(row["median_ms"]) > 0 and not row["note"] for row in rows.values())
    assert float(rows["dense"]["error"]) == float(rows["dense"]["error_dense"]) == 0
    assert float(rows["stock"]["error"]) < 1e-5 and float(rows["dense, compiled"]["error"]) < 1e-5
    for what in ("default", "default, compiled", "default, 8 bits", "default, 8 bits, compiled", "fast, 8 bits, compiled"):
        assert 0.003 < float(rows[what]["error"]) < 0.2, rows[what]["error"]
    assert float(rows["default, 8 bits"]["blocks_mib"]) < 0.5 * float(rows["default"]["blocks_mib"])
    assert rows["default, 8 bits"]["quantized"] == "int8" and rows["default, skipped"]["error"] == ""
    # One row measured again takes its own place, and the others stay.
    bench.main(["--rounds", "1", "--csv", "recipe_mine", "--only", "text encoder"])
    again = read_rows(path)
    assert [row["what"] for row in again] == whats
    assert [row for row in again if row not in rows.values()] == [row for row in again if row["what"] == "text encoder"]


@pytest.mark.slow
def test_two_ranks_share_a_step(tmp_path):
    bench_on_ranks.measured("bench_recipe", 2, tmp_path, "--rounds", "1", "--only", "default", "default, 8 bits", "text encoder",
                            "--csv", "recipe_mine")
    rows = read_rows(tmp_path / "recipe_mine.csv")
    # What surrounds the steps is not shared out.
    assert [(row["what"], row["ranks"]) for row in rows] == [("default", "2"), ("default, 8 bits", "2")]
    assert all(float(row["step_s"]) > 0 and 0.003 < float(row["error"]) < 0.2 for row in rows), [row["error"] for row in rows]


def test_wrong_compiled_attention_gets_no_time(bench, monkeypatch, capsys):
    right = bench.output
    monkeypatch.setattr(bench, "output", lambda *of: right(*of) * 1.1)
    with pytest.raises(SystemExit, match="Wan 2.1, small, dense, compiled, is wrong: a step is off by .*; no time is printed"):
        bench.main(["--model", "wan", "--rounds", "1", "--only", "dense, compiled"])
    assert "_ms" not in capsys.readouterr().out


def test_what_torchao_cannot_do_is_named(bench):
    rows = list(bench.measure_model(*small(bench, "float8"), ["default", "default, 8 bits"]))
    assert float(rows[0]["step_s"]) > 0 and rows[1]["step_s"] == ""
    assert "failed: AssertionError: Float8 dynamic quantization" in rows[1]["note"]


def test_what_takes_too_much_memory_is_named(bench, monkeypatch):
    def too_large(*of):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB")

    monkeypatch.setattr(bench, "shortened", too_large)
    monkeypatch.setattr(bench.AROUND["Wan 2.1, small"].__class__, "decode", too_large)
    whats = ["default", "VAE"]
    for row in (*bench.measure_model(*small(bench), whats), *bench.measure_around(*small(bench), whats)):
        assert row["note"] == "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 64 GiB" and row["step_s"] == ""


@pytest.mark.parametrize("number", range(3))
def test_random_weights_leave_no_head_without_an_estimate(bench, number):
    shape = bench.MODELS_CPU[number]
    model = shape.build("cpu", torch.float32)
    with torch.no_grad(), bench.apply_ssta(model, schedule=bench.Schedule()) as handle:
        model(**shape.call("cpu", torch.float32))
        assert [run.without_estimate for run in handle.report()] == [(0, 2)] * shape.blocks


def test_the_cache_computes_as_many_steps_as_are_counted(bench):
    model = small(bench)[1].build("cpu", torch.float32)
    inputs, ran = small(bench)[1].call("cpu", torch.float32), []
    model.blocks[-1].attn1.to_q.register_forward_hook(lambda *_: ran.append(1))
    with torch.no_grad(), bench.cached(bench.SimpleNamespace(transformer=model), "taylor", {}, 12), model.cache_context("cond"):
        for _ in range(12):
            model(**inputs)
    assert len(ran) == bench.computed_steps(12) < 8


def test_kernels_are_of_the_kind_that_they_serve():
    from kinds import largest, summed

    kernels = [
        ("triton_red_fused_mul_add_0", 1.0), ("nvjet_sm90_qqtst_128x256", 2.0), ("void at::native::elementwise_kernel<128>", 4.0),
        ("_gather_kernel", 8.0), ("nvjet_sm90_tst_192x192_64x3", 16.0), ("_forward_kernel", 32.0), ("ncclDevKernel_SendRecv", 64.0),
        ("_take_kernel", 128.0), ("cutlass::device_kernel<GemmUniversal>", 256.0), ("pytorch_flash::flash_fwd_kernel", 512.0),
        ("_gather_kernel", 1024.0)]
    assert summed(kernels) == {"attention": 8 + 16 + 32 + 128 + 512 + 1024, "exchange": 64, "linear": 2 + 256, "pointwise": 1 + 4}
    assert largest(kernels, 2) == [("_gather_kernel", 1032.0), ("pytorch_flash::flash_fwd_kernel", 512.0)] and summed([]) == {}


# Tables


def row(what, step_s, attention_s="", ranks=1, **more):
    return {name: str(value) for name, value in dict(
        dict(model="Wan", what=what, ranks=ranks, quantized="float8" if "8 bits" in what else "", step_s=step_s, attention_s=attention_s,
             linear_s=0.5 if attention_s else "", exchange_s=0.25 if ranks > 1 else "", steps=10, forwards=2, blocks=4, extra_mib=100,
             blocks_mib=200, error=0.02, error_dense=0.03), **more).items()}


def test_tables():
    from recipe_tables import generation_table, recipe_ranks_table, recipe_table

    rows = [row("stock", 6.0), row("dense", 5.0, 4.0), row("default, 8 bits, compiled", 2.0, 1.2),
            row("default, 8 bits, compiled", 1.0, 0.6, ranks=2), row("default, skipped", 0.1, computed_steps=5), row("text encoder", 0.5),
            row("VAE in tiles", 4.5)]
    lines = recipe_table(rows)
    assert [line[:7] for line in lines[1:]] == [
        ["Wan", "stock", "6.00", "1.20", "–", "–", "–"], ["Wan", "dense", "5.00", "1.00", "4.00", "0.500", "0.500"],
        ["Wan", "default, float8, compiled", "2.00", "0.400", "1.20", "0.500", "0.300"],
        ["Wan", "default, skipped", "0.100", "0.0200", "–", "–", "–"]]
    # The first of four layers attends for 4 / 4 s in place of 1.2 / 4 s.
    assert [line[3:] for line in generation_table(rows)[1:]] == [
        ["6.00", "20", "4.50", "125", "1.00"], ["5.00", "20", "4.50", "105", "1.19"], ["2.70", "20", "4.50", "59.0", "2.12"],
        ["2.70", "10 of 20", "4.50", "33.0", "3.79"]]
    assert recipe_ranks_table(rows)[1:] == [["Wan", "default, float8, compiled", "2", "1.00", "2.00", "2.00", "0.250", "0.0200"]]
