"""The gate before every time: sampled blocks of a result against float64, computed without any of the code that is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ssta.kernels import BlockLists
from ssta.kernels.estimate import CUTS, ITERATIONS


class Wrong(Exception):
    """A result is off by more than rounding."""


@dataclass(frozen=True)
class Spot:
    """Exact float64 values of some rows of one head; ``values`` has one tensor ``[rows, D]`` for each tensor that is compared."""

    batch: int
    head: int
    rows: Tensor
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class Truth:
    """Exact out and dq of some query blocks, and exact dk and dv of one key block."""

    queries: tuple[Spot, ...]
    keys: Spot | None = None

    def forward_error(self, name: str, out: Tensor, roundings: float = 4) -> float:
        """The largest error of out over the largest exact value, see ``check``."""
        return max(check(f"{name}, forward,", _rows(out, spot), spot.values[0], roundings) for spot in self.queries)

    def backward_error(self, name: str, grads: tuple[Tensor, Tensor, Tensor], roundings: float = 4) -> float:
        """The same of (dq, dk, dv)."""
        errors = [check(f"{name}, dq,", _rows(grads[0], spot), spot.values[1], roundings) for spot in self.queries]
        for label, grad, exact in zip(("dk", "dv"), grads[1:], self.keys.values):
            errors.append(check(f"{name}, {label},", _rows(grad, self.keys), exact, roundings))
        return max(errors)


def truth(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, dout: Tensor | None = None) -> Truth:
    """Exact values at three places: the first query block of the last head, the last of the first, one in the middle. Synchronises.

    With ``dout`` also the gradients: dq at the same places, dk and dv of the key block in the middle. As many heads in k as in q.
    """
    batch, heads, last = q.shape[0] - 1, q.shape[1] - 1, blocks.num_q_blocks - 1
    places = dict.fromkeys([(batch, heads, 0), (0, 0, last), (batch // 2, heads // 2, last // 2)])
    queries = tuple(spot for spot in (exact_query_block(q, k, v, blocks, *place, dout) for place in places) if len(spot.rows))
    middle = (batch // 2, heads // 2, blocks.kv_bounds(k.shape[2])[0].shape[-1] // 2)
    return Truth(queries, None if dout is None else exact_key_block(q, k, v, blocks, *middle, dout))


def exact_query_block(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, batch: int, head: int, row: int,
                      dout: Tensor | None = None) -> Spot:
    """out, and with ``dout`` dq, of query block ``row``. Its dq depends on no other query block."""
    rows = _tokens(blocks.q_bounds(q.shape[2]), batch, head, row)
    keys = _listed_keys(blocks, k.shape[2], batch, head, row)
    query, key, value = q[batch, head, rows].double(), k[batch, head, keys].double(), v[batch, head, keys].double()
    scale = q.shape[-1] ** -0.5
    weights = torch.softmax(query @ key.mT * scale, -1)
    out = weights @ value
    if dout is None:
        return Spot(batch, head, rows, (out,))
    slopes = _slopes(weights, out, value, dout[batch, head, rows].double())
    return Spot(batch, head, rows, (out, slopes @ key * scale))


def estimated_query_block(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, head: int, row: int, last: int, parts: int) -> Tensor:
    """out ``[rows, D]`` of query block ``row`` of the first batch element where the blocks before ``last`` that it does not list are
    estimated linearly, each in so many parts (``kernels.eager.estimate``). As many heads in k as in q."""
    spot, (starts, sizes) = exact_query_block(q, k, v, blocks, 0, head, row), blocks.kv_bounds(k.shape[2])
    query, scale = q[0, head, spot.rows].double(), q.shape[-1] ** -0.5
    # Those of the block's queries that speak for it in h and in the masses.
    sampled = _sampled(len(query), 32 if int(_of_head(sizes, 0, head)[:last].max()) <= 128 else 64)
    moment = query[sampled].mT @ query[sampled] / len(sampled)
    keys = _listed_keys(blocks, k.shape[2], 0, head, row)
    exact = (query @ k[0, head, keys].double().mT * scale).logsumexp(-1)
    listed = _of_head(blocks.indices, 0, head)[row, :int(_of_head(blocks.counts, 0, head)[row])]
    left = torch.isin(torch.arange(last, device=q.device), listed).logical_not()
    if not left.any():
        return spot.values[0]
    logits, means, matrices, of_block = [], [], [], []
    for other, unit in [(block, unit) for block in range(last) for unit in _units(k, (starts, sizes), head, block, parts)]:
        key, value = k[0, head, unit].double(), v[0, head, unit].double()
        spread = key - key.mean(0)
        of_block.append(other)
        h = 0.5 * scale**2 * float((moment * (spread.mT @ spread / len(key))).sum())
        logits.append(scale * query @ key.mean(0) + math.log(len(key)) + min(h, 1.0))
        means.append(value.mean(0))
        matrices.append(min(1.0, 1 / max(h, 1e-6)) ** 0.5 * (spread.mT @ (value - value.mean(0)) / len(key)))
    left = left[of_block]
    logits, means, matrices = torch.stack(logits, -1), torch.stack(means)[left], torch.stack(matrices)[left]
    mass = logits[sampled].softmax(-1).mean(0)[left]
    matrix = ((mass / mass.sum())[:, None, None] * matrices).sum(0)
    logits = logits[:, left]
    weights = torch.stack((exact, logits.logsumexp(-1)), -1).softmax(-1)
    return weights[:, :1] * spot.values[0] + weights[:, 1:] * (logits.softmax(-1) @ means + scale * query @ matrix)


def _units(k: Tensor, bounds: tuple[Tensor, Tensor], head: int, block: int, parts: int) -> list[Tensor]:
    """The tokens of each unit of a block: all, or those whose keys lie lower and higher on the block's first principal direction, cut
    where the means of both are as far away."""
    tokens = _tokens(bounds, 0, head, block)
    if parts == 1 or len(tokens) < 2:
        return [tokens]
    spread = k[0, head, tokens].double()
    spread = spread - spread.mean(0)
    variance = spread.mT @ spread
    direction = 1 + variance.diagonal() / len(tokens)
    for _ in range(ITERATIONS):
        direction = variance @ direction
        direction = direction / direction.norm().clamp(min=1e-20)
    along, middle = spread @ direction, 0.0
    for _ in range(CUTS):
        lower = along < middle
        if lower.any() and not lower.all():
            middle = float(along[lower].mean() + along[~lower].mean()) / 2
    lower = along < middle
    return [tokens[lower], tokens[~lower]] if lower.any() else [tokens]


def _sampled(tokens: int, number: int) -> list[int]:
    """Which of a block's queries say what mass it sees: one of each of ``number`` equal runs, at places that the golden ratio spreads."""
    runs = [(i * 40503 % 2**16, i * tokens // number, (i + 1) * tokens // number) for i in range(number)]
    return [first + (shift * (end - first) >> 16) for shift, first, end in runs if end > first]


def exact_key_block(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, batch: int, head: int, column: int, dout: Tensor) -> Spot:
    """dk and dv of key block ``column``: the sum over the query blocks that list it, one after the other."""
    columns = _tokens(blocks.kv_bounds(k.shape[2]), batch, head, column)
    scale = q.shape[-1] ** -0.5
    dk, dv = torch.zeros(2, len(columns), q.shape[-1], dtype=torch.float64, device=q.device)
    counts, indices = _of_head(blocks.counts, batch, head), _of_head(blocks.indices, batch, head)
    listed = (indices == column) & (torch.arange(indices.shape[-1], device=indices.device) < counts[:, None])
    for row in listed.any(-1).nonzero().flatten().tolist():
        rows = _tokens(blocks.q_bounds(q.shape[2]), batch, head, row)
        keys = _listed_keys(blocks, k.shape[2], batch, head, row)
        query, key, value = q[batch, head, rows].double(), k[batch, head, keys].double(), v[batch, head, keys].double()
        grad = dout[batch, head, rows].double()
        weights = torch.softmax(query @ key.mT * scale, -1)
        slopes = _slopes(weights, weights @ value, value, grad)
        inside = torch.isin(keys, columns)
        dk += slopes[:, inside].mT @ query * scale
        dv += weights[:, inside].mT @ grad
    return Spot(batch, head, columns, (dk, dv))


def check(name: str, got: Tensor, exact: Tensor, roundings: float = 4) -> float:
    """The largest error of ``got`` over the largest value of ``exact``.

    Allowed are so many roundings of got's dtype and a long float32 sum. Where ``exact`` is zero, as the gradients of keys that no list
    names, nothing but zeros is right.

    Raises:
        Wrong: it is larger, or not a number.
    """
    error = float((got.double() - exact).abs().max() / exact.abs().max().clamp(min=torch.finfo(torch.float64).tiny))
    allowed = roundings * torch.finfo(got.dtype).eps + 64 * torch.finfo(torch.float32).eps
    if not error <= allowed:  # NaN is not
        raise Wrong(f"{name} is wrong: off by {error:.3e} of the largest value, {allowed:.3e} is allowed")
    return error


def _slopes(weights: Tensor, out: Tensor, value: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the scores, where out = softmax(scores) @ value and ``grad`` is that of out."""
    return weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True))


def _rows(x: Tensor, spot: Spot) -> Tensor:
    return x[spot.batch, spot.head, spot.rows]


def _of_head(x: Tensor, batch: int, head: int) -> Tensor:
    """``[B or 1, H or 1, ...]`` at one batch element and head."""
    return x[batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]


def _tokens(bounds: tuple[Tensor, Tensor], batch: int, head: int, block: int) -> Tensor:
    start, size = (int(_of_head(x, batch, head)[block]) for x in bounds)
    return torch.arange(start, start + size, device=bounds[0].device)


def _listed_keys(blocks: BlockLists, kv_len: int, batch: int, head: int, row: int) -> Tensor:
    starts, sizes = (_of_head(x, batch, head).tolist() for x in blocks.kv_bounds(kv_len))
    ids = _of_head(blocks.indices, batch, head)[row, :int(_of_head(blocks.counts, batch, head)[row])].tolist()
    return torch.cat([torch.arange(starts[i], starts[i] + sizes[i]) for i in ids] or [torch.arange(0)]).to(blocks.counts.device)
