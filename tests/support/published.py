"""Other programs' own published files, for tests to import: wheels from the package registry, without their dependencies."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hanging import HANG

PLUGS = Path(__file__).parents[2] / "build" / "plugs"


def published(*requirements: str) -> Path:
    """The folder that holds these exact versions ("name==version"), fetched once into build/plugs/.

    Where they cannot be had the test is skipped with the reason, and in CI (the environment variable CI is set) it fails.
    """
    folder = PLUGS / "_".join(requirement.replace("==", "-") for requirement in requirements)
    if folder.is_dir():
        return folder
    PLUGS.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=PLUGS))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=1", "--target", str(fresh),
               *requirements]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
        problem = run.stderr.strip() if run.returncode else ""
    except subprocess.TimeoutExpired as late:
        problem = f"no answer within {late.timeout} s"
    if problem:
        shutil.rmtree(fresh)
        cannot_be_had(f"{' '.join(requirements)} cannot be had from the package registry: {problem}")
    try:
        fresh.rename(folder)  # whole or not at all: several workers may fetch at a time
    except OSError:
        shutil.rmtree(fresh)
        if not folder.is_dir():
            raise
    return folder


def cannot_be_had(reason: str) -> None:
    """Ends the test: a failure in CI, a skip elsewhere."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
