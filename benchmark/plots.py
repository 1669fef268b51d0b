"""Pictures of what was measured, one for each CSV: rates of the kernels, the layer by its stages, the step of a model. Needs matplotlib."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from quality_tables import PRESET_ENTRIES, best, layer_times, mean_of, samples_of
from rows import STAGES, STEPS, Row, attention_of, days_of, grouped, is_dense, kept_cell, problem_of, title, with_times

# Told apart also by readers who do not see all colours (Okabe and Ito's set).
COLOURS = ("#d55e00", "#e69f00", "#0072b2", "#009e73", "#56b4e9", "#cc79a7", "#f0e442", "#000000", "#999999")
REST = "#bbbbbb"


def plot_kernels(rows: list[Row]) -> Figure:
    """TFLOP/s of the kept blocks, forward above backward: a group of bars for every problem and pattern, a colour for every library. Of
    other inputs than normal numbers only the table tells."""
    rows = [row for row in rows if row["what"] in ("forward", "backward") and problem_of(row)[-1] == "randn"]
    providers = with_times(rows)
    places = list(grouped([row for row in rows if not is_dense(row)], lambda row: (problem_of(row), row["pattern"], row["kept"])))
    figure = Figure((max(7, 1.6 * len(places)), 7), layout="constrained")
    for axes, what in zip(figure.subplots(2, 1), ("forward", "backward")):
        dense = {(problem_of(row), row["provider"]): row for row in rows if row["what"] == what and is_dense(row)}
        found = {(problem_of(row), row["pattern"], row["kept"], row["provider"]): row for row in rows if row["what"] == what}
        for i, provider in enumerate(providers):
            bars = [(x, row) for x, place in enumerate(places)
                    if (row := found.get((*place, provider)) or dense.get((place[0], provider))) and row["tflops"]]
            axes.bar([x + (i + 0.5) * 0.8 / len(providers) - 0.4 for x, _ in bars], [float(row["tflops"]) for _, row in bars],
                     0.8 / len(providers), color=COLOURS[i % len(COLOURS)], label=title(provider))
        axes.set_ylabel(f"{what}, TFLOP/s")
        axes.set_xticks(range(len(places)), [place_label(rows, place) for place in places], fontsize="small")
    # Not from the bars of one direction, in which a library may have none.
    handles = [Patch(color=COLOURS[i % len(COLOURS)], label=title(provider)) for i, provider in enumerate(providers)]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize="small", frameon=False)
    figure.supxlabel(caption(rows), fontsize="x-small")
    return figure


def plot_sweep(rows: list[Row]) -> Figure:
    """TFLOP/s against the number of tokens: a column for every pattern, a row for every direction and number of heads.

    What was measured at one length, where the rest was at more, is left out, and other inputs than normal numbers.
    """
    rows = [row for row in rows if row["what"] in ("forward", "backward") and row["tflops"] and row["head_dim"] == "128"
            and problem_of(row)[-1] == "randn"]
    providers = with_times(rows)

    def share(row: Row) -> str:
        return row["pattern"] if row["pattern"] != "random" else f"random, {int(row['kept']) / int(row['blocks']):.2g}"

    def lengths(chosen: list[Row]) -> list[int]:
        return sorted({int(row["tokens"]) for row in chosen})

    def shown(key) -> list:
        return [name for name, of in grouped(rows, key).items() if len(lengths(of)) > 1 or len(lengths(rows)) == 1]

    patterns, lines = shown(share), shown(lambda row: (row["heads"], row["what"]))
    figure = Figure((2.6 * len(patterns) + 1, 2.2 * len(lines) + 1), layout="constrained")
    table = figure.subplots(len(lines), len(patterns), sharex=True, sharey="row", squeeze=False)
    for (heads, what), row_of_axes in zip(lines, table):
        for pattern, axes in zip(patterns, row_of_axes):
            for i, provider in enumerate(providers):
                points = sorted((int(row["tokens"]), float(row["tflops"])) for row in rows
                                if (row["heads"], row["what"], row["provider"]) == (heads, what, provider)
                                and (is_dense(row) or share(row) == pattern))
                if points:
                    axes.plot(*zip(*points), marker="o", markersize=3, color=COLOURS[i % len(COLOURS)], label=title(provider))
            axes.set_xscale("log")
            axes.set_xticks(lengths(rows), [f"{n / 1000:.0f}k" for n in lengths(rows)], fontsize="x-small")
            axes.minorticks_off()
            axes.set_title(pattern, fontsize="small")
            axes.set_ylim(bottom=0)
        row_of_axes[0].set_ylabel(f"{what}, {heads} heads, TFLOP/s", fontsize="x-small")
    handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=5, fontsize="small", frameon=False)
    figure.supxlabel(f"tokens\n{caption(rows)}", fontsize="x-small")
    return figure


def plot_layer(rows: list[Row]) -> Figure:
    """Milliseconds: a box for every layer, in its own scale; dense, and each kind of SSTA as a pile of its stages."""
    layers = {layer: list(grouped(found, attention_of).items()) for layer, found in grouped(rows, lambda row: row["layer"]).items()}
    heights = [len(bars) for bars in layers.values()]
    figure = Figure((8, 0.3 * sum(heights) + 0.7 * len(layers) + 1.2), layout="constrained")
    boxes = figure.subplots(len(layers), 1, squeeze=False, height_ratios=heights)[:, 0]
    stages = [stage for stage in STAGES if any(row["stage"] == stage for row in rows)]
    colours = {stage: COLOURS[STAGES.index(stage)] for stage in stages}
    for (layer, bars), axes in zip(layers.items(), boxes):
        for y, (_, found) in enumerate(bars):
            of = {row["stage"]: float(row["median_ms"]) for row in found}
            left = 0.0
            for stage in filter(of.get, stages):
                axes.barh(y, of[stage], left=left, color=colours[stage])
                left += of[stage]
            axes.barh(y, max(of["total"] - left, 0), left=left, color=REST)
            axes.text(max(of["total"], left), y, f" {of['total']:.3g}", va="center", fontsize="small")
        axes.set_yticks(range(len(bars)), [name.replace("`", "") for name, _ in bars], fontsize="small")
        axes.invert_yaxis()
        axes.set_title(layer, fontsize="small")
        axes.margins(x=0.1)
    boxes[-1].set_xlabel("ms")
    handles = [Patch(color=colour, label=label) for label, colour in {**colours, "dense, and the rest of a layer": REST}.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=6, fontsize="small", frameon=False)
    figure.supxlabel(caption(rows), fontsize="x-small")
    return figure


def plot_pipeline(rows: list[Row]) -> Figure:
    """Seconds of a denoising step: a box for every model, a bar for every kind of attention; a cross where there is no time."""
    models = grouped(rows, lambda row: row["model"])
    figure = Figure((8, 2.1 * len(models) + 0.5), layout="constrained")
    for (name, found), axes in zip(models.items(), figure.subplots(len(models), 1, squeeze=False)[:, 0]):
        for y, row in enumerate(found):
            seconds = float(row["step_s"] or 0)
            axes.barh(y, seconds, color=COLOURS[list(STEPS).index(row["what"])])
            axes.text(seconds, y, f" {seconds:.3g}" if row["step_s"] else " \u00d7", va="center", fontsize="small")
        axes.set_yticks(range(len(found)), [STEPS[row["what"]].replace("`", "") for row in found], fontsize="small")
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_title(name, fontsize="small")
    axes.set_xlabel("s a step (one forward)")
    figure.supxlabel(caption(rows), fontsize="x-small")
    return figure


def plot_quality(rows: list[Row]) -> Figure:
    """PSNR and SSIM of samples against the dense ones over density, a colour for every group, with a line through those that differ in
    nothing else. Means over the models that a configuration was measured on."""
    models = {(row["clips"], row["train_seed"]) for row in rows}
    rows = [mean_row(found) for found in grouped(rows, lambda row: (row["what"], row["name"])).values()]
    points = [row for row in rows if row["what"] == "sample" and row["psnr"] and row["group"] != "dense" and float(row["density"]) < 0.999]
    figure = Figure((13, 5), layout="constrained")
    for column, axes in zip(("psnr", "ssim"), figure.subplots(1, 2)):
        for i, (group, found) in enumerate(grouped(points, lambda row: row["group"]).items()):
            colour = COLOURS[i % len(COLOURS)]
            places = [(float(row["density"]), float(row[column])) for row in found]
            axes.errorbar(*zip(*places), [float(row[f"{column}_spread"] or 0) for row in found], color=colour, marker="o" if i < 5 else "^",
                          markersize=5, elinewidth=0.3, linestyle="", label=group)
            axes.plot(*zip(*sorted(place for place, row in zip(places, found) if "," not in row["name"])), color=colour, linewidth=1)
        axes.set_xlabel("share of tile pairs computed", fontsize="small")
        axes.set_ylabel({"psnr": "PSNR against dense, dB", "ssim": "SSIM against dense"}[column], fontsize="small")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=9, fontsize="small", frameon=False)
    of = rows[0]
    what = f"{'; '.join(sorted({clips for clips, _ in models}))}: {len(models)} trained, {of['videos']} videos x {of['seeds']} seeds, " \
           f"{of['steps']} steps"
    figure.supxlabel(f"{what}\n{caption(rows)}", fontsize="x-small")
    return figure


def mean_row(rows: list[Row]) -> Row:
    """The first of them, with the means of what samples are judged by."""
    columns = ("psnr", "ssim", "psnr_spread", "ssim_spread")
    found = {column: [float(row[column]) for row in rows if row[column]] for column in columns}
    return rows[0] | {column: str(sum(values) / len(values)) for column, values in found.items() if values}


MARKERS = "os^Dv*"


def plot_equal_time(layers: list[Row], rows: list[Row]) -> Figure:
    """PSNR of the samples against the time of a large model's layer over all steps: a colour for what is done with the tiles that are not
    computed, a form for every tile, and a line through the best for their time, by name. Means over the trained models; lines up and down
    reach from the worst of them to the best. Presets have a ring, and names like the best."""
    models, found = samples_of(rows)
    times, of_layer = layer_times(found, layers), {row["name"]: row for row in layers}
    places = {name: (time, mean_of(found[name], "psnr")) for name, time in times.items() if len(found[name]) == len(models)}
    ways, tiles = (list(dict.fromkeys(of_layer[name][column] for name in places)) for column in ("compensation", "tile"))
    figure = Figure((10, 6), layout="constrained")
    axes = figure.subplots()
    for name, (time, psnr) in places.items():
        values = [float(row["psnr"]) for row in found[name]]
        way, tile = of_layer[name]["compensation"], of_layer[name]["tile"]
        axes.errorbar(time, psnr, [[psnr - min(values)], [max(values) - psnr]], color=COLOURS[ways.index(way)], elinewidth=0.4,
                      marker=MARKERS[tiles.index(tile) % len(MARKERS)], markersize=5, linestyle="")
    line = best(places)
    axes.plot(*zip(*(places[name] for name in line)), color="#999999", linewidth=0.8, zorder=0)
    presets = [name for name in PRESET_ENTRIES.values() if name in places]
    axes.plot([places[name][0] for name in presets], [places[name][1] for name in presets], color="#000000", marker="o", markersize=9,
              fillstyle="none", linestyle="")
    # Beside the axes, in the order of their points and as far apart, so that no name lies over another.
    named = sorted({*line, *presets}, key=lambda name: places[name][1])
    for i, name in enumerate(named):
        axes.annotate(name, places[name], xytext=(1.02, (i + 0.5) / len(named)), textcoords="axes fraction", fontsize=6, va="center",
                      arrowprops=dict(arrowstyle="-", color="#bbbbbb", linewidth=0.4, relpos=(0, 0.5)))
    for i, way in enumerate(ways):
        axes.plot([], [], color=COLOURS[i], marker="o", linestyle="", label="dropped" if way == "none" else way)
    for i, tile in enumerate(tiles):
        axes.plot([], [], color="#777777", marker=MARKERS[i % len(MARKERS)], linestyle="", label=tile)
    axes.set_xlabel(f"time of attention over all steps, dense = 1: a layer of {layers[0]['layer']}", fontsize="small")
    axes.set_ylabel("PSNR against dense, dB: the small model", fontsize="small")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=10, fontsize="small", frameon=False)
    figure.supxlabel(f"{len(models)} trained, {rows[0]['videos']} videos x {rows[0]['seeds']} seeds, {rows[0]['steps']} steps; "
                     f"{caption(layers)}", fontsize="x-small")
    return figure


def plot_timeline(rows: list[Row]) -> Figure:
    """What every rank's device and host do: exchanges, the kernel that takes longest, the other kernels; calls of a host, and its waits."""
    from timeline import is_wait

    ranks = sorted({int(row["rank"]) for row in rows})
    spent: dict[str, float] = {}
    for row in rows:
        if row["lane"] == "device" and "nccl" not in row["name"].lower():
            spent[row["name"]] = spent.get(row["name"], 0.0) + float(row["end_us"]) - float(row["start_us"])
    longest = max(spent, key=spent.__getitem__, default="")

    def kind(row: Row) -> str:
        if row["lane"] == "host":
            return "host waits" if is_wait(row["name"]) else "host"
        return "exchange" if "nccl" in row["name"].lower() else "attention" if row["name"] == longest else "other kernels"

    colours = {"attention": COLOURS[2], "exchange": COLOURS[1], "other kernels": COLOURS[4], "host": COLOURS[8], "host waits": COLOURS[0]}
    figure = Figure((13, 0.7 * len(ranks) + 1.5), layout="constrained")
    axes = figure.subplots()
    lanes = [(rank, lane) for rank in ranks for lane in ("device", "host")]
    for of, found in grouped(rows, kind).items():
        for (rank, lane), spans in grouped(found, lambda row: (int(row["rank"]), row["lane"])).items():
            bars = [(float(row["start_us"]) / 1e3, (float(row["end_us"]) - float(row["start_us"])) / 1e3) for row in spans]
            axes.broken_barh(bars, (lanes.index((rank, lane)) - 0.4, 0.8), color=colours[of], label=of)
    axes.set_yticks(range(len(lanes)), [f"rank {rank}, {lane}" for rank, lane in lanes], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=5, fontsize="small", frameon=False)
    figure.supxlabel(caption(rows), fontsize="x-small")
    return figure


def place_label(rows: list[Row], place: tuple) -> str:
    problem, pattern, kept = place
    tokens, heads, head_dim, *_ = problem
    row = next(row for row in rows if (problem_of(row), row["pattern"], row["kept"]) == place)
    return f"{int(tokens):,} tokens\n{heads} heads of {head_dim}\n{kept_cell(row)}"


def caption(rows: list[Row]) -> str:
    """The machine and the days; the commits stand below the tables."""
    where = rows[0]
    return f"{where['device']}, torch {where['torch']}, triton {where['triton']}, measured {days_of(rows)}"


# Which CSVs are drawn, and how.
PLOTS = {"kernels": plot_kernels, "sweep": plot_sweep, "layer": plot_layer, "pipeline": plot_pipeline,
         "quality": plot_quality, "grid": plot_equal_time, "timeline": plot_timeline}
# Those that are made of two CSVs (rows.BESIDE).
JOINED = (plot_equal_time,)
