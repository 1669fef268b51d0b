"""Few steps and chunk after chunk: what the small models are trained on, that it helps, and the rows that come of them."""


import pytest
import torch
from rows import read_rows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def gate_model(tmp_path_factory):
    """A toy that has learnt a little, and its file."""
    import gate
    from video_model import TOY, Checkpoint

    path = tmp_path_factory.mktemp("gate") / "model.pt"
    gate.recipe(TOY, 60, path, CPU)
    return Checkpoint.load(path), path


@pytest.fixture
def script(monkeypatch, tmp_path):
    def load(name):
        module = __import__(name)
        monkeypatch.setattr(module, "RESULTS", tmp_path)
        return module, tmp_path

    return load


def test_samples_of_few_steps_come_nearer_to_those_of_many(gate_model):
    import math

    from few_steps import Pairs, levels_of, reflow
    from sample_quality import Sampler
    from train_video import Plan

    checkpoint, _ = gate_model
    model, frozen = checkpoint.model(CPU), checkpoint.model(CPU).as_loaded(torch.float32)
    levels = levels_of(model, 2)
    assert levels.tolist() == sorted((Sampler(model, [0], 0, 2).times() / 1000).tolist())
    pairs = Pairs.of(frozen, 2, 2, 20)
    assert pairs.labels.tolist() == [0, 1, 2, 3] and not torch.equal(pairs.noise[0], pairs.noise[2])

    def off(of):
        latents = Sampler(of, [0, 1, 2, 3], 5, 2).sample()
        return float((latents - Sampler(frozen, [0, 1, 2, 3], 5, 20).sample()).norm())

    before = off(frozen)
    assert reflow(model, pairs, levels, Plan(math.inf, 60, rate=2e-3, small=0.0), "few") == 60
    assert off(model.as_loaded(torch.float32)) < 0.9 * before


def test_lines_are_what_generations_come_by(gate_model):
    from few_steps import FIRST_SEED, lines_of
    from sample_quality import Sampler, velocity

    frozen = gate_model[0].model(CPU).as_loaded(torch.float32)
    samples, sigma, noise, labels = lines_of(frozen, 2, 2, 3)
    assert labels.tolist() == [0, 1] * 3 + [2, 3] * 3
    sampler = Sampler(frozen, [2, 3], FIRST_SEED + 1, 3)
    x = sampler.noise
    for step, t in enumerate(sampler.times()):
        of = slice(6 + 2 * step, 8 + 2 * step)
        s = sigma[of].view(-1, 1, 1, 1, 1)
        v = velocity(frozen, x, t, sampler.condition)
        torch.testing.assert_close((1 - s) * samples[of] + s * noise[of], x, rtol=0, atol=1e-4)
        torch.testing.assert_close(noise[of] - samples[of], v, rtol=0, atol=1e-4)
        x = sampler.scheduler.step(v, t, x, return_dict=False)[0]


def test_velocities_come_nearer_to_those_of_lines(gate_model):
    """Of generations from other noise, after weights were disturbed."""
    import math

    from few_steps import distil, lines_of
    from train_video import Plan

    frozen, model = gate_model[0].model(CPU).as_loaded(torch.float32), gate_model[0].model(CPU)
    torch.manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.05 * x.std(correction=0) * torch.randn_like(x))
    samples, sigma, noise, labels = lines_of(frozen, 6, 4, 4)

    @torch.no_grad()
    def off():
        s = sigma[-16:].view(-1, 1, 1, 1, 1)
        found = model((1 - s) * samples[-16:] + s * noise[-16:], sigma[-16:], model.condition(labels[-16:]))
        return float((found - (noise - samples)[-16:]).square().mean())

    before = off()
    assert distil(model, tuple(x[:-16] for x in (samples, sigma, noise, labels)), Plan(math.inf, 40, rate=1e-3, small=0.0), "few") == 40
    assert off() < 0.75 * before


def test_rows_of_fine_tuning_for_few_steps(gate_model, script):
    from quality_tables import few_fine_tune_table

    bench, results = script("bench_few_steps")
    bench.main(["--checkpoint", str(gate_model[1]), "--device", "cpu", "--fine-tune", "--train-steps", "2", "--generations", "2",
                "--csv", "few_fine_tune_mine"])
    _, *rows = read_rows(results / "few_fine_tune_mine.csv")
    assert [row["name"] for row in rows] == [f"{name}, {how}" for name in ("linear 0.15, tile 1x4x4", "linear 2 parts 0.15, tile 1x4x4")
                                             for how in ("before", "distilled")]
    assert [line[0] for line in few_fine_tune_table(rows)[1:]] == [row["name"] for row in rows]
    for before, after in zip(rows[::2], rows[1::2]):
        left = float(after["velocity_error"]) / float(before["velocity_error"])
        assert float(after["gap_closed"]) == pytest.approx(100 * (1 - left**2)) and after["psnr"]


