"""Random calls of this library as plain data, for two checkouts in bits.py and many processes in soak.py.

A spec is a dict of numbers, texts and lists, the same in every process for the same seed; ``random_calls`` runs it. Kernels compile for
each kind of shape. Shapes therefore come from a small pool, and float16 and Triton's kernels with one head_dim each. Lengths of text,
masks, densities, strides and inputs are drawn anew every time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

Spec = dict[str, Any]
STRIDES = ("bhsd", "bshd", "packed", "gap", "odd")


@dataclass(frozen=True)
class Sizes:
    """The sizes of calls on a kind of device.

    Attributes:
        tiles: (t, h, w) of tiles, the commonest first.
        dims: head_dim.
        heads: (Hq, Hkv).
        frames, rows: ranges of a canvas' frames, and of its rows and columns.
        text: the most tokens of text.
        blocks: (query block, key block) of lists.
        lists: the most blocks of a list.
        dtypes: with their weights.
        impls: with their weights.
    """

    tiles: tuple[tuple[int, int, int], ...]
    dims: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    frames: tuple[int, int]
    rows: tuple[int, int]
    text: int
    blocks: tuple[tuple[int, int], ...]
    lists: int
    dtypes: dict[str, int]
    impls: dict[str, int]


SIZES = {
    "cuda": Sizes(((4, 4, 8), (6, 8, 8), (4, 4, 4)), (64, 128), ((2, 2), (4, 4), (4, 2), (3, 1), (8, 8)), (1, 9), (8, 26), 300,
                  ((128, 128), (384, 384), (64, 64), (128, 64)), 12, {"bfloat16": 17, "float16": 2, "float32": 1},
                  {"auto": 9, "triton": 1}),
    "cpu": Sizes(((2, 4, 4), (2, 2, 4), (1, 4, 4)), (8, 16), ((2, 2), (1, 1), (4, 2), (3, 1)), (1, 5), (4, 11), 40,
                 ((16, 16), (32, 16), (8, 24)), 6, {"float32": 6, "float64": 1, "bfloat16": 1}, {"auto": 3, "torch": 1})}


@dataclass(frozen=True)
class Kind:
    """One kind of call.

    Attributes:
        draw: (random numbers, sizes, canvases) -> the spec without its kind and seed.
        weight: how many of a hundred calls are of it.
        estimated: whether a change may round otherwise, so that distances to float64 decide.
        gpu: whether it needs one.
        ranks: how many processes share it.
        captured: whether a CUDA graph can hold it.
    """

    draw: Callable[[random.Random, Sizes, list], Spec]
    weight: float
    estimated: bool = False
    gpu: bool = False
    ranks: int = 1
    captured: bool = True


def specs(seed: int, calls: int, device: str, kinds: Sequence[str], ranks_on: str | None = None) -> list[Spec]:
    """``calls`` specs of ``kinds``, by their weights. A kind's specs do not depend on the other kinds. ``ranks_on``: another device for
    kinds that several processes share."""
    total = sum(KINDS[kind].weight for kind in kinds)
    drawn = []
    for kind in kinds:
        number = max(1, round(calls * KINDS[kind].weight / total))
        place = device if KINDS[kind].ranks == 1 else ranks_on or device
        drawn += [spec_of(kind, seed, index, place) for index in range(number)]
    return drawn


def spec_of(kind: str, seed: int, index: int, device: str) -> Spec:
    """The spec of one call, which names everything that is needed to run it again."""
    sizes, pool = SIZES[device], random.Random(f"canvases {seed}")
    canvases = [tuple(pool.randint(*span) for span in (sizes.frames, sizes.rows, sizes.rows)) for _ in range(8)]
    draw = random.Random(f"{kind} {seed} {index}")
    spec = KINDS[kind].draw(draw, sizes, canvases)
    spec |= dict(kind=kind, name=f"{kind} {index} of seed {seed}", seed=draw.randrange(2**31))
    return spec


def _one(draw: random.Random, weights: dict[Any, float]) -> Any:
    return draw.choices(list(weights), list(weights.values()))[0]


def _tensors(draw: random.Random, sizes: Sizes) -> Spec:
    """The part of a spec that all kinds have: the number of calls, their inputs, and their tensors' strides."""
    (heads, kv_heads), dtype, impl = draw.choice(sizes.heads), _one(draw, sizes.dtypes), _one(draw, sizes.impls)
    dim = draw.choice(sizes.dims)
    if impl == "triton":
        dtype, dim = "bfloat16", sizes.dims[0]
    elif dtype == "float16":
        dim = sizes.dims[-1]
    return dict(batch=_one(draw, {1: 3, 2: 1}), heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, impl=impl,
                strides=_one(draw, dict(zip(STRIDES, (3, 4, 1, 1, 0.3)))),
                inputs=_one(draw, {"randn": 6, "long": 1, "outlier": 1, "means": 2}), scale=_one(draw, {None: 5, 0.2: 1}),
                grad=draw.random() < 0.4, calls=_one(draw, {1: 5, 2: 3, 4: 1}), same_memory=draw.random() < 0.4, needs=[])


