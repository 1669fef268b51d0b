"""Another checkout beside this one: which library is imported, who works when, and what is compared."""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
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


@pytest.mark.parametrize("form", ["plain", "linked", "src"])
def test_the_checkout_is_what_is_imported(tmp_path, form):
    from sides import checkout, package

    top = tree(tmp_path / "tree", form == "linked")
    if form == "src":
        # As a wheel has it: the floors are folders of the package.
        for floor in ("kernels", "pipelines"):
            (top / floor).rename(top / "ssta" / floor)
        (top / "src").mkdir()
        (top / "ssta").rename(top / "src" / "ssta")
    package(checkout(str(top)), tmp_path / "path")
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


class Turns:
    """A side that asks for ``wants`` one after the other, and writes to ``worked`` what it does."""

    def __init__(self, name, wants, worked):
        self.name, self._wants, self._worked = name, list(wants), worked
        self.wants = self._wants.pop(0)

    def hand_over(self):
        self._worked.append(f"{self.name} starts")

    def returned(self):
        self._worked.append(f"{self.name} ends")
        self.wants = self._wants.pop(0) if self._wants else b""
        return bool(self.wants)

    def next(self):
        self.hand_over()
        return self.returned()


def test_sides_prepare_together_and_take_turns_in_either_order():
    from against import take_turns
    from measure import ALONE, TOGETHER

    worked = []
    wants = [TOGETHER, ALONE, ALONE]
    take_turns([Turns("a", wants, worked), Turns("b", wants, worked)], lambda: worked.append("check"))
    assert worked == ["a starts", "b starts", "a ends", "b ends", "check",
                      "a starts", "a ends", "b starts", "b ends", "b starts", "b ends", "a starts", "a ends"]


def measured(*values, unit="ms", why=""):
    return dict(unit=unit, values=list(values), note=why)


def drifting(factor, rounds=15):
    """Rounds of a card that throttles: times of both drift by a tenth, and each is off by up to 0.4 % by itself."""
    noise = random.Random(0)
    drift = [10 * (1 + 0.1 * turn / rounds) for turn in range(rounds)]
    old, new = ([ms * (1 + noise.uniform(-0.004, 0.004)) for ms in drift] for _ in range(2))
    return measured(*old), measured(*[factor * ms for ms in new])


@pytest.mark.parametrize("factor, mark", [(1.0, ""), (1.005, ""), (1.02, "SLOWER"), (0.98, "")])
def test_two_percent_are_seen_where_clocks_drift_by_ten(factor, mark):
    from against import compared

    old, new = drifting(factor)
    row, = compared({"layer a": old}, {"layer a": new}, {"layer_a": 0.0}, 1.5, 10.0)
    assert row["mark"] == mark and row["ratio"] == pytest.approx(factor, abs=0.003) and row["q1"] <= row["ratio"] <= row["q3"]


def test_what_is_marked():
    from against import compared

    old = {"layer a": measured(1.0, 1.0), "kernel b": measured(1.0), "host c": measured(100.0, 100.0, unit="us"),
           "memory d": measured(100.0, unit="MiB"), "gate at 0.1": measured(38.1, unit="dB"), "model e": measured(2.0)}
    new = {"layer a": measured(why="failed: x"), "kernel b": measured(1.0), "host c": measured(108.0, 108.0, unit="us"),
           "memory d": measured(104.0, unit="MiB"), "gate at 0.1": measured(37.9, unit="dB")}
    rows = {row["row"]: row for row in compared(old, new, {"kernel_b": 0.02}, 1.5, 10.0)}
    assert {name: row["mark"] for name, row in rows.items()} == {
        "layer a": "LEFT OUT", "kernel b": "RESULTS DIFFER", "host c": "", "memory d": "LARGER", "gate at 0.1": "WORSE",
        "model e": "LEFT OUT"}
    assert rows["layer a"]["note"] == "NEW: failed: x" and rows["model e"]["note"] == "NEW: it has no such row"
    assert rows["kernel b"]["ratio"] == "" and rows["host c"]["ratio"] == 1.08


def test_results_are_compared_by_their_distance():
    from against import distance

    x = torch.tensor([3.0, 4.0])
    assert distance([x], [x]) == 0 and distance([x, x], [x, x + torch.tensor([0.0, 0.5])]) == pytest.approx(0.1)
    assert distance([x], [x[:1]]) == distance([x], [x * torch.nan]) == float("inf")


@pytest.mark.slow
def test_a_planted_slowdown_and_a_planted_fault_in_a_layer(tmp_path):
    """NEW computes all layers twice, and one of them wrongly."""
    import against

    new = tmp_path / "new"
    for name in ("ssta", "kernels", "pipelines"):
        shutil.copytree(ROOT / name, new / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    file = new / "ssta" / "attention.py"
    line = "    require_bool(\"return_blocks\", return_blocks)\n"
    text = file.read_text()
    assert text.count(line) == 1
    file.write_text(text.replace(line, line + (
        "    if config.compensation_parts == 1 and scale is None:\n        scale = 0.1 if config.compensation == 'linear' else None\n"
        "    attend(query, key, value, layout, config, text_mask=text_mask)\n")))
    rows = tmp_path / "rows.csv"
    assert against.main([str(ROOT), str(new), "--only", "layer", "--rounds", "2", "--csv", str(rows),
                         "--json", str(tmp_path / "rows.json")]) == 1
    marked = {row["row"].split(", ", 1)[1]: row for row in read_rows(rows)}
    assert marked["one part"]["mark"] == marked["one part, backward"]["mark"] == "RESULTS DIFFER"
    assert marked["default"]["mark"] == marked["none"]["mark"] == "SLOWER" and float(marked["default"]["ratio"]) > 1.4
    sides = json.loads((tmp_path / "rows.json").read_text())
    timed = {what: [len(sides[side][f"layer small, {what}"]["values"]) for side in ("old", "new")] for what in ("one part", "none")}
    assert timed == {"one part": [0, 0], "none": [2, 2]}
    assert marked["default"]["apart"] == "0.0"
