"""The documents and plots of the benchmarks show what the CSVs hold."""

import shutil
import subprocess
import sys

import pytest


def test_readme_shows_what_was_measured(monkeypatch):
    import table

    # Which changes with every kernel, and makes no document wrong.
    monkeypatch.setattr(table.staleness, "ages", lambda name, rows: [])
    table.main(["--check"])


def kernel_row(what, provider, ms, pattern="random", kept=48, **more):
    spread = dict(q1_ms=0.99 * ms, q3_ms=1.03 * ms) if ms else dict(q1_ms="", q3_ms="")
    known = dict(version="", **spread, host_ms=0.5, tflops=400.4, extra_mib=180.0, error=0.003, note="")
    return dict(what=what, provider=provider, pattern=pattern, tokens=46080, heads=16, head_dim=128, block=384, kept=kept, blocks=120,
                median_ms=ms, **known | more)


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A document of the benchmarks and another one, whose CSV is of another machine."""
    import measure
    import table

    where = dict(device="Card", driver="1", torch="2.9", triton="3.5", commit="abc", date="2026-01-02")
    monkeypatch.setattr(measure, "machine", lambda: where)
    measure.write_rows(tmp_path / "kernels_card.csv", [
        kernel_row("absent", "flashinfer", "", note="not installed"), kernel_row("lists", "ssta triton", 0.05, extra_mib="", error=""),
        kernel_row("forward", "FlexAttention", 10.0, version="2.9"), kernel_row("forward", "ssta triton", 7.9961),
        kernel_row("forward", "Other", "", version="1.0", note="failed | badly"),
        kernel_row("forward", "ssta triton", 20.0, "full", 120), kernel_row("forward", "fast", 15.0, "full", 120, version="4.0"),
        kernel_row("forward", "SDPA cuDNN", 1234.5, "full", 120, version="2.9"), kernel_row("backward", "ssta triton", 21.0),
        kernel_row("backward", "ssta triton, non-deterministic dQ", 16.0),
        kernel_row("backward", "SDPA cuDNN", 99.96, "full", 120, version="2.9")])
    readme, other = tmp_path / "README.md", tmp_path / "other.md"
    readme.write_text("before\n<!-- table:kernels -->\nstale\n<!-- /table -->\nafter\n<!-- table:errors -->\nkept\n<!-- /table -->\n")
    other.write_text("<!-- table:around -->\n<!-- /table -->\n<!-- table:missing -->\n<!-- /table -->\n")
    monkeypatch.setattr(table, "DOCUMENTS", (readme, other))
    monkeypatch.setattr(table, "HERE", tmp_path)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    monkeypatch.setattr(table.staleness, "ages", lambda name, rows: [])
    return table, readme, other


def test_a_table_from_a_made_up_csv(made_up, capsys):
    table, readme, other = made_up
    before = readme.read_text()
    with pytest.raises(SystemExit, match="README.md in .* benchmark/results holds for kernels: run python benchmark/table.py"):
        table.main(["--check"])
    assert readme.read_text() == before
    table.main([])
    assert readme.read_text() == """before
<!-- table:kernels -->
| tokens | heads | dim | inputs | blocks kept | direction | SSTA triton, TFLOP/s | SSTA triton, ms | SSTA triton, non-deterministic dQ, ms \
| FlexAttention, ms | fast, ms | SDPA cuDNN, ms | fastest other / SSTA triton | fastest other / SSTA triton, non-deterministic dQ |
|---:|---:|---:|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|
| 46,080 | 16 | 128 | randn | 48 of 120 | forward | 400 | 8.00 | – | 10.0 | – | 1,230 | 1.25 | – |
| 46,080 | 16 | 128 | randn | 120 of 120, all | forward | 400 | 20.0 | – | – | 15.0 | 1,230 | 0.75 | – |
| 46,080 | 16 | 128 | randn | 48 of 120 | backward | 400 | 21.0 | 16.0 | – | – | 100 | 4.76 | 6.25 |

