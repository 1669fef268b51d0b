"""The doctor: what it says of a machine, a check that fails where attention is wrong, and a gain that follows from what it measures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ssta.pipelines import doctor
from ssta.pipelines.published import PUBLISHED, Published, wan_inputs

CPU = torch.device("cpu")
TINY = Published("tiny", "WanTransformer3DModel",
                 dict(num_attention_heads=2, attention_head_dim=32, text_dim=12, freq_dim=16, ffn_dim=64), (5, 12, 16), 4,
                 wan_inputs(7, 12))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_it_says_what_runs_and_that_it_is_right(no_gpu, capsys):
    assert doctor.main(["--model", "ltx"]) == 0
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}: tested (2.11 to 2.13)" in said
    assert "attend: torch" in said and "not 'triton', which requires" in said
    assert re.search(r"^linear( +\S+ \(\S+\)){4}$", said, re.M) and "passed in" in said
    assert "times on a CPU say nothing" in said


@pytest.mark.parametrize("wrong", [lambda out: out * 1.001, lambda out: torch.cat([out[:, :, :128] * torch.nan, out[:, :, 128:]], 2)])
def test_wrong_attention_fails(no_gpu, monkeypatch, capsys, wrong):
    right = doctor.attend

    def spoilt(*args, impl, **options):
        result = right(*args, impl=impl, **options)
        result.out = wrong(result.out) if impl == "auto" else result.out
        return result

    monkeypatch.setattr(doctor, "attend", spoilt)
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert said.count(" FAILED") >= 2 and "FAILED in" in said


@pytest.mark.parametrize("found, words", [
    ("2.11.0+cu130", "tested (2.11 to 2.13)"), ("2.13.1", "tested"), ("2.9.1", "OLDER than what was tested, 2.11 to 2.13"),
    ("2.14.0a0", "newer than what was tested"), ("3.0", "newer than")])
def test_versions_are_judged(found, words):
    assert doctor.judged(found, *doctor.TESTED["torch"]).startswith(words)


def test_what_was_tested_is_what_the_package_asks_for():
    asked = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for package, oldest in (("torch>=", "torch"), ("triton>=", "triton"), ("diffusers==", "diffusers"),
                            ("nvidia-cudnn-frontend[cutedsl]==", "nvidia-cudnn-frontend")):
        assert f'"{package}{doctor.TESTED[oldest][0]}' in asked


@pytest.mark.parametrize("arguments, message", [
    (["--model", "wan"], "--model must be one of hunyuan-video-1.5, wan-14b, wan-1.3b, ltx, got 'wan'"),
    (["--size", "81x480x832"], "--size must come with --model"), (["--model", "ltx", "--size", "81x480"], "--size must be frames, rows"),
    (["--model", "ltx", "--size", "81x8x8"], "at least 1 x 32 x 32")])
def test_mistakes_end_with_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit):
        doctor.main(arguments)
    assert message in capsys.readouterr().err


def test_canvases_are_the_models():
    assert PUBLISHED["wan-14b"].canvas(81, 720, 1280) == PUBLISHED["wan-14b"].thw
    assert PUBLISHED["hunyuan-video-1.5"].canvas(121, 720, 1280) == PUBLISHED["hunyuan-video-1.5"].thw
    assert PUBLISHED["ltx"].canvas(121, 704, 1216) == PUBLISHED["ltx"].thw


def test_the_gain_is_reckoned_from_one_block(monkeypatch):
    times = iter([(0.5, 1.0), (0.7, 0.25)])
    monkeypatch.setattr(doctor, "_times", lambda *of: next(times))
    _, step = doctor.gain(TINY, TINY.thw, CPU, torch.float32)
    # Of four blocks the first stays dense.
    assert "dense 4.5 s, SSTA by default 2.25 s, 2.00 x" in step
    assert "50 steps with guidance, two prompts each, without text encoder and VAE: dense 450 s, SSTA 225 s" in step


def test_a_forward_is_timed_without_and_with_its_block():
    model = TINY.build("cpu", torch.float32, 1)
    rest, block = doctor._times(model, TINY.call("cpu", torch.float32), model.blocks[0], CPU)
    assert rest > 0 and block > 0


def test_what_does_not_fit_is_said(monkeypatch):
    def too_large(*of):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(doctor, "_times", too_large)
    assert "does not fit into this GPU's memory" in doctor.gain(TINY, TINY.thw, CPU, torch.float32)[0]


@pytest.mark.slow
def test_it_needs_no_diffusers():
    """Only ``--model`` does, and says how to install it."""
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "diffusers":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from ssta.pipelines import doctor
assert doctor.main([]) == 0
doctor.main(["--model", "ltx"])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "passed in" in ran.stdout, ran.stderr
    assert ran.returncode == 2 and "error: --model needs diffusers 0.42" in ran.stderr and "pip install" in ran.stderr


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    assert doctor.main(["--model", "ltx"]) == 0
    said = capsys.readouterr().out
    assert "attend: " in said and "attend: torch" not in said and "a step of one prompt" in said
