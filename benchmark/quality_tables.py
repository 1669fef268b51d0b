"""The tables of what SSTA does to videos, and the join of their rows with the times of a large model's layer."""

from __future__ import annotations

from statistics import fmean

from quality_grid import FULL_TILES, for_few_steps, overall
from rows import Row, figures, grouped

from ssta import SSTAConfig

# The presets' own configurations among the measured ones.
PRESET_ENTRIES = {name: f"linear 2 parts {density}, tile 4x4x8, first layer dense"
                  for name, density in {"near": "0.3", "balanced": "0.156", "fast": "0.1"}.items()}
# Presets for few steps: how many, and the configuration.
FEW_STEPS_ENTRIES = {"8 steps": (8, PRESET_ENTRIES["balanced"]), "4 steps": (4, "linear 2 parts 0.2, tile 4x4x8, first layer dense")}
# Of the configurations what the main README shows, in its words.
SAMPLES = {PRESET_ENTRIES["balanced"]: 'SSTA by default (preset "balanced")', PRESET_ENTRIES["near"]: 'preset "near"',
           PRESET_ENTRIES["fast"]: 'preset "fast"',
           "linear 2 parts 0.156, tile 4x4x8": "the default with its first layer sparse too",
           "dropped 0.156, tile 4x4x8": "as many pairs, the others dropped",
           "dense, backend cudnn": "dense, computed by another kernel"}


def samples_of(rows: list[Row]) -> tuple[list[tuple[str, str]], dict[str, list[Row]]]:
    """(trained models as (clips, seed), rows of each configuration, by its name)."""
    samples = [row for row in rows if row["what"] == "sample" and row["psnr"]]
    found = {name: of for (name,), of in grouped(samples, lambda row: (row["name"],)).items()}
    return list(dict.fromkeys((row["clips"], row["train_seed"]) for row in samples)), found


def mean_of(rows: list[Row], column: str) -> float | None:
    values = [float(row[column]) for row in rows if row[column]]
    return fmean(values) if values else None


def quality_table(rows: list[Row]) -> list[list[str]]:
    """One line a configuration of the samples: PSNR and its spread over videos for each trained model, and means over the models."""
    models, found = samples_of(rows)
    lines = [["configuration", "density", *(f"{clips}, training {seed}: PSNR, dB" for clips, seed in models), "SSIM", "velocity error",
              "loss above dense"]]
    for name, of in found.items():
        own = {(row["clips"], row["train_seed"]): row for row in of}
        psnr = [own.get(model) for model in models]
        ssim, error, loss = (mean_of(of, column) for column in ("ssim", "velocity_error", "loss_above"))
        lines.append([name, f"{float(of[0]['density']):.1%}",
                      *("–" if row is None else f"{float(row['psnr']):.1f}"
                        + (f" ± {float(row['psnr_spread']):.1f}" if row["psnr_spread"] else "") for row in psnr),
                      f"{ssim:.3f}", figures(error), "–" if loss is None else f"{loss:+.2f} %"])
    return lines


def layer_times(samples: dict[str, list[Row]], layers: list[Row]) -> dict[str, float]:
    """Of each configuration that bench_grid.py measured the time of attention over all steps and layers, dense attention being 1."""
    return {row["name"]: float(row["overall"]) for row in layers if row["name"] in samples and row["overall"] not in ("", "nan")
            and row["compensation"]}


def samples_table(rows: list[Row], layers: list[Row]) -> list[list[str]]:
    """One line for each of SAMPLES that was measured on every trained model: means over the models, with the lowest and highest PSNR, and
    the time of the layer where ``layers``, rows of bench_grid.py, has it."""
    models, found = samples_of(rows)
    times = layer_times(found, layers)
    lines = [["attention", "tile pairs computed", *(["time of attention, dense = 1"] if times else []),
              f"PSNR, dB (range of {len(models)} trainings)", "SSIM"]]
    for name, title in SAMPLES.items():
        of = found.get(name, [])
        if of and len(of) == len(models):
            psnr = [float(row["psnr"]) for row in of]
            lines.append([title, f"{float(of[0]['density']):.1%}", *([figures(times.get(name, 1.0 if name.startswith("dense") else None))]
                                                                    if times else []),
                          f"{fmean(psnr):.1f} ({min(psnr):.1f} to {max(psnr):.1f})", f"{mean_of(of, 'ssim'):.3f}"])
    return lines


def equal_time_table(layers: list[Row], rows: list[Row]) -> list[list[str]]:
    """One line for each configuration of which layer and samples were measured, the fastest first; the best for their time are marked."""
    models, found = samples_of(rows)
    times, of_layer = layer_times(found, layers), {row["name"]: row for row in layers}
    places = {name: (time, mean_of(found[name], "psnr")) for name, time in times.items() if len(found[name]) == len(models)}
    lines = [["configuration", "tile", "layer, ms", "attention over all steps, dense = 1", "PSNR, dB", "best for its time"]]
    for name, (time, psnr) in sorted(places.items(), key=lambda place: place[1]):
        lines.append([name, of_layer[name]["tile"], figures(of_layer[name]["median_ms"]), f"{time:.3f}", f"{psnr:.1f}",
                      "yes" if name in best(places) else ""])
    return lines


