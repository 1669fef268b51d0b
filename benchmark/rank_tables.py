"""The tables of several GPUs, from rows of bench_parallel.py."""

from __future__ import annotations

from rows import SHARED_STEPS, STAGES, Row, attention_of, figures, grouped, milliseconds, spread


def scaling_table(rows: list[Row]) -> list[list[str]]:
    """One line a layer or step and attention: measured times and speed-ups by the number of GPUs."""
    totals = [row for row in rows if row["what"] in ("layer", "step") and row["stage"] == "total" and row["basis"] == "measured"
              and not row["note"]]
    numbers = sorted({int(row["ranks"]) for row in totals})
    lines = [["of", "attention", *(f"{n} GPU{'s' * (n > 1)}" for n in numbers), *(f"speed-up on {n}" for n in numbers[1:])]]
    for (what, shape, attention), found in grouped(totals, lambda row: (row["what"], row["shape"], row["attention"])).items():
        of = {int(row["ranks"]): row for row in found}
        name = attention_of(found[0]) if what == "layer" else SHARED_STEPS[attention]
        lines.append([f"{shape}, {what}", name, *(shared_time(of.get(n)) for n in numbers),
                      *(figures(of.get(n, {}).get("speed_up")) for n in numbers[1:])])
    return lines


def ranks_table(rows: list[Row]) -> list[list[str]]:
    """One line a layer or step, attention and number of ranks: measured beside reckoned."""
    lines = [["of", "attention", "ranks", "time", "speed-up", "reckoned", "its speed-up", "imbalance", "MiB a rank",
              "from one rank", "error"]]
    totals = [row for row in rows if row["what"] in ("layer", "step") and row["stage"] == "total" and not row["note"]]
    names = "what", "shape", "attention", "ranks"
    for (what, shape, attention, ranks), found in grouped(totals, lambda row: tuple(str(row[name]) for name in names)).items():
        of = {row["basis"]: row for row in found}
        measured, reckoned = of.get("measured"), of.get("reckoned")
        if measured is None and ranks == "1":
            continue
        name = attention_of(found[0]) if what == "layer" else SHARED_STEPS[attention]
        lines.append([f"{shape}, {what}", name, ranks, shared_time(measured),
                      figures((measured or {}).get("speed_up")), shared_time(reckoned), figures((reckoned or {}).get("speed_up")),
                      *(figures((measured or {}).get(column)) for column in ("imbalance", "extra_mib", "difference", "error"))])
    return lines


def shared_time(row: Row | None) -> str:
    if row is None:
        return "–"
    return f"{figures(row['median_ms'])} ms" if row["what"] == "layer" else f"{figures(row['step_s'])} s"


def shared_stages_table(rows: list[Row]) -> list[list[str]]:
    """One line a layer, attention and number of ranks, with what each stage takes on the rank that attends longest."""
    measured = [row for row in rows if row["what"] == "layer" and row["basis"] == "measured" and not row["note"]]
    shown = [stage for stage in (*STAGES, "total") if any(row["stage"] == stage for row in measured)]
    lines = [["layer", "attention", "ranks", *(f"{stage}, ms" for stage in shown)]]
    for (shape, _, ranks), found in grouped(measured, lambda row: (row["shape"], row["attention"], row["ranks"])).items():
        of = {row["stage"]: row for row in found}
        lines.append([shape, attention_of(found[0]), ranks, *(milliseconds(of.get(stage)) for stage in shown)])
    return lines


def exchange_table(rows: list[Row]) -> list[list[str]]:
    """One line a number of ranks and buffer of an all-to-all."""
    lines = [["ranks", "MiB a rank", "ms", "spread", "GB/s to others"]]
    return lines + [[row["ranks"], figures(row["mib"]), milliseconds(row), spread(row), figures(row["gb_s"])] for row in rows
                    if row["what"] == "all-to-all" and not row["note"]]