@pytest.mark.slow
def test_rows_of_few_steps(gate_model, script):
    bench, results = script("bench_few_steps")
    arguments = ["--checkpoint", str(gate_model[1]), "--device", "cpu", "--train-steps", "2", "--pairs", "2", "--csv", "few_steps_mine"]
    bench.main([*arguments, "--only", "linear 2 parts 0.3, tile 1x4x4"])
    rows = read_rows(results / "few_steps_mine.csv")
    names = ["linear 2 parts 0.3, tile 1x4x4", "linear 2 parts 0.3, tile 1x4x4, first layer dense",
             "linear 2 parts 0.3, tile 1x4x4, warm-up one step, first layer dense"]
    assert [(row["steps"], row["what"], row["name"]) for row in rows] == [
        (steps, *of) for steps in ("4", "8")
        for of in (("sample", "dense"), ("few steps", "before"), ("few steps", "after"), *(("sample", name) for name in names))]
    assert all(row["psnr"] and not row["note"] for row in rows if row["name"] != "dense")
    plain, layer, step = (float(row["density"]) for row in rows[3:6])
    # One layer of two, and one step of four.
    assert layer == pytest.approx((1 + plain) / 2, abs=0.01) and step == pytest.approx(0.25 + 0.75 * layer, abs=0.01)


def test_training_on_all_chunks_at_once_is_what_a_roll_out_does(gate_model):
    """The velocities of the last chunk after clean ones, from one forward of all of them and through dense caches."""
    import chunk_model
    from chunk_model import CHUNKS, Rollout, chunk_loss, chunked

    from ssta import SSTAConfig

    checkpoint, _ = gate_model
    rollout = Rollout(checkpoint.model(CPU).as_loaded(torch.float32), [1], 0, CHUNKS)
    latents = rollout.sample(SSTAConfig(tile_thw=(1, 4, 4), density=1.0), 3)
    seen = []

    class Noted(Rollout):
        def _velocity(self, x, sigma, dtype):
            seen.append((self.model.dit.rope.first, x, float(sigma), super()._velocity(x, sigma, dtype)))
            return seen[-1][3]

    again = Noted(checkpoint.model(CPU).as_loaded(torch.float32), [1], 0, CHUNKS)
    assert torch.equal(again.sample(SSTAConfig(tile_thw=(1, 4, 4), density=1.0), 3), latents)
    first, x, sigma, velocity = [of for of in seen if of[2] > 0][-1]
    assert first == CHUNKS - 1
    # The loss of these latents where the noise is such that the mixture is x: its root is the distance of the velocity to noise - latents.
    noise = latents.clone()
    noise[:, :, -1:] = (x - (1 - sigma) * latents[:, :, -1:]) / sigma
    model = chunked(checkpoint.model(CPU))
    found = chunk_loss(model, latents, torch.tensor([[0.0] * (CHUNKS - 1) + [sigma]]), noise, rollout.condition)
    expected = (velocity - (noise - latents)[:, :, -1:]).square().mean()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert chunk_model.after_clean_ones(torch.ones(64, CHUNKS), torch.Generator().manual_seed(0)).sum(1).unique().tolist() == [1, 2, 3, 4]


@pytest.mark.slow
def test_rows_of_chunks(gate_model, script):
    bench, results = script("bench_rollout")
    bench.main(["--checkpoint", str(gate_model[1]), "--device", "cpu", "--train-steps", "2", "--few-steps", "2", "--chunks", "2",
                "--csv", "rollout_mine", "--only", "0.15"])
    rows = read_rows(results / "rollout_mine.csv")
    assert [row["chunk"] for row in rows] == [*"12"] * 6
    assert list(dict.fromkeys(row["name"] for row in rows)) == ["dropped 0.15", "linear 0.15", "linear 2 parts 0.15"]
    of = {(row["steps"], row["name"], row["chunk"]): float(row["psnr"]) for row in rows}
    for steps in ("30", "4"):
        assert 80 > of[steps, "linear 0.15", "2"] > of[steps, "dropped 0.15", "2"] > 10
