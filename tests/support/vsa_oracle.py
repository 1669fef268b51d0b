"""Video sparse attention and sparse-linear attention by their published formulas: float64, token by token. For tests only."""

import math
from itertools import product

import torch


def tiles_by_loops(thw, tile_thw):
    """The tokens of each tile, partial ones at the ends of the axes: tiles and tokens go t-major, then h, then w."""
    places = product(*(range(math.ceil(n / size)) for n, size in zip(thw, tile_thw)))
    found = []
    for place in places:
        spans = [range(at * size, min((at + 1) * size, n)) for at, size, n in zip(place, tile_thw, thw)]
        found.append([(t * thw[1] + h) * thw[2] + w for t, h, w in product(*spans)])
    return found


def best_of_rows(scores, kept):
    """True at the ``kept`` largest of each row, of equal ones the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :kept]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)


def masked_attention(q, k, v, seen, scale):
    return (scale * q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def block_of_token(blocks):
    order = torch.cat([torch.tensor(tokens) for tokens in blocks]).argsort()
    return torch.cat([torch.full((len(tokens),), number) for number, tokens in enumerate(blocks)])[order]


def spread_mask(blocks, rows, columns):
    """A mask over blocks as one over tokens: ``rows`` and ``columns`` are each block's tokens."""
    row_of, column_of = map(block_of_token, (rows, columns))
    return blocks[..., row_of, :][..., column_of]


def video_sparse_attention(q, k, v, gate, thw, sparsity, tile_thw=(4, 4, 4), scale=None, rounded=torch.float64, before=()):
    """(out, which tiles each tile attends to). q ``[B, H, S, D]``, k and v ``[B, Hkv, S, D]``, gate as q or None for 1; float64.

    ``rounded``: tiles are chosen by means in this dtype. ``before``: tokens of each run before the video, in tiles of its own.
    """
    size, start, runs = math.prod(tile_thw), 0, []
    for length in before:
        runs += [list(range(first, min(first + size, start + length))) for first in range(start, start + length, size)]
        start += length
    tiles = runs + [[start + token for token in tile] for tile in tiles_by_loops(thw, tile_thw)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q_mean, k_mean, v_mean = (torch.stack([x[:, :, tile].mean(2) for tile in tiles], 2) for x in (q, k, v))
    pooled = (scale * q_mean @ k_mean.mT).softmax(-1) @ v_mean
    q_seen, k_seen = (x.detach().to(rounded).double() for x in (q_mean, k_mean))
    best = best_of_rows((q_seen @ k_seen.mT)[..., len(runs):], max(1, math.ceil((1 - sparsity) * (len(tiles) - len(runs)))))
    kept = torch.cat([torch.ones_like(best[..., :1]).expand(*best.shape[:-1], len(runs)), best], -1)
    kept[..., :len(runs), :] = True
    out = masked_attention(q, k, v, spread_mask(kept, tiles, tiles), scale)
    for number, tile in enumerate(tiles):
        share = pooled[:, :, number, None].expand(-1, -1, len(tile), -1)
        out = out.index_add(2, torch.tensor(tile), share if gate is None else gate[:, :, tile] * share)
    return out, kept


FEATURES = {"softmax": lambda x: x.softmax(-1), "elu": lambda x: torch.where(x > 0, x + 1, x.exp()), "relu": lambda x: x.clamp(min=0)}


def sparse_linear_attention(q, k, v, weight, bias, density, feature_map, q_block, kv_block):
    """SLA of thu-ml/SLA's main branch: q ``[B, H, S, D]``, k and v ``[B, Hkv, S, D]``, weight ``[D, D]`` or None for
    attention to the chosen blocks alone, bias ``[D]``; float64."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows, columns = ([list(range(i, min(i + size, q.shape[2]))) for i in range(0, q.shape[2], size)] for size in (q_block, kv_block))
    smooth = (k - k.mean(2, keepdim=True)).detach()
    q_mean, k_mean = (torch.stack([x[:, :, block].mean(2) for block in blocks], 2) for x, blocks in ((q.detach(), rows), (smooth, columns)))
    kept = best_of_rows(q_mean @ k_mean.mT, min(len(columns), int(density * len(columns))))
    exact = masked_attention(q, k, v, spread_mask(kept, rows, columns), q.shape[-1] ** -0.5)
    if weight is None:
        return exact
    fq, fk = FEATURES[feature_map](q), FEATURES[feature_map](k)
    weights = fq @ fk.mT
    linear = weights @ v / (1e-5 + weights.sum(-1, keepdim=True))
    return exact + linear @ weight.T + bias
