"""Gradients of the tail by kernels are those of the specification in float64 by autograd, with the same estimates held still."""

import dataclasses

import pytest
import torch
from torch.autograd.functional import jvp
from torch.utils.checkpoint import checkpoint

from ssta import SSTAConfig, TokenLayout, tile_layout
from ssta.compensation import compensate, estimate_tiles
from ssta.kernels import BlockLists
from ssta.kernels.tail import estimate_blocks
from ssta.kernels.tail_op import add_tail_with_gradients

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Without a GPU in Triton's interpreter.
everywhere = pytest.mark.gpu if GPU else lambda test: test
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
        return add_tail_with_gradients(*inputs, self.layout.offsets, self.layout.num_video_tiles, self.layout.max_tile_length, self.blocks,
                                       self.estimates, scale=self.scale)

    def specified(self, *inputs):
        return compensate(*inputs, self.layout, self.blocks, in_torch(self.estimates, self.layout), self.scale)

    def gradients(self, run, dtype=None, grads=None):
        inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in self.inputs]
        results = run(*inputs)[:2]
        arriving = [g if g is None else g.to(x.dtype) for g, x in zip(grads or self.grads, results)]
        pairs = [(x, g) for x, g in zip(results, arriving) if g is not None]
        return torch.autograd.grad([x for x, _ in pairs], inputs, [g for _, g in pairs])


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


def case(kind, parts, heads=2, kv_heads=1, dim=16, dtype=torch.float32, thw=(3, 4, 5), tile=(2, 3, 3),
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
    estimates = estimate_blocks(q, k, v, layout.offsets, tiles, layout.max_tile_length, scale=scale, parts=parts, linear=kind == "linear",
                                with_mass=True)
    return Case(layout, blocks, [out, lse, q, k, v], [torch.randn_like(out), torch.randn_like(lse)], estimates, scale)


def errors(got, expected):
    return {name: float((g.double() - e).norm() / e.norm()) for name, g, e in zip(NAMES, got, expected)}


def assert_close(got, expected, share, tokens=16):
    """Of the norm of a whole gradient, and of every run of 16 tokens of a head, measured by the typical one."""
    for name, g, e in zip(NAMES, got, expected):
        assert g.shape == e.shape and g.isfinite().all(), name
        difference, e = (x.unsqueeze(-1) if x.dim() == 3 else x for x in (g.double() - e, e))
        assert difference.norm() <= share * e.norm(), f"{name} is off by {float(difference.norm() / e.norm()):.2e}"
        wrong, size = (torch.stack([run.norm(dim=(2, 3)) for run in x.split(tokens, 2)]) for x in (difference, e))
        assert (wrong <= 4 * share * torch.maximum(size, size.mean())).all(), name
