"""How fast is the kernel? Forward and backward of block_sparse_attention beside FlexAttention and dense SDPA on one and the same pattern.

    python benchmark/bench_kernels.py [--impl triton] [--rounds 7] [--csv NAME]

Every output is checked against float64 before a time is printed. Mask building is outside the times; mask_ms is that of BlockLists.
"""

from __future__ import annotations

import argparse

import torch
from measure import RESULTS, backward_flops, forward_flops, interleaved, print_rows, write_rows
from shapes import KERNELS, KERNELS_CPU, KernelShape
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssta.kernels import BlockLists, block_sparse_attention, resolve_impl
from ssta.kernels.reference import reference_attention


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", default="auto", help="implementation of ours (default: what auto chooses)")
    parser.add_argument("--rounds", type=int, default=7 if gpu else 3, help="interleaved rounds; the median is reported")
    parser.add_argument("--csv", metavar="NAME", help="also write benchmark/results/NAME.csv")
    options = parser.parse_args()
    rows = []
    for shape in KERNELS if gpu else KERNELS_CPU:
        rows += measure_shape(shape, options.impl, options.rounds, "cuda" if gpu else "cpu")
    print_rows(rows)
    if options.csv:
        write_rows(RESULTS / f"{options.csv}.csv", rows)


def measure_shape(shape: KernelShape, impl: str, rounds: int, device: str) -> list[dict]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    impl = resolve_impl(impl, torch.device(device), dtype, shape.head_dim)
    size = (shape.batch, shape.heads, shape.tokens, shape.head_dim)
    q, k, v, dout = (torch.randn(size, device=device, dtype=dtype) for _ in range(4))
    scores = torch.rand(shape.batch, shape.heads, shape.blocks, shape.blocks, device=device)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(shape.kept).indices, True)
    blocks = BlockLists.from_mask(mask, shape.block, shape.block)

    providers = {f"ssta {impl}": lambda *x: block_sparse_attention(*x, blocks, impl=impl)}
    if device == "cuda":
        providers["FlexAttention"] = flex_attention(blocks, shape.tokens)
    forward = {name: (lambda attend=attend: attend(q, k, v)) for name, attend in providers.items()}
    backward = {name: backward_of(attend, q, k, v, dout) for name, attend in providers.items()}
    for name, call in forward.items():
        check(name, call(), q, k, v, blocks)
    forward["dense SDPA"] = lambda: dense(q, k, v)
    backward["dense SDPA"] = backward_of(dense, q, k, v, dout)
    mask_ms = interleaved({"mask": lambda: BlockLists.from_mask(mask, shape.block, shape.block)}, rounds)["mask"]["median_ms"]

    rows = []
    for what, calls, flops in (("forward", forward, forward_flops), ("backward", backward, backward_flops)):
        for name, times in interleaved(calls, rounds).items():
            sparse = name != "dense SDPA"
            pairs = shape.pairs if sparse else shape.batch * shape.heads * shape.tokens**2
            rows.append(dict(what=what, provider=name, tokens=shape.tokens, heads=shape.heads, head_dim=shape.head_dim, block=shape.block,
                             kept=shape.kept if sparse else shape.blocks, blocks=shape.blocks, **times,
                             tflops=1e-9 * flops(pairs, shape.head_dim) / times["median_ms"],
                             mask_ms=mask_ms if name.startswith("ssta") else ""))
    return rows


def flex_attention(blocks: BlockLists, tokens: int):
    from torch.nn.attention.flex_attention import flex_attention as flex

    compiled = torch.compile(flex, dynamic=False)
    block_mask = blocks.to_block_mask(tokens, tokens)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def dense(q, k, v):
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v)


def backward_of(attend, q, k, v, dout):
    """A call that runs the backward alone, again and again over one saved forward."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def check(name, out, q, k, v, blocks) -> None:
    """The first query block of the last head against float64: four roundings of the dtype and a long float32 sum, of the largest entry."""
    size = blocks.q_offsets
    one = BlockLists(blocks.counts[:, -1:, :1], blocks.indices[:, -1:, :1], size, size, num_kv_blocks=blocks.num_kv_blocks)
    exact, _ = reference_attention(q[:, -1:, :size].double(), k[:, -1:].double(), v[:, -1:].double(), one, q.shape[-1] ** -0.5)
    error = (out[:, -1:, :size].double() - exact).abs().max()
    allowed = (4 * torch.finfo(out.dtype).eps + 64 * torch.finfo(torch.float32).eps) * exact.abs().max()
    if not error <= allowed:
        raise SystemExit(f"{name} is wrong: off by {float(error):.3e}, {float(allowed):.3e} is allowed; no time is printed")


if __name__ == "__main__":
    main()
