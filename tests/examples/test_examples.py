"""The families' scripts run from their command lines, on tiny models in the place of the weights."""

from __future__ import annotations

import copy
import importlib
import runpy
import sys
from pathlib import Path

import diffusers
import pytest
import torch
from tiny_pipelines import wan_with_frames

from ssta.pipelines.evaluation.quality import require_video_writer

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if "generate import Example" in path.read_text())


@pytest.fixture
def script(monkeypatch):
    """Imports an example by name; a video is kept instead of written."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    generate = importlib.import_module("generate")
    written = []
    monkeypatch.setattr(generate, "require_video_writer", lambda: None)
    monkeypatch.setattr(generate, "write_video", lambda video, path, fps: written.append((video, path, fps)))
    yield lambda name: (importlib.import_module(name), generate, written)
    for name in (*SCRIPTS, "generate"):
        sys.modules.pop(name, None)


def run(module, generate, name: str, *arguments: str):
    example = next(value for value in vars(module).values() if isinstance(value, generate.Example))
    assert example is getattr(module, name)
    return generate.main(example, module.__doc__, ["--cpu", *arguments])


def test_there_is_one_for_each_main_family():
    assert SCRIPTS == ["cogvideox", "hunyuan_video", "hunyuan_video_15", "ltx", "mochi", "wan"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_its_pipelines_are_supported_and_take_its_arguments(name, script):
    import inspect

    from ssta.pipelines import supported_models

    module, generate, _ = script(name)
    example = getattr(module, name.upper())
    for pipeline in filter(None, (example.pipeline, example.image_pipeline)):
        kind = getattr(diffusers, pipeline)
        assert set(example.call) - {"height", "width"} <= set(inspect.signature(kind.__call__).parameters)
        models = str(inspect.signature(kind.__init__).parameters["transformer"].annotation)
        assert any(model in models for model in supported_models())
    assert (example.image_pipeline is None) == (example.image_model is None)


def test_a_video_side_by_side_with_dense(script, monkeypatch, capsys, tmp_path):
    module, generate, written = script("wan")
    pipe, asked = wan_with_frames(), []
    monkeypatch.setattr(diffusers.WanPipeline, "from_pretrained", lambda model, **_: asked.append(model) or pipe)
    monkeypatch.setattr(pipe, "to", lambda device: asked.append(device))
    size = ["--height", "96", "--width", "128", "--num-frames", "9", "--num-inference-steps", "4"]
    output = run(module, generate, "WAN", *size, "--topk", "1", "--dense-steps", "0", "--side-by-side", "--output", str(tmp_path / "a.mp4"))
    assert asked == ["Wan-AI/Wan2.1-T2V-14B-Diffusers", "cpu"] and output == tmp_path / "a.mp4"
    (video, path, fps), = written
    assert path == str(output) and fps == 16 and video.shape == (9, 3, 96, 256) and 0 <= video.min() <= video.max() <= 1
    shown = capsys.readouterr()
    assert "transformer.blocks.1.attn1" in shown.out and "against dense: relative_difference" in shown.out and "psnr" in shown.out
    assert pipe.scheduler.config.flow_shift == 5.0
    # Removed again, and the same without the comparison, other weights, compiled.
    assert type(pipe.transformer.blocks[0].attn1.processor).__name__ == "WanAttnProcessor"
    torch._dynamo.reset()
    monkeypatch.setattr(type(pipe.transformer), "compile_repeated_blocks", lambda model, fullgraph: asked.append(fullgraph))
    run(module, generate, "WAN", *size, "--model", "mine", "--compile")
    assert asked[2:] == ["mine", "cpu", True] and written[1][0].shape == (9, 3, 96, 128)


@pytest.mark.parametrize("arguments, message", [
    (["--topk", "0"], "error: topk must be at least 1, got 0"), (["--dense-steps", "7"], "error: dense_steps must lie in"),
    (["--preset", "trained"],
     "error: preset must be one of 'near', 'balanced', 'fast', '8 steps', '4 steps' for WanTransformer3DModel, got 'trained'"),
    (["--topk", "3", "--density", "0.2"], "error: topk must be None with a density"),
    (["--height", "97"], "error: .*height.*97")])
def test_mistakes_end_with_one_sentence(arguments, message, script, monkeypatch):
    module, generate, written = script("wan")
    loaded = []
    monkeypatch.setattr(diffusers.WanPipeline, "from_pretrained", lambda model, **_: loaded.append(model) or wan_with_frames())
    with pytest.raises(SystemExit, match=message):
        run(module, generate, "WAN", *arguments)
    # Only the pipeline knows which sizes it takes.
    assert not written and bool(loaded) == ("--height" in arguments)


def test_a_file_that_could_not_be_written_is_said_before_anything_is_loaded(script, monkeypatch, tmp_path):
    module, generate, _ = script("wan")
    monkeypatch.setattr(diffusers.WanPipeline, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "folder.mp4").mkdir()
    for output, message in (("no_extension", "--output must end with one of .mp4, .mov, .mkv, .avi, got .*no_extension"),
                            ("a.png", "--output must end with one of"), ("folder.mp4", "--output must be a file in a folder that exists"),
                            ("missing/a.mp4", "--output must be a file in a folder that exists, got .*missing/a.mp4")):
        with pytest.raises(SystemExit, match=f"error: {message}"):
            run(module, generate, "WAN", "--output", str(tmp_path / output))


def test_both_transformers_of_a_pipeline_are_compiled(script, monkeypatch, tmp_path):
    module, generate, _ = script("wan")
    pipe, compiled = wan_with_frames(), []
    pipe.register_modules(transformer_2=copy.deepcopy(pipe.transformer))
    pipe.register_to_config(boundary_ratio=0.5)
    monkeypatch.setattr(diffusers.WanPipeline, "from_pretrained", lambda model, **_: pipe)
    monkeypatch.setattr(type(pipe.transformer), "compile_repeated_blocks", lambda model, fullgraph: compiled.append(model))
    run(module, generate, "WAN", "--height", "96", "--width", "128", "--num-frames", "9", "--num-inference-steps", "2", "--compile",
        "--output", str(tmp_path / "a.mp4"))
    assert [id(model) for model in compiled] == [id(pipe.transformer), id(pipe.transformer_2)]


def test_a_video_that_begins_with_an_image(script, monkeypatch):
    class FromImage:
        def __call__(self, image, prompt, num_frames, num_inference_steps, negative_prompt=None, output_type="np"):
            pass

    module, generate, _ = script("hunyuan_video_15")
    monkeypatch.setattr(generate, "load_image", lambda path: f"the image {path}")
    monkeypatch.setattr(diffusers.HunyuanVideo15ImageToVideoPipeline, "from_pretrained", lambda model, **_: pytest.fail(model))
    example, about = module.HUNYUAN_VIDEO_15, module.__doc__
    options = generate.parse(example, about, ["--image", "cat.png", "--num-frames", "49"], generate.Way())
    assert generate.call_of(example, options, FromImage()) == {
        "image": "the image cat.png", "prompt": options.prompt, "num_frames": 49, "num_inference_steps": 50, "output_type": "pt"}
    with pytest.raises(pytest.fail.Exception, match="720p_i2v"):
        generate.load(example, options)
    with pytest.raises(ValueError, match="--height must be left out: FromImage takes none"):
        generate.call_of(example, generate.parse(example, about, ["--height", "96"], generate.Way()), FromImage())


def test_missing_weights_packages_and_devices_are_said(script, monkeypatch, tmp_path):
    module, generate, _ = script("ltx")
    with pytest.raises(SystemExit, match="error: .*nothing"):
        run(module, generate, "LTX", "--model", str(tmp_path / "nothing"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="error: a CUDA GPU is needed"):
        generate.main(module.LTX, module.__doc__, [])
    monkeypatch.setattr(generate, "require_video_writer", require_video_writer)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="error: .*pip install imageio"):
        run(module, generate, "LTX")


def test_help(script, monkeypatch, capsys):
    """Of the file as a program."""
    monkeypatch.setattr(sys, "argv", ["wan.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_path(str(EXAMPLES / "wan.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "--side-by-side" in shown and "81 if left out" in shown


def test_streaming_through_a_cache_of_density_1_is_dense(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    streaming = importlib.import_module("streaming")
    made = []
    real = streaming.generate
    monkeypatch.setattr(streaming, "generate", lambda *args: made.append(real(*args)) or made[-1])
    size = ["--tiny", "--chunks", "4", "--height", "64", "--width", "80", "--window", "4", "--sink", "2"]
    for options in (["--density", "1"], ["--attention", "dense"], ["--density", "0.3"]):
        assert streaming.main([*size, *options, "--tile", "3", "2", "3"]) > 0
    whole, dense, some = (latents for latents, _ in made)
    torch.testing.assert_close(whole, dense, atol=1e-5, rtol=1e-5)
    assert not torch.equal(some, dense) and (some - dense).norm() < 0.1 * dense.norm()
    assert "sparse: " in capsys.readouterr().out
    for options, message in ((["--height", "60"], "--height must be at least 16 and a multiple of it, got 60"),
                             (["--chunks", "0"], "--chunks must"), (["--density", "2"], "error: density must")):
        with pytest.raises(SystemExit) as stopped:
            streaming.main([*size, *options])
        assert message in f"{stopped.value} {capsys.readouterr().err}"
    sys.modules.pop("streaming")
