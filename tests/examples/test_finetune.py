"""examples/finetune.py on tiny models and cached latents: what it saves, going on where it stopped, clips, and what it refuses."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file, save_file
from tiny_models import TEXT_LEN, run, valid
from tiny_pipelines import PIPELINES, embeds, wan_with_frames

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SIZES = {"wan": "9x96x128", "ltx": "17x192x256"}


def with_frames(name: str) -> diffusers.DiffusionPipeline:
    """A pipeline with a VAE, and with random embeddings where the text encoder would be: others for each length of the prompt."""
    if name == "wan":
        pipe = wan_with_frames()
        pipe.encode_prompt = lambda prompt, **_: (embeds(TEXT_LEN, 12, len(prompt)), None)
        return pipe
    pipe = PIPELINES[name].build()
    torch.manual_seed(3)
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=(4,) * 4, decoder_block_out_channels=(4,) * 4, layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5, decoder_inject_noise=(False,) * 5, encoder_causal=True, decoder_causal=False)
    # Made with this VAE, it would have taken these from it.
    pipe.register_modules(vae=vae.eval())
    pipe.encode_prompt = lambda prompt, **_: (embeds(TEXT_LEN, 12, len(prompt)), valid((4,)).bool(), None, None)
    return pipe


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of a family's weights and of two cached clips; made once."""
    found = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in found:
            root = tmp_path_factory.mktemp(name)
            pipe = with_frames(name)
            pipe.save_pretrained(root / "weights")
            index = json.loads((root / "weights" / "model_index.json").read_text())
            index |= {"text_encoder": ["transformers", "T5EncoderModel"], "tokenizer": ["transformers", "T5TokenizerFast"]}
            (root / "weights" / "model_index.json").write_text(json.dumps(index))
            sys.path.insert(0, str(EXAMPLES))
            data = importlib.import_module("finetune_clips")
            sys.path.remove(str(EXAMPLES))
            clips = root / "clips"
            clips.mkdir()
            for i in range(2):
                (clips / f"{i}.mp4").touch()
            (clips / "1.txt").write_text("a cat\n")
            data.READERS.clear()
            data.READERS["torch"] = frames
            data.encode(pipe, "tiny", data.clip_files(clips), root / "cache", data.Size.parse(SIZES[name]), "", slice(0, None), print)
            found[name] = root / "weights", root / "cache"
        return found[name]

    return make


def frames(path: Path):
    """Twenty frames of moving stripes instead of a file's."""
    x = torch.arange(300)[None, :, None] + 7 * torch.arange(20)[:, None, None]
    yield from (127 + 127 * torch.sin(x / (9 + len(path.stem)))).byte()[..., None].expand(20, 300, 260, 3)


def tune(script, made, name: str, output: Path, *arguments: str, ramp: tuple[str, ...] = ("--ramp", "2")) -> list[dict]:
    """Runs it; the rows of its log."""
    weights, cache = made(name)
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()
    script.finetune.main([
        "--model", str(weights), "--cache", str(cache), "--output", str(output), "--cpu", "--steps", "4", *ramp, "--density", "0.3",
        "--log-every", "1", "--sample-every", "0", "--checkpoint-every", "2", "--rate", "1e-2", "--warm-up", "0", *arguments])
    return list(csv.DictReader((output / "log.csv").open()))


def pipeline(made, name: str) -> diffusers.DiffusionPipeline:
    weights, _ = made(name)
    return diffusers.DiffusionPipeline.from_pretrained(weights, text_encoder=None, tokenizer=None)


# Training


@pytest.mark.parametrize("name", ["wan", "ltx"])
@pytest.mark.parametrize("loss", ["distill", "diffusion"])
def test_a_lora_is_trained_and_loads(script, made, tmp_path, name, loss, capsys):
    rows = tune(script, made, name, tmp_path, "--lora", "2", "--loss", loss, "--accumulate", "2", "--sample-every", "4",
                "--sample-steps", "2")
    assert [float(row["density"]) for row in rows] == pytest.approx([1, 0.3 ** (1 / 3), 0.3, 0.3], rel=1e-4)
    if loss == "distill":
        # Nothing is left out yet, and the adapter begins with nothing.
        assert float(rows[0]["loss"]) < 1e-9 < 1e-5 < float(rows[2]["loss"])
    pipe = pipeline(made, name)
    call = dict(PIPELINES[name].call, num_inference_steps=2, output_type="latent", return_dict=False)
    before = pipe(**call, generator=torch.Generator().manual_seed(0))[0]
    pipe.load_lora_weights(tmp_path)
    names = [key for key, _ in pipe.transformer.named_parameters() if "lora_B" in key]
    assert len(names) == 2 * 8 and all(pipe.transformer.get_parameter(key).any() for key in names)
    assert not torch.equal(pipe(**call, generator=torch.Generator().manual_seed(0))[0], before)
    for step in (0, 4):
        from PIL import Image

        height, width = SIZES[name].split("x")[1:]
        assert Image.open(tmp_path / "samples" / f"{step:06d}.png").size == (3 * int(width), 2 * int(height))
    assert "trained for apply_ssta(pipe, SSTAConfig(" in capsys.readouterr().out


