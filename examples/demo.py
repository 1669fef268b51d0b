"""Runs a small HunyuanVideo 1.5 transformer over a rendered clip, dense and with SSTA, and shows what came of it."""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from clip import PATCH, clip_to_latents, render_clip, thing_centre
from torch import Tensor

from ssta import SSTAConfig, TokenLayout, explain
from ssta.report import Report

NOTE = """The model has random weights, so its output is no video to look at. One thing is not random: the key projection repeats the query
projection, so that regions that look alike attend to each other, where otherwise attention would be close to uniform. The
differences say how much SSTA changes this model, not how much it would change a trained one."""

# Messages of packages that diffusers imports if they are installed, and that mean nothing here: a logger, and how they begin.
NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass and is now natively supported",
         "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects"}

CPU_NOTE = "A CPU is no place to judge speed: the README has what SSTA gains on a GPU."


@dataclass(frozen=True)
class Size:
    """One size of the job: the latent canvas (t, h, w), the model, and the conditions (image, glyph and prompt tokens)."""

    canvas: tuple[int, int, int]
    heads: int
    layers: int
    refiner_layers: int
    condition_tokens: tuple[int, int, int]
    valid_tokens: tuple[int, int]  # of the glyph and of the prompt tokens; without an image none of its tokens is valid
    condition_channels: tuple[int, int, int]
    dtype: torch.dtype
    config: SSTAConfig | None  # None: what apply_ssta takes by default
    stock_dense: bool  # whether diffusers' own attention, with its mask of S x S tokens, is what SSTA is compared with
    repeats: int
    needs_gpu: bool


SIZES = {
    "small": Size((8, 24, 32), 2, 2, 1, (16, 32, 80), (12, 60), (32, 32, 64), torch.float32,
                  None, stock_dense=True, repeats=3, needs_gpu=False),
    # The released model's canvas for 121 frames of 720p, its layer size and its numbers of condition tokens; here that mask takes 13 GB.
    "720p": Size((31, 45, 80), 16, 2, 2, (729, 256, 1000), (56, 844), (1152, 1472, 3584), torch.bfloat16,
                 SSTAConfig.hunyuan_video_15(), stock_dense=False, repeats=5, needs_gpu=True),
}
LATENT_CHANNELS, HEAD_DIM = 32, 128


def main(arguments: list[str] | None = None) -> dict:
    """Runs the job as the command line says, and returns what is written to report.json."""
    options = parse(arguments)
    size = SIZES[options.size] if options.canvas is None else replace(SIZES[options.size], canvas=options.canvas)
    if size.needs_gpu and not torch.cuda.is_available():
        sys.exit(f"--size {options.size} requires an NVIDIA GPU, and torch sees none; --size small runs on any machine")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        # The kernels that a GPU runs take 16-bit tensors.
        size = replace(size, dtype=torch.bfloat16)
    began = time.perf_counter()

    def say(sentence: str) -> None:
        print(f"[{time.perf_counter() - began:5.1f} s] {sentence}", flush=True)

    say("loading diffusers")
    from ssta.pipelines import Schedule, apply_ssta

    t, h, w = size.canvas
    say(f"rendering a clip of {t * PATCH[0]} frames, {w * PATCH[2]} x {h * PATCH[1]} pixels")
    clip = render_clip(t * PATCH[0], h * PATCH[1], w * PATCH[2], seed=options.seed, device=device)
    latents = clip_to_latents(clip, LATENT_CHANNELS, seed=options.seed)
    say(f"building the model: {size.layers} layers, {size.heads} heads of {HEAD_DIM}, random weights, {size.dtype}")
    model = build_model(size, options.seed, device)
    inputs = model_inputs(latents, size, options.seed)
    if size.config is None:
        with apply_ssta(model) as handle:
            size = replace(size, config=handle.config)
    with torch.inference_mode():
        runs = compare(model, inputs, size, device, say)
        say("looking at the first layer")
        # A dense layer is given q, k and v themselves; a sparse one may get them deferred, and materialise them in tile order.
        with apply_ssta(model, size.config, schedule=Schedule(dense_layers=(0,))):
            query, key, value, layout, text_mask = record_attention(model, inputs)
        report = explain(query, key, layout, size.config, value=value, text_mask=text_mask)

    output = Path(options.output)
    say(f"drawing pictures to {output}/")
    output.mkdir(parents=True, exist_ok=True)
    draw(report, clip, output)
    result = dict(
        size=options.size, canvas=list(size.canvas), seed=options.seed, device=device_name(device), torch=torch.__version__,
        dtype=str(size.dtype).removeprefix("torch."), tokens=report.tokens, video_tokens=report.video_tokens,
        text_tokens=report.text_tokens, valid_text_tokens=report.valid_text_tokens[0], layers=size.layers,
        repeats=size.repeats, runs=runs, first_layer=report.to_dict(), note=" ".join(NOTE.split()),
    )
    (output / "report.json").write_text(json.dumps(result, indent=2) + "\n")
    say("done\n")
    print(table(result), flush=True)
    return result


