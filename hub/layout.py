"""Lays SSTA out as a kernel repository of the Hugging Face Hub, which its library `kernels` loads (make hub).

    python hub/layout.py [--out build/hub] [--repo ORGANISATION/ssta]

The layout is `torch-noarch`: one folder for each kind of torch build, all with the same Python files, and no version of torch in its name.
Written after https://huggingface.co/docs/kernels/kernel-requirements; checked with kernels 0.17.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
NAME = "ssta"
LICENSE = "apache-2.0"
# A kind of torch build -> the GPUs that it runs on, None where there are none. "+PTX": those and every newer one.
BACKENDS: dict[str, list[str] | None] = {"cpu": None, "cuda": ["8.0+PTX"]}
# Of ssta/: what the layout writes itself, what needs matplotlib, for which a kernel of the Hub may not ask, the sign at an old place, and
# links to the other folders.
LEFT_OUT = {"__init__.py", "plot.py", "masks.py", "kernels", "pipelines", "interfaces"}


def sources() -> dict[str, bytes]:
    """What every variant holds, by its path there: ssta/ with kernels/ and interfaces/ inside, entered by hub/door.py."""
    own = [(path.relative_to(ROOT / "ssta"), path) for path in (ROOT / "ssta").rglob("*.py")]
    found = {str(name): path for name, path in own if name.parts[0] not in LEFT_OUT}
    found |= {str(path.relative_to(ROOT)): path for folder in ("kernels", "interfaces") for path in (ROOT / folder).rglob("*.py")}
    found |= {"__init__.py": HERE / "door.py"}
    return {path: file.read_bytes() for path, file in sorted(found.items())}


def identity(files: dict[str, bytes], backend: str) -> str:
    """The name under which a variant is imported and registers its operators: of its content, so that two builds never share one."""
    content = hashlib.sha256()
    for path, data in files.items():
        content.update(f"{path}\0{len(data)}\0".encode() + data)
    return f"_{NAME}_{backend}_{content.hexdigest()[:10]}"


def compatible(name: str) -> bytes:
    """The ``__init__.py`` of the folder in which old versions of `kernels` look for a kernel: the very module of the folder above."""
    return f'''"""The kernel of the folder above, where versions of `kernels` before flat layouts look for it."""

import importlib.util
import sys
from pathlib import Path

if {name!r} not in sys.modules:
    _spec = importlib.util.spec_from_file_location({name!r}, Path(__file__).parent.parent / "__init__.py")
    sys.modules[{name!r}] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[{name!r}])

__all__ = sys.modules[{name!r}].__all__
globals().update({{_name: getattr(sys.modules[{name!r}], _name) for _name in __all__}})
'''.encode()


def metadata(files: dict[str, bytes], name: str, backend: str, version: int) -> dict:
    """``metadata.json`` of a variant, with the digest of every other file of it."""
    archs = BACKENDS[backend]
    digest = {path: base64.b64encode(hashlib.sha256(data).digest()).decode() for path, data in sorted(files.items())}
    return {"id": name, "name": NAME, "version": version, "license": LICENSE, "python-depends": [], "kernel-depends": [],
            "backend": {"type": backend} | ({} if archs is None else {"archs": archs}),
            "digest": {"algorithm": "sha256", "files": digest}}


def build_toml(version: int, repo: str | None) -> str:
    """``build.toml``, from which the tool that uploads takes name, version and repository."""
    lines = ["[general]", f'name = "{NAME}"', f"version = {version}", "edition = 5", f'license = "{LICENSE}"',
             f"backends = {json.dumps(sorted(BACKENDS))}", ""]
    lines += ["[general.hub]", f'repo-id = "{repo}"', ""] if repo else []
    lines += ["[torch-noarch]", 'pyext = ["py"]', f'cuda_capabilities = {json.dumps(BACKENDS["cuda"])}', ""]
    return "\n".join(lines)


def card(version: int, repo: str | None) -> str:
    """The repository's page: hub/CARD.md with the names that the door exports."""
    door = ast.parse((HERE / "door.py").read_text())
    exported = next(ast.literal_eval(node.value) for node in door.body
                    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
    text = (HERE / "CARD.md").read_text()
    for place, value in {"REPO": repo or f"ORGANISATION/{NAME}", "VERSION": str(version),
                         "FUNCTIONS": "\n".join(f"- `{name}`" for name in exported)}.items():
        text = text.replace(place, value)
    return text


def major_version() -> int:
    """The kernel's version on the Hub: ssta's first number, 0 while its interface may change."""
    line = next(line for line in (ROOT / "ssta" / "__init__.py").read_text().splitlines() if line.startswith("__version__"))
    return int(ast.literal_eval(line.split("=")[1].strip()).split(".")[0])


def lay_out(out: Path, repo: str | None = None) -> dict[str, Path]:
    """Writes the repository to the folder ``out``, over an earlier one, and returns where each backend's variant is.

    Raises:
        ValueError: ``out`` holds something else, or ``repo`` is not ORGANISATION/NAME.
    """
    if repo is not None and (repo.count("/") != 1 or not all(repo.split("/"))):
        raise ValueError(f"repo must be ORGANISATION/NAME, got {repo!r}")
    earlier = out / "build.toml"
    if out.exists() and any(out.iterdir()) and not (earlier.exists() and f'name = "{NAME}"' in earlier.read_text()):
        raise ValueError(f"out must be an empty folder, a new one or an earlier layout of {NAME}, got {out}")
    version, shared, places = major_version(), sources(), {}
    for backend in BACKENDS:
        name = identity(shared, backend)
        files = shared | {f"{NAME}/__init__.py": compatible(name)}
        places[backend] = out / "build" / f"torch-{backend}"
        shutil.rmtree(places[backend], ignore_errors=True)
        for path, data in files.items():
            target = places[backend] / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        described = json.dumps(metadata(files, name, backend, version), indent=2) + "\n"
        (places[backend] / "metadata.json").write_text(described)
    (out / "build.toml").write_text(build_toml(version, repo))
    # Where the tool that uploads looks for the page, and where the Hub does.
    for page in (out / "build" / "CARD.md", out / "README.md"):
        page.write_text(card(version, repo))
    return places


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hub", help="the folder to write (default build/hub)")
    parser.add_argument("--repo", metavar="ORGANISATION/NAME", help="the repository on the Hub that it is for")
    options = parser.parse_args(argv)
    try:
        places = lay_out(options.out, options.repo)
    except ValueError as error:
        parser.error(str(error))
    for backend, place in places.items():
        print(f"{backend}: {place}, {sum(path.is_file() for path in place.rglob('*'))} files")


if __name__ == "__main__":
    main()
