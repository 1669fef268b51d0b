"""README's measured tables, made from benchmark/results/*.csv: NAME_*.csv fill the place that README marks `table:NAME`.

    python benchmark/table.py            rewrites the tables
    python benchmark/table.py --check    changes nothing; fails when README does not show what the CSVs hold

Every CSV gives one table, with the machine that it was measured on below it. A place without a CSV is left as it is.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

from measure import RESULTS
from shapes import LAYERS

README = Path(__file__).parent.parent / "README.md"
PLACE = re.compile(r"(?P<open><!-- table:(?P<name>\w+) -->\n)(?P<body>.*?)(?P<close><!-- /table -->)", re.S)
PADDINGS = {"dense": "dense (torch SDPA)", "none": '`pad_type="none"`', "zero": '`pad_type="zero"`', "repeat": '`pad_type="repeat"`'}

Row = dict[str, str]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail when README does not show what the CSVs hold, and change nothing")
    options = parser.parse_args(argv)
    before = README.read_text()
    after = filled(before, RESULTS)
    stale = [old["name"] for old, new in zip(PLACE.finditer(before), PLACE.finditer(after)) if old[0] != new[0]]
    if options.check and stale:
        raise SystemExit(f"README.md does not show what benchmark/results holds for {', '.join(stale)}: run python benchmark/table.py")
    if stale:
        README.write_text(after)
    print(f"README.md: {'rewrote ' + ', '.join(stale) if stale else 'every table shows what benchmark/results holds'}")


def filled(text: str, results: Path) -> str:
    """``text`` with the table of every NAME_*.csv in ``results`` between its marks.

    Raises:
        ValueError: a mark with a name that no table has, or one without its end.
    """
    if len(re.findall(r"<!-- table:", text)) != len(PLACE.findall(text)):
        raise ValueError("every <!-- table:NAME --> must stand at the end of its line and be followed by <!-- /table -->")

    def fill(place: re.Match) -> str:
        if place["name"] not in TABLES:
            raise ValueError(f"table:NAME must be one of {', '.join(TABLES)}, got {place['name']!r}")
        source, make = TABLES[place["name"]]
        measured = [(make(rows), rows) for rows in map(read_rows, sorted(results.glob(f"{source}_*.csv")))]
        tables = [captioned(lines, rows) for lines, rows in measured if len(lines) > 1]
        return place["open"] + "\n".join(tables) + place["close"] if tables else place[0]

    return PLACE.sub(fill, text)


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def kernels_table(rows: list[Row]) -> list[list[str]]:
    """One line a shape, direction and implementation of ours. In the CSV each shape and direction begins with ours and ends with dense."""
    lines = [["tokens", "blocks kept", "direction", "kernel", "SSTA, ms", "FlexAttention, ms", "FlexAttention / SSTA", "dense SDPA, ms"]]
    ours, flex = [], None
    for row in rows:
        if row["provider"].startswith("ssta"):
            ours.append(row)
        elif row["provider"] == "FlexAttention":
            flex = row
        else:
            for mine in ours:
                ratio = float(flex["median_ms"]) / float(mine["median_ms"]) if flex else None
                lines.append([f"{int(mine['tokens']):,}", f"{mine['kept']} of {mine['blocks']}", mine["what"],
                              mine["provider"].removeprefix("ssta "), milliseconds(mine), milliseconds(flex), figures(ratio),
                              milliseconds(row)])
            ours, flex = [], None
    return lines


def layer_table(rows: list[Row]) -> list[list[str]]:
    """The first of the layers, if it was measured: dense and every padding, the slowest first."""
    totals = [row for row in rows if row["layer"] == LAYERS[0].name and row["stage"] == "total"]
    totals.sort(key=lambda row: -float(row["median_ms"]))
    dense = {row["padding"]: float(row["median_ms"]) for row in totals}.get("dense")
    lines = [["attention", "ms", "speed-up", "extra memory"]]
    for row in totals:
        name = PADDINGS[row["padding"]]
        lines.append([name if row["padding"] == "dense" else f"SSTA, {name}", milliseconds(row),
                      figures(dense / float(row["median_ms"])), f"{figures(row['extra_mib'])} MiB ({figures(row['extra_over_qkvo'])} x)"])
    return lines


def stages_table(rows: list[Row]) -> list[list[str]]:
    """One line a layer and padding, with what each stage takes by itself."""
    stages = ("tile", "select", "attend", "untile", "total")
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["layer"], row["padding"]), {})[row["stage"]] = row
    lines = [["layer", "", *(f"{stage}, ms" for stage in stages[:-1]), "whole layer, ms"]]
    return lines + [[layer, PADDINGS[padding], *(milliseconds(of.get(stage)) for stage in stages)]
                    for (layer, padding), of in found.items()]


def errors_table(rows: list[Row]) -> list[list[str]]:
    """One line an implementation, dtype and pattern: the largest error, and in brackets that of plain torch."""
    tensors = ("out", "lse", "dq", "dk", "dv")
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        both = f"{figures(row['max_error'])} ({figures(row['eager_max_error'])})"
        found.setdefault((row["impl"], row["dtype"], row["pattern"]), {})[row["tensor"]] = both
    lines = [["implementation", "dtype", "blocks", *tensors]]
    return lines + [[*key, *(of[tensor] for tensor in tensors)] for key, of in found.items()]


# README's name of a table -> the CSVs that it is made from, and how.
TABLES = {"kernels": ("kernels", kernels_table), "layer": ("layer", layer_table), "stages": ("layer", stages_table),
          "errors": ("errors", errors_table)}


def captioned(lines: list[list[str]], rows: list[Row]) -> str:
    """Markdown with the numbers to the right and the machine of the CSV below."""
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    numeric = [all(re.match(r"[\d–]", line[column]) for line in lines[1:]) for column in range(len(lines[0]))]
    rule = f"|{'|'.join('---:' if right else '---' for right in numeric)}|"
    where = rows[0]
    machine = f"{where['device']}, torch {where['torch']}, triton {where['triton']}, {where['date']}"
    return "\n".join([head, rule, *body, "", machine, ""])


def milliseconds(row: Row | None) -> str:
    return figures(row["median_ms"] if row else None)


def figures(number: float | str | None) -> str:
    """Three significant digits, a dash for what was not measured."""
    if number in (None, ""):
        return "–"
    rounded = float(f"{float(number):.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:#.3g}"


if __name__ == "__main__":
    main()
