"""Video sparse attention: its published formulas in float64 forward and backward, ragged canvases, laws, refusals."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from vsa_oracle import video_sparse_attention as by_definition

from ssta import SSTAConfig, TokenLayout, tile_layout, video_sparse_attention
from ssta.attention import attend
from ssta.kernels import Deferred, Projection, backend
from ssta.scoring import tile_means
from ssta.trained.vsa import vsa_config, vsa_layer

# Whole tiles, partial ones along every axis, fewer tokens than a tile along one.
CANVASES = [(4, 8, 8), (5, 6, 7), (2, 9, 5), (1, 1, 3)]


def inputs(thw, heads=2, kv_heads=2, dim=8, dtype=torch.float64, device="cpu", batch=1, before=()):
    tokens = thw[0] * thw[1] * thw[2] + sum(before)
    shapes = [(batch, tokens, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    # As projections leave them.
    return [torch.randn(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("thw", CANVASES, ids=str)
@pytest.mark.parametrize("sparsity", [0.8, 0.5, 0.0])
def test_forward_and_backward_are_the_published_formulas(thw, sparsity):
    tensors = inputs(thw, heads=4, batch=2)
    expected, _ = by_definition(*tensors, thw, sparsity)
    out = video_sparse_attention(*tensors, thw, sparsity)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    dout = torch.randn_like(out)
    for found, wanted in zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected, tensors, dout)):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(video_sparse_attention(*tensors, thw, sparsity), out, rtol=0, atol=0)


# Text, conditions and audio of a packed sequence: whole tiles, partial ones, less than one.
BEFORE = [(64, 64), (70, 30, 130), (5,)]


@pytest.mark.parametrize("before", BEFORE, ids=str)
@pytest.mark.parametrize("sparsity", [0.75, 0.0])
def test_what_stands_before_the_video_is_attended_to_whole_and_pooled_in_tiles_of_its_own(before, sparsity):
    thw = (5, 6, 7)
    tensors = inputs(thw, heads=4, batch=2, before=before)
    expected, kept = by_definition(*tensors, thw, sparsity, before=before)
    out = video_sparse_attention(*tensors, thw, sparsity, before=before)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    dout = torch.randn_like(out)
    for found, wanted in zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected, tensors, dout)):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(video_sparse_attention(*tensors, thw, sparsity, before=before), out, rtol=0, atol=0)


def test_other_tiles_another_scale_and_no_gate():
    q, k, v, _ = inputs((5, 6, 7))
    expected, _ = by_definition(q, k, v, None, (5, 6, 7), 0.6, (2, 3, 4), 0.7)
    for impl in ("auto", "reference"):
        out = video_sparse_attention(q, k, v, None, (5, 6, 7), 0.6, tile_thw=(2, 3, 4), scale=0.7, impl=impl)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_that_of_the_dtype(dtype):
    thw = (5, 6, 7)
    tensors = inputs(thw, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    out, (expected, _) = video_sparse_attention(*tensors, thw, 0.5), by_definition(*wide, thw, 0.5, rounded=dtype)
    eps = torch.finfo(dtype).eps
    assert (out.double() - expected).abs().max() < 4 * eps * expected.abs().max()
    dout, (plain, _) = torch.randn_like(out), by_definition(*tensors, thw, 0.5)
    for found, wanted, other in zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected, wide, dout.double()),
                                    torch.autograd.grad(plain, tensors, dout)):
        allowed = max(6 * eps * wanted.abs().max(), 2 * (other.double() - wanted).abs().max())
        assert found.dtype == dtype and (found.double() - wanted).abs().max() < allowed


def test_a_gate_of_zero_and_every_tile_is_dense_attention():
    q, k, v, gate = inputs((5, 6, 7))
    out = video_sparse_attention(q, k, v, torch.zeros_like(gate), (5, 6, 7), 0.0)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v), rtol=1e-9, atol=1e-9)


def test_the_selection_does_not_see_the_gate_and_out_is_linear_in_it():
    q, k, v, gate = inputs((4, 8, 8))
    at = [video_sparse_attention(q, k, v, gate * factor, (4, 8, 8), 0.7) for factor in (0, 1, 3)]
    torch.testing.assert_close(at[2] - at[0], 3 * (at[1] - at[0]))


@pytest.mark.parametrize("text", [0, 5])
@pytest.mark.parametrize("pad_type", ["none", "zero", "repeat"])
def test_a_layer_gives_the_means_of_its_tiles_with_gradients(pad_type, text):
    layout, config = TokenLayout.video_text((5, 6, 7), text), SSTAConfig(tile_thw=(2, 4, 3), topk=2, pad_type=pad_type)
    tensors = [torch.randn(2, heads, layout.length, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    tiles = tile_layout(layout, config.tile_thw, pad_type)
    expected = [tile_means(tiles.tile(x), tiles) for x in tensors]
    with_means, without = (attend(*tensors, layout, config, means=means) for means in (True, False))
    assert not without.means
    dmeans = [torch.randn_like(x) for x in expected]
    for found, wanted in zip(with_means.means, expected):
        torch.testing.assert_close(found, wanted)
    wanted = torch.autograd.grad([*expected, without.out], tensors, [*dmeans, torch.ones_like(without.out)], retain_graph=True)
    found = torch.autograd.grad([*with_means.means, with_means.out], tensors, [*dmeans, torch.ones_like(without.out)], retain_graph=True)
    torch.testing.assert_close(found, wanted)
    with Watch():
        operated = attend(*tensors, layout, config, means=True)
    for by in (with_means, operated):
        found = torch.autograd.grad(by.means[1].sum(), tensors)
        torch.testing.assert_close(found[1], torch.autograd.grad(expected[1].sum(), tensors[1], retain_graph=True)[0])
        assert not found[0].any() and not found[2].any()


class Watch(TorchDispatchMode):
    """Sees every operator, and changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


