"""SSTA by its definition: plain loops in float64 over tokens, tiles and heads, sharing no code with the library. For tests only."""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch


@dataclass(frozen=True)
class Tile:
    """slots: the token in each slot, None for a zero token. box: slots along t, h, w. grid: which video grid, None for dense tiles.
    place: tile coordinates in the grid, or (number in its run,). shape: tiles of the grid along t, h, w. run: (first token, tokens)."""

    slots: tuple
    box: tuple
    grid: int | None
    place: tuple
    shape: tuple = ()
    run: tuple = ()


def tiles_of(segments, tile_thw, padding):
    """The tiles of a sequence: ``segments`` holds (t, h, w) for a video grid and an int for a dense run. Video tiles come first."""
    video, dense, start, grids = [], [], 0, 0
    size = tile_thw[0] * tile_thw[1] * tile_thw[2]
    for segment in segments:
        if isinstance(segment, int):
            for number, first in enumerate(range(0, segment, size)):
                slots = [start + min(i, segment - 1) for i in range(first, first + size) if padding != "none" or i < segment]
                dense.append(Tile(tuple(slots), (1, 1, len(slots)), None, (number,), run=(start, segment)))
            start += segment
            continue
        t, h, w = segment
        shape = tuple(-(-n // k) for n, k in zip(segment, tile_thw))
        for a in range(shape[0]):
            for b in range(shape[1]):
                for c in range(shape[2]):
                    video.append(_video_tile(segment, tile_thw, padding, (a, b, c), shape, start, grids))
        start += t * h * w
        grids += 1
    return video + dense, len(video)


def _video_tile(thw, tile_thw, padding, place, shape, start, grid):
    spans = [range(p * k, (p + 1) * k) for p, k in zip(place, tile_thw)]
    if padding == "none":
        spans = [[i for i in span if i < n] for span, n in zip(spans, thw)]
    slots = []
    for i in spans[0]:
        for j in spans[1]:
            for k in spans[2]:
                inside = i < thw[0] and j < thw[1] and k < thw[2]
                i_, j_, k_ = min(i, thw[0] - 1), min(j, thw[1] - 1), min(k, thw[2] - 1)
                slots.append(None if padding == "zero" and not inside else start + (i_ * thw[1] + j_) * thw[2] + k_)
    return Tile(tuple(slots), tuple(len(span) for span in spans), grid, place, shape)


def in_window(a, b, window):
    """Whether video tile b is near video tile a."""
    if a.grid != b.grid:
        return False
    for p, other, n, k in zip(a.place, b.place, a.shape, window):
        centre = min(max(p, k // 2), n - 1 - k // 2)
        if abs(centre - other) > k // 2:
            return False
    return True


def rows_of(x, tile):
    """[slots, D] of one head's tokens x [S, D], zeros for zero tokens."""
    return torch.stack([torch.zeros_like(x[0]) if token is None else x[token] for token in tile.slots])


def descriptor(x, tile, cells):
    """float64 [C]: means of x [S, D] over the tile's cells; each mean is rounded to x's dtype and then to float32, as the library's are."""
    rows, means = rows_of(x, tile).double().reshape(*tile.box, -1), []
    for spans in _cells(tile.box, cells or (1, 1, 1)):
        (t0, t1), (h0, h1), (w0, w1) = spans
        total = torch.zeros(rows.shape[-1], dtype=torch.float64)
        for t in range(t0, t1):
            for h in range(h0, h1):
                for w in range(w0, w1):
                    total += rows[t, h, w]
        means.append((total / ((t1 - t0) * (h1 - h0) * (w1 - w0))).to(x.dtype).float().double())
    return torch.cat(means)


def _cells(box, cells):
    def spans(n, parts):
        return [(i * n // parts, -(-(i + 1) * n // parts)) for i in range(parts)]

    return [(t, h, w) for t in spans(box[0], cells[0]) for h in spans(box[1], cells[1]) for w in spans(box[2], cells[2])]


def cosine(a, b):
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale else 0.0


def scores_of(q_means, k_means, sampling_type, lambda_):
    """[[score of key tile b for query tile a]], Python floats."""
    n = len(q_means)
    if sampling_type == "similarity":
        return [[float(q_means[a] @ k_means[b]) for b in range(n)] for a in range(n)]
    scores = [[0.0] * n for _ in range(n)]
    for b in range(n):
        redundancy = [(cosine(k_means[c], k_means[b]) + 1) / 2 for c in range(n) if c != b]
        redundancy = sum(redundancy) / len(redundancy) if redundancy else 0.0
        for a in range(n):
            scores[a][b] = lambda_ * (cosine(q_means[a], k_means[b]) + 1) / 2 - (1 - lambda_) * redundancy
    return scores


def budget_of(scores, topk, threshold):
    """(chosen tiles of one query tile; how far from going the other way the closest decision is, in score and in probability)."""
    n = len(scores)
    order = sorted(range(n), key=lambda b: (-scores[b], b))
    count, score_margin, mass_margin = topk, float("inf"), float("inf")
    if threshold > 0:
        top = scores[order[0]]
        weights = [float(torch.tensor((scores[b] - top) / 0.01, dtype=torch.float64).exp()) for b in order]
        mass, reached = 0.0, None
        for position, weight in enumerate(weights):
            mass += weight / sum(weights)
            mass_margin = min(mass_margin, abs(mass - threshold))
            if reached is None and mass >= threshold:
                reached = position + 1
        count = topk if reached is None else max(reached, 8)
    count = min(count, topk, n)
    if count < n:
        score_margin = scores[order[count - 1]] - scores[order[count]]
    return order[:count], score_margin, mass_margin


def spread_over_rows(window, density):
    """The tiles of each row in all; window[i][j]: whether tile j is in tile i's window. Rows whose window is more than their share keep it,
    and the others share what is left."""
    n = len(window)
    have, total = [sum(row) for row in window], Fraction(str(density)) * n * len(window[0])
    level, rows = total / n, n
    for i in sorted(range(n), key=lambda i: -have[i]):
        if have[i] <= level:
            break
        total, rows = total - have[i], rows - 1
        level = total / rows if rows else Fraction(0)
    counts, place = [], 0
    for i in range(n):
        if have[i] > level:
            counts.append(max(have[i], 1))
        else:
            counts.append(max(math.floor((place + 1) * level) - math.floor(place * level), have[i], 1))
            place += 1
    return counts, level


def best_beyond(scores, window, counts):
    """(bool of the window and in each row the best beside it, up to counts in all; how close the closest decision is)."""
    margin, kept = float("inf"), [list(row) for row in window]
    for i, row in enumerate(scores):
        free = sorted((j for j in range(len(row)) if not window[i][j]), key=lambda j: (-row[j], j))
        taken = counts[i] - sum(window[i])
        for j in free[:taken]:
            kept[i][j] = True
        if 0 < taken < len(free):
            margin = min(margin, row[free[taken - 1]] - row[free[taken]])
    return kept, margin


@dataclass
class Selection:
    """mask: bool [B, H, T, T]; kept[b][i]: the slots of tile i that are real under text_mask; clear: no decision of the budget is so close
    that float32 could take it the other way."""

    tiles: list
    mask: torch.Tensor
    kept: list
    clear: bool


def select(q, k, segments, config, valid=None):
    """SSTA's selection. q [B, H, S, D], k [B, Hkv, S, D]; ``valid``: for each batch element the valid tokens of each dense run, or None."""
    tiles, n = tiles_of(segments, config.tile_thw, config.pad_type)
    batch, heads, total = q.shape[0], q.shape[1], len(tiles)
    group = heads // k.shape[1]
    size = config.tile_thw[0] * config.tile_thw[1] * config.tile_thw[2]
    cells = config.adaptive_pool or ((2, 2, 2) if config.threshold > 0 else None)
    mask, clear, kept = torch.zeros(batch, heads, total, total, dtype=torch.bool), True, []
    for b in range(batch):
        q_means = [[descriptor(q[b, h], tile, cells) for tile in tiles[:n]] for h in range(heads)]
        k_means = [[descriptor(k[b, h // group], tile, cells) for tile in tiles[:n]] for h in range(heads)]
        if config.mask_share_within_head:
            q_means = [[sum(q_means[h][i] for h in range(heads)) / heads for i in range(n)]] * heads
            k_means = [[sum(k_means[h][i] for h in range(heads)) / heads for i in range(n)]] * heads
        runs = sorted({tile.run for tile in tiles[n:]})
        left = {run: run[1] if valid is None else valid[b][i] for i, run in enumerate(runs)}
        used = [True] * n + [tile.place[0] < max(-(-left[tile.run] // size), 1) for tile in tiles[n:]]
        if config.pad_type == "none":
            kept.append([len(tile.slots) for tile in tiles[:n]]
                        + [min(max(left[tile.run] - tile.place[0] * size, 0), len(tile.slots)) for tile in tiles[n:]])
            used = [True] * total
        else:
            kept.append([len(tile.slots) for tile in tiles])
        for h in range(heads):
            scores = scores_of(q_means[h], k_means[h], config.scored_by, config.lambda_)
            for i in range(total):
                for j in range(total):
                    if i < n and j < n:
                        mask[b, h, i, j] = config.selected_by != "block_attn" and in_window(tiles[i], tiles[j], config.window)
                    else:
                        mask[b, h, i, j] = used[i] and used[j] or i == j
                if i < n and config.selected_by != "sta" and config.density is None:
                    chosen, score_margin, mass_margin = budget_of(scores[i], config.row_topk, config.threshold)
                    mask[b, h, i, chosen] = True
                    clear = clear and score_margin > 1e-5 * max(map(abs, scores[i])) and mass_margin > 2e-4
            if n and config.density is not None:
                window = mask[b, h, :n, :n].tolist()
                spread, margin = best_beyond(scores, window, spread_over_rows(window, config.density)[0])
                mask[b, h, :n, :n] = torch.tensor(spread)
                clear = clear and margin > 1e-5 * max(abs(score) for row in scores for score in row)
    return Selection(tiles, mask, kept, clear)


def attend(q, k, v, selection, scale=None):
    """Attention over the selected slots, float64 [B, H, S, D], differentiable; rows without a real slot are zeros."""
    batch, heads, length, dim = q.shape
    group, scale = heads // k.shape[1], dim**-0.5 if scale is None else scale
    out = [[[None] * length for _ in range(heads)] for _ in range(batch)]
    for b in range(batch):
        for h in range(heads):
            keys = [rows_of(k[b, h // group].double(), tile)[:kept] for tile, kept in zip(selection.tiles, selection.kept[b])]
            values = [rows_of(v[b, h // group].double(), tile)[:kept] for tile, kept in zip(selection.tiles, selection.kept[b])]
            for i, tile in enumerate(selection.tiles):
                chosen = selection.mask[b, h, i].nonzero().flatten().tolist()
                weights = rows_of(q[b, h].double(), tile) @ torch.cat([keys[j] for j in chosen]).T * scale
                rows = weights.softmax(-1) @ torch.cat([values[j] for j in chosen])
                for slot, token in enumerate(tile.slots):
                    # Repetitions come after the token that they repeat, and the token's own slot is the one that is returned.
                    if token is not None and out[b][h][token] is None:
                        out[b][h][token] = rows[slot] if slot < selection.kept[b][i] else torch.zeros_like(rows[slot])
    return torch.stack([torch.stack([torch.stack(rows) for rows in element]) for element in out])
