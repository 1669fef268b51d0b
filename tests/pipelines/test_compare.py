"""The paired evaluation, end to end on tiny pipelines: clips, resuming, records, videos, and its command."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from tiny_hunyuan import SPARSE
from tiny_pipelines import PIPELINES, latents, wan_with_frames, wan_with_prompts

from ssta.pipelines import LayerRun, RunReport, Schedule, apply_ssta
from ssta.pipelines.evaluation import comparison
from ssta.pipelines.evaluation.compare import Clip, Configuration, Measurement, compare, dense, main, parse_configuration, read_prompts
from ssta.pipelines.patch.report import Stopwatch

STOCK = Configuration("stock", None)
CLIP = Clip()
SMALL = "topk=2,tile_thw=2x4x4,kernel_thw=1x1x1,dense_steps=0"
SIZE = ["--height", "96", "--width", "128", "--num-frames", "5", "--steps", "2", "--dtype", "float32"]
TIMES = ("seconds", "wall_seconds")


def timeless(measured: Measurement) -> Measurement:
    return replace(measured, seconds=0.0, wall_seconds=0.0)


def of(found, name: str, clip: Clip = CLIP) -> Measurement:
    return found.measurements[name][clip]


# Comparing


def test_every_configuration_starts_from_the_same_noise_and_leaves_nothing():
    tiny = PIPELINES["wan_2.2"]
    pipe = tiny.build()
    before = latents(pipe, **tiny.call)
    said = []
    sparse = Configuration("sparse", SPARSE, Schedule(dense_steps=0.25))
    clip = Clip(seed=2)
    found = compare(pipe, [dense(pipe), STOCK, sparse, replace(sparse, name="again")],
                    tiny.call | {"num_inference_steps": 4, "output_type": "latent"}, [clip], say=said.append)
    assert torch.equal(latents(pipe, **tiny.call), before)
    exact, stock, first, again = (of(found, name, clip) for name in ("dense", "stock", "sparse", "again"))
    assert timeless(first) == timeless(again)
    assert exact.latent_difference is None and stock.latent_difference < 1e-4 < first.latent_difference
    assert (exact.density, stock.density, stock.kernels, exact.canvas) == (1, None, (), (3, 6, 8))
    with apply_ssta(pipe, SPARSE, schedule=Schedule(dense_steps=0.25)) as handle:
        latents(pipe, **tiny.call)
        runs = handle.report()
        # Of four steps the first transformer takes two, of which one is dense.
        expected = sum((1 + run.density) / 2 if run.layer.startswith("transformer.") else run.density for run in runs) / 4
        assert first.density == pytest.approx(expected)
    assert all(0 < measured.seconds < measured.wall_seconds for measured in (exact, stock, first, again))
    assert not pipe.transformer._forward_hooks and not pipe.transformer_2._forward_pre_hooks
    assert said[:2] == ["dense: two steps to warm up", f"dense: generating {clip.name}"] and len(said) == 12
    assert re.fullmatch(rf"\[1/4\] dense: {clip.name} took [\d.]+ s; about [\d:]+ left", said[2]) and "[4/4]" in said[-1]


def test_the_kernels_of_dense_steps_are_the_references():
    """A configuration that is dense throughout is the reference to the bit, with frames and latents, and another backend is not."""
    pipe = wan_with_frames()
    call = dict(height=96, width=128, num_frames=9, num_inference_steps=2)
    configurations = [dense(pipe), Configuration("all", SPARSE, Schedule(dense_steps=1.0)),
                      Configuration("layers", SPARSE, Schedule(dense_layers=(0, 1))),
                      replace(dense(pipe), name="math", backend="_native_math"), Configuration("late", SPARSE, Schedule(dense_steps=0.5))]
    found = compare(pipe, configurations, call, [Clip("a cat")])
    same = dict(latent_difference=0.0, psnr=float("inf"), ssim=pytest.approx(1))
    for name in ("all", "layers"):
        measured = of(found, name, Clip("a cat"))
        assert {key: getattr(measured, key) for key in same} == same
    assert of(found, "math", Clip("a cat")).latent_difference > 0 and of(found, "late", Clip("a cat")).latent_difference > 1e-4
    kernels = {name: of(found, name, Clip("a cat")).dense_kernels for name in found.measurements}
    assert kernels.pop("math") == ("_native_math",) and set(kernels.values()) == {("default backend",)}
    assert "dense steps by" in str(found) and not pipe.vae.__dict__.get("decode")
    # inf - inf is a draw.
    pair = found.pair("all", "layers", "psnr")
    assert pair.difference.mean == 0 and pair.better == 0


def test_a_floor_attends_with_other_kernels():
    """Masks go through lists of blocks, whatever backend diffusers has: one that changes nothing is refused, and the reference is none
    of those, even where its bits are the same."""
    tiny = PIPELINES["hunyuan_video"]
    pipe = tiny.build()
    call = tiny.call | {"num_inference_steps": 2, "output_type": "latent"}
    with pytest.raises(ValueError, match="dense@_native_math must attend with other kernels than dense, got torch for both; .* take stock"):
        compare(pipe, [dense(pipe), replace(dense(pipe), name="dense@_native_math", backend="_native_math")], call)
    found = compare(pipe, [dense(pipe), replace(dense(pipe), name="floor", backend="reference"), STOCK], call)
    assert of(found, "floor").latent_difference < 1e-4
    assert (of(found, "dense").dense_kernels, of(found, "floor").dense_kernels) == (("torch",), ("reference",))


def test_steps_are_those_that_run(monkeypatch):
    """A generation that starts in the middle takes fewer than the scheduler has, and is dense in the first of them all the same."""
    tiny = PIPELINES["wan_video_to_video"]
    pipe = tiny.build()
    found = compare(pipe, [dense(pipe), Configuration("sparse", SPARSE, Schedule(dense_steps=0.25))],
                    tiny.call | {"num_inference_steps": 4, "strength": 0.5, "output_type": "latent"})
    assert of(found, "sparse").dense_kernels == ("default backend",)
    monkeypatch.setattr(Stopwatch, "seconds", lambda watch: 6.0)
    _, seconds, _ = comparison._generate(pipe, tiny.call | {"num_inference_steps": 4, "strength": 0.5, "output_type": "latent"}, 0)
    assert seconds == 3.0 and len(pipe.scheduler.timesteps) == 4


@pytest.mark.parametrize("name", ["cogvideox", "hunyuan_video_15_image_to_video", "ltx2", "mochi", "skyreels_v2_forcing"])
def test_other_pipelines(name):
    tiny = PIPELINES[name]
    pipe = tiny.build()
    clips = [Clip(seed=seed) for seed in (0, 1)]
    call = tiny.call | {"num_inference_steps": 2, "output_type": "latent"}
    found = compare(pipe, [dense(pipe), STOCK, Configuration("sparse", SPARSE, Schedule())], call, clips)
    for clip in clips:
        assert of(found, "stock", clip).latent_difference < 1e-4 < of(found, "sparse", clip).latent_difference
        assert of(found, "sparse", clip).density < of(found, "dense", clip).density == 1


def test_an_image_for_each_prompt(tmp_path):
    tiny = PIPELINES["wan_image_to_video"]
    pipe = tiny.build()
    seen = []
    stock = pipe.check_inputs
    pipe.check_inputs = lambda prompt, negative, image, *rest, **more: seen.append(image) or stock(prompt, negative, image, *rest, **more)
    clips = []
    for index, colour in enumerate(("red", "blue")):
        Image.new("RGB", (128, 96), colour).save(tmp_path / f"{index}.png")
        clips.append(Clip(image=str(tmp_path / f"{index}.png")))
    assert clips[0].name != clips[1].name
    compare(pipe, [dense(pipe)], tiny.call | {"num_inference_steps": 2, "output_type": "latent"}, clips)
    # The warm-up has the first one too.
    assert [image.getpixel((0, 0)) for image in seen] == [(255, 0, 0), (255, 0, 0), (0, 0, 255)]


def test_what_is_exact_is_said_where_the_rest_is_estimated():
    tiny = PIPELINES["wan"]
    pipe = tiny.build()
    texts = [f"density=0.5,tile_thw=1x2x2,kernel_thw=1x1x1,compensation={kind},sampling_type=similarity,dense_steps=0"
             for kind in ("linear", "none")]
    found = compare(pipe, [dense(pipe), *(parse_configuration(text, pipe) for text in texts)],
                    tiny.call | {"num_inference_steps": 2, "output_type": "latent"})
    mean, fifth, worst = of(found, texts[0]).exact_mass
    assert 0 < fifth <= mean < 1 and 0 < worst <= mean and of(found, texts[1]).exact_mass is None
    assert f"{mean:.1%} ({worst:.1%})" in str(found) and of(found, "dense").exact_mass is None


def test_what_is_exact_of_several_layers():
    runs = [LayerRun(str(i), "torch", (1, 2, 3), 6, 1, 0.5, exact_mass=mass)
            for i, mass in enumerate([(0.9, 0.5, 0.3), None, (0.7, 0.6, 0.1)])]
    assert RunReport(runs).exact_mass() == (pytest.approx(0.8), 0.5, 0.1)
    assert RunReport(runs[1:2]).exact_mass() is None


@pytest.mark.parametrize("change, message", [
    ({"configurations": []}, "configurations must hold at least one, got none"),
    ({"configurations": [STOCK, STOCK]}, "configurations must each be there once, got 'stock' twice"),
    ({"clips": []}, "clips must hold at least one"),
    ({"clips": [Clip("a"), Clip("a")]}, r"clips must each be there once, got Clip\(prompt='a'"),
    ({"call": {"output_type": "np"}}, "output_type must be 'pt' or 'latent', got 'np'")])
def test_mistakes(change, message):
    with pytest.raises(ValueError, match=message):
        compare(PIPELINES["wan"].build(), **({"configurations": [STOCK], "call": {}, "clips": [Clip()]} | change))


# Resuming


def test_an_interrupted_comparison_goes_on_and_gives_the_same(tmp_path, monkeypatch):
    pipe = wan_with_frames()
    call = dict(height=32, width=48, num_frames=5, num_inference_steps=2)
    configurations = [dense(pipe), STOCK, Configuration("sparse", SPARSE, Schedule())]
    clips = [Clip(prompt, seed) for prompt in ("a cat", "a dog") for seed in (0, 1)]
    whole = compare(pipe, configurations, call, clips, output=tmp_path / "whole")
    generate, calls = comparison._generate, []

    def interrupted(pipe, call, seed):
        if len(calls) == interrupted.after:
            raise KeyboardInterrupt
        calls.append((call.get("prompt"), seed, call["output_type"]))
        return generate(pipe, call, seed)

    monkeypatch.setattr(comparison, "_generate", interrupted)
    output = tmp_path / "parts"
    # In the middle of a clip; then after the reference of another.
    for after in (5, 6 + 3):
        interrupted.after = after
        with pytest.raises(KeyboardInterrupt):
            compare(pipe, configurations, call, clips, output=output, resume=True)
    interrupted.after = None
    found = compare(pipe, configurations, call, clips, output=output, resume=True)
    # Twelve in all, none twice, and whatever a process ran was warmed up in it.
    assert sum(kind == "pt" for *_, kind in calls) == 12
    for name in whole.measurements:
        assert [timeless(m) for m in found.measurements[name].values()] == [timeless(m) for m in whole.measurements[name].values()]
    calls.clear()
    again = compare(pipe, configurations, call, clips, output=output, resume=True)
    assert again == found and not calls
    # Another configuration and another clip need only what is new; without a reference it is made anew.
    (output / "references" / f"{clips[0].name}.pt").unlink()
    more = compare(pipe, [configurations[0], Configuration("other", SPARSE, Schedule(dense_steps=0.5))], call, clips[:2], output=output,
                   resume=True)
    assert sum(kind == "pt" for *_, kind in calls) == 3 and set(more.measurements) == {"dense", "other"}
    assert set(json.loads((output / "run.json").read_text())["configurations"]) == {"dense", "stock", "sparse", "other"}


def test_another_comparison_is_not_gone_on_with(tmp_path):
    tiny = PIPELINES["wan"]
    pipe = tiny.build()
    call = tiny.call | {"num_inference_steps": 2, "output_type": "latent"}
    sparse = Configuration("sparse", SPARSE, Schedule())

    def run(configurations=None, change=None, **options):
        return compare(pipe, configurations or (dense(pipe), sparse), call | (change or {}), output=tmp_path / "out",
                       **({"model": "mine", "resume": True} | options))

    run()
    with pytest.raises(ValueError, match="output must be a folder without a comparison, got .*out with one; resume it"):
        run(resume=False)
    for options, message in (
            ({"change": {"num_inference_steps": 3}},
             "resume must go on with .*run.json, got another: call.num_inference_steps is 2 there and 3 here"),
            ({"change": {"prompt_embeds": 2 * call["prompt_embeds"]}},
             r"call.prompt_embeds is tensor \[1, 7, 12\] float32 \w+ there and tensor"),
            ({"model": "yours"}, "model is mine there and yours here"),
            ({"configurations": (STOCK, sparse)}, "reference is dense there and stock here"),
            ({"configurations": (dense(pipe), replace(sparse, config=replace(SPARSE, topk=3)))},
             "configurations.sparse.config.topk is 2 there and 3 here")):
        with pytest.raises(ValueError, match=message):
            run(**options)
    finished, reference = (next((tmp_path / "out").glob(pattern)) for pattern in ("clips/*/sparse.json", "references/*.pt"))
    finished.write_text("{}")
    with pytest.raises(ValueError, match="a finished clip must be as it was written, got .*sparse.json .KeyError.; delete it"):
        run()
    finished.unlink()
    reference.write_bytes(b"no reference")
    with pytest.raises(ValueError, match="a reference must be as it was written, got .*pt .*; delete it"):
        run()
    (tmp_path / "out" / "run.json").write_text("{")
    with pytest.raises(ValueError, match="run.json must be as it was written, got .*run.json .JSONDecodeError.; choose another"):
        run()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="output must be a folder, got the file"):
        compare(pipe, [dense(pipe)], call, output=tmp_path / "file")


# Prompts


def test_prompts_from_a_file(tmp_path):
    (tmp_path / "prompts.txt").write_text("\ufeffa cat\n\n  a dog \ta.png\na caf\u00e9\thttps://x.org/b.png\n", encoding="utf-8")
    assert read_prompts(tmp_path / "prompts.txt") == [
        ("a cat", None), ("a dog", str(tmp_path / "a.png")), ("a caf\u00e9", "https://x.org/b.png")]


@pytest.mark.parametrize("data, message", [
    (None, "prompts must be a text file in UTF-8 that can be read, got .*p.txt: "), (b"\xff\xfe\x00", "in UTF-8 that can be read"),
    (b" \n\n", "prompts must hold at least one prompt, got none in "), (b"a cat\na\tb\tc\n", r"got 'a\\tb\\tc' in line 2 of"),
    (b"\ta.png\n", "in line 1"), (b"a cat\t\n", "in line 1")])
def test_prompts_that_cannot_be_read(tmp_path, data, message):
    if data is not None:
        (tmp_path / "p.txt").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / "p.txt")


# The command


@pytest.fixture
def command(monkeypatch):
    """Runs the command line on a tiny pipeline whose prompts mean something; videos are kept instead of written."""
    pipe, written = wan_with_prompts(), []
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda name, **options: pipe)
    monkeypatch.setattr("ssta.pipelines.evaluation.compare.require_video_writer", lambda: None)
    monkeypatch.setattr(comparison, "write_video", lambda video, path, fps: written.append((video, path, fps)))
    return lambda *arguments: (main(["some/model", *SIZE, *map(str, arguments)]), written)


def test_the_command(command, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a dog on the grass\n")
    arguments = ["--config", SMALL, "--prompt", "a cat", "--prompts", tmp_path / "prompts.txt", "--seeds", 0, 7, "--fps", 24,
                 "--output", tmp_path / "out"]
    found, written = command(*arguments)
    clips = [Clip(prompt, seed) for prompt in ("a cat", "a dog on the grass") for seed in (0, 7)]
    assert list(found.measurements) == ["dense", "stock", SMALL] and list(found.measurements[SMALL]) == clips
    assert max(found.values(SMALL, "psnr").values()) + 20 < min(found.values("stock", "psnr").values())
    assert len(set(found.values(SMALL, "latent_difference").values())) == 4 and found.spread(SMALL, "density").mean < 0.85
    # Dense on the left, the configuration on the right, and names that say which.
    assert len(written) == 8 and all(video.shape == (5, 3, 96, 256) and fps == 24 for video, _, fps in written)
    (stock, path, _), (sparse, other, _) = written[:2]
    assert path == str(tmp_path / "out" / "videos" / f"{clips[0].name}__dense__stock.mp4") and "topk=2_tile_thw=2x4x4" in other
    assert torch.equal(stock[..., :128], sparse[..., :128]) and not torch.equal(stock[..., 128:], sparse[..., 128:])
    shown = capsys.readouterr()
    assert "[12/12]" in shown.err and "left" in shown.err and "± is the standard error" in shown.out
    assert shown.out == (tmp_path / "out" / "table.txt").read_text() == f"{found}\n"
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record == json.loads(json.dumps(found.record(), allow_nan=False)) and record["model"] == "some/model"
    assert (tmp_path / "out" / "scatter.png").stat().st_size > 1000
    # What is finished is not generated again.
    assert command(*arguments, "--resume")[0] == found and len(written) == 8


def test_the_command_without_a_folder(command, capsys):
    found, written = command("--config", SMALL, "--floor", "_native_math", "--latents")
    assert list(found.measurements) == ["dense", "dense@_native_math", SMALL] and not written
    assert capsys.readouterr().out.count("\n") == 7
    found, _ = command("--config", "stock", "--floor", "none", "--latents", "--backend", "_native_math")
    assert list(found.measurements) == ["dense", "stock"]
    assert "_native_math" in capsys.readouterr().out


def test_processes_with_clips_of_their_own_share_a_folder(command, tmp_path, monkeypatch):
    """What each GPU's process generated, one process with all clips puts together, and generates nothing."""
    arguments = ["--config", SMALL, "--floor", "none", "--latents", "--output", tmp_path / "out", "--resume"]
    prompts = ("a cat", "a dog on the grass")
    parts = [command(*arguments, "--prompt", prompt)[0] for prompt in prompts]
    monkeypatch.setattr(comparison, "_generate", lambda *_: pytest.fail("generated again"))
    whole = command(*arguments, "--prompt", prompts[0], "--prompt", prompts[1])[0]
    for prompt, part in zip(prompts, parts):
        assert of(whole, SMALL, Clip(prompt)) == of(part, SMALL, Clip(prompt))


