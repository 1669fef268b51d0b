"""bench_recipe.py: each part of the recipe is measured, its error that of its own recipe; wrong compiled attention gets no time."""

import csv

import pytest
import torch


@pytest.fixture
def bench(monkeypatch, tmp_path):
    import bench_recipe

    torch._dynamo.reset()
    monkeypatch.setattr(bench_recipe, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return bench_recipe


@pytest.mark.slow
def test_each_part_end_to_end(bench, tmp_path):
    bench.main(["--model", "wan", "--rounds", "1", "--csv", "recipe_mine"])
    with (tmp_path / "recipe_mine.csv").open(newline="") as file:
        rows = {row["what"]: row for row in csv.DictReader(file)}
    assert tuple(rows) == bench.WHAT and all(float(row["median_ms"]) > 0 and not row["note"] for row in rows.values())
    assert float(rows["dense"]["error"]) == float(rows["dense"]["error_dense"]) == 0
    for what in ("default", "default, compiled", "default, 8 bits", "default, 8 bits, compiled"):
        assert 0.01 < float(rows[what]["error"]) < 0.2
    assert float(rows["default, 8 bits"]["blocks_mib"]) < 0.5 * float(rows["default"]["blocks_mib"])
    assert rows["default, 8 bits"]["quantized"] == "int8" and rows["default, skipped"]["error"] == ""

    import table
    lines = table.recipe_table(list(rows.values()))
    assert lines[1][:2] == ["Wan 2.1, small", "dense"] and lines[1][3] == "1.00" and lines[5][1] == "default, int8"


def test_wrong_compiled_attention_gets_no_time(bench, monkeypatch, capsys):
    right, count = bench.output, iter(range(9))
    monkeypatch.setattr(bench, "output", lambda *of: right(*of) * (1 + 0.1 * next(count)))
    with pytest.raises(SystemExit, match="Wan 2.1, small, dense, compiled, is wrong: a step is off by .*; no time is printed"):
        bench.main(["--model", "wan", "--only", "dense, compiled"])
    assert "_ms" not in capsys.readouterr().out


def test_what_torchao_or_the_compiler_cannot_do_is_named(bench):
    rows = bench.measure_model(bench.MODELS_CPU[1], ["default", "default, 8 bits"], 1, torch.device("cpu"), "float8", "aot_eager")
    assert float(rows[0]["step_s"]) > 0 and rows[1]["step_s"] == ""
    assert "failed: AssertionError: Float8 dynamic quantization" in rows[1]["note"]


def test_what_takes_too_much_memory_is_named(bench, monkeypatch):
    def too_large(*of):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB")

    monkeypatch.setattr(bench, "shortened", too_large)
    row, = bench.measure_model(bench.MODELS_CPU[1], ["default"], 1, torch.device("cpu"), "int8", "aot_eager")
    assert row["note"] == "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 64 GiB" and row["step_s"] == ""
