"""Several ranks: every family gives what one process gives, in diffusers' context parallelism; mistakes are said on every rank."""

from __future__ import annotations

import pytest
import rank_cases
from ranks import on_ranks, values_of


@pytest.fixture(scope="module")
def on_two():
    return values_of(on_ranks(rank_cases.run_all, 2, rank_cases.TWO, seconds=240))


@pytest.fixture(scope="module")
def on_four():
    return values_of(on_ranks(rank_cases.run_all, 4, rank_cases.FOUR, seconds=120))


@pytest.mark.parametrize("case", rank_cases.TWO)
def test_on_two_ranks(case, on_two):
    for rank, found in enumerate(on_two):
        assert found[case] is None, f"rank {rank}: {found[case]}"


@pytest.mark.parametrize("case", rank_cases.FOUR)
def test_on_four_ranks(case, on_four):
    for rank, found in enumerate(on_four):
        assert found[case] is None, f"rank {rank}: {found[case]}"