@pytest.mark.parametrize("name, loss", [("wan", "distill"), ("ltx", "diffusion")])
def test_all_weights_are_trained_and_load(script, made, tmp_path, name, loss):
    rows = tune(script, made, name, tmp_path, "--loss", loss, "--rate", "1e-3", "--compensation", "none")
    assert len(rows) == 4
    before = pipeline(made, name).transformer
    after = type(before).from_pretrained(tmp_path / "transformer")
    changed = [key for key, x in after.state_dict().items() if not torch.equal(x, before.state_dict()[key])]
    assert len(changed) > 0.8 * len(before.state_dict())
    # A frozen teacher: the first steps, whose student is dense, have nothing to learn.
    assert (float(rows[0]["loss"]) < 1e-9) == (loss == "distill")


def test_few_steps_are_learned_where_dense_ones_come_by(script, made, tmp_path, monkeypatch):
    """Every velocity that is learned is the teacher's after some of its own Euler steps from noise."""
    from ssta.pipelines.training.training import TeacherStudent

    calls, learned, teacher = [], [], TeacherStudent.teacher

    def noted(self, **call):
        found = teacher(self, **call)
        calls.append((call["hidden_states"], float(call["timestep"]) / 1000, found))
        return found

    def asked(self, **call):
        learned.append(float(call["timestep"]) / 1000)
        return both(self, **call)

    both = TeacherStudent.__call__
    monkeypatch.setattr(TeacherStudent, "teacher", noted)
    monkeypatch.setattr(TeacherStudent, "__call__", asked)
    rows = tune(script, made, "ltx", tmp_path, "--few-steps", "3", "--accumulate", "2", "--rate", "1e-3", ramp=("--ramp", "0"))
    assert all(float(row["loss"]) > 1e-7 for row in rows) and len(learned) == 8 < len(calls)
    assert len(set(learned)) == 3 and max(learned) == 1
    for (x, s, v), (x_next, s_next, _) in zip(calls, calls[1:]):
        if s_next < 1:
            torch.testing.assert_close(x_next, x + (s_next - s) * v, rtol=1e-4, atol=1e-4)
        else:
            assert x_next.std() == pytest.approx(1, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--lora", "2"), ("--loss", "diffusion", "--accumulate", "2")], ids=["lora", "full"])
def test_going_on_gives_the_same_bits_as_never_having_stopped(script, made, tmp_path, arguments):
    whole = tune(script, made, "wan", tmp_path / "whole", *arguments, "--sample-every", "3", "--sample-steps", "1")
    # Stopped in the fourth step, so that the third was lost; the model's sample in between changes nothing.
    loss = script.finetune.Training._loss

    def stop(training, step: int, turn: int) -> torch.Tensor:
        if step == 3:
            raise SystemExit
        return loss(training, step, turn)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(script.finetune.Training, "_loss", stop)
        tune(script, made, "wan", tmp_path / "parts", *arguments)
    torch.manual_seed(99)
    parts = tune(script, made, "wan", tmp_path / "parts", *arguments, "--resume")
    assert [row["step"] for row in parts] == ["1", "2", "3", "4"]
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]
    file = "pytorch_lora_weights.safetensors" if "--lora" in arguments else "transformer/diffusion_pytorch_model.safetensors"
    ours, theirs = (load_file(tmp_path / run / file) for run in ("parts", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    if "--lora" in arguments:
        # The weights that are not trained are in no checkpoint.
        assert not (tmp_path / "parts" / "checkpoints" / "000002" / "model.safetensors").exists()
        with pytest.raises(SystemExit, match="error: --resume must go on with --lora 2, as in .*, got 3"):
            tune(script, made, "wan", tmp_path / "parts", "--lora", "3", "--resume")
        with pytest.raises(SystemExit, match="error: --output .* must be new, got one with checkpoints; --resume goes on"):
            tune(script, made, "wan", tmp_path / "parts", *arguments)


def test_a_longer_training_goes_on_with_the_ramp_it_had(script, made, tmp_path):
    tune(script, made, "wan", tmp_path, "--lora", "2", "--steps", "2", ramp=())
    rows = tune(script, made, "wan", tmp_path, "--lora", "2", "--steps", "6", "--resume", ramp=())
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 7)]
    # A fifth of two steps is none, of six steps one.
    with pytest.raises(SystemExit, match="error: --resume must go on with --ramp 0, as in .*, got 1"):
        tune(script, made, "wan", tmp_path, "--lora", "2", "--steps", "8", "--resume", ramp=("--ramp", "1"))


