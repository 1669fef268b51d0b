"""Cases of the estimate, and its formulas in loops, differentiable by autograd."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch
from backend_rows import backend_of

from ssta.kernels import Backend, BlockLists, block_sparse_attention
from ssta.kernels.block_forms import per_query_head
from ssta.kernels.eager import estimate as eager
from ssta.kernels.estimate import Estimate


@dataclass
class EstimateCase:
    """q, k and v in the order of blocks of ``lengths`` tokens, of which the first ``number`` are compensated; ``parts`` as in
    Estimate. ``kv_lengths``, ``kv_number``: of k and v where they have blocks of their own. ``budget``: of kernels for heads at
    once, their own where None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: list
    number: int
    parts: int
    kv_lengths: list | None = None
    kv_number: int | None = None
    budget: float | None = None

    def __post_init__(self):
        if self.kv_lengths is None:
            self.kv_lengths, self.kv_number = self.lengths, self.number
        self.offsets, self.kv_offsets = (torch.tensor([0, *of], device=self.q.device).cumsum(0).int()
                                         for of in (self.lengths, self.kv_lengths))
        self.longest, self.slots = max(self.lengths[:self.number]), sum(self.lengths[:self.number])
        self.scale = 1.3 * self.q.shape[-1] ** -0.5

    @property
    def shape(self):
        """What follows q, k and v in calls."""
        return (self.offsets, self.number, self.longest), (self.kv_offsets, self.kv_number, max(self.kv_lengths[:self.kv_number]))

    def double(self):
        return EstimateCase(*(x.double() for x in (self.q, self.k, self.v)), self.lengths, self.number, self.parts, self.kv_lengths,
                        self.kv_number)

    def lists(self, mask):
        """Of a mask ``[B|1, H|Hkv|1, T, T']``."""
        return BlockLists.from_mask(mask, self.offsets, self.kv_offsets, max_q_length=max(self.lengths), max_kv_length=max(self.kv_lengths))

    def some_blocks(self, density=0.4):
        """Lists of random blocks, of each row's own and of all that are not compensated."""
        shape = len(self.lengths), len(self.kv_lengths)
        mask = torch.rand(*self.q.shape[:2], *shape, device=self.q.device) < density
        mask = mask | torch.eye(*shape, dtype=torch.bool, device=mask.device)
        mask[..., self.kv_number:] = True
        mask[..., self.number:, :] = True
        return self.lists(mask)

    def exact(self, blocks):
        """(out, lse) of attention to the listed blocks, in q's dtype and float32, and in float64."""
        out, lse = block_sparse_attention(*(x.double() for x in (self.q, self.k, self.v)), blocks, scale=self.scale, return_lse=True,
                                          impl="reference")
        return (out.to(self.q.dtype), lse.float()), (out, lse)

    def backend(self, row="triton") -> Backend:
        """Whose steps are those of a row of the backend table."""
        return backend_of(row, self.q.dtype, self.q.shape[3])

    def budgeted(self):
        """In it kernels have the case's budget."""
        return nullcontext() if self.budget is None else patch("ssta.kernels.portable.estimate.BUDGET", self.budget)

    def estimate(self, row="triton", **options):
        with self.budgeted():
            return self.backend(row).estimate(self.q, self.k, self.v, *self.shape, self.scale, self.parts, **options)

    def add(self, out, lse, blocks, estimates, row="triton"):
        """(out, lse, share); what is given stays as it is."""
        out, lse = out.clone(), lse.clone()
        shares, *_ = self.merge(out, lse, blocks, estimates, row)
        return out, lse, shares.sum(-1)

    def merge(self, out, lse, blocks, estimates, row="triton", keep=False):
        """In place of out and lse."""
        with self.budgeted():
            return self.backend(row).merge(out, lse, self.q, self.k, self.v, *self.shape, blocks.counts, blocks.indices, estimates,
                                             self.scale, keep)

    def specified_estimates(self, cut=None):
        """In plain torch, of q, k and v in float64; blocks are cut in two as those of the estimates ``cut``, where that is given: of
        rounded numbers other tokens may be in between."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        if cut is None or cut.order is None:
            return eager.estimate(q, k, v, *self.shape, self.scale, self.parts)
        with patch.object(eager._Cut, "principal_order", lambda *_: (cut.order, self.lower(cut))):
            return eager.estimate(q, k, v, *self.shape, self.scale, self.parts)

    @staticmethod
    def lower(estimates):
        """int64 ``[B, Hkv, K]``: how many tokens the first of a block's two units has, 0 where none is estimated."""
        return estimates.log_count[..., ::2].exp().round().long()

    def specified(self, out, lse, blocks, estimates):
        """(out, lse, share) in plain torch, all in float64."""
        out, lse = out.double(), lse.double()
        shares, _, _, _ = eager.merge(out, lse, *(x.double() for x in (self.q, self.k, self.v)), *self.shape, blocks.counts,
                                       blocks.indices, in_float64(estimates), self.scale, False)
        return out, lse, shares.sum(-1)

    def rounded_estimates(self, estimates):
        """(half_variance, mass) in float64, by the formulas, where moments, means and results are rounded to what holds them;
        ``estimates``: the same unrounded."""
        q, k = self.q.double(), self.k.double()
        places, kv_places = eager._Cut(self.shape[0], q.shape[2]), eager._Cut(self.shape[1], k.shape[2])
        members, counts = kv_places.members(estimates.log_count)
        spread = kv_places.deviations(k, estimates.k_mean, estimates.order, members)
        variance = self.rounded((spread.mT @ spread / counts[..., None, None]).flatten(2, 3), torch.bfloat16)
        sampled, counted = places.sample()
        queries = places.cut(q).gather(3, sampled[..., None].expand(*q.shape[:2], -1, -1, q.shape[3]))
        trusted = queries.isfinite().all(-1, keepdim=True) & counted[..., None]
        queries, number = queries.masked_fill(~trusted, 0), counted.sum(1).clamp(min=1)[:, None]
        moments = self.rounded(0.5 * self.scale**2 * queries.mT @ queries / number[..., None], torch.bfloat16)
        half_variance = moments.flatten(3) @ per_query_head(variance, q.shape[1]).flatten(3).mT
        k_mean = per_query_head(self.rounded(estimates.k_mean, self.q.dtype), q.shape[1])
        logits = self.scale * queries @ k_mean.mT[:, :, None] + eager._bias(estimates.log_count, half_variance)[..., None, :]
        mass = (logits.softmax(-1).nan_to_num(0) * trusted).sum(3) / number
        return self.rounded(half_variance, torch.bfloat16), self.rounded(mass, torch.bfloat16)

    def rounded_out(self, out, lse, blocks, estimates):
        """out in float64, by the formulas, where deviations, matrices, weights and the result are rounded to what multiplies them."""
        dtype, estimates, heads = self.q.dtype, in_float64(estimates), self.q.shape[1]
        q, k, v, out, lse = (x.double() for x in (self.q, self.k, self.v, out, lse))
        places, kv_places = eager._Cut(self.shape[0], q.shape[2]), eager._Cut(self.shape[1], k.shape[2])
        members, counts = kv_places.members(estimates.log_count)
        k_spread, v_spread = (self.rounded(kv_places.deviations(x, mean, estimates.order, members), dtype)
                              for x, mean in ((k, estimates.k_mean), (v, estimates.v_mean)))
        covariance = self.rounded((k_spread.mT @ v_spread / counts[..., None, None]).flatten(2, 3), torch.bfloat16)
        _, estimate_lse, bias, mixture = eager.merge(out.clone(), lse.clone(), q, k, v, *self.shape, blocks.counts, blocks.indices,
                                                     estimates, self.scale, True)
        mixture = self.rounded(mixture, torch.bfloat16)
        matrix = self.rounded((mixture @ per_query_head(covariance.flatten(3), heads)).unflatten(3, covariance.shape[3:]), torch.bfloat16)
        weights, _ = eager._weights(q, estimates.k_mean, bias * eager.LN2, places, self.scale)
        # As the largest is 1, and with their own sum.
        weights = weights / weights.amax(-1, keepdim=True).clamp(min=1e-30)
        estimated = self.rounded(weights, dtype) @ per_query_head(estimates.v_mean, heads) / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        queries = q if dtype == torch.float32 else self.rounded(q, torch.bfloat16)
        estimated = estimated + self.scale * places.join(places.cut(queries) @ matrix)
        exact, of_estimate, _ = eager._shares(lse, estimate_lse)
        merged = self.rounded(exact[..., None] * out + of_estimate[..., None] * estimated, dtype)
        return torch.where(estimate_lse.isneginf()[..., None], out, merged)

    def rounded(self, x, dtype):
        """x in float64, to ``dtype``; Triton's interpreter rounds to bfloat16 towards zero."""
        if dtype == torch.bfloat16 and not x.is_cuda:
            return (x.float().contiguous().view(torch.int32) & -65536).view(torch.float32).double()
        return x.to(dtype).double()

    def by_block(self, x, of_keys=False):
        """Root mean squares ``[B, H, N]`` of x ``[B, H, P, D]`` in compensated blocks, not counting what is NaN."""
        blocks = eager._Cut(self.shape[of_keys], x.shape[2])
        return (blocks.cut(x.nan_to_num(0)).flatten(3).square().sum(-1) / (blocks.lengths.clamp(min=1) * x.shape[3])).sqrt()

    def units(self, estimates, batch, head):
        """The tokens of each unit of a key/value head."""
        bounds = self.kv_offsets.tolist()
        order = torch.arange(bounds[-1], device=self.q.device) if estimates.order is None else estimates.order[batch, head].long()
        for block, (start, end) in enumerate(zip(bounds[:self.kv_number], bounds[1:])):
            cuts = [start + int(self.lower(estimates)[batch, head, block])] if self.parts == 2 else []
            for first, last in zip([start, *cuts], [*cuts, end]):
                yield order[first:last]

    def formulas(self, out, lse, q, k, v, blocks, estimates, held=lambda x, *_: x):
        """(out, lse), head by head and block by block; h, mass and order are those of ``estimates``, means and covariances are not.
        ``held(x, dtype, of_gradient)``: x as kernels hold it and its gradient, None where that is float32."""
        outs, lses, scale, dtype = out.clone(), lse.clone(), self.scale, self.q.dtype
        # What second moments, which are bfloat16, are multiplied with.
        moment = torch.float32 if dtype == torch.float32 else torch.bfloat16
        bounds, kept = self.offsets.tolist(), blocks.to_mask().expand(*q.shape[:2], -1, -1)
        for b, head in np.ndindex(*q.shape[:2]):
            kv_head = head * k.shape[1] // q.shape[1]
            sound = estimates.log_count[b, kv_head] > -torch.inf
            keys, values = k[b, kv_head], v[b, kv_head]
            tokens = [t if good else t[:0] for t, good in zip(self.units(estimates, b, kv_head), sound)]
            means = [(keys[t].mean(0), values[t].mean(0)) if len(t) else (keys[0] * 0, values[0] * 0) for t in tokens]
            k_means, v_means = (held(torch.stack(x), dtype, None) for x in zip(*means))
            spreads = [(held(keys[t] - km, moment, None), held(values[t] - vm, moment, None)) for t, (km, vm) in zip(tokens, means)]
            covariances = held(torch.stack([k.T @ v / max(len(k), 1) for k, v in spreads]), torch.bfloat16, torch.bfloat16)
            counts = torch.tensor([float(len(t)) for t in tokens], device=q.device, dtype=q.dtype)
            for block in range(self.number):
                rows = slice(bounds[block], bounds[block + 1])
                left = ~kept[b, head, block, :self.kv_number].repeat_interleave(self.parts) & sound
                if not estimates.useful[b, head] or not left.any() or rows.start == rows.stop:
                    continue
                h, mass = (x[b, head, block, left].to(q.dtype) for x in (estimates.half_variance, estimates.mass))
                logits = held(scale * q[b, head, rows] @ k_means[left].T + counts[left].log() + h.clamp(max=1), None, dtype)
                # bfloat16 may round all of a row's mass to 0.
                mixture = held(mass / mass.sum().clamp(min=1e-30) * h.clamp(min=1).rsqrt(), torch.bfloat16, None)
                matrix = held(torch.einsum("u, uij -> ij", mixture, covariances[left]), torch.bfloat16, torch.bfloat16)
                estimated = held(logits.softmax(1), dtype, None) @ v_means[left]
                estimated = estimated + scale * held(q[b, head, rows], moment, None) @ matrix
                both = torch.stack((lse[b, head, rows], logits.logsumexp(1)))
                outs[b, head, rows] = Merged.apply(both, out[b, head, rows], estimated, lambda x: held(x, dtype, None))
                lses[b, head, rows] = both.logsumexp(0)
        return outs, lses