def _segments(draw: random.Random, canvases: list, text: int) -> list[list[int]]:
    """A sequence: [t, h, w] of video grids and [n] of dense runs."""
    video = list(draw.choice(canvases))

    def run() -> list[int]:
        return [draw.randint(1, text)]

    return draw.choice([[video]] * 4 + [[video, run()]] * 5 + [[run(), video]] + [[run(), video, run()]]
                       + [[video, [max(1, video[0] // 2), *video[1:]], run()]])


def _mask(draw: random.Random, segments: list[list[int]], batch: int, chance: float = 0.6) -> list[list[int]] | None:
    """How many tokens of each dense run are valid, in each batch element."""
    runs = [segment[0] for segment in segments if len(segment) == 1]
    if not runs or draw.random() > chance:
        return None
    return [[draw.randint(0, n) if draw.random() < 0.9 else 0 for n in runs] for _ in range(batch)]


def _budget(draw: random.Random, tiles: int, estimated: bool) -> Spec:
    """Fields of a configuration that select tiles; none that its rule ignores, because such fields are refused."""
    window = draw.choice([[1, 1, 1], [3, 3, 3], [1, 3, 3]])
    rule = draw.choice(["block_attn", "ssta", *([] if estimated else ["ssta", "sta"])])
    config: Spec = dict(sparse_type=rule, **({} if rule == "block_attn" else dict(kernel_thw=window)))
    if rule == "sta":
        return config
    how = _one(draw, {"density": 4, "topk": 4, "threshold": 0 if estimated else 1})
    if how == "density":
        return config | dict(density=round(draw.choice([draw.uniform(0.05, 0.6), draw.uniform(0.1, 0.3), 1.0]), 3))
    config["topk"] = draw.randint(1, max(1, tiles))
    if how == "threshold":
        config["threshold"] = round(draw.uniform(0.3, 0.95), 2)
    return config


def _layer(draw: random.Random, sizes: Sizes, canvases: list, parts: int) -> Spec:
    spec = _tensors(draw, sizes)
    spec["segments"] = segments = _segments(draw, canvases, sizes.text)
    spec["mask"] = _mask(draw, segments, spec["batch"])
    spec["mask_dtype"] = draw.choice(["bool", "bool", "int64"])
    tile = _one(draw, dict(zip(sizes.tiles, (4, 2, 1))))
    grids = [segment for segment in segments if len(segment) == 3]
    tiles = sum(prod(ceil(n / size) for n, size in zip(grid, tile)) for grid in grids)
    config = dict(tile_thw=list(tile), **_budget(draw, tiles, parts > 0))
    config["pad_type"] = _one(draw, {"none": 7, "zero": 2, "repeat": 1})
    if parts:
        config |= dict(compensation="linear", compensation_parts=parts)
        if draw.random() < 0.25:
            config["sampling_type"] = "similarity"
    else:
        if config["sparse_type"] != "sta" and "threshold" not in config and draw.random() < 0.3:
            config |= dict(sampling_type="importance", lambda_=draw.choice([0.3, 0.7]))
        config["mask_share_within_head"] = draw.random() < 0.1
        if draw.random() < 0.08:
            config["adaptive_pool"] = draw.choice([[1, 2, 2], [2, 2, 2]])
    spec["kv_segments"] = None
    if config["pad_type"] == "none" and draw.random() < 0.08:
        spec["kv_segments"] = [[draw.randint(1, 3), *grids[0][1:]], *segments]
    # The selection is returned by one of the two public calls.
    simple = segments in ([grids[0]], [grids[0], segments[-1]]) and spec["kv_segments"] is None
    spec["call"] = "ssta_3d_attention" if simple and draw.random() < 0.25 else "ssta_attention"
    spec["config"] = config
    spec["needs"] = [f"ssta.{spec['call']}", *[f"SSTAConfig.{name}" for name in config]]
    return spec


def _deferred(draw: random.Random, sizes: Sizes, canvases: list) -> Spec:
    spec = _layer(draw, sizes, canvases, 0)
    spec |= dict(grad=False, kv_segments=None, call="ssta_attention", norm=draw.random() < 0.8, rope=draw.random() < 0.8, strides="bshd",
                 scale=None, across=draw.random() < 0.3)
    if spec["dtype"] == "float64":
        spec["dtype"] = "float32"
    spec["needs"] += ["kernels.Deferred", "kernels.Projection", "kernels.RMSNorm"]
    return spec


def _dense(draw: random.Random, sizes: Sizes, canvases: list) -> Spec:
    spec = _tensors(draw, sizes)
    segments = _segments(draw, canvases, sizes.text) if draw.random() < 0.8 else [[draw.randint(1, 10 * sizes.text)]]
    return spec | dict(segments=segments, mask=_mask(draw, segments, spec["batch"]), mask_dtype="bool", needs=["ssta.dense_attention"])


def _kernel(draw: random.Random, sizes: Sizes, canvases: list) -> Spec:
    spec = _tensors(draw, sizes)
    q_block, kv_block = _one(draw, dict(zip(sizes.blocks, (4, 2, 2, 1))))
    ragged = draw.random() < 0.5

    def axis(size: int) -> list[int]:
        number = draw.randint(1, sizes.lists)
        if not ragged:
            return [size] * (number - 1) + [draw.randint(1, size)]
        return [_one(draw, {size: 3, draw.randint(0, size): 2, 0: 0.4}) for _ in range(number)]

    q_blocks, kv_blocks = axis(q_block), axis(kv_block)
    if not sum(q_blocks):
        q_blocks[0] = q_block
    if not sum(kv_blocks):
        kv_blocks[0] = kv_block
    lengths = ragged and draw.random() < 0.5
    return spec | dict(
        q_block=q_block, kv_block=kv_block, ragged=ragged, q_blocks=q_blocks, kv_blocks=kv_blocks,
        q_lengths=[draw.randint(0, n) for n in q_blocks] if lengths else None,
        kv_lengths=[draw.randint(0, n) if draw.random() < 0.5 else n for n in kv_blocks] if lengths else None,
        density=draw.choice([0.15, 0.4, 0.7, 1.0]), list_batch=draw.choice([1, spec["batch"]]),
        list_heads=draw.choice([1, spec["kv_heads"], spec["heads"]]), causal=draw.random() < 0.25, lse=draw.random() < 0.5,
        merged=draw.random() < 0.1, empty_rows=draw.random() < 0.3, outside=draw.random() < 0.05,
        needs=["kernels.block_sparse_attention", "kernels.BlockLists", "kernels.merge_attention"])


def _vsa(draw: random.Random, sizes: Sizes, canvases: list) -> Spec:
    spec = _tensors(draw, sizes)
    before = [draw.randint(1, sizes.text) for _ in range(draw.choice([0, 0, 1, 2]))]
    return spec | dict(segments=[*[[n] for n in before], list(draw.choice(canvases))], tile=list(draw.choice(sizes.tiles)),
                       sparsity=draw.choice([0.0, 0.5, 0.8, 0.9]), gate=draw.random() < 0.8, needs=["ssta.video_sparse_attention"])


def _sla(draw: random.Random, sizes: Sizes, canvases: list) -> Spec:
    spec = _tensors(draw, sizes)
    q_block, kv_block = draw.choice(sizes.blocks)
    return spec | dict(segments=[list(draw.choice(canvases))], q_block=q_block, kv_block=kv_block, density=draw.choice([0.1, 0.3, 0.8]),
                       weight=draw.random() < 0.8, bias=draw.random() < 0.5, feature_map=draw.choice(["softmax", "elu", "relu"]),
                       needs=["ssta.sparse_linear_attention"])


def _cache(draw: random.Random, sizes: Sizes, canvases: list, estimated: bool, groups: bool = False) -> Spec:
    spec = _tensors(draw, sizes)
    tile = list(draw.choice([size for size in sizes.tiles if size[0] <= 4]))
    h, w = draw.choice(canvases)[1:]
    frames = draw.randint(1, tile[0])
    window = max(tile[0], frames * draw.randint(2, 4))
    config: Spec = dict(tile_thw=tile, density=draw.choice([0.2, 0.4, 0.7]), kernel_thw=[1, 1, 1])
    if estimated:
        config |= dict(compensation="linear", compensation_parts=draw.choice([1, 2]))
    else:
        config["sparse_type"] = "block_attn"
    passes = []
    for _ in range(draw.randint(2, 6)):
        passes += [dict(keep=False, dense=False)] * draw.randint(0, 1) + [dict(keep=True, dense=draw.random() < 0.2)]
    text = draw.choice([0, 0, draw.randint(1, sizes.text)])
    return spec | dict(
        hw=[h, w], frames=frames, window=window, sink=draw.choice([0, 0, frames]), text=text, rotary=not groups and draw.random() < 0.3,
        passes=passes, config=config, calls=1, grad=False, saved=not groups and draw.random() < 0.2, strides=draw.choice(["bhsd", "bshd"]),
        needs=["ssta.TileCache", *[f"SSTAConfig.{name}" for name in config]])


def _ranks(draw: random.Random, sizes: Sizes, canvases: list, estimated: bool) -> Spec:
    if draw.random() < 0.2:
        spec = _cache(draw, sizes, canvases, estimated, groups=True)
    else:
        spec = _layer(draw, sizes, canvases, draw.choice([1, 2]) if estimated else 0) | dict(call="ssta_attention", kv_segments=None)
        spec["split"] = draw.choice(["video", "all"])
        spec["config"].pop("mask_share_within_head", None)
    # Heads are exchanged for tokens, of whole key heads.
    heads, kv_heads = draw.choice([(4, 4), (4, 2), (3, 3), (2, 2)])
    return spec | dict(heads=heads, kv_heads=kv_heads, shared=True, strides="bshd")


KINDS = {
    "attention": Kind(lambda *drawn: _layer(*drawn, 0), 27),
    "one part": Kind(lambda *drawn: _layer(*drawn, 1), 10, estimated=True),
    "two parts": Kind(lambda *drawn: _layer(*drawn, 2), 10, estimated=True),
    "kernel": Kind(_kernel, 20),
    "dense": Kind(_dense, 6),
    "vsa": Kind(_vsa, 6),
    "sla": Kind(_sla, 4),
    "deferred": Kind(_deferred, 3, gpu=True),
    "cache": Kind(lambda *drawn: _cache(*drawn, False), 4, captured=False),
    "estimated cache": Kind(lambda *drawn: _cache(*drawn, True), 4, estimated=True, captured=False),
    "ranks": Kind(lambda *drawn: _ranks(*drawn, False), 2, ranks=2, captured=False),
    "estimated ranks": Kind(lambda *drawn: _ranks(*drawn, True), 2, estimated=True, ranks=2, captured=False)}
