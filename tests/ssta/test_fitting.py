"""A tile that is given as a number of tokens: which one fits a canvas, and that a layer is then the layer of that tile."""

from itertools import product
from math import prod

import numpy as np
import pytest
import torch

from ssta import DenseRun, SSTAConfig, TileCache, TokenLayout, explain, prepare, ssta_3d_attention, ssta_attention
from ssta.fitting import SPREAD, count, fitting_tile, spread

CANVAS = (3, 6, 10)
FITS = SSTAConfig(tile_thw=24, sparse_type="block_attn", density=0.3, compensation="linear")


def qkv(tokens: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 1, 2, tokens, 16, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.mark.parametrize(("canvas", "tile"), [
    ((21, 45, 80), (3, 5, 8)), ((33, 45, 80), (3, 5, 8)), ((31, 45, 80), (4, 4, 8)), ((31, 44, 80), (4, 4, 8)), ((16, 16, 24), (4, 4, 8)),
    ((1, 64, 64), (1, 8, 16)), ((2, 45, 80), (2, 8, 8)), ((2, 5, 9), (2, 5, 9)), ((1, 1, 500), (1, 1, 125))])
def test_which_tile_of_128_tokens_fits(canvas, tile):
    assert fitting_tile(canvas, 128) == tile


@pytest.mark.parametrize("canvas", [(21, 30, 52), (5, 9, 14), (1, 30, 52), (13, 7, 3)])
@pytest.mark.parametrize("tokens", [1, 7, 64, 100])
def test_no_compact_tile_cuts_a_canvas_into_fewer(canvas, tokens):
    tile = fitting_tile(canvas, tokens)
    assert prod(tile) <= tokens
    # No tile of so many tokens is more compact than sides of real numbers can be, which lie on a fine grid here.
    sides = [np.arange(1, n + 0.01, 0.05) for n in canvas]
    t, h = (x.reshape(shape) for x, shape in zip(sides, ((-1, 1), (1, -1))))
    w = np.minimum(min(tokens, prod(canvas)) / (t * h), canvas[2])
    held = (w >= 1) & (t * h * w >= 0.99 * min(tokens, prod(canvas)))
    least = spread(t, h, w)[held].min()
    compact = [other for other in product(*[range(1, n + 1) for n in canvas])
               if prod(other) <= tokens and spread(*other) <= SPREAD * least * 0.99]
    assert spread(*tile) <= SPREAD * least * 1.03 + 1e-6
    assert count(canvas, tile) <= min((count(canvas, other) for other in compact), default=prod(canvas))


def test_four_by_four_by_eight_wherever_it_divides():
    for canvas in product((4, 8, 12, 28), (4, 20, 24, 44), (8, 40, 56, 80)):
        assert fitting_tile(canvas, 128) == (4, 4, 8)


def test_a_layer_is_that_of_the_tile_that_fits():
    tile = fitting_tile(CANVAS, 24)
    same = SSTAConfig(tile_thw=tile, sparse_type="block_attn", density=0.3, compensation="linear")
    assert FITS.for_canvas(CANVAS) == same and FITS.for_canvas(CANVAS) is FITS.for_canvas(CANVAS)
    layout = TokenLayout.video_text(CANVAS, 5)
    q, k, v = qkv(layout.length)
    out = ssta_attention(q, k, v, layout, same)
    assert torch.equal(ssta_attention(q, k, v, layout, FITS), out)
    assert prepare(layout, FITS, like=q).spec == prepare(layout, same, like=q).spec
    keywords = dict(text_len=5, sparse_type="block_attn", density=0.3, compensation="linear")
    assert torch.equal(ssta_3d_attention(q, k, v, CANVAS, tile_thw=np.int64(24), **keywords), out)
    assert f"video of {' x '.join(map(str, tile))} (" in str(explain(q, k, CANVAS, tile_thw=24, **keywords))
    # Without a video a tile has so many tokens.
    runs = TokenLayout((DenseRun(layout.length),))
    assert torch.equal(ssta_attention(q, k, v, runs, FITS), ssta_attention(q, k, v, runs, SSTAConfig(tile_thw=(2, 3, 4))))


def test_a_compiled_canvas_may_change():
    def attend(x: torch.Tensor) -> torch.Tensor:
        q = x.flatten(2, 4)
        return ssta_3d_attention(q, q, q, x.shape[2:5], tile_thw=24, sparse_type="block_attn", density=0.3)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for canvas in (CANVAS, (4, 5, 8)):
        x = torch.randn(1, 2, *canvas, 16)
        assert torch.equal(compiled(x), attend(x))


def test_variants_may_have_either():
    config = SSTAConfig(tile_thw=24, variants=((1, {"tile_thw": (1, 2, 3)}), (2, {"tile_thw": 8})))
    assert [config.for_canvas((t, 6, 10)).tile for t in (1, 2, 3)] == [(1, 2, 3), (2, 2, 2), fitting_tile(CANVAS, 24)]


def test_a_cache_has_the_tile_that_fits_its_chunk():
    q, k, v = qkv(prod(CANVAS))
    tile = FITS.for_canvas(CANVAS).tile
    caches = [TileCache(SSTAConfig(tile_thw=of, density=0.5, compensation="linear"), window=6) for of in (24, tile)]
    for _ in range(3):
        found, wanted = (cache.attend(q, k, v, CANVAS) for cache in caches)
        assert torch.equal(found, wanted)
    caches[1].load_state_dict(caches[0].state_dict())


@pytest.mark.parametrize(("value", "error", "message"), [
    (0, ValueError, "tile_thw must be at least 1, got 0"), (5000, ValueError, "tile_thw must be at most 4096 tokens as an int"),
    (True, TypeError, "tile_thw must be an int, got True"), (2.0, TypeError, r"a tuple of three ints \(t, h, w\), or an int, .* got 2.0"),
    ("128", TypeError, "the most tokens of a tile, got '128'"), ((128,), ValueError, "tile_thw must have three entries")])
def test_what_is_no_tile(value, error, message):
    with pytest.raises(error, match=message):
        SSTAConfig(tile_thw=value)
