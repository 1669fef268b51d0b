"""The kernels that move and choose blocks, against plain torch: in Triton's interpreter without a GPU, and on one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid, ssta_attention, tile_layout
from ssta.kernels import BlockLists, gather_blocks, score_blocks, select_blocks, take_tokens, topk_blocks
from ssta.kernels.operators import kernels_run
from ssta.kernels.prologue.lengths import _lengths_in_torch
from ssta.kernels.prologue.reorder import _take_in_torch, new_tokens
from ssta.kernels.prologue.select import _select_in_torch
from ssta.layout import TiledQKV
from ssta.scoring import descriptors, importance, score_tiles, similarity
from ssta.selection import select_tiles
from ssta.text import tile_places

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUT = TokenLayout((VideoGrid(3, 5, 4), DenseRun(7), VideoGrid(2, 3, 3)))


def projected(heads, tokens, dim, dtype=torch.float16, batch=2):
    """[B, H, S, D] as a projection leaves it: the heads of a token side by side."""
    return torch.randn(batch, tokens, heads, dim).to(DEVICE, dtype).transpose(1, 2)


def by_kernel(x, index):
    from ssta.kernels.prologue.reorder_kernel import take

    out = new_tokens(x, len(index))
    take(x, index, out)
    return out


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("dim", [20, 64])
def test_taken_tokens_are_those_of_the_index(contiguous, dim):
    x = projected(3, 50, dim)
    x = x.contiguous() if contiguous else x
    index = torch.randint(-1, 50, (77,), device=DEVICE)
    taken = by_kernel(x, index)
    expected = _take_in_torch(x, index)
    assert torch.equal(taken, expected) and taken.stride() == expected.stride()
    assert torch.equal(taken, torch.stack([x[:, :, i] if i >= 0 else 0 * x[:, :, 0] for i in index.tolist()], 2))


def test_strange_strides_and_no_tokens_at_all():
    x = projected(2, 9, 16)
    index = torch.tensor([8, -1, 0], device=DEVICE)
    for view in (x[..., ::2], x.flip(2)[:, :, 3:], x[:, :1].expand(-1, 4, -1, -1), x.permute(0, 1, 3, 2)[:, :, :9, :9]):
        assert torch.equal(by_kernel(view, index.clamp(max=view.shape[2] - 1)), _take_in_torch(view, index.clamp(max=view.shape[2] - 1)))
    assert by_kernel(x, index[:0]).shape == (2, 2, 0, 16) and by_kernel(x[:0], index).shape == (0, 2, 3, 16)


@pytest.mark.parametrize("padding", ["none", "zero", "repeat"])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gathered_blocks_are_the_tiles_and_their_means(padding, heads, kv_heads, dtype):
    from ssta.kernels.prologue.reorder_kernel import gather_blocks

    layout = tile_layout(LAYOUT, (2, 2, 3), padding, DEVICE)
    q, k, v = (projected(h, LAYOUT.length, 24, dtype) for h in (heads, kv_heads, kv_heads))
    k = k.contiguous()
    outputs = [new_tokens(x, layout.num_slots) for x in (q, k, v)]
    means = [torch.empty(2, h, layout.num_video_tiles, 24, device=DEVICE) for h in (heads, kv_heads)]
    gather_blocks(q, k, v, layout.source, layout.offsets, *outputs, *means)
    for x, out in zip((q, k, v), outputs):
        assert torch.equal(out, _take_in_torch(x, layout.source))
    for mean, out in zip(means, outputs):
        exact = descriptors(out.double(), layout)
        # Rounded to dtype, after a float32 sum of at most 12 tokens.
        rounding = torch.finfo(dtype).eps * exact.abs().max() + 12 * torch.finfo(torch.float32).eps * out.abs().max()
        assert (mean - exact).abs().max() <= rounding
        assert dtype == torch.float32 or torch.equal(mean, mean.to(dtype).float()), "rounded to the dtype of the tokens"


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("blocks, width", [(37, 20), (1, 8), (5, 150)])
@pytest.mark.parametrize("lambda_", [None, 0.7])
def test_scores_are_those_of_the_definition(heads, kv_heads, blocks, width, lambda_):
    from ssta.kernels.prologue.select_kernel import score

    q, k = (torch.randn(2, h, blocks, width, device=DEVICE) for h in (heads, kv_heads))
    if blocks > 4:
        q[0, 0, 2], k[0, 1, 0, 3], k[1, 0, 4] = float("nan"), float("inf"), 0.0
        k[0, 0, 3] = k[0, 0, 1]
    scores = score(q, k, lambda_ or 0.0, lambda_ is not None)
    scorer = similarity if lambda_ is None else lambda q, k: importance(q, k, lambda_)
    expected = score_tiles(q, k.repeat_interleave(heads // kv_heads, 1), scorer)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    if blocks > 4:
        assert torch.equal(scores[0, 0, :, 3], scores[0, 0, :, 1]), "alike blocks tie"


@settings(max_examples=15)
@given(st.integers(1, 6), st.integers(0, 2), st.booleans(), st.integers(0, 1000))
@pytest.mark.slow
def test_selected_blocks_are_the_best_and_the_forced(scored, dense, masked, seed):
    """Scores with many ties, among them infinities, NaN and both zeros."""
    from ssta.kernels.prologue.select_kernel import select

    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-torch.inf, -2.0, -0.0, 0.0, 1.5, torch.inf, torch.nan])
    scores = values[torch.randint(0, 7, (1, 2, scored, scored), generator=generator)].to(DEVICE)
    forced = torch.rand(scored + dense, scored + dense, generator=generator).to(DEVICE) < 0.3
    active = torch.rand(1, scored + dense, generator=generator).to(DEVICE) < 0.7 if masked else None
    per_row = torch.randint(0, scored + 1, (1, 2, scored), generator=generator, dtype=torch.int32).to(DEVICE)
    shared = per_row[:, :1].contiguous()
    for given_scores, k_per_row, beyond in ((scores, seed % (scored + 3), False), (scores, per_row, False), (None, 0, False),
                                            (scores, seed % (scored + 3), True), (scores, per_row, True), (scores, shared, True)):
        heads = (1, 2) if given_scores is not None else (1, 1)
        indices = torch.full((*heads, scored + dense, scored + dense), -7, dtype=torch.int32, device=DEVICE)
        counts = indices[..., 0].clone()
        many = isinstance(k_per_row, torch.Tensor)
        select(forced, given_scores, active, k_per_row if many else None, 0 if many else k_per_row, beyond, counts, indices)
        expected = _select_in_torch(forced, given_scores, active, k_per_row, beyond)
        assert torch.equal(counts, expected[0])
        filled = torch.arange(scored + dense, device=DEVICE) < counts[..., None]
        assert torch.equal(indices[filled], expected[1][filled]) and (indices[~filled] == -7).all()


def test_topk_blocks_rank_nan_below_everything_but_minus_infinity():
    scores = torch.tensor([[float("nan"), -1.0, -torch.inf, 2.0]])
    assert topk_blocks(scores, 2).tolist() == [[False, True, False, True]]
    assert topk_blocks(scores, torch.tensor([3])).tolist() == [[True, True, False, True]], "of equal scores the first"
    apart = torch.tensor([False, True, False, True])
    assert topk_blocks(scores, 1, apart).tolist() == [[True, False, False, False]]
    assert topk_blocks(scores, 4, apart).tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("tokens", [LAYOUT, TokenLayout.video_text((3, 4, 4), 11),
                                    TokenLayout((DenseRun(5), VideoGrid(1, 2, 2), DenseRun(1100)))])
def test_valid_lengths_are_those_of_each_runs_valid_tokens(tokens):
    from ssta.kernels.prologue.lengths_kernel import lengths

    layout = tile_layout(tokens, (2, 2, 3), "none", DEVICE)
    places = tile_places(layout)
    valid = torch.rand(3, tokens.dense_length, 2, device=DEVICE)[..., 1] < 0.6
    valid[1], valid[2] = False, True
    for least in (1, 0):
        expected = _lengths_in_torch(valid, *places, layout.lengths, least)
        out = torch.full_like(expected, -1)
        lengths(valid, *places, layout.lengths, least, out)
        assert torch.equal(out, expected)
    for batch, mask in enumerate(valid.tolist()):
        left, lengths_of = [sum(mask[:run.length]) for run in tokens.dense[:1]] + [sum(mask[-run.length:]) for run in tokens.dense[1:]], []
        for count, run in zip(left, layout.dense):
            for first in range(0, run.extent[2], run.tile[2]):
                lengths_of.append(max(0, min(count - first, run.tile[2], run.extent[2] - first)))
        assert out[batch, 0].tolist() == layout.lengths[:layout.num_video_tiles].tolist() + lengths_of


@pytest.mark.gpu
def test_the_operators_keep_their_contract():
    """torch.library's own checks: schema, fake tensors, no aliasing of inputs."""
    layout = tile_layout(LAYOUT, (2, 2, 3), "zero", DEVICE)
    q, k, v = (projected(2, LAYOUT.length, 32, torch.bfloat16) for _ in range(3))
    means = torch.randn(2, 2, 9, 32, device=DEVICE)
    ops = torch.ops.ssta
    forced = torch.rand(12, 12, device=DEVICE) < 0.3
    scores = torch.randn(2, 2, 9, 9, device=DEVICE)
    for op, arguments in ((ops.take_tokens, (q, layout.source)), (ops.gather_blocks, (q, k, v, layout.source, layout.offsets, 4)),
                          (ops.score_blocks, (means, means, 0.7, True)), (ops.select_blocks, (forced, scores, None, None, 3, True)),
                          (ops.valid_lengths, (torch.rand(2, 7, device=DEVICE) < 0.5, *tile_places(layout), layout.lengths, 1))):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [(7, 9, 20), (31, 45, 80)])
