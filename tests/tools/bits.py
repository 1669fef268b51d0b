"""Do two checkouts give the same bits? Random calls of both, and the size of each difference.

    python tests/tools/bits.py OLD NEW [--calls 10000] [--seconds N] [--seed S] [--device cpu|cuda] [--only KIND ...] [--call N ...]
                               [--processes N] [--judged 100]

OLD and NEW are folders. ``git archive COMMIT ssta kernels pipelines src | tar x -C DIR`` fills one. Each library runs in processes of its
own, in pairs that get the same specs (random_specs.py), and through its public names alone. The kinds are layers without and with
estimates, lists of blocks, dense attention, VSA, SLA, deferred q, k and v, caches, and two ranks. Ranks are on a CPU where there is one
GPU. A spec has one to four calls with other inputs, in other memory or in the same, and frees nothing. Results, selections, lse and
gradients are compared.

Without an estimate every difference is listed. With an estimate the distances to float64 count, in rows that select the same tiles. Kinds
and settings that one side lacks are left out, and the report says so. Exit status 1: a call without an estimate has other bits; estimates
are farther from float64; one side raised, ended, or wrote to a result that it had returned; nothing was compared.
``--only "two parts" --call 17`` runs one call again and prints its spec.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmark")]

import torch  # noqa: E402
from random_specs import KINDS, Spec, spec_of, specs  # noqa: E402
from sides import checkout, package  # noqa: E402

# Specs of a question to both sides; few, because kernels compile in the first ones, and --seconds ends between questions.
CHUNK = 3
SHOWN, SHOWN_CALLS, SHOWN_TENSORS = 20, 5, 3
# How much farther from float64 than OLD's the estimates of NEW may be, in the mean of all and at the worst.
FARTHER_MEAN, FARTHER_WORST, ROUNDED = 1.01, 1.05, 1e-11


@dataclass
class Report:
    """What was found; pairs of processes add to it from threads.

    Attributes:
        equal, other, refused: calls by kind: with equal bits; with others; which both sides refuse alike.
        differences: (kind, spec's name, tensor's name, how far ``apart``), see bits_side.py.
        selections: by kind, calls that select other tiles.
        wrong: faults that count for every kind.
        left_out: calls by the reason why they were not made.
        reasons: calls by the error with which both sides refuse them.
    """

    equal: Counter = field(default_factory=Counter)
    other: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)
    judged: Counter = field(default_factory=Counter)
    differences: list[tuple[str, str, str, dict]] = field(default_factory=list)
    selections: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    left_out: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)

    def calls(self, kind: str) -> int:
        return self.equal[kind] + self.other[kind] + self.refused[kind]


class Ended(Exception):
    """A side is no longer there. Holds its last words."""


class Side:
    """A checkout's processes: one, or two ranks."""

    def __init__(self, name: str, path: Path, device: str, folder: Path, ranks: int = 1) -> None:
        self.name = name
        self._log = folder / f"{name} {ranks} {id(self)}.log"
        environment = os.environ | dict(PYTHONPATH=os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")])),
                                        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MEET=str(folder / f"meet {id(self)}"),
                                        WORLD_SIZE=str(ranks))
        with self._log.open("w") as log:
            self._processes = [subprocess.Popen(
                [sys.executable, str(HERE / "bits_side.py"), device], env=environment | dict(RANK=str(rank)), stderr=log, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder) for rank in range(ranks)]

    def ask(self, do: str, **values: Any) -> None:
        stream = self._processes[0].stdin
        assert stream is not None
        try:
            stream.write(json.dumps(dict(do=do, **values)) + "\n")
            stream.flush()
        except BrokenPipeError:
            pass

    def answer(self) -> Any:
        stream = self._processes[0].stdout
        assert stream is not None
        line = stream.readline()
        if not line:
            raise Ended(f"{self.name} ended: " + " | ".join(self._log.read_text().splitlines()[-6:]))
        return json.loads(line)

    def close(self) -> None:
        for process in self._processes:
            if process.stdin:
                process.stdin.close()
            process.terminate()
            process.wait()


