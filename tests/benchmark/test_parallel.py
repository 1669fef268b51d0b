"""bench_parallel.py: ranks measure together, say alike what failed on one of them, and reckon for more of them from what they measured."""

import threading
import types

import bench_on_ranks
import pytest
import torch
import torch.distributed as dist
from hanging import HANG
from rows import read_rows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Its rows, and what each rank prints."""
    folder = tmp_path_factory.mktemp("ranks")
    printed = bench_on_ranks.measured("bench_parallel", 2, folder, "--rounds", "1", "--only", "default", "none", "dense",
                                      "--csv", "parallel_mine")
    return read_rows(folder / "parallel_mine.csv"), printed


def of(rows, **wanted):
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


@pytest.mark.slow
def test_two_ranks_end_to_end(measured):
    rows, printed = measured
    assert not of([row for row in rows if row["note"]])
    assert [row["what"] for row in rows][0] == "all-to-all" and float(rows[0]["gb_s"]) > 0
    for layer in ("small", "small, no text"):
        one, two = (of(rows, what="layer", shape=layer, attention="none", basis="measured", ranks=ranks) for ranks in "12")
        inside = ["tile", "score", "select", "attend"]
        assert [row["stage"] for row in one] == [*inside, "untile", "total"]
        assert [row["stage"] for row in two] == ["exchange in", *inside, "untile", "exchange out", "total"]
        assert max(float(two[-1]["difference"]), float(two[-1]["error"])) < 1e-5
        assert float(two[-1]["imbalance"]) >= 1
        assert float(two[-1]["speed_up"]) == pytest.approx(float(one[-1]["median_ms"]) / float(two[-1]["median_ms"]))
        for ranks in "12":
            default = of(rows, what="layer", shape=layer, attention="default", basis="measured", ranks=ranks)
            assert {"tile", "estimate", "select", "attend", "merge", "total"} <= {row["stage"] for row in default}
            assert default[-1]["difference"] == "0.0" and 0 < float(default[-1]["error"]) < 1e-5
    steps = of(rows, what="step", basis="measured")
    assert [(row["shape"].split(",")[0], row["attention"], row["ranks"]) for row in steps] == [
        (model, what, ranks) for model, dense in (("HunyuanVideo 1.5", "unmasked"), ("Wan 2.1", "stock"))
        for what in ("default", "none", dense) for ranks in "12"]
    assert all(float(row["step_s"]) > 0 and float(row["difference"]) < 1e-5 for row in steps)
    # Only the first rank prints, and its last lines are the summary.
    assert "2 ranks, measured on 1, 2" in printed[0] and "`pad_type=" in printed[0].split("\n\n")[-2] and not printed[1]


@pytest.mark.slow
def test_reckoned_rows_follow_from_what_was_measured(measured):
    rows, _ = measured
    about = dict(attention="default", basis="reckoned")
    layer = {row["ranks"]: row for row in of(rows, what="layer", shape="small", stage="total", **about)}
    step = {row["ranks"]: row for row in of(rows, what="step", shape="HunyuanVideo 1.5, small", **about)}
    assert not of(rows, shape="small, no text", basis="reckoned"), "grouped-query attention is not reckoned"
    assert list(layer) == list(step) == ["1", "2", "4"], "4 heads are too few for 8 ranks"
    for ranks in "24":
        stages = of(rows, what="layer", shape="small", ranks=ranks, **about)
        assert [row["stage"] for row in stages] == ["exchange in", "exchange out", "own heads", "total"]
        assert float(stages[-1]["median_ms"]) == pytest.approx(sum(float(row["median_ms"]) for row in stages[:-1]))
        # In 4 blocks; 18 of 1362 tokens are text, which no rank has less of.
        depth, text, ms = 4, 18 / 1362, {key: float(row["median_ms"]) for key, row in layer.items()}
        rest = float(step["1"]["step_s"]) - depth * ms["1"] / 1e3
        hidden = float(stages[0]["median_ms"]) * 2 / 3
        expected = rest * (text + (1 - text) / int(ranks)) + depth * (ms[ranks] - hidden) / 1e3
        assert float(step[ranks]["step_s"]) == pytest.approx(expected)
    one, = of(rows, what="step", shape="HunyuanVideo 1.5, small", attention="default", ranks="1", basis="measured")
    assert float(step["1"]["step_s"]) == pytest.approx(float(one["step_s"]))


def test_no_section_begins_after_the_limit(tmp_path, monkeypatch):
    import bench_parallel

    monkeypatch.setattr(bench_parallel, "RESULTS", tmp_path)
    options = bench_parallel.arguments(["--limit", "0", "--csv", "parallel_none", "--profile", "none"], False)
    assert together(lambda world: bench_parallel.run(world, options, [1])) == [None, None]
    rows = read_rows(tmp_path / "parallel_none.csv")
    assert len(rows) == 12 and {row["note"] for row in rows} == {"left out: the limit of 0 minutes"}


def test_arguments(monkeypatch, capsys):
    import bench_parallel
    from world import World

    assert bench_parallel.numbers_of_ranks(None, 4) == [1, 2, 4] and bench_parallel.numbers_of_ranks([3, 1], 6) == [1, 3]
    assert bench_parallel.numbers_of_ranks(None, 6) == [1, 2]
    with pytest.raises(SystemExit, match="--ranks must be numbers that divide the 4 processes, got 3"):
        bench_parallel.numbers_of_ranks([3], 4)
    with pytest.raises(SystemExit):
        bench_parallel.arguments(["--layer", "sora"], False)
    assert "--layer must be part of one of 'small'" in capsys.readouterr().err
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="must be started by torchrun"):
        World.start()


# Ranks that agree


def together(function, ranks=2):
    """What ``function(world)`` returned or raised on each of so many ranks, which are threads."""
    from world import World

    store, found = dist.HashStore(), [None] * ranks

    def rank(number):
        try:
            found[number] = function(World(store, number, ranks, CPU))
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANG)
        assert not thread.is_alive(), "a rank waits for good"
    return found


def test_ranks_tell_one_another():
    assert together(lambda world: [world.gather(world.rank), world.gather("x" * world.rank)], 3) == [[[0, 1, 2], ["", "x", "xx"]]] * 3


def test_what_fails_on_one_rank_is_raised_on_all_which_go_on():
    def work(world):
        def early():
            # Beside an agreement of the others'.
            if world.rank == 1:
                raise ValueError("one\nand more")
            return world.gather(0)

        def inside():
            def attempt():
                if world.rank == 1:
                    raise SystemExit("two")

            for ranks in (1, 2):
                try:
                    world.attempt(attempt, ranks)
                except Exception as error:
                    return f"{ranks} ranks: {error}", world.gather(world.rank)

        found = []
        for part in (early, inside, lambda: world.gather(world.rank)):
            try:
                found.append(world.section(part))
            except Exception as error:
                found.append(str(error))
        return found

    assert together(work) == [["rank 1: ValueError: one", ("2 ranks: rank 1: SystemExit: two", [0, 1]), [0, 1]]] * 2


def test_a_time_is_that_of_the_slowest_rank_and_every_rank_knows_it(monkeypatch):
    import world as module

    monkeypatch.setattr(module, "milliseconds", lambda call, wait, ready: (call(), 0.5))
    calls = []

    def work(world):
        def of(ranks):
            return module.OnRanks(ranks, lambda: calls.append(ranks) or 10.0 + world.rank)

        return [world.milliseconds(of(ranks), 0) for ranks in (1, 2, 3)]

    assert together(work, 3) == [[(10.0, 0.5), (11.0, 0.5), (12.0, 0.5)]] * 3
    assert sorted(calls) == [1, 2, 2, 3, 3, 3], "ranks that are not asked for have worked"


# What rows are made of


def test_stages_are_those_of_the_rank_that_attends_longest():
    from shared_layer import slowest

    stages, imbalance = slowest([[{"attend": 4.0, "exchange out": 3.0}, {"attend": 2.0, "exchange out": 0.1}],
                                 [{"attend": 2.0, "exchange out": 5.0}, {"attend": 2.5, "exchange out": 0.0}]])
    assert stages == {"attend": [4.0, 2.5], "exchange out": [3.0, 0.0]}
    assert imbalance == pytest.approx((4 / 3 + 2.5 / 2.25) / 2)


def test_bytes_of_the_exchange_are_those_that_ranks_send(monkeypatch):
    import shared_layer
    from shapes import SHARED, LayerShape

    from ssta import SSTAConfig, TokenLayout
    from ssta.ranks import Shards, exchange
    from ssta.ranks.runs import runs_of

    sent = []

    class Counted(shared_layer._Still):
        def __init__(self, group, send, comes, goes, graph, into=None, plan=None):
            super().__init__(group, send, comes, goes, graph, into)
            sent.append(send.element_size() * (sum(goes) - goes[1]))

    monkeypatch.setattr(exchange, "Collective", Counted)
    shape = LayerShape("tiny", (2, 3, 4), 5, 5, 4, 8, SSTAConfig())
    layout = TokenLayout.video_text(shape.thw, shape.text)
    layer = types.SimpleNamespace(shape=shape, layout=layout, qkv=[torch.zeros(1, shape.tokens, 4, 8)] * 3)
    for ranks in (2, 4):
        shards, deal = Shards(runs_of(layout, "video"), ranks, 1, object()), (4 // ranks,) * ranks
        sent.clear()
        exchange.Incoming(shards, [shared_layer.share(x, shards).transpose(1, 2) for x in layer.qkv], (deal,) * 3,
                          graph=False).wait()
        exchange.send_tokens(shards, (torch.zeros(1, 4 // ranks, shape.tokens, 8),), (deal,), gather=True)
        assert sent == list(shared_layer.sent_bytes(layer, ranks).values())
        copies = shared_layer.Copies(layer, ranks)
        copies()
        assert len(sent) == 2 and all(ms > 0 for ms in copies.median(1)), "what is copied is copied without an exchange"
    wan = types.SimpleNamespace(shape=SHARED[1], qkv=[torch.zeros(0, dtype=torch.bfloat16)])
    assert sum(shared_layer.sent_bytes(wan, 8).values()) == 4 * 75600 * 40 * 128 * 2 * 7 / 64


def test_the_rate_of_an_exchange_is_that_of_the_largest_buffer():
    from bench_parallel import best_rate
    from shared_layer import row

    assert best_rate([row(what="layer")], 2) is None
    rows = [row(what="all-to-all", ranks=ranks, mib=mib, gb_s=gb_s) for ranks, mib, gb_s in
            ((2, 50.0, 300.0), (2, 200.0, 320.0), (4, 50.0, 350.0), (4, 200.0, 340.0))] + [row(what="all-to-all", ranks=4, mib=300.0)]
    assert [best_rate(rows, ranks) for ranks in (2, 4, 8)] == [320.0, 340.0, 340.0]


# What hosts and devices do


def event(rank, lane, name, start, end):
    return dict(rank=rank, lane=lane, name=name, start_us=start, end_us=end)


EVENTS = [event(0, "device", "ncclDevKernel_SendRecv", 0, 1000), event(0, "device", "forward", 900, 5000),
          event(0, "device", "untile", 5200, 6000), event(0, "host", "cudaLaunchKernel", -50, 300),
          event(0, "host", "cuLaunchKernelEx", 310, 900), event(1, "device", "forward", 0, 5000), event(1, "device", "untile", 5500, 6000),
          event(1, "host", "cudaStreamSynchronize", 10, 2000)]


def test_idle_devices_and_waiting_hosts_are_counted():
    from timeline import gaps, summary

    assert gaps([(0, 10), (2, 4), (12, 13), (13, 20)]) == [0, 2, 0]
    found = summary(EVENTS)
    assert found["median_ms"] == 0.5
    assert found["note"] == ("3 layers; hosts wait for the device 1 times in cudaStreamSynchronize, and have started all work 4.00 ms or "
                             "more before it is done")
    assert summary(EVENTS[:5])["note"].startswith("3 layers; hosts wait for the device 0 times, and")


def test_a_layer_is_recorded(monkeypatch):
    import timeline
    from shapes import HUNYUAN, LayerShape

    monkeypatch.setattr(timeline, "LAYERS", 1)
    shape = LayerShape("tiny", (2, 6, 6), 4, 3, 1, 16, HUNYUAN)
    (rows,) = together(lambda world: timeline.record(world, shape, 1), 1)
    assert {(row["rank"], row["lane"]) for row in rows} >= {(0, "host")} and all(row["end_us"] >= row["start_us"] for row in rows)


def test_a_timeline_shows_all_that_was_recorded():
    pytest.importorskip("matplotlib")
    import plots

    where = dict(device="Card", torch="2.9", triton="3.5", commit="abc", date="2026-01-02")
    axes, = plots.plot_timeline([{**{name: str(value) for name, value in row.items()}, **where} for row in EVENTS]).axes
    assert {of.get_label(): len(of.get_paths()) for of in axes.collections if of.get_label() != "host waits"} == {
        "exchange": 1, "attention": 1, "other kernels": 1, "host": 2}
    assert sum(len(of.get_paths()) for of in axes.collections) == len(EVENTS)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["rank 0, device", "rank 0, host", "rank 1, device", "rank 1, host"]


def test_tables_of_several_gpus(tmp_path):
    import measure
    import table
    from shared_layer import row

    layer, step = dict(what="layer", shape="L", attention="none", stage="total"), dict(what="step", shape="M", stage="total")
    times = dict(median_ms=10.0, q1_ms=9.0, q3_ms=11.0)
    measure.write_rows(tmp_path / "parallel_a.csv", [
        row(what="all-to-all", ranks=2, stage="total", **times, mib=50.0, gb_s=333.3), row(what="all-to-all", ranks=4, note="failed: x"),
        row(**layer, ranks=1, **times, speed_up=1.0, imbalance=1.0, difference=0.0, error=0.001),
        row(**{**layer, "stage": "attend"}, ranks=2, median_ms=4.5),
        row(**layer, ranks=2, median_ms=5.2, speed_up=1.923, imbalance=1.01, extra_mib=700.0, difference=0.0, error=0.001),
        row(**layer, ranks=4, note="failed: y"),
        row(**step, attention="none", ranks=2, step_s=1.4, speed_up=1.93),
        *(row(**layer, ranks=ranks, basis="reckoned", median_ms=10.4 / ranks, speed_up=ranks) for ranks in (1, 2, 8)),
        row(**step, attention="stock", ranks=2, step_s=6.0, speed_up=1.9)])
    text = table.filled("".join(f"<!-- table:{name} -->\n<!-- /table -->\n" for name in ("ranks", "shared_stages", "exchange", "scaling")),
                        tmp_path)
    ranks, stages, exchange, scaling = text.split("<!-- /table -->\n")[:4]
    assert scaling.split("\n")[1:6] == [
        "| of | attention | 1 GPU | 2 GPUs | speed-up on 2 |", "|---|---|---:|---:|---:|",
        '| L, layer | `pad_type="none"` | 10.0 ms | 5.20 ms | 1.92 |', '| M, step | SSTA, `pad_type="none"` | – | 1.40 s | 1.93 |',
        "| M, step | unmodified diffusers | – | 6.00 s | 1.90 |"]
    assert ranks.split("\n")[3:9] == [
        '| L, layer | `pad_type="none"` | 1 | 10.0 ms | 1.00 | 10.4 ms | 1.00 | 1.00 | – | 0.00 | 0.00100 |',
        '| L, layer | `pad_type="none"` | 2 | 5.20 ms | 1.92 | 5.20 ms | 2.00 | 1.01 | 700 | 0.00 | 0.00100 |',
        '| M, step | SSTA, `pad_type="none"` | 2 | 1.40 s | 1.93 | – | – | – | – | – | – |',
        '| L, layer | `pad_type="none"` | 8 | – | – | 1.30 ms | 8.00 | – | – | – | – |',
        '| M, step | unmodified diffusers | 2 | 6.00 s | 1.90 | – | – | – | – | – | – |', ""]
    assert stages.split("\n")[1].count("attend, ms | total, ms") == 1, "stages that nothing has are not shown"
    assert '| L | `pad_type="none"` | 2 | 4.50 | 5.20 |\n' in stages and "| 4 |" not in stages
    assert "| 2 | 50.0 | 10.0 | 10.0% | 333 |\n" in exchange and exchange.count("\n| ") == 2
