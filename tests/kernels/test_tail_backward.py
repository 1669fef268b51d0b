"""Gradients of the tail by kernels are those of the specification in float64 by autograd, with the same estimates held still."""

import dataclasses
import math

import pytest
import torch
from tail_cases import bfloat16_products  # noqa: F401
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from ssta import SSTAConfig, TokenLayout, ssta_attention, tile_layout
from ssta.compensation import _bias, _Tiles, _units, compensate
from ssta.kernels import BlockLists, add_tail, estimate_blocks, per_query_head
from ssta.kernels.portable.tail_backward import triton_tail_backward

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.usefixtures("bfloat16_products"), *([pytest.mark.gpu] if GPU else [])]
gpu = pytest.mark.gpu
NAMES = "dout", "dlse", "dq", "dk", "dv"


@dataclasses.dataclass
class Case:
    """``inputs``: the exact part's out and lse, which may be anything, q, k and v. ``grads``: what arrives for the merged out and lse."""

    layout: object
    blocks: BlockLists
    inputs: list
    grads: list
    estimates: object
    scale: float

    def by_kernels(self, *inputs):
        return add_tail(*inputs, self.layout.offsets, self.layout.num_video_tiles, self.layout.max_tile_length, self.blocks, self.estimates,
                        scale=self.scale, owned=True)

    def specified(self, *inputs):
        return compensate(*inputs, self.layout, self.blocks, in_torch(self.estimates, self.layout), self.scale)

    def gradients(self, run, dtype=None, grads=None):
        inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in self.inputs]
        results = run(*inputs)[:2]
        arriving = [g if g is None else g.to(x.dtype) for g, x in zip(grads or self.grads, results)]
        pairs = [(x, g) for x, g in zip(results, arriving) if g is not None]
        return torch.autograd.grad([x for x, _ in pairs], inputs, [g for _, g in pairs], materialize_grads=True)


def in_torch(estimates, layout):
    """The kernels' estimates as plain torch holds them, in float64."""
    def double(x):
        return x if x is None else x.double()

    order, tiles = estimates.order, layout.num_video_tiles
    if order is not None:
        starts, lengths = layout.offsets[:tiles].tolist(), layout.lengths[:tiles].tolist()
        places = torch.arange(max(lengths), device=order.device).repeat(*order.shape[:2], tiles, 1)
        for i, (start, length) in enumerate(zip(starts, lengths)):
            places[:, :, i, :length] = order[:, :, start:start + length] - start
        order = places
    return dataclasses.replace(estimates, log_count=estimates.log_count.double(), half_variance=double(estimates.half_variance),
                               mass=double(estimates.mass), order=order, k_mean=None, v_mean=None)


def case(parts, heads=2, kv_heads=1, dim=16, dtype=torch.float32, thw=(3, 4, 5), tile=(2, 3, 3),
         text=3, batch=1, nan=False):
    """Ragged tiles; tile 1 of head 0 selects everything, the rest a third."""
    layout = tile_layout(TokenLayout.video_text(thw, text), tile, device=DEVICE)
    tokens, tiles, number = layout.num_slots, layout.num_video_tiles, layout.num_tiles
    # As projections leave them.
    out, q, k, v = (torch.randn(batch, tokens, n, dim, device=DEVICE).to(dtype).transpose(1, 2) for n in (heads, heads, kv_heads, kv_heads))
    mask = torch.rand(batch, heads, number, number, device=DEVICE) < 0.3
    mask[..., tiles:] = mask[..., tiles:, :] = mask[:, 0, 1] = True
    if nan:
        k[0, 0, int(layout.offsets[2]) + 1, 3] = float("nan")
        mask[..., 2] = False
    blocks = BlockLists.from_mask(mask, layout.offsets, layout.offsets, max_q_length=layout.max_tile_length,
                                  max_kv_length=layout.max_tile_length)
    # Half of the softmax or so.
    lse = torch.randn(batch, heads, tokens, device=DEVICE) + tiles**0.5 / 2 + 2
    scale = dim**-0.5
    estimates = estimate_blocks(q, k, v, layout.offsets, tiles, layout.max_tile_length, scale=scale, parts=parts)
    return Case(layout, blocks, [out, lse, q, k, v], [torch.randn_like(out), torch.randn_like(lse)], estimates, scale)


def assert_close(got, expected, share, tokens=16):
    """Errors as a share of the norm of a gradient, and of every run of tokens of a head where it is no smaller than they are on average."""
    for name, g, e in zip(NAMES, got, expected):
        assert g.shape == e.shape and g.isfinite().all(), name
        wrong, size = (x.reshape(*x.shape[:3], -1) for x in (g.double() - e, e))
        assert wrong.norm() <= share * size.norm(), f"{name} is off by {float(wrong.norm() / size.norm()):.2e} of its norm"
        wrong, size = (torch.stack([run.norm(dim=(2, 3)) for run in x.split(tokens, 2)]) for x in (wrong, size))
        assert (wrong <= 4 * share * torch.maximum(size, size.mean())).all(), f"{name} is off in one place"


