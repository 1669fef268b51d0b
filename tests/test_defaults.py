"""torch's default device and default dtype change nothing: scripts around these models set both, and no tensor is made by them here."""

import sys
from itertools import islice

import pytest
import torch
from tiny_hunyuan import SPARSE
from tiny_models import TINY, run
from torch.utils._pytree import tree_flatten

from ssta import (
    DenseRun,
    SSTAConfig,
    TileCache,
    TokenLayout,
    VideoGrid,
    dense_attention,
    explain,
    sparse_linear_attention,
    ssta_attention,
    tile_layout,
    video_sparse_attention,
)
from ssta.kernels import BlockLists, block_sparse_attention, choose_backend
from ssta.kernels.memo import Kept
from ssta.pipelines import Schedule, apply_ssta
from ssta.pipelines.doctor import self_check
from ssta.pipelines.evaluation.quality import psnr, ssim
from ssta.plot import plot_selection

# A device that holds no values stands for a GPU beside tensors on the CPU.
SETTINGS = {"on meta": (torch.set_default_device, "meta", None),
            **{str(dtype): (torch.set_default_dtype, dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16, torch.float64)}}


@pytest.fixture
def under(request):
    """``under(name)`` sets a default until the test is over."""
    def set_it(name):
        setter, value, usual = SETTINGS[name]
        request.addfinalizer(lambda: setter(usual))
        setter(value)

    return set_it


def forget():
    """Empties every memory of the package, so that tensors are made anew."""
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] != "ssta":
            continue
        for value in [*vars(module).values()]:
            for memory in (value, getattr(value, "kept", None)):
                if isinstance(memory, Kept):
                    memory.clear()
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def assert_the_same(found, expected):
    for (mine, mine_said), (right, right_said) in [(tree_flatten(found), tree_flatten(expected))]:
        assert mine_said == right_said
        for x, y in zip(mine, right, strict=True):
            if isinstance(y, torch.Tensor):
                assert (x.dtype, x.device, x.shape) == (y.dtype, y.device, y.shape)
                assert torch.equal(x.nan_to_num(123.0), y.nan_to_num(123.0))
            else:
                assert x == y


TILE = (2, 2, 3)
LAYOUT = TokenLayout((DenseRun(5), VideoGrid(3, 4, 6), DenseRun(3)))


