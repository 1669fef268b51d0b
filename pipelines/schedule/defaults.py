"""What models without published SSTA settings get by default, whatever program runs them."""

from __future__ import annotations

from ssta import SSTAConfig


def small_tiles() -> SSTAConfig:
    """For models without published SSTA settings: tiles of 128 tokens, of which 15 % of the pairs are computed exactly, those whose
    estimate is worst, and the rest estimated, because such models were trained with all of it. A single frame has flat tiles of as many.
    A window would take up pairs that an estimate does well enough.

    At one density a small model's videos are nearer to the dense ones in these tiles than in tiles of 256 or 384 tokens, or in flat ones of
    2 x 8 x 8 (``benchmark/quality.md``). Their estimates take longer.
    """
    return SSTAConfig(tile_thw=(4, 4, 8), kernel_thw=(1, 1, 1), sparse_type="block_attn", density=0.15, compensation="linear",
                      variants=((1, {"tile_thw": (1, 8, 16)}),))
