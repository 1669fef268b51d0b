"""How the benchmarks measure: interleaved rounds, medians, and what counts as work."""


import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ssta.kernels import BlockLists
from ssta.kernels.reference import token_mask


def test_interleaved_calls_each_the_same_number_of_times():
    from measure import interleaved

    calls = []
    times = interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=5, warm=2)
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert len(rounds) == 7 and all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(map(tuple, rounds))) > 1, "the order never changes"
    assert list(times) == ["a", "b", "c"]
    assert all(0 <= t["q1_ms"] <= t["median_ms"] <= t["q3_ms"] and t["note"] == "" for t in times.values())


def test_interleaved_reports_the_median_without_the_warm_rounds(monkeypatch):
    import measure

    clock, waits = iter([(100.0, 0.5), (3.0, 1.0), (1.0, 1.0), (2.0, 3.0), (8.0, 9.0)]), []
    monkeypatch.setattr(measure, "milliseconds", lambda call, wait: waits.append(wait) or next(clock))
    assert measure.interleaved({"a": None}, rounds=4, warm=1) == {
        "a": {"median_ms": 2.5, "q1_ms": 1.75, "q3_ms": 4.25, "host_ms": 2.0, "note": ""}}
    assert waits == [measure.LONGEST_WAIT, *[pytest.approx(0.6)] * 4]


def test_a_call_that_fails_while_it_is_timed_is_left_out():
    from measure import NO_TIMES, interleaved

    calls = []

    def fails():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck\nand more")

    told = []
    times = interleaved({"good": lambda: None, "bad": fails}, rounds=4, warm=1, failed=lambda *what: told.append(what))
    assert told == [("bad", "failed: RuntimeError: out of luck")]
    assert times["bad"] == {**NO_TIMES, "note": "failed: RuntimeError: out of luck"} and len(calls) == 3
    assert times["good"]["median_ms"] >= 0 and times["good"]["note"] == ""


def test_flops_are_those_of_the_products():
    from measure import backward_flops, forward_flops

    q, k, v = torch.randn(3, 1, 2, 48, 16).requires_grad_().unbind()
    pairs = 2 * 48 * 48
    with FlopCounterMode(display=False) as forward:
        out = torch.softmax(q @ k.mT, -1) @ v
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
        q @ k.mT  # the scores, which a sparse backward computes again
    assert forward_flops(pairs, 16) == forward.get_total_flops()
    assert backward_flops(pairs, 16) == backward.get_total_flops()


def test_pairs_are_what_the_mask_keeps():
    from arguments import kernel_shape
    from shapes import pairs

    for text in ("64,2,16,2,32", "128,window,16,2,32", "96,full,16", "160,0.4,16"):
        problem, pattern = kernel_shape(text)
        q = torch.empty(problem.batch, problem.heads, problem.tokens, 8)
        blocks = BlockLists.from_mask(pattern.mask(problem, "cpu"), problem.block, problem.block)
        assert pairs(problem, pattern.kept) == token_mask(q, q, blocks).expand(*q.shape[:2], -1, -1).sum()


def test_the_commit_may_come_from_the_environment(monkeypatch):
    from measure import machine

    monkeypatch.setenv("SSTA_COMMIT", "0123abc")
    assert machine()["commit"] == "0123abc"
