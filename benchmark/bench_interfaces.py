"""How fast are other libraries' interfaces on our kernels? FlashInfer stands beside ours where it is installed (0.7.2 on an H200).

    python benchmark/bench_interfaces.py [--tokens 49152] [--density 0.1] [--rounds 7] [--csv NAME]

Random selections of the given density, head_dim 128, bfloat16. flex-block-attn with 16 heads in blocks of 384; MagiAttention by the table
of its tuning guide, 64 query heads over 8; FlashInfer with 32 over 4, whose plan_ms is the time of plan() on the host's clock.
Block-Sparse-Attention on the shapes of a layer of FlashVSR at 768 x 1408, whatever --tokens and --density: 12 heads, two latent frames of
48 x 88 tokens to themselves and three cached steps in windows of 2 x 8 x 8, of which each head keeps as many as its own pipeline does, at
random among those within 11 x 11 in space. Before any time is taken, the first query block of the last head is checked against float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from arguments import add_rounds, new_parser
from measure import RESULTS, backward_flops, forward_flops, interleaved, print_machine, print_rows, write_rows
from torch import Tensor
from truth import Wrong, check

from ssta.interfaces import BlockSparseAttentionWrapper, block_sparse_attn_func, flex_block_attn_func
from ssta.interfaces.magi import block_sparse_attn

HEAD_DIM = 128
MAGI_BLOCKS = ((1, 64), (8, 64), (16, 64), (64, 64), (128, 128), (384, 384), (128, 1))
FLASHINFER_BLOCKS = (64, 128)
# Rows and columns of windows of 128 tokens, steps that are seen, and kept pairs of windows for each pair of windows of a step: FlashVSR's
# topk_ratio for its recommended sparse_ratio of 2 at 768 x 1408.
FLASHVSR = (6, 11, 4, 2 * 768 * 1280 / (768 * 1408))


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=49_152 if gpu else 384, help="a multiple of 384 (default %(default)s)")
    parser.add_argument("--density", type=float, default=0.1 if gpu else 0.5, help="fraction of the key blocks kept (default %(default)s)")
    add_rounds(parser, 7 if gpu else 1)
    options = parser.parse_args(argv)
    if options.tokens < 384 or options.tokens % 384 or not 0 < options.density <= 1:
        parser.error(f"--tokens must be a multiple of 384 and --density in (0, 1], got {options.tokens} and {options.density}")
    print_machine()
    try:
        rows = measure(options, 8 if gpu else 2, 8 if gpu else 1, device, dtype)
    except Wrong as error:
        raise SystemExit(f"{error}; no time is taken") from None
    print_rows(rows)
    if options.csv:
        write_rows(RESULTS / f"{options.csv}.csv", rows)


def measure(options, group: int, kv_heads: int, device: str, dtype: torch.dtype) -> list[dict]:
    """The rows of every system, of ``group`` query heads over each of MagiAttention's ``kv_heads``."""
    rows = flex_block_attn(options, 2 * kv_heads, device, dtype)
    for blocks in MAGI_BLOCKS:
        rows += magi_attention(options, blocks, kv_heads * group, group, device, dtype)
    rows += flashvsr(options, 12 if device == "cuda" else 1, device, dtype)
    for block in FLASHINFER_BLOCKS:
        rows += flashinfer(options, block, 4 * group, group, device, dtype)
    return rows


