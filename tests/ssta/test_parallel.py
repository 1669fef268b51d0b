"""Attention over several ranks: gloo processes on the CPU, each number of which is started once and runs all cases of parallel_cases."""

import weakref

import parallel_cases
import pytest
import torch
import torch.distributed as dist
from parallel_cases import ON_RANKS
from parallel_inputs import TEXT, WAN
from ranks import on_ranks, values_of

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid, ssta_attention
from ssta.kernels import Deferred, Projection, RMSNorm
from ssta.kernels.prologue.norm_rope_kernel import token_rstd
from ssta.ranks import Run, Shards, check_ranks, deal, exchange
from ssta.ranks.agreement import told
from ssta.ranks.layer import TOGETHER, enter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# One test for all cases of a number of processes: each worker that ran some of them would start its own.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", ON_RANKS)
def test_on_ranks(ranks):
    found = values_of(on_ranks(parallel_cases.run, ranks, ON_RANKS[ranks]))
    wrong = [f"{name}, rank {rank}: {error}" for rank, of_rank in enumerate(found) for name, (error, _) in of_rank.items() if error]
    assert not wrong, "\n".join(wrong)
    assert all(of_rank.keys() == set(ON_RANKS[ranks]) for of_rank in found)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_gpus(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs of one host")
    values_of(on_ranks(parallel_cases.on_gpus, ranks, backend="nccl"))


@pytest.mark.parametrize("total", [0, 1, 5, 16, 111])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_are_those_of_tensor_split(total, ranks):
    assert deal(total, ranks) == tuple(len(part) for part in torch.arange(total).tensor_split(ranks))
    assert Run(total, True).held(ranks) == deal(total, ranks) and Run(total, False).held(ranks) == (total,) * ranks


def shards(ranks, rank=0, layout=TEXT):
    """Of ranks that nobody asks for anything."""
    runs = tuple(Run(segment.length, segment in layout.video) for segment in layout.segments)
    return Shards(runs, ranks, rank, None)


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


class Still:
    """In place of ``exchange.Collective``: what is sent arrives nowhere."""

    sent: list = []

    def __init__(self, group, send, comes, goes, graph, into=None):
        self.sent.append((send, comes, goes))
        self.into = into.zero_()

    def wait(self):
        return self.into


@pytest.mark.parametrize("more, exchanges", [(-1, 1), (1, 3)])
def test_all_ranks_send_queries_keys_and_values_alike(monkeypatch, more, exchanges):
    """Together or one by one, as the whole sequence says, also where the shares of ranks lie to either side of the limit."""
    monkeypatch.setattr(exchange, "Collective", Still)
    monkeypatch.setattr(Shards, "agreed", lambda self, facts: None)
    tokens = 2 * TOGETHER // (2 * 64 * 4) + more
    layout = TokenLayout((VideoGrid(1, 1, tokens),))
    config = SSTAConfig(tile_thw=(1, 1, 64), topk=2)
    assert len({shards(2, rank, layout).local_length for rank in range(2)}) == 2
    for rank in range(2):
        held, Still.sent = shards(2, rank, layout), []
        enter(*torch.zeros(3, 1, 2, held.local_length, 64), layout, config, held)
        assert len(Still.sent) == exchanges


def projections(shards, batch, heads, dim, across_heads, dtype=torch.float16):
    """The video's tokens and the text's as projections leave them, the video's turned; a run's share may be several projections."""
    def of(tokens, turned):
        x = torch.randn(batch, tokens, heads, dim, device=DEVICE).to(dtype).transpose(1, 2)
        weight = 1 + torch.rand(*((heads,) if across_heads else ()), dim, device=DEVICE).to(dtype)
        angles = tuple(torch.randn(batch if across_heads else 1, heads if across_heads else 1, tokens, dim, device=DEVICE) for _ in "cs")
        return Projection(x, RMSNorm(weight, 1e-5, rstd=token_rstd(x, 1e-5) if across_heads else None), angles if turned else None)

    held = [place.held[shards.rank] for place in shards.places]
    return Deferred((of(held[0] - 3, True), of(3, True), *[of(tokens, False) for tokens in held[1:]]))


@pytest.mark.parametrize("layout", [TokenLayout((VideoGrid(1, 5, 3), DenseRun(4))), TokenLayout((VideoGrid(1, 5, 3), VideoGrid(1, 2, 4)))])
def test_what_has_arrived_is_the_callers_alone(monkeypatch, layout):
    monkeypatch.setattr(exchange, "Collective", Still)
    monkeypatch.setattr(exchange, "Batch", lambda group, rank, runs: Still(group, runs[0][0], (), (), False, runs[0][2]))
    held = shards(2, 0, layout)
    incoming = exchange.Incoming(held, (torch.zeros(1, 2, held.local_length, 8),), ((1, 1),), graph=False)
    buffer = weakref.ref(incoming.wait().untyped_storage())
    assert buffer() is None


@pytest.mark.parametrize("across_heads", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_norm_and_rope_write_packets(monkeypatch, rank, across_heads):
    """What is sent, and what needs no sending, is what comes of the finished tensor."""
    layout = TokenLayout((VideoGrid(1, 5, 3), DenseRun(4)))
    held = shards(2, rank, layout)
    x = projections(held, 2, 4, 8, across_heads)
    Still.sent = []
    monkeypatch.setattr(exchange, "Collective", Still)
    found = exchange.Incoming(held, (x,), ((2, 2),), graph=False).wait()
    expected = exchange.Incoming(held, (x.materialize(),), ((2, 2),), graph=False).wait()
    assert torch.equal(found, expected) and found.stride() == expected.stride() and found[:, :, 15:].any()
    (send, *sizes), (expected, *same) = Still.sent
    assert torch.equal(send, expected) and sizes == same
    # One projection of several runs, and none of a share without tokens.
    whole = Deferred((Projection(torch.cat([of.x for of in x.projections], 2)),))
    assert torch.equal(torch.cat([whole.part(0, 2).ready, whole.part(2, x.shape[2] - 2).ready], 2), whole.ready)
    assert not whole.part(4, 0).projections


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
