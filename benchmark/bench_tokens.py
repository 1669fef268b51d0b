"""How fast is attention by lists of single tokens? Native sparse attention, SeerAttention's prefill, pooling and decoding.

    python benchmark/bench_tokens.py [--tokens 65536] [--rounds 7] [--csv NAME]

Prefill: 64 query heads on 4 key/value heads, head_dim 128, blocks of 64, 16 of them for every token: the first, its own and random ones.
The compressed branch of native sparse attention attends to the means of the blocks, and the selection chooses 16 of them.
Decoding: batch 16, 32 query heads on 8, a cache of half as many tokens, every tenth block; its rate is that of the selected keys and values
read once, beside a copy of as many bytes. fla's parallel_nsa is measured beside ours where it is installed. Before any time is taken,
sampled tokens of every output are checked against float64.
"""

from __future__ import annotations

import importlib.util
import math

import torch
from arguments import add_rounds, new_parser
from measure import NO_TIMES, RESULTS, backward_flops, forward_flops, interleaved, peak_extra_mib, print_machine, print_rows, write_rows
from truth import Wrong, check

from ssta.interfaces import (
    attn_pooling,
    block_1d_gqa_sparse_attn_varlen_func,
    parallel_nsa_compression,
    parallel_nsa_topk,
    selected_attention,
)
from ssta.interfaces import block_sparse_flash_decode_gqa_indice as decode_by_indices
from ssta.interfaces import block_sparse_flash_decode_gqa_mask as decode_by_mask

