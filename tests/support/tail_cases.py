"""Cases of the tail's kernels, and the specification of what they compute: ssta.compensation's plain torch in float64, over any blocks."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl

from ssta import compensation
from ssta.kernels import BlockEstimates, BlockLists, block_sparse_attention


class Blocks(SimpleNamespace):
    """What the specification asks a TileLayout for; one to a case, as it keeps what follows from each."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


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
        device = self.q.device
        self.offsets = torch.tensor([0, *self.lengths], device=device).cumsum(0).int()
        self.longest, self.slots = max(self.lengths[:self.number]), sum(self.lengths[:self.number])
        self.scale = 1.3 * self.q.shape[-1] ** -0.5
        self.layout = Blocks(num_video_tiles=self.number, offsets=self.offsets, lengths=self.offsets.diff(), device=device,
                             video=[SimpleNamespace(longest_tile=self.longest, num_slots=self.slots)])

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
        from ssta.kernels.tail import estimate_blocks

        return estimate_blocks(self.q if q is None else q, self.k, self.v, self.offsets, self.number, self.longest, scale=self.scale,
                               parts=self.parts)

    def add(self, out, lse, blocks, estimates, owned=False):
        from ssta.kernels.tail import add_tail

        return add_tail(out, lse, self.q, self.k, self.v, self.offsets, self.number, self.longest, blocks, estimates, scale=self.scale,
                        owned=owned)

    def specified_estimates(self, monkeypatch, order=None):
        """In float64; ``order``, int32 [B, Hkv, P] as the kernels give it, is taken instead of one of its own, in which ties of rounded
        numbers may differ."""
        config = SimpleNamespace(compensation_parts=self.parts)
        with monkeypatch.context() as patch:
            if order is not None:
                patch.setattr(compensation, "_principal_order", lambda k_tiles, tiles: self.places(order))
            return compensation._estimate_in_torch(*(x.double() for x in (self.q, self.k, self.v)), self.layout, config, self.scale)

    def places(self, order):
        """An order of the kernels, int32 [B, Hkv, P], as the specification has it: int64 [B, Hkv, N, L]."""
        tiles = compensation._Tiles(self.layout)
        cut = tiles.cut(order[..., None].long())[..., 0] - self.offsets[:self.number, None]
        return torch.where(tiles.valid, cut, torch.arange(tiles.longest, device=cut.device))

    def specified(self, out, lse, blocks, estimates):
        """(out, lse, share) in float64, of float64 out and lse and specified estimates."""
        return compensation._compensate_in_torch(out, lse, *(x.double() for x in (self.q, self.k, self.v)), self.layout, blocks, estimates,
                                                 self.scale)


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
