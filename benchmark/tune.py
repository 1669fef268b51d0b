"""Which launch configurations suit this GPU? Sweeps candidates and says which line of kernels/*/config.py to change.

    python benchmark/tune.py [--kernel NAME ...] [--wide] [--shape 46080,48] [--rounds 7] [--csv NAME] [--share]

Each candidate is checked against float64 before it is timed, all of one kernel interleaved, and what does not fit the GPU says so. dq and
dkv are timed as the whole backward, in which the other kernel stays as it is. attend and attend-backward compare the implementations that
run here, a library's among them, each as it is, gradients in any order. Without a GPU it runs in Triton's interpreter
(TRITON_INTERPRET=1), which shows that it works but says nothing about speed. With --share, all that was measured is printed once more as a
block to send to the project, which has no other GPUs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import product
from types import ModuleType
from unittest.mock import patch

import torch
from arguments import SHAPE, add_rounds, kernel_shape, new_parser
from measure import NO_TIMES, RESULTS, failure, interleaved, machine, print_machine, print_rows, write_rows
from shapes import Pattern, Problem, kept
from truth import Truth, Wrong, truth

from ssta.kernels import BlockLists, PatternFacts, Route, choose_route
from ssta.kernels.device import DeviceLimits, device_limits
from ssta.kernels.hopper.config import HopperForwardConfig, hopper_forward_config
from ssta.kernels.portable.config import LaunchConfig, dkv_config, dq_config, forward_config
from ssta.kernels.routing import TABLE

PORTABLE = ("forward", "dq", "dkv")
# The Hopper kernels' forward, and their deterministic backward.
HOPPER = ("hopper", "hopper-backward")
# Whose kernels attend.
ROUTES = ("attend", "attend-backward")
# Of the Hopper backward: stages of dS, and by how many iterations programs are staggered.
DS_STAGES, STAGGERS = (2, 3, 4), (3, 5, 7, 10)
# Less than this is not worth a change.
GAIN = 0.02


@dataclass(frozen=True)
class Candidate:
    """A launch configuration, and a call that runs the kernel with it and returns what is checked."""

    name: str
    run: Callable[[], object]
    present: bool


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float16
    parser = new_parser(__doc__)
    parser.add_argument("--kernel", nargs="+", choices=(*PORTABLE, *HOPPER, *ROUTES), metavar="NAME",
                        help=f"of {', '.join((*PORTABLE, *HOPPER, *ROUTES))} (default: all that run here)")
    parser.add_argument("--wide", action="store_true", help="more candidates; several times as long")
    usual = Problem(46_080) if gpu else Problem(64, heads=1, head_dim=16, block=32)
    parser.add_argument("--shape", metavar=SHAPE, type=kernel_shape, default=(usual, kept(usual, 0.4)),
                        help="the problem to tune for (default 46080,0.4)")
    parser.add_argument("--share", action="store_true", help="print all that was measured as a block to send to the project")
    add_rounds(parser, 7 if gpu else 1)
    options = parser.parse_args(argv)
    problem, pattern = options.shape
    if options.share and not gpu:
        parser.error("--share needs an NVIDIA GPU, times of the interpreter say nothing")
    try:
        choose_route("triton", device, dtype, problem.head_dim)
    except ValueError as error:
        parser.error(f"{error}; set TRITON_INTERPRET=1 to run without a GPU" if not gpu else str(error))
    setting = Setting(problem, pattern, device, dtype)
    print_machine()
    rows, advice = [], []
    for kernel in options.kernel or (*PORTABLE, *(HOPPER if setting.hopper else ()), *(ROUTES if gpu else ())):
        found = measure_kernel(kernel, setting, options.wide, options.rounds)
        print_rows(found)
        rows += found
        advice.append(advise(kernel, found) if gpu else f"{kernel}: no advice, times of the interpreter say nothing")
        if options.csv:
            write_rows(RESULTS / f"{options.csv}.csv", rows)
    print("\n".join(advice))
    if options.share:
        print(share(rows, torch.cuda.get_device_capability(device), device_limits(device), setting.route("auto").explain()))


class Setting:
    """One problem on one device, with the exact values at its sampled blocks."""

    def __init__(self, problem: Problem, pattern: Pattern, device: torch.device, dtype: torch.dtype):
        torch.manual_seed(0)
        size = (problem.batch, problem.heads, problem.tokens, problem.head_dim)
        self.problem, self.pattern, self.device = problem, pattern, device
        self.q, self.k, self.v, self.dout = (torch.randn(size, device=device, dtype=dtype) for _ in range(4))
        self.blocks = BlockLists.from_mask(pattern.mask(problem, device), problem.block, problem.block)
        self.scale = problem.head_dim ** -0.5
        self.exact: Truth = truth(self.q, self.k, self.v, self.blocks, self.dout)

    @property
    def hopper(self) -> bool:
        return self.device.type == "cuda" and self.route("auto").name == "hopper"

    def route(self, impl: str) -> Route:
        heads = self.problem.heads
        return choose_route(impl, self.device, self.q.dtype, self.problem.head_dim, PatternFacts.of(self.blocks), heads=heads,
                            kv_heads=heads, deterministic=False)


def measure_kernel(kernel: str, setting: Setting, wide: bool, rounds: int) -> list[dict]:
    """A row for every candidate: its times and how they compare with the present one's."""
    calls, notes, errors = {}, {}, {}
    found = candidates(kernel, setting, wide)
    for candidate in found:
        try:
            result = candidate.run()
            errors[candidate.name] = (setting.exact.forward_error(candidate.name, result) if isinstance(result, torch.Tensor)
                                      else setting.exact.backward_error(candidate.name, result))
            calls[candidate.name] = candidate.run
        except Wrong as error:
            notes[candidate.name] = str(error)
        except Exception as error:  # too little shared memory or too few registers have many names
            notes[candidate.name] = failure(error)
    times = interleaved(calls, rounds)
    present = next(candidate.name for candidate in found if candidate.present)
    usual = times[present]["median_ms"] if present in times else ""
    rows = []
    for candidate in found:
        measured = times.get(candidate.name, {**NO_TIMES, "note": notes.get(candidate.name, "")})
        ms = measured["median_ms"]
        rows.append(dict(kernel=kernel, config=candidate.name, present=candidate.present, tokens=setting.problem.tokens,
                         heads=setting.problem.heads, head_dim=setting.problem.head_dim, block=setting.problem.block,
                         kept=setting.pattern.kept, **{column: measured[column] for column in NO_TIMES},
                         ratio="" if "" in (ms, usual) else ms / usual, error=errors.get(candidate.name, ""), note=measured["note"]))
    return sorted(rows, key=lambda row: (row["median_ms"] == "", row["median_ms"]))


