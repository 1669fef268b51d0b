"""explain's numbers against counts made by hand on tiny grids, and the pictures against the selection that they show."""

import json
import math
import sys

import numpy
import pytest
import torch
from PIL import Image

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid, explain
from ssta.plot import plot_block_mask, plot_selection

HEAD_DIM = 16
# 2 x 4 x 4 tokens in tiles of 2 x 2 x 2: four tiles of eight; each looks at itself alone.
GRID, ALONE = (2, 4, 4), dict(tile_thw=(2, 2, 2), kernel_thw=(1, 1, 1), sparse_type="sta")


def qkv(tokens, batch=1, heads=2, kv_heads=None, dtype=torch.float32):
    return [torch.randn(batch, n, tokens, HEAD_DIM).to(dtype) for n in (heads, kv_heads or heads, kv_heads or heads)]


def test_counts_with_text():
    q, k, _ = qkv(35)
    report = explain(q, k, GRID, text_len=3, **ALONE)
    assert (report.tokens, report.video_tokens, report.text_tokens, report.tiled_tokens) == (35, 32, 3, 35)
    assert (report.video_tiles, report.partial_video_tiles, report.text_tiles, report.partial_text_tiles) == (4, 0, 1, 1)
    # A video tile sees itself and the text, the text tile sees all five.
    assert report.tile_density == pytest.approx((4 * 2 + 5) / 25)
    assert report.tiles_per_query == 2
    pairs = 32 * (8 + 3) + 3 * 35
    assert report.token_density == pytest.approx(pairs / 35**2)
    assert report.flops == 4 * HEAD_DIM * pairs * 2
    assert report.dense_flops == 4 * HEAD_DIM * 35**2 * 2
    assert report.padding_share == 0
    assert report.valid_text_tokens is None and report.seconds is None and report.output_error is None
    assert report.implementation == "torch"


def test_it_says_why_no_faster_kernels_run():
    q, k, _ = qkv(32)
    report = explain(q, k, GRID, **ALONE)
    assert report.route.name == report.implementation == "torch"
    assert [name for name, _ in report.route.rejected] == ["hopper", "cudnn", "triton"] and report.why_not == report.route.explain()
    lines = str(report).splitlines()
    # The device first: dtype and head_dim of a CPU's tensors would fit no better.
    assert [line.strip() for line in lines[1:4]] == list(report.why_not)
    assert all("got tensors on cpu" in line for line in lines[1:3])
    assert report.to_dict()["why_not"] == list(report.why_not) and "route" not in report.to_dict()
    assert explain(q, k, GRID, impl="torch", **ALONE).why_not == ()


def test_counts_with_partial_tiles():
    q, k, _ = qkv(9, heads=3)
    report = explain(q, k, (1, 3, 3), tile_thw=(1, 2, 2), kernel_thw=(1, 1, 1), sparse_type="sta")
    assert (report.video_tiles, report.partial_video_tiles, report.text_tiles) == (4, 3, 0)
    assert report.flops == 4 * HEAD_DIM * (4 * 4 + 2 * 2 + 2 * 2 + 1) * 3


@pytest.mark.parametrize("pad_type", ["zero", "repeat"])
def test_counts_with_padding(pad_type):
    q, k, _ = qkv(9)
    report = explain(q, k, (1, 3, 3), tile_thw=(1, 2, 2), kernel_thw=(1, 1, 1), sparse_type="sta", pad_type=pad_type)
    assert report.tiled_tokens == 16
    assert report.padding_share == pytest.approx(7 / 16)
    assert report.partial_video_tiles == 3
    assert report.flops == 4 * HEAD_DIM * 4 * 4 * 4 * 2
    assert "7 padding tokens" in str(report)


def test_counts_with_a_text_mask():
    q, k, _ = qkv(35, batch=2)
    text_mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    report = explain(q, k, GRID, text_len=3, text_mask=text_mask, **ALONE)
    assert report.valid_text_tokens == (1, 3)
    assert report.flops == 4 * HEAD_DIM * 2 * ((32 * 9 + 1 * 33) + (32 * 11 + 3 * 35))


