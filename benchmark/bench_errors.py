"""How exact is each implementation? out, lse, dq, dk and dv against float64, beside plain dense torch code in the same dtype.

    python benchmark/bench_errors.py [--csv NAME]

Errors are fractions of the largest value of the exact tensor; inputs are drawn in the dtype that is measured. Every implementation that
can run on this machine is measured, in every dtype that it takes: on a CPU, Triton's kernels only in float16 under TRITON_INTERPRET=1.
"""

from __future__ import annotations

from functools import partial

import torch
from arguments import new_parser
from measure import RESULTS, print_machine, print_rows, write_rows
from shapes import ERRORS, ERRORS_CPU, ErrorShape
from torch import Tensor

from ssta.kernels import BlockLists, block_sparse_attention, choose_route
from ssta.kernels.reference import reference_attention, token_mask
from ssta.kernels.routing import IMPLEMENTATIONS

TENSORS = ("out", "lse", "dq", "dk", "dv")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def main(argv: list[str] | None = None) -> None:
    options = new_parser(__doc__).parse_args(argv)
    gpu = torch.cuda.is_available()
    print_machine()
    rows = []
    for shape in ERRORS if gpu else ERRORS_CPU:
        rows += measure_errors(shape, "cuda" if gpu else "cpu")
    print_rows(rows)
    if options.csv:
        write_rows(RESULTS / f"{options.csv}.csv", rows)


def measure_errors(shape: ErrorShape, device: str) -> list[dict]:
    """Rows of the largest and the root-mean-square error, ours and eager torch's, for each implementation, dtype and tensor."""
    scale = shape.head_dim**-0.5
    rows = []
    for dtype_name, dtype in DTYPES.items():
        torch.manual_seed(0)
        blocks = pattern(shape, device)
        q, dout = (torch.randn(1, shape.heads, shape.tokens, shape.head_dim, device=device, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(1, shape.kv_heads, shape.tokens, shape.head_dim, device=device, dtype=dtype) for _ in range(2))
        dlse = torch.randn(q.shape[:3], device=device)

        def measure(attend, *tensors, gradients=(dout, dlse)):
            return with_gradients(attend, *tensors, *gradients)

        exact = measure(partial(reference_attention, blocks=blocks, scale=scale), q.double(), k.double(), v.double())
        eager = measure(partial(eager_attention, blocks=blocks, scale=scale), q, k, v)
        for impl in runnable(device, dtype, shape.head_dim):
            mine = measure(partial(block_sparse_attention, blocks=blocks, return_lse=True, impl=impl), q, k, v)
            for name, got, plain, truth in zip(TENSORS, mine, eager, exact):
                largest, rms = relative_errors(got, truth)
                eager_largest, eager_rms = relative_errors(plain, truth)
                rows.append(dict(
                    pattern=shape.pattern, impl=impl, dtype=dtype_name, tensor=name, max_error=largest, rms_error=rms,
                    eager_max_error=eager_largest, eager_rms_error=eager_rms,
                    tokens=shape.tokens, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim))
    return rows


def pattern(shape: ErrorShape, device: str) -> BlockLists:
    """About half of the key blocks for every query block, at random; the second query block gets none."""
    mask = torch.rand(1, shape.heads, len(shape.lengths), len(shape.lengths), device=device) < 0.5
    mask[:, :, 1] = False
    if shape.real is None and len(set(shape.lengths)) == 1:
        return BlockLists.from_mask(mask, shape.lengths[0], shape.lengths[0])
    offsets = torch.tensor([0, *shape.lengths], device=device).cumsum(0).int()
    real = None if shape.real is None else torch.tensor(shape.real, device=device, dtype=torch.int32)
    return BlockLists.from_mask(mask, offsets, offsets, q_lengths=real, kv_lengths=real)


def runnable(device: str, dtype: torch.dtype, head_dim: int) -> list[str]:
    """The implementations that take such tensors here, by the rule that block_sparse_attention itself follows."""
    found = []
    for impl in IMPLEMENTATIONS:
        try:
            chosen = choose_route(impl, torch.device(device), dtype, head_dim).name
        except ValueError:
            continue
        if chosen == impl != "reference":
            found.append(impl)
    return found


def with_gradients(attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv); nothing arrives through the lse of rows that attend to nothing."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves)
    arriving = dout.to(out.dtype), torch.where(lse.isfinite(), dlse, 0.0).to(lse.dtype)
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, arriving)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of dense masked softmax attention in the inputs' own dtype, as plain torch code would write it: the yardstick."""
    group = q.shape[1] // k.shape[1]
    visible = token_mask(q, k, blocks)
    empty = ~visible.any(-1, keepdim=True)
    scores = (q @ k.repeat_interleave(group, 1).mT * scale).masked_fill(~visible, float("-inf")).masked_fill(empty, 0.0)
    weights = torch.softmax(scores, -1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores.float(), -1).masked_fill(empty.squeeze(-1), float("-inf"))
    return weights @ v.repeat_interleave(group, 1), lse


def relative_errors(got: Tensor, exact: Tensor) -> tuple[float, float]:
    """Largest and root-mean-square error over the largest finite value of ``exact``; -inf must stand where exact has it."""
    error = torch.where(got.double() == exact, 0.0, (got.double() - exact).abs())
    unit = exact.masked_fill(~exact.isfinite(), 0.0).abs().max()
    return float(error.max() / unit), float(error.pow(2).mean().sqrt() / unit)


if __name__ == "__main__":
    main()
