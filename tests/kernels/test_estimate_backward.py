"""Gradients of the estimate: those of its formulas by autograd in float64, with h, the damping, the mixture and the halves held still."""

import dataclasses
from functools import partial

import pytest
import torch
from backend_rows import DEVICE, GPU, rows
from estimate_cases import EstimateCase, Held, estimate_case, in_float64, no_worse
from launches import launches

from ssta.kernels import BlockLists
from ssta.kernels.eager import estimate as eager
from ssta.kernels.estimate import Estimate
from ssta.kernels.portable.estimate_backward import key_gradients, row_gradients

pytestmark = [pytest.mark.gpu] if GPU else []
gpu = pytest.mark.gpu
NAMES = "out", "lse", "dout", "dlse", "dq", "dk", "dv"
# As a canvas of 3 x 4 x 5 tokens cut into tiles of 2 x 3 x 3 has them, and text; one block more is empty, and one has one token.
LENGTHS = [18, 12, 0, 6, 4, 9, 1, 6, 3, 2, 3]
# Keys of other sequences.
FEW, MANY = [7, 10, 2, 0, 9, 11, 4], [5, 12, 0, 8, 9, 3, 1, 6, 10, 7, 2, 14, 6, 5, 3, 20]


@dataclasses.dataclass
class Case:
    """``inputs``: the exact part's out and lse, which may be anything, q, k and v. ``dout``: what arrives for the merged out."""

    of: EstimateCase
    blocks: BlockLists
    inputs: list
    dout: torch.Tensor
    estimates: Estimate

    def combined(self, row):
        """(merged out and lse, all that ``merge`` returns)."""
        out, lse = (x.clone() for x in self.inputs[:2])
        return out, lse, *self.of.merge(out, lse, self.blocks, self.estimates, row, True)

    def gradients(self, row="triton"):
        """By a row's steps."""
        exact, exact_lse, q, k, v = self.inputs
        out, lse, _, estimate_lse, bias, mixture = self.combined(row)
        of, found = self.of, self.estimates
        with of.budgeted():
            return of.backend(row).merge_backward(
                self.dout, exact, exact_lse, out, lse, estimate_lse, q, k, v, *of.shape, bias, mixture, found.log_count, found.order,
                found.k_mean, found.v_mean, of.scale)

    def head(self, number):
        """Of a key head, with its query heads."""
        heads, group = self.of.k.shape[1], self.of.q.shape[1] // self.of.k.shape[1]

        def part(x):
            return x[:, number * (x.shape[1] // heads):][:, :x.shape[1] // heads]

        estimates = {name: part(x) for name, x in vars(self.estimates).items() if isinstance(x, torch.Tensor)}
        q, k, v = (part(x) for x in (self.of.q, self.of.k, self.of.v))
        mask = part(self.blocks.to_mask().expand(-1, heads * group, -1, -1))
        return Case(dataclasses.replace(self.of, q=q, k=k, v=v), self.of.lists(mask), [part(x) for x in self.inputs], part(self.dout),
                    dataclasses.replace(self.estimates, **estimates))

    def formulas(self, *inputs, held=lambda x, *_: x):
        return self.of.formulas(*inputs, self.blocks, self.estimates, held)

    def by_autograd(self, dtype=torch.float64, **options):
        """Merged out and lse, and all gradients."""
        inputs = [x.detach().to(dtype).requires_grad_() for x in self.inputs]
        out, lse = self.formulas(*inputs, **options)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, self.dout.to(dtype), materialize_grads=True)]

    def delta_rounding(self, out, lse):
        """float64 ``[B, H, P]``: how far dlse is off on average where the merged ``out`` is rounded to what kernels hold. One rounding may
        by chance err little in the row whose share outweighs all others of its block."""
        units = torch.finfo(self.of.q.dtype).eps * out.abs().log2().floor().exp2()
        return (self.inputs[1].double() - lse).exp() * ((self.dout.double() * units).square().sum(-1) / 12).sqrt()

    def rounded(self):
        """In float64, where moments, means, weights and results are rounded to what holds them."""
        found = self.by_autograd(held=partial(Held.apply, self.of))
        return [self.of.rounded(x, like.dtype) for x, like in zip(found, (*self.inputs[:2], *self.inputs))]


