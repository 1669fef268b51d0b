"""Attention over ranks that is called again and again: each call of each rank is its part of the reference on one."""

import torch
import torch.distributed as dist
from distinct_blocks import canvas_blocks, distinct
from each_call import differentiated, each_call_is_right
from parallel_inputs import local

from ssta import SSTAConfig, TokenLayout, ssta_attention
from ssta.ranks import Shards


def each_call(group, calls, thw, tile, text, dim, device):
    """Of as many heads as each rank has two, with gradients; ``calls`` as ``each_call_is_right`` takes it. Ranks draw alike."""
    layout, config = TokenLayout.video_text(thw, text), SSTAConfig(tile_thw=tile, sparse_type="block_attn", topk=3)
    shards, blocks = Shards.of(None, layout), canvas_blocks(thw, tile, text)
    heads = 2 * dist.get_world_size()

    def draw():
        q, k, v = distinct(blocks, blocks, 3, heads=heads, kv_heads=heads, dim=dim, dtype=torch.bfloat16, device=device, batch=2)
        dout = torch.randn_like(q)
        # Rows of text are on all ranks, and would count more than once.
        dout[:, :, -text:] = 0
        return q, k, v, dout

    def step(*tensors):
        results = differentiated(lambda q, k, v: ssta_attention(q, k, v, layout, config, group=group))(*[local(x, shards) for x in tensors])
        for x in results[1:]:
            # Of its gradients each rank has a part.
            whole = x[:, :, -text:].contiguous()
            dist.all_reduce(whole)
            x[:, :, -text:] = whole
        return results

    def exact(*tensors):
        results = differentiated(lambda q, k, v: ssta_attention(q, k, v, layout, config, impl="reference"))(*tensors)
        return [local(x, shards) for x in results]

    torch.manual_seed(0)
    each_call_is_right(lambda: (step, exact, draw), calls=calls, graph=False)
