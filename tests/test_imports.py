"""The import rules: arrows point from pipelines to ssta to kernels, nothing imports interfaces, and `import ssta` loads torch alone."""

import ast
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"ssta": "ssta", "kernels": "ssta.kernels", "pipelines": "ssta.pipelines", "interfaces": "ssta.interfaces"}
# A folder of kernels/ -> the folders that it may import besides itself and the modules at the top. A library's registers its row, and
# compares itself with Triton's kernels.
MAY_IMPORT = {"eager": (), "lowering": (), **dict.fromkeys(("portable", "hopper", "prologue"), ("lowering",)),
              "cudnn": ("lowering", "routing", "portable")}
# A room of pipelines/ -> what of the others it may import: rooms, or modules of theirs.
ROOMS = {"schedule": (), "terms": ("schedule",), "ranks": ("terms",),
         "patch": ("terms", "schedule", "ranks", "families.PLACES"),
         "families": ("terms", "patch", "schedule", "ranks"), "plugs": ("schedule", "patch.report"),
         "evaluation": ("patch", "schedule", "require_diffusers"), "training": ("terms", "patch", "schedule")}
# Rooms that run without diffusers.
WITHOUT_DIFFUSERS = ("schedule", "terms", "plugs")
# Modules that processes need only where several ranks share a model.
OF_RANKS = ("ssta.pipelines.ranks.parallel", "diffusers.hooks")
# At the top, what runs the implementations and is therefore imported by none of these folders; and the specification.
ABOVE = ("attention", "backend", "op", "routing", "reference")
# Where Triton is imported when a file is loaded.
TRITON = ("portable", "hopper", "lowering", "cudnn.attention", "cudnn.slots")
# Names in the door of kernels/: at most so many.
DOOR = 12
# What the other floors may take of kernels/ besides its door: ground that all floors stand on and that knows nothing of attention.
COMMON = ("checks", "memo", "notices", "operators", "routing")
# The door of the attention that interfaces/ adds.
TOKENS = "ssta.interfaces.tokens"
# What interfaces/ may take besides: of kernels/ the parts of its own kernels, of ssta/ the selection for flex-block-attn's masks.
LENT = {
    "ssta.kernels.attention": ("check_inputs",),
    "ssta.kernels.block_forms": ("in_range", "mask_lists", "per_query_head", "prefix_mask"),
    "ssta.kernels.device": ("DeviceLimits", "device_limits", "multiprocessors"),
    "ssta.kernels.eager.steps": ("GATHER_ELEMENTS", "attend", "compute_dtype"),
    "ssta.kernels.launch": ("FUSED",),
    "ssta.kernels.lowering.arguments": ("view",),
    "ssta.kernels.lowering.chunks": ("block_lists", "kv_partition", "q_partition"),
    "ssta.kernels.lowering.inputs": ("strided", "tma_ok"),
    "ssta.kernels.lowering.primitives": ("LN2", "LOG2E", "block_bounds", "finish_softmax", "finite_or_zero", "gather_rows", "load_rows",
                                         "merged_lse", "of_head", "own_rows", "part_weights", "row_of_lists", "softmax_step", "store_rows",
                                         "tanh"),
    "ssta.kernels.portable.backward": ("DELTA_ROWS", "delta_kernel"),
    "ssta.kernels.portable.config": ("LaunchConfig", "fit", "padded", "step"),
    "ssta.checks": ("require_triple",), "ssta.layer": ("Tiled", "prepared"), "ssta.spec": ("LayerSpec",), "ssta.window": ("near",),
}
# Its file that takes from ssta/.
MASKS = "interfaces/flex_block_attn.py"
# Files of ssta/ that may ask whether anybody watches: what calls of a layer and of a cache, and an exchange, are to a compiler, a mode or a
# tracer.
MAY_ASK = ("ssta/op.py", "ssta/cache_op.py", "ssta/ranks/world.py")


@dataclass(frozen=True)
class Import:
    module: str  # absolute: ssta.kernels.blocks
    name: str | None  # what is taken from it, or None for `import module`
    at_load: bool  # runs when the file is loaded, not when a function in it is called


