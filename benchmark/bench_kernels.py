"""How fast is the kernel? Forward and backward of block_sparse_attention beside dense SDPA and, on a GPU, FlexAttention.

    python benchmark/bench_kernels.py [--impl hopper triton] [--shape 46080,48 ...] [--rounds 7] [--csv NAME]

Before any time is printed, out and dq of one query block are checked against float64; column error is the largest error found
there, over the largest value. Ours and FlexAttention get one and the same pattern. Building it is outside the times; mask_ms is
that of BlockLists.
"""

from __future__ import annotations

from functools import partial

import torch
from arguments import SHAPE, add_rounds, kernel_shape, new_parser
from measure import RESULTS, backward_flops, forward_flops, interleaved, print_rows, write_rows
from shapes import KERNELS, KERNELS_CPU, KernelShape
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from truth import check, exact_first_block, first_block

from ssta.kernels import IMPLEMENTATIONS, BlockLists, block_sparse_attention, resolve_impl

DENSE, FLEX = "dense SDPA", "FlexAttention"
# FlexAttention's kernel refuses blocks that its own tiles, of up to 128 tokens, do not divide.
FLEX_BLOCK = 128


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    parser = new_parser(__doc__)
    parser.add_argument("--impl", nargs="+", default=["auto"], choices=IMPLEMENTATIONS,
                        help="implementations of ours, side by side (default auto)")
    parser.add_argument("--shape", metavar=SHAPE, type=kernel_shape, action="append",
                        help="measure this shape instead of the usual ones; KEPT key blocks of BLOCK tokens for every query block "
                             "(default 384 tokens, 16 heads, head_dim 128); may be given several times")
    add_rounds(parser, 7 if gpu else 3)
    options = parser.parse_args(argv)
    shapes = options.shape or (KERNELS if gpu else KERNELS_CPU)
    for shape in shapes:
        try:
            for impl in options.impl:
                resolve_impl(impl, torch.device(device), dtype, shape.head_dim, shape.block)
        except ValueError as error:
            parser.error(str(error))
    rows = [row for shape in shapes for row in measure_shape(shape, options.impl, options.rounds, device, dtype)]
    print_rows(rows)
    if options.csv:
        write_rows(RESULTS / f"{options.csv}.csv", rows)


def measure_shape(shape: KernelShape, impls: list[str], rounds: int, device: str, dtype: torch.dtype) -> list[dict]:
    torch.manual_seed(0)
    impls = [resolve_impl(impl, torch.device(device), dtype, shape.head_dim, shape.block) for impl in impls]
    size = (shape.batch, shape.heads, shape.tokens, shape.head_dim)
    q, k, v, dout = (torch.randn(size, device=device, dtype=dtype) for _ in range(4))
    scores = torch.rand(shape.batch, shape.heads, shape.blocks, shape.blocks, device=device)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(shape.kept).indices, True)
    blocks = BlockLists.from_mask(mask, shape.block, shape.block)

    providers = {f"ssta {impl}": partial(block_sparse_attention, blocks=blocks, impl=impl) for impl in impls}
    if device == "cuda" and shape.block % FLEX_BLOCK == 0:
        providers[FLEX] = flex_attention(blocks, shape.tokens)
    elif device == "cuda":
        print(f"{FLEX} is left out: its blocks must be multiples of {FLEX_BLOCK} tokens, these have {shape.block}")
    providers[DENSE] = dense
    forward = {name: partial(attend, q, k, v) for name, attend in providers.items()}
    backward = {name: backward_of(attend, q, k, v, dout) for name, attend in providers.items()}

    everything = BlockLists.from_mask(torch.ones_like(mask[:1, :1]), shape.block, shape.block)
    exact = {sparse: exact_first_block(q, k, v, pattern, dout) for sparse, pattern in ((True, blocks), (False, everything))}
    errors = {}
    for name in providers:
        out, dq = exact[name != DENSE]
        errors["forward", name] = check(f"{name}, forward,", first_block(forward[name](), shape.block), out)
        errors["backward", name] = check(f"{name}, backward,", first_block(backward[name]()[0], shape.block), dq)

    mask_ms = interleaved({"mask": lambda: BlockLists.from_mask(mask, shape.block, shape.block)}, rounds)["mask"]["median_ms"]
    rows = []
    for what, calls, flops in (("forward", forward, forward_flops), ("backward", backward, backward_flops)):
        for name, times in interleaved(calls, rounds).items():
            sparse = name != DENSE
            pairs = shape.pairs if sparse else shape.batch * shape.heads * shape.tokens**2
            rows.append(dict(what=what, provider=name, tokens=shape.tokens, heads=shape.heads, head_dim=shape.head_dim, block=shape.block,
                             kept=shape.kept if sparse else shape.blocks, blocks=shape.blocks, **times,
                             tflops=1e-9 * flops(pairs, shape.head_dim) / times["median_ms"],
                             mask_ms=mask_ms if name.startswith("ssta") else "", error=errors[what, name]))
    return rows


def flex_attention(blocks: BlockLists, tokens: int):
    from torch.nn.attention.flex_attention import flex_attention as flex
    from torch.nn.attention.flex_attention import noop_mask

    compiled = torch.compile(flex, dynamic=False)
    block_mask = blocks.to_block_mask(tokens, tokens)
    # All blocks are full, so the compiled kernel need not know how to mask: FlexAttention at its best.
    block_mask.mask_mod = noop_mask
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def dense(q, k, v):
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v)


def backward_of(attend, q, k, v, dout):
    """A call that runs the backward alone, again and again over one saved forward."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


if __name__ == "__main__":
    main()
