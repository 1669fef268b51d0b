"""Several ranks: every family gives what one process gives, in diffusers' context parallelism; mistakes are said on every rank."""

import pytest
import rank_cases
from ranks import on_ranks, values_of


# One test for all cases of a number of processes, which take longer to start than to run.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", rank_cases.CASES)
def test_on_ranks(ranks):
    found = values_of(on_ranks(rank_cases.run_all, ranks, rank_cases.CASES[ranks]))
    wrong = [f"{case}, rank {rank}: {trace}" for rank, traces in enumerate(found) for case, trace in traces.items() if trace]
    assert not wrong, "\n".join(wrong)
    assert all(traces.keys() == rank_cases.CASES[ranks].keys() for traces in found)