def flex_block_attn(options, heads: int, device: str, dtype: torch.dtype) -> list[dict]:
    block, tokens = 384, options.tokens
    q, k, v = torch.randn(3, 1, heads, tokens, HEAD_DIM, device=device, dtype=dtype).unbind()
    kept = choose((heads, tokens // block), tokens // block, options.density, device)
    mask = torch.zeros(1, heads, tokens // block, tokens // block, dtype=torch.bool, device=device).scatter_(-1, kept[None], True)
    attend = partial(flex_block_attn_func, q_block_size=block, kv_block_size=block, block_mask=mask)
    error = check("flex-block-attn", attend(q, k, v)[0, -1, :block], exact(q[0, -1, :block], k[0, -1], v[0, -1], kept[-1, 0], block))
    calls = {("forward", "ssta"): lambda: attend(q, k, v), ("backward", "ssta"): backward_of(attend, q, k, v)}
    return rows_of("flex-block-attn", (block, block), heads * tokens * kept.shape[-1] * block, calls, options.rounds, error)


def magi_attention(options, blocks: tuple[int, int], heads: int, group: int, device: str, dtype: torch.dtype) -> list[dict]:
    (q_block, k_block), tokens, kv_heads = blocks, options.tokens, heads // group
    q = torch.randn(tokens, heads, HEAD_DIM, device=device, dtype=dtype)
    k, v = torch.randn(2, tokens, kv_heads, HEAD_DIM, device=device, dtype=dtype).unbind()
    kept = choose((kv_heads, tokens // q_block), tokens // k_block, options.density, device)
    attend = partial(block_sparse_attn, q_block_size=q_block, k_block_size=k_block, topk_indices=kept)
    error = check(f"MagiAttention {blocks}", attend(q, k, v)[0][:q_block, -1],
                  exact(q[:q_block, -1], k[:, -1], v[:, -1], kept[-1, 0], k_block))
    calls = {("forward", "ssta"): lambda: attend(q, k, v), ("backward", "ssta"): backward_of(lambda *x: attend(*x)[0], q, k, v)}
    return rows_of("MagiAttention", blocks, heads * tokens * kept.shape[-1] * k_block, calls, options.rounds, error)


def flashvsr(options, heads: int, device: str, dtype: torch.dtype) -> list[dict]:
    torch.manual_seed(0)
    block, (high, wide, steps, ratio) = 128, FLASHVSR if device == "cuda" else (2, 3, 2, 1.0)
    windows = high * wide
    q = torch.randn(windows * block, heads, HEAD_DIM, device=device, dtype=dtype)
    k, v = torch.randn(2, steps * windows * block, heads, HEAD_DIM, device=device, dtype=dtype).unbind()
    place = torch.cartesian_prod(torch.arange(high), torch.arange(wide)).to(device)
    near = ((place[:, None] - place).abs() <= 5).all(-1).repeat(1, steps)
    scores = torch.rand(heads, *near.shape, device=device).masked_fill(~near, 0.0)
    mask = scores > scores.flatten(1).topk(int(windows * windows * ratio)).values[:, -1, None, None]
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    attend = partial(block_sparse_attn_func, cu_seqlens_q=ints([0, len(q)]), cu_seqlens_k=ints([0, len(k)]),
                     head_mask_type=ints([1] * heads), streaming_info=None, base_blockmask=mask[None], max_seqlen_q_=len(q),
                     max_seqlen_k_=len(k), p_dropout=0.0)
    error = check("Block-Sparse-Attention", attend(q, k, v)[:block, -1],
                  exact(q[:block, -1], k[:, -1], v[:, -1], mask[-1, 0].nonzero().flatten(), block))
    calls = {("forward", "ssta"): lambda: attend(q, k, v), ("backward", "ssta"): backward_of(attend, q, k, v)}
    return rows_of("Block-Sparse-Attention", (block, block), int(mask.sum()) * block * block, calls, options.rounds, error)


def flashinfer(options, block: int, heads: int, group: int, device: str, dtype: torch.dtype) -> list[dict]:
    tokens, kv_heads = options.tokens, heads // group
    q = torch.randn(tokens, heads, HEAD_DIM, device=device, dtype=dtype)
    k, v = torch.randn(2, tokens, kv_heads, HEAD_DIM, device=device, dtype=dtype).unbind()
    kept = choose((tokens // block,), tokens // block, options.density, device).sort(-1).values
    indptr = torch.arange(0, kept.numel() + 1, kept.shape[-1], dtype=torch.int32, device=device)
    arguments = (indptr, kept.flatten(), tokens, tokens, block, block, heads, kv_heads, HEAD_DIM)
    wrappers = {"ssta": BlockSparseAttentionWrapper}
    try:
        import flashinfer as peer

        wrappers["flashinfer"] = peer.sparse.BlockSparseAttentionWrapper
    except ImportError:
        print("flashinfer is not installed, so ours stands alone")
    truth = exact(q[:block, -1], k[:, -1], v[:, -1], kept[0], block)
    calls, plan_ms, errors = {}, {}, []
    for name, wrapper in wrappers.items():
        planned = wrapper(torch.empty(128 << 20 if name != "ssta" else 0, dtype=torch.uint8, device=device))
        plan = partial(planned.plan, *arguments, q_data_type=dtype, o_data_type=dtype)
        plan()
        plan_ms[name] = min(host_milliseconds(plan) for _ in range(options.rounds))
        errors.append(check(f"FlashInfer's interface by {name}", planned.run(q, k, v)[:block, -1], truth))
        calls["forward", name] = partial(planned.run, q, k, v)
    return rows_of("FlashInfer", (block, block), heads * tokens * kept.shape[-1] * block, calls, options.rounds, max(errors), plan_ms)


def choose(lists: tuple[int, ...], blocks: int, density: float, device: str) -> Tensor:
    """int32 ids ``[*lists, kept]``, for each list its own random choice."""
    torch.manual_seed(0)
    ids = torch.empty(*lists, max(1, round(density * blocks)), dtype=torch.int32, device=device)
    for row in range(0, lists[-1], 4096):  # scores of all lists at once may be gigabytes
        part = ids[..., row:row + 4096, :]
        part.copy_(torch.rand(*part.shape[:-1], blocks, device=device).topk(part.shape[-1], sorted=False).indices)
    return ids


def exact(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, block: int) -> Tensor:
    """float64 attention of rows q ``[n, D]`` to the listed blocks of one head's k and v ``[tokens, D]``."""
    keys = (ids.long()[:, None] * block + torch.arange(block, device=q.device)).flatten()
    scores = q.double() @ k[keys].double().mT * HEAD_DIM**-0.5
    return scores.softmax(-1) @ v[keys].double()


def backward_of(attend: Callable, *inputs: Tensor) -> Callable[[], object]:
    """A call that runs the backward alone, again and again over one saved forward."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def rows_of(system: str, blocks: tuple[int, int], pairs: float, calls: dict, rounds: int, error: float,
            plan_ms: dict[str, float] | None = None) -> list[dict]:
    rows = []
    for (what, provider), times in interleaved(calls, rounds, failed=failed).items():
        flops = (forward_flops if what == "forward" else backward_flops)(pairs, HEAD_DIM)
        rows.append(dict(system=system, q_block=blocks[0], k_block=blocks[1], what=what, provider=provider, **times,
                         tflops=1e-9 * flops / times["median_ms"] if times["median_ms"] else "",
                         plan_ms=plan_ms[provider] if plan_ms else "", error=error))
    return rows


def failed(call: tuple[str, str], note: str) -> None:
    what, provider = call
    if provider == "ssta":
        raise SystemExit(f"{what} failed: {note}")


def host_milliseconds(call: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
