"""The Hub kernel: what `make hub` lays out loads with Hugging Face's own loader, beside the package, and computes the same bits."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from published import published

import ssta

ROOT = Path(__file__).parent.parent
KERNELS = "kernels==0.17.2"

_spec = importlib.util.spec_from_file_location("hub_layout", ROOT / "hub" / "layout.py")
layout = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layout)


def python(program: str, folder: Path, *paths: Path) -> dict:
    """What ``program`` prints last, as JSON, run with the loader and this package on the path, in ``folder``."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_variants_hold_the_package_and_nothing_else(tmp_path):
    places = layout.lay_out(tmp_path / "hub", "someone/ssta")
    assert {place.relative_to(tmp_path).as_posix() for place in places.values()} == {"hub/build/torch-cpu", "hub/build/torch-cuda"}
    for backend, place in places.items():
        held = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
        described = json.loads((place / "metadata.json").read_text())
        assert held == {*described["digest"]["files"], "metadata.json"}
        assert {"__init__.py", "ssta/__init__.py", "attention.py", "kernels/hopper/forward.py"} <= held
        assert not any("plot" in path or path.startswith("pipelines") for path in held)
        assert described["backend"] == {"type": backend} | ({"archs": ["8.0+PTX"]} if backend == "cuda" else {})
        assert described["id"].isidentifier() and described["version"] == int(ssta.__version__.split(".")[0])
    assert json.loads((places["cpu"] / "metadata.json").read_text())["id"] != described["id"]


def test_files_import_one_another_relatively_and_else_only_what_a_kernel_may():
    """Absolute names would take from the package beside the copy, or fail without it. A library is looked for where it is asked for."""
    for path, data in layout.sources().items():
        if path.endswith(".py"):
            nodes = list(ast.walk(ast.parse(data)))
            names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
            names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
            assert {name.split(".")[0] for name in names} <= {"torch", "triton", *sys.stdlib_module_names} | (
                {"cudnn"} if path == "kernels/cudnn/attention.py" else set()), path


def test_a_build_is_named_by_its_content(tmp_path):
    files = layout.sources()
    assert layout.identity(files, "cpu") == layout.identity(layout.sources(), "cpu")
    for path in ("attention.py", "kernels/op.py"):
        assert layout.identity(files | {path: files[path] + b"\n"}, "cpu") != layout.identity(files, "cpu")


