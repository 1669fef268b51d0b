"""block_sparse_attention that is called again and again, over the same lists and over other ones; each call is right."""

from itertools import product

import pytest
import torch
from cases import ragged
from each_call import each_call_is_right

from ssta.kernels import BlockLists, block_sparse_attention

# Of key blocks, some shorter than a step. On a GPU there are more tiles than multiprocessors, so that a program takes several.
ON_GPU = dict(lengths=[384, 131, 333, 257, 65, 200, 384, 128], heads=24, kv_heads=6, device="cuda")
ON_CPU = dict(lengths=[20, 7, 16, 5], heads=2, kv_heads=1, device="cpu")


SETTINGS = [(64, "the same lists", "full"), (64, "other lists", "causal"), (128, "the same lists", "causal"), (128, "other lists", "full")]


@pytest.mark.parametrize("place, impl, dim, lists, order", [
    *(pytest.param(ON_GPU, impl, *setting, id=" ".join(map(str, (impl, *setting))), marks=pytest.mark.gpu)
      for impl, setting in product(("hopper", "triton", "torch"), SETTINGS)),
    pytest.param(ON_CPU, "torch", 16, "the same lists", "full", id="cpu")])
def test_with_gradients(place, impl, dim, lists, order):
    offsets, number, device = ragged(place["lengths"], place["device"]), len(place["lengths"]), place["device"]
    dtype = torch.float16 if dim == 64 else torch.bfloat16

    def mask():
        # A block attends to itself, so that no row is empty.
        return (torch.rand(1, place["kv_heads"], number, number, device=device) < 0.5) | torch.eye(number, device=device).bool()

    def blocks_of(mask):
        # Without the longest block's length the lists would wait for the device.
        longest = max(place["lengths"])
        return BlockLists.from_mask(mask, offsets, offsets, max_q_length=longest, max_kv_length=longest)

    same = blocks_of(mask()) if lists == "the same lists" else None

    def attend(impl):
        def step(q, k, v, dout, dlse, mask):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            blocks = blocks_of(mask) if same is None else same
            out, lse = block_sparse_attention(*leaves, blocks, causal=order == "causal", return_lse=True, impl=impl)
            return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse.to(lse.dtype)))

        return step

    def draw():
        q, dout, k, v = (torch.randn(1, sum(place["lengths"]), place[heads], dim, device=device, dtype=dtype).transpose(1, 2)
                         for heads in ("heads", "heads", "kv_heads", "kv_heads"))
        return q, k, v, dout, torch.randn(q.shape[:3], device=device), mask()

    each_call_is_right(lambda: (attend(impl), attend("reference"), draw), calls=3)
