"""What this machine runs, if it computes it right, and what a model would gain, as text for an issue: python -m ssta.pipelines.doctor."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import ssta
from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid
from ssta.attention import attend
from ssta.kernels import choose_backend, choose_route
from ssta.selection import Selection

from .patch.report import Stopwatch, aligned
from .schedule.presets import first_layer_dense, small_tiles
from .schedule.schedule import Schedule

if TYPE_CHECKING:
    from .published import Canvas, Published

# The oldest and the newest release of each that the tests ran with.
TESTED = {"torch": ("2.11", "2.13"), "triton": ("3.6", "3.9"), "diffusers": ("0.42", "0.42"), "nvidia-cudnn-frontend": ("1.32", "1.32")}
# So many times the error of plain torch in the same dtype is allowed, because kernels keep parts of the estimate in bfloat16, and what is
# wrong is off by far more; where plain torch itself is looked at, so many of its roundings.
FACTOR, ROUNDINGS = 4, 1024
TENSORS = ("out", "dq", "dk", "dv")


def main(arguments: list[str] | None = None) -> int:
    """Prints the text; 1 if the self-check failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m ssta.pipelines.doctor", description=__doc__)
    parser.add_argument("--model", metavar="NAME", help="also measure what this model would gain on this GPU: wan-14b (as large as each "
                                                        "transformer of Wan 2.2 A14B), wan-1.3b, hunyuan-video-1.5 or ltx; random weights, "
                                                        "nothing is downloaded")
    parser.add_argument("--size", metavar="FxHxW", help="of its video in frames and pixels, such as 81x480x832; default the model's")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        asked = _asked(options.model, options.size)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(machine(device)))
    for head_dim in (128, 64) if device.type == "cuda" else (128,):
        print(f"\nwhat runs, {_name(dtype)}, heads of {head_dim}")
        print("\n".join(f"  {line}" for line in steps(device, dtype, head_dim)))
    start = time.perf_counter()
    found = list(self_check(device, dtype))
    print(f"\nself-check against float64 on {device.type}, {_name(dtype)}: largest error of a token, and in brackets what is allowed")
    print(checked_table(found))
    passed = all(check.passed for check in found)
    print(f"{'passed' if passed else 'FAILED'} in {time.perf_counter() - start:.1f} s\n")
    if asked is None:
        print("gain: not measured; --model NAME measures it")
    elif device.type == "cpu":
        print("gain: not measured without a GPU, for times on a CPU say nothing about one; benchmark/README.md has those of an H200")
    else:
        print("\n".join(gain(*asked, device, dtype)))
    return 0 if passed else 1


def machine(device: torch.device) -> list[str]:
    """The GPU, and the versions with what was tested."""
    lines = [f"ssta {ssta.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"]
    for package, (oldest, newest) in TESTED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            lines.append(f"{package}: not installed")
            continue
        lines.append(f"{package} {found}: {judged(found, oldest, newest)}")
    if device.type == "cpu":
        return [*lines, "no GPU that torch can use: everything runs in plain torch, which is slow"]
    properties = torch.cuda.get_device_properties(device)
    kind = f"sm_{properties.major}{properties.minor}" if torch.version.hip is None else "AMD"
    return [*lines, f"{properties.name}, {kind}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"]


def judged(found: str, oldest: str, newest: str) -> str:
    """Whether a version was tested."""
    def numbers(text: str) -> tuple[int, ...]:
        return tuple([int("".join(filter(str.isdigit, part)) or 0) for part in text.split(".")[:2]])

    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    if numbers(found) < numbers(oldest):
        return f"OLDER than what was tested, {tested}"
    return f"newer than what was tested, {tested}" if numbers(found) > numbers(newest) else f"tested ({tested})"


