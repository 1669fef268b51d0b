"""Sparse-linear attention: its published formulas in float64 forward and backward, ragged ends, laws, refusals."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from vsa_oracle import FEATURES
from vsa_oracle import sparse_linear_attention as by_definition

from ssta import sparse_linear_attention


def inputs(tokens, heads=2, kv_heads=2, dim=8, dtype=torch.float64, device="cpu", batch=1):
    """q, k, v, weight, bias."""
    tensors = [torch.randn(batch, tokens, n, dim, device=device, dtype=dtype).transpose(1, 2) for n in (heads, kv_heads, kv_heads)]
    tensors += [torch.randn(*shape, device=device, dtype=dtype) for shape in ((dim, dim), (dim,))]
    return [x.requires_grad_() for x in tensors]


@pytest.mark.parametrize("feature_map", FEATURES)
@pytest.mark.parametrize("tokens, density", [(96, 0.34), (107, 0.5), (90, 1.0)])
def test_forward_and_backward_are_the_published_formulas(tokens, density, feature_map):
    tensors = inputs(tokens, heads=4, batch=2)
    expected = by_definition(*tensors, density, feature_map, 32, 16)
    out = sparse_linear_attention(*tensors, density=density, feature_map=feature_map, q_block=32, kv_block=16)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    dout = torch.randn_like(out)
    for found, wanted in zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected, tensors, dout)):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_that_of_the_dtype(dtype):
    tensors = inputs(107, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    out, expected = sparse_linear_attention(*tensors, density=0.5, q_block=32, kv_block=16), by_definition(*wide, 0.5, "softmax", 32, 16)
    eps = torch.finfo(dtype).eps
    assert (out.double() - expected).abs().max() < 4 * eps * expected.abs().max()
    dout = torch.randn_like(out)
    for found, wanted in zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected, wide, dout.double())):
        assert found.dtype == dtype and (found.double() - wanted).abs().max() < 8 * eps * wanted.abs().max()


def test_a_projection_of_zero_and_every_block_is_dense_attention():
    q, k, v, weight, bias = inputs(107)
    out = sparse_linear_attention(q, k, v, 0 * weight, 0 * bias, density=1.0, kv_block=16)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sparse_linear_attention(q, k, v, 0 * weight, density=1.0), out, rtol=1e-9, atol=1e-9)


def test_at_least_one_block_is_kept_and_the_projection_keeps_its_dtype():
    q, k, v, weight, bias = (x.detach().float() for x in inputs(40))
    one = sparse_linear_attention(q, k, v, weight, bias, density=0.26, q_block=8, kv_block=10)
    torch.testing.assert_close(sparse_linear_attention(q, k, v, weight.double(), bias.double(), density=0.01, q_block=8, kv_block=10), one)
    assert one.dtype == torch.float32


def test_rows_without_features_get_the_bias_in_float16_too():
    q, k, v, weight, bias = (x.detach() for x in inputs(2000, dtype=torch.float16))
    q[:, :, 3] = -1
    linear = sparse_linear_attention(q, k, v, weight, bias, feature_map="relu") - sparse_linear_attention(q, k, v, 0 * weight)
    torch.testing.assert_close(linear[:, :, 3], bias.expand(1, 2, 8), rtol=0, atol=2e-3)


def test_any_strides_are_taken():
    q, k, v, weight = inputs(48)[:4]
    apart = [x.mT.contiguous().mT for x in (q, k, v)]
    assert apart[0].stride(-1) != 1
    options = dict(density=0.5, q_block=16, kv_block=16)
    assert torch.equal(sparse_linear_attention(*apart, weight, **options), sparse_linear_attention(q, k, v, weight, **options))


def test_without_a_weight_it_is_the_exact_part():
    q, k, v = inputs(300)[:3]
    out, expected = sparse_linear_attention(q, k, v, None, density=0.4), by_definition(q, k, v, None, None, 0.4, "softmax", 128, 64)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    dout = torch.randn_like(out)
    for found, wanted in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout)):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("change, error, message", [
    (dict(weight=torch.zeros(4, 8)), ValueError, r"weight must be \[head_dim, head_dim\] = \[8, 8\], got shape \(4, 8\)"),
    (dict(bias=torch.zeros(4)), ValueError, r"bias must be \[head_dim\] = \[8\], got shape \(4,\)"),
    (dict(weight=[1.0]), TypeError, "weight must be a tensor, got list"),
    (dict(weight=None, bias=torch.zeros(8)), ValueError, "bias must be None without a weight, whose product it is added to, got one"),
    (dict(weight=torch.zeros(8, 8).to(torch.float8_e4m3fn)), TypeError, "weight must be float16, .*, got torch.float8_e4m3fn"),
    (dict(weight=torch.zeros(8, 8).to_sparse()), TypeError, "weight must be a dense, strided tensor, got torch.sparse_coo"),
    (dict(weight=torch.zeros(8, 8).to_mkldnn()), TypeError, "weight must be a dense, strided tensor, got torch._mkldnn"),
    (dict(bias=torch.zeros(8).to(torch.float8_e4m3fn)), TypeError, "bias must be float16, .*, got torch.float8_e4m3fn"),
    (dict(bias=torch.zeros(8).to_sparse()), TypeError, "bias must be a dense, strided tensor, got torch.sparse_coo"),
    (dict(bias=torch.zeros(8).to_mkldnn()), TypeError, "bias must be a dense, strided tensor, got torch._mkldnn"),
    (dict(query=torch.zeros(1, 2, 0, 8)), ValueError, r"with at least one token, got shape \(1, 2, 0, 8\)"),
    (dict(density=0.0), ValueError, r"density must lie in \(0, 1\], a share of the key blocks, got 0.0"),
    (dict(feature_map="hedgehog"), ValueError, "feature_map must be one of 'softmax', 'elu', 'relu', got 'hedgehog'"),
    (dict(deterministic=1), TypeError, "deterministic must be a bool, got int"),
    (dict(kv_block=0), ValueError, "kv_block must be at least 1, got 0"),
    (dict(q_block=2**31), ValueError, "q_block must be at most 2147483647 tokens, got 2147483648"),
    (dict(kv_block=2**31), ValueError, "kv_block must be at most 2147483647 tokens, got 2147483648"),
    (dict(impl="fast"), ValueError, "impl must be one of"),
    (dict(query=torch.zeros(2, 12, 8)), ValueError, "query must be .batch, heads, tokens, head_dim. with at least one token, got shape"),
    (dict(value=torch.zeros(1, 2, 11, 8)), ValueError, "value must have"),
])
def test_refuses(change, error, message):
    x = torch.zeros(1, 2, 12, 8)
    with pytest.raises(error, match=message):
        sparse_linear_attention(**dict(query=x, key=x, value=x, weight=torch.zeros(8, 8)) | change)


def test_what_cannot_run_is_refused_before_anything_is_selected(monkeypatch):
    monkeypatch.setattr("ssta.trained.sla._select", lambda *_: pytest.fail("selected"))
    x = torch.zeros(1, 2, 12, 8)
    with pytest.raises(ValueError, match="impl='hopper' "):
        sparse_linear_attention(x, x, x, torch.zeros(8, 8), impl="hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_are_the_formulas_to_the_rounding_of_bfloat16(dim):
    tensors = inputs(1000, heads=3, kv_heads=3, dim=dim, dtype=torch.bfloat16, device="cuda", batch=2)
    wide = [x.detach().double().cpu().requires_grad_() for x in tensors]
    out, expected = sparse_linear_attention(*tensors, density=0.3), by_definition(*wide, 0.3, "softmax", 128, 64)
    eps = torch.finfo(torch.bfloat16).eps
    assert (out.double().cpu() - expected).abs().max() < 4 * eps * expected.abs().max()
    dout = torch.randn_like(out)
    for found, wanted in zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected, wide, dout.double().cpu())):
        assert (found.double().cpu() - wanted).abs().max() < 8 * eps * wanted.abs().max()