def test_kernels_run_by_themselves_on_a_gpu(tokens):
    layout = tile_layout(TokenLayout.video_text(tokens, 300), (6, 8, 8), "zero", DEVICE)
    q, k, v = (projected(2, layout.tokens.length, 128, torch.bfloat16, batch=1) for _ in range(3))
    assert kernels_run(q) and not kernels_run(q.double()) and not kernels_run(q.cpu())
    outputs = gather_blocks(q, k, v, layout.source, layout.offsets, layout.num_video_tiles)
    for x, out in zip((q, k, v), outputs):
        assert torch.equal(out, _take_in_torch(x, layout.source)) and out.stride(1) < out.stride(2)
        assert torch.equal(take_tokens(out, layout.inverse), x)
    scores = score_blocks(*outputs[3:], 0.7)
    expected = score_tiles(*outputs[3:], lambda q, k: importance(q, k, 0.7))
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    forced = torch.zeros(layout.num_tiles, layout.num_tiles, dtype=torch.bool, device=DEVICE)
    lists = BlockLists(*select_blocks(forced, scores, 20), layout.offsets, layout.offsets, max_q_length=384, max_kv_length=384)
    lists.check_values(layout.num_slots, layout.num_slots)
    n = layout.num_video_tiles
    assert torch.equal(lists.to_mask()[..., :n, :n], topk_blocks(scores, 20))
    forced[:n, :n] = torch.rand(n, n, device=DEVICE) < 0.1
    counts = torch.randint(0, n // 2, scores.shape[:3], device=DEVICE, dtype=torch.int32)
    lists = BlockLists(*select_blocks(forced, scores, counts, beyond=True), layout.offsets, layout.offsets, max_q_length=384,
                       max_kv_length=384)
    assert torch.equal(lists.to_mask()[..., :n, :n], topk_blocks(scores, counts, forced[:n, :n]) | forced[:n, :n])


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """Without a GPU the interpreter runs the kernels that a GPU would."""
    for module in ("ssta.layout", "ssta.scoring", "ssta.kernels.prologue.reorder", "ssta.kernels.prologue.select"):
        monkeypatch.setattr(f"{module}.kernels_run", lambda x: True)


def layer_case(padding, sparse_type, masked):
    halves = [projected(heads, LAYOUT.length, 16, batch=1).requires_grad_() for heads in (2, 1, 1)]
    text_mask = (torch.arange(7, device=DEVICE) < 3)[None] if masked else None
    threshold, sampling = (0.5, "similarity") if sparse_type == "block_attn" else (0.0, "importance")
    return halves, text_mask, SSTAConfig(tile_thw=(2, 2, 3), kernel_thw=(1, 1, 3), topk=3, sparse_type=sparse_type, threshold=threshold,
                                         sampling_type=sampling, pad_type=padding)


@pytest.mark.parametrize("padding, sparse_type, masked", [
    ("none", "ssta", True), ("zero", "ssta", True), ("repeat", "block_attn", False)])
@pytest.mark.slow
def test_a_layer_through_the_kernels_is_the_layer_in_plain_torch(request, padding, sparse_type, masked):
    """Forward and backward, and traced into one graph, where the kernels are operators."""
    halves, text_mask, config = layer_case(padding, sparse_type, masked)

    def layer(*tensors):
        return ssta_attention(*tensors, LAYOUT, config, text_mask=text_mask, impl="torch")

    def with_grads(run):
        out = run(*halves)
        return out, *torch.autograd.grad((out * weight).float().sum(), halves)

    weight = torch.randn(1, 2, LAYOUT.length, 16, device=DEVICE).half()
    expected = with_grads(lambda *x: ssta_attention(*x, LAYOUT, config, text_mask=text_mask, impl="torch"))
    request.getfixturevalue("kernels_everywhere")
    eager = with_grads(layer)
    for got, wanted in zip(eager, expected):
        # Gradients of repeated tokens are added up in another order where they lie in another memory order.
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)
        assert got.stride() == wanted.stride()
    torch._dynamo.reset()
    for got, wanted in zip(with_grads(torch.compile(layer, fullgraph=True, backend="aot_eager")), eager):
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)


