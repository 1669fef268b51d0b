"""Attention that is called again and again: layers, caches, VSA and SLA, by every implementation; each call is right."""

from itertools import product

import pytest
import torch
from distinct_blocks import canvas_blocks, distinct
from each_call import differentiated, each_call_is_right, undifferentiated

from ssta import (
    DenseRun,
    SSTAConfig,
    TileCache,
    TokenLayout,
    dense_attention,
    sparse_linear_attention,
    ssta_attention,
    video_sparse_attention,
)

# On a GPU there are more tiles than multiprocessors, so that a program takes several. The last tiles along an axis are short.
ON_GPU = dict(thw=(7, 10, 28), tile=(4, 4, 8), text=30, chunk=(4, 12, 16), chunk_tile=(4, 8, 4), vsa_tile=(4, 4, 4), sla=(128, 64),
              tensors=dict(heads=12, kv_heads=4, dtype=torch.bfloat16, device="cuda"))
ON_CPU = dict(thw=(4, 6, 12), tile=(2, 3, 3), text=7, chunk=(2, 4, 6), chunk_tile=(2, 2, 3), vsa_tile=(2, 3, 4), sla=(24, 16),
              tensors=dict(heads=2, kv_heads=1, dtype=torch.bfloat16, device="cpu"))
# An eighth of the tiles is selected.
KINDS = {"dense": None, "fixed tiles": dict(sparse_type="sta", kernel_thw=(1, 1, 3)), "selected": dict(sparse_type="block_attn"),
         "estimated in one part": dict(compensation="linear"), "estimated in two parts": dict(compensation="linear", compensation_parts=2)}
GRADIENTS = {"without gradients": undifferentiated, "with gradients": differentiated}
IMPLEMENTATIONS, DIMS = ("hopper", "triton", "torch"), (64, 128)


def on_gpu(*settings):
    """Cases for pytest: (place, *setting)."""
    return [pytest.param(ON_GPU, *setting, id=" ".join(map(str, setting)), marks=pytest.mark.gpu) for setting in settings]


def on_cpu(*settings):
    """The same by plain torch, where that is the first implementation of a setting."""
    return [pytest.param(ON_CPU, *setting, id=" ".join(map(str, ("cpu", *setting)))) for setting in settings]


def drawn(place, dim, q_block, k_block, best, **more):
    """(q, k, v, dout), of blocks that are told apart."""
    q, k, v = distinct(q_block, k_block, best, dim=dim, **place["tensors"], **more)
    return q, k, v, torch.randn_like(q)


@pytest.mark.parametrize("place, impl, dim, kind, gradients", [
    *on_gpu(*product(IMPLEMENTATIONS, DIMS, KINDS, GRADIENTS)),
    *on_cpu(("torch", 24, "dense", "with gradients"), ("torch", 24, "fixed tiles", "without gradients"),
            ("torch", 24, "estimated in two parts", "with gradients"))])
def test_layers(place, impl, dim, kind, gradients):
    """Where lists are the same in all calls there is no mask; elsewhere each call has another part of the text. Tiles of 64 tokens have
    programs of another kind."""
    tile, text, device = place["tile"], place["text"], place["tensors"]["device"]
    if (kind, dim) == ("fixed tiles", 64):
        tile = place["vsa_tile"]
    layout, blocks = TokenLayout.video_text(place["thw"], text), canvas_blocks(place["thw"], tile, text)
    best = (int(blocks.max()) + 1) // 8

    def attend(impl):
        if kind == "dense":
            return lambda q, k, v: dense_attention(q, k, v, TokenLayout((DenseRun(layout.length),)), impl=impl).out
        config = SSTAConfig(tile_thw=tile, **KINDS[kind], **({} if kind == "fixed tiles" else dict(topk=best)))
        return lambda q, k, v, mask=None: ssta_attention(q, k, v, layout, config, text_mask=mask, impl=impl)

    def draw():
        tensors = drawn(place, dim, blocks, blocks, best)
        if kind in ("dense", "fixed tiles"):
            return tensors
        return *tensors, torch.arange(text, device=device)[None] < torch.randint(1, text + 1, (1, 1), device=device)

    step, exact = map(GRADIENTS[gradients], (attend(impl), attend("reference")))
    each_call_is_right(lambda: (step, exact, draw), calls=4 if device == "cuda" else 2, same_bits=impl != "torch")


