"""Patterns, inputs and devices that the kernels' tests share."""

from functools import partial
from itertools import product

import pytest
import torch

from ssta.kernels import BlockLists

LOG2E = 1.4426950408889634

# Slow: with gradients, each takes seconds.
INTERPRETED = [] if torch.cuda.is_available() else [pytest.param("cpu", "triton", id="interpreter", marks=pytest.mark.slow)]
EVERYWHERE = [pytest.param("cpu", "torch", id="torch"), *INTERPRETED,
              pytest.param("cuda", "triton", id="gpu-triton", marks=pytest.mark.gpu),
              pytest.param("cuda", "hopper", id="gpu-hopper", marks=pytest.mark.gpu),
              pytest.param("cuda", "torch", id="gpu-torch", marks=pytest.mark.gpu)]
everywhere = pytest.mark.parametrize("device, impl", EVERYWHERE)


def inputs(batch, heads, kv_heads, q_len, kv_len, dim, device="cpu", dtype=torch.float16, impl=None):
    """q as a [B, S, H, D] projection seen through a transpose; k and v contiguous. The Hopper kernel's head_dim is at least 64."""
    dim = max(dim, 64) if impl == "hopper" else dim
    q = torch.randn(batch, q_len, heads, dim, device=device, dtype=dtype).transpose(1, 2)
    return q, *(torch.randn(batch, kv_heads, kv_len, dim, device=device, dtype=dtype) for _ in range(2))


def spread(names, *settings):
    """(name, a value of each setting), for tests of which the whole product would take minutes: each name meets every value of every
    setting, in as few choices as that needs, and from name to name other values meet one another."""
    shifts = list(product(*(range(len(values)) for values in settings[1:])))
    return [(name, *(values[(turn + shift) % len(values)] for values, shift in zip(settings, (0, *shifts[i % len(shifts)]))))
            for i, name in enumerate(names) for turn in range(max(map(len, settings)))]


def ragged(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def patterns(device):
    """Lists that between them have every feature: name -> (BlockLists, Hq, Hkv, Sq, Skv)."""
    def mask(*shape):
        kept = torch.rand(shape, device=device) < 0.5
        kept[..., 1, :] = False
        return kept

    lengths = partial(torch.tensor, device=device, dtype=torch.int32)
    two_cuts = torch.stack([ragged(x, device) for x in ([5, 20, 15], [16, 16, 8])])[None]
    return {
        "uniform": (BlockLists.from_mask(mask(2, 2, 4, 3), 16, 32), 2, 2, 64, 96),
        "short last block": (BlockLists.from_mask(mask(2, 2, 4, 3), 16, 32), 2, 2, 55, 70),
        "shared by heads": (BlockLists.from_mask(mask(4, 5), 16, 16), 4, 2, 64, 80),
        "per key head": (BlockLists.from_mask(mask(2, 2, 3, 3), 48, 16), 4, 2, 131, 48),
        "top-k": (BlockLists.from_topk(torch.rand(2, 4, 3, 6, device=device).topk(2).indices, 32, 16), 4, 1, 96, 96),
        "ragged": (BlockLists.from_mask(mask(2, 4, 4), ragged([7, 0, 33, 30], device), ragged([33, 17, 0, 40], device),
                                        q_lengths=lengths([5, 0, 33, 20]), kv_lengths=lengths([30, 17, 0, 11])), 2, 1, 70, 90),
        "lengths per batch element": (BlockLists.from_mask(mask(1, 1, 4, 3), 16, 32, q_lengths=lengths([[[16, 3, 0, 9]], [[1, 16, 16, 0]]]),
                                                           kv_lengths=lengths([[[32, 0, 5]], [[9, 32, 20]]])), 2, 2, 64, 96),
        "keys one by one": (BlockLists.from_mask(mask(2, 2, 3, 26), 16, 1), 4, 2, 40, 26),
        "short key blocks": (BlockLists.from_mask(mask(2, 3, 6), 24, ragged([5, 0, 9, 9, 2, 6], device),
                                                  kv_lengths=lengths([5, 0, 4, 9, 1, 0])), 4, 2, 61, 31),
        "offsets per key head": (BlockLists.from_mask(mask(1, 2, 2, 3), 24, two_cuts), 4, 2, 48, 40),
    }


# Keys of a list, in its order, as (so many, where their scores lie in base 2): what a weight that is measured from the first chunk's
# largest score must survive.
LEVELS = {"all low": [(512, -3000)], "falling": [(128, 500), (384, -500)], "rising a little": [(128, i * 20) for i in range(6)],
          "rising": [(128, i * 40) for i in range(5)], "rising to where sums have no inverse": [(128, 0), (384, 118)],
          "one at the end": [(511, 0), (1, 3000)], "three at the end": [(512, 0), (3, 3000)]}
OVERFLOW = ("rising", "rising to where sums have no inverse", "one at the end", "three at the end")


def levels(*sizes, device="cpu", dtype=torch.bfloat16):
    """(q, k, v, blocks) of one head and one block of 200 queries, with scores as ``LEVELS`` has them at a scale of 0.125."""
    q, k, v = inputs(1, 1, 1, 200, sum(size for size, _ in sizes), 64, device, dtype)
    q[..., 0] = 8.0
    k[..., 0] = torch.cat([torch.full((size,), level / LOG2E) for size, level in sizes])
    return q, k, v, BlockLists.from_mask(torch.ones(1, 1, dtype=torch.bool, device=device), 200, k.shape[2])


# Where the kernels around the Hopper backward run.
DEVICES = ["cpu"] if not torch.cuda.is_available() else [pytest.param("cuda", marks=pytest.mark.gpu)]


def dq_patterns(device):
    """name -> (BlockLists, Hq, Hkv, Sq, Skv)"""
    def mask(*shape):
        return torch.rand(shape, device=device) < 0.6

    q_lengths = torch.tensor([40, 0, 130, 70], device=device, dtype=torch.int32)
    outside = torch.tensor([[-1, 0, 2], [1, 7, 0], [3, 5, 6], [2, 1, 0]], device=device, dtype=torch.int32).expand(1, 2, 4, 3)
    return {
        "uniform": (BlockLists.from_mask(mask(2, 2, 3, 4), 128, 256), 2, 2, 384, 1024),
        "short blocks": (BlockLists.from_mask(mask(4, 5, 2), 96, 200), 4, 2, 470, 333),
        "shared by heads": (BlockLists.from_mask(mask(3, 2), 130, 130), 4, 1, 300, 200),
        "ragged": (BlockLists.from_mask(mask(2, 4, 4), ragged([70, 0, 130, 90], device), ragged([133, 17, 0, 300], device),
                                        q_lengths=q_lengths), 2, 1, 290, 450),
        "ids out of range": (BlockLists(torch.full((1, 2, 4), 3, dtype=torch.int32, device=device), outside, 64, 64, num_kv_blocks=3),
                             2, 2, 256, 192),
    }
