"""The tables of docs/recipes.md, from rows of bench_recipe.py."""

from __future__ import annotations

from rows import Row, figures, grouped

# In the order in which tables have them; bench_recipe.py says what each is.
STEPS = ("stock", "dense", "dense, compiled", "dense, 8 bits, compiled", "default", "default, compiled", "default, 8 bits",
         "default, 8 bits, compiled", "default, 8 bits, tuned", "fast, 8 bits, compiled", "fast, 8 bits, tuned", "default, skipped")
# Attention in which the first layer is dense.
SPARSE = ("default", "fast")
# Whose steps a generation is made of, from the slowest to the fastest.
GENERATIONS = ("stock", "dense", "dense, compiled", "default", "default, compiled", "default, 8 bits, compiled", "default, 8 bits, tuned",
               "fast, 8 bits, compiled", "fast, 8 bits, tuned")
# The one beside which a step cache is shown.
CACHED = "default, 8 bits, compiled"


def recipe_table(rows: list[Row]) -> list[list[str]]:
    """One line a model and recipe, on one GPU."""
    lines = [["model", "recipe", "s a step", "dense = 1", "attention, s", "linear layers, s", "the rest, s", "off", "memory, MiB",
              "weights of the blocks, MiB"]]
    for model, of in alone(rows).items():
        dense = seconds(of.get("dense"))
        for row in map(of.get, STEPS):
            if row is None or not row["step_s"]:
                continue
            step, attention, linear = seconds(row), parts(row, "attention"), parts(row, "linear")
            lines.append([model, name_of(row), figures(step), figures(step / dense) if dense else "–", figures(attention), figures(linear),
                          figures(step - attention - linear if attention is not None else None),
                          *map(figures, (row["error"], row["extra_mib"], row["blocks_mib"]))])
    return lines


def generation_table(rows: list[Row]) -> list[list[str]]:
    """One line a model and recipe: the parts of a whole generation on one GPU, the first layer dense as it is by default."""
    lines = [["model", "recipe", "text, s", "s a step, first layer dense", "forwards", "VAE, s", "whole generation, s", "times as fast"]]
    for model, of in alone(rows).items():
        text, vae, base = seconds(of.get("text encoder")), seconds(of.get("VAE in tiles")), None
        if text is None or vae is None:
            continue
        skipped = of.get("default, skipped")
        for row in filter(None, map(of.get, GENERATIONS)):
            step = generated_step(row, of)
            if step is None:
                continue
            all_forwards = int(row["steps"]) * int(row["forwards"])
            whole = text + all_forwards * step + vae
            base = base or whole
            lines.append([model, name_of(row), figures(text), figures(step), str(all_forwards), figures(vae), figures(whole),
                          f"{base / whole:.2f}"])
            if row["what"] == CACHED and seconds(skipped):
                forwards = int(skipped["computed_steps"]) * int(row["forwards"])
                whole = text + forwards * step + (all_forwards - forwards) * seconds(skipped) + vae
                lines.append([model, f"{name_of(row)}, TaylorSeer", figures(text), figures(step), f"{forwards} of {all_forwards}",
                              figures(vae), figures(whole), f"{base / whole:.2f}"])
    return lines


def recipe_ranks_table(rows: list[Row]) -> list[list[str]]:
    """One line a model and recipe that was measured on several GPUs, every layer sparse."""
    lines = [["model", "recipe", "GPUs", "s a step", "on one", "times as fast", "exchanges, s", "off"]]
    one = alone(rows)
    for row in rows:
        if int(row["ranks"]) > 1 and row["step_s"]:
            base = seconds(one.get(row["model"], {}).get(row["what"]))
            lines.append([row["model"], name_of(row), row["ranks"], figures(row["step_s"]), figures(base),
                          f"{base / float(row['step_s']):.2f}" if base else "–", figures(row["exchange_s"]), figures(row["error"])])
    return lines


def alone(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Of each model the rows of one GPU by what they are of."""
    return {model: {row["what"]: row for row in found}
            for model, found in grouped([row for row in rows if row["ranks"] == "1"], lambda row: row["model"]).items()}


def name_of(row: Row) -> str:
    return row["what"].replace("8 bits", row["quantized"]).replace("fast", 'preset "fast"')


def seconds(row: Row | None) -> float | None:
    return float(row["step_s"]) if row and row["step_s"] else None


def parts(row: Row, kind: str) -> float | None:
    return float(row[f"{kind}_s"]) if row[f"{kind}_s"] else None


def generated_step(row: Row, of: dict[str, Row]) -> float | None:
    """Seconds of a step whose first layer is dense where the recipe is sparse: it attends as long as one of dense attention does."""
    step = seconds(row)
    if row["what"].partition(",")[0] not in SPARSE or step is None:
        return step
    dense, sparse = (None if of_row is None else parts(of_row, "attention") for of_row in (of.get("dense"), row))
    return None if dense is None or sparse is None else step + (dense - sparse) / int(row["blocks"])