def steps(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """What runs each step of a layer, and why nothing faster does, as ``ssta.explain`` says it; a library's self-check runs here."""
    route, free = (choose_route("auto", device, dtype, head_dim, deterministic=deterministic) for deterministic in (True, False))
    other = [] if str(free) == str(route) else [f"attend with deterministic=False: {free}"]
    return [f"attend: {route}", *route.explain(), *other, *choose_backend("auto", device, dtype, head_dim).explain()]


class Checked(NamedTuple):
    """The error of one tensor of the self-check, at the token that is furthest off and over a token's length, and what is allowed."""

    compensation: str
    tensor: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


def self_check(device: torch.device, dtype: torch.dtype) -> Iterator[Checked]:
    """A small layer whose tiles have many lengths, with text, forward and backward, without an estimate and with one, against float64."""
    layout = TokenLayout((VideoGrid(6, 9, 20), DenseRun(13)))
    cpu: dict[str, Any] = dict(generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    q, k, v, dout = torch.randn(4, 1, 2, layout.length, 128, **cpu).to(dtype)
    for compensation in ("none", "linear"):
        config = SSTAConfig(tile_thw=(4, 4, 8), kernel_thw=(1, 1, 1), sparse_type="block_attn", density=0.3, compensation=compensation)

        def run(impl: str, *tensors: Tensor, selection: Selection | None = None, config: SSTAConfig = config,
                ) -> tuple[list[Tensor], Selection]:
            leaves = q, k, v = [x.detach().requires_grad_() for x in tensors[:3]]
            result = attend(q, k, v, layout, config, impl=impl, selection=selection)
            grads = torch.autograd.grad(result.out, leaves, tensors[3])
            return [x.cpu().double() for x in (result.out.detach(), *grads)], result.selection

        ours, chosen = run("auto", *(x.to(device) for x in (q, k, v, dout)))
        kept = Selection(chosen.blocks.to("cpu"), useful=None if chosen.useful is None else chosen.useful.cpu())
        plain, _ = run("torch", q, k, v, dout, selection=kept)
        exact, _ = run("reference", *(x.double() for x in (q, k, v, dout)), selection=kept)
        rounding = torch.finfo(dtype).eps
        for tensor, mine, other, right in zip(TENSORS, ours, plain, exact):
            yield Checked(compensation, tensor, _error(mine, right), min(FACTOR * _error(other, right) + rounding, ROUNDINGS * rounding))


def checked_table(found: list[Checked]) -> str:
    """A row for each compensation."""
    rows: list[tuple[str, ...]] = [("compensation", *TENSORS)]
    for compensation in dict.fromkeys(check.compensation for check in found):
        rows.append((compensation, *(f"{check.error:.1e} ({check.allowed:.1e}){'' if check.passed else ' FAILED'}"
                                     for check in found if check.compensation == compensation)))
    return aligned(rows)


def _error(x: Tensor, right: Tensor) -> float:
    """NaN counts as infinitely far."""
    lengths = right.norm(dim=-1).square().mean().sqrt()
    return float(((x - right).norm(dim=-1).max() / lengths).nan_to_num(nan=float("inf")))


def _asked(model: str | None, size: str | None) -> tuple[Published, Canvas] | None:
    """The model that ``--model`` names and the canvas of ``--size``."""
    if model is None:
        if size is not None:
            raise ValueError(f"--size must come with --model, got {size} alone")
        return None
    from . import require_diffusers

    require_diffusers("--model")
    from .published import PUBLISHED

    if model not in PUBLISHED:
        raise ValueError(f"--model must be one of {', '.join(PUBLISHED)}, got {model!r}")
    if size is None:
        return PUBLISHED[model], PUBLISHED[model].thw
    pixels = size.split("x")
    if len(pixels) != 3 or not all(part.isdecimal() for part in pixels):
        raise ValueError(f"--size must be frames, rows and columns of pixels, such as 81x480x832, got {size!r}")
    frames, height, width = map(int, pixels)
    return PUBLISHED[model], PUBLISHED[model].canvas(frames, height, width)


@torch.no_grad()
def gain(of: Published, thw: Canvas, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Seconds of a step and of a generation, dense and by default, reckoned from one block that is measured here."""
    from .patch.apply import apply_ssta
    from .published import blocks_of

    try:
        model, call = of.build(device.type, dtype, 1), of.call(device.type, dtype, thw)
        times = {}
        for name, schedule in (("dense", Schedule(dense_layers=(0,))), ("sparse", Schedule())):
            with apply_ssta(model, schedule=schedule):
                times[name] = _times(model, call, blocks_of(model)[1][0], device)
    except torch.OutOfMemoryError:
        return [f"gain: {of.name} at {' x '.join(map(str, thw))} tokens does not fit into this GPU's memory; a smaller --size may"]
    (rest, dense), (_, sparse) = times["dense"], times["sparse"]
    first = len(first_layer_dense().dense_layers)
    step = {"dense": rest + of.depth * dense, "sparse": rest + first * dense + (of.depth - first) * sparse}
    return [f"gain: {of.model} at {' x '.join(map(str, thw))} tokens, {of.depth} blocks, random weights, nothing compiled, from one block "
            "measured here; dense is exact attention by the fastest kernel here",
            f"  a step of one prompt, density {small_tiles().density}: dense {step['dense']:.3g} s, SSTA by default "
            f"{step['sparse']:.3g} s, {step['dense'] / step['sparse']:.2f} x; a generation of {of.steps} steps with guidance, two prompts "
            f"each, without text encoder and VAE: dense {2 * of.steps * step['dense']:.3g} s, SSTA {2 * of.steps * step['sparse']:.3g} s"]


def _times(model: torch.nn.Module, call: dict[str, Any], block: torch.nn.Module, device: torch.device) -> tuple[float, float]:
    """Seconds of a forward without its only block, and of the block: the least of three, after one that does not count."""
    of_block, of_all = Stopwatch(), Stopwatch()
    found = []
    with block.register_forward_pre_hook(lambda *_: of_block.start(device)), block.register_forward_hook(lambda *_: of_block.stop()):
        for _ in range(4):
            of_all.start(device)
            model(**call)
            of_all.stop()
            whole, part = of_all.seconds(), of_block.seconds()
            assert whole is not None and part is not None
            found.append((whole - part, part))
    rests, parts = zip(*found[1:])
    return min(rests), min(parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