def qkv(tokens=LAYOUT.length, dtype=torch.float32):
    return torch.randn(3, 2, 2, tokens, 16, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()


def layer(impl="auto", dtype=torch.float32, **options):
    """Results and gradients, with a text mask."""
    q, k, v = qkv(dtype=dtype)
    mask = torch.arange(8) < torch.tensor([[4], [5]])
    config = SSTAConfig(TILE, **options)

    def call():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = ssta_attention(*leaves, LAYOUT, config, text_mask=mask, impl=impl)
        return out.detach(), torch.autograd.grad(out, leaves, v)

    return call


def steps_in_triton():
    q, k, v = qkv(20, torch.float16)
    layout, config = TokenLayout.video_text((2, 2, 4), 4), SSTAConfig((1, 2, 2), density=0.5)
    mask = torch.tensor([[True, True, True, False]]).expand(2, 4)
    return lambda: ssta_attention(q, k, v, layout, config, text_mask=mask, impl="triton")


def exact(masked):
    q, k, v = qkv()
    mask = torch.arange(8) < torch.tensor([[4], [5]]) if masked else None
    return lambda: dense_attention(q, k, v, LAYOUT, mask).out


def lists(impl="auto", dtype=torch.float32, causal=False, ragged=False):
    q, k, v = qkv(48, dtype)
    mask = torch.rand(3, 3) < 0.6
    cut = torch.tensor([0, 10, 20, 48], dtype=torch.int32) if ragged else 16
    return lambda: block_sparse_attention(q, k, v, BlockLists.from_mask(mask, cut, cut), causal=causal, return_lse=True, impl=impl)


def tiled(padding):
    x = qkv()[0]

    def call():
        layout = tile_layout(LAYOUT, TILE, padding)
        return layout.tile(x), layout.untile(layout.tile(x))

    return call


def cache(**options):
    x, text = qkv(24), qkv(5)[:2]

    def call():
        cache = TileCache(SSTAConfig((1, 2, 3), density=0.5, **options), window=4, sink=1, chunk=2, text=5,
                          rotary=lambda key, first: key * (1 + 0.01 * first.to(key.dtype)))
        outs = [cache.attend(*x, (2, 3, 4), text=text if number == 0 else None) for number in range(4)]
        state, contents = cache.state_dict(), cache.contents()
        cache.load_state_dict(state)
        return outs, [contents.key, contents.value], cache.attend(*x, (2, 3, 4), keep=False)

    return call


def report(tokens=(5, 10, 10), **options):
    """Of so many tokens in bfloat16 the last row's number would be one more."""
    layout = TokenLayout.video_text(tokens)
    q, k, v = torch.randn(3, 1, 1, layout.length, 8, generator=torch.Generator().manual_seed(0)).unbind()

    def call():
        found = explain(q, k, layout, SSTAConfig((2, 5, 5), topk=4, **options), value=v)
        picture = plot_selection(found)
        return {name: value for name, value in found.to_dict().items() if name != "seconds"}, len(picture.axes)

    return call


def trained(sparse_linear):
    q, k, v = qkv(72)
    weight = torch.randn(16, 16)
    if sparse_linear:
        return lambda: sparse_linear_attention(q, k, v, weight, weight[0], density=0.5, q_block=16, kv_block=16)
    return lambda: video_sparse_attention(q, k, v, v, (3, 4, 6), 0.5, tile_thw=TILE)


def interpreter():
    """What Triton's interpreter is asked for."""
    from ssta.kernels.portable.interpreted import multiplies_bfloat16

    return lambda: (multiplies_bfloat16(), choose_backend("auto", torch.device("cpu"), torch.float32, 16).names)


def doctor():
    return lambda: [tuple(found) for found in islice(self_check(torch.device("cpu"), torch.float32), 4)]


def quality():
    video, other = torch.rand(2, 2, 3, 16, 16).unbind()
    return lambda: (psnr(video, other), ssim(video, other))


CASES = {
    "window": lambda: layer(sparse_type="sta", kernel_thw=(1, 3, 1)),
    "top-k by importance": lambda: layer(topk=2, sampling_type="importance", pad_type="zero"),
    "threshold": lambda: layer(topk=9, threshold=0.5, pad_type="repeat"),
    "density": lambda: layer(density=0.3),
    "own scorer": lambda: layer(topk=2, sampling_type=lambda q, k: q @ k.mT),
    "estimate": lambda: layer(density=0.3, compensation="linear"),
    "estimate in two parts": lambda: layer(density=0.3, compensation="linear", compensation_parts=2),
    "reference": lambda: layer(impl="reference", topk=2),
    "float64": lambda: layer(dtype=torch.float64, density=0.3, compensation="linear"),
    "Triton": steps_in_triton,
    "dense": lambda: exact(False), "dense, masked": lambda: exact(True),
    "lists": lists, "lists, causal": lambda: lists(causal=True), "lists, ragged": lambda: lists(ragged=True),
    "lists, reference": lambda: lists("reference"), "lists, Triton": lambda: lists("triton", torch.float16),
    "tiles": lambda: tiled("none"), "tiles, padded": lambda: tiled("repeat"),
    "cache": lambda: cache(compensation="linear"), "cache, by means": lambda: cache(sampling_type="similarity"),
    "report": report, "report, another size": lambda: report((10, 10, 10)), "report, estimated": lambda: report(compensation="linear"),
    "VSA": lambda: trained(False), "SLA": lambda: trained(True),
    "interpreter": interpreter, "doctor": doctor, "quality": quality,
}


# These take a second each.
LONG = ("Triton", "doctor")


@pytest.mark.parametrize("name, setting", [(name, setting) for name in CASES for setting in [*SETTINGS][:2 if name in LONG else None]])
def test_a_call_gives_the_same_bits(name, setting, under):
    call = CASES[name]()
    forget()
    expected = call()
    forget()
    under(setting)
    assert_the_same(call(), expected)


# diffusers' own EasyAnimate and Helios move rotary angles to the default device.
BESIDE = [name for name in TINY if name not in ("easyanimate", "helios")]


@pytest.mark.parametrize("name, setting", [*[(name, "on meta") for name in BESIDE], *[(name, "torch.bfloat16") for name in TINY]])
def test_a_model_gives_the_same_bits(name, setting, under):
    tiny = TINY[name]
    model, call = tiny.build(), tiny.call((2, 4, 4))
    with apply_ssta(model, SPARSE, schedule=Schedule()):
        expected = run(model, call)
    forget()
    under(setting)
    with apply_ssta(model, SPARSE, schedule=Schedule()):
        assert torch.equal(run(model, call), expected)