def skip_head(case, head):
    useful = torch.ones(case.estimates.mass.shape[:2], dtype=torch.bool, device=case.estimates.mass.device)
    useful[:, head] = False
    case.estimates = dataclasses.replace(case.estimates, useful=useful)
    return case


kinds = pytest.mark.parametrize("parts, heads, kv_heads", [(1, 2, 2), (1, 2, 1), (2, 4, 2)])


@kinds
@pytest.mark.slow
def test_the_kernels_compute_the_formulas(parts, heads, kv_heads):
    """With second moments in float32: what remains of an error is float32's. One tile holds NaN, and one head does without."""
    of = skip_head(case(parts, heads, kv_heads, batch=2, nan=True, thw=(3, 4, 4)), 1)
    expected = of.gradients(of.specified, torch.float64)
    out, lse, q, k, v = (x.double() for x in of.inputs)
    layout, estimates = of.layout, in_torch(of.estimates, of.layout)
    tiles, (members, counts) = _Tiles(layout), _Tiles(layout).members(parts)
    unsound = estimates.log_count.isneginf().unflatten(-1, (-1, parts)).all(-1)[..., None, None]
    (k_mean, k_spread), (v_mean, v_spread) = (
        _units(tiles.cut(x).masked_fill(unsound, 0), members, counts, estimates.order) for x in (k, v))
    k_mean, v_mean = k_mean.flatten(2, 3), v_mean.flatten(2, 3)
    h = estimates.half_variance
    selected = of.blocks.to_mask()[..., :tiles.number, :tiles.number].repeat_interleave(parts, -1) | ~estimates.useful[..., None, None]
    bias = _bias(estimates.log_count, h).masked_fill(selected, -torch.inf)
    logits = of.scale * q[:, :, :tiles.slots] @ per_query_head(k_mean, heads).mT + bias.index_select(2, tiles.of_slot)
    tail_lse = torch.full_like(lse, float("nan"))
    tail_lse[..., :tiles.slots] = logits.logsumexp(-1)
    covariance = (k_spread.mT @ v_spread / counts.clamp(min=1)[..., None, None]).flatten(2, 3).flatten(3)
    mass = estimates.mass.masked_fill(selected, 0)
    mixture = mass / mass.sum(-1, keepdim=True).clamp(min=1e-30) * (1 / h.clamp(min=1e-6)).clamp(max=1).sqrt()
    mixture = mixture.unflatten(1, (kv_heads, -1)).flatten(2, 3).flatten(0, 1)
    matrix = mixture @ covariance.flatten(0, 1)
    merged, merged_lse, _ = of.specified(out, lse, q, k, v)
    dout, dlse = of.grads
    got = [dout.clone(), dlse.clone(), *(torch.zeros_like(x) for x in of.inputs[2:])]
    rows = [x.float() for x in (dout, dlse, out, lse, merged, merged_lse, tail_lse, q, k, v)]
    of_units = [x.float() for x in (k_mean, v_mean, matrix, mixture)]
    triton_tail_backward(*got, *rows, layout.offsets, layout.max_tile_length, (bias / math.log(2)).float(), of.estimates.log_count,
                         of.estimates.order, *of_units, of.scale)
    assert_close(got, expected, 2e-6)


@kinds
@pytest.mark.slow
def test_gradients_are_those_of_the_specification(parts, heads, kv_heads):
    of = skip_head(case(parts, heads, kv_heads, batch=2, nan=True), 0)
    got, expected = of.gradients(of.by_kernels), of.gradients(of.specified, torch.float64)
    # Second moments, and what they are multiplied with, are bfloat16.
    assert_close(got, expected, 2**-6)
    nothing = slice(int(of.layout.offsets[2]), int(of.layout.offsets[3]))
    assert (got[3][0, 0, nothing] == 0).all() and (got[4][0, 0, nothing] == 0).all(), "the tile that holds NaN"
    assert torch.equal(got[0][:, 0], of.grads[0][:, 0]) and torch.equal(got[1][:, 0], of.grads[1][:, 0]) and (got[2][:, 0] == 0).all()


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_in_float16(parts):
    of = case(parts, dtype=torch.float16)
    assert_close(of.gradients(of.by_kernels), of.gradients(of.specified, torch.float64), 2**-6)