def candidates(kernel: str, setting: Setting, wide: bool) -> list[Candidate]:
    """The present configuration and those around it."""
    if kernel in HOPPER:
        return hopper_candidates(kernel, setting)
    if kernel in ROUTES:
        return route_candidates(kernel, setting)
    choose = {"forward": forward_config, "dq": dq_config, "dkv": dkv_config}
    limits = device_limits(setting.device)
    block = setting.problem.block
    present = {name: config(setting.problem.head_dim, block, block, limits) for name, config in choose.items()}
    every = dict.fromkeys([present[kernel], *launch_configs(block, wide, setting.problem.head_dim)])
    return [Candidate(written(kernel, config), run_of(kernel, config, present, setting), config == present[kernel]) for config in every]


def route_candidates(kernel: str, setting: Setting) -> list[Candidate]:
    """The implementations that run here and have such a pass of their own, but for plain torch."""
    routes = {}
    for row in TABLE[:-1]:
        try:
            routes[row.name] = setting.route(row.name)
        except ValueError:
            continue
    given = setting.q, setting.k, setting.v
    usual = setting.route("auto")
    if kernel == "attend":
        present = usual.name if usual.name in routes else next(iter(routes))
        return [Candidate(f"impl={name!r}", lambda route=route: route.run(*given, setting.blocks, setting.scale)[0], name == present)
                for name, route in routes.items()]
    own = {name: route for name, route in routes.items() if route.backward == name}
    present = usual.backward if usual.backward in own else next(iter(own))
    result = own[present].run(*given, setting.blocks, setting.scale)
    rest = setting.blocks, setting.scale, False, False
    return [Candidate(f"impl={name!r}", lambda route=route: route.run_backward(setting.dout, None, *given, *result, *rest), name == present)
            for name, route in own.items()]


