"""The side of one checkout in bits.py: a process that runs specs, answers with digests, and keeps the tensors until the next request.

Requests and answers are lines of JSON on the standard streams. Anything else is printed to the standard error. Among ranks the first one
reads the requests and hands them on.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from random_calls import Call, Named, digests, names, run, texts
from torch import Tensor

# Ranks that wait for one another longer than this do not agree.
PATIENCE = timedelta(seconds=120)


class Side:
    """The answers of one process.

    Args:
        device: "cuda:0" or the like, or "cpu".
        group: of its ranks, with the one through which they speak.
    """

    def __init__(self, device: str, group: Any = None, control: Any = None) -> None:
        self.device, self.group, self.control = device, group, control
        self.rank = 0 if group is None else dist.get_rank(group)
        self.specs: list[dict] = []
        self.results: list[Named | str] = []

    def answer(self, request: dict) -> Any:
        return getattr(self, request["do"])(**{name: value for name, value in request.items() if name != "do"})

    def names(self) -> list[str]:
        return names()

    def run(self, specs: list[dict]) -> list[dict]:
        """For each spec the digests of its tensors, and the names of tensors that later calls wrote to; or the error that it raised."""
        self.specs = specs
        ran = [self._run(spec) for spec in specs]
        self.results = [result for result, _ in ran]
        answers: list[dict] = []
        for result, first in ran:
            if isinstance(result, str):
                answers.append(dict(error=result))
            else:
                now = texts(result, digests(result))
                answers.append(dict(digests=first, changed=[name for name, text in now.items() if text != first[name]]))
        return answers

    def _run(self, spec: dict) -> tuple[Named | str, dict[str, str]]:
        result: Named | str
        try:
            result, sums = run(Call(spec, self.device, group=self.group))
            first = texts(result, sums)
        except Exception as error:
            result, first = f"{type(error).__name__}: {error}"[:500], {}
        if self.device != "cpu":
            # The device's errors come here, beside the call that made them.
            torch.cuda.synchronize()
        if self.group is None:
            return result, first
        parts: list[Any] = [None] * dist.get_world_size(self.group)
        mine = result if isinstance(result, str) else {name: x.cpu() for name, x in result.items()}
        dist.all_gather_object(parts, (mine, first), group=self.control)
        wrong = [part for part, _ in parts if isinstance(part, str)]
        if wrong:
            return wrong[0], {}
        return ({f"{name} on rank {rank}": x for rank, (part, _) in enumerate(parts) for name, x in part.items()},
                {f"{name} on rank {rank}": text for rank, (_, part) in enumerate(parts) for name, text in part.items()})

    def save(self, number: int, path: str) -> None:
        """Writes the tensors of spec ``number`` of the last ones."""
        if self.rank == 0:
            torch.save(self.results[number], path)

    def judge(self, number: int, path: str) -> dict:
        """How far the other side's tensors, at ``path``, are from this one's, and both from float64; see ``apart``."""
        if self.rank:
            return {}
        old = self.results[number]
        assert not isinstance(old, str)
        new = torch.load(path, map_location=next(iter(old.values())).device)
        spec = self.specs[number]
        try:
            exact, tiles = reference(spec, self.device)
        except Exception as error:
            # The differences count without it too.
            print(f"no float64 for {spec['name']}: {error}", file=sys.stderr)
            exact, tiles = {}, None
        ours, theirs = (texts(tensors, digests(tensors)) for tensors in (old, new))
        return {name: apart(name, old, new, exact, tiles) for name, text in ours.items() if name in theirs and text != theirs[name]}


def reference(spec: dict, device: str) -> tuple[Named, Tensor | None]:
    """The spec in float64 on one rank, with the tile of each token."""
    if spec["kind"] == "deferred":
        # Norm and RoPE have no float64.
        return {}, None
    call = Call(spec, device, wide=True)
    exact, _ = run(call)
    if not spec.get("shared"):
        return exact, call.tile_of_token()
    # Of a selection each rank has its heads.
    outs = {name: x for name, x in exact.items() if name.startswith("out")}
    return {f"{name} on rank {rank}": call.share(x, rank, 2) for name, x in outs.items() for rank in range(2)}, None


def apart(name: str, old: Named, new: Named, exact: Named, tiles: Tensor | None) -> dict:
    """How one tensor differs.

    values, of: how many are other bits, of how many. apart: the largest difference; relative: over the root of old's mean square.
    old_mean, old_worst, new_mean, new_worst: distances to float64 over the root of its mean square, of the rows for which all three
    selected the same tiles; absent where there is no such row, or no float64.
    """
    a, b = old[name], new[name]
    if a.shape != b.shape or a.dtype != b.dtype:
        return dict(other=f"{b.dtype} {list(b.shape)} in place of {a.dtype} {list(a.shape)}")
    x, y = a.double(), b.double()
    gap = distance(x, y)
    size = float(x[x.isfinite()].square().mean().sqrt()) if bool(x.isfinite().any()) else 0.0
    most = float(gap.max())
    result: dict = dict(dtype=str(a.dtype).split(".")[1], values=int((gap > 0).sum()) or 1, of=a.numel(), apart=most,
                        relative=most / max(size, 1e-30))
    if not a.is_floating_point() or name not in exact:
        return result
    truth = exact[name].to(a.device)
    rows = same_rows(name, old, new, exact, tiles)
    if rows is not None:
        truth, x, y = (tensor[rows.expand(tensor.shape[:3])] for tensor in (truth, x, y))
    if not truth.numel():
        return result
    size = max(float(truth[truth.isfinite()].square().mean().sqrt()), 1e-30)
    for side, tensor in (("old", x), ("new", y)):
        off = distance(tensor, truth) / size
        result |= {f"{side}_mean": float(off.mean()), f"{side}_worst": float(off.max())}
    return result


def same_rows(name: str, old: Named, new: Named, exact: Named, tiles: Tensor | None) -> Tensor | None:
    """bool ``[B or 1, H or 1, S]``: query tokens whose tile attends to the same tiles in all three; None = no selection is known."""
    selection = "selection" + name[len(name.partition(" (")[0]):]
    if tiles is None or any(selection not in tensors for tensors in (old, new, exact)):
        return None
    masks = [tensors[selection].to(tiles.device) for tensors in (old, new, exact)]
    if len({mask.shape for mask in masks}) > 1:
        return tiles.new_zeros(1, 1, len(tiles), dtype=torch.bool)
    same = (masks[0] == masks[1]).all(-1) & (masks[0] == masks[2]).all(-1)
    if name.startswith(("out", "dq")):
        return same[..., tiles]
    # Any row has a part in the gradients of keys and values.
    return same.all()[None, None, None]


def distance(x: Tensor, y: Tensor) -> Tensor:
    """|x - y|, 0 where both are the same infinity or no number, and infinite where one is."""
    same = (x == y) | (x.isnan() & y.isnan())
    return torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)


def main(device: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    group = control = None
    if device == "cuda":
        torch.cuda.set_device(rank)
    if ranks > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{os.environ['MEET']}", rank=rank,
                                world_size=ranks, timeout=PATIENCE)
        group, control = dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(hours=1))
    side = Side(f"cuda:{rank}" if device == "cuda" else device, group, control)
    while True:
        line = sys.stdin.readline() if rank == 0 else ""
        requests = [json.loads(line) if line else None]
        if ranks > 1:
            dist.broadcast_object_list(requests, src=0, group=control)
        if requests[0] is None:
            break
        answer = side.answer(requests[0])
        if rank == 0:
            print(json.dumps(answer), file=answers, flush=True)
    # A process of ranks whose kernels failed would wait here for others.
    os._exit(0) if ranks > 1 else None


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1])
