"""Which rows of benchmark/results are stale: code that their numbers depend on has changed since the commit that they were measured at.

A GPU is not at hand wherever the code changes, so a stale row is no error by itself: table.py prints it and writes it under the table, and
only ``table.py --fresh`` fails. Comments, docstrings and layout are not code. The files are those of the working tree.
"""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

from rows import Row, grouped

ROOT = Path(__file__).resolve().parent.parent

# What the numbers of each kind of CSV, KIND_MACHINE.csv, depend on. Patterns of paths, in which * matches / too; "!" takes paths out again,
# the last pattern that matches a path decides. {gpu} is the folder of the kernels that the machine's GPU runs.
_BLOCKS = ("kernels/*", "!kernels/*/*", "kernels/lowering/*", "kernels/{gpu}/*", "!*estimate*", "!kernels/interfaces.py",
           "!kernels/merge.py", "!kernels/backend.py", "!kernels/reference.py")
_LAYER = (*_BLOCKS, "kernels/backend.py", "kernels/estimate*", "kernels/*/estimate*", "kernels/prologue/*", "ssta/*",
          "!ssta/masks.py", "!ssta/plot.py", "!ssta/report.py", "!ssta/trained/*", "!ssta/ranks/*", "!kernels/eager/*")
_STEP = (*_LAYER, "pipelines/schedule/*", "pipelines/patch/*", "pipelines/families/*", "!*/report.py")
_RANKS = (*_STEP, "pipelines/ranks/*", "ssta/ranks/*")
SOURCES: dict[str, tuple[str, ...]] = {
    "kernels": _BLOCKS, "sweep": _BLOCKS, "cudnn": (*_BLOCKS, "kernels/cudnn/*"),
    "errors": (*_BLOCKS, "kernels/eager/*", "kernels/portable/*", "kernels/hopper/*", "!*estimate*", "!*/moves.py",
               "!*/ranking.py"),
    "tokens": ("kernels/*", "!kernels/hopper/*", "!kernels/prologue/*", "!*estimate*", "!kernels/reference.py", "!kernels/backend.py",
               "!*/moves.py", "!*/ranking.py", "interfaces/tokens/*", "interfaces/nsa.py", "interfaces/seer.py"),
    "interfaces": (*_BLOCKS, "kernels/portable/*", "!*estimate*", "interfaces/*", "!interfaces/nsa.py", "!interfaces/seer.py"),
    "layer": _LAYER, "grid": _LAYER, "host": _LAYER, "streaming": _LAYER, "rollout": _LAYER,
    "vsa": (*_LAYER, "ssta/trained/*"),
    "pipeline": _STEP, "recipe": _STEP, "quality": _STEP, "fine_tune": _STEP, "gate": _STEP, "few_steps": _STEP, "few_fine_tune": _STEP,
    "parallel": _RANKS, "timeline": _RANKS}
# These compare two commits that they name, and say nothing of the present code.
COMPARISONS = ("against", "before_after")


@dataclass(frozen=True)
class Age:
    """Rows of one commit.

    Attributes:
        commit: as the rows have it.
        rows: how many they are.
        changed: the files under them whose code has changed since; None where git cannot say, as it has no such commit here.
    """

    commit: str
    rows: int
    changed: tuple[str, ...] | None

    @property
    def fresh(self) -> bool:
        return self.changed == ()

    @property
    def brief(self) -> str:
        """Without the folders."""
        if self.changed is None:
            return f"Unknown: git does not have commit {self.commit} here, so these rows may be stale"
        return f"Stale: {len(self.changed)} file{'s' * (len(self.changed) > 1)} under these rows changed since commit {self.commit}"

    def __str__(self) -> str:
        folders = Counter(str(Path(path).parent) for path in self.changed or ()).most_common()
        return self.brief + (f" ({', '.join(f'{folder} {number}' for folder, number in folders)})" if folders else "")


def ages(name: str, rows: Sequence[Row], tree: Path = ROOT) -> list[Age]:
    """Of ``rows`` of the CSV ``name`` (without its ending): one for each commit.

    Raises:
        ValueError: ``name`` begins with no kind of SOURCES or COMPARISONS.
    """
    kind = name.rpartition("_")[0]
    if name.startswith(COMPARISONS):
        return []
    if kind not in SOURCES:
        raise ValueError(f"benchmark/staleness.py must say in SOURCES what {name}.csv depends on; it knows {', '.join(SOURCES)}")
    found = []
    for (commit, device), of in grouped(list(rows), lambda row: (row["commit"], row["device"])).items():
        gpu = "hopper" if any(card in device for card in ("H100", "H200", "GH200")) else "portable"
        changed = _changed_code(tree, commit)
        if changed is not None:
            changed = tuple(path for path in changed if matches(path, SOURCES[kind], gpu))
        found.append(Age(commit, len(of), changed))
    return found


def matches(path: str, patterns: Sequence[str], gpu: str) -> bool:
    """Whether the last of ``patterns`` that ``path`` matches takes it in. Packages' doors (__init__.py) hold names only."""
    decides = next((pattern for pattern in reversed(patterns) if fnmatch(path, pattern.lstrip("!").format(gpu=gpu))), "!")
    return not decides.startswith("!") and not path.endswith("/__init__.py")


@lru_cache
def _changed_code(tree: Path, commit: str) -> tuple[str, ...] | None:
    """The Python files of the library whose code differs between ``commit`` and the working tree."""
    diff = _git(tree, "diff", "--raw", "--no-renames", "--abbrev=40", "-z", commit, "--", "kernels", "ssta", "pipelines", "interfaces")
    if diff is None:
        return None
    # ":mode mode blob blob status", path, and so on; a blob of zeros is none.
    fields = diff.decode().split("\0")[:-1]
    before = {path: about.split()[2] for about, path in zip(fields[::2], fields[1::2]) if path.endswith(".py")}
    blobs = [blob for blob in before.values() if blob.strip("0")]
    texts = dict(zip(blobs, _blobs(tree, blobs)))
    changed = []
    for path, blob in before.items():
        now = tree / path
        if blob not in texts or not now.is_file() or not _same_code(texts[blob], now.read_bytes()):
            changed.append(path)
    return tuple(changed)


def _blobs(tree: Path, names: list[str]) -> list[bytes]:
    """Their contents."""
    output = _git(tree, "cat-file", "--batch", send="".join(f"{name}\n" for name in names).encode()) or b""
    found = []
    while output:
        head, _, output = output.partition(b"\n")
        size = int(head.split()[2])
        found.append(output[:size])
        output = output[size + 1:]
    return found


@lru_cache(maxsize=2048)
def _same_code(before: bytes, now: bytes) -> bool:
    """Whether two Python files differ in comments, docstrings and layout at most."""
    try:
        return _same(ast.parse(before), ast.parse(now))
    except (SyntaxError, ValueError):
        return before == now


def _same(one: object, other: object) -> bool:
    if isinstance(one, ast.AST):
        return type(one) is type(other) and all(_same(_part(one, name), _part(other, name)) for name in one._fields)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


def _part(node: object, name: str) -> object:
    """A field of ``node``; its body without a docstring."""
    part = getattr(node, name, None)
    if name == "body" and isinstance(part, list) and part and isinstance(part[0], ast.Expr) and isinstance(part[0].value, ast.Constant):
        return part[1:]
    return part


def _git(tree: Path, *command: str, send: bytes = b"") -> bytes | None:
    try:
        return subprocess.run(("git", "-C", str(tree), *command), input=send, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