def test_the_page_names_what_the_door_exports(tmp_path):
    layout.lay_out(tmp_path, "someone/ssta")
    page = (tmp_path / "README.md").read_text()
    assert 'get_kernel("someone/ssta", version=0)' in page and "- `block_sparse_attention`" in page
    assert not {"REPO", "VERSION", "FUNCTIONS"} & set(page.replace('"', " ").split())


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="out must be an empty folder"):
        layout.lay_out(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(ValueError, match="repo must be ORGANISATION/NAME"):
        layout.lay_out(tmp_path / "new", "someone")
    layout.lay_out(tmp_path / "new")
    stale = tmp_path / "new" / "build" / "torch-cpu" / "gone.py"
    stale.write_text("")
    layout.lay_out(tmp_path / "new")
    assert not stale.exists()


SAME = """
import json, sys, torch
from pathlib import Path
import ssta, ssta.kernels
import ssta.interfaces.flashinfer
before = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ssta::")}
from kernels import get_local_kernel
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

hub = get_local_kernel(Path("hub"), backend="cpu")
hub.interfaces.flashinfer
place = Path("hub/build/torch-cpu")
described = Metadata.read_from_file(place / "metadata.json")
described.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, place))
assert [str(backend) for backend in Build.open(Path("hub")).general.backends] == ["cpu", "cuda"]

def flex(package, q, k, v):
    mask = package.interfaces.create_sta_3d_mask((4, 8, 8), (2, 4, 4), (1, 3, 3), 0)
    q, k, v = (x[:, :, :256] for x in (q, k, v))
    return package.interfaces.flex_block_attn_func(q, k, v, 32, 32, mask)

def results(package):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4 * 8 * 8 + 16, 32).unbind()
    q.requires_grad_()
    out = package.ssta_3d_attention(q, k, v, (4, 8, 8), topk=4, tile_thw=(2, 4, 4), kernel_thw=(1, 3, 3), text_len=16)
    config = package.SSTAConfig(tile_thw=(2, 4, 4), density=0.4, compensation="linear")
    tokens = package.TokenLayout.video_text((4, 8, 8), 16)
    compensated = package.ssta_attention(q, k, v, tokens, config)
    compiled = torch.compile(lambda q: package.ssta_attention(q, k, v, tokens, config), backend="eager", fullgraph=True)(q)
    torch.testing.assert_close(compiled, compensated)
    blocks = package.kernels.BlockLists.from_mask(torch.rand(2, 8, 8) < 0.4, q_offsets=34, kv_offsets=34)
    attended = package.kernels.block_sparse_attention(q, k, v, blocks)
    (out + compensated + attended).sum().backward()
    # In Triton's interpreter.
    q, gradient = q.detach(), q.grad
    launched = package.kernels.block_sparse_attention(q.half(), k.half(), v.half(), blocks, impl="triton")
    return [out.detach(), compensated.detach(), attended.detach(), gradient, flex(package, q, k, v), launched]

mine, theirs = results(ssta), results(hub)
after = set(torch._C._dispatch_get_all_op_names())
print(json.dumps({
    "version": __import__("kernels").__version__,
    "id": described.id, "module": hub.__name__, "missing": [name for name in hub.__all__ if not hasattr(hub, name)],
    "equal": [torch.equal(a, b) for a, b in zip(mine, theirs)],
    "finite": all(x.isfinite().all().item() for x in mine),
    "mine": sorted(name.split("::")[1] for name in before), "mine_after": sorted(n.split("::")[1] for n in after if n.startswith("ssta::")),
    "theirs": sorted(name.split("::")[1] for name in after if name.startswith(described.id + "::")),
    "ours_apart": hub.kernels.BlockLists is not ssta.kernels.BlockLists,
    "heavy": sorted({"matplotlib", "diffusers"} & set(sys.modules)),
}))
"""


@pytest.mark.slow
def test_the_loaded_kernel_computes_the_same_bits_beside_the_package(tmp_path):
    layout.lay_out(tmp_path / "hub")
    found = python(SAME, tmp_path, published(KERNELS))
    assert f"kernels=={found['version']}" == KERNELS and found["module"] == found["id"] and found["missing"] == []
    assert found["equal"] == [True] * 6 and found["finite"]
    # Each has its own operators, all of them: loading the one has added none to the other.
    assert {"block_sparse_attention", "layer", "layer_backward"} <= {*found["mine"]}
    assert found["mine"] == found["mine_after"] == found["theirs"]
    assert found["ours_apart"] and found["heavy"] == []


OLD = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("ssta_as_of_old", "hub/build/torch-cpu/ssta/__init__.py")
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
inner = sys.modules[module.ssta_attention.__module__.split(".")[0]]
print(json.dumps([all(getattr(module, name) is getattr(inner, name) for name in inner.__all__), inner.__name__]))
"""


def test_the_folder_for_old_loaders_is_the_same_module(tmp_path):
    name = layout.identity(layout.sources(), "cpu")
    layout.lay_out(tmp_path / "hub")
    assert python(OLD, tmp_path) == [True, name]


def test_a_package_named_kernels_stays_empty():
    """From the repository's root this folder answers to the name of Hugging Face's loader, as what it must not run."""
    program = ("import json, sys, kernels; "
               "print(json.dumps([hasattr(kernels, 'BlockLists'), 'torch' in sys.modules]))")
    assert python(program, ROOT) == [False, False]
