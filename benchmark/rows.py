"""The rows of a CSV in benchmark/results: how they are read, what they are of, and the names and figures that tables and plots show."""

from __future__ import annotations

import csv
from pathlib import Path

Row = dict[str, str]
# Of a layer, dense attention too.
PADDINGS = {"dense": "dense (torch SDPA)", "exact": "dense (SSTA's kernel)", "none": '`pad_type="none"`', "zero": '`pad_type="zero"`',
            "repeat": '`pad_type="repeat"`'}
# What apply_ssta(pipe) does: shapes.attention_config has the configuration of each name.
DEFAULTS = {"default": "SSTA by default", "one part": "SSTA by default, `compensation_parts=1`"}
# The stages of a layer, in the order in which it runs them.
STAGES = ("exchange in", "tile", "estimate", "score", "select", "attend", "merge", "untile", "exchange out")
# What bench_pipeline.py measures, as tables and plots have it.
STEPS = {"default": DEFAULTS["default"], "sparse": "SSTA, all layers sparse",
         "one part": "SSTA, all layers sparse, `compensation_parts=1`", "stock": "unmodified diffusers",
         "unmasked": "dense without a mask (torch SDPA)", "dense": PADDINGS["exact"],
         "zero": f"SSTA, {PADDINGS['zero']}", "none": f"SSTA, {PADDINGS['none']}", "removed": "no attention at all"}
# bench_parallel.py's names of the same: of steps of its default all layers are sparse.
SHARED_STEPS = {**STEPS, "default": STEPS["sparse"]}


# SOURCE of CSVs -> that of others, from the same machine, which its tables or plots need too.
BESIDE = {"quality": "grid", "grid": "quality", "few_steps": "grid"}


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def rows_beside(path: Path) -> list[Row]:
    """Of the CSV that BESIDE names for ``path``, SOURCE_MACHINE.csv; none where there is no such file."""
    source, _, machine = path.stem.rpartition("_")
    other = path.with_name(f"{BESIDE[source]}_{machine}.csv")
    return read_rows(other) if other.exists() else []


def attention_of(row: Row) -> str:
    """What a row of a layer is about. A missing compensation is none."""
    kind = row.get("compensation") or "none"
    name = row.get("padding") or row["attention"]
    return DEFAULTS.get(name) or PADDINGS[name] + ("" if kind == "none" else f', `compensation="{kind}"`')


def grouped(rows: list[Row], key) -> dict:
    found: dict = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def days_of(rows: list[Row]) -> str:
    """The day on which they were measured, or the first and the last."""
    days = sorted({row["date"] for row in rows})
    return " to ".join(dict.fromkeys((days[0], days[-1])))


def problem_of(row: Row) -> tuple[str, ...]:
    # Rows from before there were others have no such column.
    return row["tokens"], row["heads"], row["head_dim"], row["block"], row.get("inputs") or "randn"


def kept_cell(row: Row) -> str:
    pattern = {"random": "", "full": ", all", "window": ", window"}[row["pattern"]]
    return f"{row['kept']} of {row['blocks']}{pattern}"


def is_dense(row: Row) -> bool:
    return row["provider"].startswith(("SDPA", "sageattention"))


def with_times(rows: list[Row]) -> list[str]:
    """The providers that were measured, ours first, then by appearance, those that know no patterns last."""
    names = dict.fromkeys(row["provider"] for row in rows if row["median_ms"])
    dense = {row["provider"] for row in rows if is_dense(row)}
    return sorted(names, key=lambda name: (name in dense, not name.startswith("ssta")))


def title(provider: str) -> str:
    """The names of SSTA's own implementations in its own spelling."""
    return provider.replace("ssta ", "SSTA ")


def memory(row: Row) -> str:
    """The peak besides the inputs, and over what query, key, value and output hold together."""
    return f"{figures(row['extra_mib'])} MiB ({figures(row['extra_over_qkvo'])} x)" if row["extra_mib"] else "–"


def milliseconds(row: Row | None) -> str:
    return figures(row["median_ms"] if row else None)


def spread(row: Row | None) -> str:
    """Half the distance between the quartiles, as a share of the median."""
    if not row or not row["median_ms"]:
        return "–"
    return f"{(float(row['q3_ms']) - float(row['q1_ms'])) / 2 / float(row['median_ms']):.1%}"


def figures(number: float | str | None) -> str:
    """Three significant digits, a dash for what was not measured."""
    if number in (None, ""):
        return "–"
    rounded = float(f"{float(number):.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:#.3g}"
