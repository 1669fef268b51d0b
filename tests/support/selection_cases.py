"""Layers by their arguments; and calls of the selection, drawn at random, in the library's and in the oracle's form."""

from dataclasses import dataclass, field

import ssta_oracle as oracle
import torch
from hypothesis import strategies as st

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid, tile_layout
from ssta.config import in_effect
from ssta.inputs import described
from ssta.layer import prepared

PADDINGS = ("none", "zero", "repeat")


def layer_of(q, k, tokens, config, *, kv_tokens=None, scale=None, impl="auto", recorded=False, text_mask=None):
    """The layer that attends to such tensors."""
    spec = described(q, k, k, tokens, config, kv_layout=kv_tokens, text_mask=text_mask, scale=scale, impl=impl)
    return prepared(spec._replace(recorded=recorded))


def selected(q, k, tokens, config, text_mask=None, **options):
    """The selection of a layer."""
    layer = layer_of(q, k, tokens, config, text_mask=text_mask, **options)
    tiled = layer.gather(q, k, k)
    return layer.select(tiled, layer.estimate(tiled, None) if layer.estimates else None, layer.left(text_mask))


@dataclass(frozen=True)
class Case:
    """A call of the library and of the oracle. valid: for each batch element the valid tokens of each dense run, or None."""

    parts: list
    config: SSTAConfig
    q: torch.Tensor = field(repr=False)
    k: torch.Tensor = field(repr=False)
    valid: list | None

    @property
    def tokens(self):
        return TokenLayout(tuple(DenseRun(part) if isinstance(part, int) else VideoGrid(*part) for part in self.parts))

    @property
    def text_mask(self):
        if self.valid is None:
            return None
        runs = [part for part in self.parts if isinstance(part, int)]
        rows = [[i < n for n, run in zip(valid, runs) for i in range(run)] for valid in self.valid]
        return torch.tensor(rows, dtype=torch.bool)

    def layout(self, device="cpu"):
        return tile_layout(self.tokens, self.config.tile_thw, self.config.pad_type, device)

    def select(self, device="cpu", impl="auto"):
        mask = self.text_mask
        return selected(self.q.to(device), self.k.to(device), self.tokens, self.config, None if mask is None else mask.to(device),
                        impl=impl).blocks

    def expected(self):
        return oracle.select(self.q, self.k, self.parts, self.config, self.valid)


PARTS = st.sampled_from([
    [(3, 5, 4), 7], [(2, 4, 4)], [(1, 6, 7), 3], [9, (2, 3, 5)], [(2, 3, 3), 5, (1, 4, 3), 11], [(5, 2, 2), (2, 3, 2)],
    [3, (1, 1, 2), 8], [10], [(4, 4, 4), 17]])
TILES = st.sampled_from([(2, 2, 2), (1, 3, 2), (3, 2, 4), (6, 8, 8)])


@st.composite
def cases(draw, head_dim=8, dtypes=(torch.float32, torch.bfloat16, torch.float64)):
    parts = draw(PARTS)
    sampling = draw(st.sampled_from(("similarity", "importance")))
    threshold = draw(st.sampled_from((0.0, 0.3, 0.9))) if sampling == "similarity" else 0.0
    budget = dict(topk=draw(st.integers(1, 20)), sparse_type=draw(st.sampled_from(("sta", "block_attn", "moba", "ssta"))))
    if threshold == 0 and budget["sparse_type"] != "sta" and draw(st.booleans()):
        budget = dict(sparse_type=budget["sparse_type"], density=draw(st.sampled_from((0.01, 0.16, 0.3, 0.55, 0.999, 1.0))))
    tile, window = draw(TILES), draw(st.tuples(*[st.integers(1, 3)] * 3))
    window, topk, threshold = in_effect(window, budget.get("topk"), threshold, budget["sparse_type"])
    config = SSTAConfig(
        tile_thw=tile, kernel_thw=window, threshold=threshold, **budget | dict(topk=topk),
        lambda_=draw(st.sampled_from((0.0, 0.7, 1.0))), sampling_type=sampling, pad_type=draw(st.sampled_from(PADDINGS)),
        mask_share_within_head=draw(st.booleans()), adaptive_pool=draw(st.sampled_from((None, (2, 2, 2), (1, 2, 3), (5, 1, 1)))))
    kv_heads, group = draw(st.sampled_from(((2, 2), (1, 1), (2, 1), (1, 2))))
    length = sum(part if isinstance(part, int) else part[0] * part[1] * part[2] for part in parts)
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    q, k = (torch.randn(2, heads, length, head_dim, generator=generator, dtype=torch.float64).to(dtype)
            for heads in (kv_heads * group, kv_heads))
    # Small scores spread their softmax over many tiles, large ones put it into one.
    q = q * draw(st.sampled_from((1.0, 0.02)))
    runs = [part for part in parts if isinstance(part, int)]
    valid = [[draw(st.integers(0, run)) for run in runs] for _ in range(2)] if draw(st.booleans()) else None
    return Case(parts, config, q, k, valid)
