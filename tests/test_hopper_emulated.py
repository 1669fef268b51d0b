"""The Hopper forward kernel on a CPU, through the emulator: its logic and its barriers, against the reference."""

import pytest
import torch
from hopper_emulator import hopper_forward, module
from test_kernels import INTERPRETED, inputs, patterns, ragged

from ssta.kernels import BlockLists
from ssta.kernels.reference import reference_attention

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU, so Triton's interpreter, which cuts the lists here, is off")


def assert_right(q, k, v, blocks, causal, late):
    out, lse = hopper_forward(q, k, v, blocks, 0.125, causal, late=late)
    exact, exact_lse = reference_attention(q.double(), k.double(), v.double(), blocks, 0.125, causal)
    torch.testing.assert_close(out.double(), exact, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", patterns("cpu"))
def test_small_blocks(name, causal, late):
    blocks, heads, kv_heads, q_len, kv_len = patterns("cpu")[name]
    assert_right(*inputs(2, heads, kv_heads, q_len, kv_len, 64), blocks, causal, late)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_blocks(dim, causal, late):
    """More chunks a row than there are stages, whole and cut ones; parts that a block fills, half fills and leaves empty."""
    blocks = BlockLists.from_mask(torch.rand(2, 4, 5) < 0.7, ragged([384, 200, 70, 331], "cpu"), ragged([384, 128, 300, 61, 129], "cpu"))
    q, k, v = inputs(1, 2, 1, 985, 1002, dim)
    assert_right(q, k, v, blocks, causal, late)


def test_every_block_has_its_place():
    """The longest lists of all heads first, then head after head, each block once."""
    number, heads = torch.tensor(37), torch.tensor(3)
    places = [tuple(map(int, module()._place(torch.tensor(place), number, heads))) for place in range(37 * 3)]
    assert sorted(places) == [(head, rank) for head in range(3) for rank in range(37)]
    assert places[:6] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)] and places[6:] == sorted(places[6:])


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_what_is_not_seen_changes_nothing(causal, late):
    """NaN in a key and its value, behind a block's real tokens and in another block, spoils the rows that see it and no others."""
    q, k, v = inputs(1, 1, 1, 300, 300, 64)
    blocks = BlockLists.from_mask(torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1]], dtype=torch.bool), 100, 100,
                                  kv_lengths=torch.tensor([90, 100, 100], dtype=torch.int32))
    clean = hopper_forward(q, k, v, blocks, 0.125, causal, late=late)[0]
    k[:, :, 90:100] = v[:, :, 90:100] = float("nan")
    v[:, :, 250, 3] = float("nan")
    dirty = hopper_forward(q, k, v, blocks, 0.125, causal, late=late)[0]
    sees = torch.arange(300) >= (250 if causal else 100)
    assert torch.equal(dirty[:, :, ~sees], clean[:, :, ~sees]) and dirty[:, :, sees, 3].isnan().all()
    others = torch.arange(64) != 3
    assert torch.equal(dirty[:, :, sees][..., others], clean[:, :, sees][..., others])