def leave_noise_out() -> None:
    """Takes the messages of NOISE, and no others, out of what this process prints."""
    for name, beginning in NOISE.items():
        logging.getLogger(name).addFilter(lambda record, beginning=beginning: not str(record.msg).startswith(beginning))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="small", help="which model and canvas (720p needs a GPU)")
    parser.add_argument("--canvas", type=canvas, default=None, metavar="TxHxW", help="another latent canvas, such as 2x8x12")
    parser.add_argument("--output", default="demo", help="folder for the pictures and report.json")
    parser.add_argument("--seed", type=int, default=0, help="seed of the clip, the projection and the weights")
    return parser.parse_args(arguments)


def canvas(text: str) -> tuple[int, int, int]:
    """(t, h, w) from TxHxW."""
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"must be three positive numbers such as 8x24x32, got {text!r}")
    return tuple(int(size) for size in sizes)


def build_model(size: Size, seed: int, device: torch.device):
    """The transformer with seeded random weights, changed only in that keys are made as queries are."""
    from diffusers import HunyuanVideo15Transformer3DModel

    torch.manual_seed(seed)
    image, glyph, prompt = size.condition_channels
    with torch.device(device):
        model = HunyuanVideo15Transformer3DModel(
            in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS, num_attention_heads=size.heads, attention_head_dim=HEAD_DIM,
            num_layers=size.layers, num_refiner_layers=size.refiner_layers, rope_axes_dim=(16, 56, 56),
            text_embed_dim=prompt, text_embed_2_dim=glyph, image_embed_dim=image)
    for block in model.transformer_blocks:
        block.attn.to_k.load_state_dict(block.attn.to_q.state_dict())
    return (model if size.dtype == torch.float32 else model.to(size.dtype)).eval()


def model_inputs(latents: Tensor, size: Size, seed: int) -> dict[str, Tensor]:
    """One denoising step's arguments: the latents, and random conditions of which part is padding, as in text-to-video."""
    generator = torch.Generator().manual_seed(seed)
    device, dtype = latents.device, size.dtype
    (image_tokens, *text_tokens), (image_channels, *text_channels) = size.condition_tokens, size.condition_channels
    glyphs, prompt = (torch.randn(1, tokens, channels, generator=generator).to(device, dtype)
                      for tokens, channels in zip(text_tokens, text_channels))
    glyph_mask, prompt_mask = ((torch.arange(tokens, device=device) < valid)[None] for tokens, valid in zip(text_tokens, size.valid_tokens))
    return dict(
        hidden_states=latents.to(dtype), timestep=torch.full((1,), 500.0, device=device, dtype=dtype),
        encoder_hidden_states=prompt, encoder_attention_mask=prompt_mask,
        encoder_hidden_states_2=glyphs, encoder_attention_mask_2=glyph_mask,
        image_embeds=torch.zeros(1, image_tokens, image_channels, device=device, dtype=dtype))


def compare(model, inputs: dict[str, Tensor], size: Size, device: torch.device, say: Callable[[str], None]) -> list[dict]:
    """What the model gives, and how fast, with dense attention, with SSTA selecting every tile, and with SSTA."""
    from ssta.pipelines import Schedule, apply_ssta

    # Nothing is left to estimate.
    every_tile = SSTAConfig(tile_thw=size.config.tile_thw, topk=math.prod(size.canvas), sparse_type="block_attn", compensation="linear")
    if size.stock_dense:
        dense, torch_name, install_dense = "dense, unmodified diffusers", "torch SDPA, masked", nullcontext
    else:
        dense, torch_name = "dense, without the S x S mask", "torch SDPA"
        install_dense = partial(dense_without_mask, model, sum(size.valid_tokens))
    sparse = partial(apply_ssta, model, schedule=Schedule())
    ways = {dense: install_dense, "SSTA, every tile (a check)": partial(sparse, every_tile), "SSTA": partial(sparse, size.config)}
    seconds = {dense: [], "SSTA": []}

    runs, reference = [], None
    for name, install in ways.items():
        say(f"running: {name}")
        with install() as handle:
            output = model(**inputs).sample.double()
            layers = handle.report() if handle else []
        reference = output if reference is None else reference
        runs.append(dict(
            run=name, implementation=layers[0].implementation if layers else torch_name, tiles=layers[0].tiles if layers else None,
            density=statistics.fmean(layer.density for layer in layers) if layers else 1.0,
            relative_difference=float((output - reference).norm() / reference.norm())))
    # Interleaved, so that whatever else the machine does meets both alike.
    for turn in range(size.repeats):
        say(f"measuring, turn {turn + 1} of {size.repeats}")
        for name, measured in seconds.items():
            with ways[name]():
                measured.append(timed(partial(model, **inputs), device))
    return [run | dict(seconds=statistics.median(seconds[run["run"]]) if run["run"] in seconds else None) for run in runs]


