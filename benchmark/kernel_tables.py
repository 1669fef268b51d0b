"""The tables of the kernels, from rows of bench_kernels.py."""

from __future__ import annotations

from collections.abc import Iterable

from rows import Row, figures, grouped, is_dense, kept_cell, milliseconds, problem_of, spread, title, with_times


def rates_table(rows: list[Row]) -> list[list[str]]:
    """``times_table`` in short: one line a problem and pattern, rates with the first of the inputs, ratios from the least to the greatest
    over all of them."""
    head, *lines = times_table(rows)
    ratios = [column for column, name in enumerate(head) if name.startswith("fastest other")]
    found = [["tokens", "heads", "dim", "blocks kept", "forward, TFLOP/s", "fastest other / SSTA", "backward, TFLOP/s",
              "fastest other / SSTA", *["the same, non-deterministic dQ"] * (len(ratios) - 1)]]
    for key, of in grouped(lines, lambda line: (*line[:3], line[4])).items():
        forward, backward = ([line for line in of if line[5] == what] for what in ("forward", "backward"))
        found.append([*key, *(cell for group, columns in ((forward, ratios[:1]), (backward, ratios)) for cell in (
            group[0][6] if group else "–", *(span(line[column] for line in group) for column in columns)))])
    return found


def span(cells: Iterable[str]) -> str:
    """Of numbers as a table shows them the least and the greatest."""
    numbers = sorted({cell for cell in cells if cell != "–"}, key=float)
    return " to ".join(dict.fromkeys((numbers[0], numbers[-1]))) if numbers else "–"


def times_table(rows: list[Row]) -> list[list[str]]:
    """One line a problem, pattern and direction: milliseconds of every provider, the rate of the first, and how many times as long as ours
    the fastest other library takes."""
    measured = [row for row in rows if row["what"] in ("forward", "backward")]
    providers = with_times(measured)
    others = [name for name in providers if not name.startswith("ssta")]
    compared = [name for name in providers if others and name.split(",")[0] == providers[0]]
    lines = [["tokens", "heads", "dim", "inputs", "blocks kept", "direction", f"{title(providers[0])}, TFLOP/s",
              *(f"{title(name)}, ms" for name in providers), *(f"fastest other / {title(name)}" for name in compared)]]
    for problem, of_problem in grouped(measured, problem_of).items():
        # What knows no patterns computes everything once for all patterns of the problem.
        everything = {(row["what"], row["provider"]): row for row in of_problem if is_dense(row)}
        for (*_, what), found in grouped(of_problem, lambda row: (row["pattern"], row["kept"], row["what"])).items():
            cells = {row["provider"]: row for row in found} | {name: row for (of, name), row in everything.items() if of == what}
            if any(cells.get(name, {}).get("median_ms") for name in providers if (what, name) not in everything):
                lines.append([*shape_cells(problem), kept_cell(found[0]), what, figures(cells[providers[0]]["tflops"]),
                              *(milliseconds(cells.get(name)) for name in providers),
                              *(ratio(cells.get(name), map(cells.get, others)) for name in compared)])
    return lines


def ratio(row: Row | None, others: Iterable[Row | None]) -> str:
    """The least time of ``others`` over that of ``row``."""
    times = [float(other["median_ms"]) for other in others if other and other["median_ms"]]
    return f"{min(times) / float(row['median_ms']):.2f}" if times and row and row["median_ms"] else "–"


def around_table(rows: list[Row]) -> list[list[str]]:
    """What stands around the times: making the lists, spread, extra memory, what the host needs for a call, errors."""
    lines = [["tokens", "heads", "dim", "inputs", "blocks kept", "library", "lists, ms", "forward, spread", "backward, spread",
              "forward, MiB", "backward, MiB", "forward, host ms", "forward, error", "backward, error"]]
    measured = [row for row in rows if row["what"] != "absent"]
    for (problem, _, _, provider), found in grouped(measured, lambda row: (problem_of(row), row["pattern"], row["kept"],
                                                                           row["provider"])).items():
        of = {row["what"]: row for row in found}
        if any(row["median_ms"] for row in found):
            lines.append([*shape_cells(problem), kept_cell(found[0]), title(provider), milliseconds(of.get("lists")),
                          *(spread(of.get(what)) for what in ("forward", "backward")),
                          *(figures(of.get(what, {}).get("extra_mib")) for what in ("forward", "backward")),
                          figures(of.get("forward", {}).get("host_ms")),
                          *(figures(of.get(what, {}).get("error")) for what in ("forward", "backward"))])
    return lines


def missing_table(rows: list[Row]) -> list[list[str]]:
    """Which library could not be measured, and why; each reason once."""
    lines = [["library", "what", "why not"]]
    seen = dict.fromkeys((row["provider"], row["what"], row["note"]) for row in rows if row["note"])
    return lines + [[name, "" if what == "absent" else what, note.replace("|", "/")] for name, what, note in seen]


def shape_cells(problem: tuple[str, ...]) -> list[str]:
    tokens, heads, head_dim, _, inputs = problem
    return [f"{int(tokens):,}", heads, head_dim, inputs]