def launch_configs(block: int, wide: bool, head_dim: int) -> list[LaunchConfig]:
    """The candidates; none longer than the blocks, and eight warps only where they have 128 rows, keys or more columns to share."""
    sizes = [size for size in (16, 32, 64, 128) if size <= block][-2 - wide:]
    return [LaunchConfig(m, n, warps, stages) for m, n, warps, stages in product(sizes, sizes, (4, 8), (1, 2, 3, 4) if wide else (2, 3))
            if max(m, n) >= 128 or head_dim > 128 or warps == 4]


def written(kernel: str, config: LaunchConfig) -> str:
    """As the line in config.py has it: dkv_config writes the keys, which stay, first."""
    first, second = (config.block_n, config.block_m) if kernel == "dkv" else (config.block_m, config.block_n)
    return f"LaunchConfig({first}, {second}, {config.num_warps}, {config.num_stages})"


def run_of(kernel: str, config: LaunchConfig, present: dict[str, LaunchConfig], setting: Setting) -> Callable[[], object]:
    from ssta.kernels.portable.backward import triton_backward
    from ssta.kernels.portable.forward import triton_forward

    if kernel == "forward":
        return lambda: triton_forward(setting.q, setting.k, setting.v, setting.blocks, setting.scale, False, config)[0]
    out, lse = triton_forward(setting.q, setting.k, setting.v, setting.blocks, setting.scale, False)
    configs = (config, present["dkv"]) if kernel == "dq" else (present["dq"], config)
    return lambda: triton_backward(setting.dout, None, setting.q, setting.k, setting.v, out, lse, setting.blocks, setting.scale, False,
                                   configs)