def test_counts_of_lists_that_differ_by_head():
    q, k, _ = qkv(32)
    report = explain(q, k, GRID, tile_thw=(2, 2, 2), sparse_type="block_attn", topk=3)
    assert report.tile_density == pytest.approx(3 / 4)
    assert report.flops == 4 * HEAD_DIM * 2 * 32 * 24
    assert report.near is None


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("layout", [
    TokenLayout.video_text(GRID, 3),
    TokenLayout((DenseRun(3), VideoGrid(*GRID))),
])
def test_sampled_numbers_against_the_whole_softmax(layout, kv_heads):
    """There are as many video tokens as sampled rows, so every one of them is a sample."""
    q, k, v = qkv(35, batch=2, heads=4, kv_heads=kv_heads, dtype=torch.float64)
    valid = torch.tensor([[True, False, False], [True, True, True]])
    config = SSTAConfig(tile_thw=(2, 2, 2), sparse_type="block_attn", topk=2)
    report = explain(q, k, layout, config, value=v, text_mask=valid)
    video = torch.arange(32) if layout.segments[0] == VideoGrid(*GRID) else torch.arange(3, 35)
    text = torch.tensor([i for i in range(35) if i not in video])
    # Tiles by hand: columns and rows of two, both frames in one tile.
    place = torch.arange(32)
    tile_of = torch.full((35,), 4)
    tile_of[video] = (place % 16 // 8) * 2 + place % 4 // 2
    allowed = torch.ones(2, 35, dtype=torch.bool)
    allowed[:, text] = valid
    k, v = (x.repeat_interleave(4 // kv_heads, 1) for x in (k, v))
    scores = (q[:, :, video] @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(~allowed[:, None, None], -math.inf)
    weights = scores.softmax(-1)
    selected = report.blocks.to_mask()[:, :, tile_of[video]][..., tile_of].expand(2, 4, -1, -1)
    assert report.attention_kept == pytest.approx(float((weights * selected).sum(-1).mean()), rel=1e-9)
    assert 0 < report.attention_kept < 1
    dense, sparse = weights @ v, scores.masked_fill(~selected, -math.inf).softmax(-1) @ v
    assert report.output_error == pytest.approx(float((sparse - dense).norm() / dense.norm()), rel=1e-6)
    assert report.seconds > 0


def test_everything_selected_is_dense_attention():
    q, k, v = qkv(35, dtype=torch.float64)
    report = explain(q, k, GRID, text_len=3, tile_thw=(2, 2, 2), sparse_type="block_attn", topk=4, value=v)
    assert report.tile_density == report.token_density == 1
    assert report.attention_kept == pytest.approx(1)
    assert report.output_error < 1e-12
    assert report.error_sources == ("nothing is dropped and nothing is padded: equal to dense attention but for rounding",
                                    "rounding to float64, in relative steps of 2.2e-16")


@pytest.mark.parametrize("keywords, masked, expected, absent", [
    (ALONE, False, ["dropped", "window alone"], ["padding", "chosen by", "one pattern"]),
    (dict(tile_thw=(2, 2, 2), kernel_thw=(1, 1, 1), topk=1), False, ["dropped", "chosen by the mean"], ["window alone", "padding"]),
    (dict(tile_thw=(2, 2, 2), sparse_type="block_attn", topk=1, adaptive_pool=(1, 2, 1)), False, ["chosen by 2 means"], []),
    (dict(tile_thw=(2, 2, 2), sparse_type="block_attn", topk=1, mask_share_within_head=True), False,
     ["one pattern serves all 2 heads"], []),
    (dict(tile_thw=(2, 3, 3), sparse_type="block_attn", topk=4, pad_type="zero"), True,
     ["zeros in the video", "invalid text tokens"], ["dropped"]),
    (dict(tile_thw=(2, 3, 3), sparse_type="block_attn", topk=4, pad_type="repeat"), False,
     ["(repetitions) are attended"], ["invalid text"]),
])
def test_error_sources_depend_on_the_case(keywords, masked, expected, absent):
    q, k, _ = qkv(35, dtype=torch.bfloat16)
    text_mask = torch.tensor([[True, True, False]]) if masked else None
    words = "\n".join(explain(q, k, GRID, text_len=3, text_mask=text_mask, **keywords).error_sources)
    assert "rounding to bfloat16, in relative steps of 7.8e-03" in words
    for part in expected:
        assert part in words
    for part in absent:
        assert part not in words


def test_a_preset_is_settled_for_the_canvas():
    q, k, _ = qkv(16 * 24)
    report = explain(q, k, (1, 16, 24), SSTAConfig.hunyuan_video_15())
    assert report.config.tile_thw == (1, 16, 24)
    assert report.video_tiles == 1


def test_the_table_is_aligned_and_the_dictionary_is_json():
    q, k, v = qkv(35)
    report = explain(q, k, GRID, text_len=3, text_mask=torch.tensor([[1, 1, 0]]), value=v, **ALONE)
    lines = str(report).splitlines()
    column = lines[0].index("torch")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)
    assert "tokens" in str(report) and "35 = 32 video + 3 text (valid: 2)" in str(report)
    assert repr(report) == str(report)
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["flops"] == report.flops and values["valid_text_tokens"] == [2]
    assert values["error_sources"] == list(report.error_sources)
    assert not {"blocks", "layout", "config", "near", "budget"} & set(values)


def test_inputs_are_left_alone_and_nan_gives_no_number():
    q, k, v = qkv(32)
    before = [x.clone() for x in (q, k, v)]
    explain(q, k, GRID, value=v, **ALONE)
    assert all(torch.equal(x, y) for x, y in zip(before, (q, k, v)))
    k[:, :, 5] = math.nan
    report = explain(q, k, GRID, value=v, **ALONE)
    assert report.attention_kept is None and report.output_error is None
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("change, error, message", [
    (dict(config=SSTAConfig(), topk=3), TypeError, "config must not be given together with other keywords, got topk"),
    (dict(top_k=3), TypeError, "top_k"),
    (dict(thw=(2, 4, 5)), ValueError, "thw"),
    (dict(thw=TokenLayout.video_text(GRID), text_len=0), ValueError, "text_len must be left out"),
    (dict(topk=0), ValueError, "topk must be at least 1, got 0"),
    (dict(impl="fast"), ValueError, "impl must be one of"),
    (dict(impl="triton"), ValueError, "impl='triton' requires"),
    (dict(key=torch.randn(1, 2, 31, HEAD_DIM)), ValueError, "key"),
    (dict(value=torch.randn(1, 1, 32, HEAD_DIM)), ValueError, "value"),
])
def test_bad_input(change, error, message):
    q, k, _ = qkv(32)
    arguments = dict(query=q, key=k, thw=GRID) | change
    with pytest.raises(error, match=message):
        explain(**arguments)


@pytest.mark.parametrize("shape", [(0, 2, 32, HEAD_DIM), (1, 0, 32, HEAD_DIM), (1, 2, 32, 0)])
def test_nothing_cannot_be_explained(shape):
    q, k = torch.zeros(shape), torch.zeros(shape[0], 2, *shape[2:])
    with pytest.raises(ValueError, match=r"query must have (values to explain|at least one head), got|head_dim must be at least 1"):
        explain(q, k, GRID, **ALONE)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("other", [lambda x: x.to_sparse(), lambda x: torch.nested.nested_tensor([x[0]], layout=torch.jagged),
                                   lambda x: x.to_mkldnn()], ids=["sparse", "nested", "mkldnn"])
def test_what_is_not_strided_is_named(name, other):
    tensors = dict(zip(("query", "key", "value"), qkv(32)))
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        explain(**tensors | {name: other(tensors[name])}, thw=GRID, **ALONE)


def test_a_meta_tensor_cannot_be_explained():
    q = torch.zeros(1, 2, 32, HEAD_DIM, device="meta")
    with pytest.raises(ValueError, match="query must have values to explain, got .* on meta"):
        explain(q, q, GRID, **ALONE)


# Pictures


@pytest.fixture
def report():
    """5 x 6 x 8 tokens in tiles of 2 x 2 x 4: 3 x 3 x 2 tiles, the last layer partial, and five tokens of text in one tile."""
    q, k, _ = qkv(5 * 6 * 8 + 5, heads=3)
    return explain(q, k, (5, 6, 8), text_len=5, tile_thw=(2, 2, 4), kernel_thw=(1, 3, 1), topk=5)


def artists(axes, gid):
    return [patch for patch in axes.patches if patch.get_gid() == gid]


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000


def test_selection_shows_what_was_selected(report, tmp_path):
    figure = plot_selection(report, (3, 5, 1), head=1, images=torch.rand(5, 12, 16, 3), path=tmp_path / "selection.png")
    assert is_png(tmp_path / "selection.png")
    query_tile = (1 * 3 + 2) * 2 + 0
    kept = report.blocks.to_mask()[0, 1, query_tile, :18].reshape(3, 3, 2)
    assert len(figure.axes) == 5
    for frame, axes in enumerate(figure.axes):
        assert axes.get_title() == f"latent frame {frame}"
        drawn = {(round(patch.get_y() // 2), round(patch.get_x() // 4)) for patch in artists(axes, "attended")}
        assert drawn == {(i, j) for i in range(3) for j in range(2) if kept[frame // 2, i, j]}
        outlines = [(patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()) for patch in artists(axes, "query")]
        assert outlines == ([(0, 4, 4, 2)] if frame in (2, 3) else [])
    assert f"attends to: {int(kept.sum())} of the video's 18 tiles, and to the text" in figure.get_suptitle()
    assert "head 1; the tile spans frames 2-3, rows 4-5, columns 0-3" in figure.get_suptitle()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"the query tile", "near (window)"} <= set(labels)


def test_pictures_call_estimated_tiles_estimated():
    q, k, _ = qkv(4 * 4 * 8 + 5, heads=2)
    report = explain(q, k, (4, 4, 8), text_len=5, tile_thw=(2, 2, 4), kernel_thw=(1, 1, 1), sparse_type="block_attn", topk=2,
                     compensation="linear")
    figure, mask = plot_selection(report), plot_block_mask(report)
    assert "One query tile: 2 of the video's 8 tiles and the text are computed exactly; 6 tiles are estimated" in figure.get_suptitle()
    assert sum(len(artists(axes, "estimated")) for axes in figure.axes) == 2 * 6, "two frames show each tile"
    assert "computes exactly: " in mask.axes[0].get_title()
    for picture in (figure, mask):
        labels = [text.get_text() for text in picture.legends[0].get_texts()]
        assert "estimated" in labels and "not attended to" not in labels


def test_of_a_long_video_one_frame_of_each_layer_of_tiles_is_shown():
    q, k, _ = qkv(9 * 2 * 2)
    figure = plot_selection(explain(q, k, (9, 2, 2), tile_thw=(4, 2, 2), topk=1))
    assert [axes.get_title() for axes in figure.axes] == [
        "latent frame 1 (tile: frames 0-3)", "latent frame 5 (tile: frames 4-7)", "latent frame 8 (tile: frame 8)"]


def test_block_mask_shows_every_pair(report, tmp_path):
    figure = plot_block_mask(report, head=2, path=tmp_path / "mask.png")
    assert is_png(tmp_path / "mask.png")
    axes = figure.axes[0]
    shown = torch.as_tensor(axes.images[0].get_array().data)
    kept = report.blocks.to_mask()[0, 2]
    assert torch.equal(shown != 0, kept)
    # Text, window and budget, as the legend counts them.
    assert (shown[18] == 3).all() and (shown[:, 18] == 3).all()
    assert torch.equal(shown[:18, :18] == 1, report.near)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["frames 0-1", "frames 2-3", "frame 4", "text"]


@pytest.mark.parametrize("call, message", [
    (lambda r: plot_selection(r, (5, 0, 0)), r"query_thw must be a \(frame, row, column\) inside the grid \(5, 6, 8\), got \(5, 0, 0\)"),
    (lambda r: plot_selection(r, head=3), "head must be between 0 and 2, got 3"),
    (lambda r: plot_selection(r, batch=1), "batch must be between 0 and 0, got 1"),
    (lambda r: plot_selection(r, grid=1), "grid must be between 0 and 0, got 1"),
    (lambda r: plot_selection(r, (1, 2)), r"query_thw must be a \(frame, row, column\) inside the grid \(5, 6, 8\), got \(1, 2\)"),
    (lambda r: plot_selection(r, images=torch.rand(5, 0, 8, 3)), r"images must be .* none of them empty, got \(5, 0, 8, 3\)"),
    (lambda r: plot_selection(r, images=numpy.zeros((5, 6, 8))), r"images must be \[5, height, width, 3\].*, got \(5, 6, 8\)"),
    (lambda r: plot_selection(r, images=torch.rand(4, 6, 8, 3)), r"images must be \[5, height, width, 3\]"),
    (lambda r: plot_block_mask(r, head=-1), "head must be at least 0, got -1"),
    (lambda r: plot_block_mask(r, batch=2), "batch must be between 0 and 0, got 2"),
])
def test_bad_input_of_the_pictures(report, call, message):
    with pytest.raises(ValueError, match=message):
        call(report)


PICTURES = [plot_selection, plot_block_mask]


@pytest.mark.parametrize("plot", PICTURES)
@pytest.mark.parametrize("other", [None, {}, torch.zeros(2), "report", 3], ids=lambda other: type(other).__name__)
def test_the_pictures_are_of_a_report(plot, other):
    with pytest.raises(TypeError, match="report must be a Report, which explain returns, got"):
        plot(other)


@pytest.mark.parametrize("call, message", [
    *((lambda r, plot=plot, head=head: plot(r, head=head), "head must be an int, got")
      for plot in PICTURES for head in ("0", None, 0.5, True)),
    *((lambda r, plot=plot: plot(r, batch="0"), "batch must be an int, got '0'") for plot in PICTURES),
    (lambda r: plot_selection(r, grid="0"), "grid must be an int, got '0'"),
    (lambda r: plot_selection(r, 3), "query_thw must be a sequence of ints, got 3"),
    (lambda r: plot_selection(r, "123"), "query_thw must be a sequence of ints, got '123'"),
    (lambda r: plot_selection(r, (1, 2.5, 1)), r"query_thw\[1\] must be an int, got 2.5"),
    (lambda r: plot_selection(r, images=torch.zeros(5, 6, 8, 3).long()), r"images must be floats in \[0, 1\] or uint8 .*, got torch.int64"),
    (lambda r: plot_selection(r, images=[numpy.zeros((6, 8, 3)), numpy.zeros((3, 8, 3))]), "images must be .* 5 pictures of one size"),
])
def test_bad_types_of_the_pictures(report, call, message):
    with pytest.raises(TypeError, match=message):
        call(report)


def background(figure):
    return torch.as_tensor(numpy.asarray(figure.axes[0].images[0].get_array()))


def test_images_as_users_have_them(report):
    """Tensors, arrays and lists of them, floats and bytes: the same picture, and right."""
    exact = torch.arange(5 * 6 * 8 * 3, dtype=torch.uint8).reshape(5, 6, 8, 3)
    floats = exact.float() / 255
    before = exact.clone()
    for images in (exact, exact.numpy(), list(exact), list(exact.numpy()), floats.tolist(), floats, floats.numpy(),
                   floats.double(), list(floats), [Image.fromarray(image) for image in exact.numpy()]):
        torch.testing.assert_close(background(plot_selection(report, images=images)).float(), floats[0])
    assert torch.equal(exact, before)


def test_indices_may_be_numpys(report):
    figure = plot_selection(report, numpy.array([3, 5, 1]), head=numpy.int64(1))
    assert "head 1; the tile spans frames 2-3, rows 4-5, columns 0-3" in figure.get_suptitle()


def test_a_layout_without_video_has_no_frames_to_draw():
    q, k, _ = qkv(12)
    report = explain(q, k, TokenLayout((DenseRun(12),)), tile_thw=(2, 2, 2))
    with pytest.raises(ValueError, match="report must be of a layout with a video grid"):
        plot_selection(report)
    assert len(plot_block_mask(report).axes) == 1


def test_the_legend_fits_into_every_picture(report):
    for figure in (plot_block_mask(report), plot_selection(report)):
        figure.canvas.draw()
        legend, = figure.legends
        box = legend.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0


def test_without_matplotlib_the_message_names_the_extra(report, monkeypatch):
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_block_mask(report)


def test_what_was_computed_exactly_is_said_of_a_compensated_layer():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 128, 16, dtype=torch.float64)
    config = SSTAConfig(tile_thw=(1, 4, 4), kernel_thw=(1, 1, 1), topk=3, sparse_type="block_attn", compensation="linear")
    report = explain(q, k, (2, 8, 8), config, value=v)
    mean, fifth, worst = report.exact_mass
    assert 0 < fifth <= mean < 1 and fifth <= worst <= mean
    mass = [line for line in str(report).splitlines() if line.startswith("exact mass") or " by the estimate, over all rows" in line]
    assert len(mass) == 2 and "of the softmax is computed exactly and the rest estimated" in mass[0]
    assert "estimated from their means" in report.error_sources[0]
    without = explain(q, k, (2, 8, 8), topk=3, tile_thw=(1, 4, 4), kernel_thw=(1, 1, 1), sparse_type="block_attn", value=v)
    assert without.exact_mass is None and report.output_error < without.output_error
    assert explain(q, k, (2, 8, 8), config).exact_mass is None
    assert torch.equal(explain(q, k, (2, 8, 8), config).blocks.to_mask(), report.blocks.to_mask())