def imports_of(source: str, package: str, typing: bool = False) -> list[Import]:
    """Every import in a file of ``package``, relative ones made absolute; import_module("...") with a constant counts too. typing: also
    those under TYPE_CHECKING."""
    found = []

    def absolute(module: str, level: int) -> str:
        if not level:
            return module
        parents = package.split(".")
        return ".".join(parents[: len(parents) - level + 1] + ([module] if module else []))

    def walk(node: ast.AST, at_load: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and not typing:
            for child in node.orelse:
                walk(child, at_load)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, None, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.extend(Import(absolute(node.module or "", node.level), alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant):
                module = node.args[0].value
                level = len(module) - len(module.lstrip("."))
                found.append(Import(absolute(module.lstrip("."), level), None, at_load))
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            walk(child, at_load and not inside)

    walk(ast.parse(source), True)
    return found


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def is_module(module: str) -> bool:
    """Whether the repository holds such a module or package."""
    for folder, floor in sorted(FLOORS.items(), key=lambda item: -len(item[1])):
        if is_in(module, floor):
            path = ROOT.joinpath(folder, *module.removeprefix(floor).split(".")[1:])
            return path.is_dir() or path.with_suffix(".py").exists()
    return False


@cache
def door(module: str = "ssta.kernels") -> frozenset[str]:
    """What kernels/ lets the floors above it take, or another module others."""
    return frozenset(importlib.import_module(module).__all__)


def room(module: str) -> str | None:
    """The folder of kernels/ that a module is in, or the name of a module that stands beside the folders; None outside of kernels/."""
    return module.split(".")[2] if module.startswith("ssta.kernels.") else None


def needs_triton(module: str) -> bool:
    return (any(is_in(module, f"ssta.kernels.{place}") for place in TRITON) or room(module) == "prologue" and module.endswith("_kernel")
            or module.startswith(f"{TOKENS}.triton."))


def violations(path: str, source: str) -> list[str]:
    """What the file at ``path`` (relative to the repository) does against the rules, one sentence each."""
    folder, *below = Path(path).with_suffix("").parts
    floor = FLOORS[folder]
    module = ".".join([floor, *below]).removesuffix(".__init__")
    package = ".".join([floor, *below[:-1]])
    own, uses_triton = room(module), needs_triton(module)
    found = []
    for imported in imports_of(source, package):
        target = imported.module
        if imported.name is not None and is_module(f"{target}.{imported.name}"):
            target = f"{target}.{imported.name}"  # `from . import blocks` takes the module
        top = target.split(".")[0]

        if top == "triton" and not (uses_triton or floor == "ssta.kernels" and not imported.at_load):
            found.append("triton is imported by kernels/ in the folders that need it, or inside a function")
        elif top == "diffusers" and (floor != "ssta.pipelines" or below[0] in WITHOUT_DIFFUSERS):
            found.append(f"diffusers is imported only in pipelines/, and there not in {' and '.join(WITHOUT_DIFFUSERS)}")
        elif top in ("matplotlib", "numpy") and (path not in ("ssta/plot.py", "pipelines/evaluation/scatter.py") or imported.at_load):
            found.append(f"{top} is imported only inside the functions of ssta/plot.py and pipelines/evaluation/scatter.py")
        elif top in ("safetensors", "huggingface_hub") and (path != "pipelines/families/trained/checkpoint.py" or imported.at_load):
            found.append(f"{top}, which comes with diffusers, is imported only inside the functions of families/trained/checkpoint.py")
        elif top == "lpips" and (path != "pipelines/evaluation/quality.py" or imported.at_load):
            found.append("lpips is imported only inside a function of pipelines/evaluation/quality.py")
        elif top == "cudnn" and (path != "kernels/cudnn/attention.py" or imported.at_load):
            found.append("cudnn is imported only inside the functions of kernels/cudnn/attention.py")
        elif top not in {"ssta", "torch", "triton", "cudnn", "diffusers", "matplotlib", "numpy", "lpips", "safetensors",
                         "huggingface_hub", *sys.stdlib_module_names}:
            found.append(f"{top} is no dependency of the package")

        if floor == "ssta.kernels" and top == "ssta" and not is_in(target, "ssta.kernels"):
            found.append(f"kernels knows nothing of {target}")
        if floor == "ssta.pipelines" and below[0] in ROOMS and is_in(target, floor):
            taken = f"{target}.{imported.name}".removeprefix(f"{floor}.")
            if not any(is_in(taken, allowed) for allowed in (below[0], *ROOMS[below[0]])):
                found.append(f"{below[0]} imports {taken}")
        if path != "pipelines/ranks/parallel.py" and imported.at_load and any(is_in(target, module) for module in OF_RANKS):
            found.append(f"{target} is imported where several ranks are used, not when the file is loaded")
        if floor == "ssta" and is_in(target, "ssta.pipelines"):
            found.append("ssta knows nothing of pipelines")
        if floor != "ssta.interfaces" and is_in(target, "ssta.interfaces"):
            found.append("nothing imports interfaces")
        by_the_door = target == "ssta.kernels" and imported.name in door() or room(target) in COMMON and imported.name is not None
        lent = floor == "ssta.interfaces" and imported.name in LENT.get(imported.module, ())
        if floor != "ssta.kernels" and is_in(target, "ssta.kernels") and not (by_the_door or lent):
            found.append(f"kernels is entered by its door, not for {target} {imported.name or ''}".rstrip())
        outside = top == "ssta" and not is_in(target, "ssta.kernels") and not is_in(target, floor)
        if floor == "ssta.interfaces" and outside and not (path == MASKS and (lent or imported.name in door("ssta"))):
            found.append(f"interfaces know nothing of {target} {imported.name or ''}".rstrip())
        by_tokens = target == TOKENS and imported.name in door(TOKENS)
        if floor == "ssta.interfaces" and not is_in(module, TOKENS) and is_in(target, TOKENS) and not by_tokens:
            found.append(f"interfaces enter tokens by its door, not for {target} {imported.name or ''}".rstrip())
        if floor == "ssta" and imported.name == "watched" and path not in MAY_ASK:
            found.append(f"only {' and '.join(MAY_ASK)} ask who watches")
        other = room(target)
        if own in MAY_IMPORT and other not in (None, own, *MAY_IMPORT[own]) and other in (*MAY_IMPORT, *ABOVE):
            found.append(f"{own} imports {other}")
        if needs_triton(target) and imported.at_load and not uses_triton:
            found.append(f"{target} needs triton and is imported when a kernel first runs, not when the file is loaded")
    return [f"{path}: {sentence}" for sentence in found]


def package_files() -> list[str]:
    """Those of the four floors; ssta/kernels, ssta/pipelines and ssta/interfaces are links, which rglob does not follow."""
    return sorted(str(path.relative_to(ROOT)) for folder in FLOORS for path in (ROOT / folder).rglob("*.py"))


def test_the_door_of_kernels_is_narrow_and_users_are_told_of_everything_in_it():
    told = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert len(door()) <= DOOR
    assert {name for name in door() if not re.search(rf"\b{name}\b", told)} == set()


def taken_by(folder: str) -> dict[str, set[str | None]]:
    """The names that the files of a folder import, by module."""
    taken: dict[str, set[str | None]] = {}
    for path in package_files():
        if path.startswith(folder):
            for imported in imports_of((ROOT / path).read_text(), ".".join(["ssta", *Path(path).parts[:-1]])):
                taken.setdefault(imported.module, set()).add(imported.name)
    return taken


def test_everything_in_the_door_of_tokens_is_wanted_by_an_interface():
    assert door(TOKENS) == taken_by("interfaces/")[TOKENS]


def test_interfaces_are_lent_nothing_that_they_do_not_take():
    taken = taken_by("interfaces/")
    assert {module: {*names} for module, names in LENT.items()} == {module: taken.get(module) for module in LENT}


@pytest.mark.parametrize("module, place", [
    ("ssta.kernels.interfaces", "ssta.interfaces"), ("ssta.kernels.interfaces.flashinfer", "ssta.interfaces"),
    ("ssta.masks", "ssta.interfaces")])
def test_programs_are_told_where_a_module_is(module, place):
    with pytest.raises(ImportError, match=rf"\b{place}\b"):
        importlib.import_module(module)


@pytest.mark.parametrize("module", ["ssta.kernels", "ssta.interfaces", TOKENS])
def test_what_is_in_a_door_is_there_and_says_what_it_is(module):
    for name in door(module):
        value = getattr(importlib.import_module(module), name)
        assert not (inspect.isfunction(value) or inspect.isclass(value)) or inspect.getdoc(value), f"{name} has no docstring"


def circles(sources: dict[str, str]) -> list[tuple[str, ...]]:
    """The modules that import one another around a circle, for files by their paths; lazy imports and those for types count."""
    names = {path: ".".join([FLOORS[Path(path).parts[0]], *Path(path).with_suffix("").parts[1:]]) for path in sources}
    modules = {name.removesuffix(".__init__"): name for name in names.values()}
    taken: dict[str, set[str]] = {}
    for path, source in sources.items():
        wanted = {imported.module if imported.name is None or f"{imported.module}.{imported.name}" not in modules
                  else f"{imported.module}.{imported.name}"
                  for imported in imports_of(source, names[path].rpartition(".")[0], typing=True)}
        taken[names[path]] = {modules[module] for module in wanted & modules.keys()} - {names[path]}

    def reached(start: str) -> set[str]:
        seen, left = set(), [start]
        while left:
            new = taken[left.pop()] - seen
            seen |= new
            left += new
        return seen

    every = {module: reached(module) for module in taken}
    return sorted({tuple(sorted([other for other in seen if module in every[other]])) for module, seen in every.items() if module in seen})


def test_no_modules_import_one_another_in_a_circle():
    found = circles({path: (ROOT / path).read_text() for path in package_files()})
    assert not found


@pytest.mark.parametrize("imports", [
    ("from .b import f", "from .a import f"),
    ("from . import b", "def f():\n    from .a import g"),
    ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import F", "from ssta import a"),
    ("import ssta.b", "import importlib\nimportlib.import_module('.a', __package__)"),
    ("from .pipelines.c import f", "from .a import f", "from ..b import f"),
    ("from .pipelines import f", "from .a import f", None, "from ..b import f"),
])
def test_a_circle_is_seen(imports):
    paths = "ssta/a.py", "ssta/b.py", "pipelines/c.py", "pipelines/__init__.py"
    sources = {path: source for path, source in zip(paths, imports) if source is not None}
    assert len(circles(sources)) == 1 and circles({path: source for path, source in sources.items() if path != "ssta/b.py"}) == []


@pytest.mark.parametrize("path", ["kernels/routing.py", "kernels/backend.py"])
def test_a_library_is_named_in_its_own_folder_alone(path):
    assert "cudnn" not in (ROOT / path).read_text().lower()


def names_of(source: str) -> set[str]:
    """Classes that a file defines, nested ones too, and what it assigns at its top to a name that is written like a class: type aliases
    and type variables."""
    tree = ast.parse(source)
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assigned = {target.id for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target]) if isinstance(target, ast.Name)}
    return classes | {name for name in assigned if re.match("_*[A-Z]", name) and not name.isupper()}


