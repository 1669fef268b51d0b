"""What models without published SSTA settings get by default, whatever program runs them."""

from __future__ import annotations

from ssta import SSTAConfig


def small_tiles() -> SSTAConfig:
    """For models without published SSTA settings: tiles of 128 tokens, of which a fifth of the pairs is computed exactly, a window of
    3 x 3 x 3 among them, and the rest estimated, because such models were trained with all of it. A single frame has flat tiles of as many.

    On the small model of ``benchmark/bench_quality.py`` tiles of 128 tokens come 3 dB nearer to the dense video than tiles of 256 and 6 dB
    nearer than HunyuanVideo-1.5's tiles of 384 at the same density, which is more than what their estimates cost in time would buy.
    """
    return SSTAConfig(tile_thw=(2, 8, 8), kernel_thw=(3, 3, 3), density=0.2, compensation="linear",
                      variants=((1, {"tile_thw": (1, 8, 16)}),))