@pytest.mark.slow
@pytest.mark.parametrize("before", [(), (70, 30)], ids=str)
def test_it_compiles_whole(before):
    thw = (5, 6, 7)
    tensors = inputs(thw, dtype=torch.float32, before=before)
    compiled = torch.compile(lambda *x: video_sparse_attention(*x, thw, 0.5, before=before), fullgraph=True, backend="aot_eager")
    out, expected = compiled(*tensors), video_sparse_attention(*tensors, thw, 0.5, before=before)
    torch.testing.assert_close(out, expected)
    for found, wanted in zip(torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(expected.sum(), tensors)):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("change, error, message", [
    (dict(gate=torch.zeros(1, 2, 12, 4)), ValueError, r"gate must be \[B, H, S, D\] = \[1, 2, 12, 8\], got shape \(1, 2, 12, 4\)"),
    (dict(gate=torch.zeros(1, 2, 12, 8).double()), TypeError, "gate must be float32, got torch.float64"),
    (dict(gate=1.0), TypeError, "gate must be a tensor, got float"),
    (dict(sparsity=1.0), ValueError, r"sparsity must lie in \[0, 1\), the share of the tiles that is left out, got 1.0"),
    (dict(sparsity="high"), TypeError, "sparsity must be a number, got 'high'"),
    (dict(thw=(2, 2, 4)), ValueError, "thw must multiply to the 12 video tokens of query .*, got"),
    (dict(before=(3, 4)), ValueError, "query must have the layout's 19 tokens, got 12"),
    (dict(before=(0,)), ValueError, r"before\[0\] must be at least 1, got 0"),
    (dict(before=torch.zeros(2)), TypeError, r"before must be a sequence of ints, got tensor\(.*\(Tensor\)"),
    (dict(before=(1, "2")), TypeError, r"before\[1\] must be an int, got '2'"),
    (dict(tile_thw=(4, 4)), ValueError, "tile_thw must have three entries"),
    (dict(key=torch.zeros(1, 2, 11, 8)), ValueError, "key must have the layout's 12 tokens, got 11"),
    (dict(impl="fast"), ValueError, "impl must be one of"),
    (dict(deterministic=1), TypeError, "deterministic must be a bool, got int"),
])
def test_refuses(change, error, message):
    x = torch.zeros(1, 2, 12, 8)
    with pytest.raises(error, match=message):
        video_sparse_attention(**dict(query=x, key=x, value=x, gate=x, thw=(1, 3, 4), sparsity=0.5) | change)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_impl_reaches_the_step_that_gives_each_token_its_tiles_row(impl, monkeypatch):
    asked, choose = [], backend.choose_backend
    monkeypatch.setattr(backend, "choose_backend", lambda impl, *where: asked.append(impl) or choose(impl, *where))
    for grad in (True, False):
        x = inputs((2, 4, 4), dim=16, dtype=torch.float16)
        with torch.set_grad_enabled(grad):
            video_sparse_attention(*x, (2, 4, 4), 0.5, tile_thw=(1, 2, 2), impl=impl)
    assert asked == [impl] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dim, before", [(64, ()), (128, ()), (128, (70, 30, 130))])
