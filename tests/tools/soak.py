"""make soak: several processes on one GPU make random calls again and again, and each call must give the bits of its first time.

    python tests/tools/soak.py [--processes 4] [--seconds 90] [--calls 60] [--seed S] [--device cpu|cuda] [--only KIND ...]

Every process has the same specs (random_specs.py), with forwards and backwards. Its first pass runs each spec once and keeps the digests;
all processes must have the same. For --seconds it then takes specs in any order. A call runs as it is, on a side stream, in a
CUDA graph that is captured anew, or by replaying a captured one on other inputs. Results live on while later calls run. The process
compares them again at the end, and overwrites them, as their owner may do. A fault of one launch in thousands shows here, and a fault of
several processes at once.

Exit status 1: other bits, a result that a later call wrote to, an error, or a process that ended. Every line names the spec.
``tests/tools/bits.py OLD NEW --only KIND --call N --seed S`` runs a spec alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from random_calls import Call, Named, digests, names, run, texts  # noqa: E402
from random_specs import KINDS, Spec, specs  # noqa: E402

# Results that are held while later calls run, graphs that a process keeps, and lines that it prints at most.
HELD, GRAPHS, MOST_LINES = 6, 8, 10
# Seconds that a first pass, with its kernels' compilation, may take. A process that takes longer hangs.
LONGEST = 600
WAYS = {"as it is": 5, "side stream": 2, "capture": 1, "replay": 2}


class Soak:
    """The calls of one process.

    Args:
        todo: its specs.
        device: "cuda:0" or "cpu".
        number: of the process.

    Attributes:
        first: by spec the digests of its first time; none of one that was refused.
        wrong, refused: lines for the report.
        ways: how often calls were made in each way.
    """

    def __init__(self, todo: Sequence[Spec], device: str, number: int) -> None:
        self.gpu, self.calls = device.startswith("cuda"), [Call(spec, device) for spec in todo]
        self.first: list[dict[str, str]] = [{} for _ in todo]
        self.wrong: list[str] = []
        self.refused: list[str] = []
        self.ways: Counter[str] = Counter()
        self._number, self._draw = number, random.Random(number)
        self._held: deque[tuple[Call, Named, dict[str, str]]] = deque()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[torch.Tensor], Named]] = {}
        self._side = torch.cuda.Stream() if self.gpu else None

    def first_pass(self) -> None:
        # Each process begins elsewhere, so that they compile other kernels.
        order = [(index + 17 * self._number) % len(self.calls) for index in range(len(self.calls))]
        for index in order:
            call = self.calls[index]
            try:
                self.first[index] = texts(*run(call))
            except (TypeError, ValueError, NotImplementedError) as error:
                # Not everything that is drawn can run everywhere.
                self.refused.append(f"{call.spec['name']}: {error}"[:200])
            except Exception as error:
                self._failed(call, "first pass", error)
        self._able = [index for index, first in enumerate(self.first) if first]

    def turn(self) -> None:
        """One call, in one way."""
        index = self._draw.choice(self._able)
        call = self.calls[index]
        ways = WAYS if self.gpu and KINDS[call.spec["kind"]].captured else {"as it is": 3, "side stream": 1}
        way = self._draw.choices(list(ways), list(ways.values()))[0]
        if way == "replay" and index not in self._graphs:
            way = "capture"
        if way in ("capture", "replay"):
            result, first = self._ran(call, way, lambda: self._by_graph(index, way))
        elif way == "side stream":
            result, first = self._ran(call, way, lambda: self._aside(call))
        else:
            result, first = self._ran(call, way, lambda: run(call))
        self.ways[way] += 1
        differing = [name for name, text in first.items() if self.first[index].get(name) != text]
        if differing:
            self._say(call, way, f"other bits than the first time in {', '.join(differing)}")
        self._hold(call, result, first)

    def close(self) -> None:
        while self._held:
            self._release()

    def _ran(self, call: Call, way: str, function: Callable[[], tuple[Named, dict]]) -> tuple[Named, dict[str, str]]:
        """The result of ``function`` with its digests, nothing where it raises. An error of CUDA ends the process."""
        try:
            result, sums = function()
            return result, texts(result, sums)
        except Exception as error:
            self._failed(call, way, error)
            return {}, {}

    def _failed(self, call: Call, way: str, error: Exception) -> None:
        self._say(call, way, f"{type(error).__name__}: {error}"[:400])
        if self.gpu:
            # Raises after an error of CUDA, which leaves nothing that works.
            torch.cuda.synchronize()

    def _aside(self, call: Call) -> tuple[Named, dict]:
        if self._side is None:
            # Without a GPU its part is taken by a call in between, of other inputs.
            call.step(call.inputs(call.spec["calls"]))
            return run(call)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            result = run(call)
        torch.cuda.current_stream().wait_stream(self._side)
        return result

    def _by_graph(self, index: int, way: str) -> tuple[Named, dict]:
        """The first of a spec's calls: captured, on other inputs, or replayed."""
        call = self.calls[index]
        if way == "capture":
            self._graphs.pop(index, None)
            while len(self._graphs) >= GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            memory = call.inputs(1)
            assert self._side is not None
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                call.step(memory)
            torch.cuda.current_stream().wait_stream(self._side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = call.step(memory)
            self._graphs[index] = graph, memory, captured
        graph, memory, captured = self._graphs[index]
        for x, new in zip(memory, call.inputs(0)):
            x.copy_(new)
        graph.replay()
        result = {name: x.clone() for name, x in captured.items()}
        return result, digests(result)

    def _hold(self, call: Call, result: Named, first: dict[str, str]) -> None:
        self._held.append((call, result, first))
        if len(self._held) > HELD:
            self._release()

    def _release(self) -> None:
        call, result, first = self._held.popleft()
        changed = [name for name, text in texts(result, digests(result)).items() if text != first[name]]
        if changed:
            self._say(call, "held", f"later calls wrote to {', '.join(changed)}")
        for x in result.values():
            # Of an expanded tensor several elements are one.
            if not any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
                x.detach().fill_(float("nan") if x.is_floating_point() else 0)

    def _say(self, call: Call, way: str, what: str) -> None:
        self.wrong.append(f"{call.spec['name']}, {way}: {what}")


def one_process(path: str, device: str, number: str, seconds: str, result: str) -> None:
    """A process: reads specs from ``path`` and writes its report to ``result``."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    soak = Soak(json.loads(Path(path).read_text()), "cuda:0" if device == "cuda" else device, int(number))
    start, report = time.monotonic(), {}
    try:
        soak.first_pass()
        report["first_s"] = time.monotonic() - start
        # All begin when the slowest has compiled its kernels.
        Path(f"{result}.ready").touch()
        while len(list(Path(path).parent.glob("*.ready"))) < int(os.environ["SOAK_PROCESSES"]):
            time.sleep(0.05)
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            soak.turn()
        soak.close()
    except Exception as error:
        soak.wrong.append(f"the process ended with {type(error).__name__}: {error}"[:600])
        Path(f"{result}.ready").touch()
    Path(result).write_text(json.dumps(report | dict(first=soak.first, wrong=soak.wrong, refused=soak.refused, ways=soak.ways)))


def main(argv: list[str] | None = None) -> int:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=4, help="at the same time (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=90, help="after the first pass (default %(default)s)")
    parser.add_argument("--calls", type=int, default=60, help="specs of a process (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    alone = [kind for kind in KINDS if KINDS[kind].ranks == 1]
    parser.add_argument("--only", nargs="+", choices=alone, metavar="KIND", help="; ".join(alone))
    options = parser.parse_args(argv)
    kinds = [kind for kind in options.only or alone if options.device == "cuda" or not KINDS[kind].gpu]
    drawn, have = specs(options.seed, options.calls, options.device, kinds), set(names())
    todo = [spec for spec in drawn if have.issuperset(spec["needs"])]
    if len(todo) < len(drawn):
        missing = sorted({name for spec in drawn for name in spec["needs"]} - have)
        print(f"LEFT OUT: {len(drawn) - len(todo)} specs that need {', '.join(missing)}")
    random.Random(options.seed).shuffle(todo)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "specs.json").write_text(json.dumps(todo))
        environment = os.environ | dict(OMP_NUM_THREADS="1", SOAK_PROCESSES=str(options.processes))
        started = []
        for number in range(options.processes):
            command = [sys.executable, __file__, "--one", str(folder / "specs.json"), options.device, str(number), str(options.seconds),
                       str(folder / str(number))]
            with (folder / f"{number}.log").open("w") as log:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        end = time.monotonic() + options.seconds + LONGEST
        while any(process.poll() is None for process in started) and time.monotonic() < end:
            for number, process in enumerate(started):
                if process.poll():
                    # The processes that wait for it go on.
                    (folder / f"{number}.ready").touch()
            time.sleep(0.05)
        reports, wrong = [], []
        for number, process in enumerate(started):
            if process.poll() is None:
                process.kill()
                process.wait()
            if not (folder / str(number)).is_file():
                last = (folder / f"{number}.log").read_text().splitlines()[-6:]
                wrong.append(f"process {number} ended with {process.returncode}: {' | '.join(last)}")
                continue
            reports.append(json.loads((folder / str(number)).read_text()))
            lines = [f"process {number}: {line}" for line in reports[-1]["wrong"]]
            wrong += lines[:MOST_LINES] + ([f"process {number}: {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else [])
    for index, spec in enumerate(todo):
        firsts = {json.dumps(report["first"][index], sort_keys=True) for report in reports if report["first"][index]}
        if len(firsts) > 1:
            wrong.append(f"{spec['name']}: the first passes of the processes have different bits")
    ways = sum((Counter(report["ways"]) for report in reports), Counter())
    firsts_s = ", ".join(f"{report.get('first_s', 0):.0f} s" for report in reports)
    print(f"soak: {options.processes} processes, {options.seconds:.0f} s each on {options.device}, seed {options.seed}: {len(todo)} specs, "
          f"first passes {firsts_s}; {ways.total()} calls: "
          + ", ".join(f"{number} {way}" for way, number in ways.items()))
    for line in reports[0]["refused"] if reports else ():
        print(f"refused: {line}")
    for line in wrong:
        print(f"WRONG: {line}")
    bad = bool(wrong) or not ways
    print("wrong, see above" if bad else "every call had the bits of its first time")
    return int(bad)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one_process(*sys.argv[2:])
    else:
        sys.exit(main())
