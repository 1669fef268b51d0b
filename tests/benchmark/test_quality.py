"""bench_quality.py: the model learns, samples are held against dense ones of the same noise, and checkpoints carry all that is needed."""

import re
from dataclasses import replace

import pytest
import torch
from rows import read_rows

TINY = ["--minutes", "0.01", "--videos", "2", "--seeds", "2", "--steps", "3", "--device", "cpu"]


@pytest.fixture
def bench(monkeypatch, tmp_path):
    import bench_quality

    monkeypatch.setattr(bench_quality, "RESULTS", tmp_path / "results")
    return bench_quality


@pytest.fixture(scope="module")
def trained():
    """A finished checkpoint, its clips and the loss before and after."""
    import bench_quality
    from train_video import Plan, train
    from video_model import TOY

    clips = bench_quality.load_clips(None, TOY, 0, torch.device("cpu"))
    checkpoint = bench_quality.untrained(TOY, clips, 0)
    model = checkpoint.model("cpu")
    # Of zeros nothing would depend on attention.
    train(model, checkpoint.patches("cpu"), clips.train, Plan(1000, steps=60, rate=3e-3), "training")
    checkpoint.keep(model, 1.0, 60, True)
    return checkpoint, clips


# The whole of it


@pytest.mark.slow
def test_end_to_end_and_again_from_the_checkpoint(bench, tmp_path):
    out = tmp_path / "out"
    only = ["--only", "dense, ", "0.156, warm", "linear 1"]
    bench.main([*TINY, *only, "--out", str(out), "--csv", "quality_mine", "--fine-tune", "--fine-tune-seconds", "0.2",
                "--fine-tune-loss", "diffusion", "distill"])
    rows = read_rows(out / "quality.csv")
    assert rows == read_rows(tmp_path / "results" / "quality_mine.csv")
    samples = {row["name"]: row for row in rows if row["what"] == "sample"}
    assert not any(row["note"] for row in rows)
    assert float(samples["dense, diffusers' own processors"]["psnr"]) > 90 and float(samples["linear 1"]["psnr"]) > 90
    assert float(samples["dense, other noise"]["psnr"]) < 30
    # 1 of 3 steps is dense; 8 tiles in each of 8 rows make 64 pairs, of which whole tiles can be 9 or 10.
    warm = samples["dropped 0.156, warm-up 15 %"]
    assert float(warm["density"]) == pytest.approx((1 + 2 * 0.1406) / 3, abs=0.01)
    assert float(warm["velocity_0"]) < 1e-5 < float(warm["velocity_100"])
    assert [row["name"] for row in rows if row["what"] == "fine-tune"] == [
        f"{way} 0.15, {when}" for when in ("before", "trained densely", "trained through it", "distilled") for way in ("dropped", "linear")]
    assert all(float(row["velocity_error"]) > 0 for row in rows if row["name"].endswith((", before", ", distilled")))
    assert (out / "sheet.jpg").stat().st_size > 1000

    again = tmp_path / "again"
    bench.main([*TINY, "--only", "0.156, warm", "linear 1", "--out", str(again), "--checkpoint", str(out / "model.pt")])
    same, found = [name for name in rows[0] if name not in ("date", "commit")], read_rows(again / "quality.csv")
    assert found and [[row[name] for name in same] for row in found] == [[samples[row["name"]][name] for name in same] for row in found]


def test_distillation_brings_velocities_to_the_teacher_s(trained):
    from quality_grid import TOY_TILES, kept
    from train_video import Plan, train

    from ssta.pipelines import Schedule, apply_ssta, teacher_student

    checkpoint, clips = trained
    model, teacher, losses = checkpoint.model("cpu"), checkpoint.model("cpu").requires_grad_(False), []
    with apply_ssta(model.dit, kept(TOY_TILES.main, 0.15), schedule=Schedule()):
        both = teacher_student(model, teacher)

        def noted(*args):
            velocities = both(*args)
            losses.append(float((velocities.student - velocities.teacher).detach().square().mean()))
            return velocities

        train(model, checkpoint.patches("cpu"), clips.train, Plan(1000, steps=30, rate=1e-3, small=0.0), "distilling", velocities=noted)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_training_goes_on_where_it_was_stopped(bench, tmp_path, monkeypatch, capsys):
    plans = []

    def stopped(model, autoencoder, clips, plan, what, save):
        plans.append(plan)
        save(5)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "train", stopped)
    monkeypatch.setattr(bench.time, "perf_counter", iter(range(0, 1000, 3)).__next__)
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--minutes", "1", "--train-seed", "2"]
    with pytest.raises(KeyboardInterrupt):
        bench.main(arguments)
    with pytest.raises(KeyboardInterrupt):
        bench.main(arguments)
    assert [plan.begun for plan in plans] == [0, pytest.approx(3 / 60)] and plans[1].seconds == 57
    kept = bench.Checkpoint.load(tmp_path / "model.pt")
    assert (kept.steps, kept.complete, kept.train_seed) == (10, False, 2)
    for wrong, message in ((["--train-seed", "3"], "--train-seed must be 2, as in the checkpoint .*, got 3"),
                           (["--head-dim", "64", "--train-seed", "2"], "--head-dim must be 32, as in the checkpoint .*, got 64")):
        with pytest.raises(SystemExit):
            bench.main([*arguments[:6], *wrong])
        assert re.search(message, capsys.readouterr().err)