def test_where_everything_is_selected_gradients_pass():
    of = case(1, thw=(2, 3, 4))
    of.blocks = BlockLists.from_mask(torch.ones_like(of.blocks.to_mask()), of.layout.offsets, of.layout.offsets,
                                     max_q_length=of.layout.max_tile_length, max_kv_length=of.layout.max_tile_length)
    dout, dlse, *others = of.gradients(of.by_kernels)
    assert torch.equal(dout, of.grads[0]) and torch.equal(dlse, of.grads[1]) and all((x == 0).all() for x in others)


def test_a_gradient_may_arrive_through_one_result_only():
    """And be one number for a whole row, or be as good as none."""
    of = case(1, thw=(2, 3, 4))
    one = torch.ones((), device=DEVICE).expand_as(of.inputs[0])
    for grads in ([one, None], [None, of.grads[1]]):
        assert_close(of.gradients(of.by_kernels, grads=grads), of.gradients(of.specified, torch.float64, grads), 2**-6)


def test_the_same_inputs_give_the_same_bits():
    of = case(2, thw=(2, 4, 4))
    assert all(torch.equal(a, b) for a, b in zip(of.gradients(of.by_kernels), of.gradients(of.by_kernels)))


def test_no_input_is_written_to_and_no_matrix_is_kept():
    of = case(1, dim=32, thw=(2, 3, 4))
    before, saved = [x.clone() for x in of.inputs], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        _, _, share = of.by_kernels(*(x.requires_grad_() for x in of.inputs))
    assert all(torch.equal(a, b) for a, b in zip(before, of.inputs)) and not share.requires_grad
    tiles = of.layout.num_video_tiles
    assert len(saved) and max(x.numel() for x in saved) < tiles * 32 * 32


def test_derivatives_that_kernels_do_not_have_are_refused():
    of = case(1, thw=(2, 3, 3))
    inputs = [x.requires_grad_() for x in of.inputs]
    out, _, _ = of.by_kernels(*inputs)
    first, = torch.autograd.grad((out**2).sum(), inputs[2], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    with forward_ad.dual_level(), pytest.raises(ValueError, match="k must have no tangent"):
        out, lse, q, k, v = (x.detach() for x in inputs)
        of.by_kernels(out, lse, q, forward_ad.make_dual(k, k), v)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["checkpoint", "compile"])
def test_gradients_under_checkpoints_and_the_compiler(wrap):
    of = case(2, thw=(2, 3, 4))
    torch._dynamo.reset()
    if wrap == "compile":
        run = torch.compile(of.by_kernels, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    else:
        def run(*inputs):
            return checkpoint(of.by_kernels, *inputs, use_reentrant=False)
    for got, expected in zip(of.gradients(run), of.gradients(of.by_kernels)):
        assert torch.equal(got, expected)


@pytest.mark.slow
def test_a_layer_through_the_kernels_has_the_gradients_of_the_layer_in_plain_torch(monkeypatch):
    """Traced into one graph too, where estimate and tail are operators."""
    layout = TokenLayout.video_text((2, 4, 5), 3)
    inputs = [torch.randn(1, heads, layout.length, 16, device=DEVICE) for heads in (2, 1, 1)]
    # A direction that stands out: between two that hardly differ rounding would say where halves are cut.
    inputs[1][..., 3] *= 4
    inputs = [x.requires_grad_() for x in inputs]
    weight = torch.randn(1, 2, layout.length, 16, device=DEVICE)
    # By "error" tiles whose estimates are rounded otherwise might be selected, which are about as good.
    config = SSTAConfig(tile_thw=(2, 2, 3), kernel_thw=(1, 1, 1), topk=2, compensation="linear", compensation_parts=2,
                        sampling_type="similarity")

    def layer(q, k, v):
        return ssta_attention(q, k, v, layout, config, impl="torch")

    def gradients(run):
        return torch.autograd.grad((run(*inputs) * weight).sum(), inputs)

    monkeypatch.setattr("ssta.compensation.kernels_run", lambda x: False)
    expected = gradients(layer)
    monkeypatch.setattr("ssta.compensation.kernels_run", lambda x: True)
    torch._dynamo.reset()
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        for got, wanted in zip(gradients(run), expected):
            assert (got - wanted).norm() <= 2**-6 * wanted.norm()


@gpu
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dim, dtype", [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16), (80, torch.bfloat16),
                                        (256, torch.bfloat16), (128, torch.float32)])
def test_gradients_of_a_large_layer(parts, dim, dtype):
    of = case(parts, 4, 2, dim, dtype, (11, 30, 45), (6, 8, 8), 300)
    got, expected = of.gradients(of.by_kernels), of.gradients(of.specified, torch.float64)
    assert_close(got, expected, 2**-6, tokens=128)
    assert all(torch.equal(a, b) for a, b in zip(got, of.gradients(of.by_kernels)))