def test_torchrun_is_not_how_to_use_several_gpus(command, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        command()
    assert "a comparison must run in one process, got one of 2 by torchrun" in capsys.readouterr().err


def test_a_pipeline_that_ranks_share_is_refused():
    pipe = PIPELINES["wan"].build()
    pipe.transformer._parallel_config = object()
    with pytest.raises(ValueError, match="pipe must run on one rank, got WanTransformer3DModel after enable_parallelism"):
        compare(pipe, [STOCK], {})


def test_an_interrupted_command_says_how_to_go_on(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparison, "_generate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit) as ended:
        command("--output", tmp_path / "out")
    assert ended.value.code == 130 and "the same command with --resume goes on in" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, message", [
    (["--config", "topk=none"], "topk must be an int"), (["--height", "97"], "height"), (["--steps", "many"], "invalid int"),
    (["--steps", "0"], "--steps must be at least 1, got 0"),
    (["--prompts", "nothing.txt"], "prompts must be a text file"), (["--resume"], "--resume must come with --output"),
    (["--image", "nothing.png"], "an image must be an address or a file that exists, got nothing.png"),
    (["--image", "a", "--image", "b"], "--image must come once, for all prompts, or once for each --prompt, got 2 for 0"),
    (["--floor", "fastest"], "backend must be one of"),
    (["--prompt", "a", "--prompt", "a"], "clips must each be there once")])
def test_mistakes_on_the_command_line(arguments, message, command, capsys):
    with pytest.raises(SystemExit):
        command(*arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options, message", [
    (["--config", "balancd"], "a configuration must be 'stock', 'default', 'dense', .*'hunyuan_video_15_sparse'.* got 'balancd'"),
    (["--config", "default", "--config", "near,densty=0.2"], "got 'densty=0.2'"), (["--config", "density="], "got 'density='"),
    (["--floor", "dense@"], "must have a backend after @")])
def test_names_are_read_before_anything_is_loaded(options, message, command, capsys, monkeypatch):
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(SystemExit):
        command(*options)
    assert re.search(message, capsys.readouterr().err)


def test_a_model_that_is_not_there_and_one_that_is_not_supported(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing")])
    assert "error:" in capsys.readouterr().err
    pipe = wan_with_frames()
    pipe.transformer = torch.nn.Linear(2, 2)
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *_, **__: pipe)
    with pytest.raises(SystemExit):
        main(["some/model"])
    assert "model must be one of" in capsys.readouterr().err


def test_videos_need_a_writer(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["some/model", "--output", str(tmp_path)])
    assert "pip install imageio" in capsys.readouterr().err
