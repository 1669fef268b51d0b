"""Attention over all keys is the merge of attention over the parts of any split of them, and so are its gradients."""

import pytest
import torch

from ssta.kernels import BlockLists, PatternFacts, block_sparse_attention, choose_route
from ssta.kernels.merge import merge_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)


def split(mask, parts):
    """The key blocks distributed over ``parts`` masks; with three parts the second one gets nothing in the first query block."""
    owner = torch.randint(parts, mask.shape, device=mask.device)
    owner[..., 0, :] = owner[..., 0, :].where(owner[..., 0, :] != 1, 0)
    return [mask & (owner == i) for i in range(parts)]


def case(device, parts, dtype, dim=16):
    """(q, k, v, attention over all blocks, attention over each part)"""
    mask = torch.rand(2, 4, 3, 5, device=device) < 0.8
    mask[0, 1, 2] = False  # rows that attend to nothing in any part
    shapes = (2, 44, 4, dim), (2, 75, 2, dim), (2, 75, 2, dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for shape in shapes)

    def attend(mask, q, k, v):
        return block_sparse_attention(q, k, v, BlockLists.from_mask(mask, 16, 16), return_lse=True, impl="reference")

    return q, k, v, lambda *x: attend(mask, *x), [lambda *x, part=part: attend(part, *x) for part in split(mask, parts)]


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [2, 3])
def test_the_merge_of_parts_is_the_whole(parts, dtype, device):
    q, k, v, whole, pieces = case(device, parts, dtype)
    out, lse = merge_attention(*zip(*(piece(q, k, v) for piece in pieces)))
    expected, expected_lse = whole(q, k, v)
    assert out.dtype == dtype and out.stride() == expected.stride() and lse.dtype == torch.float32
    # Parts that are rounded to bfloat16 carry an error of half a unit each, and their mean another one.
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6 if dtype == torch.float32 else 2**-6)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=4e-6)
    assert (out[0, 1, 32:] == 0).all() and (lse[0, 1, 32:] == float("-inf")).all()


@devices
@pytest.mark.parametrize("parts", [2, 3])
def test_gradients_of_the_whole_through_the_merge(parts, device):
    q, k, v, whole, pieces = case(device, parts, torch.float64)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[:3], dtype=q.dtype, device=device)

    def gradients(out, lse):
        return torch.autograd.grad((out * dout).sum() + (lse * dlse).masked_fill(lse == float("-inf"), 0.0).sum(), inputs)

    expected = gradients(*whole(*inputs))
    merged = gradients(*merge_attention(*map(list, zip(*(piece(*inputs) for piece in pieces)))))
    for a, b in zip(merged, expected):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@devices
def test_gradients_against_numbers(device):
    outs = [torch.randn(1, 2, 3, 2, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(1, 2, 3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: merge_attention(x[:3], x[3:]), (*outs, *lses))


@devices
def test_rows_that_have_nothing_get_no_gradient(device):
    outs = [torch.randn(1, 1, 3, 4, device=device, requires_grad=True) for _ in range(2)]
    lses = [torch.tensor([[[x, float("-inf"), 2.0]]], device=device, requires_grad=True) for x in (1.0, float("-inf"))]
    out, lse = merge_attention(outs, lses)
    grads = torch.autograd.grad((out, lse), (*outs, *lses), (torch.ones_like(out), torch.ones_like(lse)))
    assert all(x.isfinite().all() and (x[:, :, 1] == 0).all() for x in grads)
    assert (grads[1][:, :, 0] == 0).all() and (grads[3][:, :, 0] == 0).all(), "the second part has nothing in the first row"


@devices
def test_what_is_not_finite_stays_in_its_row_and_what_counts_for_nothing_is_ignored(device):
    outs = [torch.randn(1, 2, 5, 20, device=device) for _ in range(2)]
    lses = [torch.randn(1, 2, 5, device=device) for _ in range(2)]
    expected = merge_attention([x.clone() for x in outs], [x.clone() for x in lses])
    outs[0][0, 0, 1, 3], lses[1][0, 0, 2], lses[0][0, 0, 3] = float("nan"), float("nan"), float("inf")
    outs[1][0, 1, 4], lses[1][0, 1, 4] = float("nan"), float("-inf")
    out, lse = merge_attention(outs, lses)
    assert out[0, 0, 1].isnan().any() and out[0, 0, 2].isnan().all() and lse[0, 0, 2].isnan()
    assert not lse[0, 0, 3].isfinite()
    torch.testing.assert_close((out[0, 1, 4], lse[0, 1, 4]), (outs[0][0, 1, 4], lses[0][0, 1, 4]))
    touched = torch.zeros(2, 5, dtype=torch.bool, device=device)
    touched[0, 1:4], touched[1, 4] = True, True
    assert torch.equal(out[0, ~touched], expected[0][0, ~touched]) and torch.equal(lse[0, ~touched], expected[1][0, ~touched])
    assert torch.equal(lse[0, 0, 1], expected[1][0, 0, 1]), "a NaN in out says nothing of lse"


@devices
@pytest.mark.parametrize("lses", [(-300.0, 0.0, 300.0), (300.0, 0.0, -300.0), (0.0, 300.0, -300.0)])
def test_the_heaviest_part_is_all_where_others_are_far_below(lses, device):
    """e^300 is no float32, so weights are measured from the largest lse, wherever it stands."""
    outs = [torch.randn(1, 2, 5, 20, device=device) for _ in lses]
    out, lse = merge_attention(outs, [torch.full((1, 2, 5), x, device=device) for x in lses])
    assert torch.equal(out, outs[lses.index(300.0)]) and (lse == 300).all()


@devices
def test_strides_and_long_lists_of_parts(device):
    """Any strides, head_dims and numbers of parts; the caller's tensors stay as they are."""
    parts = [torch.randn(2, 7, 3, 48, device=device).transpose(1, 2)[..., i % 2 * 8::1][..., :40] for i in range(9)]
    for i in (0, 4):
        parts[i] = parts[i].mT.contiguous().mT
    lses = [torch.randn(7, 3, 2, device=device).permute(2, 1, 0) * 5 for _ in range(9)]
    before = [x.clone() for x in (*parts, *lses)]
    out, lse = merge_attention(parts, lses)
    weights = torch.stack(lses).double().softmax(0)
    torch.testing.assert_close(out.double(), (torch.stack(parts) * weights[..., None]).sum(0), rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), torch.stack(lses).double().logsumexp(0), rtol=0, atol=4e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, (*parts, *lses)))


