"""Which tile fits a canvas: of all that hold at most so many tokens, a compact one of which the canvas has few."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from .kernels.memo import remember_plain

# How far apart a tile's tokens may lie, in mean square, as a multiple of a cube's of the same tokens: 4 x 4 x 8 and 3 x 5 x 8 are
# just within it.
SPREAD = 1.3


@remember_plain
def fitting_tile(thw: tuple[int, int, int], tokens: int) -> tuple[int, int, int]:
    """The tile (t, h, w) of at most ``tokens`` tokens for a canvas of ``thw`` tokens.

    Of all compact tiles it is one that cuts the canvas into the fewest, because time grows with the square of their number and a partial
    tile takes nearly as long as a whole one. Of equally many it is one that divides the canvas, then the one with the most tokens, then the
    most compact, then the shortest in time, then in height. So 128 tokens are 4 x 4 x 8 wherever that divides the canvas.

    Compact, because a tile is estimated by means, which fit the better the nearer its tokens lie together: in mean square they are at most
    ``SPREAD`` times as far from its middle as those of a cube of ``tokens`` tokens, or of what comes nearest to one on this canvas.
    """
    most = SPREAD * spread(*_cube(thw, tokens))
    return min([tile for tile in _tiles(thw, tokens) if spread(*tile) <= most],
               key=lambda tile: (count(thw, tile), any([n % side for n, side in zip(thw, tile)]), -prod(tile), spread(*tile), tile))


# What torch.compiler.assume_constant_result does, without the whole compiler, which that loads.
fitting_tile._dynamo_marked_constant = True  # type: ignore[attr-defined]


def count(thw: tuple[int, int, int], tile: tuple[int, int, int]) -> int:
    """Tiles of a canvas, partial ones included."""
    return prod([-(-n // side) for n, side in zip(thw, tile)])


def spread(t: float, h: float, w: float) -> float:
    """Twelve times the mean square of the distance of a tile's tokens from its middle."""
    return t * t + h * h + w * w - 3


def _cube(thw: tuple[int, int, int], tokens: int) -> list[float]:
    """Sides, as near to one another as the canvas lets them be, of ``tokens`` tokens or all there are."""
    sides, left = [], float(tokens)
    for place, n in enumerate(sorted(thw)):
        sides.append(min(float(n), left ** (1 / (3 - place))))
        left = max(left / sides[-1], 1.0)
    return sides


def _tiles(thw: tuple[int, int, int], tokens: int) -> Iterator[tuple[int, int, int]]:
    """All of at most ``tokens`` tokens whose sides are the shortest that cut the canvas's into so many."""
    rows, columns = (_sides(n, tokens) for n in thw[1:])
    for t in _sides(thw[0], tokens):
        for h in rows:
            if t * h > tokens:
                break
            for w in columns:
                if t * h * w > tokens:
                    break
                yield t, h, w


def _sides(n: int, most: int) -> list[int]:
    """In ascending order."""
    return [side for side in range(1, min(n, most) + 1) if side == 1 or -(-n // side) < -(-n // (side - 1))]
