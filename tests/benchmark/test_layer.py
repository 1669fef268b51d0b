"""bench_layer.py: the layer is checked first, and its stages are timed inside of it."""

import types

import pytest
import torch
from rows import read_rows


@pytest.fixture
def bench(monkeypatch, tmp_path):
    import bench_layer
    from shapes import HUNYUAN, LayerShape

    monkeypatch.setattr(bench_layer, "RESULTS", tmp_path)
    for name in ("LAYERS", "LAYERS_CPU"):
        monkeypatch.setattr(bench_layer, name, (LayerShape("tiny", (3, 9, 10), 20, 12, 1, 32, HUNYUAN),))
    return bench_layer


def test_layer_end_to_end(bench, tmp_path):
    bench.main(["--rounds", "2", "--csv", "mine"])
    rows = read_rows(tmp_path / "mine.csv")
    stages = {"none": ["tile", "score", "select", "attend", "untile", "total"],
              "linear": ["tile", "estimate", "score", "select", "attend", "merge", "untile", "total"]}
    expected = [("dense", "", "total"), ("exact", "", "total"),
                *((name, "linear", stage) for name in ("default", "one part") for stage in stages["linear"]),
                *((pad, kind, s) for pad in ("none", "zero") for kind in stages for s in stages[kind])]
    assert [(row["padding"], row["compensation"], row["stage"]) for row in rows] == expected
    assert [row["padding"] for row in rows if row["error"]] == ["dense", "exact", "default", "one part", "none", "none", "zero", "zero"]
    assert [row["stage"] for row in rows if row["density"]] == ["total"] * 8
    assert [row["stage"] for row in rows if row["tflops"]] == ["total", "total", *["attend"] * 6]
    assert all(float(row["median_ms"]) > 0 for row in rows)


def test_the_default_is_what_pipelines_do(bench):
    from models import MODELS_CPU
    from shapes import DEFAULT

    from ssta.pipelines.patch.register import family_of

    for shape in MODELS_CPU:
        assert family_of(shape.build("cpu", torch.float32)).default_config() == DEFAULT, shape.name


def test_the_whole_layer_alone(bench, tmp_path):
    bench.main(["--rounds", "1", "--whole", "--only", "published", "--pad", "none", "--compensation", "linear", "--csv", "mine"])
    found = [(row["padding"], row["compensation"], row["stage"]) for row in read_rows(tmp_path / "mine.csv")]
    assert found == [("dense", "", "total"), ("exact", "", "total"), ("none", "linear", "total")]


def test_tiles_of_another_size_come_with_a_density(bench, tmp_path, capsys):
    bench.main(["--rounds", "1", "--whole", "--only", "published", "--pad", "none", "--tile", "2x4x4", "--density", "0.3", "--parts", "2",
                "--csv", "mine"])
    assert all(float(row["density"]) < 1 for row in read_rows(tmp_path / "mine.csv") if row["padding"] == "none")
    with pytest.raises(SystemExit):
        bench.main(["--tile", "2x4x4"])
    assert "--tile must come with --density" in capsys.readouterr().err


def test_a_wrong_layer_gets_no_time(bench, monkeypatch):
    whole = bench.ssta_attention

    def wrong(*args, return_blocks=False, **options):
        found = whole(*args, return_blocks=return_blocks, **options)
        return found if return_blocks else found * 1.01

    monkeypatch.setattr(bench, "ssta_attention", wrong)
    with pytest.raises(SystemExit, match="SSTA with padding 'none' and compensation 'linear' is wrong: .*; no time is printed"):
        bench.main(["--rounds", "1"])


def test_a_wrong_dense_layer_gets_no_time(bench, monkeypatch):
    whole = bench.dense_attention

    def wrong(query, key, value, layout):
        found = whole(query, key, value, layout)
        found.out[..., -1, :] += 0.1
        return found

    monkeypatch.setattr(bench, "dense_attention", wrong)
    with pytest.raises(SystemExit, match=r"dense attention, dense \(SSTA's kernel\), is wrong: .*; no time is printed"):
        bench.main(["--rounds", "1"])


def test_stages_are_timed_inside_the_layer(bench, monkeypatch):
    import stages

    clock = iter([0.0, 1.0, 3.0, 4.0, 5.0, 9.0])  # select [0, 5] with score [1, 3] and [4, 4.5], then attend
    monkeypatch.setattr(stages, "now", lambda: next(clock))
    monkeypatch.setattr(stages, "elapsed_ms", lambda first, last: last - first)
    module = types.ModuleType("here")

    def score():
        """A stage inside the other."""

    def select():
        module.score()

    module.score, module.select = score, select
    monkeypatch.setattr(stages, "FUNCTIONS", {"score": ((module, score),), "select": ((module, select),)})
    unpatched = module.select
    watch = stages.Stopwatch(lambda: module.select())
    watch()
    assert module.select is unpatched, "the stages were not given back"
    assert stages._alone(watch._runs[0]) == {"score": 2.0, "select": 2.0}
    clock = iter([0.0, 5.0, 5.0, 6.0])
    watch()
    assert {name: times["median_ms"] for name, times in watch.summary(1).items()} == {"score": 0.0, "select": 6.0}
    assert {name: times["median_ms"] for name, times in watch.summary(2).items()} == {"score": 1.0, "select": 4.0}


def test_the_stages_of_a_layer_show_that_is_one_plan(bench):
    from stages import Stopwatch

    from ssta import SSTAConfig, TokenLayout, ssta_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, layout = torch.randn(1, 1, 48, 16, dtype=torch.float16, device=device), TokenLayout.video_text((2, 3, 8))
    config = SSTAConfig(tile_thw=(2, 3, 4), kernel_thw=(1, 1, 1), topk=1)
    watch = Stopwatch(lambda: ssta_attention(q, q, q, layout, config, impl="triton"))
    watch()
    # The first call might write the plan.
    watch()
    assert set(watch.summary(1)) >= {"tile", "score", "select", "attend", "untile"}


def test_every_stage_is_where_the_layer_looks_it_up(bench):
    from stages import FUNCTIONS, STAGES

    assert set(FUNCTIONS) == set(STAGES)
    for functions in FUNCTIONS.values():
        for owner, function in functions:
            assert getattr(owner, function.__name__) is function