@devices
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)], ids=str)
def test_zero_sizes(shape, device):
    lse = torch.full(shape[:3], 1.5, device=device)
    out, merged = merge_attention([torch.ones(shape, device=device)] * 2, [lse] * 2)
    assert out.shape == shape
    torch.testing.assert_close(merged, lse + torch.tensor(2.0).log().item())


@devices
def test_under_torch_compile(device):
    outs = [torch.randn(1, 2, 8, 16, device=device, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(1, 2, 8, device=device) for _ in range(2)]
    compiled = torch.compile(merge_attention, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(outs, lses), merge_attention(outs, lses)):
        torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad(merge(outs, lses)[0].square().sum(), outs) for merge in (compiled, merge_attention)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("error, name, change", [
    (TypeError, "outs must be a list or tuple", lambda outs, lses: (outs[0], lses)),
    (TypeError, r"lses\[1\] must be a tensor", lambda outs, lses: (outs, [lses[0], 3])),
    (ValueError, "two or more parts", lambda outs, lses: (outs[:1], lses[:1])),
    (ValueError, "two or more parts", lambda outs, lses: (outs, lses[:1])),
    (ValueError, r"outs\[0\] must be \[batch", lambda outs, lses: ([x[0] for x in outs], lses)),
    (ValueError, r"outs\[1\] must be .* = \[1, 2, 3, 4\]", lambda outs, lses: ([outs[0], outs[1][..., :2]], lses)),
    (ValueError, r"lses\[1\] must be .* = \[1, 2, 3\]", lambda outs, lses: (outs, [lses[0], lses[1][..., :2]])),
    (TypeError, r"outs\[0\] must be float16", lambda outs, lses: ([x.int() for x in outs], lses)),
    (TypeError, r"outs\[1\] must be float32, got torch.float16", lambda outs, lses: ([outs[0], outs[1].half()], lses)),
    (TypeError, r"lses\[0\] must be float32", lambda outs, lses: (outs, [x.double() for x in lses])),
    (TypeError, r"lses\[0\] must be float64", lambda outs, lses: ([x.double() for x in outs], lses)),
    (ValueError, r"lses\[1\] must be on cpu, got meta", lambda outs, lses: (outs, [lses[0], lses[1].to("meta")])),
], ids=lambda x: x if isinstance(x, str) else "")
def test_mistakes_are_named(error, name, change):
    outs, lses = [torch.zeros(1, 2, 3, 4) for _ in range(2)], [torch.zeros(1, 2, 3) for _ in range(2)]
    with pytest.raises(error, match=name):
        merge_attention(*change(outs, lses))


@devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_keys_that_are_kept_and_the_others_have_the_gradients_of_all(device, dtype):
    """Each part's backward needs of the other the result over both, and nothing else."""
    mask = torch.rand(2, 4, 3, 5, device=device) < 0.6
    mask[0, 1, 2] = False
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for shape in (
        (2, 44, 4, 16), (2, 75, 2, 16), (2, 75, 2, 16)))
    blocks, kept = BlockLists.from_mask(mask, 16, 16, num_kv_blocks=5), torch.tensor([True, False, True, True, False], device=device)
    out, lse = block_sparse_attention(q, k, v, blocks, return_lse=True)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    parts = [BlockLists.from_mask(mask & some, 16, 16) for some in (kept, ~kept)]
    scale = 16**-0.5
    with torch.no_grad():
        merged = merge_attention(*zip(*(block_sparse_attention(q, k, v, part, return_lse=True) for part in parts)))
        route = choose_route("auto", q.device, dtype, 16, PatternFacts.of(blocks), heads=4, kv_heads=2)
        grads = [route.run_backward(dout, None, q, k, v, *merged, part, scale, False, True) for part in parts]
    allowed = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(merged, (out, lse), rtol=0, atol=allowed)
    for got, want in zip((x + y for x, y in zip(*grads)), expected):
        torch.testing.assert_close(got, want, rtol=0, atol=allowed)