def test_a_density_through_the_kernels_is_that_of_plain_torch(request):
    """The same lists, where rows tie too; and traced into one graph, where the kernels are operators."""
    layout = tile_layout(TokenLayout((VideoGrid(1, 3, 3), DenseRun(2))), (1, 1, 1), device=DEVICE)
    config = SSTAConfig(tile_thw=(1, 1, 1), kernel_thw=(1, 1, 3), density=0.5, compensation="linear")
    x, scores = torch.zeros(2, 1, 11, 4, device=DEVICE), torch.randint(0, 4, (2, 1, 9, 9), device=DEVICE).float()
    tiled = TiledQKV(layout, x, x, x)

    def lists():
        blocks = select_tiles(tiled, config, scores=scores).blocks
        return blocks.to_mask()

    expected = lists()
    request.getfixturevalue("kernels_everywhere")
    assert torch.equal(lists(), expected)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lists, fullgraph=True, backend="aot_eager")(), expected)


def test_a_second_gradient_of_tiling_is_not_lost(kernels_everywhere):
    layout = tile_layout(LAYOUT, (2, 2, 3), "zero", DEVICE)
    x = projected(1, LAYOUT.length, 4, torch.float32, batch=1).requires_grad_()
    y = layout.tile(x)
    first, = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    second, = torch.autograd.grad(first.sum(), x)
    slots = torch.zeros(LAYOUT.length, device=DEVICE).index_add(0, layout.source.clamp(min=0), (layout.source >= 0).float())
    torch.testing.assert_close(second, 2 * slots[:, None].expand_as(x), msg="twice the number of slots that hold the token")
