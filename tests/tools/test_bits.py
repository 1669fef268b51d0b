"""bits.py and soak.py see planted faults, and say which calls they left out."""

import json
import shutil
from pathlib import Path

import bits
import pytest
import soak
import torch
from bits_on_ranks import answers
from random_calls import Call, digests, run, texts
from random_specs import KINDS, spec_of, specs
from ranks import on_ranks

import ssta

ROOT = Path(__file__).parents[2]
# A result that is scaled in one branch, a list that is one too long, and a tensor that is kept and handed out again.
SCALED = ("kernels/eager/steps.py", "(weights @ values.masked_fill(bad, 0.0))", "(1.001 * weights @ values.masked_fill(bad, 0.0))")
LONGER = ("ssta/budget.py", "best = Budget(min(config.row_topk, ", "best = Budget(min(config.row_topk + 1, ")
HANDED_OUT = ("ssta/dense.py", "    return result",
              "    if not result.out.requires_grad:\n"
              "        result.out = _made.setdefault(result.out.shape, result.out).copy_(result.out)\n"
              "    return result\n\n\n_made: dict = {}")
GONE = ("ssta/__init__.py", '"video_sparse_attention"', '"ssta_attention"')


def planted(folder, *faults):
    """A checkout with ``faults``."""
    for name in ("ssta", "kernels", "pipelines"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in faults:
        text = (folder / file).read_text()
        assert text.count(old) == 1, file
        (folder / file).write_text(text.replace(old, new))
    return folder


def test_specs_are_the_same_for_a_seed_and_plain():
    one = specs(3, 200, "cpu", [*KINDS])
    assert one == json.loads(json.dumps(specs(3, 200, "cpu", [*KINDS]))) and {spec["kind"] for spec in one} == set(KINDS)
    # A kind's specs do not depend on the others.
    assert spec_of("kernel", 3, 2, "cpu") in specs(3, 40, "cpu", ["kernel"]) and spec_of("kernel", 3, 2, "cpu") in one
    assert specs(4, 200, "cpu", [*KINDS]) != one


def text(x):
    return texts({"x": x}, digests({"x": x}))["x"]


def test_every_bit_counts_in_a_digest():
    x = torch.randn(3, 50, dtype=torch.bfloat16)
    seen = {text(x), text(x.float()), text(x.view(50, 3))}
    for place in range(0, 150, 7):
        other = x.clone()
        other.view(torch.int16).view(-1)[place] ^= 1 << place % 16
        seen.add(text(other))
    assert len(seen) == 3 + 22 and text(torch.zeros(2)) != text(-torch.zeros(2))
    assert text(x.mT) == text(x.mT.contiguous())


@pytest.mark.slow
def test_planted_faults_are_listed(tmp_path, capsys):
    """Those and no others: kinds that they do not reach have equal bits. A name that one side lacks leaves calls out."""
    new = planted(tmp_path / "new", SCALED, LONGER, HANDED_OUT, GONE)
    kinds = ["attention", "two parts", "dense", "kernel", "vsa", "sla"]
    assert bits.main([str(ROOT), str(new), "--calls", "120", "--device", "cpu", "--processes", "2", "--only", *kinds]) == 1
    said = capsys.readouterr().out
    table = {line[:18].strip(): line[18:].split() for line in said.splitlines()}
    calls, equal, other, tiles, refused = map(int, table["attention"])
    assert 0 < tiles <= other < calls and refused == 0
    assert 0 < int(table["kernel"][2]) < int(table["kernel"][0]) and table["kernel"][3] == "0"
    assert table["sla"][0] == table["sla"][1] and "vsa" not in table
    assert "calls: vsa: NEW has no ssta.video_sparse_attention" in said
    assert "NEW wrote to results after it had returned them: out" in said
    assert "DIFFERS: attention " in said and ": selection: " in said and "DIFFERS: kernel " in said
    # A result that is scaled by a thousandth is farther from float64 by as much.
    lines = [line for line in said.splitlines() if line.startswith("DIFFERS: kernel ") and ": out: " in line]
    means = [[float(mean) for mean in line.split("mean ")[1].split(",")[0].split(" -> ")] for line in lines]
    assert any(old < 1e-5 < new < 2e-3 for old, new in means)


@pytest.mark.slow
def test_what_ranks_answer():
    """Every rank knows the results of all, which are those of one process in float64."""
    drawn = [spec_of(kind, 0, number, "cpu") for kind in ("ranks", "estimated ranks") for number in range(12)]
    todo = [spec for spec in drawn if spec["dtype"] != "bfloat16" and spec.get("config", {}).get("sampling_type") is None]
    first, second = on_ranks(answers, 2, todo)
    assert not first.error, first.trace
    assert [line for line, _ in first.value] == [line for line, _ in second.value]
    for spec, (line, far) in zip(todo, first.value):
        assert "error" not in line and not line["changed"]
        assert {name.rsplit(" ", 1)[1] for name in line["digests"]} == {"0", "1"}, spec
        # float32 cuts tiles otherwise in two parts, and selects other tiles then.
        if spec["kind"] == "ranks":
            assert len(far) >= 2 and max(far.values()) < 1e-4, (spec, far)
    assert {"segments" in spec for spec in todo} == {True, False}


def report_of(*differences, kind="two parts"):
    report = bits.Report()
    report.equal[kind], report.other[kind] = 5, len(differences)
    report.differences += [(kind, f"{kind} {number} of seed 0", "out", how) for number, how in enumerate(differences)]
    return report


def rounded(mean, worst):
    return dict(dtype="float32", values=3, of=9, apart=1e-3, relative=1e-3, old_mean=1e-3, old_worst=1e-2, new_mean=mean, new_worst=worst)


@pytest.mark.parametrize("mean, worst, status", [(1e-3, 1e-2, 0), (0.9e-3, 1e-2, 0), (1.03e-3, 1e-2, 1), (1e-3, 1.1e-2, 1)])
def test_estimates_may_round_otherwise_but_not_worse(mean, worst, status):
    said = []
    assert bits.printed(report_of(rounded(mean, worst)), said.append) == status
    assert any(line.startswith("FARTHER: two parts: out") for line in said) == bool(status)
    # Without an estimate no difference is allowed.
    assert bits.printed(report_of(rounded(mean, worst), kind="attention"), said.append) == 1


def test_one_side_that_raises_is_wrong_and_both_alike_are_refused():
    report, spec = bits.Report(), spec_of("dense", 0, 0, "cpu")
    assert not bits.compare(spec, dict(error="ValueError: a"), dict(error="ValueError: b"), report)
    assert report.refused["dense"] == 1 and not report.wrong
    assert not bits.compare(spec, dict(error="ValueError: a"), dict(digests={"out": "1"}, changed=[]), report)
    assert report.wrong == ["dense 0 of seed 0: OLD ValueError: a; NEW runs"] and bits.printed(report, lambda line: None) == 1


def test_nothing_compared_is_no_success():
    assert bits.printed(bits.Report(), lambda line: None) == 1


def test_soak_sees_what_only_later_calls_do(monkeypatch):
    """Each call is right by itself."""
    todo = [spec for number in range(8) if not (spec := spec_of("dense", 0, number, "cpu"))["grad"]][:3]
    right, memory = ssta.dense_attention, {}

    def handed_out(*args, **options):
        result = right(*args, **options)
        result.out = memory.setdefault(result.out.shape, result.out).copy_(result.out)
        return result

    def turned():
        process = soak.Soak(todo, "cpu", 0)
        process.first_pass()
        for _ in range(12):
            process.turn()
        process.close()
        return process

    assert not turned().wrong
    monkeypatch.setattr(ssta, "dense_attention", handed_out)
    assert any("later calls wrote to out" in line for line in turned().wrong)


@pytest.mark.slow
def test_a_soak(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    assert soak.main(["--processes", "1", "--seconds", "0.5", "--calls", "6", "--device", "cpu", "--only", "dense", "kernel"]) == 0
    said = capsys.readouterr().out
    assert "soak: 1 processes, 0 s each on cpu, seed 0: 6 specs" in said and "every call had the bits of its first time" in said


def test_a_soak_that_fails_says_the_spec_and_goes_on():
    spec = spec_of("dense", 0, 0, "cpu")
    process = soak.Soak([spec], "cpu", 0)
    process.first_pass()
    process.first[0]["out"] = "other"
    process.turn()
    process.calls[0].impl = "no such"
    process.turn()
    process.close()
    assert "dense 0 of seed 0, " in process.wrong[0] and "other bits than the first time in out" in process.wrong[0]
    assert "ValueError" in process.wrong[1] and len(process.wrong) == 2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not KINDS[kind].gpu and KINDS[kind].ranks == 1])
def test_calls_give_numbers_and_float64_of_the_same_names(kind):
    spec = next(spec for number in range(20) if (spec := spec_of(kind, 1, number, "cpu"))["dtype"] == "float32")
    (named, sums), (exact, _) = (run(Call(spec, "cpu", wide=wide)) for wide in (False, True))
    assert named.keys() == exact.keys() and all(not x.isnan().any() for x in named.values())
    assert texts(named, sums) == texts(named, digests(named)) and exact[next(iter(exact))].dtype == torch.float64