def draw(report: Report, clip: Tensor, output: Path) -> None:
    """The two pictures; the query tile lies on the second ball, in the middle of the clip."""
    from ssta.plot import plot_block_mask, plot_selection

    t, h, w = report.layout.video[0].extent
    middle = t // 2
    row, column = thing_centre(1, middle / max(t - 1, 1))
    plot_selection(report, (middle, int(row * h), int(column * w)), images=clip[::PATCH[0]].cpu(), path=output / "selection.png")
    plot_block_mask(report, path=output / "block_mask.png")


@contextmanager
def dense_without_mask(model, valid: int) -> Iterator[None]:
    """Exact dense attention over the video and the ``valid`` text tokens, put where SSTA's processors would attend densely."""
    from ssta.pipelines import Schedule, apply_ssta

    def attend(query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout, text_mask: Tensor | None = None) -> Tensor:
        end = layout.video_length + valid
        out = torch.zeros_like(query)
        out[:, :end] = torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :end].transpose(1, 2) for x in (query, key, value))).transpose(1, 2)
        return out

    with apply_ssta(model, schedule=Schedule(dense_layers=tuple(range(len(model.transformer_blocks))))):
        for block in model.transformer_blocks:
            block.attn.processor.attend = attend
        yield


def record_attention(model, inputs: dict[str, Tensor]) -> tuple:
    """(query, key, value, token layout, text mask) of the first layer's attention in a run of the model, heads before tokens."""
    processor, seen = model.transformer_blocks[0].attn.processor, []
    attend = processor.attend

    def recording(query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout, text_mask: Tensor | None = None) -> Tensor:
        seen.append((*(x.transpose(1, 2) for x in (query, key, value)), layout, text_mask))
        return attend(query, key, value, layout, text_mask=text_mask)

    processor.attend = recording
    try:
        model(**inputs)
    finally:
        del processor.attend
    return seen[0]


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call in seconds, until the device has finished."""
    finish = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    finish()
    start = time.perf_counter()
    call()
    finish()
    return time.perf_counter() - start


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def table(result: dict) -> str:
    """The runs as an aligned table, and what is needed to read it."""
    head = ("run", "implementation", "tokens", "tiles", "density", "seconds", "relative difference")
    rows = [head]
    for index, run in enumerate(result["runs"]):
        rows.append((
            run["run"], run["implementation"], f"{result['tokens']:,}", "-" if run["tiles"] is None else str(run["tiles"]),
            f"{run['density']:.1%}", "-" if run["seconds"] is None else f"{run['seconds']:.3f}",
            f"{run['relative_difference']:.2e}" if index else "(reference)"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths)))
             for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    first = result["first_layer"]
    legend = [
        f"tokens: {result['video_tokens']:,} video + {result['text_tokens']:,} text, of which {result['valid_text_tokens']:,} are valid. "
        "tiles: of the video and of the text. density: the share of tile pairs that is computed.",
        f"seconds: a forward of {result['layers']} layers, the median of {result['repeats']}, on {result['device']}. "
        "relative difference: ||a - b|| / ||b|| of the model's output, b being the first row's.",
        f"In the first layer the selected tiles ({first['tile_density']:.0%} of the pairs) hold {first['attention_kept']:.0%} of dense "
        f"attention's softmax weight, and what they give differs from dense attention by {first['output_error']:.1e}.",
        " ".join(NOTE.split()),
        *([CPU_NOTE] if result["device"].startswith("CPU") else []),
    ]
    return "\n".join(lines + ["", *(textwrap.fill(sentence, 120) for sentence in legend)])


if __name__ == "__main__":
    leave_noise_out()
    main()
