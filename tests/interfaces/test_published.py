"""tests/support/published.py: files that cannot be had are said to be missing, as a failure in CI, and leave nothing behind."""

import subprocess

import published
import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "PLUGS", tmp_path / "plugs")
    return tmp_path / "plugs"


def pip(monkeypatch, returncode, stderr=""):
    """Stands for it; writes a file into the folder that it was given."""
    def run(command, **options):
        with open(f"{command[command.index('--target') + 1]}/module.py", "w"):
            pass
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize("ci, ends", [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_what_cannot_be_had(folder, monkeypatch, ci, ends):
    monkeypatch.setenv("CI", ci)
    pip(monkeypatch, 1, "no network")
    with pytest.raises(ends, match="some==1.0 cannot be had from the package registry: no network"):
        published.published("some==1.0")
    assert list(folder.iterdir()) == []


def test_fetched_once(folder, monkeypatch):
    pip(monkeypatch, 0)
    found = published.published("some==1.0", "other==2.0")
    assert [path.name for path in found.iterdir()] == ["module.py"]
    pip(monkeypatch, 1)
    assert published.published("some==1.0", "other==2.0") == found
    assert list(folder.iterdir()) == [found]
