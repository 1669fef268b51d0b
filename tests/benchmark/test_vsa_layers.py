"""bench_vsa.py: layers of both methods are checked before they are timed, forward and backward, beside their exact part."""


import pytest
import torch
from rows import read_rows
from torch.nn.functional import scaled_dot_product_attention


@pytest.fixture
def bench(monkeypatch, tmp_path):
    import bench_vsa

    monkeypatch.setattr(bench_vsa, "RESULTS", tmp_path)
    for name in ("LAYERS", "LAYERS_CPU"):
        monkeypatch.setattr(bench_vsa, name, tuple(bench_vsa.Layer(method, method, (5, 6, 7), 2, 32, 0.6) for method in ("vsa", "sla")) + (
            bench_vsa.Layer("before", "vsa", (5, 6, 7), 2, 32, 0.6, (70, 9)),))
    return bench_vsa


def test_every_part_is_checked_and_measured(bench, tmp_path):
    bench.main(["--rounds", "1", "--csv", "vsa"])
    rows = read_rows(tmp_path / "vsa.csv")
    parts = [("dense", "forward"), ("exact part", "forward"), ("exact part", "backward"), ("layer", "forward"), ("layer", "backward")]
    assert [(row["layer"], row["what"], row["direction"]) for row in rows] == [
        (name, *part) for name in ("vsa", "sla", "before") for part in parts]
    assert all(float(row["median_ms"]) > 0 and float(row["tflops"]) > 0 and not row["note"] for row in rows)
    assert all(0 <= float(row["error"]) < 1e-5 for row in rows if (row["what"], row["direction"]) == ("layer", "forward"))
    # 8 tiles, of which ceil(0.4 x 8) are kept: 15 to 64 of their tokens. 4 blocks of keys, of which int(0.4 x 4) is kept.
    densities = {row["layer"]: float(row["density"]) for row in rows if row["what"] == "layer"}
    assert 0.1 < densities["vsa"] < 0.95 and densities["sla"] == pytest.approx(64 / 210, rel=0.5)


def test_what_others_run_attends_to_the_same_pairs(bench, monkeypatch, tmp_path):
    """By what their lists and masks say, without a compiler."""
    scale = []

    def compiled(function, **options):
        def attend(q, k, v, block_mask, kernel_options):
            q_size, kv_size = block_mask.BLOCK_SIZE
            seen = block_mask.to_dense().bool().repeat_interleave(q_size, -2).repeat_interleave(kv_size, -1)
            seen = seen & block_mask.mask_mod(0, 0, torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2]))
            return scaled_dot_product_attention(q, k, v, seen, scale=scale[-1])
        return attend

    monkeypatch.setattr(torch, "compile", compiled)
    for right in (True, False):
        scale.append(None if right else 0.5)
        bench.main(["--rounds", "1", "--others", "--csv", "vsa"])
        rows = [row for row in read_rows(tmp_path / "vsa.csv") if row["impl"] == "FlexAttention"]
        assert [row["layer"] for row in rows] == ["vsa", "sla", "before"]
        assert all(bool(row["median_ms"]) == right and ("is wrong: off by" in row["note"]) != right for row in rows)


def test_a_wrong_layer_is_not_timed(bench, monkeypatch):
    real = bench.vsa_layer

    def wrong(*args, **options):
        result = real(*args, **options)
        result.out = result.out * 1.001
        return result

    monkeypatch.setattr(bench, "vsa_layer", wrong)
    with pytest.raises(SystemExit, match="vsa, head 0, block 0, is wrong: off by .*; no time is printed"):
        bench.main(["--rounds", "1", "--layer", "vsa"])


def test_arguments_are_checked(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--layer", "sora"])
    assert "--layer must be part of one of 'vsa', 'sla'" in capsys.readouterr().err