def named_twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """Names that several of the files give to something of their own, and these files."""
    files: dict[str, list[str]] = {}
    for path, source in sources.items():
        for name in names_of(source):
            files.setdefault(name, []).append(path)
    return {name: paths for name, paths in files.items() if len(paths) > 1}


def test_a_name_of_a_class_means_one_thing():
    assert named_twice({path: (ROOT / path).read_text() for path in package_files()}) == {}


@pytest.mark.parametrize("own, other", [
    ("class Cut:\n    pass", "class Cut(NamedTuple):\n    pass"),
    ("class Cut:\n    pass", "def f():\n    class Cut:\n        pass"),
    ("class Step:\n    pass", "Step = Callable[[int], object]"),
    ("Step = tuple[int, int]", "Step: TypeAlias = int"),
    ("View = TypeVar('View')", "class View:\n    pass"),
])
def test_a_name_with_two_meanings_is_seen(own, other):
    assert list(named_twice({"a.py": own, "b.py": other}).values()) == [["a.py", "b.py"]]


def test_what_may_stand_in_several_files():
    """Constants, and names that are imported or written in another way."""
    assert named_twice({"a.py": "STAGES = 2\nclass Cut:\n    pass", "b.py": "STAGES = 3\nfrom .a import Cut\ncut = Cut()"}) == {}


