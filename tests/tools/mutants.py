"""make mutants: deliberate faults in the sources, one at a time, each of which named tests must catch.

The sources and tests are copied to a temporary folder, where each fault replaces one text and only its tests run. A fault that survives
means tests that cannot see: strengthen them, by the rule that a kernel's error is at most twice that of dense torch in the same dtype,
block by block; do not make the fault larger. Words choose faults whose names hold one of them; --list says what there is.

Exit status 1: a fault survived, a text is not there exactly once, or the tests fail without any fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from hanging import HANG  # noqa: E402
from mutant_faults import FAULTS, Fault  # noqa: E402

# Not python -m pytest, nor with the current folder on sys.path, where kernels/ would hide the package that diffusers asks for.
PYTEST = "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
COPIED = ("ssta", "kernels", "pipelines", "interfaces", "tests", "benchmark", "src", "pyproject.toml")


def problem(fault: Fault, root: Path = ROOT) -> str | None:
    """Why the fault cannot be planted, if it cannot."""
    path = root / fault.file
    if not path.is_file():
        return f"there is no {fault.file}"
    times = path.read_text().count(fault.old)
    if times != 1:
        return f"{fault.file} has the text {times} times, not once:\n{fault.old}"
    if fault.new == fault.old:
        return "it changes nothing"
    missing = [test for test in fault.tests if not _has(root, test)]
    return f"there is no {', '.join(missing)}" if missing else None


def _has(root: Path, test: str) -> bool:
    file, _, name = test.partition("::")
    path = root / file
    return path.is_file() and (not name or f"def {name.partition('[')[0]}(" in path.read_text())


def copied(to: Path, root: Path = ROOT) -> Path:
    """What tests need of the repository, with links as they are."""
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
        else:
            shutil.copy(root / name, to / name)
    return to


def run(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """(pytest's exit status, what it printed) of the tests in the folder, with the sources there, up to the first failure."""
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PYTEST, "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=line", *tests]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG)
    return done.returncode, done.stdout + done.stderr


def caught(fault: Fault, root: Path = ROOT) -> tuple[bool, str]:
    """(whether a test failed with the fault, what says so)."""
    with tempfile.TemporaryDirectory() as folder:
        of = copied(Path(folder), root)
        path = of / fault.file
        path.write_text(path.read_text().replace(fault.old, fault.new))
        status, said = run(of, fault.tests)
    # 1: tests failed. Whatever else stopped pytest, such as a fault that is no Python, is not what was asked for.
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if status == 1 and failed:
        return True, failed[0].split(" - ")[0]
    return False, "the tests pass" if status == 0 else f"pytest stopped with {status}:\n{said[-2000:]}"


def sound(tests: Sequence[str], root: Path = ROOT) -> str | None:
    """What the tests print if they do not pass as things are."""
    with tempfile.TemporaryDirectory() as folder:
        status, said = run(copied(Path(folder), root), tests)
    return None if status == 0 else said[-4000:]


def main(arguments: Sequence[str] | None = None, faults: Sequence[Fault] = FAULTS, root: Path = ROOT,
         say: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose names hold one of these")
    parser.add_argument("--list", action="store_true", help="name them and stop")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults at a time (default %(default)s)")
    options = parser.parse_args(arguments)
    chosen = [fault for fault in faults if not options.words or any(word in fault.name for word in options.words)]
    if options.list:
        for fault in chosen:
            say(f"{fault.name}  ({fault.file})")
        return 0
    if not chosen:
        parser.error(f"words must be part of a fault's name, got {' '.join(options.words)}")
    unsound = {fault.name: why for fault in chosen if (why := problem(fault, root))}
    for name, why in unsound.items():
        say(f"cannot be planted: {name}: {why}")
    chosen = [fault for fault in chosen if fault.name not in unsound]
    tests = list(dict.fromkeys(test for fault in chosen for test in fault.tests))
    if tests and (said := sound(tests, root)):
        say(f"without any fault the tests do not pass:\n{said}")
        return 1
    survived = 0
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        for fault, (found, why) in zip(chosen, pool.map(partial(caught, root=root), chosen)):
            survived += not found
            say(f"{'caught' if found else 'SURVIVED'}: {fault.name}: {why}")
    say(f"{len(chosen) - survived} of {len(chosen) + len(unsound)} faults caught")
    return int(survived + len(unsound) > 0)


if __name__ == "__main__":
    sys.exit(main())