def test_checkpointing_changes_nothing(script, made, tmp_path):
    rows = [tune(script, made, "wan", tmp_path / str(i), "--lora", "2", *more) for i, more in enumerate(((), ("--no-checkpointing",)))]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]


def test_clips_are_encoded_and_then_learned_from(script, made, tmp_path, monkeypatch):
    """From the command line, with a text encoder that is gone when training begins."""
    made("wan")
    pipe, clips = with_frames("wan"), tmp_path / "clips"
    encoder = torch.nn.Linear(1, 1)
    encoder.device, encoder.dtype = torch.device("cpu"), torch.float32
    pipe.register_modules(text_encoder=encoder)
    clips.mkdir()
    (clips / "a.mp4").touch()
    monkeypatch.setattr(script.clips, "READERS", {"torch": frames})
    monkeypatch.setattr(script.finetune.DiffusionPipeline, "from_pretrained", lambda model, dtype: pipe)
    rows = tune(script, made, "wan", tmp_path / "out", "--clips", str(clips), "--cache", str(tmp_path / "cache"), "--size", "9x96x128",
                "--lora", "2")
    assert len(rows) == 4 and pipe.text_encoder is None
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["a.mp4.safetensors", "negative_prompt.safetensors"]


# Clips and caches


@pytest.mark.parametrize("name", ["wan", "ltx", "cogvideox", "hunyuan_video", "mochi"])
def test_conditions_are_what_the_pipeline_gives_its_transformer(script, name, monkeypatch):
    """With the latents' own noise: one forward gives the pipeline's first prediction."""
    tiny = PIPELINES[name]
    pipe, given = tiny.build(), {key: value for key, value in tiny.call.items() if "prompt" in key and "negative" not in key}
    seen: list[dict] = []
    hook = pipe.transformer.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    options = {} if name == "hunyuan_video" else {"guidance_scale": 1.0}
    plain = dict(tiny.call, num_inference_steps=2, output_type="latent", generator=torch.Generator().manual_seed(0), **options)
    plain.pop("true_cfg_scale", None)
    pipe(**plain)
    hook.remove()
    width = 16 if name == "mochi" else 12
    text = given.get("prompt_embeds", embeds(TEXT_LEN, width, 0))
    mask, pooled = given.get("prompt_attention_mask"), given.get("pooled_prompt_embeds")
    returned = {"ltx": (text, mask, None, None), "mochi": (text, mask, None, None), "hunyuan_video": (text, pooled, mask)}
    monkeypatch.setattr(pipe, "encode_prompt", lambda *_, **__: returned.get(name, (text, None)))
    size = script.clips.Size(tiny.call["num_frames"], tiny.call["height"], tiny.call["width"])
    call = script.clips.conditions(pipe, "a cat", seen[0]["hidden_states"], size)
    assert "hidden_states" not in call and "timestep" not in call
    found, expected = (run(pipe.transformer, of) for of in (
        {**call, "hidden_states": seen[0]["hidden_states"], "timestep": seen[0]["timestep"], "return_dict": False}, seen[0]))
    assert torch.equal(found, expected)
    assert script.clips.kind_of(pipe) in script.clips.SUPPORTED


def test_models_that_it_does_not_train(script):
    for pipe, message in ((PIPELINES["wan_2.2"].build(), "WanPipeline with two transformers"),
                          (PIPELINES["kandinsky5"].build(), "Kandinsky5T2VPipeline with Kandinsky5Transformer3DModel")):
        with pytest.raises(ValueError, match=f"--model must be a text-to-video pipeline with one .*, got {message}"):
            script.clips.kind_of(pipe)


