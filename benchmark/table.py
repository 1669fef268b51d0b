"""The measured tables of README.md and of benchmark/*.md, and the plots, made from benchmark/results/*.csv.

    python benchmark/table.py            rewrites the tables and, where matplotlib is installed, the plots
    python benchmark/table.py --check    changes nothing; fails when a document does not show what the CSVs hold; prints stale rows
    python benchmark/table.py --fresh    the same, and fails when a row is stale

A document marks a place by two lines, between which this script writes:

    <!-- table:NAME -->
    <!-- /table -->

NAME is one of TABLES, at the end of this file, which also names the CSVs, SOURCE_*.csv. Every CSV gives one table. Below it stand the
machine, the versions and the days. In benchmark/*.md the commits stand there too, and a line where code under the rows has changed since
(staleness.py). That line may lag behind the code: a change of a kernel need not touch the documents. A place without a CSV is left as it
is. The main README has the shortest tables; most others stand in benchmark/*.md.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import staleness
from kernel_tables import around_table, missing_table, rates_table, times_table
from measure import RESULTS
from quality_tables import (
    equal_time_table,
    few_fine_tune_table,
    few_steps_table,
    fine_tune_table,
    gate_table,
    quality_table,
    rollout_table,
    samples_table,
)
from rank_tables import exchange_table, ranks_table, scaling_table, shared_stages_table
from recipe_tables import generation_table, recipe_ranks_table, recipe_table
from rows import (
    BESIDE,
    DEFAULTS,
    PADDINGS,
    STAGES,
    STEPS,
    Row,
    attention_of,
    days_of,
    figures,
    grouped,
    memory,
    milliseconds,
    read_rows,
    rows_beside,
    spread,
)
from shapes import LAYERS

HERE = Path(__file__).parent
DOCUMENTS = (HERE.parent / "README.md", *(HERE / f"{name}.md" for name in ("README", "kernels", "interfaces", "ranks", "quality")),
             *(HERE.parent / "docs" / f"{name}.md" for name in ("recipes", "settings", "sparse-checkpoints", "streaming")))
# The lines about staleness in a document.
NOTE = re.compile(r"^\*\*(?:Stale|Unknown)\*\*: .*\n", re.M)
PLACE = re.compile(r"(?P<open><!-- table:(?P<name>\w+) -->\n)(?P<body>.*?)(?P<close><!-- /table -->)", re.S)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail when a document does not show what the CSVs hold, and change nothing")
    parser.add_argument("--fresh", action="store_true", help="as --check, and fail too when a row is stale, or when git cannot say")
    options = parser.parse_args(argv)
    texts = {path: path.read_text() for path in DOCUMENTS}
    renewed = {path: filled(text, RESULTS, commits_and_age) if path.parent == HERE else filled(text, RESULTS)
               for path, text in texts.items()}
    if options.check or options.fresh:
        check(texts, renewed)
        old = print_stale(RESULTS)
        if old and options.fresh:
            raise SystemExit(f"to be measured again: {', '.join(old)}")
        return
    for path in DOCUMENTS:
        names = differing(texts[path], renewed[path])
        if names:
            path.write_text(renewed[path])
        print(f"{path}: {'rewrote ' + ', '.join(names) if names else 'every table shows what benchmark/results holds'}")
    draw(RESULTS)


def check(texts: dict[Path, str], renewed: dict[Path, str]) -> None:
    """Ends the program where a document does not show what the CSVs hold. What it says about staleness may be older than the code."""
    for path, text in texts.items():
        names = differing(NOTE.sub("", text), NOTE.sub("", renewed[path]))
        if names:
            raise SystemExit(f"{path.name} in {path.parent} does not show what benchmark/results holds for {', '.join(names)}: "
                             f"run python benchmark/table.py")
        late = differing(text, renewed[path])
        print(f"{path}: every table shows what benchmark/results holds")
        if late:
            print(f"    but what is stale has changed for {', '.join(late)}: python benchmark/table.py brings it up to date")


def differing(old: str, new: str) -> list[str]:
    """The names of the places whose text differs."""
    return [before["name"] for before, after in zip(PLACE.finditer(old), PLACE.finditer(new)) if before[0] != after[0]]


def print_stale(results: Path) -> list[str]:
    """Prints which rows of which CSVs are stale, or may be, and returns those CSVs' names."""
    found = []
    for path in sorted(results.glob("*.csv")):
        for age in staleness.ages(path.stem, read_rows(path)):
            if not age.fresh:
                print(f"{path.name}, {age.rows} rows: {age}")
                found.append(path.name)
    return list(dict.fromkeys(found))