class Pair:
    """Both sides, which work at the same time on the same specs."""

    def __init__(self, paths: Sequence[Path], device: str, folder: Path, ranks: int = 1) -> None:
        self.folder = folder
        self.sides = [Side(name, path, device, folder, ranks) for name, path in zip(("OLD", "NEW"), paths)]

    def both(self, do: str, **values: Any) -> list:
        for side in self.sides:
            side.ask(do, **values)
        return [side.answer() for side in self.sides]

    def work(self, todo: list[Spec], report: Report, lock: threading.Lock, deadline: float, judged: int) -> None:
        try:
            while todo and time.monotonic() < deadline:
                chunk = [todo.pop() for _ in range(min(CHUNK, len(todo)))]
                names = ", ".join(spec["name"] for spec in chunk)
                try:
                    answers = self.both("run", specs=chunk)
                except Ended as error:
                    with lock:
                        report.wrong.append(f"{error}, in one of: {names}")
                    break
                for number, (spec, old, new) in enumerate(zip(chunk, *answers)):
                    with lock:
                        differs = compare(spec, old, new, report)
                        wanted = differs and report.judged[spec["kind"]] < judged
                        report.judged[spec["kind"]] += wanted
                    if wanted:
                        apart = self._judged(number)
                        with lock:
                            report.differences += [(spec["kind"], spec["name"], name, how) for name, how in apart.items()]
        except Exception as error:
            with lock:
                report.wrong.append(f"bits.py itself failed: {type(error).__name__}: {error}")
        finally:
            self.close()
            with lock:
                report.left_out["time was over, or a side ended"] += len(todo)

    def close(self) -> None:
        for side in self.sides:
            side.close()

    def _judged(self, number: int) -> dict:
        old, new = self.sides
        path = self.folder / f"{id(self)}.pt"
        new.ask("save", number=number, path=str(path))
        new.answer()
        old.ask("judge", number=number, path=str(path))
        return old.answer()


def compare(spec: Spec, old: dict, new: dict, report: Report) -> bool:
    """Enters one call; True if there are tensors whose bits differ."""
    kind, name = spec["kind"], spec["name"]
    errors = [answer.get("error") for answer in (old, new)]
    if any(errors):
        same = all(errors) and len({str(error).split(":")[0] for error in errors}) == 1
        report.refused[kind] += same
        if same:
            report.reasons[f"{kind}: {errors[0]}"] += 1
        report.other[kind] += not same
        if not same:
            report.wrong.append(f"{name}: OLD {errors[0] or 'runs'}; NEW {errors[1] or 'runs'}")
        return False
    for side, answer in (("OLD", old), ("NEW", new)):
        if answer["changed"]:
            report.wrong.append(f"{name}: {side} wrote to results after it had returned them: {', '.join(answer['changed'])}")
    if old["digests"].keys() != new["digests"].keys():
        report.other[kind] += 1
        report.wrong.append(f"{name}: OLD gives {', '.join(old['digests'])}; NEW {', '.join(new['digests'])}")
        return False
    differing = [tensor for tensor, text in old["digests"].items() if new["digests"][tensor] != text]
    report.selections[kind] += any(tensor.startswith("selection") for tensor in differing)
    report.equal[kind] += not differing
    report.other[kind] += bool(differing)
    return bool(differing)


def printed(report: Report, say: Any = print) -> int:
    """Prints it; the exit status."""
    kinds = [kind for kind in KINDS if report.calls(kind)]
    say(f"{'kind':18} {'calls':>6} {'equal':>6} {'other bits':>11} {'other tiles':>12} {'refused by both':>16}")
    for kind in kinds:
        say(f"{kind:18} {report.calls(kind):6} {report.equal[kind]:6} {report.other[kind]:11} {report.selections[kind]:12} "
            f"{report.refused[kind]:16}")
    exact = [kind for kind in kinds if not KINDS[kind].estimated]
    total = [sum(counts[kind] for kind in exact) for counts in (report.equal, report.other)]
    say(f"without an estimate: equal bits in {total[0]} of {sum(total)} calls")
    for reason, number in sorted(report.left_out.items()):
        if number:
            say(f"LEFT OUT: {number} calls: {reason}")
    for reason, number in report.reasons.most_common(5):
        say(f"refused by both: {number} calls, {reason[:200]}")
    farther = estimates(report, kinds, say)
    for kind in exact:
        calls: dict[str, list[tuple[str, dict]]] = defaultdict(list)
        for _, name, tensor, how in (row for row in report.differences if row[0] == kind):
            calls[name].append((tensor, how))
        for name, tensors in list(calls.items())[:SHOWN_CALLS]:
            for tensor, how in tensors[:SHOWN_TENSORS]:
                say(f"DIFFERS: {name}: {tensor}: {said(how)}")
            if len(tensors) > SHOWN_TENSORS:
                say(f"    and {', '.join(tensor for tensor, _ in tensors[SHOWN_TENSORS:])}")
        if len(calls) > SHOWN_CALLS:
            say(f"    and {report.other[kind] - SHOWN_CALLS} more calls of {kind}")
    for line in report.wrong[:SHOWN]:
        say(f"WRONG: {line}")
    if len(report.wrong) > SHOWN:
        say(f"... and {len(report.wrong) - SHOWN} more")
    bad = bool(total[1] or report.wrong or farther or not any(report.equal[kind] + report.other[kind] for kind in kinds))
    say("bits differ, see above" if bad else "no difference that counts")
    return int(bad)


