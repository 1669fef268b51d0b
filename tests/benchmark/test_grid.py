"""Quality against time: the layer in the configurations of the quality grid, its join with their samples, and captures of real heads."""

import dataclasses

import numpy
import pytest
import torch
from quality_tables import FEW_STEPS_ENTRIES, PRESET_ENTRIES
from rows import read_rows

# A row of the main README.
DROPPED = "dropped 0.156, tile 4x4x8"

@pytest.fixture
def bench(monkeypatch, tmp_path):
    import bench_grid

    monkeypatch.setattr(bench_grid, "RESULTS", tmp_path)
    return bench_grid


def test_a_layer_in_the_configurations_of_the_grid(bench, tmp_path, monkeypatch, capsys):
    bench.main(["--only", "linear 0.156, warm-up", "linear 0.156, tile", "linear 1", "dropped 0.156, tile", "--csv", "grid_a"])
    rows = read_rows(tmp_path / "grid_a.csv")
    # What has no density, or leaves nothing out, is not there; what differs in its schedule alone is one call.
    assert [row["name"] for row in rows] == ["dense", "linear 0.156, warm-up 15 %", "dropped 0.156, tile 1x4x4",
                                             "linear 0.156, tile 1x4x4", "linear 0.156, tile 1x4x4, warm-up 15 %",
                                             "linear 0.156, tile 1x4x4, window 3x3x3",
                                             "linear 0.156, tile 1x4x4, first layer dense", "linear 0.156, tile 1x2x4"]
    of = {row["name"]: row for row in rows}
    assert of["dropped 0.156, tile 1x4x4"]["tile"] == "1x4x4" and of["dropped 0.156, tile 1x4x4"]["compensation"] == "none"
    plain, warm = of["linear 0.156, tile 1x4x4"], of["linear 0.156, tile 1x4x4, warm-up 15 %"]
    assert warm["median_ms"] == plain["median_ms"] and warm["density"] == "0.156" and float(warm["error"]) < 1e-4
    assert float(warm["relative"]) == pytest.approx(float(warm["median_ms"]) / float(of["dense"]["median_ms"]))
    monkeypatch.setattr(bench, "ssta_attention", lambda q, *args, real=bench.ssta_attention, **options: spoiled(real(q, *args, **options)))
    with pytest.raises(SystemExit, match="no time is printed"):
        bench.main(["--only", "dropped 0.3"])
    with pytest.raises(SystemExit):
        bench.main(["--only", "everything"])
    assert "--only must be part of one of" in capsys.readouterr().err


def spoiled(result):
    return (result[0] * 1.01, result[1]) if isinstance(result, tuple) else result * 1.01


@pytest.fixture
def measured(tmp_path):
    """CSVs of two trained models and of a layer: dropped, linear, linear with half of its pairs dense, and one model's configuration."""
    import measure

    def sample(name, psnr, density, seed=0):
        return dict(what="sample", group="", name=name, clips="film", train_seed=seed, density=density, psnr=psnr, ssim=0.9, loss_above=1.0,
                    velocity_error=0.1, psnr_spread=1.0, ssim_spread=0.1, videos=8, seeds=1, steps=30)

    def layer(name, relative, compensation="linear", density=0.156, overall=None):
        return dict(layer="large", name=name, tile="4x8x8", density=density, compensation=compensation, median_ms=100 * relative,
                    relative=relative, overall=overall or relative)

    measure.write_rows(tmp_path / "quality_card.csv", [
        sample(name, psnr + seed, density, seed) for seed in (0, 1) for name, psnr, density in (
            ("dropped 0.156", 18.0, 0.15), (DROPPED, 17.0, 0.15), ("linear 0.156", 27.0, 0.16), (PRESET_ENTRIES["near"], 26.0, 0.578),
            ("dense, backend cudnn", 64.0, 1.0))] + [sample("linear 2 parts 0.156", 29.0, 0.156)])
    measure.write_rows(tmp_path / "grid_card.csv", [
        layer("dense", 1.0, "", 1.0), layer("dropped 0.156", 0.2, "none"), layer(DROPPED, 0.22, "none"), layer("linear 0.156", 0.24),
        layer(PRESET_ENTRIES["near"], 0.24, overall=0.62), layer("linear 2 parts 0.156", 0.26, "linear 2 parts"), layer("linear 0.3", 0.3)])
    return tmp_path


