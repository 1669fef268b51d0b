"""tune.py: every candidate is checked and timed, and the advice follows from the times."""

import json
from types import SimpleNamespace

import pytest
import torch
from rows import read_rows

from ssta.kernels import block_sparse_attention
from ssta.kernels.device import DeviceLimits
from ssta.kernels.portable.config import dkv_config


@pytest.mark.slow
def test_tune_end_to_end(monkeypatch, capsys, tmp_path):
    """On tiny shapes; in the interpreter where there is no GPU."""
    import tune

    monkeypatch.setattr(tune, "RESULTS", tmp_path)
    tune.main(["--shape", "64,1,32,1,16", "--kernel", "forward", "dq", "dkv", "attend", "attend-backward", "--rounds", "1",
               "--csv", "mine"])
    rows = read_rows(tmp_path / "mine.csv")
    for kernel in ("forward", "dq", "dkv"):
        of = [row for row in rows if row["kernel"] == kernel]
        assert len(of) >= 4 and [row["present"] for row in of].count("True") == 1
        assert len({row["config"] for row in of}) == len(of)
        assert next(float(row["ratio"]) for row in of if row["present"] == "True") == 1
        times = [float(row["median_ms"]) for row in of]
        assert times == sorted(times) and all(float(row["error"]) < 0.05 for row in of)
    for kernel in ("attend", "attend-backward"):
        of = [row for row in rows if row["kernel"] == kernel]
        assert "impl='triton'" in [row["config"] for row in of] and [row["present"] for row in of].count("True") == 1
    said = capsys.readouterr().out
    assert "forward" in said and ("kernels/portable/config.py, dq_config" in said or "no advice" in said)


def test_a_configuration_that_is_wrong_or_does_not_fit_gets_no_time(monkeypatch):
    import shapes
    import tune

    problem = shapes.Problem(64, 1, 16, 32)
    setting = tune.Setting(problem, shapes.kept(problem, 1), torch.device("cpu"), torch.float32)
    good = block_sparse_attention(setting.q, setting.k, setting.v, setting.blocks, impl="torch")

    def out_of_memory():
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(tune, "candidates", lambda *_: [tune.Candidate("present", lambda: good, True),
                                                       tune.Candidate("wrong", lambda: good * 1.1, False),
                                                       tune.Candidate("large", out_of_memory, False)])
    rows = {row["config"]: row for row in tune.measure_kernel("forward", setting, False, 1)}
    assert rows["present"]["ratio"] == 1 and rows["present"]["note"] == ""
    assert rows["wrong"]["median_ms"] == "" and "wrong, forward, is wrong" in rows["wrong"]["note"]
    assert rows["large"]["median_ms"] == "" and rows["large"]["note"] == "failed: RuntimeError: out of resource: shared memory"


def tuned(config, ms, present=False, spread=0.1):
    return dict(config=config, present=present, median_ms=ms, q1_ms=ms - spread, q3_ms=ms + spread, ratio=ms / 10.0)


@pytest.mark.parametrize("best, said", [
    (tuned("B", 9.0), "kernels/portable/config.py, dq_config: B takes 9 ms, A 10: change it"),
    (tuned("B", 9.9), "dq_config: keep A, 10 ms"),
    (tuned("B", 9.7, spread=0.3), "dq_config: keep A, 10 ms")])
def test_what_tune_advises(best, said):
    import tune

    assert said in tune.advise("dq", [best, tuned("A", 10.0, present=True)])


def test_dkv_is_written_as_its_line_in_the_launch_table():
    import tune

    # The table says LaunchConfig(128, 32, 8, 3), keys first, for GPUs with 99 KB and without TMA.
    config = dkv_config(128, 384, 384, DeviceLimits(99 * 1024, tma=False))
    assert (config.block_m, config.block_n) == (32, 128) and tune.written("dkv", config) == "LaunchConfig(128, 32, 8, 3)"
    assert tune.written("dq", config) == "LaunchConfig(32, 128, 8, 3)"


def test_the_hopper_kernels_have_the_constants_that_are_swept():
    """Their present values are among the candidates, and a candidate changes nothing but its own call."""
    import tune

    from ssta.kernels.hopper import backward as hopper_backward
    from ssta.kernels.hopper.config import hopper_forward_config
    from ssta.kernels.lowering import dq_schedule

    for dim in (64, 128):
        present = {hopper_forward_config(dim, block, block, False, optimistic) for block in (64, 128, 384)
                   for optimistic in (False, True)}
        assert present <= set(tune.hopper_configs(dim))
    assert all(hopper_backward.constants(dim, True)["DS_STAGES"] in tune.DS_STAGES for dim in (64, 128))
    assert dq_schedule.STAGGER in tune.STAGGERS
    swept = tune.with_patch(hopper_backward, "constants", 64, lambda: hopper_backward.constants)
    assert swept() == 64 and callable(hopper_backward.constants)


def test_what_is_shared_can_be_read_by_a_program_and_says_on_what_it_was_measured():
    import tune

    problem = dict(tokens=46_080, heads=16, head_dim=128, block=384, kept=48)
    rows = [tuned("LaunchConfig(64, 32, 4, 2)", 9.123456) | problem | dict(kernel="forward", error=1e-3, note=""),
            tuned("LaunchConfig(128, 128, 8, 3)", 10.0, present=True) | problem | dict(kernel="forward", error=1e-3, note=""),
            problem | dict.fromkeys(("median_ms", "q1_ms", "q3_ms", "error"), "")
            | dict(kernel="dq", config="LaunchConfig(128, 64, 8, 3)", present=True, note="failed: out of resource")]
    text = tune.share(rows, (8, 9), DeviceLimits(99 * 1024, tma=False), ("not 'hopper', which requires a Hopper GPU",))
    before, block, after = text.split("```")
    found = json.loads(block.removeprefix("json"))
    assert "as an issue to" in before and after == ""
    assert {"device", "torch", "triton", "commit", "capability", "shared_memory", "products"} <= found.keys()
    assert (found["capability"], found["problem"]) == ("sm_89", problem)
    assert found["routes"] == ["not 'hopper', which requires a Hopper GPU"]
    assert found["kernels"]["forward"][0] == dict(
        config="LaunchConfig(64, 32, 4, 2)", present=False, median_ms=9.123, q1_ms=9.023, q3_ms=9.223, error=0.001)
    assert found["kernels"]["dq"] == [dict(config="LaunchConfig(128, 64, 8, 3)", present=True, note="failed: out of resource")]


@pytest.mark.parametrize("urls, where", [
    (["Homepage, https://a.b", "Issues, https://a.b/issues"], "as an issue to https://a.b/issues"),
    (None, "as an issue to the page that you have SSTA from")])
def test_where_it_is_sent(urls, where, monkeypatch):
    import tune

    monkeypatch.setattr(tune.metadata, "metadata", lambda name: SimpleNamespace(get_all=lambda key: urls))
    assert tune.project_page() == where


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_times_of_the_interpreter_are_not_shared(capsys):
    import tune

    with pytest.raises(SystemExit):
        tune.main(["--share"])
    assert "--share needs an NVIDIA GPU" in capsys.readouterr().err
