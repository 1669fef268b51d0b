"""A patched model under torch.export and AOTInductor: exported whole, compiled ahead of time, loaded by a process that knows only ssta."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from published import cannot_be_had
from tiny_models import TINY
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from ssta import SSTAConfig
from ssta.pipelines import Schedule, apply_ssta

# The compensation is what models get by default that were not trained with SSTA. In halves it has every step that there is.
LINEAR = SSTAConfig(tile_thw=(2, 4, 4), sparse_type="block_attn", density=0.4, compensation="linear")
HALVES = replace(LINEAR, compensation_parts=2)
OPERATORS = {"ssta.layer.default"}


@pytest.fixture
def compiler() -> None:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        cannot_be_had(f"AOTInductor needs a C++ compiler, and torch finds none: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("name, strict", [("hunyuan_video", False), ("cogvideox", False), ("ltx", True)])
def test_an_exported_model_computes_the_same_bits_also_for_other_inputs(name, strict):
    tiny = TINY[name]
    model, call, other = tiny.build(), tiny.call(), tiny.call(prompts=(6,), seed=2)
    with torch.no_grad():
        dense = model(**other)[0]
        with apply_ssta(model, LINEAR, schedule=Schedule()):
            expected = [model(**each)[0] for each in (call, other)]
            program = torch.export.export(model, (), call, strict=strict)
        # The operators stay whole, and the program is on its own: SSTA is no longer on the model.
        assert {str(node.target) for node in program.graph.nodes if "ssta" in str(node.target)} == OPERATORS
        exported = program.module()
        assert (expected[1] - dense).abs().max() > 1e-2
        assert all(torch.equal(exported(**each)[0], out) for each, out in zip((call, other), expected))


LOAD = """
import sys, torch
import ssta
from torch._inductor import aoti_load_package
call, out = sys.argv[1:]
with torch.no_grad():
    torch.save(aoti_load_package("model.pt2")(**torch.load(call))[0], out)
"""


@pytest.mark.slow
def test_a_model_compiled_ahead_of_time_gives_the_same_in_a_process_of_its_own(compiler, tmp_path):
    tiny = TINY["wan"]
    model, call, other = tiny.build(layers=1), tiny.call(), tiny.call(seed=2)
    with torch.no_grad():
        dense = model(**other)[0]
        with apply_ssta(model, HALVES, schedule=Schedule()):
            expected = model(**other)[0]
            program = torch.export.export(model, (), call)
        # The compiler's own work is no matter here.
        with torch._inductor.config.patch({"aot_inductor.debug_compile": True}):
            torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    torch.save(other, tmp_path / "call.pt")
    run = subprocess.run([sys.executable, "-c", LOAD, "call.pt", "out.pt"], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (expected - dense).abs().max() > 1e-2
    torch.testing.assert_close(torch.load(tmp_path / "out.pt"), expected, rtol=1e-5, atol=1e-5)


def test_a_canvas_that_only_values_tell_cannot_be_exported():
    tiny = TINY["minimax_h3"]
    model, call = tiny.build(), tiny.call()
    with apply_ssta(model, LINEAR, schedule=Schedule()):
        with pytest.raises(ValueError, match="canvas must be in shapes or numbers under torch.export.* got coordinates"):
            torch.export.export(model, (), call, strict=False)
        # And nothing is left of it.
        assert model(**call)[0].isfinite().all()
