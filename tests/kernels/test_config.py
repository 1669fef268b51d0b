"""Launch configurations that depend on how much there is to do."""

import pytest

from ssta.kernels.hopper.config import hopper_forward_config


@pytest.mark.parametrize("tokens, heads, head_dim, warpgroups", [
    (11_520, 1, 128, 2), (11_520, 1, 64, 2), (11_520, 16, 128, 2), (11_520, 16, 64, 3), (23_040, 1, 128, 3), (46_080, 16, 128, 3)])
def test_the_hopper_forward_has_small_programs_where_large_ones_would_leave_multiprocessors_idle(tokens, heads, head_dim, warpgroups):
    """Blocks of 384 tokens on the 132 multiprocessors of an H200; without a number of blocks the larger programs."""
    block = 384
    chosen = hopper_forward_config(head_dim, block, block, False, True, blocks=heads * tokens // block, processors=132)
    assert chosen.warpgroups == warpgroups and hopper_forward_config(head_dim, block, block, False, True).warpgroups == 3
    assert hopper_forward_config(head_dim, block, block, True, blocks=heads * tokens // block, processors=132).warpgroups == 2