def test_time_over_all_steps_counts_the_dense_ones(measured):
    import table
    from bench_grid import overall
    from quality_grid import Entry

    from ssta.pipelines import Schedule

    assert overall(Entry("", "", schedule=Schedule(dense_layers=(0,))), [1.0, 0.2, 0.3]) == pytest.approx(1 / 54 + 53 / 54 * 0.5)

    text = "<!-- table:samples -->\n<!-- /table -->\n<!-- table:equal_time -->\n<!-- /table -->\n"
    samples, equal_time = table.filled(text, measured).split("<!-- /table -->\n")[:2]
    assert "| preset \"near\" | 57.8% | 0.620 | 26.5 (26.0 to 27.0) |" in samples
    assert "| PSNR, dB (range of 2 trainings) |" in samples
    assert "| as many pairs, the others dropped | 15.0% | 0.220 | 17.5 (17.0 to 18.0) |" in samples
    assert "| dense, computed by another kernel | 100.0% | 1.00 | 64.5 (64.0 to 65.0) |" in samples
    assert "| linear 2 parts 0.156 |" not in equal_time, "measured on one model alone"
    assert [line.split(" | ")[0] for line in equal_time.splitlines()[3:7]] == [
        "| dropped 0.156", f"| {DROPPED}", "| linear 0.156", f"| {PRESET_ENTRIES['near']}"]
    assert [line.endswith("| yes |") for line in equal_time.splitlines()[3:7]] == [True, False, True, False]
    (measured / "grid_card.csv").unlink()
    assert "720p" not in table.filled(text, measured)


def test_the_plot_names_the_best_for_their_time(measured, capsys):
    pytest.importorskip("matplotlib")
    import plots
    import table

    rows = [read_rows(measured / f"{name}_card.csv") for name in ("grid", "quality")]
    axes = plots.plot_equal_time(*rows).axes[0]
    assert [text.get_text() for text in axes.texts] == ["dropped 0.156", PRESET_ENTRIES["near"], "linear 0.156"]
    line = next(line for line in axes.lines if line.get_color() == "#999999")
    assert line.get_xydata().tolist() == [[0.2, 18.5], [0.24, 27.5]]
    table.draw(measured, ["grid"])
    assert (measured / "grid_card.png").exists()
    (measured / "quality_card.csv").unlink()
    table.draw(measured, ["grid"])
    assert "drawn together with quality_*.csv of the same machine" in capsys.readouterr().out


def test_heads_are_captured_from_a_model_that_it_trains(tmp_path, monkeypatch, capsys):
    import capture
    import numpy as np
    from torch.nn.functional import scaled_dot_product_attention

    arguments = ["--minutes", "0.005", "--device", "cpu", "--out", str(tmp_path)]
    found = []
    monkeypatch.setattr(capture, "chosen", lambda layers, *rest, real=capture.chosen: found.append(layers) or real(layers, *rest))
    capture.main([*arguments, "--to", str(tmp_path / "deep" / "a.npz")])
    with np.load(tmp_path / "deep" / "a.npz") as file:
        held = {name: file[name] for name in file.files}
    assert held["q"].shape == held["v"].shape == (6, 256, 32) and held["thw"].tolist() == [4, 8, 8]
    assert held["noise"][0] > held["noise"][-1] and held["half_variance"][:3].tolist() == sorted(held["half_variance"][:3])
    # In its steps each is what went into attention: a sixteenth of a standard deviation off at most.
    for i, layers in ((0, found[0]), (5, found[1])):
        for name, x in zip("qkv", layers[held["layer"][i]]):
            exact = x[0, held["head"][i]].float().numpy()
            assert (abs(held[name][i] * held[f"{name}_step"][i] - exact) <= 0.5001 * held[f"{name}_step"][i]).all()
    with capture.Seen(5) as seen:
        q, k = torch.randn(2, 1, 1, 5, 4)
        scaled_dot_product_attention(q, k, value=k)
        scaled_dot_product_attention(q, k[:, :, :3], k[:, :, :3])
    assert len(seen.seen) == 1
    # Again from the checkpoint, without a training.
    capture.main([*arguments, "--to", str(tmp_path / "b.npz")])
    assert (tmp_path / "b.npz").read_bytes() and "training" in capsys.readouterr().out
    with np.load(tmp_path / "b.npz") as file:
        assert all((file[name] == held[name]).all() for name in held)
    (tmp_path / "model.pt").write_bytes(b"nothing")
    with pytest.raises(SystemExit):
        capture.main(arguments)
    assert "must be a file that this script wrote" in capsys.readouterr().err