@pytest.mark.parametrize("path", package_files())
def test_file_keeps_the_import_rules(path):
    assert violations(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize("path, source", [
    ("kernels/attention.py", "import triton"),
    ("ssta/selection.py", "def f():\n    import triton.language"),
    ("kernels/attention.py", "from .portable.forward import triton_forward"),
    ("kernels/attention.py", "from .portable import forward"),
    ("kernels/blocks.py", "from ssta.layout import TileLayout"),
    ("kernels/blocks.py", "from ..layout import TileLayout"),
    ("kernels/blocks.py", "from .. import layout"),
    ("kernels/eager/blocks.py", "def f():\n    from ..reference import reference_attention"),
    ("kernels/portable/forward.py", "from ssta.kernels.eager import blocks"),
    ("kernels/portable/forward.py", "import importlib\nimportlib.import_module('..eager.blocks', __package__)"),
    ("kernels/hopper/forward.py", "from ..portable.config import forward_config"),
    ("kernels/hopper/forward.py", "from ..routing import Route"),
    ("kernels/portable/estimate.py", "def f():\n    from ..backend import choose_backend"),
    ("kernels/lowering/chunks.py", "from ..hopper import config"),
    ("kernels/prologue/select_kernel.py", "def f():\n    from ..eager.blocks import steps"),
    ("interfaces/other.py", "from ..layout import TileLayout"),
    ("interfaces/other.py", "from .. import SSTAConfig"),
    ("interfaces/flex_block_attn.py", "from ..layer import Layer"),
    ("interfaces/other.py", "from ..kernels.attention import block_sparse_attention"),
    ("interfaces/other.py", "from .tokens import KeyLists"),
    ("interfaces/other.py", "from .tokens.lists import Packed"),
    ("interfaces/flashinfer/more.py", "def f():\n    from ..tokens.triton.probabilities import importance"),
    ("interfaces/tokens/blocks.py", "from .triton.gathered import gathered_forward"),
    ("interfaces/tokens/blocks.py", "from ...kernels.lowering.chunks import chunks_of"),
    ("interfaces/other.py", "from ..kernels import blocks"),
    ("interfaces/other.py", "from ..pipelines import Schedule"),
    ("kernels/routing.py", "def f():\n    from ..interfaces.tokens import block_attention"),
    ("ssta/attention.py", "def f():\n    from .interfaces import flex_block_attn_func"),
    ("pipelines/patch/apply.py", "from ssta.interfaces import install"),
    ("kernels/device.py", "import diffusers"),
    ("kernels/cudnn/attention.py", "import cudnn"),
    ("kernels/cudnn/check.py", "from .attention import cudnn_forward"),
    ("kernels/cudnn/check.py", "def f():\n    from ..attention import block_sparse_attention"),
    ("kernels/portable/forward.py", "def f():\n    from ..cudnn import package"),
    ("ssta/selection.py", "from .kernels import attention"),
    ("ssta/selection.py", "from ssta.kernels.reference import reference_attention"),
    ("ssta/selection.py", "import ssta.kernels"),
    ("ssta/selection.py", "from .kernels.estimate import known_share"),
    ("ssta/selection.py", "from .kernels.operators import watched"),
    ("ssta/ranks/exchange.py", "from ..kernels.operators import watched as in_graph"),
    ("ssta/trained/vsa.py", "def f():\n    from ..kernels.operators import watched"),
    ("ssta/attention.py", "def f():\n    from .pipelines import apply_ssta"),
    ("ssta/plot.py", "import matplotlib"),
    ("ssta/layout.py", "import numpy as np"),
    ("pipelines/patch/apply.py", "import triton"),
    ("pipelines/patch/streams.py", "from ssta.kernels.prologue.projection import Projection"),
    ("pipelines/evaluation/quality.py", "import lpips"),
    ("pipelines/patch/report.py", "def f():\n    from ..evaluation.quality import psnr"),
    ("pipelines/patch/register.py", "from ..families.wan import WAN"),
    ("pipelines/patch/context.py", "from ..ranks.parallel import Parallelism"),
    ("pipelines/ranks/split.py", "from diffusers.hooks.sea_cache import SeaCacheConfig"),
    ("pipelines/ranks/after_gather.py", "def f():\n    from ..patch.context import ModelContext"),
    ("pipelines/terms.py", "from .patch.register import family_of"),
    ("pipelines/terms.py", "def f():\n    import diffusers"),
    ("pipelines/patch/processor.py", "from ..training.kept_selection import KeptSelection"),
    ("pipelines/ranks/split.py", "from ..patch.apply import apply_ssta"),
    ("pipelines/schedule/presets.py", "from ..terms import Family"),
    ("pipelines/schedule/progress.py", "import diffusers"),
    ("pipelines/plugs/comfy.py", "def f():\n    import diffusers"),
    ("pipelines/plugs/comfy.py", "from ..patch.register import family_of"),
    ("pipelines/families/ltx.py", "from .. import apply_ssta"),
    ("pipelines/patch/apply.py", "def f():\n    import safetensors"),
    ("pipelines/families/trained/checkpoint.py", "from huggingface_hub import snapshot_download"),
])
def test_a_broken_rule_is_seen(path, source):
    assert violations(path, source) != []


@pytest.mark.parametrize("path, source", [
    ("kernels/attention.py", "def f():\n    import triton\n    from .portable.forward import triton_forward"),
    ("kernels/portable/forward.py", "import triton\nfrom ..lowering import primitives\nfrom .config import forward_config"),
    ("kernels/cudnn/check.py", "from ..routing import register\ndef f():\n    from ..portable.forward import triton_forward"),
    ("interfaces/other.py", "from ..kernels import BlockLists\nfrom ..kernels.checks import require_int\nfrom .tokens import Packed"),
    ("interfaces/flashinfer/more.py", "from ...kernels import merge_attention\nfrom ..packed import pack_heads"),
    ("interfaces/tokens/triton/lists.py", "import triton\nfrom ....kernels.lowering.primitives import LOG2E"),
    ("interfaces/flex_block_attn.py", "from .. import SSTAConfig\nfrom ..layer import prepared"),
    ("ssta/selection.py", "from .kernels import BlockLists\nfrom .layout import TileLayout"),
    ("ssta/report.py", "from ssta.kernels import choose_route\nfrom ssta.kernels.operators import on_device"),
    ("ssta/op.py", "from .kernels.operators import watched"),
    ("ssta/layer.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .kernels.estimate import Estimate"),
    ("pipelines/patch/context.py", "from ssta.kernels.notices import warn_once"),
    ("ssta/plot.py", "def draw():\n    import matplotlib.pyplot"),
    ("pipelines/patch/apply.py", "import diffusers\nfrom ssta import SSTAConfig"),
    ("pipelines/patch/register.py", "from ..families import PLACES\nfrom ..terms import Family"),
    ("pipelines/ranks/split.py", "def f():\n    from diffusers.hooks.context_parallel import ContextParallelSplitHook"),
    ("pipelines/plugs/comfy.py", "from ..patch.report import LayerRun\nfrom ..schedule.schedule import Schedule"),
    ("pipelines/families/trained/checkpoint.py", "def f():\n    from safetensors import safe_open"),
])
def test_what_the_rules_allow(path, source):
    assert violations(path, source) == []


def test_the_door_of_pipelines_tells_type_checkers_the_same_as_processes():
    from ssta import pipelines

    source = (ROOT / "pipelines/__init__.py").read_text()
    at_run_time, for_types = ({(imported.name, imported.module) for imported in imports_of(source, "ssta.pipelines", typing=typing)}
                              for typing in (False, True))
    assert {(name, f"ssta.pipelines{module}") for name, module in pipelines._MODULES.items()} == for_types - at_run_time


PLUGS = [f"ssta.pipelines.plugs.{name}" for name in ("comfy", "comfy_models")]
# What is imported first, what then, and what is said where diffusers is not there.
FRESH = f"""
import sys, torch
def loaded(statements, before=frozenset(sys.modules)):
    exec(statements)
    print(*set(sys.modules) - before)
loaded('''import ssta, ssta.kernels
from ssta import SSTAConfig, TokenLayout, ssta_3d_attention
from ssta.interfaces import flashinfer, flex_block_attn, magi''')
loaded("import {', '.join(PLUGS)}")
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "diffusers":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from ssta.pipelines import Schedule
for statement in ("from ssta.pipelines import apply_ssta", "from ssta.pipelines import WAN", "import ssta.pipelines.evaluation.compare"):
    try:
        exec(statement)
    except ImportError as error:
        print(type(error).__name__, error)
"""


def test_a_fresh_process(tmp_path):
    """Imports load torch and nothing heavier, those of plugs neither diffusers nor what they are for; without diffusers, what needs it says
    how to install it."""
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    first, plugs, *refused = run.stdout.splitlines()
    assert "ssta.interfaces.tokens.blocks" in first.split() and {*PLUGS} <= {*plugs.split()}
    assert {name.split(".")[0] for name in plugs.split()} - {"ssta", "torch"} - sys.stdlib_module_names == set()
    said = "needs diffusers 0.42, which is not installed: pip install 'diffusers==0.42.*' transformers accelerate"
    assert refused == [f"ImportError ssta.pipelines{name} {said}" for name in (".apply_ssta", ".WAN", ".evaluation")]


def test_the_version_is_said_once():
    import ssta

    assert ssta.__version__ == importlib.metadata.version("ssta")


@pytest.mark.parametrize("folder, floor", FLOORS.items())
def test_the_repository_is_what_is_tested(folder, floor):
    assert Path(importlib.import_module(floor).__file__).resolve().parent == ROOT / folder
