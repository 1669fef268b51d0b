"""What the estimate of unselected tiles promises, whoever computes it."""

import math

import pytest
import torch
from selection_cases import layer_of

from ssta import SSTAConfig, TokenLayout, ssta_3d_attention, ssta_attention, tile_layout
from ssta.attention import attend
from ssta.kernels import BlockLists, block_sparse_attention

TILE = (2, 4, 4)
LINEAR = dict(tile_thw=TILE, kernel_thw=(1, 1, 1), sparse_type="block_attn", compensation="linear")
EVERY = [dict(compensation="linear", compensation_parts=parts) for parts in (1, 2)]


def field(thw, heads=2, dim=16, batch=1, text=0, dtype=torch.float64, kv_heads=None, spread=0.5):
    """q, k and v whose tokens vary about what their place has in common, as a video's do."""
    t, h, w = thw

    def one(number):
        coarse = torch.randn(batch, number, -(-t // 2), -(-h // 4), -(-w // 4), dim, dtype=dtype)
        smooth = coarse.repeat_interleave(2, 2).repeat_interleave(4, 3).repeat_interleave(4, 4)[:, :, :t, :h, :w].flatten(2, 4)
        video = smooth + spread * torch.randn_like(smooth)
        return torch.cat((video, torch.randn(batch, number, text, dim, dtype=dtype)), 2)

    return one(heads), one(kv_heads or heads), one(kv_heads or heads)


def dense(q, k, v):
    groups = q.shape[1] // k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def error(out, wanted):
    return float((out - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("options", EVERY)
@pytest.mark.parametrize("padding", ["none", "zero", "repeat"])
def test_everything_selected_is_the_same_as_without(options, padding):
    q, k, v = field((5, 6, 9), text=5)
    call = dict(topk=1000, tile_thw=TILE, text_len=5, pad_type=padding)
    assert torch.equal(ssta_3d_attention(q, k, v, (5, 6, 9), **call, **options), ssta_3d_attention(q, k, v, (5, 6, 9), **call))


@pytest.mark.parametrize("options", EVERY)
def test_tiles_of_identical_keys_and_values_are_estimated_exactly(options):
    q, k, v = field((5, 6, 9), spread=0.0, text=3, kv_heads=1)
    # Of the queries no more is asked than that they are not all the same.
    q = torch.randn_like(q)
    out = ssta_3d_attention(q, k, v, (5, 6, 9), topk=1, tile_thw=TILE, kernel_thw=(1, 1, 1), text_len=3, sparse_type="block_attn",
                            **options)
    torch.testing.assert_close(out, dense(q, k, v))


@pytest.mark.parametrize("parts", [1, 2])
def test_on_gaussian_tiles_the_estimate_converges(parts):
    errors = {kind: [] for kind in ("none", "linear")}
    for side in (8, 32):
        tile, thw = (1, side, side), (1, 4 * side, side)
        torch.manual_seed(0)
        # Keys and values of a tile share what varies, and h stays well under the cap.
        q, shared = torch.randn(1, 2, 4 * side**2, 8, dtype=torch.float64), torch.randn(1, 2, 4 * side**2, 8, dtype=torch.float64)
        centre = torch.randn(1, 2, 4, 8, dtype=torch.float64).repeat_interleave(side**2, 2)
        k, v = centre + 0.5 * shared, centre.flip(-1) + shared @ torch.randn(8, 8, dtype=torch.float64)
        for kind, seen in errors.items():
            options = {} if kind == "none" else dict(compensation_parts=parts)
            out = ssta_3d_attention(q, k, v, thw, topk=1, tile_thw=tile, kernel_thw=(1, 1, 1), sparse_type="block_attn",
                                    compensation=kind, sampling_type="similarity", **options)
            seen.append(error(out, dense(q, k, v)))
    assert errors["linear"][1] < 0.6 * errors["linear"][0]
    assert errors["none"][1] > 0.8 * errors["none"][0] > 3 * errors["linear"][1]


def test_what_the_estimate_of_a_known_tile_is():
    """The formulas, spelled out for one query of one of two tiles of two tokens."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 1, 4, 4, dtype=torch.float64) for _ in range(3))
    out = ssta_3d_attention(q, k, v, (1, 1, 4), topk=1, tile_thw=(1, 1, 2), kernel_thw=(1, 1, 1), sparse_type="sta", compensation="linear")
    scale, own = 0.5, slice(0, 2)
    k_mean, v_mean = k[0, 0, 2:].mean(0), v[0, 0, 2:].mean(0)
    dk, dv = k[0, 0, 2:] - k_mean, v[0, 0, 2:] - v_mean
    moment = q[0, 0, own].mT @ q[0, 0, own] / 2
    h = 0.5 * scale**2 * (moment * (dk.mT @ dk / 2)).sum()
    matrix = min(1.0, 1 / float(h)) ** 0.5 * (dk.mT @ dv / 2)
    for row in (0, 1):
        scores = scale * k[0, 0, own] @ q[0, 0, row]
        logit = scale * q[0, 0, row] @ k_mean + math.log(2) + h.clamp(max=1)
        weights = torch.cat((scores, logit[None])).softmax(0)
        estimate = v_mean + scale * q[0, 0, row] @ matrix
        torch.testing.assert_close(out[0, 0, row], weights[:2] @ v[0, 0, own] + weights[2] * estimate)


@pytest.mark.parametrize("options", EVERY)
def test_the_order_of_a_tiles_tokens_changes_nothing(options):
    thw, layout = (4, 8, 8), TokenLayout.video_text((4, 8, 8))
    tiles = tile_layout(layout, TILE, "none", torch.device("cpu"))
    q, k, v = field(thw)
    config = SSTAConfig(tile_thw=TILE, kernel_thw=(1, 1, 1), topk=2, sparse_type="block_attn", **options)
    mixed = torch.arange(len(tiles.source)).unflatten(0, (-1, 32))[:, torch.randperm(32)].flatten()
    k2, v2 = (tiles.untile(tiles.tile(x)[:, :, mixed]) for x in (k, v))
    torch.testing.assert_close(ssta_attention(q, k2, v2, layout, config), ssta_attention(q, k, v, layout, config))


@pytest.mark.parametrize("options", EVERY)
def test_merged_lse_is_the_log_of_the_summed_masses(options):
    torch.manual_seed(2)
    tokens, config = TokenLayout.video_text((4, 8, 8), 3), SSTAConfig(tile_thw=TILE, **options)
    q, k, v = field((4, 8, 8), text=3, batch=2)
    layer = layer_of(q, k, tokens, config, scale=0.25)
    tiles, tiled = layer.tiles, layer.gather(q, k, v)
    q, k, v, *_ = tiled
    estimates = layer.estimate(tiled, None)
    keep = torch.rand(2, 2, tiles.num_tiles, tiles.num_tiles) < 0.4
    keep[:, :, -1] = keep[..., -1] = True
    blocks = BlockLists.from_mask(keep, tiles.offsets, tiles.offsets)
    out, lse = block_sparse_attention(q, k, v, blocks, scale=0.25, return_lse=True)
    merged, total, mass, _ = layer.merge(out.clone(), lse.clone(), q, k, v, blocks, estimates)
    assert (total >= lse).all()
    assert torch.equal(total[:, :, tiles.offsets[-2]:], lse[:, :, tiles.offsets[-2]:])
    assert torch.equal(merged[:, :, tiles.offsets[-2]:], out[:, :, tiles.offsets[-2]:])
    video = tiles.num_video_tiles
    torch.testing.assert_close(mass.tensor(), (lse - total).exp()[:, :, :video * 32].unflatten(2, (video, 32)).mean(3))
    if options["compensation_parts"] == 1:
        means = k[:, :, :video * 32].unflatten(2, (video, 32)).mean(3)
        bias = (math.log(32) + estimates.half_variance.clamp(max=1)).masked_fill(keep[..., :video, :video], -torch.inf)
        logits = 0.25 * q[:, :, :video * 32] @ means.mT + bias.repeat_interleave(32, 2)
        torch.testing.assert_close(total[:, :, :video * 32], torch.logaddexp(lse[:, :, :video * 32], logits.logsumexp(-1)))


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("options", EVERY)
def test_nan_stays_in_the_rows_that_attend_to_it_exactly(options, name):
    thw = (4, 8, 8)
    layout = TokenLayout.video_text(thw)
    tiles = tile_layout(layout, TILE, "none", torch.device("cpu"))
    tensors = dict(zip("qkv", field(thw)))
    config = SSTAConfig(tile_thw=TILE, kernel_thw=(1, 1, 1), topk=2, sparse_type="ssta", **options)
    bad = tensors | {name: tensors[name].clone()}
    bad[name][0, 0, tiles.source[5]] = float("nan")
    result = attend(*bad.values(), layout, config)
    spoiled = tiles.tile(result.out).isnan().any(-1)[0].unflatten(-1, (-1, 32))
    exact = result.selection.blocks.to_mask()[..., 0].expand(1, 2, -1)[0]
    assert torch.equal(spoiled.any(-1), exact & (torch.arange(2) == 0)[:, None])
    # Without any estimate of that tile, and with all the others'.
    assert error(result.out[:, 1], attend(*tensors.values(), layout, config).out[:, 1]) == 0


def test_nan_in_a_query_spoils_its_own_row_alone():
    thw, layout = (4, 8, 8), TokenLayout.video_text((4, 8, 8))
    q, k, v = field(thw)
    config = SSTAConfig(topk=2, **LINEAR)
    q[0, 0, 7] = float("nan")
    assert ssta_attention(q, k, v, layout, config).isnan().any(-1).nonzero().tolist() == [[0, 0, 7]]


@pytest.mark.parametrize("tile, side", [((1, 4, 8), 1), ((1, 8, 8), 2), ((4, 8, 8), 4), ((1, 5, 6), 1)])
def test_mass_is_what_queries_spread_over_a_tile_see(tile, side):
    """Of all in tiles of up to 32 tokens; else of so many that those speak for all which are alike ``side`` at a time."""
    torch.manual_seed(8)
    q, k, v = (torch.randn(1, 2, 4 * math.prod(tile), 8, dtype=torch.float64) for _ in range(3))
    q = q[:, :, ::side].repeat_interleave(side, 2)
    layer = layer_of(q, k, TokenLayout.video_text((4 * tile[0], *tile[1:])), SSTAConfig(tile_thw=tile, compensation="linear"), scale=0.3)
    got = layer.estimate(layer.gather(q, k, v), None)
    tiles = k.unflatten(2, (4, -1))
    logits = 0.3 * q.unflatten(2, (4, -1)) @ tiles.mean(3).mT[:, :, None] + math.log(tiles.shape[3])
    expected = (logits + got.half_variance.clamp(max=1)[..., None, :]).softmax(-1).mean(3)
    torch.testing.assert_close(got.mass, expected)


def test_error_selects_what_the_estimate_gets_wrong():
    """Of equal masses the tile whose keys differ most is computed."""
    torch.manual_seed(3)
    k = torch.zeros(1, 1, 4, 32, 8, dtype=torch.float64)
    k[0, 0, 2] = 0.4 * torch.randn(32, 8, dtype=torch.float64)
    k[0, 0, 2] -= k[0, 0, 2].mean(0)
    q, v = (torch.randn(1, 1, 128, 8, dtype=torch.float64) for _ in range(2))
    config = SSTAConfig(topk=1, **LINEAR | dict(tile_thw=(1, 4, 8)))
    _, blocks = ssta_attention(q, k.flatten(2, 3), v, TokenLayout.video_text((1, 16, 8)), config, return_blocks=True)
    assert blocks.to_mask()[0, 0].tolist() == [[False, False, True, False]] * 4


def test_heads_of_unlike_tokens_are_not_compensated():
    """The second head's queries and keys are so long that a tile's mean says nothing of its tokens."""
    torch.manual_seed(4)
    q, k, v = field((4, 8, 8))
    q[:, 1] *= 12
    k[:, 1] += 4 * torch.randn_like(k[:, 1])
    layout, config = TokenLayout.video_text((4, 8, 8)), SSTAConfig(topk=2, **LINEAR)
    with_estimate = attend(q, k, v, layout, config)
    blocks = with_estimate.selection.blocks
    tiles = tile_layout(layout, TILE, "none", torch.device("cpu"))
    alone = tiles.untile(block_sparse_attention(*(tiles.tile(x) for x in (q, k, v)), blocks))
    assert torch.equal(with_estimate.out[:, 1], alone[:, 1])
    assert with_estimate.exact_mass[:, 1].isnan().all() and (with_estimate.exact_mass[:, 0] < 1).all()
    assert error(with_estimate.out[:, 0], dense(q, k, v)[:, 0]) < 0.5 * error(alone[:, 0], dense(q, k, v)[:, 0])


@pytest.mark.parametrize("options", EVERY)
def test_heads_that_share_keys_and_batches_are_each_as_if_alone(options):
    torch.manual_seed(5)
    q, k, v = field((3, 6, 8), heads=4, kv_heads=2, batch=2, text=4)
    call = dict(thw=(3, 6, 8), topk=2, tile_thw=TILE, kernel_thw=(1, 1, 1), text_len=4, sparse_type="block_attn", **options)
    out = ssta_3d_attention(q, k, v, **call)
    for b in range(2):
        for h in range(4):
            alone = ssta_3d_attention(*(x[b:b + 1, i:i + 1] for x, i in ((q, h), (k, h // 2), (v, h // 2))), **call)
            torch.testing.assert_close(out[b:b + 1, h:h + 1], alone)


@pytest.mark.parametrize("padding", ["none", "zero", "repeat"])
def test_a_window_alone_can_be_compensated(padding):
    torch.manual_seed(6)
    q, k, v = field((5, 10, 9), text=4)
    call = dict(thw=(5, 10, 9), tile_thw=TILE, kernel_thw=(1, 1, 1), text_len=4, sparse_type="sta", pad_type=padding)
    everything = ssta_3d_attention(q, k, v, **call | dict(kernel_thw=(99, 99, 99)))
    errors = [error(ssta_3d_attention(q, k, v, **call, compensation=kind), everything) for kind in ("none", "linear")]
    assert errors[1] < 0.3 * errors[0]


@pytest.mark.parametrize("changes, kind, message", [
    ({"compensation": "quadratic"}, ValueError, "compensation must be one of 'none', .*'linear', got 'quadratic'"),
    ({"compensation": True}, TypeError, "compensation must be one of"),
    ({"compensation_parts": 2}, ValueError, "compensation_parts must be 1, or 2 with a compensation, got 2 with compensation 'none'"),
    ({"compensation": "linear", "compensation_parts": 3}, ValueError, "compensation_parts must be 1, or 2 .*got 3"),
    ({"compensation": "linear", "compensation_parts": 0}, ValueError, "compensation_parts"),
    ({"sampling_type": "error"}, ValueError, "sampling_type 'error' must come with a compensation.*got 'none'"),
    ({"compensation": "linear", "mask_share_within_head": True}, ValueError,
     "mask_share_within_head must be False with a compensation.*'linear'"),
    ({"compensation": "linear", "threshold": 0.5}, ValueError, "threshold must be 0 with sampling_type 'error'.*got 0.5"),
    ({"compensation": "linear", "adaptive_pool": (1, 2, 2)}, ValueError, "adaptive_pool must be None with sampling_type 'error'"),
])
def test_a_compensation_that_means_nothing_is_refused(changes, kind, message):
    with pytest.raises(kind, match=message):
        SSTAConfig(**changes)


def test_error_is_the_default_with_a_compensation_alone():
    assert SSTAConfig().scored_by == "similarity"
    assert SSTAConfig(compensation="linear").scored_by == "error"
    assert SSTAConfig(compensation="linear", sampling_type="importance").scored_by == "importance"


@pytest.mark.parametrize("options", EVERY)
def test_a_selection_that_is_attended_to_again_gives_the_same(options):
    torch.manual_seed(7)
    q, k, v = field((4, 8, 8), text=3)
    # Heads of which one is not estimated.
    q[:, 1] *= 12
    k[:, 1] += 4 * torch.randn_like(k[:, 1])
    layout = TokenLayout.video_text((4, 8, 8), 3)
    config = SSTAConfig(tile_thw=TILE, kernel_thw=(1, 1, 1), topk=2, sparse_type="block_attn", **options)
    first = attend(q, k, v, layout, config)
    assert first.selection.useful.tolist() == [[True, False]]
    layer = layer_of(q, k, layout, config)
    assert layer.estimate(layer.gather(q, k, v), first.selection.useful).useful is first.selection.useful
    second = attend(q, k, v, layout, config, selection=first.selection)
    assert torch.equal(second.out, first.out) and torch.equal(second.exact_mass.isnan(), first.exact_mass.isnan())
