"""A layer that ranks share out: checked, timed by its stages, and reckoned for other numbers of ranks from what one rank can measure."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist
from bench_layer import sampled_error
from measure import NO_TIMES, elapsed_ms, failure, interleaved, now, peak_extra_mib, quartiles
from shapes import LayerShape
from stages import Stopwatch
from torch import Tensor
from world import OnRanks, World

from ssta import TokenLayout, ssta_attention
from ssta.kernels import BlockLists
from ssta.ranks import Shards, exchange
from ssta.ranks.runs import runs_of

# What every row has, in this order.
COLUMNS = dict(what="", shape="", attention="", ranks="", stage="", basis="measured", **NO_TIMES, step_s="", speed_up="",
               imbalance="", mib="", gb_s="", extra_mib="", difference="", error="", note="")


def row(**values: object) -> dict[str, object]:
    return {**COLUMNS, **values}


class SharedLayer:
    """The inputs of one layer, whole on every rank and the same, and calls of it on any number of ranks.

    Args:
        world: the ranks.
        shape: which layer.
        attention: a name for ``LayerShape.attention_config``.
    """

    def __init__(self, world: World, shape: LayerShape, attention: str) -> None:
        torch.manual_seed(0)
        self.world, self.shape = world, shape
        dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
        self.config = shape.attention_config(attention)
        self.layout = TokenLayout.video_text(shape.thw, shape.text)
        # [B, S, H, D] as projections give it.
        self.qkv = [torch.randn(1, shape.tokens, heads, shape.head_dim, device=world.device, dtype=dtype)
                    for heads in (shape.heads, *[shape.kv_heads or shape.heads] * 2)]
        self.text_mask = torch.arange(shape.text, device=world.device)[None] < shape.valid if shape.text else None

    def call(self, ranks: int) -> Callable[[], Tensor]:
        """The layer on this rank's tokens; [B, H, S_r, D] -> the same."""
        if ranks == 1:
            return self.of_heads(self.shape.heads)
        group, shards = self.world.group(ranks), self.shards(ranks)
        local = [share(x, shards).transpose(1, 2) for x in self.qkv]
        return lambda: ssta_attention(*local, self.layout, self.config, text_mask=self.text_mask, group=group)

    def of_heads(self, heads: int) -> Callable[[], Tensor]:
        """The layer on one rank, of the first ``heads`` and their keys', in the memory that an exchange leaves them in."""
        own = [x[:, :, :heads * x.shape[2] // self.shape.heads].contiguous().transpose(1, 2) for x in self.qkv]
        return lambda: ssta_attention(*own, self.layout, self.config, text_mask=self.text_mask)

    def shards(self, ranks: int) -> Shards:
        """Which tokens each rank has."""
        return Shards.of(self.world.group(ranks), self.layout)

    def errors(self, ranks: int, expected: Tensor, blocks: BlockLists) -> tuple[float, float]:
        """(the largest difference from one rank's result over its largest value, error of sampled tiles against float64)."""
        out = self.call(ranks)()
        if ranks == 1:
            return 0.0, sampled_error(self.shape, *self.heads_first(), out, blocks, self.layout, self.config)
        shards = self.shards(ranks)
        own = share(expected.transpose(1, 2), shards).transpose(1, 2)
        difference = float((out - own).abs().max() / expected.abs().max())
        # Each token's row is one rank's, whole runs' are rank 0's, and adding zeros changes no bit.
        whole = torch.zeros_like(expected.transpose(1, 2))
        for place in shards.places:
            if place.shared or shards.rank == 0:
                held = place.held[shards.rank]
                start = place.start + (sum(place.held[:shards.rank]) if place.shared else 0)
                whole[:, start:start + held] = out.transpose(1, 2)[:, place.local:place.local + held]
        dist.all_reduce(whole, group=self.world.group(ranks))
        return difference, sampled_error(self.shape, *self.heads_first(), whole.transpose(1, 2), blocks, self.layout, self.config)

    def heads_first(self) -> list[Tensor]:
        return [x.transpose(1, 2) for x in self.qkv]


def share(x: Tensor, shards: Shards) -> Tensor:
    """A rank's tokens of ``[B, S, H, D]``."""
    starts = [place.start + (sum(place.held[:shards.rank]) if place.shared else 0) for place in shards.places]
    return torch.cat([x.narrow(1, start, place.held[shards.rank]) for start, place in zip(starts, shards.places)], 1)


def measure_layer(world: World, shape: LayerShape, attention: str, over: list[int], rounds: int) -> list[dict]:
    """Rows of the layer on each number of ranks: a row for every stage and one for the whole.

    Times of stages are those of the rank that attended longest, which the others wait for in the exchange that follows.
    """
    layer = SharedLayer(world, shape, attention)
    alone = world.attempt(lambda: ssta_attention(*layer.heads_first(), layer.layout, layer.config, text_mask=layer.text_mask,
                                                 return_blocks=True))
    calls, watches, facts, notes = {}, {}, {}, {}
    for ranks in over:
        try:
            found = world.gather(world.attempt(lambda ranks=ranks: layer.errors(ranks, *alone), ranks))
            call = world.attempt(lambda ranks=ranks: layer.call(ranks), ranks)
            memory = world.gather(world.attempt(lambda call=call: peak_extra_mib(call), ranks))
        except Exception as error:
            notes[ranks] = failure(error)
            continue
        facts[ranks] = dict(difference=max(of[0] for of in found if of), error=max(of[1] for of in found if of),
                           extra_mib=max(memory[:ranks]))
        watches[ranks] = Stopwatch(call)
        calls[ranks, "total"], calls[ranks, "stages"] = OnRanks(ranks, call), OnRanks(ranks, watches[ranks])
    alone = None
    times = interleaved(calls, rounds, timed=world.milliseconds)
    rows = []
    one = times.get((1, "total"), NO_TIMES)["median_ms"]
    for ranks in over:
        about = dict(what="layer", shape=shape.name, attention=attention, ranks=ranks)
        if ranks in notes:
            rows.append(row(**about, stage="total", note=notes[ranks]))
            continue
        total, imbalance = times[ranks, "total"], ""
        if not times[ranks, "stages"]["note"]:
            runs = [of for of in world.gather(watches[ranks].runs(rounds) if world.rank < ranks else None) if of]
            stages, imbalance = slowest(runs)
            rows += [row(**about, stage=stage, **quartiles(measured)) for stage, measured in stages.items()]
        rows.append(row(**about, stage="total", **total, **facts[ranks], imbalance=imbalance,
                        speed_up=one / total["median_ms"] if one and total["median_ms"] else ""))
    return rows


def slowest(runs: list[list[dict[str, float]]]) -> tuple[dict[str, list[float]], float]:
    """(stage -> its times in the rounds, each those of the rank that attended longest; the longest attention over the ranks' mean, in the
    middle of the rounds) of what each rank's rounds took."""
    stages: dict[str, list[float]] = {}
    imbalances = []
    for of_ranks in zip(*runs):
        attended = [run["attend"] for run in of_ranks]
        for stage, ms in of_ranks[attended.index(max(attended))].items():
            stages.setdefault(stage, []).append(ms)
        imbalances.append(max(attended) * len(attended) / sum(attended))
    return stages, quartiles(imbalances)["median_ms"]


def reckon_layer(world: World, shape: LayerShape, attention: str, sizes: list[int], rounds: int,
                 bandwidth: Callable[[int], float | None]) -> list[dict]:
    """Rows of the layer as it should be on each number of ranks, all measured on rank 0 but the exchange: the layer with a rank's heads and
    the copies that pack and unpack; the exchange is its bytes at ``bandwidth(ranks)`` GB/s a rank.

    What no one rank can show is left out: that ranks differ, and what a collective takes to begin. As many heads in k as in q.
    """
    layer = SharedLayer(world, shape, attention)
    sizes = [ranks for ranks in sizes if shape.heads % ranks == 0 and (ranks == 1 or bandwidth(ranks))]
    watches, calls = {}, {}
    for ranks in sizes:
        calls[ranks, "own heads"] = OnRanks(1, world.attempt(lambda ranks=ranks: layer.of_heads(shape.heads // ranks), 1))
        watches[ranks] = Copies(layer, ranks)
        if ranks > 1:
            calls[ranks, "copies"] = OnRanks(1, watches[ranks])
    times = interleaved(calls, rounds, timed=world.milliseconds)
    one = times[1, "own heads"]["median_ms"]
    rows = []
    for ranks in sizes:
        about = dict(what="layer", shape=shape.name, attention=attention, ranks=ranks, basis="reckoned")
        own = times[ranks, "own heads"]
        note = own["note"] or (times[ranks, "copies"]["note"] if ranks > 1 else "")
        if note:
            rows.append(row(**about, stage="total", note=note))
            continue
        parts = {}
        if ranks > 1:
            packing = world.gather(watches[ranks].median(rounds) if world.rank == 0 else None)[0]
            for (stage, sent), copying in zip(sent_bytes(layer, ranks).items(), packing):
                parts[stage] = dict(median_ms=copying + 1e-6 * sent / bandwidth(ranks), mib=sent / 2**20, gb_s=bandwidth(ranks))
            rows += [row(**about, stage=stage, **part) for stage, part in parts.items()]
            rows.append(row(**about, stage="own heads", **own))
        total = own["median_ms"] + sum(part["median_ms"] for part in parts.values())
        rows.append(row(**about, stage="total", median_ms=total, speed_up=one / total))
    return rows


def sent_bytes(layer: SharedLayer, ranks: int) -> dict[str, float]:
    """Bytes that a rank sends to all others, before the layer and after it."""
    shape, size = layer.shape, layer.qkv[0].element_size()
    token, video = shape.heads * shape.head_dim * size, (shape.tokens - shape.text) / ranks
    others = (ranks - 1) / ranks
    # Of the text every rank has its heads' rows, which all others want.
    return {"exchange in": 3 * video * token * others, "exchange out": (video + shape.text) * token * others}


class Copies:
    """What a rank copies around its exchanges, on one: q, k and v and the result into packets, and what comes back together."""

    def __init__(self, layer: SharedLayer, ranks: int) -> None:
        shape = layer.shape
        heads = shape.heads // ranks
        self._shards = Shards(runs_of(layer.layout, "video"), ranks, 0, object())
        self._xs = [share(x, self._shards).transpose(1, 2) for x in layer.qkv]
        self._deals = ((heads,) * ranks,) * 3
        self._out = layer.qkv[0].new_zeros(1, shape.tokens, heads, shape.head_dim).transpose(1, 2)
        self._marks: list[tuple] = []

    def __call__(self) -> None:
        marks = [now()]
        with patch.object(exchange, "Collective", _Still):
            exchange.Incoming(self._shards, self._xs, self._deals, graph=False).wait()
            marks.append(now())
            exchange.send_tokens(self._shards, (self._out,), self._deals[:1], gather=True)
            marks.append(now())
        self._marks.append(tuple(marks))

    def median(self, rounds: int) -> tuple[float, float]:
        """Milliseconds (before the layer, after it), over the last ``rounds`` calls."""
        before, after = zip(*[(elapsed_ms(a, b), elapsed_ms(b, c)) for a, b, c in self._marks[-rounds:]])
        return quartiles(before)["median_ms"], quartiles(after)["median_ms"]


class _Still:
    """In place of ``exchange.Collective``: nothing moves."""

    def __init__(self, group: object, send: Tensor, comes: list[int], goes: list[int], graph: bool, into: Tensor | None = None
                 ) -> None:
        self._into = send.new_empty(sum(comes)) if into is None else into

    def wait(self) -> Tensor:
        return self._into