def best(places: dict[str, tuple[float, float]]) -> list[str]:
    """The names of ``{name: (time, value)}`` than which none is better in less time or as much, by time."""
    return sorted((name for name, (time, value) in places.items() if not any(t <= time and v > value for t, v in places.values())),
                  key=places.__getitem__)


def fine_tune_table(rows: list[Row]) -> list[list[str]]:
    """One line a configuration and way of training, with the share of the gap that it closed."""
    lines = [["model", "configuration", "loss", "above dense", "velocity error", "gap closed"]]
    for row in rows:
        if row["what"] == "fine-tune" and row["loss"]:
            lines.append([f"{row['clips']}, training {row['train_seed']}", row["name"], f"{float(row['loss']):.4f}",
                          f"{float(row['loss_above']):+.2f} %", figures(row["velocity_error"]),
                          f"{float(row['gap_closed']):.0f} %" if row["gap_closed"] else "–"])
    return lines


def few_fine_tune_table(rows: list[Row]) -> list[list[str]]:
    """One line a configuration, before and after training through it."""
    lines = [["configuration", "velocity error", "PSNR, dB", "SSIM", "gap closed"]]
    for row in rows:
        if row["what"] == "fine-tune":
            lines.append([row["name"], figures(row["velocity_error"]), f"{float(row['psnr']):.1f}", f"{float(row['ssim']):.3f}",
                          f"{float(row['gap_closed']):.0f} %" if row["gap_closed"] else "–"])
    return lines


def few_steps_times(layers: list[Row], steps: int) -> dict[str, float]:
    """Of each configuration for few steps, of whose sparse layers ``layers``, rows of bench_grid.py, has the time: that of attention over
    all ``steps`` and layers, dense attention being 1."""
    measured = {(row["tile"], float(row["density"]), row["compensation"]): float(row["relative"]) for row in layers if row["compensation"]}

    def of(config: SSTAConfig | None) -> float | None:
        parts = "" if config is None or config.compensation_parts == 1 else f" {config.compensation_parts} parts"
        return 1.0 if config is None else measured.get(("x".join(map(str, config.tile_thw)), config.density, config.compensation + parts))

    found = {entry.name: (entry, [of(config) for config in entry.configs(steps)]) for entry in for_few_steps(FULL_TILES)}
    return {name: overall(entry, times) for name, (entry, times) in found.items() if None not in times}


def few_steps_table(rows: list[Row], layers: list[Row]) -> list[list[str]]:
    """One line for each configuration, the fastest first: time and PSNR at each number of steps, and where it is the best for its time."""
    numbers = sorted({int(row["steps"]) for row in rows})
    lines = [["configuration", *(f"{number} steps: {what}" for number in numbers for what in ("time", "PSNR, dB", "best"))]]
    cells: dict[str, list[str]] = {}
    for number in numbers:
        times = few_steps_times(layers, number)
        places = {row["name"]: (times[row["name"]], float(row["psnr"])) for row in rows
                  if row["what"] == "sample" and int(row["steps"]) == number and row["psnr"] and row["name"] in times}
        front = best(places)
        for name, (time, psnr) in sorted(places.items(), key=lambda place: place[1]):
            cells.setdefault(name, [name]).extend([f"{time:.3f}", f"{psnr:.1f}", "yes" if name in front else ""])
    return lines + [line for line in cells.values() if len(line) == len(lines[0])]


def rollout_table(rows: list[Row]) -> list[list[str]]:
    """One line for each number of steps and configuration: PSNR of each chunk, and SSIM of the first and the last."""
    chunks = sorted({int(row["chunk"]) for row in rows})
    lines = [["steps", "attention", *(f"chunk {chunk}, dB" for chunk in chunks), "SSIM, first and last"]]
    for (steps, name), of in grouped(rows, lambda row: (row["steps"], row["name"])).items():
        by_chunk = {int(row["chunk"]): row for row in of}
        lines.append([steps, name, *(f"{float(by_chunk[chunk]['psnr']):.1f}" for chunk in chunks),
                      ", ".join(f"{float(by_chunk[chunk]['ssim']):.3f}" for chunk in (chunks[0], chunks[-1]))])
    return lines


def gate_table(rows: list[Row]) -> list[list[str]]:
    """One line for each estimate that gate.py held against the dense videos, a column for each density."""
    densities = sorted({row["density"] for row in rows}, key=float)
    lines = [["attention", *(f"{float(density):.3g} of the pairs: PSNR, dB" for density in densities)]]
    for (name,), of in grouped(rows, lambda row: (row["estimate"],)).items():
        psnr = {row["density"]: row["psnr"] for row in of}
        lines.append([f"{name} {of[0]['release']}" if name == "ssta" else name,
                      *(f"{float(psnr[density]):.2f}" if psnr.get(density) else "–" for density in densities)])
    return lines
