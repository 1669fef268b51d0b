"""What cases of several ranks share: sequences, inputs and masks that every rank makes alike, a rank's part of them, and refusals."""

import torch
import torch.distributed as dist

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid

TILE = (2, 4, 4)
TEXT = TokenLayout.video_text((5, 9, 7), 37)
WAN = TokenLayout.video_text((5, 9, 7))
SHORT = TokenLayout.video_text((1, 1, 3), 2)
TWICE = TokenLayout((VideoGrid(3, 5, 7), VideoGrid(3, 5, 7)))
TWO_GRIDS = TokenLayout((VideoGrid(2, 3, 3), DenseRun(3), VideoGrid(1, 3, 4)))
MIXED = TokenLayout((DenseRun(11), VideoGrid(4, 6, 8), DenseRun(5), VideoGrid(1, 6, 8), DenseRun(3)))


def config(**options):
    usual = {"tile_thw": TILE, "kernel_thw": (1, 3, 3), "topk": 3}
    if options.get("sparse_type") == "moba" or "compensation" in options:
        del usual["kernel_thw"]
    if options.get("sparse_type") == "sta" or "budget" in options:
        del usual["topk"]
    return SSTAConfig(**{**usual, **options})


def inputs(layout, heads=4, key_heads=None, batch=1, dtype=torch.float32, dim=16, seed=0):
    """The whole q, k and v as projections leave them; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, layout.length, number, dim, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
            for number in (heads, key_heads or heads, key_heads or heads)]


def local(x, shards, dim=2):
    """A rank's tokens of x, which has them all."""
    parts = []
    for place in shards.places:
        first = place.start + (sum(place.held[:shards.rank]) if place.shared else 0)
        parts.append(x.narrow(dim, first, place.held[shards.rank]))
    return torch.cat(parts, dim)


def mask(layout, batch):
    """Of each run of text less and less valid, at least one token."""
    lengths = [[max(1, run.length - 4 * element - 1) for run in layout.dense] for element in range(batch)]
    return torch.stack([torch.cat([torch.arange(run.length) < valid for run, valid in zip(layout.dense, lengths[element])])
                        for element in range(batch)])


def noting(call, name, steps):
    def noted(*args, **options):
        steps.append(name)
        return call(*args, **options)

    return noted


def refused(kind, text, call):
    """``call`` raises, and no token has been sent by then."""
    exchange, sent = dist.all_to_all_single, []

    def noticed(*args, **options):
        sent.append(args)
        return exchange(*args, **options)

    dist.all_to_all_single = noticed
    try:
        call()
    except kind as error:
        assert text in str(error), f"wanted {text!r}, got {error!r}"
        assert not sent, "tokens were sent before the error"
    else:
        raise AssertionError(f"nothing was raised instead of {kind.__name__} with {text!r}")
    finally:
        dist.all_to_all_single = exchange