@pytest.mark.parametrize("place, impl, dim, gradients", [
    *on_gpu(*((impl, dim, gradients) for impl in IMPLEMENTATIONS for dim, gradients in zip(DIMS, GRADIENTS))),
    *on_cpu(("torch", 32, "without gradients"))])
def test_caches(place, impl, dim, gradients):
    """A quarter of the tiles of window and chunk is selected, and its number is a whole one from the first chunk on.

    Kernels keep covariances in two bits, the reference keeps them whole: that counts as one more rounding. With gradients a cache waits.
    """
    thw, tile, frames = place["chunk"], place["chunk_tile"], place["chunk"][0]
    blocks = canvas_blocks(thw, tile)
    tiles = int(blocks.max()) + 1

    def attend(impl):
        cache = TileCache(SSTAConfig(tile, density=0.25, compensation="linear", compensation_parts=2), window=2 * frames, sink=frames,
                          impl=impl)
        return lambda q, k, v: cache.attend(q, k, v, thw)

    def start():
        chunks = iter(range(100))

        def draw():
            number = next(chunks)
            # The first chunk is the sink, which is not selected from; six chunks later the same channels serve again.
            within = [tiles * (chunk % 6) + tile for chunk in range(max(number - 2, min(number, 1)), number + 1) for tile in range(tiles)]
            coded = blocks + tiles * (number % 6)
            return drawn(place, dim, coded, coded, len(within) // 4, within=within, batch=2)

        return *map(GRADIENTS[gradients], (attend(impl), attend("reference"))), draw

    # A graph begins where the window has as many frames as later.
    recorded = gradients == "with gradients"
    each_call_is_right(start, warm=5, roundings=2, waits=recorded, graph=not recorded, same_bits=False)


@pytest.mark.parametrize("place, impl, dim", [*on_gpu(*product(IMPLEMENTATIONS, DIMS)), *on_cpu(("torch", 24))])
def test_vsa(place, impl, dim):
    """The means that are compared and pooled are rounded once more."""
    thw, tile, before = place["thw"], place["vsa_tile"], () if dim == 64 else (70, 30) if dim == 128 else (7,)
    blocks = canvas_blocks(thw, tile, before=sum(before))
    number = int(blocks.max()) + 1

    def attend(impl):
        def step(q, k, v, gate, dout):
            leaves = [x.detach().requires_grad_() for x in (q, k, v, gate)]
            out = video_sparse_attention(*leaves, thw, 1 - 3.5 / number, before=before, tile_thw=tile, impl=impl)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

        return step

    def draw():
        q, k, v, dout = drawn(place, dim, blocks, blocks, 4)
        return q, k, v, torch.randn_like(q), dout

    each_call_is_right(lambda: (attend(impl), attend("reference"), draw), calls=3, roundings=2, same_bits=impl != "torch")


@pytest.mark.parametrize("place, impl, dim", [*on_gpu(*product(IMPLEMENTATIONS, DIMS)), *on_cpu(("torch", 24))])
def test_sla(place, impl, dim):
    """The sums of the linear branch are rounded once more."""
    tokens = torch.arange(place["thw"][0] * place["thw"][1] * place["thw"][2])
    (q_block, kv_block), tensors = place["sla"], place["tensors"]
    number = -(-len(tokens) // kv_block)

    def attend(impl):
        def step(q, k, v, weight, bias, dout):
            leaves = [x.detach().requires_grad_() for x in (q, k, v, weight, bias)]
            out = sparse_linear_attention(*leaves, density=4.5 / number, q_block=q_block, kv_block=kv_block, impl=impl)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

        return step

    def draw():
        q, k, v, dout = drawn(place, dim, tokens // q_block, tokens // kv_block, 4)
        weight = torch.randn(dim + 1, dim, dtype=tensors["dtype"], device=tensors["device"]) / dim**0.5
        return q, k, v, weight[1:], weight[0], dout

    each_call_is_right(lambda: (attend(impl), attend("reference"), draw), calls=3, roundings=2, same_bits=impl != "torch")
