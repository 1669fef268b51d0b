"""Another checkout beside this one: which library is imported, who works when, and what is compared."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rows import read_rows

ROOT = Path(__file__).parent.parent.parent


def tree(folder, linked):
    """A checkout in small whose ssta says where it lies, with or without links to its floors."""
    for name in ("ssta", "kernels", "pipelines"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
    (folder / "ssta" / "where.py").write_text(f"HERE = {folder.name!r}\n")
    (folder / "kernels" / "where.py").write_text("from ..where import HERE\n")
    if linked:
        (folder / "ssta" / "kernels").symlink_to("../kernels")
    return folder


@pytest.mark.parametrize("linked", [False, True])
def test_the_checkout_is_what_is_imported(tmp_path, linked):
    from sides import checkout, package

    package(checkout(str(tree(tmp_path / "tree", linked))), tmp_path / "path")
    code = "import ssta.pipelines, ssta.kernels.where as w; print(w.HERE, w.__name__)"
    found = subprocess.run([sys.executable, "-c", code], env=os.environ | dict(PYTHONPATH=str(tmp_path / "path")), cwd=tmp_path,
                           capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["tree", "ssta.kernels.where"]


def test_what_is_no_checkout_is_refused(tmp_path, capsys):
    import bench_host
    from sides import checkout

    with pytest.raises(argparse.ArgumentTypeError, match="DIR must be a checkout of this repository, with ssta/__init__.py, got"):
        checkout(str(tmp_path))
    with pytest.raises(SystemExit):
        bench_host.main(["--against", str(tmp_path)])
    assert "--against: DIR must be a checkout" in capsys.readouterr().err


def test_sides_alternate_until_both_have_ended():
    from sides import take_turns

    worked = []

    class Fake:
        def __init__(self, name, rounds):
            self.name, self.rounds = name, rounds

        def next(self):
            worked.append(self.name)
            self.rounds -= 1
            return self.rounds > 0

    take_turns([Fake("a", 2), Fake("b", 4)])
    assert "".join(worked) == "ababbb"


def test_rows_are_compared_by_their_keys():
    from sides import compared

    def row(name, ms, spread, mib):
        return dict(what=name, median_ms=ms, q1_ms=ms and str(float(ms) - spread), q3_ms=ms and str(float(ms) + spread), extra_mib=mib)

    here = [row("a", "2.0", 0.1, "30"), row("b", "", 0, ""), row("only here", "1", 0, "")]
    there = [row("b", "", 0, ""), row("a", "4.0", 0.4, "20")]
    first, second = compared(here, there, ("what",), ("median_ms", "extra_mib"))
    assert first == {"what": "a", "median_ms here": 2.0, "median_ms there": 4.0, "median_ms ratio": 0.5, "extra_mib here": 30.0,
                     "extra_mib there": 20.0, "extra_mib ratio": 1.5, "spread": pytest.approx(0.1)}
    assert second["median_ms ratio"] == second["extra_mib ratio"] == "" and second["spread"] == 0
    with pytest.raises(SystemExit, match="nothing was measured on both sides"):
        compared(here[2:], there, ("what",), ("median_ms",))


@pytest.mark.slow
def test_a_checkout_against_itself(tmp_path, monkeypatch, capsys):
    import bench_host

    monkeypatch.setattr(bench_host, "RESULTS", tmp_path)
    bench_host.main(["--layer", "no text", "--calls", "1", "--rounds", "1", f"--against={ROOT}", "--csv", "mine"])
    rows = read_rows(tmp_path / "mine.csv")
    assert [row["what"] for row in rows] == list(bench_host.CALLS)
    assert all(float(row["host_us ratio"]) == float(row["host_us here"]) / float(row["host_us there"]) > 0 for row in rows)
    assert "largest ratio of host_us: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_side_that_fails_ends_both_and_shows_why(tmp_path):
    import bench_host

    broken = tree(tmp_path / "tree", True)
    with pytest.raises(SystemExit, match=r"cannot import name(.|\n)*the benchmark on .*tree ended with an error, 1"):
        bench_host.main(["--against", str(broken), "--calls", "1", "--rounds", "1"])
