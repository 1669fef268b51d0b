"""Runs every family of kernels once, on small shapes, under compute-sanitizer's memcheck and racecheck, and prints a line for each.

    python tests/tools/sanitize.py [--tool memcheck racecheck] [--family NAME ...] [--workers 8]

Needs an NVIDIA GPU and compute-sanitizer, which comes with CUDA. Exits with 1 if anything was found, and also if the error that is planted
for each tool was not: then the tool does not work here. memcheck sees each tensor as an allocation of its own, so that a step beyond one
shows.

What racecheck says of words that are no data is left out, and counted: the mbarriers, which many threads change on purpose, and the words
through which Triton hands a kernel's arguments to its partitions, which all threads of the first one write alike. Which words these are
is read from the compiled kernels; what Triton itself loads for a kernel bears the line of the kernel's ``def``, which no statement has.
Nor does it follow an mbarrier from a warp that stores to one that loads, so what the functions named in
HANDED_OVER store is left out too; and so is what it says of the kernels of cuBLAS, which are not ours. It sees nothing of what the TMA and
wgmma do in shared memory, nor of stores as matrices (stmatrix: dS, and results on their way out), so for the Hopper kernels it judges what
threads load and store word by word (zeroed values, sizes, what changes its layout); the order of the rest is what
tests/support/hopper_emulator.py tries to break.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssta import SSTAConfig, TokenLayout, ssta_3d_attention, ssta_attention
from ssta.interfaces import attn_pooling, block_sparse_flash_decode_gqa_indice, parallel_nsa, selected_attention
from ssta.interfaces.tokens import block_attention
from ssta.kernels import BlockLists, block_sparse_attention
from ssta.kernels.backend import Where, choose

TOOLS = {"memcheck": ["--tool", "memcheck"], "racecheck": ["--tool", "racecheck", "--racecheck-report", "hazard"]}
OPTIONS = ["--print-limit", "1000000", "--show-backtrace", "no"]
SECONDS = 120
# A report is its first line and the lines below it that stand in deeper: what, and the accesses.
FOUND = re.compile(r"^========= (?:Error: |Warning: )?((?:Invalid|Program hit|Potential|Uninitialized|Address).*)"
                   r"((?:\n=========  +.*)*)", re.M)
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
HAZARD = re.compile(r"hazard detected.* at __shared__ (0x[0-9a-f]+) ")
# Functions that store words which an mbarrier hands to other warps: (file, name).
HANDED_OVER = (("hopper/backward_partitions.py", "store_number"), ("hopper/forward_load.py", "_put"))
# How the names of cuBLAS' kernels begin.
CUBLAS = "nvjet_"
# Where a program's own shared memory begins: CUDA keeps what is before.
RESERVED = 1024
KERNELS = Path(__file__).parent.parent.parent / "kernels"
make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)


def ragged_attention(impl: str, dim: int, lengths: tuple[int, ...] = (128, 150, 0, 33, 256), **options) -> None:
    """Forward and backward over full, partial, short and empty blocks, with grouped heads and keys that no list names."""
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    blocks = BlockLists.from_mask(torch.rand(2, 2, len(lengths), len(lengths), device="cuda") < 0.6, offsets, offsets)
    q = make(2, sum(lengths), 2, dim).transpose(1, 2).requires_grad_()
    k, v = (make(2, 1, sum(lengths), dim).requires_grad_() for _ in range(2))
    out, lse = block_sparse_attention(q, k, v, blocks, return_lse=True, impl=impl, **options)
    (out.float().sum() + lse.clamp(min=-9).sum()).backward()


def offsets_outside(impl: str) -> None:
    """Forward and backward where offsets begin before the tensors and end far behind them."""
    offsets = torch.tensor([-70, 128, 150, 900, 2**31 - 1], device="cuda", dtype=torch.int32)
    blocks = BlockLists.from_mask(torch.ones(4, 4, dtype=torch.bool, device="cuda"), offsets, offsets)
    q, k, v = (make(1, heads, 300, 64).requires_grad_() for heads in (2, 1, 1))
    block_sparse_attention(q, k, v, blocks, impl=impl).float().sum().backward()


def single_keys(attend) -> None:
    q, k, v = make(1, 2, 70, 64), *make(2, 1, 1, 90, 64)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    blocks = BlockLists.from_mask(torch.rand(1, 1, 5, 90, device="cuda") < 0.3, 16, 1)
    with torch.no_grad():
        attend(*leaves, blocks, impl="triton")
    attend(*leaves, blocks, impl="triton").float().sum().backward()


def layer(padding: str) -> None:
    """Tile order, means, scores, choice, attention in the place of q, gaps cleared, and back."""
    tokens, text = 5 * 9 * 11, 70
    q, k, v = (make(2, tokens + text, heads, 64).transpose(1, 2) for heads in (4, 2, 2))
    mask = torch.arange(text, device="cuda") < torch.tensor([[5], [70]], device="cuda")
    for scores in ("similarity", "importance"):
        ssta_3d_attention(q, k, v, (5, 9, 11), topk=3, tile_thw=(4, 6, 6), text_len=text, text_mask=mask, sampling_type=scores,
                          pad_type=padding)
    config = SSTAConfig(tile_thw=(4, 6, 6), kernel_thw=(1, 1, 1), density=0.6, pad_type=padding)
    ssta_attention(q, k, v, TokenLayout.video_text((5, 9, 11), text), config, text_mask=mask)


def estimate(row: str, dim: int, parts: int) -> None:
    """The estimate, keys' statistics known and not, its merge, and the gradients, over partial, short and empty blocks with grouped heads,
    all of which but the last are estimated."""
    lengths = [128, 150, 0, 33, 70]
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, dout = (make(1, sum(lengths), 4, dim).transpose(1, 2) for _ in range(2))
    k, v = (make(1, sum(lengths), 2, dim).transpose(1, 2) for _ in range(2))
    mask = torch.rand(1, 4, 5, 5, device="cuda") < 0.4
    mask[..., 4] = mask[..., 4, :] = True
    lists, blocks, scale = BlockLists.from_mask(mask, offsets, offsets), (offsets, 4, 150), dim**-0.5
    exact, exact_lse = block_sparse_attention(q, k, v, lists, return_lse=True)
    steps = choose(row, Where("cuda", torch.cuda.get_device_capability(), False, torch.bfloat16, dim))
    known = steps.key_statistics(k, v, blocks, parts, True)
    found = steps.estimate(q, k, v, blocks, blocks, scale, parts)
    for estimates in (found, steps.estimate(q, k, v, blocks, blocks, scale, parts, found.useful, known)):
        out, lse = exact.clone(), exact_lse.clone()
        _, *kept = steps.merge(out, lse, q, k, v, blocks, blocks, lists.counts, lists.indices, estimates, scale, True)
    steps.merge_backward(dout, exact, exact_lse, out, lse, kept[0], q, k, v, blocks, blocks, *kept[1:], found.log_count,
                           found.order, found.k_mean, found.v_mean, scale)


def token_lists() -> None:
    q, k, v = (make(1, 50, heads, 64).requires_grad_() for heads in (8, 2, 2))
    selected_attention(q, k, v, torch.randint(-1, 4, (1, 50, 2, 3), device="cuda"), block_size=16).float().sum().backward()


def selection() -> None:
    """Blocks are compressed, weighed and selected, in two sequences."""
    q, k, v = (make(1, 75, heads, 64).requires_grad_() for heads in (8, 2, 2))
    gate, offsets = make(1, 75, 8), torch.tensor([0, 21, 75], device="cuda")
    parallel_nsa(q, k, v, g_cmp=gate, g_slc=gate, block_counts=3, block_size=16, cu_seqlens=offsets).float().sum().backward()


def decode() -> None:
    q, cache = make(2, 8, 64), make(2, 2, 300, 2, 64)
    ids = torch.rand(2, 2, 19, device="cuda").topk(7).indices.int()
    block_sparse_flash_decode_gqa_indice(q, *cache, torch.tensor([290, 37], device="cuda"), 300, 7, ids, 16)


def pooling() -> None:
    attn_pooling(make(60, 4, 64), make(60, 2, 64), torch.tensor([0, 37, 60], device="cuda").int(), 37, 0.1, 16)


def store_beyond() -> None:
    """Into the bytes between a tensor and the next multiple of 512, where no other tensor is."""
    _store_kernel[(1,)](torch.zeros(100, device="cuda", dtype=torch.int32), 100, 16)


@triton.jit
def _store_kernel(out, first, NUMBER: tl.constexpr):
    tl.store(out + first + tl.arange(0, NUMBER), 1)


@gluon.jit
def _fill(buffer, value: gl.constexpr, layout: gl.constexpr):
    buffer.store(gl.full([buffer.shape[0]], value, gl.int32, layout))


@gluon.jit
def _two_stores_kernel(out):
    # Four numbers a thread, which are stored as such: single ones are stored as a matrix, which racecheck 2025.3.1 does not see.
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    buffer = gl.allocate_shared_memory(gl.int32, [512], gl.SwizzledSharedLayout(4, 1, 1, [0]))
    gl.warp_specialize([(_fill, (buffer, 1, layout)), (_fill, (buffer, 2, layout))], [4], [40])
    gl.store(out + gl.arange(0, 512, layout=layout), buffer.load(layout))


def two_stores() -> None:
    """Two partitions store the same words, and nothing says which comes first."""
    _two_stores_kernel[(1,)](torch.zeros(512, device="cuda", dtype=torch.int32), num_warps=4, maxnreg=128)


FAMILIES = {
    "hopper, deterministic dQ": partial(ragged_attention, "hopper", 64),
    "hopper, non-deterministic dQ": partial(ragged_attention, "hopper", 128, deterministic=False),
    "hopper, packed chunks": partial(ragged_attention, "hopper", 128, (64, 40, 0, 17, 64, 33, 5, 50)),
    "hopper, causal": partial(ragged_attention, "hopper", 64, causal=True),
    "triton": partial(ragged_attention, "triton", 64),
    "triton, causal": partial(ragged_attention, "triton", 64, causal=True),
    "hopper, offsets outside": partial(offsets_outside, "hopper"),
    "triton, offsets outside": partial(offsets_outside, "triton"),
    "single keys, gathered and compacted": partial(single_keys, lambda *given, **options: block_attention(*given, **options)[0]),
    "single keys, as tiles": partial(single_keys, block_sparse_attention),
    "layer, partial tiles": partial(layer, "none"),
    "layer, zero tokens": partial(layer, "zero"),
    "estimate, hopper": partial(estimate, "hopper", 128, 1),
    "estimate, hopper, halves": partial(estimate, "hopper", 128, 2),
    "estimate, triton, halves": partial(estimate, "triton", 64, 2),
    "token lists": token_lists,
    "selection": selection,
    "decode": decode,
    "pooling": pooling,
}
# For each tool, what it must find in what.
PLANTED = {
    "memcheck": ("planted: a store beyond a tensor", store_beyond, "Invalid __global__ write"),
    "racecheck": ("planted: two stores in no order", two_stores, "Potential WAW hazard"),
}


def run(family: str) -> None:
    torch.manual_seed(0)
    (FAMILIES | {name: function for name, function, _ in PLANTED.values()})[family]()
    torch.cuda.synchronize()


def words_without_data(ptx: str) -> set[int]:
    """Offsets in shared memory, in bytes, of the words of a kernel's mbarriers and of those that are stored to at a fixed address."""
    known: dict[str, int] = {}
    words: set[int] = set()

    def offset(address: str) -> int | None:
        base, _, more = address.partition("+")
        start = 0 if base == "global_smem" else known.get(base)
        return None if start is None else start + int(more or 0)

    for line in ptx.splitlines():
        if found := re.search(r"mov\.b32\s+(%r\d+), (global_smem(?:\+\d+)?);", line):
            known[found[1]] = offset(found[2])
        elif (found := re.search(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", line)) and found[2] in known:
            known[found[1]] = known[found[2]] + int(found[3])
        elif found := re.search(r"(mbarrier\.init\.shared\S*|st\.shared\S*)\s+\[([^\]]+)\]", line):
            start = offset(found[2])
            if start is not None:
                size = re.search(r"(?:\.v(\d))?\.b(\d+)$", found[1])
                size = int(size[1] or 1) * int(size[2]) // 8
                words |= set(range(start // 4 * 4, start + size, 4))
    return words


def report(tool: str, family: str, cache: Path) -> bool:
    """Prints what ``tool`` says of ``family``; whether it is what it should be. ``cache`` is where Triton keeps what it compiles."""
    command = ["compute-sanitizer", *TOOLS[tool], *OPTIONS, sys.executable, __file__, "--run", family]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_CACHE_DIR": str(cache)}
    try:
        said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{tool}: {family}: not done after {SECONDS} s", flush=True)
        return False
    text = said.stdout + said.stderr
    without_data: dict[str, set[int]] = {}
    for path in cache.rglob("*.ptx"):
        # A kernel may be compiled more than once: what holds no data in all of its forms.
        words = words_without_data(path.read_text())
        without_data[path.stem] = without_data.get(path.stem, words) & words
    errors, left_out = judge(text, without_data)
    if not SUMMARY.search(text):
        fine, verdict = False, f"did not run: {(text.strip().splitlines() or [''])[-1][:150]}"
    elif family == PLANTED[tool][0]:
        found = [error for error in errors if PLANTED[tool][2] in error]
        fine = bool(found)
        verdict = f"found, {len(found)}: {found[0][:100]}" if fine else f"NOT found: {tool} does not work here; {errors[:1]}"
    else:
        fine = not errors and said.returncode == 0
        first = "".join(f"\n    {error}" for error in list(dict.fromkeys(errors))[:4])
        verdict = "clean" if fine else f"{len(errors)} errors, exit {said.returncode}{first}"
    print(f"{tool}: {family}: {verdict}" + (f" ({left_out} reports of words without data)" if left_out else ""), flush=True)
    return fine


def handed_over() -> set[str]:
    """"file:line", as the tools print it, of the statements of the functions in HANDED_OVER."""
    lines = set()
    for name, function in HANDED_OVER:
        path = KERNELS / name
        found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name == function]
        statements = [x for node in found for x in node.body if not isinstance(getattr(x, "value", None), ast.Constant)]
        assert statements, f"no function {function} in {name}"
        lines |= {f"{path.name}:{number}" for statement in statements for number in range(statement.lineno, statement.end_lineno + 1)}
    return lines


def of_triton() -> set[str]:
    """"file:line" of the ``def`` of every Hopper kernel: where partitions wait for what the first one tells them, byte by byte."""
    return {f"{path.name}:{node.lineno}" for path in (KERNELS / "hopper").glob("*.py") for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and re.fullmatch("_.*_kernel", node.name)}


def judge(text: str, without_data: dict[str, set[int]]) -> tuple[list[str], int]:
    """What a tool found, one line each, and how many hazards on words ``without_data`` (kernel -> offsets), or on words that an mbarrier
    or Triton hands over, or inside cuBLAS' kernels, are not among them."""
    errors, left_out, handed, by_triton = [], 0, handed_over(), of_triton()
    for what, lines in FOUND.findall(text):
        accesses = re.findall(r"=========  +(\S.*)", lines)
        hazard, kernel = HAZARD.search(what), re.search(r" at (\w+)", lines)
        by_barrier = any((at := access.rsplit(" in ")[-1].strip()) in by_triton or access.startswith("Write") and at in handed
                         for access in accesses)
        by_cublas = kernel is not None and kernel[1].startswith(CUBLAS)
        if hazard and (by_barrier or by_cublas or kernel and (int(hazard[1], 16) - RESERVED) // 4 * 4 in without_data.get(kernel[1], ())):
            left_out += 1
        else:
            errors.append("; ".join([what, *(access for access in accesses if re.search(r"\bat\b", access))]))
    return errors, left_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME", help=", ".join(FAMILIES))
    parser.add_argument("--workers", type=int, default=8, help="processes at a time (default 8)")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(options.run)
        return 0
    if not shutil.which("compute-sanitizer"):
        parser.error("compute-sanitizer must be on the PATH; it comes with CUDA")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        works = [*((tool, PLANTED[tool][0]) for tool in options.tool), *product(options.tool, options.family)]
        fine = list(pool.map(lambda work: report(*work, Path(folder, *work)), works))
    return int(not all(fine))


if __name__ == "__main__":
    sys.exit(main())
