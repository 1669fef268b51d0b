"""What is made of measurements: spreads, paired differences, the table, the record and the scatter."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from ssta import SSTAConfig
from ssta.pipelines import Schedule
from ssta.pipelines.evaluation.configurations import Configuration
from ssta.pipelines.evaluation.record import Clip, Measurement, plain
from ssta.pipelines.evaluation.scatter import plot_evaluation
from ssta.pipelines.evaluation.table import Evaluation, Spread

CLIPS = [Clip("a cat", 0), Clip("a cat", 1), Clip("a dog", 0, "dog.png")]


def made(measurements: dict[str, list[Measurement]], clips=CLIPS, **settings) -> Evaluation:
    configurations = {name: plain(Configuration(name, None if name == "stock" else SSTAConfig(), Schedule())) for name in measurements}
    common = {"schema": "ssta.compare/2", "model": "some/model", "pipeline": "P", "transformers": ["T"], "dtype": "bfloat16",
              "device": "cpu", "versions": {"ssta": "1"}, "call": {"num_inference_steps": 4}, "reference": "dense",
              "configurations": configurations}
    return Evaluation(common | settings, {name: dict(zip(clips, found)) for name, found in measurements.items()})


def measured(psnr: float, seconds: float = 1.0, **others) -> Measurement:
    return Measurement(seconds, 4 * seconds, psnr=psnr, latent_difference=1 / psnr, **others)


DENSE = [replace(measured(1.0, 2.0, dense_kernels=("hopper",), density=1.0, canvas=(3, 6, 8)), psnr=None, latent_difference=None)] * 3


@pytest.fixture
def evaluation() -> Evaluation:
    return made({"dense": DENSE, "stock": [measured(60.0, 2.5)] * 3,
                 "a": [measured(30.0, 0.5, exact_mass=(0.9, 0.5, 0.25), density=0.2), measured(33.0, 0.5), measured(36.0, 1.0)],
                 "b": [measured(29.0), measured(35.0), measured(34.0)]})


# Numbers


def test_a_spread_is_mean_deviation_and_standard_error():
    assert Spread.of([1.0, 2.0, 3.0]) == Spread(2.0, 1.0, 1 / math.sqrt(3), 3)
    assert Spread.of([4.0]) == Spread(4.0, None, None, 1) and Spread.of([]) is None
    assert Spread.of([math.inf, 1.0]) == Spread(math.inf, None, None, 2)


def test_pairs_are_of_the_same_clips_and_turn_with_their_order(evaluation):
    pair, turned = evaluation.pair("a", "b", "psnr"), evaluation.pair("b", "a", "psnr")
    # +1, -2 and +2 dB: much less spread than either configuration has over its clips.
    assert (pair.difference.mean, pair.difference.deviation) == (pytest.approx(1 / 3), pytest.approx(math.sqrt(13 / 3)))
    assert pair.better == 2
    assert (turned.difference.mean, turned.difference.error, turned.better) == (-pair.difference.mean, pair.difference.error, 1)
    # Less is better of the latents' difference and of seconds.
    assert evaluation.pair("a", "b", "latent_difference").better == 2 and evaluation.pair("a", "b", "seconds").better == 2
    # The order in which clips came is nothing, and a clip that one of them has not is left out.
    shuffled = made({"dense": DENSE, "a": list(evaluation.measurements["a"].values()), "b": []})
    shuffled.measurements["b"].update({clip: evaluation.measurements["b"][clip] for clip in (CLIPS[2], CLIPS[0])})
    assert shuffled.pair("a", "b", "psnr").difference == Spread.of([1.0, 2.0])
    assert evaluation.pair("a", "b", "lpips") is None
    assert [(pair.first, pair.second) for pair in evaluation.pairs()][::3] == [("stock", "a"), ("stock", "b"), ("a", "b")]


def test_speed_up_is_paired_too(evaluation):
    assert list(evaluation.values("a", "speed_up").values()) == [4.0, 4.0, 2.0]
    assert evaluation.spread("dense", "speed_up") == Spread(1.0, 0.0, 0.0, 3)


def test_the_table(evaluation):
    head, dense, stock, a, b = str(evaluation).split("\n\n")[0].splitlines()
    assert head.split()[:6] == ["configuration", "dense", "steps", "by", "clips", "density"] and "PSNR, dB" in head
    assert dense.split()[:4] == ["dense", "hopper", "3", "100.0%"] and dense.endswith("-")
    assert "90.0% (25.0%)" in a and "33.00 ± 1.73" in a and "3.33 ± 0.67" in a and stock.split()[1] == "-"
    pairs = str(evaluation).split("\n\n")[1].splitlines()
    assert pairs[0].startswith("paired difference") and pairs[3].startswith("(a) - (b)") and "+0.33 ± 1.20  2 of 3" in pairs[3]
    alone = str(made({"dense": DENSE[:1], "stock": [Measurement(1.0, 4.0, latent_difference=0.0, psnr=math.inf)]}))
    assert "±" not in alone and "paired" not in alone and "stock gave exactly what dense did" in alone and "inf" in alone
    assert "gave exactly" not in str(evaluation)


# JSON


@pytest.mark.parametrize("value", [measured(30.0, exact_mass=(0.9, 0.5, 0.25), kernels=("hopper", "triton"), canvas=(1, 2, 3)),
                                   Measurement(1.0, 2.0, psnr=math.inf)])
def test_measurements_come_back(value):
    assert Measurement.of(json.loads(json.dumps(plain(value), allow_nan=False))) == value


def test_older_measurements_come_back():
    """Those that were written before a field was there."""
    older = {name: value for name, value in plain(measured(30.0, without_estimate=0.5)).items() if name != "without_estimate"}
    assert Measurement.of(older) == measured(30.0)


def test_what_json_cannot_hold_is_named():
    import torch
    from PIL import Image

    tensor = torch.arange(6.0).view(2, 3)
    assert plain(tensor) == plain(tensor.T.contiguous().T) != plain(tensor + 1) and plain(tensor).startswith("tensor [2, 3] float32 ")
    assert plain(torch.zeros(0)).startswith("tensor [0]") and plain(tensor.bfloat16()).startswith("tensor [2, 3] bfloat16")
    red, blue = (plain(Image.new("RGB", (2, 3), colour)) for colour in ("red", "blue"))
    assert red.startswith("Image (2, 3) ") and red != blue
    assert plain({1: (math.nan, range(2), {"a": None})}) == {"1": ["nan", [0, 1], {"a": None}]}
    assert plain(math.sqrt).endswith("sqrt") and plain(object()) == "object"
    assert plain(SSTAConfig(topk=3))["topk"] == 3


def test_clips_have_names_of_their_own():
    names = {clip.name for clip in (*CLIPS, Clip(), Clip("a", 1), Clip("a" * 300), Clip("b" * 300), Clip("../etc", 0), Clip("caf\u00e9"))}
    assert len(names) == 9 and all(len(name) < 60 and "/" not in name for name in names)
    assert CLIPS[0].name == Clip("a cat", 0).name and CLIPS[0].name.startswith("a-cat-")


# The record


def test_a_record_says_everything(evaluation):
    record = json.loads(json.dumps(evaluation.record(), allow_nan=False))
    assert set(record) == {"schema", "model", "pipeline", "transformers", "dtype", "device", "versions", "call", "reference",
                           "configurations", "clips", "aggregates", "pairs"}
    assert [(clip["prompt"], clip["seed"], clip["image"]) for clip in record["clips"]] == [
        ("a cat", 0, None), ("a cat", 1, None), ("a dog", 0, "dog.png")]
    assert record["clips"][1]["results"]["a"]["psnr"] == 33.0 and record["configurations"]["a"]["config"]["tile_thw"] == [6, 8, 8]
    assert record["aggregates"]["a"]["psnr"] == {"mean": 33.0, "deviation": 3.0, "error": pytest.approx(math.sqrt(3)), "clips": 3}
    assert {"first": "a", "second": "b", "metric": "psnr", "better": 2} == {
        key: value for key, value in record["pairs"][-3].items() if key != "difference"} and "psnr" not in record["aggregates"]["dense"]


# The scatter


def test_the_scatter_has_a_point_for_each_configuration_and_a_line_for_the_floor(evaluation, tmp_path):
    axes, = plot_evaluation(evaluation, tmp_path / "scatter.svg").axes
    assert axes.get_xlabel() == "PSNR against dense, dB (more is better)" and (tmp_path / "scatter.svg").exists()
    points = {container.get_label(): container.lines[0].get_xydata()[0].tolist() for container in axes.containers}
    assert points == {"a": [33.0, pytest.approx(10 / 3)], "b": [pytest.approx(98 / 3), 2.0]}
    assert "stock (0.80 x)" in [line.get_label() for line in axes.lines]
    with_lpips = made({"dense": DENSE, "a": [replace(m, lpips=0.1) for m in evaluation.measurements["a"].values()]})
    assert plot_evaluation(with_lpips).axes[0].get_xlabel().startswith("LPIPS")
    latents = made({"dense": DENSE, "a": [replace(measured(30.0), psnr=None)]})
    assert plot_evaluation(latents).axes[0].get_xlabel().startswith("relative difference of the latents")
    with pytest.raises(ValueError, match="evaluation must have a configuration that was measured"):
        plot_evaluation(made({"dense": DENSE}))


@pytest.mark.parametrize("floor, arrow, far", [(110.0, "\u2192", True), (5.0, "\u2190", True), (40.0, "", False)])
def test_a_far_noise_floor_leaves_the_configurations_apart(evaluation, floor, arrow, far):
    own = {name: list(of.values()) for name, of in evaluation.measurements.items()}
    axes, = plot_evaluation(made(own | {"stock": [replace(of, psnr=floor) for of in own["stock"]]})).axes
    low, high = axes.get_xlim()
    assert (low <= floor <= high) is not far and low < 32.6 and high > 33
    # 33.0 and 32.7 are more than a fortieth of the axis apart, rather than a 200th of it.
    assert (33 - 98 / 3) / (high - low) > 1 / 40
    assert [text.get_text() for text in axes.texts] == [f"stock: {floor:.3g} {arrow}"] * far


def test_without_matplotlib_it_says_what_to_install(evaluation, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_evaluation(evaluation)
