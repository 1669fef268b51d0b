"""Attention over several ranks: gloo processes on the CPU, each number of which is started once and runs all cases of parallel_cases."""

from functools import cache

import parallel_cases
import pytest
import torch
import torch.distributed as dist
from parallel_cases import ON_RANKS, TEXT, WAN
from ranks import on_ranks, values_of

from ssta import SSTAConfig, ssta_attention
from ssta.exchange import Run, deal
from ssta.parallel import Shards, check_ranks
from ssta.ranks import told


@cache
def outcomes(ranks):
    """Of each case what each rank says went wrong. The limit on time makes a failure of ranks that wait for one another."""
    return values_of(on_ranks(parallel_cases.run, ranks, ON_RANKS[ranks], seconds=150))


@pytest.mark.slow
@pytest.mark.parametrize("ranks, name", [(ranks, name) for ranks, names in ON_RANKS.items() for name in names])
def test_on_ranks(ranks, name):
    found = [of_rank.get(name, ("an earlier case failed", 0)) for of_rank in outcomes(ranks)]
    assert not any(error for error, _ in found), "\n".join(f"rank {rank}: {error}" for rank, (error, _) in enumerate(found))


@pytest.mark.parametrize("total", [0, 1, 5, 16, 111])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_are_those_of_tensor_split(total, ranks):
    assert deal(total, ranks) == tuple(len(part) for part in torch.arange(total).tensor_split(ranks))
    assert Run(total, True).held(ranks) == deal(total, ranks) and Run(total, False).held(ranks) == (total,) * ranks


def shards(ranks, rank=0, layout=TEXT):
    """Of ranks that nobody asks for anything."""
    runs = tuple(Run(segment.length, segment in layout.video) for segment in layout.segments)
    return Shards(None, runs, ranks, rank)


def test_key_heads_are_dealt_out_with_all_their_query_heads():
    of = [shards(3, rank) for rank in range(3)]
    assert [x.heads(12) for x in of] == [(0, 4), (4, 8), (8, 12)]
    assert [x.heads(8) for x in of] == [(0, 3), (3, 6), (6, 8)]
    assert [x.heads(12, 4) for x in of] == [(0, 6), (6, 9), (9, 12)] and [x.heads(4) for x in of] == [(0, 2), (2, 3), (3, 4)]
    assert [x.local_length for x in of] == [105 + 37] * 3 and of[0].length == 315 + 37
    with pytest.raises(ValueError, match="at most as many ranks as there are heads, got 3 ranks and 2 heads"):
        of[0].heads(2)
    with pytest.raises(ValueError, match="multiple of key's 4, got 10"):
        of[0].heads(10, 4)


def test_without_torch_distributed_a_group_is_refused():
    assert not dist.is_initialized()
    q = torch.zeros(1, 4, WAN.length, 8)
    for call in (lambda: Shards.of(None, WAN), lambda: check_ranks(None),
                 lambda: ssta_attention(q, q, q, WAN, SSTAConfig(), group=object())):
        with pytest.raises(ValueError, match="group must come after torch.distributed.init_process_group"):
            call()
    with pytest.raises(TypeError, match="layout must be a TokenLayout, got tuple"):
        Shards.of(None, (1, 2, 3))


def test_what_ranks_compare_says_no_address():
    """Functions are at other places in other processes, and are the same nevertheless."""
    def scorer(q, k):
        return q @ k.mT

    text = told((SSTAConfig(sampling_type=scorer), {"a": [1, 2.5, None]}, torch.zeros(2, dtype=torch.int32)))
    assert "scorer" in text and " at 0x" not in text and text.endswith("{'a': (1, 2.5, None)}, tensor (2,) of torch.int32)")
