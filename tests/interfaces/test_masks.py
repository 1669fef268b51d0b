"""The STA, MoBA and SSTA masks of flex-block-attn's users: against three loops, and together with the attention that takes them."""

import math

import pytest
import torch
from cases import spread

from ssta import ssta_3d_attention
from ssta.interfaces import create_moba_3d_mask, create_ssta_3d_mask, create_sta_3d_mask, flex_block_attn_func

CANVAS, TILE, KERNEL = (4, 6, 8), (2, 2, 4), (1, 3, 3)
TILES = [(t, h, w) for t in range(2) for h in range(3) for w in range(2)]


def clip(x, low, high):
    return min(max(x, low), high)


def near_by_loops(kernel):
    def near(a, b):
        return all(abs(clip(a[x], kernel[x] // 2, n - 1 - kernel[x] // 2) - b[x]) <= kernel[x] // 2 for x, n in enumerate((2, 3, 2)))
    return torch.tensor([[near(a, b) for b in TILES] for a in TILES])


def best_by_loops(q, k, topk, shared, importance=None):
    """[H, N, N] for one batch element, from tiled q and k [H, S, D]."""
    q, k = (x.double().unflatten(1, (12, 16)).mean(2) for x in (q, k))
    k = k.repeat_interleave(len(q) // len(k), 0)
    if shared:
        q, k = q.mean(0, keepdim=True), k.mean(0, keepdim=True)
    keep = torch.zeros(len(q), 12, 12, dtype=torch.bool)
    for h in range(len(q)):
        for a in range(12):
            scores = []
            for b in range(12):
                score = float(q[h, a] @ k[h, b])
                if importance is not None:
                    alike = (torch.cosine_similarity(q[h, a], k[h, b], 0) + 1) / 2
                    others = [(torch.cosine_similarity(k[h, c], k[h, b], 0) + 1) / 2 for c in range(12) if c != b]
                    score = float(importance * alike - (1 - importance) * sum(others) / len(others))
                scores.append(score)
            for b in sorted(range(12), key=lambda b: -scores[b])[:topk]:
                keep[h, a, b] = True
    return keep


def with_text(mask, blocks, value):
    padded = torch.full((*mask.shape[:-2], 12 + blocks, 12 + blocks), value)
    padded[..., :12, :12] = mask
    return padded


@pytest.mark.parametrize("kernel", [(1, 1, 1), KERNEL, (3, 3, 3), (2, 5, 2)])
@pytest.mark.parametrize("text", [0, 2])
def test_sta(kernel, text):
    mask = create_sta_3d_mask(CANVAS, TILE, kernel, text)
    assert torch.equal(mask, with_text(near_by_loops(kernel), text, True))


@pytest.mark.parametrize("sampling, of_text, shared, batch", spread(
    ["similarity", None, "importance"], [(0, False), (2, False), (2, True)], [True, False], [1, 2]))
def test_moba(sampling, of_text, shared, batch):
    text, add_text = of_text
    q, k = torch.randn(batch, 4, 192, 8), torch.randn(batch, 2, 192, 8)
    lambda_ = 0.7 if sampling == "importance" else None
    mask = create_moba_3d_mask(q, k, CANVAS, 3, TILE, KERNEL, text, add_text, lambda_=lambda_, mask_share_within_head=shared,
                               sampling_type=sampling)
    expected = torch.stack([with_text(best_by_loops(*pair, 3, shared, lambda_), text, add_text) for pair in zip(q, k)])
    assert torch.equal(mask, expected[0] if batch == 1 else expected)


def test_moba_with_a_threshold_takes_fewer():
    q, k = torch.randn(2, 1, 2, 192, 8).unbind()
    mask = create_moba_3d_mask(q, k, CANVAS, 12, TILE, KERNEL, threshold=0.5, mask_share_within_head=False)
    assert mask.shape == (2, 12, 12) and (mask.sum(-1) >= 8).all() and mask.sum() < 2 * 12 * 12


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("valid", [None, 0, 5, 16, 17, 48])
@pytest.mark.parametrize("of_each", [False, True])
def test_ssta(batch, valid, of_each):
    """3 blocks of 16 text tokens, of which the first ``valid`` count."""
    q, k = torch.randn(2, batch, 2, 192, 8).unbind()
    text_mask = None
    if valid is not None:
        text_mask = torch.arange(48) < valid
        text_mask = torch.stack([text_mask, torch.arange(48) < 20])[:batch] if of_each else text_mask
    mask = create_ssta_3d_mask(q, k, CANVAS, 2, TILE, KERNEL, 3, text_mask=text_mask, mask_share_within_head=False)
    for b in range(batch):
        expected = with_text(near_by_loops(KERNEL) | best_by_loops(q[b], k[b], 2, False), 3, True)
        if valid is not None:
            tokens = 20 if of_each and b == 1 else valid
            for i in range(12 + max(math.ceil(tokens / 16), 1), 15):
                expected[:, i] = expected[:, :, i] = False
                expected[:, i, i] = True
        assert torch.equal(mask if batch == 1 else mask[b], expected)


def test_mask_and_attention_together_are_ssta():
    q, k, v = torch.randn(3, 1, 2, 192, 16).unbind()

    def tiled(x):
        return x.reshape(1, 2, 2, 2, 3, 2, 2, 4, 16).permute(0, 1, 2, 4, 6, 3, 5, 7, 8).reshape(1, 2, 192, 16)

    mask = create_ssta_3d_mask(tiled(q), tiled(k), CANVAS, 3, TILE, KERNEL, mask_share_within_head=False)
    out = flex_block_attn_func(tiled(q), tiled(k), tiled(v), 16, 16, mask)
    whole = ssta_3d_attention(q, k, v, CANVAS, topk=3, tile_thw=TILE, kernel_thw=KERNEL)
    torch.testing.assert_close(out, tiled(whole), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes, error, message", [
    (dict(canvas_thw=(4, 6, 9)), ValueError, r"canvas_thw must be a multiple of tile_thw \(2, 2, 4\), got \(4, 6, 9\)"),
    (dict(q=torch.zeros(1, 2, 191, 8)), ValueError, r"q must be .* = \[any, any, 192, any\], got shape"),
    (dict(k=torch.zeros(2, 192, 8)), ValueError, r"k must be \[batch, heads, tokens of canvas_thw, head_dim\] = "),
    (dict(q=None), TypeError, "q must be a tensor, got NoneType"),
    (dict(k=[1.0]), TypeError, "k must be a tensor, got list"),
    (dict(q=torch.zeros(1, 2, 192, 8).long()), TypeError, "q must be float16, .*, got torch.int64"),
    (dict(q=torch.zeros(1, 2, 192, 8).cfloat()), TypeError, "q must be float16, .*, got torch.complex64"),
    (dict(k=torch.zeros(1, 2, 192, 8).long()), TypeError, "k must be float32, got torch.int64"),
    (dict(k=torch.zeros(1, 2, 192, 8).double()), TypeError, "k must be float32, got torch.float64"),
    (dict(k=torch.zeros(1, 2, 192, 8).to_sparse()), TypeError, "k must be a dense, strided tensor, got torch.sparse_coo"),
    (dict(q=torch.nested.nested_tensor([torch.zeros(2, 192, 8)], layout=torch.jagged)), TypeError,
     "q must be a dense, strided tensor, got a nested tensor"),
    (dict(q=torch.zeros(1, 2, 192, 8, device="meta")), ValueError, "k must be on meta, got cpu"),
    (dict(k=torch.zeros(1, 2, 192, 8, device="meta")), ValueError, "k must be on cpu, got meta"),
    (dict(q=torch.zeros(2, 2, 192, 8)), ValueError, r"k must be .* = \[2, any, 192, 8\], got shape \(1, 2, 192, 8\)"),
    (dict(k=torch.zeros(2, 2, 192, 8)), ValueError, r"k must be .* = \[1, any, 192, 8\], got shape \(2, 2, 192, 8\)"),
    (dict(q=torch.zeros(1, 2, 192, 5)), ValueError, r"k must be .* = \[1, any, 192, 5\]"),
    (dict(q=torch.zeros(1, 2, 192, 0)), ValueError, r"k must be .* = \[1, any, 192, 0\]"),
    (dict(k=torch.zeros(1, 2, 192, 5)), ValueError, r"k must be .* = \[1, any, 192, 8\]"),
    (dict(q=torch.zeros(1, 3, 192, 8)), ValueError, "q's heads must be a multiple of k's, at least one of each, got 3 and 2"),
    (dict(k=torch.zeros(1, 3, 192, 8)), ValueError, "q's heads must be a multiple of k's, at least one of each, got 2 and 3"),
    (dict(k=torch.zeros(1, 0, 192, 8)), ValueError, "q's heads must be a multiple of k's, at least one of each, got 2 and 0"),
    (dict(q=torch.zeros(1, 0, 192, 8)), ValueError, "q's heads must be a multiple of k's, at least one of each, got 0 and 2"),
    (dict(q_block_avg_pool=False), ValueError, "q_block_avg_pool must be True"),
    (dict(add_text_mask=1), TypeError, "add_text_mask must be a bool, got int"),
    (dict(sampling_type="importance"), ValueError, "lambda_ must be given with sampling_type 'importance', got None"),
    (dict(sampling_type="random"), ValueError, "sampling_type must be one of"),
    (dict(text_block_num=-1), ValueError, "text_block_num must be at least 0, got -1"),
    (dict(topk=0), ValueError, "topk must be at least 1, got 0"),
    (dict(topk=None), TypeError, "topk must be an int, got None"),
])
def test_refuses(changes, error, message):
    x = torch.zeros(1, 2, 192, 8)
    arguments = dict(q=x, k=x, canvas_thw=CANVAS, topk=2, tile_thw=TILE, kernel_thw=KERNEL)
    with pytest.raises(error, match=message):
        create_moba_3d_mask(**(arguments | changes))


@pytest.mark.parametrize("text_mask, error, message", [
    (torch.ones(48), TypeError, r"text_mask must be bool or integer \(nonzero = valid token\), got torch.float32"),
    (torch.ones(2, 48, dtype=torch.bool), ValueError, r"text_mask must be \[batch, dense tokens\] = \(1, 48\), got \(2, 48\)"),
    (torch.ones(49, dtype=torch.bool), ValueError, "text_mask must have the tokens of text_block_num 3 blocks of 16, .* got 49"),
    (torch.ones(1, 32, dtype=torch.bool), ValueError, "text_mask must have the tokens of text_block_num 3 blocks of 16, .* got 32"),
])
def test_ssta_refuses_a_text_mask(text_mask, error, message):
    x = torch.zeros(1, 2, 192, 8)
    with pytest.raises(error, match=message):
        create_ssta_3d_mask(x, x, CANVAS, 2, TILE, KERNEL, 3, text_mask=text_mask)


def test_the_last_text_block_may_be_partial():
    q, k = torch.randn(2, 1, 2, 192, 8).unbind()
    masks = [create_ssta_3d_mask(q, k, CANVAS, 2, TILE, KERNEL, 3, text_mask=torch.arange(tokens) < 20) for tokens in (33, 48)]
    assert torch.equal(*masks)