def hopper_configs(head_dim: int) -> list[HopperForwardConfig]:
    """The candidates of the forward. Three warpgroups have no registers for 128 keys of 128 entries, nor several programs room for them;
    q of 64 entries is read from shared memory."""
    large = [HopperForwardConfig(warpgroups, chunk, 2 * (128 // head_dim) * (128 // chunk), overlap, q_registers=q_registers)
             for warpgroups, chunk, overlap, q_registers in product((2, 3), (64, 128), (False, True), (False, True))
             if (warpgroups, chunk, head_dim) != (3, 128, 128) and (not q_registers or (warpgroups, head_dim) == (2, 128))]
    # Chunk, stages and programs of one warpgroup.
    shapes = [(64, 6, 2), (128, 3, 2), (64, 3, 3)] if head_dim == 64 else [(64, 3, 2)]
    small = [HopperForwardConfig(1, chunk, stages, overlap, programs, q_registers)
             for (chunk, stages, programs), overlap, q_registers in product(shapes, (False, True), (False, True))
             if programs == 2 or not q_registers]
    return large + small


def hopper_candidates(kernel: str, setting: Setting) -> list[Candidate]:
    """The forward's configurations; of the backward every number by itself, with the others as they are."""
    from ssta.kernels.hopper import backward as hopper_backward
    from ssta.kernels.hopper import forward as hopper_forward
    from ssta.kernels.lowering import dq_schedule

    given = setting.q, setting.k, setting.v
    pattern = setting.blocks, setting.scale, False
    if kernel == "hopper":
        dim, block = setting.problem.head_dim, setting.problem.block
        present = hopper_forward_config(dim, block, block, False, optimistic=True)
        return [Candidate(str(config), partial(hopper_forward_with, config, *given, *pattern), config == present)
                for config in dict.fromkeys([present, *hopper_configs(dim)])]
    out, lse = hopper_forward.hopper_forward(*given, *pattern)
    usual = hopper_backward.constants

    def run():
        return hopper_backward.hopper_backward(setting.dout, None, *given, out, lse, *pattern, True)

    found = [Candidate(f"hopper_backward.constants, DS_STAGES = {value}",
                       with_patch(hopper_backward, "constants", lambda *key, value=value: usual(*key) | dict(DS_STAGES=value), run),
                       value == usual(setting.problem.head_dim, True)["DS_STAGES"]) for value in DS_STAGES]
    return found + [Candidate(f"dq_schedule.STAGGER = {value}", with_patch(dq_schedule, "STAGGER", value, run), False)
                    for value in STAGGERS if value != dq_schedule.STAGGER]


def hopper_forward_with(config: HopperForwardConfig, *arguments) -> torch.Tensor:
    from ssta.kernels.hopper.forward import hopper_forward

    return hopper_forward(*arguments, config=config)[0]


def with_patch(home: ModuleType, name: str, value: object, run: Callable[[], object]) -> Callable[[], object]:
    """``run`` while ``home.name`` is ``value``."""

    def patched() -> object:
        with patch.object(home, name, value):
            return run()

    return patched


def faster(best: dict, present: dict) -> bool:
    """Whether the one row beats the other by what is worth a change, and beyond the spread."""
    return best["ratio"] <= 1 - GAIN and best["q3_ms"] <= present["q1_ms"]


def share(rows: list[dict], capability: tuple[int, int], limits: DeviceLimits, routes: tuple[str, ...]) -> str:
    """What was measured as text for an issue: the machine, why what attends does (``routes``), and every candidate with its times in ms,
    its error or why it has none."""
    kernels: dict[str, list[dict]] = {}
    columns = "config", "present", "median_ms", "q1_ms", "q3_ms", "error", "note"
    for row in rows:
        told = {column: row[column] for column in columns if row[column] != ""}
        kernels.setdefault(row["kernel"], []).append({key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in told.items()})
    where = machine()
    about = where | dict(capability="sm_{}{}".format(*capability), shared_memory=limits.shared_memory, products=limits.products)
    about |= dict(routes=routes, problem={column: rows[0][column] for column in ("tokens", "heads", "head_dim", "block", "kept")})
    # A line for each candidate.
    lines = ",\n".join(f'  "{kernel}": [\n    ' + ",\n    ".join(map(json.dumps, own)) + "\n  ]" for kernel, own in kernels.items())
    block = json.dumps(about, indent=1)[:-2] + ',\n "kernels": {\n' + lines + "\n }\n}"
    return f"Please send what follows {project_page()}:\n\n### SSTA tuned on {where['device']}\n\n```json\n{block}\n```"


def project_page() -> str:
    """Where issues go, as the package's own metadata say."""
    urls = dict(entry.split(", ", 1) for entry in metadata.metadata("ssta").get_all("Project-URL") or [])
    known = {label.lower(): url for label, url in urls.items()}
    page = next((known[label] for label in ("issues", "tracker", "repository", "source", "homepage") if label in known), None)
    return f"as an issue to {page}" if page else "as an issue to the page that you have SSTA from"


def advise(kernel: str, rows: list[dict]) -> str:
    """One sentence: keep the present configuration, or what to write in its place."""
    present = next(row for row in rows if row["present"])
    best = rows[0]
    place = {"hopper": "kernels/hopper/config.py, hopper_forward_config"}.get(kernel, "kernels/")
    place = f"kernels/portable/config.py, {kernel}_config" if kernel in PORTABLE else place
    place = f"kernels/routing.py, TABLE, {kernel}" if kernel in ROUTES else place
    if best["median_ms"] == "":
        return f"{place}: nothing could be measured"
    if present["median_ms"] == "":
        return f"{place}: {present['config']} does not run here; {best['config']} takes {best['median_ms']:.3g} ms"
    if not faster(best, present):
        return f"{place}: keep {present['config']}, {present['median_ms']:.3g} ms; nothing is faster by {GAIN:.0%} and beyond the spread"
    return (f"{place}: {best['config']} takes {best['median_ms']:.3g} ms, {present['config']} {present['median_ms']:.3g}: "
            f"change it where it stands as best, and the times beside it")


if __name__ == "__main__":
    # The interpreter must be asked for before Triton is first imported.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    main()
