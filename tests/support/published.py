"""Other programs' own published files, fetched once from the package registry into build/plugs/, for tests that run against them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent.parent / "build" / "plugs"


def published(name: str, version: str) -> Path:
    """The folder that holds package ``name`` of exactly ``version``, without its dependencies.

    Where it cannot be fetched the test is skipped with the reason, and fails where the environment variable CI is set.
    """
    folder = FOLDER / f"{name}-{version}"
    if not list(folder.glob("*.dist-info")):
        run = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--retries", "1",
                              "--target", str(folder), f"{name}=={version}"], capture_output=True, text=True)
        if run.returncode:
            reason = f"{name} {version} could not be fetched from the package registry: {run.stderr.strip().splitlines()[-1:]}"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return folder
