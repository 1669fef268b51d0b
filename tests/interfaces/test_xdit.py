"""xDiT's own FLEX_BLOCK_ATTN, from its published files and through ``install``, against ``ssta_3d_attention``: the same bits."""

import importlib
import math
import sys
import types

import pytest
import torch
from published import published

from ssta import ssta_3d_attention
from ssta.interfaces import flex_block_attn_func, install

pytestmark = pytest.mark.slow  # importing xDiT takes seconds
TILE, DIM = (2, 4, 4), 32
BLOCK = math.prod(TILE)


@pytest.fixture(scope="module")
def backends():
    """Its module of attention backends."""
    folder = published("xfuser==0.7.0", "einops==0.8.2")
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        # xfuser/__init__.py imports every pipeline, and its envs.py refuses machines without an accelerator.
        package = types.ModuleType("xfuser")
        package.__path__ = [str(folder / "xfuser")]
        patch.setitem(sys.modules, "xfuser", package)
        with install("flex_block_attn", replace=True):
            environment = importlib.import_module("xfuser.envs")
            if not torch.cuda.is_available():
                patch.setattr(environment, "get_device_version", lambda: "0.0")
            module = importlib.import_module("xfuser.core.distributed.attention_backend")
        patch.setattr(module, "get_ulysses_parallel_world_size", lambda: 1)  # asks for process groups
        yield module
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("xfuser", "einops"):
            del sys.modules[name]


def inputs(thw, text, batch=1, heads=3):
    return torch.randn(3, batch, heads, math.prod(thw) + text, DIM).unbind()


def through_xdit(backends, qkv, thw, text=0, *, topk, window=(1, 3, 3), sparse_type="ssta", pad="zero", text_mask=None, shared=False,
                 adaptive_pool=None, sparse_text_to_image=False):
    attend = backends.ATTENTION_FUNCTION_REGISTRY[backends.AttentionBackendType.FLEX_BLOCK_ATTN]
    out, _ = attend(*qkv, 0.0, False, {
        "thw": thw, "tile_size": list(TILE), "win_size": [list(window)], "encoder_sequence_length": text, "attn_sparse_type": sparse_type,
        "ssta_topk": topk, "ssta_threshold": 0.0, "ssta_lambda": 0.7, "ssta_sampling_type": "importance",
        "ssta_adaptive_pool": adaptive_pool, "attn_pad_type": pad, "attn_use_text_mask": text_mask is not None, "text_mask": text_mask,
        "attn_mask_share_within_head": shared, "sparse_text_to_image": sparse_text_to_image})
    return out


def through_ours(qkv, thw, text=0, *, topk, window=(1, 3, 3), pad="zero", shared=False, **options):
    return ssta_3d_attention(*qkv, thw, topk=topk, tile_thw=TILE, kernel_thw=window, text_len=text, lambda_=0.7, pad_type=pad,
                             sampling_type="importance", mask_share_within_head=shared, **options)


def test_it_takes_our_function(backends):
    assert backends.env_info["has_flex_block_attn"] is True
    assert backends.flex_block_attn_func is flex_block_attn_func
    assert "flex_block_attn" not in sys.modules


# Frames of 32 and more keep top-k as it is given.
@pytest.mark.parametrize("thw, topk, halved", [((32, 8, 8), 6, 6), ((31, 8, 8), 6, 3), ((4, 16, 16), 9, 4)])
def test_fewer_than_32_frames_halve_its_topk(backends, thw, topk, halved):
    qkv = inputs(thw, BLOCK)
    assert torch.equal(through_xdit(backends, qkv, thw, BLOCK, topk=topk), through_ours(qkv, thw, BLOCK, topk=halved))


@pytest.mark.parametrize("sparse_type, ours", [("ssta", "ssta"), ("moba", "block_attn"), ("sta", "sta")])
@pytest.mark.parametrize("thw", [(4, 16, 16), (5, 14, 9)], ids=["whole tiles", "padded"])
@pytest.mark.parametrize("pad, text", [("zero", 0), ("zero", 2 * BLOCK), ("repeat", 0), ("repeat", BLOCK + 7)])
def test_the_same_bits(backends, sparse_type, ours, thw, pad, text):
    qkv = inputs(thw, text, batch=2)
    theirs = through_xdit(backends, qkv, thw, text, topk=8, sparse_type=sparse_type, pad=pad)
    assert torch.equal(theirs, through_ours(qkv, thw, text, topk=4, sparse_type=ours, pad=pad))


@pytest.mark.parametrize("shared", [False, True], ids=["per head", "shared"])
@pytest.mark.parametrize("adaptive_pool", [None, (2, 2, 2)])
def test_a_text_mask_a_shared_mask_and_pooling(backends, shared, adaptive_pool):
    thw, text = (5, 14, 9), 3 * BLOCK
    qkv = inputs(thw, text, batch=3)
    text_mask = torch.arange(text) < torch.tensor([1, BLOCK + 1, text])[:, None]
    options = dict(topk=8, text_mask=text_mask, shared=shared, adaptive_pool=adaptive_pool)
    assert torch.equal(through_xdit(backends, qkv, thw, text, **options), through_ours(qkv, thw, text, **{**options, "topk": 4}))


def test_sparse_text_changes_only_rows_of_text(backends):
    thw, text = (4, 16, 16), BLOCK
    qkv = inputs(thw, text)
    sparse = through_xdit(backends, qkv, thw, text, topk=8, sparse_text_to_image=True)
    whole = through_ours(qkv, thw, text, topk=4)
    assert torch.equal(sparse[:, :, :-text], whole[:, :, :-text])
    assert not torch.equal(sparse[:, :, -text:], whole[:, :, -text:])


def test_every_tile_is_dense_attention(backends):
    thw, text = (4, 16, 16), BLOCK
    qkv = inputs(thw, text)
    dense = torch.nn.functional.scaled_dot_product_attention(*qkv)
    torch.testing.assert_close(through_xdit(backends, qkv, thw, text, topk=10 ** 6), dense, rtol=0, atol=1e-5)
