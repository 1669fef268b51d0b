"""What a rank knows of its heads, of all heads: for patterns that heads share."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ..spec import Peers
from .exchange import send_tokens
from .runs import Run
from .shards import Shards


def all_heads(peers: Peers, q_means: Tensor, k_means: Tensor) -> tuple[Tensor, Tensor]:
    """What each rank has of its heads, of all: ``[B, H_r, N, C]`` -> ``[B, H, N, C]``, and so of key heads. Without gradients."""
    group = dist.distributed_c10d._resolve_process_group(peers.group)  # type: ignore[arg-type]
    own, keys = (Shards((Run(x.shape[2], False),), group.size(), group.rank(), group) for x in (q_means, k_means))
    if own.ranks == 1:
        return q_means, k_means
    q, = send_tokens(own, (q_means,), (own.deal_heads(peers.heads, peers.kv_heads),), gather=True)
    k, = send_tokens(keys, (k_means,), (own.deal_heads(peers.kv_heads),), gather=True)
    return q.contiguous(), k.contiguous()