@pytest.mark.parametrize("thw", [(5, 9, 14), (8, 8, 12)], ids=str)
def test_kernels_are_the_formulas_to_the_rounding_of_bfloat16(thw, dim, before):
    tensors = inputs(thw, heads=4, dim=dim, dtype=torch.bfloat16, device="cuda", batch=2, before=before)
    wide = [x.detach().double().cpu().requires_grad_() for x in tensors]
    out = video_sparse_attention(*tensors, thw, 0.6, before=before)
    expected, _ = by_definition(*wide, thw, 0.6, rounded=torch.bfloat16, before=before)
    eps = torch.finfo(torch.bfloat16).eps
    wrong = (out.double().cpu() - expected).abs().amax(-1) > 4 * eps * expected.abs().max()
    # A mean that is rounded the other way may choose another tile.
    assert wrong.double().mean() < 0.02
    dout = torch.randn_like(out).masked_fill(wrong[..., None].cuda(), 0)
    for found, wanted in zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected, wide, dout.double().cpu())):
        assert (found.double().cpu() - wanted).abs().max() < 6 * eps * wanted.abs().max()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs on the GPU, where the tests above are of it")
def test_triton_s_kernels_are_the_formulas():
    thw = (4, 5, 9)
    tensors = inputs(thw, dim=16, dtype=torch.float16)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    out, (expected, _) = video_sparse_attention(*tensors, thw, 0.5, impl="triton"), by_definition(*wide, thw, 0.5, rounded=torch.float16)
    eps = torch.finfo(torch.float16).eps
    assert (out.double() - expected).abs().max() < 4 * eps * expected.abs().max()
    dout = torch.randn_like(out)
    for found, wanted in zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected, wide, dout.double())):
        assert (found.double() - wanted).abs().max() < 6 * eps * wanted.abs().max()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs on the GPU, where the tests above are of it")
def test_projections_are_materialised_on_the_way_into_the_tiles_and_read_once(monkeypatch):
    thw = (4, 5, 9)
    tensors = [x.detach() for x in inputs(thw, dim=16, dtype=torch.float16)]
    arguments = TokenLayout.video_text(thw), vsa_config(0.5)
    expected = vsa_layer(*tensors, *arguments, impl="triton").out
    reads = []
    gather = Deferred.gather_blocks
    monkeypatch.setattr(Deferred, "gather_blocks", lambda x, *order: reads.append(x) or gather(x, *order))
    monkeypatch.setattr(Deferred, "materialize", lambda x: pytest.fail("materialised apart"))
    deferred = [Deferred((Projection(x),)) for x in tensors[:3]]
    assert torch.equal(vsa_layer(*deferred, tensors[3], *arguments, impl="triton").out, expected)
    assert reads == deferred
