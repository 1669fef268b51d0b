"""bench_pipeline.py: steps are measured through the models' own forwards, checked first, and reckoned up from the blocks that are built."""


import pytest
import torch
from rows import read_rows


@pytest.fixture
def bench(monkeypatch, tmp_path):
    import bench_pipeline

    monkeypatch.setattr(bench_pipeline, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_pipeline, "MODELS", bench_pipeline.MODELS_CPU)
    return bench_pipeline


@pytest.mark.slow
def test_steps_end_to_end(bench, tmp_path):
    bench.main(["--rounds", "1", "--csv", "pipeline_mine"])
    rows = read_rows(tmp_path / "pipeline_mine.csv")
    assert [(row["model"].split(",")[0], row["what"]) for row in rows] == [
        (name, what) for name in ("HunyuanVideo 1.5", "Wan 2.1", "LTX-Video") for what in bench.WHAT]
    for row in rows:
        total, blocks = float(row["median_ms"]), float(row["blocks_ms"])
        built, depth = int(row["blocks_measured"]), int(row["blocks"])
        if row["what"] == "default":
            first = float(row["first_ms"])
            reckoned = total - blocks + first + (depth - 1) * (blocks - first) / (built - 1)
            assert 0 < first < blocks
        else:
            reckoned = total + (depth / built - 1) * blocks
            assert row["first_ms"] == ""
        assert 0 < blocks < total and float(row["step_s"]) == pytest.approx(reckoned / 1e3)
        assert (row["error"] != "") == (row["what"] in ("dense", "default", "none")) and not row["note"]
    assert [row["blocks_measured"] for row in rows[2:4]] == ["2", "1"]

    import table
    lines = table.steps_table(rows)
    assert lines[1][:2] == ["HunyuanVideo 1.5, small", "SSTA by default"] and len(lines) == 28
    assert lines[4][:2] == ["HunyuanVideo 1.5, small", "unmodified diffusers"] and lines[4][3] == "1 of 4"
    pytest.importorskip("matplotlib")
    import plots
    axes = plots.plot_pipeline(rows).axes
    assert [bar.get_width() for bar in axes[1].patches] == [float(row["step_s"]) for row in rows[9:18]]


def test_the_default_is_measured_as_apply_ssta_has_it(bench):
    """Its first layer is dense, the others are sparse, and a step is reckoned from one dense block and sparse ones."""
    shape = bench.MODELS[1]
    model = bench.prepared(shape, shape.build("cpu", torch.float32), "default")
    processors = [site.module.processor for site in bench.family_of(model).sites(model)]
    assert [processor.config for processor in processors] == [None, bench.family_of(model).default_config()]
    watch = bench.BlockWatch(model)
    model(**shape.call("cpu", torch.float32))
    assert 0 < watch.first_median(1) < watch.median(1)
    assert bench.step_seconds(shape, 2, 100.0, 90.0, 70.0) == pytest.approx((10 + 70 + (shape.depth - 1) * 20) / 1e3)
    assert bench.step_seconds(shape, 2, 100.0, 90.0) == pytest.approx((10 + shape.depth * 45) / 1e3)


def test_a_model_with_fewer_blocks_shares_its_weights(bench):
    model = bench.MODELS[0].build("cpu", torch.bfloat16)
    one = bench.twin(model, 1)
    assert len(one.transformer_blocks) == 1 and len(model.transformer_blocks) == 2
    assert {id(x) for x in one.parameters()} < {id(x) for x in model.parameters()}
    wan = bench.MODELS[1].build("cpu", torch.bfloat16)
    assert {wan.blocks[0].scale_shift_table.dtype, wan.rope.freqs_cos.dtype, wan.blocks[0].attn1.to_q.weight.dtype} == {
        torch.float32, torch.bfloat16}, "in the dtypes that from_pretrained gives them"


def test_a_wrong_processor_gets_no_time(bench, monkeypatch, capsys):
    from ssta.pipelines.patch import streams

    rope = streams.apply_rope
    monkeypatch.setattr(streams, "apply_rope", lambda x, cos, sin: rope(x, cos, -sin) if x.shape[1] > 10 else x)
    monkeypatch.setattr(streams, "_by_kernel", lambda *of: False)
    with pytest.raises(SystemExit, match="Wan 2.1, small, dense, is wrong: the first block's attention is off by .*; no time is printed"):
        bench.main(["--model", "wan", "--only", "stock", "dense"])
    assert "_ms" not in capsys.readouterr().out


def test_what_does_not_fit_into_memory_is_named(bench, monkeypatch):
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    def too_large(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB")

    monkeypatch.setattr(WanAttnProcessor, "__call__", too_large)
    stock, *_ = bench.measure_model(bench.MODELS[1], ["stock"], 1, "cpu")
    assert stock["note"] == "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 64 GiB" and stock["step_s"] == ""
