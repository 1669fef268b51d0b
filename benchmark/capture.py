"""Queries, keys and values of real heads, few and small enough for the tests: tests/data/captures.npz, from the model of bench_quality.py.

    python benchmark/capture.py --minutes 1 [--to FILE]

A model with heads of 32 is trained as by bench_quality.py, on procedural clips where no others are named, so that anybody can make the
file anew, up to how far a GPU gets in a minute. It samples one video, densely. At an early and a late step all heads of all layers are
ordered by how unlike the tokens of a tile are (h of kernels/eager/estimate.py, mean weighted by mass), and the one most alike, the middle
one and the one least alike are kept: of each a box of the canvas, with norm and RoPE.

    q, k, v         int8 [N, T * H * W, D], in steps
    q_step, ...     float32 [N, 1, D]: an eighth of the channel's standard deviation
    thw             int64 [3], tokens of the box
    layer, head     int64 [N]
    noise           float32 [N], the share of noise at that step
    half_variance   float32 [N], h in tiles of TILE on the whole canvas
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from arguments import Unusable
from bench_quality import add_training, trained
from sample_quality import Sampler, step_at, velocity
from self_attention import Seen
from torch import Tensor
from video_model import Checkpoint

from ssta import TokenLayout, tile_layout
from ssta.kernels import choose_backend

CAPTURES = Path(__file__).parent.parent / "tests" / "data" / "captures.npz"
STEPS, AT = 30, (20, 80)
BOX, TILE = (4, 12, 16), (4, 4, 8)
# Of all heads in the order of h.
SHARES = (0.0, 0.5, 1.0)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_training(parser)
    parser.add_argument("--to", metavar="FILE", type=Path, default=CAPTURES, help="what is written (default %(default)s)")
    parser.set_defaults(head_dim=32, out=Path("build/captured"))
    options = parser.parse_args(argv)
    device = torch.device(options.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    try:
        checkpoint, _ = trained(options, device)
    except Unusable as error:
        parser.error(str(error))
    arrays = captured(checkpoint, device)
    options.to.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.to, **arrays)
    for layer, head, noise, h in zip(*(arrays[name] for name in ("layer", "head", "noise", "half_variance"))):
        print(f"layer {layer}, head {head}, noise {noise:.2f}, h {h:.2f}")
    print(f"wrote {options.to}, {options.to.stat().st_size / 1000:.0f} kB")


@torch.no_grad()
def captured(checkpoint: Checkpoint, device: torch.device) -> dict[str, np.ndarray]:
    """The arrays of the file."""
    size = checkpoint.size
    model = checkpoint.model(device).as_loaded(torch.bfloat16 if device.type == "cuda" else torch.float32)
    sampler = Sampler(model, [0], 0, STEPS)
    wanted = [step_at(percent, STEPS) for percent in AT]
    box = tuple(min(most, tokens) for most, tokens in zip(BOX, size.canvas))
    kept: list[dict[str, np.ndarray]] = []
    x = sampler.noise.clone()
    for step, t in enumerate(sampler.times()):
        with Seen(size.tokens) as attention:
            v = velocity(model, x, t, sampler.condition)
        if step in wanted:
            kept += chosen(attention.seen, size.canvas, box, float(t) / 1000)
        x = sampler.scheduler.step(v, t, x, return_dict=False)[0].float()
    return {name: np.stack([of[name] for of in kept]) for name in kept[0]} | {"thw": np.array(box)}


def chosen(layers: list[tuple[Tensor, ...]], canvas: tuple[int, int, int], box: tuple[int, int, int], noise: float) -> list[dict]:
    """Of each of SHARES of the heads what is kept."""
    spreads = torch.cat([half_variances(*qkv, canvas) for qkv in layers])
    heads = layers[0][0].shape[1]
    order = spreads.argsort()
    found = []
    for share in SHARES:
        place = int(order[round(share * (len(order) - 1))])
        of = {"layer": np.array(place // heads), "head": np.array(place % heads), "noise": np.float32(noise),
              "half_variance": np.float32(spreads[place])}
        for name, x in zip("qkv", layers[place // heads]):
            values = boxed(x[0, place % heads], canvas, box).float().cpu()
            step = values.std(0, keepdim=True).clamp(min=1e-6) / 8
            of |= {name: (values / step).round().clamp(-127, 127).to(torch.int8).numpy(), f"{name}_step": step.numpy()}
        found.append(of)
    return found


def half_variances(q: Tensor, k: Tensor, v: Tensor, canvas: tuple[int, int, int]) -> Tensor:
    """Float32 ``[H]``: of each head the mean of h, weighted by mass."""
    layout = tile_layout(TokenLayout.video_text(canvas), tuple(min(pair) for pair in zip(TILE, canvas)), "none", torch.device("cpu"))
    q, k, v = (layout.tile(x[:1].float().cpu()) for x in (q, k, v))
    backend = choose_backend("auto", q.device, q.dtype, q.shape[3])
    blocks = layout.offsets, layout.num_video_tiles, layout.longest_video_tile
    estimates = backend.estimate(q, k, v, blocks, blocks, q.shape[3] ** -0.5, 1)
    return (estimates.mass * estimates.half_variance).sum(-1).mean(-1)[0].float().cpu()


def boxed(x: Tensor, canvas: tuple[int, int, int], box: tuple[int, int, int]) -> Tensor:
    """``[T * H * W, D]`` of the canvas -> ``[t * h * w, D]`` of the box in its middle."""
    first = [(tokens - size) // 2 for tokens, size in zip(canvas, box)]
    t, h, w = (slice(start, start + size) for start, size in zip(first, box))
    return x.unflatten(0, canvas)[t, h, w].flatten(0, 2)


if __name__ == "__main__":
    main()