def commits_and_age(name: str, rows: list[Row]) -> str:
    """The commits of ``rows`` of the CSV ``name``, then a line for each at which they are stale, or may be. --check prints the folders."""
    commits = "; ".join(dict.fromkeys(f"commit {row['commit']}, {row['date']}" for row in rows))
    stale = "".join(re.sub(r"^(\w+)", r"**\1**", f"{age.brief}.\n") for age in staleness.ages(name, rows) if not age.fresh)
    return f"{commits}\n{stale}"


def draw(results: Path, sources: Iterable[str] = ()) -> None:
    """Draws the CSVs of ``sources``, by default of all that there is a plot for."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        print("matplotlib is not installed, so there are no plots: pip install '.[plot]'")
        return
    from plots import JOINED, PLOTS

    for source, plot in PLOTS.items():
        for path in sorted(results.glob(f"{source}_*.csv")) if not sources or source in sources else ():
            rows, beside = read_rows(path), rows_beside(path) if plot in JOINED else []
            if plot in JOINED and not beside:
                print(f"{path} is drawn together with {BESIDE[source]}_*.csv of the same machine, which is not there")
                continue
            (plot(rows, beside) if plot in JOINED else plot(rows)).savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})
            print(f"drew {path.with_suffix('.png')}")


def filled(text: str, results: Path, below: Callable[[str, list[Row]], str] = lambda name, rows: "") -> str:
    """``text`` with the table of every NAME_*.csv in ``results`` between its marks, and under it what ``below`` says of its rows.

    Raises:
        ValueError: a mark with a name that no table has, or one without its end.
    """
    if len(re.findall(r"<!-- table:", text)) != len(PLACE.findall(text)):
        raise ValueError("every <!-- table:NAME --> must stand at the end of its line and be followed by <!-- /table -->")

    def fill(place: re.Match) -> str:
        if place["name"] not in TABLES:
            raise ValueError(f"table:NAME must be one of {', '.join(TABLES)}, got {place['name']!r}")
        source, make = TABLES[place["name"]]
        tables: list[str] = []
        for path in sorted(results.glob(f"{source}_*.csv")):
            rows = read_rows(path)
            if make is layer_table:
                # What the caption says is of the layer that is shown.
                rows = [row for row in rows if row["layer"] == LAYERS[0].name]
            lines = make(rows, rows_beside(path)) if make in JOINED else make(rows)
            if len(lines) > 1:
                tables.append(captioned(lines, rows, SENTENCES.get(make, lambda rows: "")(rows)) + below(path.stem, rows))
        return place["open"] + "\n".join(tables) + place["close"] if tables else place[0]

    return PLACE.sub(fill, text)


# The layer


def layer_table(rows: list[Row]) -> list[list[str]]:
    """Of one layer dense and what SSTA does by default, then the published configuration in every padding, the slowest first."""
    first = ("dense", "exact", *DEFAULTS)
    totals = [row for row in rows if row["stage"] == "total"
              and (row["padding"] in first or row.get("compensation") in (None, "", "none"))]
    totals.sort(key=lambda row: (row["padding"] not in first, -float(row["median_ms"])))
    times = {row["padding"]: float(row["median_ms"]) for row in totals}
    over = {name: times[name] for name in ("dense", "exact") if name in times}
    lines = [["attention", "ms", *(f"speed-up over {PADDINGS[name]}" for name in over), "extra memory"]]
    for row in totals:
        name = attention_of(row)
        lines.append([name if row["padding"] in first else f"SSTA, {name}", milliseconds(row),
                      *(figures(dense / float(row["median_ms"])) for dense in over.values()), memory(row)])
    return lines


def totals_table(rows: list[Row]) -> list[list[str]]:
    """One line a layer and kind of attention, without its stages."""
    lines = [["layer", "attention", "ms", "spread", "computed", "extra memory"]]
    return lines + [[row["layer"], attention_of(row), milliseconds(row), spread(row), f"{float(row['density']):.0%}", memory(row)]
                    for row in rows if row["stage"] == "total" and row["median_ms"]]


def stages_table(rows: list[Row]) -> list[list[str]]:
    """One line a layer, padding and compensation, with what each stage takes inside it."""
    stages = [stage for stage in STAGES if any(row["stage"] == stage for row in rows)]
    lines = [["layer", "", *(f"{stage}, ms" for stage in stages), "whole layer, ms", "computed"]]
    for (layer, name), found in grouped(rows, lambda row: (row["layer"], attention_of(row))).items():
        of = {row["stage"]: row for row in found}
        lines.append([layer, name, *(milliseconds(of.get(stage)) for stage in (*stages, "total")),
                      f"{float(of['total']['density']):.0%}"])
    return lines


def trained_table(rows: list[Row]) -> list[list[str]]:
    """One line a layer of a checkpoint that was trained sparse: dense, its exact part and the whole, and their backwards."""
    lines = [["layer", "dense SDPA, ms", "exact part, ms (TFLOP/s)", "layer, ms", "exact part, backward, ms (TFLOP/s)",
              "layer, backward, ms", "exact part, FlexAttention, ms", "exact part, FastVideo, ms"]]
    for layer, found in grouped(rows, lambda row: row["layer"]).items():
        by = {row["impl"]: row for row in found if row["what"] == "exact part"}
        of = {(row["what"], row["direction"]): row for row in found if row["impl"] not in ("FlexAttention", "fastvideo-kernel")}
        exact = [of.get(("exact part", direction)) for direction in ("forward", "backward")]
        forward, backward = (f"{milliseconds(row)} ({figures(row['tflops'])})" if row else "–" for row in exact)
        lines.append([layer, milliseconds(of.get(("dense", "forward"))), forward, milliseconds(of.get(("layer", "forward"))), backward,
                      milliseconds(of.get(("layer", "backward"))), milliseconds(by.get("FlexAttention")),
                      milliseconds(by.get("fastvideo-kernel"))])
    return lines


def host_table(rows: list[Row]) -> list[list[str]]:
    """One line a shape and call: what it costs the host, and what it needs of memory."""
    lines = [["layer", "call", "host, us", "least, us", "spread", "extra memory"]]
    return lines + [[row["layer"], row["what"], figures(row["host_us"]), figures(row.get("min_us")),
                     f"{(float(row['q3_us']) - float(row['q1_us'])) / 2 / float(row['host_us']):.1%}", memory(row)] for row in rows]


# Lists of single tokens, and other libraries' interfaces


def tokens_table(rows: list[Row]) -> list[list[str]]:
    """One line a call, with its rate in its own unit."""
    lines = [["call", "ms", "spread", "rate", "extra MiB"]]
    return lines + [[row["what"], milliseconds(row), spread(row), f"{figures(row['rate'])} {row['unit']}", figures(row["extra_mib"])]
                    for row in rows]


def interfaces_table(rows: list[Row]) -> list[list[str]]:
    """One line an interface, block size, direction and library."""
    lines = [["interface", "blocks", "direction", "library", "ms", "TFLOP/s", "plan, ms"]]
    return lines + [[row["system"], f"({row['q_block']}, {row['k_block']})", row["what"], row["provider"].replace("ssta", "SSTA"),
                     milliseconds(row), figures(row["tflops"]), figures(row["plan_ms"])] for row in rows]


# The step of a model


def steps_table(rows: list[Row]) -> list[list[str]]:
    """One line a model and kind of attention, what SSTA does by default first."""
    lines = [["model", "attention", "s a step", "blocks measured", "memory besides the weights, MiB", "weights, MiB"]]
    order = list(dict.fromkeys(row["model"] for row in rows))
    for row in sorted(rows, key=lambda row: (order.index(row["model"]), list(STEPS).index(row["what"]))):
        lines.append([row["model"], STEPS[row["what"]], figures(row["step_s"]), f"{row['blocks_measured']} of {row['blocks']}",
                      figures(row["extra_mib"]), figures(row["weights_mib"])])
    return lines


def speed_ups_table(rows: list[Row]) -> list[list[str]]:
    """One line a model: its default step, beside dense ones by torch's SDPA, the faster of two, and by SSTA's kernel. Where the default
    was not measured, another row stands in for it, under its own name."""
    lines = [["model", "attention", "s a step", "dense by torch SDPA, s", "speed-up over it", "dense by SSTA's exact kernel, s",
              "speed-up over it", "without attention, s"]]
    for model, of in steps_of(rows).items():
        seconds = {what: float(row["step_s"]) for what, row in of.items()}
        dense = [seconds[what] for what in ("stock", "unmasked") if what in seconds]
        ours = stands_for(of)
        if ours and dense:
            exact = seconds.get("dense")
            lines.append([model, STEPS[ours], figures(seconds[ours]), figures(min(dense)), figures(min(dense) / seconds[ours]),
                          figures(exact), figures(exact / seconds[ours] if exact else None), figures(seconds.get("removed"))])
    return lines


def reckoned(rows: list[Row]) -> str:
    """How much of the models was measured."""
    found = {(model.split(",")[0], row["blocks_measured"], row["blocks"]) for model, of in steps_of(rows).items()
             if (ours := stands_for(of)) for row in [of[ours]]}
    parts = [f"{measured} of {blocks} blocks of {model}" for model, measured, blocks in sorted(found) if measured != blocks]
    whole = [model for model, measured, blocks in sorted(found) if measured == blocks]
    lines = ["All weights are random."]
    if parts:
        lines.append(f"Measured were {joined(parts)}; the other blocks were reckoned from these.")
    if whole:
        lines.append(f"{joined(whole)} {'were' if len(whole) > 1 else 'was'} measured whole.")
    return " ".join(lines)


def joined(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def steps_of(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Of each model the rows that have a time, by what they are of."""
    return {model: {row["what"]: row for row in found}
            for model, found in grouped([row for row in rows if row["step_s"]], lambda row: row["model"]).items()}