@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_latents_are_the_vae_s_and_decode(script, name):
    """In the layout and the norm of the pipeline: it decodes them to what they are decoded to here."""
    pipe, size = with_frames(name), script.clips.Size.parse(SIZES[name])
    stripes = torch.stack(list(frames(Path("a.mp4"))))[:size.frames, :size.height, :size.width].permute(3, 0, 1, 2)[None] / 127.5 - 1
    statistics = dict(latents_mean=[0.1, -0.2, 0.3, 0.4], latents_std=[0.5, 0.6, 1.7, 1.8])
    if name == "wan":
        pipe.vae.register_to_config(**statistics)
    else:
        pipe.vae.register_to_config(scaling_factor=0.7)
        for key, values in statistics.items():
            pipe.vae.register_buffer(key, torch.tensor(values))
    with torch.no_grad():
        latents = script.clips.to_latents(pipe, stripes)
        plain = pipe.vae.decode(pipe.vae.encode(stripes).latent_dist.mode(), return_dict=False)[0]
        sample = script.clips.Sample(latents, script.clips.conditions(pipe, "", latents, size))
        ours = script.clips.to_frames(pipe, sample)
    assert ours.shape == (size.frames, 3, size.height, size.width)
    # Steps that change nothing.
    pipe.scheduler.step = lambda noise, t, x, **_: (x,)
    theirs = pipe("", height=size.height, width=size.width, num_frames=size.frames, num_inference_steps=1, latents=latents,
                  guidance_scale=1.0, output_type="pt", return_dict=False)[0][0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours, (plain[0].transpose(0, 1) / 2 + 0.5).clamp(0, 1), rtol=0, atol=1e-5)


def test_clips_are_encoded_once_and_when_something_changed(script, tmp_path, monkeypatch):
    said, pipe = [], with_frames("wan")
    clips, cache = tmp_path / "clips", tmp_path / "cache"
    clips.mkdir()
    for name in ("a.mp4", "b.MOV", "notes.md"):
        (clips / name).touch()
    monkeypatch.setattr(script.clips, "READERS", {"torch": frames})

    def encode(size: str = "9x96x128", share=slice(0, None)) -> list[Path]:
        said.clear()
        files, of = script.clips.clip_files(clips), script.clips.Size.parse(size)
        return script.clips.encode(pipe, "tiny", files, cache, of, "", share, said.append)

    files = encode()
    assert [path.name for path in files] == ["a.mp4.safetensors", "b.MOV.safetensors"] == [p.name for p in script.clips.cached_files(cache)]
    assert said == ["encoding clip 1 of 2: a.mp4, which has no caption", "encoding clip 2 of 2: b.MOV, which has no caption"]
    encode()
    assert not said
    (clips / "b.txt").write_text("a dog")
    encode()
    assert said == ["encoding clip 2 of 2: b.MOV"]
    encode("5x96x128", slice(1, None, 2))
    assert said == ["encoding clip 2 of 2: b.MOV"]
    a, b = map(script.clips.load_sample, files)
    assert a.latents.shape == (1, 4, 3, 12, 16) and b.latents.shape == (1, 4, 2, 12, 16)
    assert torch.equal(b.call["encoder_hidden_states"], embeds(TEXT_LEN, 12, len("a dog")))
    negative = script.clips.load_sample(script.clips.negative_file(cache))
    assert torch.equal(negative.call["encoder_hidden_states"], embeds(TEXT_LEN, 12, 0))
    with pytest.raises(ValueError, match="a.mp4 must have the 49 frames of --size 49x96x128, got 20"):
        encode("49x96x128")


def test_what_is_cached_comes_back(script, tmp_path):
    call = {"rope": tuple(torch.full((2,), float(i)) for i in range(11)), "encoder_attention_mask": torch.tensor([[True, False]]),
            "num_frames": 3, "scale": (0.5, 32, 32), "encoder_hidden_states": torch.ones(1, 2)}
    sample = script.clips.Sample(torch.randn(1, 2, 3), call)
    script.clips.save_sample(tmp_path / "a.safetensors", sample, prompt="a cat")
    torch.save({"latents": sample.latents, "call": call}, tmp_path / "b.pt")
    for name in ("a.safetensors", "b.pt"):
        found = script.clips.load_sample(tmp_path / name)
        assert torch.equal(found.latents, sample.latents) and found.call.keys() == call.keys() and found.call["scale"] == (0.5, 32, 32)
        assert all(map(torch.equal, found.call["rope"], call["rope"])) and found.call["encoder_attention_mask"].dtype == torch.bool
        moved = found.to(torch.device("cpu"), torch.bfloat16)
        assert moved.call["encoder_hidden_states"].dtype == torch.bfloat16 and moved.call["rope"][0].dtype == torch.float32
    save_file({"other": torch.ones(1)}, tmp_path / "c.safetensors")
    (tmp_path / "d.pt").write_text("no tensors")
    for name in ("c.safetensors", "d.pt"):
        with pytest.raises(ValueError, match=f"{name} must hold latents and what the model is called with"):
            script.clips.load_sample(tmp_path / name)