def test_the_box_lies_in_the_middle():
    import capture

    x = torch.arange(4 * 6 * 8).unsqueeze(1)
    box = capture.boxed(x, (4, 6, 8), (2, 2, 4))[:, 0].unflatten(0, (2, 2, 4))
    assert box[0, 0, 0] == (1 * 6 + 2) * 8 + 2 and box[-1, -1, -1] == (2 * 6 + 3) * 8 + 5


def test_no_measured_configuration_beats_a_preset():
    """On no training another one is more than 0.5 dB nearer to the dense video in the same time or less."""
    from measure import RESULTS
    from quality_grid import FULL_TILES, grid
    from quality_tables import layer_times, samples_of

    from ssta.pipelines.schedule.presets import PRESETS

    models, samples = samples_of(read_rows(RESULTS / "quality_h200.csv"))
    times = layer_times(samples, read_rows(RESULTS / "grid_h200.csv"))
    psnr = {name: {(row["clips"], row["train_seed"]): float(row["psnr"]) for row in of} for name, of in samples.items()}
    entries = {entry.name: entry for entry in grid(FULL_TILES, gpu=True)}
    assert {*PRESET_ENTRIES, *FEW_STEPS_ENTRIES} == set(PRESETS) and len(models) >= 3 and len(times) > 50
    for preset, name in PRESET_ENTRIES.items():
        is_preset(preset, entries[name])
        for model in models:
            better = {other: of[model] for other, of in psnr.items()
                      if other in times and times[other] <= times[name] and of.get(model, 0) > psnr[name][model] + 0.5}
            assert not better, f"{preset}, {psnr[name][model]:.1f} dB at {times[name]:.3f}, on {model}"


def test_the_picture_shows_configurations_of_the_readme():
    from quality_grid import FULL_TILES, dense_entry, grid, shown_as
    from quality_tables import SAMPLES

    shown = {entry.name: entry.shown for entry in grid(FULL_TILES, gpu=True) if entry.shown}
    assert shown == shown_as(FULL_TILES.others[0]) and set(shown) <= set(SAMPLES)
    assert dense_entry(8).shown == "dense"


def test_the_picture_has_labels_that_can_be_read_in_a_fixed_order(tmp_path):
    import sheet
    from PIL import Image

    picture = sheet.Sheet(["first", "second"])
    for name, shade in (("second", 0.5), ("dense", 0.0), ("first", 1.0)):
        picture.add(name, [torch.full((3, 3, 40, 60), shade)])
    picture.save(tmp_path / "sheet.png")
    pixels = torch.from_numpy(numpy.array(Image.open(tmp_path / "sheet.png"))).float().mean(-1)
    rows = pixels.reshape(3, 40 + sheet.TITLE, 180)
    assert [round(float(row[sheet.TITLE:].mean()) / 255, 1) for row in rows] == [0.0, 1.0, 0.5]
    for row in rows:
        inked = (row[:sheet.TITLE] > 128).any(1).nonzero()
        assert int(inked[-1] - inked[0]) >= 14, "letters are at least so many pixels high"


def test_no_measured_configuration_beats_a_preset_for_few_steps():
    from measure import RESULTS
    from quality_grid import FULL_TILES, for_few_steps
    from quality_tables import few_steps_times

    rows, layers = read_rows(RESULTS / "few_steps_h200.csv"), read_rows(RESULTS / "grid_h200.csv")
    entries = {entry.name: entry for entry in for_few_steps(FULL_TILES)}
    for preset, (steps, name) in FEW_STEPS_ENTRIES.items():
        is_preset(preset, entries[name])
        times = few_steps_times(layers, steps)
        psnr = {row["name"]: float(row["psnr"]) for row in rows
                if row["what"] == "sample" and row["steps"] == str(steps) and row["name"] in times and row["psnr"]}
        assert len(psnr) > 30
        better = [other for other in psnr if times[other] <= times[name] and psnr[other] > psnr[name] + 0.5]
        assert not better, f"{preset}, {psnr[name]:.1f} dB at {times[name]:.3f}"


def is_preset(preset, entry):
    """That the preset of that name stands for this configuration, on the canvas on which it was measured."""
    from ssta.pipelines.families.wan import WAN
    from ssta.pipelines.patch.register import preset_settings

    config, schedule = preset_settings(WAN, preset)
    shape = config.for_canvas((12, 24, 40))
    assert abs(entry.config.density - shape.density) < 0.01 and entry.schedule == schedule
    assert entry.config == dataclasses.replace(shape, density=entry.config.density)