class Merged(torch.autograd.Function):
    """out and the estimate, weighted by their lse, ``both``; the backward has the result as kernels hold it."""

    @staticmethod
    def forward(ctx, both, out, estimated, held):
        shares = both.softmax(0)
        merged = shares[0, :, None] * out + shares[1, :, None] * estimated
        ctx.save_for_backward(shares, out, estimated, held(merged))
        return merged

    @staticmethod
    def backward(ctx, gradient):
        shares, out, estimated, merged = ctx.saved_tensors
        delta = (gradient * merged).sum(-1)
        of_both = torch.stack([share * ((gradient * x).sum(-1) - delta) for share, x in zip(shares, (out, estimated))])
        return of_both, shares[0, :, None] * gradient, shares[1, :, None] * gradient, None


class Held(torch.autograd.Function):
    """Of a case x in float64, rounded to a dtype, and its gradient, to another; None: as it is."""

    @staticmethod
    def forward(ctx, of, x, dtype, of_gradient):
        ctx.of, ctx.to = of, of_gradient
        return x.clone() if dtype is None else of.rounded(x, dtype)

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient if ctx.to is None else ctx.of.rounded(gradient, ctx.to), None, None


def estimate_case(lengths, number, *, dim=16, heads=2, kv_heads=1, batch=1, parts=1, dtype=torch.float16, device="cpu", spread=1.0,
              kv_lengths=None, kv_number=None):
    """Blocks whose keys and values have something in common each, and go together; heads of q and v lie closer than tokens. Queries of some
    blocks are long, so that h is above its cap there, and under it for others."""
    def block_of(lengths):
        return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)

    def random(lengths, heads, common, own):
        middle = torch.randn(batch, len(lengths), heads, dim, device=device).index_select(1, block_of(lengths))
        return common * middle + own * torch.randn(batch, sum(lengths), heads, dim, device=device)

    of_keys = kv_lengths or lengths
    q, k, v = random(lengths, heads, 0.7, 0.7), random(of_keys, kv_heads, 0.8, 0.7 * spread), random(of_keys, kv_heads, 0.7, 0.5)
    v = v + 0.5 * k.flip(-1)
    q = q * torch.tensor([0.7, 1.6, 2.4], device=device)[block_of(lengths) % 3, None, None]
    return EstimateCase(q.to(dtype).transpose(1, 2), k.to(dtype).transpose(1, 2).contiguous(), v.to(dtype).transpose(1, 2), lengths, number,
                    parts, kv_lengths, kv_number)


def same_estimates(case: EstimateCase, got: Estimate, expected: Estimate) -> None:
    """Within twice what rounding costs the formulas, ``rounded_estimates``."""
    torch.testing.assert_close(got.log_count.double(), expected.log_count, rtol=0, atol=1e-6)
    for name, rounded in zip(("half_variance", "mass"), case.rounded_estimates(expected)):
        wanted = getattr(expected, name)
        no_worse(name, *((x.double() - wanted).square().mean(-1).sqrt() for x in (getattr(got, name), rounded)), 1e-6)


def no_worse(name, error, reference, least):
    """Of errors by block ``[B, H, N]``: none is more than twice that of a reference in the same dtype, or twice what that is on average,
    and ``least``."""
    allowed = 2 * torch.maximum(reference, reference.mean()) + least
    assert (error <= allowed).all(), f"{name} is off by {float((error / allowed).max()) * 2:.2f} times a reference's error"


def in_float64(estimates: Estimate) -> Estimate:
    """The same numbers, as plain torch takes them."""
    names = "log_count", "half_variance", "mass", "k_mean", "v_mean"
    return replace(estimates, covariances=None, **{name: getattr(estimates, name).double() for name in names})