Card, driver 1, torch 2.9, triton 3.5, fast 4.0; measured 2026-01-02
commit abc, 2026-01-02
<!-- /table -->
after
<!-- table:errors -->
kept
<!-- /table -->
"""
    around, missing = other.read_text().split("<!-- /table -->\n")[:2]
    assert "| 48 of 120 | SSTA triton | 0.0500 | 2.0% | 2.0% | 180 | 180 | 0.500 | 0.00300 | 0.00300 |\n" in around
    assert "Other" not in around and around.count("\n| 46,080") == 6
    assert "| flashinfer |  | not installed |\n| Other | forward | failed / badly |\n" in missing
    table.main(["--check"])
    table.main([])
    assert "every table shows" in capsys.readouterr().out


# Rows that are older than the code


@pytest.fixture
def repository(tmp_path):
    """A git repository with kernels; commit(**files), "folder__name" for folder/name.py, returns the commit's name."""
    tree = tmp_path / "tree"

    def git(*command):
        run = subprocess.run(["git", "-C", str(tree), "-c", "user.name=x", "-c", "user.email=x@x", *command],
                             capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    def commit(**files):
        for name, text in files.items():
            path = tree / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", "x")
        return git("rev-parse", "--short=10", "HEAD")

    tree.mkdir()
    git("init", "-q")
    return tree, commit


KERNEL = '''"""A kernel."""


def f(x):
    """Adds."""
    return x + 1  # one
'''


def ages_in(tree, *commits, name="kernels_h200", device="NVIDIA H200"):
    import staleness

    staleness._changed_code.cache_clear()
    return staleness.ages(name, [dict(commit=commit, device=device) for commit in commits], tree)


def test_rows_are_stale_when_code_under_them_changes(repository):
    tree, commit = repository
    first = commit(kernels__hopper__forward=KERNEL, kernels__portable__forward=KERNEL, kernels__estimate=KERNEL, ssta__attention=KERNEL)
    words = KERNEL.replace("A kernel", "Another").replace("Adds", "One more").replace("x + 1  # one", "(x +\n 1)")
    second = commit(kernels__hopper__forward=words)

    def changed(*commits, **more):
        return [age.changed for age in ages_in(tree, *commits, **more)]

    assert changed(first, second) == [(), ()], "comments, docstrings and layout are not code"
    third = commit(kernels__hopper__forward=words.replace("+", "-"), kernels__hopper__backward=KERNEL)
    both = ("kernels/hopper/backward.py", "kernels/hopper/forward.py")
    assert changed(first, second, third, first) == [both, both, ()]
    assert changed(first, name="kernels_a100", device="NVIDIA A100") == [()], "it runs kernels/portable"
    commit(kernels__estimate="def g(): pass\n", pipelines__patch__report="x = 1\n", pipelines__ranks__split="x = 1\n",
           ssta__ranks__exchange="x = 1\n", ssta__trained__vsa="x = 1\n")
    assert changed(third) == [()]
    assert changed(third, name="layer_h200") == changed(third, name="pipeline_h200") == [("kernels/estimate.py",)]
    assert changed(third, name="parallel_h200x2") == [("kernels/estimate.py", "pipelines/ranks/split.py", "ssta/ranks/exchange.py")]
    assert changed(third, name="vsa_h200") == [("kernels/estimate.py", "ssta/trained/vsa.py")]
    (tree / "ssta" / "attention.py").unlink()
    (tree / "kernels" / "__init__.py").write_text("from .estimate import g\n")
    assert changed(third, name="host_h200") == [("kernels/estimate.py", "ssta/attention.py")], "the working tree counts, doors do not"


def test_what_is_said_of_stale_rows(repository):
    tree, commit = repository
    first = commit(kernels__hopper__forward=KERNEL, kernels__op=KERNEL)
    assert [age.fresh for age in ages_in(tree, first)] == [True]
    commit(kernels__hopper__forward="x = 1\n")
    age, = ages_in(tree, first, first)
    assert str(age) == f"Stale: 1 file under these rows changed since commit {first} (kernels/hopper 1)" and age.rows == 2
    commit(kernels__hopper__backward="x = 1\n", kernels__op="x = 1\n")
    age, = ages_in(tree, first)
    assert str(age).endswith(f"3 files under these rows changed since commit {first} (kernels/hopper 2, kernels 1)")


def test_without_the_commit_nothing_is_known(repository, tmp_path):
    tree, commit = repository
    first = commit(kernels__op="x = 1\n")
    commit(kernels__op="x = 2\n")
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{tree}", str(tmp_path / "shallow")], check=True)
    (tmp_path / "bare").mkdir()
    for folder, named in ((tmp_path / "shallow", first), (tmp_path / "bare", first), (tree, "unknown")):
        age, = ages_in(folder, named)
        assert age.changed is None and not age.fresh
        assert str(age) == f"Unknown: git does not have commit {named} here, so these rows may be stale"


def test_every_csv_says_what_it_depends_on():
    import measure
    import staleness

    for path in measure.RESULTS.glob("*.csv"):
        staleness.ages(path.stem, [])
    with pytest.raises(ValueError, match="must say in SOURCES what speed_h200.csv depends on"):
        staleness.ages("speed_h200", [])
    library = [path.relative_to(staleness.ROOT).as_posix() for floor in ("kernels", "ssta", "pipelines", "interfaces")
               for path in sorted((staleness.ROOT / floor).glob("**/*.py"))]
    for kind, patterns in staleness.SOURCES.items():
        assert any(staleness.matches(path, patterns, "hopper") for path in library), kind
        for pattern in patterns:
            assert any(staleness.matches(path, (pattern.lstrip("!"),), "hopper") for path in library), f"{kind}: {pattern} is nowhere"


def test_stale_rows_are_shown_and_fail_only_where_fresh_ones_are_wanted(made_up, monkeypatch, capsys):
    table, readme, other = made_up
    table.main([])
    clean = readme.read_text()
    aged = table.staleness.Age("abc", 11, ("kernels/op.py",))
    monkeypatch.setattr(table.staleness, "ages", lambda name, rows: [aged])
    capsys.readouterr()
    table.main(["--check"])
    said = capsys.readouterr().out
    assert readme.read_text() == clean and "what is stale has changed for kernels: python benchmark/table.py" in said
    assert f"kernels_card.csv, 11 rows: {aged}" in said
    with pytest.raises(SystemExit, match="to be measured again: kernels_card.csv"):
        table.main(["--fresh"])
    table.main([])
    caption = "\ncommit abc, 2026-01-02\n"
    line = "**Stale**: 1 file under these rows changed since commit abc.\n"
    assert readme.read_text() == clean.replace(caption, caption + line)
    capsys.readouterr()
    table.main(["--check"])
    assert "has changed" not in capsys.readouterr().out
    monkeypatch.setattr(table.staleness, "ages", lambda name, rows: [table.staleness.Age("abc", 11, ())])
    table.main(["--fresh"])
    table.main([])
    assert readme.read_text() == clean


# Tables and plots


def test_other_inputs_have_lines_of_their_own_and_are_left_out_of_plots(made_up):
    table, *_ = made_up
    columns = "what provider pattern tokens heads head_dim block kept blocks median_ms tflops".split()
    rows = [dict(zip(columns, ["forward", "ssta hopper", "random", "46080", "16", "128", "384", "48", "120", ms, "400"]), inputs=kind)
            for kind, ms in (("randn", "9.0"), ("long", "9.25"), ("outlier", "9.5"))]
    assert [(line[3], line[7]) for line in table.times_table(rows)] == [
        ("inputs", "SSTA hopper, ms"), ("randn", "9.00"), ("long", "9.25"), ("outlier", "9.50")]
    pytest.importorskip("matplotlib")
    import plots

    where = dict(device="Card", torch="2.9", triton="3.5", commit="abc", date="2026-01-02")
    assert len(plots.plot_kernels([row | where for row in rows]).axes[0].patches) == 1


def test_rates_in_short_say_how_much_the_inputs_matter(made_up):
    table, *_ = made_up

    def row(what, provider, ms, inputs):
        return dict(kernel_row(what, provider, ms), inputs=inputs, **{"tflops": 400.4 if provider == "ssta hopper" else 1.0})

    rows = [row("forward", name, ms, inputs) for inputs, times in (("randn", (10.0, 11.0, 12.0)), ("long", (10.0, 13.0, 12.5)))
            for name, ms in zip(("ssta hopper", "fast", "other"), times)]
    rows += [row("backward", name, ms, "randn") for name, ms in (
        ("ssta hopper", 10.0), ("ssta hopper, non-deterministic dQ", 8.0), ("fast", 9.0))]
    rows = [{name: str(value) for name, value in row.items()} for row in rows]
    assert table.rates_table(rows)[1:] == [["46,080", "16", "128", "48 of 120", "400", "1.10 to 1.25", "400", "0.90", "1.12"]]
    assert table.rates_table(rows[:3])[1:] == [["46,080", "16", "128", "48 of 120", "400", "1.10", "–", "–"]]


def test_speed_ups_are_the_defaults_or_say_that_they_are_not():
    import table

    rows = [dict(model=f"{model}, 720p", what=what, step_s=seconds, blocks="8", blocks_measured=measured)
            for model, what, seconds, measured in (
        ("A", "default", "2.0", "2"), ("A", "sparse", "1.9", "2"), ("A", "stock", "9.0", "1"), ("A", "unmasked", "5.0", "2"),
        ("A", "dense", "4.0", "2"), ("A", "removed", "1.0", "2"), ("A", "none", "", "2"), ("B", "stock", "1.0", "2"),
        ("C", "unmasked", "3.0", "8"), ("C", "none", "1.0", "8"), ("D", "unmasked", "3.0", "4"), ("D", "sparse", "1.0", "4"))]
    assert table.speed_ups_table(rows)[1:] == [
        ["A, 720p", "SSTA by default", "2.00", "5.00", "2.50", "4.00", "2.00", "1.00"],
        ["C, 720p", 'SSTA, `pad_type="none"`', "1.00", "3.00", "3.00", "–", "–", "–"],
        ["D, 720p", "SSTA, all layers sparse", "1.00", "3.00", "3.00", "–", "–", "–"]]
    assert table.reckoned(rows) == ("All weights are random. Measured were 2 of 8 blocks of A and 4 of 8 blocks of D; the other blocks "
                                    "were reckoned from these. C was measured whole.")


def test_layers_of_checkpoints_that_were_trained_sparse():
    import table

    rows = [dict(layer="VSA", what=what, impl=impl, direction=direction, median_ms=ms, tflops="274.2") for what, impl, direction, ms in (
        ("dense", "SDPA", "forward", "10"), ("exact part", "auto", "forward", "4.3"), ("layer", "auto", "forward", "5"),
        ("exact part", "auto", "backward", "12"), ("exact part", "fastvideo-kernel", "forward", "6"))]
    assert table.trained_table(rows)[1:] == [["VSA", "10.0", "4.30 (274)", "5.00", "12.0 (274)", "–", "–", "6.00"]]


def test_documents_for_users_name_days_and_no_commits(made_up, monkeypatch, tmp_path):
    """Commits and stale rows are for those who work on it, in benchmark/*.md."""
    table, readme, other = made_up
    monkeypatch.setattr(table, "HERE", tmp_path / "elsewhere")
    monkeypatch.setattr(table.staleness, "ages", lambda name, rows: [table.staleness.Age("abc", 11, ("kernels/op.py",))])
    table.main([])
    assert "fast 4.0; measured 2026-01-02\n<!-- /table -->" in readme.read_text() and "commit" not in readme.read_text() + other.read_text()
    assert "Stale" not in readme.read_text()


def test_days_of_rows_are_given_from_first_to_last():
    import table

    where = dict(device="Card", driver="1", torch="2.9", triton="3.5", commit="abc")
    rows = [where | dict(date=date) for date in ("2026-01-05", "2026-01-02", "2026-01-03")]
    assert table.captioned([["a"], ["1"]], rows, "It rains.") == (
        "| a |\n|---:|\n| 1 |\n\nIt rains.\n\nCard, driver 1, torch 2.9, triton 3.5; measured 2026-01-02 to 2026-01-05\n")


def test_plots_are_drawn_or_named_as_missing(made_up, tmp_path, monkeypatch, capsys):
    table, *_ = made_up
    shutil.copy(tmp_path / "kernels_card.csv", tmp_path / "sweep_card.csv")
    layer_csv(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    table.draw(tmp_path)
    assert "matplotlib is not installed" in capsys.readouterr().out and not list(tmp_path.glob("*.png"))
    monkeypatch.delitem(sys.modules, "matplotlib")
    pytest.importorskip("matplotlib")
    table.draw(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["kernels_card.png", "layer_a.png", "sweep_card.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.glob("*.png"))


def test_a_plot_shows_every_measured_rate(made_up, tmp_path):
    pytest.importorskip("matplotlib")
    import plots

    table, *_ = made_up
    forward, backward = plots.plot_kernels(table.read_rows(tmp_path / "kernels_card.csv")).axes
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in forward.containers}
    # What knows no patterns stands beside each of them.
    assert heights == {"SSTA triton": [400.4] * 2, "FlexAttention": [400.4], "fast": [400.4], "SDPA cuDNN": [400.4] * 2,
                       "SSTA triton, non-deterministic dQ": []}
    assert [text.get_text().split("\n")[-1] for text in forward.get_xticklabels()] == ["48 of 120", "120 of 120, all"]
    assert sum(map(len, backward.containers)) == 4


def test_the_legend_of_the_kernels_has_the_colours_of_the_bars(made_up, tmp_path):
    pytest.importorskip("matplotlib")
    import plots
    from matplotlib.colors import to_rgba

    table, *_ = made_up
    figure = plots.plot_kernels(table.read_rows(tmp_path / "kernels_card.csv"))
    legend, = figure.legends
    shown = {text.get_text(): patch.get_facecolor() for text, patch in zip(legend.get_texts(), legend.get_patches())}
    drawn = {bars.get_label(): bars[0].get_facecolor() for axes in figure.axes for bars in axes.containers if len(bars)}
    assert shown == drawn and len({to_rgba(colour) for colour in shown.values()}) == len(shown) == 5


def test_each_layer_is_drawn_in_its_own_scale(tmp_path):
    pytest.importorskip("matplotlib")
    import plots

    where = dict(device="Card", torch="2.9", triton="3.5", commit="abc", date="2026-01-02")
    rows = [where | dict(layer=layer, padding=padding, stage=stage, median_ms=ms)
            for layer, scale in (("large", 100), ("small", 1)) for padding, stage, ms in (
                ("dense", "total", f"{4 * scale}"), ("default", "attend", f"{scale}"), ("default", "total", f"{1.5 * scale}"))]
    figure = plots.plot_layer(rows)
    assert [axes.get_title() for axes in figure.axes] == ["large", "small"]
    for axes in figure.axes:
        longest = max(bar.get_x() + bar.get_width() for bar in axes.patches)
        assert longest > 0.8 * axes.get_xlim()[1], "bars fill their box"
    assert "commit" not in figure.get_supxlabel() and "measured 2026-01-02" in figure.get_supxlabel()


def layer_csv(folder):
    import measure
    from shapes import LAYERS

    measure.write_rows(folder / "layer_a.csv", [
        dict(layer=LAYERS[0].name, padding="dense", stage="total", median_ms=200.0, extra_mib=444.4, extra_over_qkvo=0.25, density=1.0),
        dict(layer=LAYERS[0].name, padding="none", stage="attend", median_ms=44.0, extra_mib="", extra_over_qkvo="", density=""),
        dict(layer=LAYERS[0].name, padding="none", stage="total", median_ms=50.0, extra_mib=1889.3, extra_over_qkvo=1.0645,
             density=0.257)])


def test_the_other_tables(tmp_path):
    import measure
    import table
    from shapes import LAYERS

    layer_csv(tmp_path)
    measure.write_rows(tmp_path / "layer_small.csv", [dict(layer="small", padding="dense", stage="total", median_ms=1.0, density=1)])
    measure.write_rows(tmp_path / "errors_a.csv", [
        dict(impl="torch", dtype="float16", pattern="ragged", tensor=name, max_error=0.00012345, eager_max_error=0.5)
        for name in ("out", "lse", "dq", "dk", "dv")])
    times = dict(median_ms=2.0, q1_ms=1.9, q3_ms=2.1)
    measure.write_rows(tmp_path / "tokens_a.csv", [dict(what="decode", **times, rate=2.71, unit="TB/s", extra_mib=5.0)])
    measure.write_rows(tmp_path / "interfaces_a.csv", [
        dict(system="FlashInfer", q_block=64, k_block=64, what="forward", provider="ssta", **times, tflops=531.0, plan_ms=0.42)])
    measure.write_rows(tmp_path / "quality_a.csv", [dict(
        what="sample", clips="procedural", train_seed=1, name="dropped 0.156, tile 4x4x8", density=0.3, psnr=34.56, psnr_spread=1.23,
        ssim=0.9876, velocity_error=0.0312, loss_above=-0.1), dict(
        what="sample", clips="film", train_seed=1, name="dropped 0.156, tile 4x4x8", density=0.3, psnr=36.56, psnr_spread="",
        ssim=0.9876, velocity_error=0.0312, loss_above=0.9), dict(
        what="sample", clips="film", train_seed=1, name="linear 0.2", density=0.2, psnr=30.0, psnr_spread="", ssim=0.9,
        velocity_error=0.05, loss_above=1.0)])
    host = dict(layer="small", host_us=151.2, q1_us=150.0, q3_us=156.0)
    measure.write_rows(tmp_path / "host_a.csv", [dict(**host, what="forward", min_us=140, extra_mib="", extra_over_qkvo=""),
                                                 dict(**host, what="layer", min_us="", extra_mib=10.0, extra_over_qkvo=0.8)])
    measure.write_rows(tmp_path / "fine_tune_a.csv", [
        dict(what="fine-tune", clips="film", train_seed=1, name=name, loss=0.12345, loss_above=2.875, velocity_error=error,
             gap_closed=closed)
        for name, error, closed in (("linear 0.15, trained densely", "", ""), ("linear 0.15, distilled", 0.0321, 67.8))])
    names = ("layer", "stages", "errors", "tokens", "interfaces", "host", "quality", "samples", "fine_tune")
    filled = table.filled("".join(f"<!-- table:{name} -->\n<!-- /table -->\n" for name in names), tmp_path)
    layer, stages, errors, tokens, interfaces, host, quality, samples, fine_tune = filled.split("<!-- /table -->\n")[:9]
    assert "| film, training 1 | linear 0.15, trained densely | 0.1235 | +2.88 % | – | – |\n" in fine_tune
    assert "| film, training 1 | linear 0.15, distilled | 0.1235 | +2.88 % | 0.0321 | 68 % |\n" in fine_tune
    assert "| as many pairs, the others dropped | 30.0% | 35.6 (34.6 to 36.6) | 0.988 |\n" in samples and "0.2" not in samples
    assert "| dropped 0.156, tile 4x4x8 | 30.0% | 34.6 ± 1.2 | 36.6 | 0.988 | 0.0312 | +0.40 % |\n" in quality
    assert "| linear 0.2 | 20.0% | – | 30.0 | 0.900 | 0.0500 | +1.00 % |\n" in quality
    assert "| small | forward | 151 | 140 | 2.0% | – |\n| small | layer | 151 | – | 2.0% | 10.0 MiB (0.800 x) |\n" in host
    assert "| decode | 2.00 | 5.0% | 2.71 TB/s | 5.00 |\n" in tokens
    assert "| FlashInfer | (64, 64) | forward | SSTA | 2.00 | 531 | 0.420 |\n" in interfaces
    assert "| dense (torch SDPA) | 200 | 1.00 | 444 MiB (0.250 x) |\n" in layer
    assert '| SSTA, `pad_type="none"` | 50.0 | 4.00 | 1,890 MiB (1.06 x) |\n' in layer
    assert layer.count("; measured ") == 1, "a CSV without the layer gives no table"
    assert f'| {LAYERS[0].name} | `pad_type="none"` | 44.0 | 50.0 | 26% |\n' in stages and "| small |" in stages
    assert f"| torch | float16 | ragged |{' 0.000123 (0.500) |' * 5}\n" in errors


@pytest.mark.parametrize("text, message", [
    ("<!-- table:speed -->\n<!-- /table -->", "table:NAME must be one of rates, .*, rollout, got 'speed'"),
    ("<!-- table:kernels -->\n", "followed by <!-- /table -->"),
    ("<!-- table:kernels --><!-- /table -->", "at the end of its line")])
def test_places_that_cannot_be_filled(tmp_path, text, message):
    import table

    with pytest.raises(ValueError, match=message):
        table.filled(text, tmp_path)
