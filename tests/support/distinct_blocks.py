"""Queries, keys and values with blocks that no rounding confuses: each query block's best key blocks are far ahead of the others.

The selection is then the same in bfloat16 and in float64, and their results can be compared.
"""

import torch
from torch.nn import functional

# Each key is noise of the size 1. In heads of 64 a block's keys have COMMON in common; its halves lie at HALVES and -HALVES.
COMMON, HALVES = 5.0, 4.0


def tile_of_tokens(thw, tile_thw):
    """int64 ``[t * h * w]``: each token's tile."""
    (t, h, w), grid = thw, [-(-n // size) for n, size in zip(thw, tile_thw)]
    places = torch.cartesian_prod(*[torch.arange(n) // size for n, size in zip((t, h, w), tile_thw)])
    return (places[:, 0] * grid[1] + places[:, 1]) * grid[2] + places[:, 2]


def distinct(q_block, k_block, best, *, heads, kv_heads, dim, dtype, device, batch=1, within=None):
    """(q, k, v), ``[batch, heads, S, dim]``, as projections leave them.

    Args:
        q_block, k_block: int64 ``[S]``, the block of each token; -1 for a token of none. There are fewer key blocks than ``dim``.
        best: how many key blocks each query block has that are ahead of the others.
        within: the key blocks that are chosen from; None = all.
    """
    q_block, k_block = q_block.to(device), k_block.to(device)
    common = COMMON * (dim / 64)**0.25
    candidates = torch.arange(int(k_block.max()) + 1, device=device) if within is None else torch.tensor(within, device=device)
    assert len(candidates) >= best and int(candidates.max()) < dim - 1, "no channels are left for as many blocks"

    def normal(tokens, heads):
        return torch.randn(batch, tokens, heads, dim, device=device)

    places = torch.rand(batch, int(q_block.max()) + 1, heads, len(candidates), device=device).topk(best).indices
    codes = torch.zeros(*places.shape[:3], dim, device=device).scatter_(3, candidates[places], common)
    q = normal(len(q_block), heads) + codes[:, q_block.clamp(min=0)] * (q_block >= 0)[:, None, None]
    k, listed = normal(len(k_block), kv_heads), (k_block >= 0).float()
    k.scatter_add_(3, k_block.clamp(min=0)[None, :, None, None].expand(batch, -1, kv_heads, 1),
                   (common * listed)[None, :, None, None].expand(batch, -1, kv_heads, 1))
    # The direction along which the halves are told apart.
    k[..., -1] += HALVES * (2 * torch.randint(2, k.shape[:3], device=device) - 1)
    v = normal(len(k_block), kv_heads) + 0.5 * k.flip(3)
    return tuple(x.to(dtype).transpose(1, 2) for x in (q, k, v))


def canvas_blocks(thw, tile_thw, text=0, before=0):
    """int64 ``[S]``: the tile of each token of ``before`` other tokens, a video and ``text`` others."""
    return functional.pad(tile_of_tokens(thw, tile_thw), (before, text), value=-1)