def test_arguments_that_make_no_sense(bench, tmp_path, capsys):
    (tmp_path / "model.pt").write_bytes(b"nothing of ours")
    for wrong, message in ((["--checkpoint", str(tmp_path / "model.pt")], "must be a file that this script wrote, got one that cannot"),
                           (["--clips", str(tmp_path / "none"), "--out", str(tmp_path / "new")], "--clips must be a folder of videos"),
                           (["--minutes", "0"], "must be a positive number, got 0"), (["--videos", "0"], "must be at least 1, got 0"),
                           (["--head-dim", "48"], "invalid choice")):
        with pytest.raises(SystemExit):
            bench.main([*wrong, "--device", "cpu"])
        assert message in capsys.readouterr().err


# Model and training


def test_the_autoencoder_keeps_what_its_channels_allow(trained):
    from video_model import PatchAutoencoder, pixels

    checkpoint, clips = trained
    video = pixels(clips.held[0].take(*checkpoint.size.pixels)[None])

    def error(channels):
        autoencoder = PatchAutoencoder.fit(clips.train, channels, torch.Generator().manual_seed(0))
        back = autoencoder.decode(autoencoder.encode(video))
        return float((back - (video.transpose(1, 2) / 2 + 0.5)).square().mean())

    errors = [error(channels) for channels in (4, 32, 768)]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-6, "all channels lose nothing"


def test_training_learns_and_repeats(trained):
    from sample_quality import Sampler, held_out_loss
    from train_video import Plan, train

    checkpoint, clips = trained

    def loss(model):
        return held_out_loss(Sampler(model.eval(), [0], 0, 10), checkpoint.held.float())

    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        model = type(checkpoint.model("cpu"))(checkpoint.size, len(checkpoint.clips))
        before = loss(model)
        assert train(model, checkpoint.patches("cpu"), clips.train, Plan(1000, steps=20, rate=3e-3), "training") == 20
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()))
        assert loss(model) < before
    assert torch.equal(*weights)
    assert loss(checkpoint.model("cpu")) < 0.9 * before, "of the trained one"


def test_a_checkpoint_holds_everything(trained, tmp_path):
    from video_model import Checkpoint

    checkpoint, _ = trained
    checkpoint.save(tmp_path / "deep" / "model.pt")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model.pt"]
    loaded = Checkpoint.load(tmp_path / "deep" / "model.pt")
    for name, value in vars(checkpoint).items():
        held = getattr(loaded, name)
        if isinstance(value, dict):
            assert value.keys() == held.keys() and all(torch.equal(value[key], held[key]) for key in value)
        else:
            assert torch.equal(held, value) if isinstance(value, torch.Tensor) else held == value
    model = loaded.model("cpu")
    assert sum(x.numel() for x in model.parameters()) == sum(x.numel() for x in checkpoint.state.values() if x.numel())


def test_labels_are_all_sampled_and_neighbours_differ():
    from video_model import label_order

    for count in (1, 2, 5, 12):
        assert sorted(label_order(count)) == list(range(count))
    assert label_order(12)[:4] == [0, 6, 1, 7] and label_order(5)[:2] == [0, 3]


# Samples and their measures


