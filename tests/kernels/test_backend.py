"""Which implementation each step of a layer has, and why: a pure function of plain facts."""

import pytest
import torch
from backend_rows import DEVICE

from ssta.kernels import choose_backend
from ssta.kernels.backend import STEPS, choose
from ssta.kernels.cudnn import package
from ssta.kernels.routing import IMPLEMENTATIONS, Where

HOPPER = Where("cuda", (9, 0), False, torch.bfloat16, 128)
BUT_ATTEND = [step for step in STEPS if step != "attend"]


def names(impl, where):
    return {of.step: of.name for of in choose(impl, where).chosen}


@pytest.mark.parametrize("impl, where, other, exceptions", [
    ("auto", HOPPER, "triton", dict(merge="hopper")),
    ("hopper", HOPPER, "triton", dict(merge="hopper")),
    ("auto", HOPPER._replace(head_dim=64), "triton", dict(merge="hopper")),
    ("auto", HOPPER._replace(head_dim=80), "triton", {}),
    ("auto", HOPPER._replace(dtype=torch.float16), "triton", {}),
    ("auto", HOPPER._replace(dtype=torch.float32), "triton", {}),
    ("auto", HOPPER._replace(capability=(8, 0)), "triton", {}),
    ("auto", HOPPER._replace(capability=(10, 0)), "triton", {}),
    ("auto", HOPPER._replace(capability=None), "triton", {}),
    ("triton", HOPPER, "triton", {}),
    ("cudnn", HOPPER, "triton", {}),
    ("torch", HOPPER, "torch", {}),
    ("reference", HOPPER, "torch", {}),
    ("auto", HOPPER._replace(dtype=torch.float64), "torch", {}),
    ("auto", HOPPER._replace(capability=(7, 5)), "torch", {}),
    ("auto", Where("cpu", None, False, torch.float16, 64), "torch", {}),
    ("triton", Where("cpu", None, True, torch.float16, 64), "triton", {}),
    ("triton", Where("cpu", None, True, torch.float32, 64), "triton", {}),
    ("triton", Where("cpu", None, True, torch.bfloat16, 64), "torch", {}),
])
def test_every_step_is_of_the_first_row_from_impl_on_that_can(impl, where, other, exceptions):
    assert names(impl, where) == {**dict.fromkeys(BUT_ATTEND, other), **exceptions}


def test_an_interpreter_that_multiplies_bits_leaves_the_estimate_to_torch(monkeypatch):
    """As Triton's does with bfloat16, which the tests' ground mends: inf and NaN came of it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreted = pytest.importorskip("ssta.kernels.portable.interpreted")
    if DEVICE.type == "cpu":
        assert interpreted.multiplies_bfloat16()
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot",
                            lambda self, a, b, d, *_: interpreter.TensorHandle(a.data.astype("float32") @ b.data, d.dtype))
        assert not interpreted.multiplies_bfloat16.__wrapped__()
    monkeypatch.setattr(interpreted, "multiplies_bfloat16", lambda: False)
    backend = choose.__wrapped__("triton", Where("cpu", None, True, torch.float16, 64))
    assert {of.step for of in backend.chosen if of.name == "torch"} == {"estimate", "merge"}
    assert any("not triton, which multiplies bfloat16" in line for line in backend.explain())


def test_a_backend_says_why_no_faster_row_runs_a_step():
    said = choose("auto", HOPPER._replace(capability=(7, 5))).explain()
    assert len(said) == len(BUT_ATTEND) and [line.split(":")[0] for line in said] == BUT_ATTEND
    for line in said:
        assert "torch" in line and "not triton, which requires an Ampere GPU (sm_80) or a later one, got sm_75" in line
    merge, = (line for line in said if line.startswith("merge"))
    assert "not hopper, which runs on compute capability 9.0 alone;" in merge
    assert choose("torch", HOPPER).explain() == tuple(f"{step}: torch" for step in BUT_ATTEND), "what was asked for rejects nothing"


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_what_a_device_has_is_what_plain_facts_say(impl):
    """And a choice that cannot attend raises."""
    device, dtype = DEVICE, torch.float16
    absent = {"hopper": "requires a Hopper GPU", "cudnn": "requires a GPU of sm_90"} if device.type == "cpu" else {}
    if device.type != "cpu" and package.installed(package.PACKAGE) is None:
        absent["cudnn"] = "which is not installed"
    if impl in absent:
        with pytest.raises(ValueError, match=f"impl='{impl}' .*{absent[impl]}"):
            choose_backend(impl, device, dtype, 64)
        return
    backend = choose_backend(impl, device, dtype, 64)
    assert backend is choose_backend(impl, device, dtype, 64) and backend.impl == impl
    expected = {"torch": "torch", "reference": "torch", "triton": "triton", "auto": "torch" if device.type == "cpu" else "triton"}
    if impl in expected:
        assert backend.chosen[0].name == expected[impl]
        assert backend.by_torch("gather") == (expected[impl] == "torch")


@pytest.mark.parametrize("impl, dtype, message", [
    ("fast", torch.float16, "impl must be one of .*got 'fast'"), ("triton", torch.float64, "impl='triton' requires float16 or bfloat16")])
def test_what_cannot_attend_is_refused(impl, dtype, message):
    with pytest.raises(ValueError, match=message):
        choose_backend(impl, DEVICE, dtype, 64)