BLOCK, SELECTED, SAMPLES = 64, 16, 8


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=65536 if gpu else 512, help="of the prefill, a multiple of 128 (default %(default)s)")
    add_rounds(parser, 7 if gpu else 3)
    options = parser.parse_args(argv)
    if options.tokens < 1 or options.tokens % 128:
        parser.error(f"--tokens must be a positive multiple of 128, got {options.tokens}")
    heads, kv_heads, dim = (64, 4, 128) if gpu else (16, 1, 64)
    print_machine()
    torch.manual_seed(0)
    try:
        rows = measure(prefill(options.tokens, heads, kv_heads, dim, device, dtype), options.rounds)
        rows += measure(choosing(options.tokens, heads, kv_heads, dim, device, dtype), options.rounds)
        rows += measure(decoding(16, options.tokens // 2, 8 * kv_heads, 2 * kv_heads, dim, device, dtype), options.rounds)
    except Wrong as error:
        raise SystemExit(f"{error}; no time is printed") from None
    print_rows(rows)
    if options.csv:
        write_rows(RESULTS / f"{options.csv}.csv", rows)


def measure(calls: dict[str, tuple], rounds: int) -> list[dict]:
    """Rows of calls name -> (call, unit of its rate, amount): amount floating-point operations, or bytes."""
    memory = {}
    for name, (call, _, _) in calls.items():
        call()
        memory[name] = peak_extra_mib(call)
    times = interleaved({name: call for name, (call, _, _) in calls.items()}, rounds)
    return [dict(what=name, **{column: times[name][column] for column in NO_TIMES}, rate=_rate(amount, times[name]["median_ms"]), unit=unit,
                 extra_mib=memory[name], note=times[name]["note"]) for name, (_, unit, amount) in calls.items()]


def _rate(amount: float, ms: float | str) -> float | str:
    return "" if ms == "" else 1e-9 * amount / ms


def prefill(tokens: int, heads: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> dict[str, tuple]:
    """The calls of one prefill of ``tokens`` tokens, checked."""
    q = torch.randn(1, tokens, heads, dim, device=device, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, tokens, kv_heads, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    own = torch.arange(tokens, device=device) // BLOCK
    scores = torch.rand(tokens, kv_heads, tokens // BLOCK, device=device)
    scores = scores.masked_fill(torch.arange(tokens // BLOCK, device=device) > own[:, None, None], -1.0)
    scores[..., 0] = 2.0
    scores.scatter_(-1, own[:, None, None].expand(-1, kv_heads, 1), 2.0)
    best = scores.topk(min(SELECTED, tokens // BLOCK))
    ids = best.indices.masked_fill(best.values < 0, -1).int()
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ids.clamp(min=0).long(), True).transpose(0, 1)[None].contiguous()
    del scores
    # The keys that each token really sees: its own block up to itself.
    pairs = heads / kv_heads * float(((ids >= 0).sum() - tokens * kv_heads) * BLOCK
                                     + kv_heads * (torch.arange(tokens, device=device) % BLOCK + 1).sum())
    cu, scale = torch.tensor([0, tokens], dtype=torch.int32, device=device), dim ** -0.5

    def selected():
        return selected_attention(q, k, v, ids[None], block_size=BLOCK)

    def one_dimensional():
        return block_1d_gqa_sparse_attn_varlen_func(q[0], k[0], v[0], cu, cu, tokens, scale, mask, BLOCK)

    forwards = {"selected blocks": selected, "seer 1-D": one_dimensional}
    if device.type == "cuda" and importlib.util.find_spec("fla"):
        from fla.ops.nsa.parallel import parallel_nsa

        gate = torch.ones(1, tokens, heads, device=device, dtype=dtype)
        padded = ids[None].where(ids[None] >= 0, tokens).long()
        forwards["selected blocks, fla"] = lambda: parallel_nsa(q, k, v, g_slc=gate, block_indices=padded, block_counts=SELECTED,
                                                                block_size=BLOCK, scale=scale)
    calls = {}
    for name, forward in forwards.items():
        out = forward().view(tokens, heads, dim)
        for token in torch.linspace(0, tokens - 1, SAMPLES).long().tolist():
            check(f"{name}, token {token},", out[token].detach(), _exact_token(q[0], k[0], v[0], ids[token], token), 4)
        dout = torch.randn_like(out)
        calls[f"{name}, forward"] = (_without_graph(forward), "TFLOP/s", forward_flops(pairs, dim))
        calls[f"{name}, backward"] = (_backward(out, (q, k, v), dout), "TFLOP/s", backward_flops(pairs, dim))
    some = tokens // 2
    calls[f"pooling of {some} tokens"] = (lambda: attn_pooling(q[0, :some], k[0, :some], cu // 2, some, scale, BLOCK), "TFLOP/s",
                                          forward_flops(heads * some * (some + 1) / 2, dim))
    return calls


def choosing(tokens: int, heads: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> dict[str, tuple]:
    """The calls of the compressed branch and of the selection by it, forward, checked."""
    q = torch.randn(1, tokens, heads, dim, device=device, dtype=dtype)
    k, v = (torch.randn(1, tokens // BLOCK, kv_heads, dim, device=device, dtype=dtype) for _ in range(2))
    functions = {"": (parallel_nsa_compression, parallel_nsa_topk)}
    if device.type == "cuda" and importlib.util.find_spec("fla"):
        from fla.ops.nsa import compression, parallel

        functions[", fla"] = (compression.parallel_nsa_compression, parallel.parallel_nsa_topk)
    pairs = heads * float(((torch.arange(tokens) + 1) // BLOCK).sum())
    calls = {}
    for suffix, (compress, choose) in functions.items():
        out, lse = compress(q, k, v, tokens, BLOCK)
        ids = choose(q, k, tokens, lse, SELECTED, BLOCK, dim ** -0.5)
        for token in torch.linspace(BLOCK, tokens - 1, SAMPLES).long().tolist():
            over, own = (token + 1) // BLOCK, token // BLOCK
            scores = torch.einsum("hgd,nhd->hgn", q[0, token].double().unflatten(0, (kv_heads, -1)), k[0, :over].double()) * dim ** -0.5
            weights = scores.softmax(-1)
            exact = torch.einsum("hgn,nhd->hgd", weights, v[0, :over].double()).flatten(0, 1)
            check(f"compressed branch{suffix}, token {token},", out[0, token], exact, 4)
            # Blocks of nearly one importance may change places, so it is the importance that is compared, of all but the three that every
            # token takes.
            importance = torch.nn.functional.pad(weights.sum(1), (0, own + 1 - over))
            importance[:, [0, max(own - 1, 0), own]] = 0.0
            free = min(SELECTED - 3, own - 2)
            if free > 0:
                chosen = importance.gather(1, ids[0, token].long().clamp(min=0)).sort(-1, descending=True).values[:, :free]
                check(f"selection{suffix}, token {token},", chosen.to(dtype), importance.topk(free).values, 4)
        calls[f"compressed branch{suffix}, forward"] = (lambda f=compress: f(q, k, v, tokens, BLOCK), "TFLOP/s", forward_flops(pairs, dim))
        calls[f"selection{suffix}"] = (lambda f=choose, x=lse: f(q, k, tokens, x, SELECTED, BLOCK, dim ** -0.5), "TFLOP/s",
                                       forward_flops(pairs, dim) / 2)
    return calls


def decoding(batch: int, capacity: int, heads: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> dict[str, tuple]:
    """The calls of one decoding step and of a copy, checked."""
    q = torch.randn(batch, heads, dim, device=device, dtype=dtype)
    k, v = (torch.randn(batch, capacity, kv_heads, dim, device=device, dtype=dtype) for _ in range(2))
    blocks = math.ceil(capacity / BLOCK)
    kept = max(1, blocks // 10)
    ids = torch.rand(batch, kv_heads, blocks, device=device).topk(kept).indices.int()
    mask = torch.zeros(batch, kv_heads, blocks, dtype=torch.bool, device=device).scatter_(-1, ids.long(), True)
    lengths = torch.full((batch,), capacity, dtype=torch.int32, device=device)
    amount = 2.0 * batch * kv_heads * kept * BLOCK * dim * k.element_size()
    decoders = {"decoding by indices": lambda: decode_by_indices(q, k, v, lengths, capacity, kept, ids, BLOCK),
                "decoding by mask": lambda: decode_by_mask(q, k, v, lengths, capacity, mask, BLOCK)}
    for name, call in decoders.items():
        out = call()
        for b in (0, batch - 1):
            check(f"{name}, sequence {b},", out[b], _exact_token(q, k[b], v[b], ids[b], b, capacity), 4)
    source = torch.empty(int(amount) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {**{name: (call, "TB/s", amount) for name, call in decoders.items()}, "copy": (lambda: target.copy_(source), "TB/s", amount)}


def _exact_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor, row: int, seen: int | None = None) -> torch.Tensor:
    """float64 out [Hq, D] of row ``row`` of q [T, Hq, D] that lists ids [Hkv, S]; it sees ``seen`` keys, or those up to its own."""
    parts = []
    for head, group in enumerate(q[row].detach().double().chunk(k.shape[1])):
        keys = torch.cat([torch.arange(i * BLOCK, (i + 1) * BLOCK) for i in ids[head].tolist() if i >= 0])
        keys = keys[keys < (row + 1 if seen is None else seen)].to(k.device)
        weights = torch.softmax(group @ k[keys, head].detach().double().mT * q.shape[-1] ** -0.5, -1)
        parts.append(weights @ v[keys, head].detach().double())
    return torch.cat(parts)


def _without_graph(call):
    def run():
        with torch.no_grad():
            return call()
    return run


def _backward(out, leaves, dout):
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


if __name__ == "__main__":
    main()
