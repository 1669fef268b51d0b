"""How much faster is a step in a CUDA graph, where the host is slower than the GPU (docs/small-canvases.md)?

    python benchmark/bench_graphs.py [--rounds 7] [--csv graphs_h200]

"step" is a whole forward of LTX-Video under the default, "training" a module of projections and attention on a small canvas, forward and
backward. Each is measured as it is and from a graph by torch's own means, interleaved, once the results were compared. host_ms is the time
until the call returns. Without a GPU everything is tiny, and nothing is a graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from arguments import add_rounds, new_parser
from bench_pipeline import prepared
from measure import RESULTS, interleaved, print_machine, print_rows, write_rows
from models import MODELS, MODELS_CPU
from stream_model import in_graph
from torch import Tensor, nn

from ssta import SSTAConfig, TokenLayout, ssta_attention

# Canvas, heads and head_dim of the training step.
SMALL, SMALL_CPU = ((8, 24, 32), 16, 128), ((2, 4, 6), 2, 16)


class Attention(nn.Module):
    """Projections and attention over a video."""

    def __init__(self, canvas: tuple[int, int, int], heads: int, head_dim: int) -> None:
        super().__init__()
        self.layout, self.heads, dim = TokenLayout.video_text(canvas), heads, heads * head_dim
        self.config = SSTAConfig(tile_thw=(2, 2, 2) if canvas[1] < 8 else (4, 4, 8), density=0.3, compensation="linear")
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(ssta_attention(q, k, v, self.layout, self.config).transpose(1, 2).flatten(2))


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    parser = new_parser(__doc__)
    add_rounds(parser, 7 if gpu else 1)
    options = parser.parse_args(argv)
    print_machine()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    rows = [dict(step=name, what=what, **times) for name, calls in (
        ("step", forward_calls(device, dtype)), ("training", training_calls(device, dtype)))
        for what, times in interleaved(calls, options.rounds).items()]
    print_rows(rows)
    if options.csv:
        write_rows(RESULTS / f"{options.csv}.csv", rows)


@torch.no_grad()
def forward_calls(device: str, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """A forward of LTX-Video as it is and from a graph."""
    shape = (MODELS if device == "cuda" else MODELS_CPU)[-1]
    model, call = prepared(shape, shape.build(device, dtype), "default"), shape.call(device, dtype)

    def step() -> Tensor:
        with torch.no_grad():
            return model(**call)[0]

    return {"eager": step, "graph": in_graph(step)}


def training_calls(device: str, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """A forward and backward as they are and from graphs, whose gradients are compared."""
    canvas, heads, head_dim = SMALL if device == "cuda" else SMALL_CPU
    module = Attention(canvas, heads, head_dim).to(device, dtype)
    x = torch.randn(1, module.layout.length, heads * head_dim, device=device, dtype=dtype, requires_grad=True)

    def step(of: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        leaves = (x, *module.parameters())
        return lambda: torch.autograd.grad(of(x).float().square().mean(), leaves)

    eager = step(module)
    expected = eager()
    graphed = step(torch.cuda.make_graphed_callables(module, (x,)) if device == "cuda" else module)
    for found, wanted in zip(graphed(), expected):
        torch.testing.assert_close(found, wanted)
    return {"eager": eager, "graph": graphed}


if __name__ == "__main__":
    main()