def case(parts, heads=2, kv_heads=1, dim=16, dtype=torch.float32, lengths=LENGTHS, batch=1, nan=False, row="triton", kv_lengths=None):
    """Ragged blocks, the last not compensated; block 1 of head 0 lists everything, the rest a third. ``kv_lengths``: of keys with blocks of
    their own."""
    number, kv_number = len(lengths) - 1, len(kv_lengths or lengths) - 1
    of = estimate_case(lengths, number, dim=dim, heads=heads, kv_heads=kv_heads, batch=batch, parts=parts, dtype=dtype, device=DEVICE,
                   kv_lengths=kv_lengths, kv_number=kv_number if kv_lengths else None)
    # As projections leave them; h is above the cap in places.
    out = torch.randn_like(of.q)
    mask = torch.rand(batch, heads, number + 1, kv_number + 1, device=DEVICE) < 0.3
    mask[..., kv_number:] = mask[..., number:, :] = mask[:, 0, 1] = True
    if nan:
        of.k[0, 0, int(of.kv_offsets[5]) + 1, 3] = float("nan")
        mask[0, ..., 5] = False
    # Half of the softmax or so.
    lse = torch.randn(*out.shape[:3], device=DEVICE, dtype=of.q.dtype if dtype == torch.float64 else torch.float32) + number**0.5 / 2 + 2
    return Case(of, of.lists(mask), [out, lse, of.q, of.k, of.v], torch.randn_like(out), of.estimate(row))


def assert_as_exact(of, got, expected, reference, rounding=16 * 2**-23):
    """All of NAMES, or gradients alone: in no block an error of more than twice that of ``reference``, and half a unit in the last place of
    the result or such a ``rounding``."""
    for name, g, e, plain in zip(NAMES[-len(got):], got, expected[-len(got):], reference[-len(got):]):
        assert g.shape == e.shape and g.isfinite().all(), name
        off = (plain - e).abs()
        if name == "dlse":
            off = torch.maximum(off, of.delta_rounding(*expected[:2]))
        error, allowed, size = (of.of.by_block(x.reshape(*e.shape[:3], -1), name in ("dk", "dv")) for x in (g.double() - e, off, e))
        no_worse(name, error, allowed, max(rounding, torch.finfo(g.dtype).eps / 2) * torch.maximum(size, size.mean()))


def skip_head(case, head):
    useful = torch.ones(case.estimates.mass.shape[:2], dtype=torch.bool, device=case.estimates.mass.device)
    useful[:, head] = False
    case.estimates = dataclasses.replace(case.estimates, useful=useful)
    return case


def some_gradients_pass_unchanged(of, got, skipped):
    """Those of a head that does without, of a block that lists all, and of other blocks; nothing of them reaches q, k and v."""
    start, end, last = int(of.of.offsets[1]), int(of.of.offsets[2]), of.of.slots
    for at in ((slice(None), skipped), (slice(None), 0, slice(start, end)), (slice(None), slice(None), slice(last, None))):
        assert torch.equal(got[0][at], of.dout[at]) and (got[1][at] == 0).all() and (got[2][at] == 0).all()
    last = int(of.of.kv_offsets[of.of.kv_number])
    assert (got[3][:, :, last:] == 0).all() and (got[4][:, :, last:] == 0).all()


# The interpreter takes a second for each: there it is both parts, and one and two query heads to a key head.
GROUPS = [(1, 2, 2), (1, 4, 2), (2, 2, 1), (2, 4, 2)]
cases = partial(pytest.mark.parametrize, "parts, heads, kv_heads")


@cases(GROUPS)
@pytest.mark.parametrize("nan, kv_lengths", [(False, None), (True, None), (True, FEW), (False, MANY)], ids=["", "nan", "few", "many"])
def test_plain_torch_has_the_gradients_of_the_formulas(parts, heads, kv_heads, nan, kv_lengths):
    """To the roundings of a sum of 256 terms in float64. Of keys with the queries' blocks, and of others."""
    of = skip_head(case(parts, heads, kv_heads, dim=4, dtype=torch.float64, batch=2, nan=nan, row="torch", kv_lengths=kv_lengths), 1)
    assert (of.estimates.half_variance > 1).any() and (of.estimates.half_variance < 1).any()
    got, expected = of.gradients("torch"), of.by_autograd()
    assert_as_exact(of, [*of.combined("torch")[:2], *got], expected, expected, 256 * 2**-52)
    some_gradients_pass_unchanged(of, got, 1)