def estimates(report: Report, kinds: Sequence[str], say: Any) -> bool:
    """Prints distances of estimates whose bits differ; whether NEW's are larger."""
    farther = False
    for kind in kinds:
        groups: dict[str, list[dict]] = defaultdict(list)
        for _, _, tensor, how in (row for row in report.differences if row[0] == kind and KINDS[kind].estimated):
            name = tensor.split(" (")[0].split(" on ")[0].split(" of ")[0]
            groups[f"{name} in {how['dtype']}" if "dtype" in how else name].append(how)
        for tensor, hows in groups.items():
            if any("other" in how for how in hows):
                say(f"DIFFERS: {kind}: {tensor}: {said(next(how for how in hows if 'other' in how))}")
                farther = True
                continue
            line = f"{kind}: {tensor}: {len(hows)} tensors apart by at most {max(how['relative'] for how in hows):.2g} of their size"
            far = [how for how in hows if "old_mean" in how]
            if far:
                means = [sum(how[f"{side}_mean"] for how in far) / len(far) for side in ("old", "new")]
                worst = [max(how[f"{side}_worst"] for how in far) for side in ("old", "new")]
                line += (f"; to float64 in {len(far)}: mean {means[0]:.4g} -> {means[1]:.4g}, worst {worst[0]:.4g} -> {worst[1]:.4g}")
                # Both may be float64 themselves, and round.
                if means[1] > max(FARTHER_MEAN * means[0], ROUNDED) or worst[1] > max(FARTHER_WORST * worst[0], ROUNDED):
                    line, farther = f"FARTHER: {line}", True
            say(line)
    return farther


def said(how: dict) -> str:
    if "other" in how:
        return how["other"]
    text = f"{how['values']} of {how['of']} values, at most {how['apart']:.3g} ({how['relative']:.2g} of their size)"
    if "old_mean" in how:
        text += (f"; to float64: mean {how['old_mean']:.3g} -> {how['new_mean']:.3g}, worst {how['old_worst']:.3g} -> "
                 f"{how['new_worst']:.3g}")
    return text


def possible(todo: Sequence[Spec], have: Sequence[set[str]], report: Report) -> list[Spec]:
    """The specs of ``todo`` that both sides can run by the names that they ``have``. The report counts the rest as left out."""
    able = []
    for spec in todo:
        missing = [f"{side} has no {name}" for side, names in zip(("OLD", "NEW"), have) for name in spec["needs"]
                   if name not in names]
        if missing:
            report.left_out[f"{spec['kind']}: {missing[0]}"] += 1
        else:
            able.append(spec)
    return able


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("old", metavar="OLD", type=checkout)
    parser.add_argument("new", metavar="NEW", type=checkout)
    parser.add_argument("--calls", type=int, default=10_000, help="of all kinds together (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=[*KINDS], metavar="KIND", help="; ".join(KINDS))
    parser.add_argument("--call", nargs="+", type=int, metavar="N", help="only these numbers of each kind")
    parser.add_argument("--processes", type=int, default=8 if torch.cuda.is_available() else 2, help="of both sides, beside those of ranks "
                        "(default %(default)s)")
    parser.add_argument("--judged", type=int, default=100, help="calls of each kind whose differences are measured (default %(default)s)")
    options = parser.parse_args(argv)
    kinds = [kind for kind in options.only or KINDS if options.device == "cuda" or not KINDS[kind].gpu]
    ranks_on = options.device if torch.cuda.device_count() > 1 else "cpu"
    report, lock, start = Report(), threading.Lock(), time.monotonic()
    for kind in set(options.only or KINDS) - set(kinds):
        report.left_out[f"{kind}: needs a GPU"] += 1
    todo = specs(options.seed, options.calls, options.device, kinds, ranks_on)
    if options.call:
        todo = [spec_of(kind, options.seed, number, options.device if KINDS[kind].ranks == 1 else ranks_on)
                for kind in kinds for number in options.call]
        for spec in todo:
            print(json.dumps(spec))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [folder / "old", folder / "new"]
        for tree, path in zip((options.old, options.new), paths):
            package(tree, path)
        # The pair of ranks comes last.
        sizes = [1] * max(1, options.processes // 2) if any(KINDS[kind].ranks == 1 for kind in kinds) else []
        if any(KINDS[kind].ranks > 1 for kind in kinds):
            sizes.append(2)
        pairs = [Pair(paths, options.device if ranks == 1 else ranks_on, folder, ranks) for ranks in sizes]
        try:
            have = [set(names) for names in pairs[0].both("names")]
        except Ended as error:
            for pair in pairs:
                pair.close()
            raise SystemExit(str(error)) from None
        todo = possible(todo, have, report)
        # A process has few kinds, so that few kernels are compiled twice, in any order.
        alone = [spec for spec in todo if KINDS[spec["kind"]].ranks == 1]
        single = sizes.count(1)
        shares = [alone[len(alone) * i // single:len(alone) * (i + 1) // single] for i in range(single)]
        shares.append([spec for spec in todo if KINDS[spec["kind"]].ranks > 1])
        threads = []
        for number, (pair, share) in enumerate(zip(pairs, shares)):
            random.Random(number).shuffle(share)
            threads.append(threading.Thread(target=pair.work, args=(share, report, lock, start + options.seconds, options.judged)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    print(f"OLD {options.old}; NEW {options.new}; {options.device}, seed {options.seed}, {time.monotonic() - start:.0f} s")
    return printed(report)


if __name__ == "__main__":
    sys.exit(main())
