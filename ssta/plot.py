"""Pictures of what was selected, made from a Report: over the frames, and as a block mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .cut import TiledSegment
from .kernels.checks import require_int
from .report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Why a tile pair is computed, or how it goes without. The colours can be told apart with any colour vision; on plain ground hatches say it
# again.
_NOT, _WINDOW, _BUDGET, _TEXT, _ESTIMATED = range(5)
_LABELS = ("not attended to", "near (window)", "selected by content (budget)", "text", "estimated")
_COLOURS = ("#f0f0f0", "#56b4e9", "#e69f00", "#8a8a8a", "#fbe7c6")
_HATCHES = ("", "", "////", "", "")


def plot_selection(
    report: Report, query_thw: Sequence[int] | None = None, *, head: int = 0, batch: int = 0, grid: int = 0, images: Any = None,
    path: str | Path | None = None,
) -> Figure:
    """Draws which tiles of the video are computed exactly for one query tile, and if the others are estimated or dropped. The latent frames
    are all drawn up to 8, else the middle one of every layer of tiles. Synchronises the device.

    Args:
        report: what ``explain`` returned.
        query_thw: (frame, row, column) of a token of the latent grid; its tile is the query tile. Default: the middle.
        head, batch: which query head and which batch element.
        grid: which video grid of the layout, counting from 0; query and keys are drawn within it.
        images: a picture to put under each latent frame, [t, H, W, 3] of any size: a tensor, a numpy array, or a list of t pictures
            (tensors, arrays, PIL images); floats in [0, 1], clipped to that, or uint8 in [0, 255]. Default: none.
        path: where to save the figure as well; the ending chooses the format.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: a report that ``explain`` did not make, an index that is no int, images of another dtype.
        ValueError: an index outside the layout, images that are not one per latent frame or have no pixels.
    """
    figure_class, matplotlib = _matplotlib(report)
    if not report.layout.video:
        raise ValueError("report must be of a layout with a video grid, got one without")
    grid = _index("grid", grid, len(report.layout.video))
    video = report.layout.video[grid]
    thw = video.extent
    query_thw = tuple(size // 2 for size in thw) if query_thw is None else _ints("query_thw", query_thw)
    if len(query_thw) != 3 or any(not 0 <= place < size for place, size in zip(query_thw, thw)):
        raise ValueError(f"query_thw must be a (frame, row, column) inside the grid {thw}, got {query_thw}")
    pictures = None if images is None else _pictures(images, thw[0])
    cuts = [_cuts(video, axis) for axis in range(3)]
    place = [index // tile for index, tile in zip(query_thw, video.tile)]
    first = sum(segment.num_tiles for segment in report.layout.video[:grid])
    query_tile = first + (place[0] * video.tiles[1] + place[1]) * video.tiles[2] + place[2]
    row = _categories(report, batch, head)[query_tile]
    kinds = row[first:first + video.num_tiles].reshape(video.tiles)
    frames = list(range(thw[0])) if thw[0] <= 8 else [(start + end - 1) // 2 for start, end in cuts[0]]

    columns = 3 if len(frames) in (5, 6, 9) else min(len(frames), 4)
    rows = -(-len(frames) // columns)
    width = 3.1
    height = min(max(width * thw[1] / thw[2], 1.0), 2 * width)
    figure = figure_class(figsize=(max(columns * width + 0.6, 6.5), rows * (height + 0.3) + 1.4), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False)
    for axes, frame in zip(all_axes.flat, frames):
        layer = frame // video.tile[0]
        background = torch.full((1, 1, 3), 0.8, dtype=torch.float32, device="cpu") if pictures is None else pictures[frame]
        axes.imshow(background.numpy(), extent=(0, thw[2], thw[1], 0), aspect="equal", vmin=0, vmax=1)
        for i, (top, bottom) in enumerate(cuts[1]):
            for j, (left, right) in enumerate(cuts[2]):
                _draw_tile(matplotlib, axes, (left, top, right, bottom), int(kinds[layer, i, j]), pictures is not None)
        if layer == place[0]:
            (top, bottom), (left, right) = cuts[1][place[1]], cuts[2][place[2]]
            for colour, line in (("white", 5.0), ("black", 2.5)):
                axes.add_patch(matplotlib.patches.Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour,
                                                            linewidth=line, zorder=5, gid="query" if colour == "black" else None))
        start, end = cuts[0][layer]
        span = "" if len(frames) == thw[0] else f" (tile: {_span('frame', start, end)})"
        axes.set_title(f"latent frame {frame}{span}", fontsize=9)
        axes.set(xlim=(0, thw[2]), ylim=(thw[1], 0), xticks=[0, thw[2]], yticks=[0, thw[1]])
        axes.tick_params(labelsize=7, length=2)
    for axes in list(all_axes.flat)[len(frames):]:
        axes.remove()
    for axes in all_axes[:, 0]:
        axes.set_ylabel("row", fontsize=8)
    for axes in all_axes[-1]:
        axes.set_xlabel("column", fontsize=8)
    exact, with_text = int(_exact(kinds).sum()), bool((row == _TEXT).any())
    tiles = f"{exact} of the video's {kinds.numel()} tiles"
    if report.config.compensation == "none":
        title = f"What one query tile attends to: {tiles}{', and to the text' if with_text else ''}"
    else:
        title = (f"One query tile: {tiles}{' and the text' if with_text else ''} are computed exactly; "
                 f"{kinds.numel() - exact} tiles are estimated")
    figure.suptitle(f"{title}\n"
                    f"head {head}; the tile spans {_span('frame', *cuts[0][place[0]])}, {_span('row', *cuts[1][place[1]])}, "
                    f"{_span('column', *cuts[2][place[2]])}", fontsize=11)
    present = [kind for kind in (_WINDOW, _BUDGET, _ESTIMATED, _NOT) if bool((kinds == kind).any())]
    outline = matplotlib.patches.Patch(facecolor="none", edgecolor="black", linewidth=2.5, label="the query tile")
    _add_legend(figure, [outline, *_patches(matplotlib, present, hatched=pictures is None)])
    return _finish(figure, path)


def plot_block_mask(report: Report, *, head: int = 0, batch: int = 0, path: str | Path | None = None) -> Figure:
    """Draws every (query tile, key tile) pair of one head, coloured by why it is computed, or if it is estimated. Synchronises the device.

    Tiles are in tile order: frames first, so that a diagonal block is one layer of tiles; the text comes last.

    Args:
        report: what ``explain`` returned.
        head, batch: which query head and which batch element.
        path: where to save the figure as well.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: a report that ``explain`` did not make, an index that is no int.
        ValueError: an index outside the layout.
    """
    figure_class, matplotlib = _matplotlib(report)
    kinds = _categories(report, batch, head)
    tiles, video_tiles = len(kinds), report.layout.num_video_tiles
    figure = figure_class(figsize=(7.6, 7.4), layout="constrained")
    axes = figure.subplots()
    colours = matplotlib.colors.ListedColormap(_COLOURS)
    axes.imshow(kinds.numpy(), cmap=colours, vmin=-0.5, vmax=len(_COLOURS) - 0.5, interpolation="nearest", origin="upper",
                extent=(0, tiles, tiles, 0))
    bands = _bands(report)
    for start, _, _ in bands[1:]:
        boundary = start == video_tiles
        for line in (axes.axhline, axes.axvline):
            line(start, color="black" if boundary else "#606060", linewidth=1.4 if boundary else 0.5)
    # One label a layer while they fit, else every second, third, ...; the text is always labelled.
    step = max(-(-len(bands) // 16), 1)
    shown = [band for index, band in enumerate(bands) if index % step == 0 or band[0] >= video_tiles]
    centres = [(start + end) / 2 for start, end, _ in shown]
    names = [name for _, _, name in shown]
    axes.set_xticks(centres, names, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(centres, names, fontsize=8)
    axes.tick_params(length=0)
    axes.set_xlabel("key tiles: what is looked at")
    axes.set_ylabel("query tiles: what is looking")
    estimated = "" if report.config.compensation == "none" else " exactly"
    axes.set_title(f"Tile pairs that head {head} computes{estimated}: {float(_exact(kinds).float().mean()):.0%} of {tiles} x {tiles}",
                   fontsize=11)
    present = [kind for kind in (_WINDOW, _BUDGET, _TEXT, _ESTIMATED, _NOT) if bool((kinds == kind).any())]
    _add_legend(figure, _patches(matplotlib, present))
    return _finish(figure, path)


def _matplotlib(report: Report):
    """(Figure, matplotlib), once the report is known to be one."""
    try:
        import matplotlib.colors
        import matplotlib.patches
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("ssta's pictures require matplotlib: pip install matplotlib") from error
    if not isinstance(report, Report):
        raise TypeError(f"report must be a Report, which explain returns, got {type(report).__name__}")
    # A Figure made without pyplot needs no display and is freed with its last reference.
    return Figure, matplotlib


def _index(name: str, value: int, size: int) -> int:
    index = require_int(name, value, 0)
    if index >= size:
        raise ValueError(f"{name} must be between 0 and {size - 1}, got {index}")
    return index


def _ints(name: str, values: Iterable[int]) -> tuple[int, ...]:
    entries = values.tolist() if hasattr(values, "tolist") else values  # of an array or a tensor
    if isinstance(entries, (str, bytes)) or not hasattr(entries, "__iter__"):
        raise TypeError(f"{name} must be a sequence of ints, got {values!r} ({type(values).__name__})")
    return tuple(require_int(f"{name}[{place}]", entry, 0) for place, entry in enumerate(entries))


def _pictures(images: Any, frames: int) -> Tensor:
    """float32 [frames, H, W, 3] on the CPU in [0, 1]."""
    import numpy

    if not isinstance(images, Tensor):
        if isinstance(images, (list, tuple)):
            images = [image.detach().cpu() if isinstance(image, Tensor) else image for image in images]
        try:
            images = torch.from_numpy(numpy.array(images))
        except (TypeError, ValueError) as error:
            raise TypeError(f"images must be a tensor, a numpy array, or a list of {frames} pictures of one size: {error}") from None
    shape = tuple(images.shape)
    if len(shape) != 4 or shape[0] != frames or shape[3] != 3 or 0 in shape:
        raise ValueError(f"images must be [{frames}, height, width, 3], one per latent frame and none of them empty, got {shape}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"images must be floats in [0, 1] or uint8 in [0, 255], got {images.dtype}")
    return (images.detach().cpu().float() / (255 if images.dtype == torch.uint8 else 1)).clamp(0, 1)


def _categories(report: Report, batch: int, head: int) -> Tensor:
    """uint8 [T, T] on the CPU: for each (query tile, key tile), why it is computed, or how it goes without."""
    batch, head = _index("batch", batch, report.batch), _index("head", head, report.heads)
    mask = report.blocks.to_mask()
    # Lists may be shared by the batch, by all heads, or by the query heads of one key head.
    kept = mask[batch if mask.shape[0] > 1 else 0, head * mask.shape[1] // report.heads].cpu()
    n = report.layout.num_video_tiles
    kinds = torch.where(kept, _TEXT, _NOT).to(torch.uint8)
    video = kinds[:n, :n]
    if report.config.compensation != "none":
        video[~kept[:n, :n]] = _ESTIMATED
    video[kept[:n, :n]] = _BUDGET
    if report.near is not None:
        video[report.near.cpu()] = _WINDOW
    return kinds


def _exact(kinds: Tensor) -> Tensor:
    """Which pairs are computed."""
    return (kinds != _NOT) & (kinds != _ESTIMATED)


def _cuts(segment: TiledSegment, axis: int) -> list[tuple[int, int]]:
    """First and one past the last token of each tile along an axis, real tokens only."""
    size, tile = segment.extent[axis], segment.tile[axis]
    return [(start, min(start + tile, size)) for start in range(0, size, tile)]


def _span(noun: str, start: int, end: int) -> str:
    return f"{noun} {start}" if end - start == 1 else f"{noun}s {start}-{end - 1}"


def _bands(report: Report) -> list[tuple[int, int, str]]:
    """(first tile, one past the last, name) of each layer of tiles in time, and of the text."""
    bands, at = [], 0
    for number, segment in enumerate(report.layout.video):
        plane = segment.tiles[1] * segment.tiles[2]
        for start, end in _cuts(segment, 0):
            bands.append((at, at + plane, (f"video {number}, " if len(report.layout.video) > 1 else "") + _span("frame", start, end)))
            at += plane
    if report.layout.num_dense_tiles:
        bands.append((at, at + report.layout.num_dense_tiles, "text"))
    return bands


def _draw_tile(matplotlib, axes, box: tuple[int, int, int, int], kind: int, on_picture: bool) -> None:
    left, top, right, bottom = box
    if kind in (_NOT, _ESTIMATED):
        colour, gid = ("white", None) if kind == _NOT else (_COLOURS[kind], "estimated")
        axes.add_patch(matplotlib.patches.Rectangle((left, top), right - left, bottom - top, facecolor=colour, edgecolor="#d0d0d0",
                                                    linewidth=0.4, alpha=0.8, zorder=2, gid=gid))
        return
    # The frame of a tile is drawn inside it, so that a neighbour of another colour does not paint over it.
    inset = 0.06 * min(right - left, bottom - top)
    corner, width, height = (left + inset, top + inset), right - left - 2 * inset, bottom - top - 2 * inset
    rectangle = matplotlib.patches.Rectangle
    if on_picture:
        axes.add_patch(rectangle(corner, width, height, facecolor=_COLOURS[kind], alpha=0.3, linewidth=0, zorder=3))
        axes.add_patch(rectangle(corner, width, height, fill=False, edgecolor=_COLOURS[kind], linewidth=2.0, zorder=4, gid="attended"))
    else:
        axes.add_patch(rectangle(corner, width, height, facecolor=_COLOURS[kind], edgecolor="white", hatch=_HATCHES[kind], linewidth=0,
                                 zorder=3, gid="attended"))


def _patches(matplotlib, kinds: list[int], hatched: bool = False) -> list:
    return [matplotlib.patches.Patch(facecolor=_COLOURS[kind], edgecolor="#909090" if kind in (_NOT, _ESTIMATED) else "white",
                                     hatch=_HATCHES[kind] if hatched else None, label=_LABELS[kind]) for kind in kinds]


def _add_legend(figure: Figure, handles: list) -> None:
    """One row of entries under the picture, or as many rows as its width takes."""
    for columns in range(len(handles), 0, -1):
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _finish(figure: Figure, path: str | Path | None) -> Figure:
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure
