"""Compiles what the package launches for GPUs of several kinds, without one, and prints a line of what the compiler says of each kernel.

    python tests/tools/compile_kernels.py [--all] [--jobs N] [WORD ...]

Too much shared or tensor memory, registers reloaded in a loop over chunks, many bytes spilled elsewhere, a serialised wgmma (C751x),
registers that are not reassigned (C7507), one copy of a tile where it should be loaded ahead, or barriers that are set up and never used
makes it exit with 1: such a kernel would not start, be slow, or now and then read what is not there. Words in the labels choose
cases. The usual ones are one for each way through a kernel and kind of GPU, with ptxas asked on one of the kinds that multiply alike;
--all adds what should tell nothing new.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

import torch
import triton
from pretend import CARDS, TENSOR_MEMORY, Card, Compiled, Compiler

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Of the Hopper kernels, bytes: what one may set aside for the end of a tile, when results are stored, while the loop over the chunks has
# all registers.
SPILLS = 2304
# Words that the backward's loop at head_dim 128, of some 330 instructions, may reload. Triton 3.9 reloads more of it in float16, which will
# cost time.
RELOADS = 18
# A forward of three warpgroups, in the second walk's loops. From Triton 3.8 on one of them reloads more in the loop over partial chunks,
# and up to six words in the one over full chunks.
RELOADS_OF_THREE = 60 if VERSION >= (3, 8) else 4
# One under a causal mask, in the loop of some 2,200 instructions over partial chunks, of which there are few.
RELOADS_OF_CAUSAL_FORWARD = 16
RELOADS_OF_FP16 = 60 if VERSION >= (3, 9) else RELOADS
# Under a causal mask they also keep the places of a chunk's queries through the loop, which only the few partial iterations need.
RELOADS_OF_CAUSAL = {64: 1, 128: 48} if VERSION in ((3, 7), (3, 9)) else {64: 0, 128: RELOADS}


class Allowed(NamedTuple):
    """What is no harm. None: no matter."""

    first: int | None = None     # words reloaded or spilled in the first loop, which is the one over full chunks
    reloads: int | None = None   # words reloaded in any loop
    spilled: int | None = None   # bytes of code that spills and reloads, anywhere
    copies: int = 1              # of the tiles that the first loop streams, at least


class Case(NamedTuple):
    """A call whose kernels are compiled."""

    cards: tuple[int | str, ...]
    call: Callable[[], None]
    kernels: str                 # of what is launched those whose module and name this regular expression finds
    allowed: Allowed
    assembled: bool = True       # whether ptxas is asked; without, only memory and copies are looked at, in a third of the time
    usual: tuple[int | str, ...] | None = None   # the cards that are not for --all alone; None: every one
    asked: tuple[int, ...] | None = None   # of the usual cards those on which ptxas is asked; None: every one
    processors: int | None = None
    programs: int = 1            # that share a multiprocessor, and what shared memory it has


def attend(dim: int, dtype: torch.dtype, q_block: int, kv_block: int, causal: bool, backward: bool = True, hopper: bool = False,
           ragged: bool = False, deterministic: bool = True) -> None:
    from ssta.kernels import BlockLists
    from ssta.kernels.hopper.backward import hopper_backward
    from ssta.kernels.hopper.forward import hopper_forward
    from ssta.kernels.portable.backward import triton_backward
    from ssta.kernels.portable.forward import triton_forward

    offsets = [torch.tensor([0, size, 2 * size - 3, 3 * size - 3], dtype=torch.int32) if ragged else size for size in (q_block, kv_block)]
    blocks = BlockLists.from_mask(torch.ones(1, 2, 3, 3, dtype=torch.bool), *offsets)
    q, dout = (torch.zeros(1, 3 * q_block, 2, dim, dtype=dtype).transpose(1, 2) for _ in range(2))
    k, v = (torch.zeros(1, 3 * kv_block, 2, dim, dtype=dtype).transpose(1, 2) for _ in range(2))
    forward, differentiate = (hopper_forward, hopper_backward) if hopper else (triton_forward, triton_backward)
    if not backward:
        forward(q, k, v, blocks, 1.0, causal)
        return
    given = dout, None, q, k, v, q, torch.zeros(1, 2, q.shape[2]), blocks, 1.0, causal
    differentiate(*given, *([deterministic] if hopper else []))


def gather(dim: int, limited: bool) -> None:
    from ssta.interfaces.tokens.triton.gathered import gathered_forward
    from ssta.kernels import BlockLists

    blocks = BlockLists.from_mask(torch.ones(1, 2, 2, 48, dtype=torch.bool), 128, 1)
    q = torch.zeros(1, 2, 256, dim, dtype=torch.bfloat16)
    k, v = (torch.zeros(1, 2, 48, dim, dtype=torch.bfloat16) for _ in range(2))
    masks = (torch.ones(192, 128, 1, dtype=torch.bool), torch.arange(0, 192, 48).int().view(1, 2, 2)) if limited else (None, None)
    gathered_forward(q, k, v, blocks, 1.0, 0.0, *masks, None, None, 1)


def attend_to_tokens(dim: int, group: int, block: int) -> None:
    from ssta.interfaces.tokens.lists import Packed, lists_from_ids
    from ssta.interfaces.tokens.triton.backward import triton_token_backward
    from ssta.interfaces.tokens.triton.forward import triton_token_forward

    q, k = (torch.zeros(256, heads, dim, dtype=torch.bfloat16) for heads in (2 * group, 2))
    offsets = torch.tensor([0, 256], dtype=torch.int32)
    packed = Packed(offsets, offsets, 256, 256)
    ids = torch.zeros(256, 2, 8, dtype=torch.int32)
    tiled, plain = (lists_from_ids(ids, None, packed, packed.spans(), block, impl) for impl in ("triton", "torch"))
    triton_token_forward(q, k, k, tiled, 1.0)
    triton_token_backward(q, None, q, k, k, q, torch.zeros(256, 2 * group), tiled, plain.invert(), 1.0)


def list_and_pool(dim: int) -> None:
    """Lists from masks and their inverse, and what is asked of probabilities."""
    from ssta.interfaces.tokens.lists import Packed, lists_from_mask
    from ssta.interfaces.tokens.triton.lists import row_lists
    from ssta.interfaces.tokens.triton.probabilities import importance, triton_pooling

    offsets, places = torch.tensor([0, 256], dtype=torch.int32), torch.zeros(256, dtype=torch.int64)
    packed = Packed(offsets, offsets, 256, 256)
    lists_from_mask(torch.ones(1, 2, 256, 4, dtype=torch.bool), packed, packed.spans(), 64, "triton").invert()
    row_lists(torch.ones(4, 2, 300, dtype=torch.bool))
    q, k = (torch.zeros(256, heads, dim, dtype=torch.bfloat16) for heads in (4, 2))
    triton_pooling(q, k, 1.0, 64, torch.zeros(4, 4, 4))
    importance(q, k, torch.zeros(256, 4), places, places, 1.0)


def estimate(dim: int, dtype: torch.dtype, parts: int, hopper: bool = False) -> None:
    """What stands in for blocks that no list names, and its gradients."""
    from ssta.kernels import BlockLists
    from ssta.kernels.backend import choose
    from ssta.kernels.portable import estimate as portable
    from ssta.kernels.routing import Where

    # All heads at once: one by one they would be compiled again, with other alignments.
    portable.BUDGET = 1e9
    lists = BlockLists.from_mask(torch.eye(3, dtype=torch.bool)[None, None].expand(1, 2, 3, 3), 128, 128)
    q, k, v, out = (torch.zeros(1, 384, 2, dim, dtype=dtype).transpose(1, 2) for _ in range(4))
    blocks, lse = (torch.arange(0, 512, 128, dtype=torch.int32), 3, 128), torch.zeros(1, 2, 384)
    steps = choose("auto", Where("cuda", (9, 0) if hopper else (8, 0), False, dtype, dim))
    found = steps.estimate(q, k, v, blocks, blocks, 1.0, parts)
    _, estimate_lse, bias, mixture = steps.merge(out, lse, q, k, v, blocks, blocks, lists.counts, lists.indices, found, 1.0, True)
    steps.merge_backward(q, out, lse, out, lse, estimate_lse, q, k, v, blocks, blocks, bias, mixture, found.log_count, found.order,
                         found.k_mean, found.v_mean, 1.0)


def hold(dim: int, dtype: torch.dtype) -> None:
    """What a cache holds of blocks, and the estimate of it."""
    from ssta.kernels import BlockLists
    from ssta.kernels.backend import choose
    from ssta.kernels.routing import Where

    lists = BlockLists.from_mask(torch.eye(3, dtype=torch.bool)[None, None].expand(1, 2, 3, 3), 128, 128)
    q, k, v, out = (torch.zeros(1, 384, 2, dim, dtype=dtype).transpose(1, 2) for _ in range(4))
    blocks, lse = (torch.arange(0, 512, 128, dtype=torch.int32), 3, 128), torch.zeros(1, 2, 384)
    steps = choose("auto", Where("cuda", (8, 0), False, dtype, dim))
    room, place = steps.room_for_statistics(k, 3, 1), torch.zeros(1, dtype=torch.int64)
    steps.write_statistics(steps.key_statistics(k, v, blocks, 1, True), room, place.expand(3).contiguous())
    steps.write_ring((k,), *[place.expand(128).contiguous()] * 2, place, 128, 256)
    found = steps.estimate(q, k, v, blocks, blocks, 1.0, 1, None, room)
    steps.merge(out, lse, q, k, v, blocks, blocks, lists.counts, lists.indices, found, 1.0, False)


AMD = ("gfx942", "gfx950")
FORWARD, BACKWARD = r"portable\.forward\._forward_", r"portable\.backward\._d(q|kv)_"
GATHERED, TOKENS = r"tokens\.triton\.gathered\._", r"tokens\.triton\.(forward|backward)\._(forward|dq|dkv)_"
LISTED = r"tokens\.triton\.(lists|probabilities)\._"
ESTIMATE, HOPPER_ESTIMATE, HELD = r"portable\.estimate_", r"hopper\.estimate_", r"portable\.(coded|held)"
HOPPER_FORWARD, HOPPER_BACKWARD = r"hopper\.forward\.", r"hopper\.backward\."


def cases() -> dict[str, Case]:
    """Label, less its card -> case; where kernels come twice, the first is what counts."""
    return portable_cases() | estimate_cases() | held_cases() | hopper_cases() | amd_cases()


def portable_cases() -> dict[str, Case]:
    found = {}
    every = tuple(card for card in CARDS if not CARDS[card].amd)
    # Memory is looked at on every card but one of the two that have alike of it; of those that multiply alike, by mma, one a head_dim is
    # enough to see its registers.
    asked = {64: (89,), 128: (80, 90, 100), 256: (100, 120)}
    looked_at = {64: (80, 89, 90, 100), 128: (80, 89, 90, 100), 256: (80, 90, 100, 120)}
    for dim, causal, backward in product((64, 128, 256), (False, True), (False, True)):
        # Each kind of card that has no kernels of its own meets the mask in both directions.
        masked = {64: (100,), 128: (120, 80), 256: (89,)}[dim] if not backward else {64: (), 128: (80, 100), 256: (120,)}[dim]
        # Fewer registers are left under a causal mask, at head_dim 64 on 4 warps.
        allowed = Allowed(first=24 if causal else 16, copies=2)
        found[f"portable {'backward' if backward else 'forward'} D={dim} bf16{' causal' * causal}"] = Case(
            every, partial(attend, dim, torch.bfloat16, 384, 384, causal, backward), BACKWARD if backward else FORWARD, allowed,
            assembled=not (causal and backward), usual=masked if causal else looked_at[dim], asked=masked[:1] if causal else asked[dim])
    # The same products, but the forward follows the rows' maxima.
    for dim, backward in product((64, 128, 256), (False, True)):
        found[f"portable {'backward' if backward else 'forward'} D={dim} fp16"] = Case(
            every, partial(attend, dim, torch.float16, 384, 384, False, backward), BACKWARD if backward else FORWARD,
            Allowed(first=16, copies=2), usual=() if backward or dim != 128 else (89,))
    for (rows, keys), dim, causal in product(((512, 64), (64, 64), (32, 64), (16, 64), (16, 16), (96, 96)), (64, 128, 256), (False, True)):
        for kernels, backward in ((FORWARD, False), (BACKWARD, True)):
            found[f"portable {'backward' if backward else 'forward'} {rows}x{keys} D={dim} bf16{' causal' * causal}"] = Case(
                every, partial(attend, dim, torch.bfloat16, rows, keys, causal, backward), kernels, Allowed(), assembled=False,
                usual=(90, 100) if rows == 512 and dim == 128 and backward and causal else ())
    for dim, limited in product((64, 128, 256), (False, True)):
        found[f"portable gathered D={dim} bf16{' limited' * limited}"] = Case(
            every, partial(gather, dim, limited), GATHERED, Allowed() if limited else Allowed(first=16, copies=2),
            usual={64: (), 128: (80, 120), 256: (89,)}[dim], asked=(120,))
    for dim in (64, 128, 256):
        found[f"portable lists D={dim} bf16"] = Case(
            every, partial(list_and_pool, dim), LISTED, Allowed(), usual=(90,) if dim == 128 else ())
    for dim, group in product((64, 128, 256), (16, 128)):
        found[f"portable tokens D={dim} bf16 group={group}"] = Case(
            every, partial(attend_to_tokens, dim, group, 64), TOKENS, Allowed(first=24),
            usual={64: (), 128: (80, 90, 120), 256: (89,)}[dim] if group == 16 else (), asked=(90, 120))
    return found


def estimate_cases() -> dict[str, Case]:
    found = {}
    usual = {("bf16", 128, 2): (90, 120), ("bf16", 64, 2): (90,), ("fp16", 64, 1): (80,), ("bf16", 256, 2): (120,)}
    for (name, dim), parts in product((("bf16", 128), ("bf16", 64), ("fp16", 64), ("bf16", 256), ("fp32", 64), ("bf16", 80)), (2, 1)):
        # Bytes a thread, outside of loops: on an H200 few warps, whose registers hardly do at some head_dims, are faster than more of them.
        # Float32 and head_dims above 128 are there to be right. At 256 the matrix of the order alone takes all registers.
        found[f"estimate D={dim} {name}{' halves' * (parts > 1)}"] = Case(
            (80, 90, 120), partial(estimate, dim, DTYPES[name], parts), ESTIMATE if dim <= 128 else ESTIMATE + "(?!order)",
            Allowed(spilled=160), assembled=name != "fp32" and dim <= 128, usual=usual.get((name, dim, parts), ()), asked=(80, 90))
    return found


def held_cases() -> dict[str, Case]:
    return {f"held D={dim} {name}": Case((80, 90, 120), partial(hold, dim, DTYPES[name]), HELD, Allowed(spilled=160),
                                         usual=(90,) if dim == 128 else (), asked=(80, 90))
            for name, dim in (("bf16", 128), ("fp16", 64))}


def hopper_cases() -> dict[str, Case]:
    found = {}
    for dim, rows, keys, (name, causal) in product((64, 128), (384, 128, 64), (384, 64), product(("bf16", "fp16"), (False, True))):
        # Every size of rows and of keys, both dtypes, and the mask; under it rows of 128 have the kernel of 384.
        usual = (dim, rows, keys, name, causal) in {
            (64, 384, 384, "bf16", False), (128, 384, 384, "bf16", False), (128, 384, 384, "fp16", False), (128, 384, 64, "bf16", True),
            (128, 128, 384, "bf16", False), (128, 64, 64, "bf16", False)}
        # Chunks are packed where such blocks may be partial.
        ragged = rows == 64
        if rows == 64 and (causal or keys == 384):
            # Compiled as for 128 rows, and for 64 keys.
            continue
        found[f"hopper forward {rows}x{keys} D={dim} {name}{' ragged' * ragged}{' causal' * causal}"] = Case(
            (90,), partial(attend, dim, DTYPES[name], rows, keys, causal, False, True, ragged), HOPPER_FORWARD,
            Allowed(reloads=RELOADS_OF_CAUSAL_FORWARD if causal else RELOADS_OF_THREE, spilled=SPILLS), usual=None if usual else (),
            processors=1, programs=(3 if dim == 64 else 2) if rows == 64 and not causal else 1)
    # Full chunks that leave some columns of a step empty.
    for block, ragged, dim, name in (
            (120, False, 128, "bf16"), (126, True, 128, "bf16"), (60, True, 64, "bf16"), (360, False, 128, "fp16")):
        found[f"hopper forward {block}x{block} D={dim} {name}{' ragged' * ragged}"] = Case(
            (90,), partial(attend, dim, DTYPES[name], block, block, False, False, True, ragged), HOPPER_FORWARD,
            Allowed(reloads=RELOADS_OF_THREE, spilled=SPILLS), usual=None if block == 126 else (), processors=1,
            programs=(3 if dim == 64 else 2) if block <= 64 else 1)
    for dim, name, deterministic, ragged, causal in product((64, 128), ("bf16", "fp16"), (True, False), (False, True), (False, True)):
        allowed = RELOADS_OF_CAUSAL[dim] if causal else (RELOADS_OF_FP16 if name == "fp16" else RELOADS) * (dim == 128)
        # The dtype, the order of adds, and where tiles end do not interact.
        usual = not (ragged and causal) if dim == 128 else ragged == causal
        if name == "fp16" or not deterministic:
            # The same code in float16.
            usual = dim == 128 and name == "bf16" and not ragged and not causal
        found[f"hopper backward D={dim} {name}{'' if deterministic else ' any order'}{' ragged' * ragged}{' causal' * causal}"] = Case(
            (90,), partial(attend, dim, DTYPES[name], 384, 384, causal, True, True, ragged, deterministic), HOPPER_BACKWARD,
            Allowed(reloads=allowed, spilled=SPILLS), usual=None if usual else ())
    for dim in (64, 128):
        found[f"hopper estimate D={dim} bf16"] = Case(
            (90,), partial(estimate, dim, torch.bfloat16, 1, True), HOPPER_ESTIMATE, Allowed(reloads=0, spilled=SPILLS))
    return found


def amd_cases() -> dict[str, Case]:
    """They compile for cards that nobody here has, and fit; their registers nobody has looked at."""
    found = {}
    for dim, backward in product((64, 128, 256), (False, True)):
        found[f"amd {'backward' if backward else 'forward'} D={dim} bf16"] = Case(
            AMD, partial(attend, dim, torch.bfloat16, 384, 384, False, backward), BACKWARD if backward else FORWARD, Allowed(),
            usual={64: ("gfx950",), 128: ("gfx942",), 256: ()}[dim])
        if not backward:
            found[f"amd gathered D={dim} bf16"] = Case(AMD, partial(gather, dim, False), GATHERED, Allowed(), usual=())
            found[f"amd tokens D={dim} bf16"] = Case(AMD, partial(attend_to_tokens, dim, 16, 64), TOKENS, Allowed(), usual=())
            found[f"amd estimate D={dim} bf16"] = Case(AMD, partial(estimate, dim, torch.bfloat16, 2), ESTIMATE, Allowed(), usual=())
    return found


def chosen(label: str, words: list[str]) -> bool:
    """Whether all of ``words`` stand in a label, of words such as sm_80|sm_89 one."""
    return all(set(word.split("|")) & set(label.split()) for word in words)


def problems(kernel: Compiled, allowed: Allowed) -> list[str]:
    """What is wrong with a kernel."""
    first = kernel.loops[0] if kernel.loops else None
    return [problem for problem, found in (
        ("too much shared memory", kernel.shared > kernel.card.shared_memory),
        ("too much tensor memory", kernel.tensor_memory > TENSOR_MEMORY),
        ("barriers that nobody uses", kernel.idle_barriers),
        ("not loaded ahead", min(kernel.copies[:2], default=0) < allowed.copies and allowed.copies > 1),
        ("reloads in the loop over full chunks", first and allowed.first is not None and first.reloads + first.spills > allowed.first),
        ("reloads", allowed.reloads is not None and max((loop.reloads for loop in kernel.loops or ()), default=0) > allowed.reloads),
        ("spills", allowed.spilled is not None and kernel.spilled > allowed.spilled),
        ("no loop found", kernel.loops == [] and allowed.first is not None),
        # C7511, C7512: wgmma serialised; C7507: registers are not reassigned.
        ("serialised wgmma", "C751" in kernel.said), ("setmaxnreg ignored", "C7507" in kernel.said)) if found]


def line(label: str, kernel: Compiled, wrong: list[str]) -> str:
    words = [f"{kernel.shared} bytes shared"]
    if kernel.tensor_memory:
        words.append(f"{kernel.tensor_memory} columns")
    if kernel.copies:
        words.append(f"copies {' '.join(map(str, kernel.copies))}")
    if kernel.said:
        words.append(f"{kernel.registers} registers, {kernel.spilled} bytes spilled")
    if kernel.loops is not None:
        words.append("loops " + (" ".join(f"{loop.instructions}/{loop.reloads}/{loop.spills}" for loop in kernel.loops) or "none"))
    return f"{label}, {kernel.name} {kernel.launched}: {', '.join(words)}: {', '.join(wrong) or 'fine'}"


COMPILER = Compiler()


def compiled_well(cases: list[tuple[str, Case, Card]], everything: bool) -> bool:
    """Compiles the cases, which have a label and a card, prints a line of each kernel, and says whether nothing is wrong with any."""
    fine = True
    for label, case, card in cases:
        pretended = card if case.processors is None else card._replace(multiprocessors=case.processors)
        # Of each program a multiprocessor keeps a KiB for itself.
        pretended = pretended._replace(shared_memory=(pretended.shared_memory + 1024) // case.programs - 1024)
        assembled = case.assembled and (everything or case.asked is None or card.architecture in case.asked)
        looped = case.allowed.first is not None or case.allowed.reloads is not None
        for kernel in COMPILER.compile(case.call, pretended, case.kernels, assembled, looped):
            wrong = [kernel] if isinstance(kernel, str) else problems(kernel, case.allowed)
            print(f"{label}: {kernel}" if isinstance(kernel, str) else line(label, kernel, wrong), flush=True)
            fine = fine and not wrong
    return fine


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="of a label, such as sm_80|sm_89, forward or causal; all must be in it")
    parser.add_argument("--all", action="store_true", help="the rare cases too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (default %(default)s)")
    options = parser.parse_args(argv)
    # By card and kind of kernels, which have none in common.
    groups: dict[str, list[tuple[str, Case, Card]]] = {}
    for name, case in cases().items():
        for card in case.cards:
            label = f"{CARDS[card]} {name}"
            if (options.all or case.usual is None or card in case.usual) and chosen(label, options.words):
                groups.setdefault(" ".join(label.split()[:2]), []).append((label, case, CARDS[card]))
    if not groups:
        parser.error(f"words must choose a case, got {' '.join(options.words)}")
    # Forked, so that torch and Triton are imported once. Hopper's kernels, which take longest, begin.
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(options.jobs, get_context("fork"), COMPILER.install) as pool:
        os.environ["TRITON_CACHE_DIR"] = folder
        return int(not all([*pool.map(partial(compiled_well, everything=options.all), [*groups.values()][::-1])]))


if __name__ == "__main__":
    sys.exit(main())
