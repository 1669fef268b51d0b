"""What ranks do in the tests of several ranks: each case compares with one process, which every rank is beside its part in the exchange."""

import time
import traceback
from functools import partial

import torch
import torch.distributed as dist

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid, ssta_3d_attention, ssta_attention
from ssta.attention import ssta_layer
from ssta.parallel import Shards, check_ranks

TILE = (2, 4, 4)
TEXT = TokenLayout.video_text((5, 9, 7), 37)
WAN = TokenLayout.video_text((5, 9, 7))
SHORT = TokenLayout.video_text((1, 1, 3), 2)
TWICE = TokenLayout((VideoGrid(3, 5, 7), VideoGrid(3, 5, 7)))
MIXED = TokenLayout((DenseRun(11), VideoGrid(4, 6, 8), DenseRun(5), VideoGrid(1, 6, 8), DenseRun(3)))


def config(**options):
    return SSTAConfig(**{"tile_thw": TILE, "kernel_thw": (1, 3, 3), "topk": 3, **options})


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


def same(layout=TEXT, split="video", heads=4, key_heads=None, batch=1, dtype=torch.float32, masked=False, exact=True, **options):
    """Attention over ranks is attention in one process: the same bits, or the rounding of float64."""
    settings = config(**options)
    qkv = inputs(layout, heads, key_heads, batch, dtype if exact else torch.float64)
    text_mask = mask(layout, batch) if masked else None
    shards = Shards.of(None, layout, split)
    out, blocks = ssta_attention(*[local(x, shards) for x in qkv], layout, settings, text_mask=text_mask, group=dist.group.WORLD,
                                 split=split, return_blocks=True)
    expected, all_blocks = ssta_attention(*qkv, layout, settings, text_mask=text_mask, return_blocks=True)
    first, last = shards.heads(heads, key_heads)
    if all_blocks.counts.shape[1] > 1:
        all_blocks = all_blocks.to_mask()[:, first:last]
    else:
        all_blocks = all_blocks.to_mask()
    assert torch.equal(blocks.to_mask(), all_blocks), "not the same selection"
    agrees(out, local(expected, shards), exact)
    assert out.transpose(1, 2).is_contiguous()


def agrees(out, expected, exact):
    assert out.shape == expected.shape and out.dtype == expected.dtype
    if exact:
        assert torch.equal(out, expected), f"not the same bits: {float((out - expected).abs().max()):.1e}"
    else:
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)


def gradients(layout=TEXT, split="video", heads=4, key_heads=None, batch=2, masked=False, **options):
    """Gradients of a loss over what all ranks hold add up over the ranks, of the whole runs too, whose part of the loss they divide."""
    settings, shards = config(**options), Shards.of(None, layout, split)
    qkv = [x.requires_grad_() for x in inputs(layout, heads, key_heads, batch, torch.float64)]
    text_mask = mask(layout, batch) if masked else None
    weight = inputs(layout, heads, batch=batch, dtype=torch.float64, seed=1)[0]
    expected = ssta_attention(*qkv, layout, settings, text_mask=text_mask)
    (expected * weight).sum().backward()
    own = [local(x.detach(), shards).requires_grad_() for x in qkv]
    out = ssta_attention(*own, layout, settings, text_mask=text_mask, group=dist.group.WORLD, split=split)
    # Each rank's loss weighs the text by its own number, whose sum over the ranks is what one process has.
    share = torch.cat([torch.ones(place.held[shards.rank], dtype=torch.float64) * (1 if place.shared else (shards.rank + 1) / sum(
        range(shards.ranks + 1))) for place in shards.places])[:, None]
    (out * local(weight, shards) * share).sum().backward()
    for x, whole in zip(own, qkv):
        parts = []
        for place in shards.places:
            part = x.grad.narrow(2, place.local, place.held[shards.rank]).clone()
            if not place.shared:
                dist.all_reduce(part)
            parts.append(part)
        torch.testing.assert_close(torch.cat(parts, 2), local(whole.grad, shards), rtol=0, atol=1e-13)


def sent_ahead():
    """What was sent one by one, in the order v, k, q, is what goes together."""
    shards, settings = Shards.of(None, TEXT), config()
    for key_heads in (4, 2 if dist.get_world_size() == 2 else 4):
        q, k, v = [local(x, shards) for x in inputs(TEXT, 4, key_heads, 2)]
        v_sent = shards.start(v)
        k_sent = shards.start(k)
        q_sent = shards.start(q, key_heads=key_heads)
        out = ssta_layer(q_sent, k_sent, v_sent, TEXT, settings, shards=shards).out
        assert torch.equal(out, ssta_attention(q, k, v, TEXT, settings, group=dist.group.WORLD))


CASES = {
    "video": partial(same, WAN),
}


def run(rank, ranks, names):
    """Of each case what went wrong, None where nothing did, and the seconds it took."""
    found = {}
    for name in names:
        start = time.monotonic()
        try:
            CASES[name]()
            error = None
        except Exception:
            error = traceback.format_exc()
        found[name] = error, time.monotonic() - start
    return found
CASES |= {"sent": sent_ahead, "text": partial(same), "gradients": gradients, "5 heads": partial(same, heads=5, exact=False), "shared": partial(same, mask_share_within_head=True, batch=2, masked=True)}