def stands_for(of: dict[str, Row]) -> str | None:
    """The row that speaks for SSTA: the default, or the nearest to it."""
    return next((what for what in ("default", "sparse", "none") if what in of), None)


def streaming_table(rows: list[Row]) -> list[list[str]]:
    """One line a stream: milliseconds of each kind of call, and the cache's memory over its keys and values."""
    kinds = ("call", "call that keeps", "all tiles", "stateless")
    lines = [["model", "queries x keys x heads", "pairs exact", *kinds, "dense", "dense / call", "step, ms", "dense / step",
              "cache over keys and values"]]
    for stream, found in grouped(rows, lambda row: row["stream"]).items():
        of = {row["what"]: float(row["median_ms"]) for row in found if row["median_ms"]}
        dense = min((of[what] for what in ("dense, cuDNN", "dense, flash", "dense") if what in of), default=None)
        step, dense_step = of.get("step, graph"), of.get("dense step, graph")
        lines.append([stream, " x ".join(f"{int(found[0][name]):,}" for name in ("queries", "keys", "heads")),
                      f"{100 * float(found[0]['exact']):.0f} %", *(figures(of.get(kind)) for kind in kinds), figures(dense),
                      f"{dense / of['call']:.2f}" if dense and "call" in of else "–", figures(step),
                      f"{dense_step / step:.2f}" if step and dense_step else "–", figures(found[0]["of_plain"])])
    return lines