@cases(GROUPS if GPU else GROUPS[::3])
@pytest.mark.slow
def test_the_kernels_compute_the_formulas(parts, heads, kv_heads):
    """With second moments in float32: what remains of an error is float32's. One block holds NaN, and one head does without."""
    of = skip_head(case(parts, heads, kv_heads, batch=2, nan=True), 1)
    out, lse, q, k, v = (x.double() for x in of.inputs)
    estimates, exact = eager.estimate(q, k, v, *of.of.shape, of.of.scale, parts), (out.clone(), lse.clone())
    estimates = dataclasses.replace(in_float64(of.estimates), k_mean=estimates.k_mean, v_mean=estimates.v_mean, order=of.estimates.order)
    _, estimate_lse, bias2, mixture = eager.merge(out, lse, q, k, v, *of.of.shape, of.blocks.counts, of.blocks.indices, estimates,
                                                of.of.scale, True)
    covariances = eager._covariances(k, v, estimates.k_mean, estimates.v_mean, estimates.log_count, estimates.order,
                                     eager._Cut(of.of.shape[1], k.shape[2]))
    matrix = eager._matrices(covariances, mixture, q.shape[3])
    got = [of.dout.clone(), *(torch.zeros_like(x) for x in of.inputs[1:])]
    (dexact, dexact_lse, dq, dk, dv), (q_blocks, kv_blocks), bias2 = got, of.of.shape, bias2.float().contiguous()
    dout, *rows, q, k, v = [x.float() for x in (of.dout, *exact, out, lse, estimate_lse, q, k, v)]
    k_mean, v_mean, *products = [x.float().contiguous() for x in (estimates.k_mean, estimates.v_mean, matrix.flatten(3), mixture)]
    dcovariance = torch.empty(*k_mean.shape[:3], q.shape[3]**2, device=DEVICE)
    of_rows = row_gradients(dexact, dexact_lse, dq, dout, *rows, q, q_blocks, bias2, k_mean, v_mean, *products, dcovariance, of.of.scale)
    key_gradients(dk, dv, dout, q, k, v, q_blocks, kv_blocks, bias2, of_rows, of.estimates.log_count, of.estimates.order, k_mean, v_mean,
                  dcovariance, of.of.scale)
    assert_as_exact(of, got, of.by_autograd(), of.by_autograd(torch.float32))


@cases(GROUPS if GPU else GROUPS[::3])
@pytest.mark.slow
def test_gradients_are_those_of_the_formulas(parts, heads, kv_heads):
    of = skip_head(case(parts, heads, kv_heads, nan=True), 1)
    got = of.gradients()
    assert_as_exact(of, got, of.by_autograd(), of.rounded())
    nothing = slice(int(of.of.offsets[5]), int(of.of.offsets[6]))
    assert (got[3][0, 0, nothing] == 0).all() and (got[4][0, 0, nothing] == 0).all(), "the block that holds NaN"
    some_gradients_pass_unchanged(of, got, 1)


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_in_float16(parts):
    of = case(parts, dtype=torch.float16)
    assert_as_exact(of, of.gradients(), of.by_autograd(), of.rounded())


@pytest.mark.parametrize("parts, kv_lengths", [(1, FEW), pytest.param(2, MANY, marks=pytest.mark.slow)])
def test_gradients_of_keys_with_blocks_of_their_own(parts, kv_lengths):
    of = skip_head(case(parts, 4, 2, nan=True, kv_lengths=kv_lengths), 1)
    got = of.gradients()
    assert_as_exact(of, got, of.by_autograd(), of.rounded())
    some_gradients_pass_unchanged(of, got, 1)


both = pytest.mark.parametrize("row", ["torch", "triton"])
SHORT = [6, 12, 4, 3]


@both
def test_where_everything_is_listed_gradients_pass(row):
    of = case(1, lengths=SHORT, row=row)
    of.blocks = of.of.lists(torch.ones_like(of.blocks.to_mask()))
    dout, *others = of.gradients(row)
    assert torch.equal(dout, of.dout) and all((x == 0).all() for x in others)


def test_what_arrives_may_be_one_number_for_all_rows():
    of = case(1, lengths=SHORT)
    of.dout = torch.ones((), device=DEVICE).expand_as(of.inputs[0])
    assert_as_exact(of, of.gradients(), of.by_autograd(), of.rounded())


def test_the_same_inputs_give_the_same_bits():
    of = case(2)
    assert all(torch.equal(a, b) for a, b in zip(of.gradients(), of.gradients()))


@pytest.mark.parametrize("heads", [2, 4])
def test_heads_done_in_groups_have_the_bits_of_heads_one_by_one(heads):
    of = case(1, heads, 2, lengths=SHORT)
    of.of.budget = 0.0
    with launches() as seen:
        together = of.gradients()
    assert [kernel.fn.__name__ for kernel, *_ in seen].count("_estimate_rows_kernel") == 2
    alone = [of.head(number).gradients() for number in range(2)]
    assert all(torch.equal(a, torch.cat(b, 1)) for a, b in zip(together, zip(*alone)))


@both
def test_no_input_is_written_to_and_no_matrix_is_kept(row):
    of = case(1, dim=32, lengths=SHORT, row=row)
    before = [x.clone() for x in (*of.inputs, of.dout)]
    of.gradients(row)
    assert all(torch.equal(a, b) for a, b in zip(before, (*of.inputs, of.dout)))
    assert max(x.numel() for x in of.combined(row)[2:]) < of.of.number * 32 * 32


@gpu
@rows
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dim, dtype", [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16), (80, torch.bfloat16),
                                        (256, torch.bfloat16), (128, torch.float32)])
def test_gradients_of_a_large_layer(parts, dim, dtype, row):
    of = case(parts, 4, 2, dim, dtype, [384, 384, 384, 240, 384, 320, 192, 100] * 6 + [300], row=row)
    got = of.gradients(row)
    assert_as_exact(of, got, of.by_autograd(), of.rounded())
    assert all(torch.equal(a, b) for a, b in zip(got, of.gradients(row)))
