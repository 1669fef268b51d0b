"""Cases of the tail, and its formulas in loops, differentiable by autograd."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton.language as tl

from ssta.kernels import BlockEstimates, BlockLists, add_tail, block_sparse_attention
from ssta.kernels.eager import tail as eager
from ssta.kernels.portable import tail as portable


@dataclass
class TailCase:
    """q, k and v in the order of blocks of ``lengths`` tokens, of which the first ``number`` are compensated; ``parts`` as in
    BlockEstimates."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: list
    number: int
    parts: int

    def __post_init__(self):
        self.offsets = torch.tensor([0, *self.lengths], device=self.q.device).cumsum(0).int()
        self.longest, self.slots = max(self.lengths[:self.number]), sum(self.lengths[:self.number])
        self.scale = 1.3 * self.q.shape[-1] ** -0.5

    @property
    def shape(self):
        """What follows q, k and v in calls."""
        return self.offsets, self.number, self.longest

    def double(self):
        return TailCase(*(x.double() for x in (self.q, self.k, self.v)), self.lengths, self.number, self.parts)

    def lists(self, mask):
        """Of a mask ``[B|1, H|Hkv|1, T, T]``."""
        return BlockLists.from_mask(mask, self.offsets, self.offsets, max_q_length=max(self.lengths), max_kv_length=max(self.lengths))

    def some_blocks(self, density=0.4):
        """Lists of random blocks, of each row's own and of all that are not compensated."""
        number = len(self.lengths)
        mask = torch.rand(*self.q.shape[:2], number, number, device=self.q.device) < density
        mask = mask | torch.eye(number, dtype=torch.bool, device=mask.device)
        mask[..., self.number:] = True
        mask[..., self.number:, :] = True
        return self.lists(mask)

    def exact(self, blocks):
        """(out, lse) of attention to the listed blocks, in q's dtype and float32, and in float64."""
        out, lse = block_sparse_attention(*(x.double() for x in (self.q, self.k, self.v)), blocks, scale=self.scale, return_lse=True,
                                          impl="reference")
        return (out.to(self.q.dtype), lse.float()), (out, lse)

    def estimate(self, q=None):
        """By Triton's kernels."""
        return portable.estimate(self.q if q is None else q, self.k, self.v, *self.shape, self.scale, self.parts)

    def add(self, out, lse, blocks, estimates, owned=False):
        """By Triton's kernels: (out, lse, share)."""
        return add_tail(out, lse, self.q, self.k, self.v, *self.shape, blocks, estimates, scale=self.scale, owned=owned, kernels=True)

    def specified_estimates(self, order=None):
        """In plain torch, of q, k and v in float64; ``order`` is taken instead of one of its own, in which ties of rounded numbers may
        differ."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        if order is None:
            return eager.estimate(q, k, v, *self.shape, self.scale, self.parts)
        with patch.object(eager._Blocks, "principal_order", lambda *_: order):
            return eager.estimate(q, k, v, *self.shape, self.scale, self.parts)

    def specified(self, out, lse, blocks, estimates):
        """(out, lse, share) in plain torch, of float64 out and lse and specified estimates."""
        out, lse = out.clone(), lse.clone()
        share, _, _, _ = eager.combine(out, lse, *(x.double() for x in (self.q, self.k, self.v)), *self.shape, blocks.counts,
                                       blocks.indices, estimates, self.scale, False)
        return out, lse, share

    def units(self, estimates, batch, head):
        """The tokens of each unit of a key/value head."""
        bounds = self.offsets.tolist()
        order = torch.arange(bounds[-1], device=self.q.device) if estimates.order is None else estimates.order[batch, head].long()
        for start, end in zip(bounds[:self.number], bounds[1:]):
            for part in range(self.parts):
                yield order[start + (end - start) * part // self.parts:start + (end - start) * (part + 1) // self.parts]

    def formulas(self, out, lse, q, k, v, blocks, estimates):
        """(out, lse), head by head and block by block; h, mass and order are those of ``estimates``, means and covariances are not."""
        outs, lses, scale = out.clone(), lse.clone(), self.scale
        bounds, kept = self.offsets.tolist(), blocks.to_mask().expand(*q.shape[:2], -1, -1)
        for b, head in np.ndindex(*q.shape[:2]):
            kv_head = head * k.shape[1] // q.shape[1]
            sound = estimates.log_count[b, kv_head] > -torch.inf
            keys, values = k[b, kv_head], v[b, kv_head]
            tokens = [t if good else t[:0] for t, good in zip(self.units(estimates, b, kv_head), sound)]
            means = [(keys[t].mean(0), values[t].mean(0)) if len(t) else (keys[0] * 0, values[0] * 0) for t in tokens]
            k_means, v_means = (torch.stack(x) for x in zip(*means))
            covariances = torch.stack([(keys[t] - km).T @ (values[t] - vm) / max(len(t), 1) for t, (km, vm) in zip(tokens, means)])
            counts = torch.tensor([float(len(t)) for t in tokens], device=q.device, dtype=q.dtype)
            for block in range(self.number):
                rows = slice(bounds[block], bounds[block + 1])
                left = ~kept[b, head, block, :self.number].repeat_interleave(self.parts) & sound
                if not estimates.useful[b, head] or not left.any() or rows.start == rows.stop:
                    continue
                h, mass = (x[b, head, block, left].to(q.dtype) for x in (estimates.half_variance, estimates.mass))
                logits = scale * q[b, head, rows] @ k_means[left].T + counts[left].log() + h.clamp(max=1)
                mixture = mass / mass.sum() * (1 / h).clamp(max=1).sqrt()
                matrix = torch.einsum("u, uij -> ij", mixture, covariances[left])
                tail = logits.softmax(1) @ v_means[left] + scale * q[b, head, rows] @ matrix
                both = torch.stack((lse[b, head, rows], logits.logsumexp(1)))
                exact, of_tail = both.softmax(0)[..., None]
                outs[b, head, rows] = exact * out[b, head, rows] + of_tail * tail
                lses[b, head, rows] = both.logsumexp(0)
        return outs, lses


def tail_case(lengths, number, *, dim=16, heads=2, kv_heads=1, batch=1, parts=1, dtype=torch.float16, device="cpu", spread=1.0):
    """Blocks whose keys and values have something in common each, and go together; heads of q and v lie closer than tokens."""
    tokens = sum(lengths)
    block = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)

    def random(heads, common, own):
        middle = torch.randn(batch, len(lengths), heads, dim, device=device).index_select(1, block)
        return common * middle + own * torch.randn(batch, tokens, heads, dim, device=device)

    q, k, v = random(heads, 0.7, 0.7), random(kv_heads, 0.8, 0.7 * spread), random(kv_heads, 0.7, 0.5)
    v = v + 0.5 * k.flip(-1)
    return TailCase(q.to(dtype).transpose(1, 2), k.to(dtype).transpose(1, 2).contiguous(), v.to(dtype).transpose(1, 2), lengths, number,
                    parts)


def same_estimates(case: TailCase, got: BlockEstimates, expected: BlockEstimates) -> None:
    """Within what the rounding of matrices to bfloat16 and of means to q's dtype costs."""
    torch.testing.assert_close(got.log_count.double(), expected.log_count, rtol=0, atol=1e-6)
    # Products of entries that were rounded three times each; Triton's interpreter rounds to bfloat16 towards zero.
    bound = (2**-7 if case.q.is_cuda else 2**-6) * expected.half_variance.abs().amax().item() + 1e-6
    torch.testing.assert_close(got.half_variance.double(), expected.half_variance, rtol=0, atol=bound)
    torch.testing.assert_close(got.mass.double(), expected.mass, rtol=3e-2, atol=1e-4)


def in_float64(estimates: BlockEstimates) -> BlockEstimates:
    """The same numbers, as plain torch takes them."""
    names = "log_count", "half_variance", "mass", "k_mean", "v_mean"
    return replace(estimates, covariances=None, **{name: getattr(estimates, name).double() for name in names})


@pytest.fixture
def bfloat16_products(monkeypatch):
    """Triton's interpreter keeps bfloat16 as its bits and multiplies these; here it multiplies the numbers."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def values(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: multiply(self, values(a), values(b), *rest))