def test_what_a_sample_is_held_against(trained):
    from sample_quality import Reference, Sampler, Trajectory, mean_and_spread

    checkpoint, _ = trained
    model = checkpoint.model("cpu").as_loaded(torch.float32)
    one, both = Sampler(model, [0], 5, 3), Sampler(model, [0, 1], 5, 3)
    assert torch.equal(one.noise[0], both.noise[0])
    trajectory = Trajectory(both, 1)
    latents = both.sample(seen=trajectory.keep)
    torch.testing.assert_close(one.sample()[0], latents[0], atol=1e-4, rtol=1e-4)
    calls = []
    assert max(trajectory.follow(lambda: calls.append(1))) < 1e-5 and len(calls) == 3
    reference = Reference(latents, checkpoint.patches("cpu"))
    same, near, far = (reference.compare(latents + scale * torch.randn_like(latents)) for scale in (0, 0.02, 0.2))
    for i in range(2):
        assert same[i]["psnr"] == float("inf") and same[i]["ssim"] == pytest.approx(1) and same[i]["latent_error"] == 0
        assert near[i]["psnr"] > far[i]["psnr"] and near[i]["ssim"] > far[i]["ssim"]
        assert 0 < near[i]["latent_error"] < far[i]["latent_error"]
    assert mean_and_spread([1.0, 3.0]) == (2.0, pytest.approx(2**0.5)) and mean_and_spread([2.0]) == (2.0, "")
    assert mean_and_spread([float("inf")] * 2) == (float("inf"), "") and mean_and_spread([]) == ("", "")


def test_one_that_cannot_run_says_why(trained, tmp_path, monkeypatch):
    import measure_quality
    from quality_grid import TOY_TILES, grid

    checkpoint, _ = trained
    bench = measure_quality.Bench(checkpoint, torch.device("cpu"), 1, 1, 2, [tmp_path / "a.csv"])
    bench.dense()
    entry = next(entry for entry in grid(TOY_TILES, gpu=False) if entry.group == "dropped")

    def broken(self, *arguments):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr("ssta.pipelines.patch.processor.SSTAProcessor._attend_sparsely", broken)
        bench.measure(entry)
    bench.measure(replace(entry, name="well"))
    failed, well = read_rows(tmp_path / "a.csv")[1:]
    assert failed["note"] == "failed: RuntimeError: out of luck" and not failed["psnr"] and well["psnr"] and not well["note"]


def test_the_grid_is_data():
    from quality_grid import FULL_TILES, TOY_TILES, dense_entry, fine_tuned, grid
    from video_model import FULL, TOY

    for size, tiles in ((FULL, FULL_TILES), (TOY, TOY_TILES)):
        for tile in (tiles.main, *tiles.others):
            assert not any(tokens % of for tokens, of in zip(size.canvas, tile)), "no partial tiles"
        for gpu in (False, True):
            groups = {entry.group for entry in grid(tiles, gpu)}
            assert groups >= {"dense", "dropped", "linear", "linear 2 parts", "warm-up", "window", "tiles"}
        assert fine_tuned(tiles.main)
    assert dense_entry(3).schedule.dense_layers == (0, 1, 2)


def test_the_plot_shows_every_sample(trained):
    pytest.importorskip("matplotlib")
    import plots

    def row(name, density, psnr, group="dropped", seed="0"):
        where = dict(device="Card", torch="2", triton="3", commit="abc", date="2026-01-02")
        return dict(what="sample", group=group, name=name, density=str(density), psnr=str(psnr), psnr_spread="0.5",
                    ssim="0.9", ssim_spread="", clips="film", train_seed=seed, videos="2", seeds="1", steps="3", **where)

    # Of the first one on two models; their mean is shown.
    rows = [row("dense", 1, "", "dense"), row("a", 0.1, 18), row("a", 0.1, 22, seed="1"), row("b", 0.2, 19), row("c", 0.3, 30)]
    axes = plots.plot_quality(rows).axes
    assert axes[0].lines[-1].get_xydata().tolist() == [[0.1, 20], [0.2, 19], [0.3, 30]]


def test_an_entry_says_what_each_step_has():
    from quality_grid import Entry, kept

    from ssta.pipelines import Schedule

    low, high = kept((2, 4, 4), 0.1), kept((2, 4, 4), 0.3)
    assert Entry("", "", low, Schedule(dense_steps=0.1), later=(0.5, high)).configs(10) == [None, *[low] * 4, *[high] * 5]
    assert Entry("", "", low, later=(0.9, None)).configs(10) == [*[low] * 9, None]
    assert Entry("", "", low).configs(3) == [low] * 3


def test_another_configuration_from_a_step_on(trained):
    """Half of the steps dense gives the dense velocities there, and the sparse ones before."""
    import torch
    from measure_quality import Bench
    from quality_grid import Entry, kept

    checkpoint, tile = trained[0] if isinstance(trained, tuple) else trained, (2, 4, 4)
    bench = Bench(checkpoint, torch.device("cpu"), 1, 1, 4, [])
    bench.dense()
    sparse = kept(tile, 0.2)
    for entry in (Entry("", "sparse", sparse), Entry("", "later", sparse, later=(0.5, None))):
        bench.measure(entry)
    one, other = bench.rows[-2:]
    assert one["velocity_0"] == other["velocity_0"] > 0 and one["velocity_100"] > 10 * other["velocity_100"]