def test_clips_need_a_package_to_be_read_with(script, tmp_path, monkeypatch):
    size = script.clips.Size(2, 8, 8)
    monkeypatch.setattr(script.clips, "READERS", {"no_such_package": None})
    with pytest.raises(ValueError, match="a.mp4 can be read with PyAV or imageio, and neither is installed: pip install av, or"):
        script.clips.read_clip(Path("a.mp4"), size)

    def broken(path):
        yield torch.zeros(8, 8, 3, dtype=torch.uint8)
        raise RuntimeError("moov atom")

    monkeypatch.setattr(script.clips, "READERS", {"torch": broken})
    with pytest.raises(ValueError, match="a.mp4 cannot be read with torch beyond frame 1: moov atom"):
        script.clips.read_clip(Path("a.mp4"), size)
    # Covered and cut in the middle.
    picture = torch.zeros(20, 60, 3, dtype=torch.uint8)
    picture[:, 20:40] = 255
    monkeypatch.setattr(script.clips, "READERS", {"torch": lambda path: iter([picture] * 3)})
    clip = script.clips.read_clip(Path("a.mp4"), script.clips.Size(2, 10, 10))
    assert clip.shape == (1, 3, 2, 10, 10) and clip.min() > 0.7


# Mistakes


@pytest.mark.parametrize("arguments, message", [
    (["--clips", "nowhere"], "error: --clips must be a folder of clips, got nowhere"),
    (["--cache", "nowhere"], "error: --cache must be a folder of cached latents where there are no --clips, got nowhere"),
    (["--cache", "."], "error: --cache . must hold cached latents"), (["--clips", "."], "error: --clips . must hold clips"),
    (["--size", "81x480"], "error: --size must be FRAMESxHEIGHTxWIDTH, such as 81x480x832, got '81x480'"),
    (["--resume"], "error: --resume must find a checkpoint in --output .*, got none"),
    (["--model", "/nowhere/at/all"], "error: .*nowhere"), (["--lora", "2", "--lora-targets", "to_x"], "error: .*to_x")])
def test_mistakes_end_with_one_sentence(script, made, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        tune(script, made, "wan", tmp_path / "out", *arguments)


@pytest.mark.parametrize("arguments, message", [
    (["--density", "0"], "--density must be a share of at most 1, got 0.0"), (["--density", "1.5"], "--density must be"),
    (["--steps", "0"], "--steps must be at least 1, got 0"), (["--lora", "-1"], "--lora must be at least 0"),
    (["--drop-captions", "2"], "--drop-captions must be a share"), (["--rate", "-1"], "--rate must be positive, got -1.0"),
    (["--loss", "other"], "--loss"), (["--few-steps", "-1"], "--few-steps must be at least 0, got -1"),
    (["--few-steps", "4", "--loss", "diffusion"], "--few-steps needs --loss distill")])
def test_arguments_out_of_range(script, made, tmp_path, arguments, message, capsys):
    with pytest.raises(SystemExit):
        tune(script, made, "wan", tmp_path, *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("change, message", [
    (dict(fsdp_version=1), "fsdp_version must be 2"), (dict(activation_checkpointing=True), "fsdp_activation_checkpointing must be false"),
    (dict(cpu_ram_efficient_loading=True), "fsdp_cpu_ram_efficient_loading must be false in accelerate's settings, for accelerate asks")])
def test_settings_of_fsdp_that_do_not_work(script, change, message):
    fits = dict(fsdp_version=2, activation_checkpointing=False, cpu_ram_efficient_loading=False)
    script.finetune.require_settings(SimpleNamespace(**fits)), script.finetune.require_settings(None)
    with pytest.raises(ValueError, match=message):
        script.finetune.require_settings(SimpleNamespace(**fits | change))


def test_a_loss_that_is_not_finite_ends_it(script, made, tmp_path):
    with pytest.raises(SystemExit, match="error: the loss must stay finite, got nan at step .*; --rate 1e[+]30 may be too high"):
        tune(script, made, "wan", tmp_path, "--lora", "2", "--loss", "diffusion", "--rate", "1e30")