# Exactness


def errors_table(rows: list[Row]) -> list[list[str]]:
    """One line an implementation, dtype and pattern: the largest error, and in brackets that of plain torch."""
    tensors = ("out", "lse", "dq", "dk", "dv")
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        both = f"{figures(row['max_error'])} ({figures(row['eager_max_error'])})"
        found.setdefault((row["impl"], row["dtype"], row["pattern"]), {})[row["tensor"]] = both
    lines = [["implementation", "dtype", "blocks", *tensors]]
    return lines + [[*key, *(of[tensor] for tensor in tensors)] for key, of in found.items()]


def captioned(lines: list[list[str]], rows: list[Row], sentence: str = "") -> str:
    """Markdown with the numbers to the right; below it ``sentence``, and the machine, versions and days of the CSV."""
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    numeric = [all(re.match(r"[\d–]", line[column]) for line in lines[1:]) for column in range(len(lines[0]))]
    rule = f"|{'|'.join('---:' if right else '---' for right in numeric)}|"
    where = rows[0]
    versions = ", ".join(dict.fromkeys(f"{row['provider']} {row['version']}" for row in rows
                                       if row.get("version") not in (None, "", where["torch"]) and row["median_ms"]))
    machine = (f"{where['device']}, driver {where['driver']}, torch {where['torch']}, triton {where['triton']}"
               f"{versions and ', ' + versions}; measured {days_of(rows)}")
    return "\n".join([head, rule, *body, "", *([sentence, ""] if sentence else []), machine, ""])


# NAME in a document -> SOURCE of its CSVs, and how the table is made.
TABLES = {"rates": ("kernels", rates_table), "kernels": ("kernels", times_table), "around": ("kernels", around_table),
          "missing": ("kernels", missing_table), "sweep": ("sweep", times_table), "cudnn": ("cudnn", times_table),
          "layer": ("layer", layer_table), "stages": ("layer", stages_table), "tokens": ("tokens", tokens_table),
          "interfaces": ("interfaces", interfaces_table), "steps": ("pipeline", steps_table), "speed_ups": ("pipeline", speed_ups_table),
          "recipe": ("recipe", recipe_table), "generation": ("recipe", generation_table), "recipe_ranks": ("recipe", recipe_ranks_table),
          "streaming": ("streaming", streaming_table),
          "scaling": ("parallel", scaling_table), "ranks": ("parallel", ranks_table),
          "shared_stages": ("parallel", shared_stages_table), "exchange": ("parallel", exchange_table), "host": ("host", host_table),
          "trained": ("vsa", trained_table), "errors": ("errors", errors_table), "quality": ("quality", quality_table),
          "samples": ("quality", samples_table), "equal_time": ("grid", equal_time_table), "fine_tune": ("fine_tune", fine_tune_table),
          "gate": ("gate", gate_table), "few_steps": ("few_steps", few_steps_table),
          "few_fine_tune": ("few_fine_tune", few_fine_tune_table), "rollout": ("rollout", rollout_table)}
# What stands below a table beside the machine.
SENTENCES = {speed_ups_table: reckoned}
# Those that are made of two CSVs.
JOINED = (samples_table, equal_time_table, few_steps_table)


if __name__ == "__main__":
    main()
