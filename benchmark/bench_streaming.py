"""How fast is a chunk of streaming video through a TileCache? Five models' last chunks, the whole call of one layer.

    python benchmark/bench_streaming.py [--stream TEXT ...] [--density 0.25] [--of-all] [--rounds 7] [--csv NAME]

Random inputs as projections give them, bfloat16 on a GPU, one batch element, a full window. "call" is ``TileCache.attend(keep=False)``:
tile order, the chunk's statistics, estimate, selection, attention, estimate of the rest, and back; "call that keeps" also stores the
chunk and rolls the window. "all tiles" is the same cache with everything computed exactly, as in dense steps. "stateless" is
``ssta_attention`` over the concatenated keys, which finds all statistics anew. "dense" is torch's SDPA over these keys, by cuDNN and by its
FlashAttention. ``of_plain`` is the cache's memory over keys and values alone. ``exact`` is the share of all pairs that the sparse calls
compute exactly: with a sink, which always is, more than the density; with --of-all as much as that, as far as the sink leaves anything.
Before a time is taken, sampled queries of "all tiles" are checked against float64, and how far the sparse call is off against how far the
stateless one is.

"step" is a forward of all blocks of a transformer of the model's width, with random weights, at this chunk: a few blocks and one are
measured, from which the rest follows. Beside it "dense step", by the faster of the two kernels over keys that stand ready; "..., graph" are
these from a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import torch
from arguments import add_names, add_rounds, named, new_parser
from measure import NO_TIMES, RESULTS, interleaved, print_machine, print_rows, write_rows
from stream_model import Attend, StreamModel, Width, in_graph
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from truth import Wrong, check

from ssta import SSTAConfig, TileCache, TokenLayout, ssta_attention

SAMPLES = 4
BACKENDS = {"dense, cuDNN": SDPBackend.CUDNN_ATTENTION, "dense, flash": SDPBackend.FLASH_ATTENTION, "dense": SDPBackend.MATH}


@dataclass(frozen=True)
class Stream:
    """A layer of a model at a chunk with a full window.

    Attributes:
        thw, tile: tokens of a chunk, and of a tile.
        window, sink: frames.
        width: of the model's blocks where its step is measured.
    """

    name: str
    thw: tuple[int, int, int]
    window: int
    sink: int
    heads: int
    head_dim: int
    tile: tuple[int, int, int]
    width: Width | None = None

    @property
    def tokens(self) -> tuple[int, int]:
        """Queries and keys."""
        t, h, w = self.thw
        return t * h * w, (t + self.window + self.sink) * h * w


# Tiles of at least 128 queries, and of little less than a multiple of 64 keys and of 128 or 192 queries, which Hopper's kernel takes.
STREAMS = (Stream("Self-Forcing 1.3B", (3, 30, 52), 18, 0, 12, 128, (3, 10, 8), Width(8960, 30, 4)),
           Stream("LongLive 2", (8, 22, 40), 24, 8, 24, 128, (8, 6, 8)),
           Stream("LingBot 14B, 720p", (3, 45, 80), 42, 3, 40, 128, (3, 8, 16), Width(13824, 40, 3)),
           Stream("Krea 14B", (3, 30, 52), 6, 0, 40, 128, (3, 10, 8)),
           Stream("HY-WorldPlay", (4, 30, 53), 20, 0, 16, 128, (4, 10, 9)))
STREAMS_CPU = (Stream("small", (3, 6, 8), 6, 1, 2, 32, (3, 3, 4), Width(128, 3, 2)),)


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    streams = STREAMS if gpu else STREAMS_CPU
    parser = new_parser(__doc__)
    add_names(parser, "stream", streams)
    parser.add_argument("--density", type=float, default=0.25, help="share of the tile pairs that is computed exactly (default 0.25)")
    parser.add_argument("--of-all", action="store_true", help="the density is a share of all pairs, a sink's included")
    add_rounds(parser, 7 if gpu else 2)
    options = parser.parse_args(argv)
    if not 0 < options.density < 1:
        parser.error(f"--density must lie in (0, 1), got {options.density}")
    print_machine()
    rows = []
    try:
        for stream in named(parser, "stream", options.stream, streams):
            torch.manual_seed(0)
            density, always = options.density, stream.sink / (stream.sink + stream.window + stream.thw[0])
            if options.of_all:
                density = max((density - always) / (1 - always), 0.02)
            found = measured(stream, density, options.rounds, torch.device("cuda" if gpu else "cpu"))
            rows += [row | dict(exact=always + (1 - always) * density) for row in found]
    except Wrong as error:
        raise SystemExit(f"{error}; no time is taken") from None
    print_rows(rows)
    if options.csv:
        write_rows(RESULTS / f"{options.csv}.csv", rows)


@torch.no_grad()
def measured(stream: Stream, density: float, rounds: int, device: torch.device) -> list[dict]:
    """A row for each way to attend."""
    cache = _full(stream, density, device)
    q, k, v = _chunk(stream, device)
    held, layout = cache.contents(), TokenLayout.video_text(stream.thw)
    keys, values = (torch.cat([x, own], 2) for x, own in ((held.key, k), (held.value, v)))
    kv_layout = TokenLayout(held.segments + layout.segments)
    del held
    calls: dict[str, Callable[[], Tensor]] = {
        "call": lambda: cache.attend(q, k, v, stream.thw, keep=False),
        "all tiles": lambda: cache.attend(q, k, v, stream.thw, keep=False, dense=True),
        "stateless": lambda: ssta_attention(q, keys, values, layout, cache.config, kv_layout=kv_layout)}
    for name, backend in BACKENDS.items():
        if (name == "dense") == (device.type != "cuda"):
            calls[name] = partial(_sdpa, q, keys, values, backend)
    _check(stream, calls, q, keys, values)
    # Last, for it changes what the others see.
    times = interleaved(calls, rounds)
    times |= interleaved({"call that keeps": lambda: cache.attend(q, k, v, stream.thw), "call": calls["call"]}, rounds) | {
        "call": times["call"]}
    plain = 2 * keys.numel() * keys.element_size()
    if stream.width is not None:
        fastest = min([name for name in BACKENDS if name in times and not times[name]["note"]], key=lambda name: times[name]["median_ms"])
        del calls, keys, values
        times |= _steps(stream, stream.width, density, rounds, device, BACKENDS[fastest])
    queries, number = stream.tokens
    return [dict(stream=stream.name, queries=queries, keys=number, heads=stream.heads, tile="x".join(map(str, stream.tile)),
                 density=density, what=name, **{column: found[column] for column in NO_TIMES}, of_plain=cache.nbytes / plain,
                 note=found["note"])
            for name, found in times.items()]


def _chunk(stream: Stream, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    shape = 1, stream.tokens[0], stream.heads, stream.head_dim
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32).transpose(1, 2)
               for _ in range(3))
    return q, k, v


def _full(stream: Stream, density: float, device: torch.device) -> TileCache:
    """A cache with a full window."""
    cache = TileCache(SSTAConfig(stream.tile, density=density, compensation="linear"), window=stream.window, sink=stream.sink)
    for _ in range((stream.window + stream.sink) // stream.thw[0] + 1):
        cache.attend(*_chunk(stream, device), stream.thw)
    return cache


def _steps(stream: Stream, width: Width, density: float, rounds: int, device: torch.device, backend: SDPBackend) -> dict[str, dict]:
    """Times of the model's steps."""
    (queries, number), shape = stream.tokens, (stream.heads, stream.head_dim)
    model = StreamModel(width, *shape, queries, device)

    def cached() -> Attend:
        cache = _full(stream, density, device)
        return lambda q, k, v: cache.attend(q, k, v, stream.thw, keep=False)

    def dense() -> Attend:
        keys, values = torch.randn(2, 1, shape[0], number, shape[1], device=device, dtype=model.x.dtype)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for x, into in ((k, keys), (v, values)):
                into[:, :, -queries:].copy_(x)
            return _sdpa(q, keys, values, backend)

        return attend

    calls: dict[Hashable, Callable[[], object]] = {}
    for kind, made in (("step", cached), ("dense step", dense)):
        attends = [made() for _ in range(width.measured)]
        for count in (1, width.measured):
            step = model.step(attends, count)
            calls[kind, count], calls[f"{kind}, graph", count] = step, in_graph(step)
    times, found = interleaved(calls, rounds), {}
    for kind in ("step", "step, graph", "dense step", "dense step, graph"):
        some = {count: times[kind, count] for count in (1, width.measured)}
        note = "; ".join([str(of["note"]) for of in some.values() if of["note"]])
        found[kind] = {column: "" if note else model.whole({count: of[column] for count, of in some.items()}) for column in NO_TIMES} | {
            "note": note or f"from {width.measured} blocks"}
    return found


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v)


def _check(stream: Stream, calls: dict[str, Callable[[], Tensor]], q: Tensor, keys: Tensor, values: Tensor) -> None:
    """
    Raises:
        Wrong: a result is off by more than rounding.
    """
    out, head = calls["all tiles"](), stream.heads - 1
    rows = torch.linspace(0, q.shape[2] - 1, SAMPLES, device=q.device).long()
    weights = (q[0, head, rows].double() @ keys[0, head].double().mT * stream.head_dim**-0.5).softmax(-1)
    check(f"{stream.name}, all tiles,", out[0, head, rows], weights @ values[0, head].double(), 4)
    # Of tiles that matter alike the two may choose different ones: what they are off by is compared. The cache's covariances have two bits
    # an entry, which costs most with random inputs, whose blocks' covariances have nothing in common.
    off, expected = (float((calls[name]().double() - out.double()).norm()) for name in ("call", "stateless"))
    if not abs(off - expected) <= 0.12 * expected:
        raise Wrong(f"{stream.name}, call, is off from all tiles by {off:.3g}, where the stateless one is off by {expected:.3g}")


if __name__ == "__main__":
    main()
