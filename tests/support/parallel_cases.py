"""What ranks do in the tests of several ranks: each case compares with one process, which every rank is beside its part in the exchange."""

import gc
import os
import time
import traceback
import weakref
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from parallel_inputs import MIXED, SHORT, TEXT, TILE, TWICE, TWO_GRIDS, WAN, config, inputs, local, mask, noting, refused
from parallel_mistakes import errors, errors_before_anything_is_agreed, errors_of_one, every_fact, facts, late
from rank_each_call import each_call

from ssta import DenseRun, SSTAConfig, TileCache, TokenLayout, ssta_3d_attention, ssta_attention
from ssta.attention import attend as attend_layer
from ssta.kernels import Deferred, Projection, RMSNorm
from ssta.layer import Layer
from ssta.ranks import Shards
from ssta.ranks import layer as on_ranks
from ssta.ranks.exchange import Incoming


def same(layout=TEXT, split="video", heads=4, key_heads=None, batch=1, dtype=torch.float64, masked=False, **options):
    """Attention over ranks is attention in one process: the same selection, and the same output to rounding."""
    settings = config(**options)
    qkv = inputs(layout, heads, key_heads, batch, dtype)
    text_mask = mask(layout, batch) if masked else None
    shards = Shards.of(None, layout, split)
    out, blocks = ssta_attention(*[local(x, shards) for x in qkv], layout, settings, text_mask=text_mask, group=dist.group.WORLD,
                                 split=split, return_blocks=True)
    expected, all_blocks = ssta_attention(*qkv, layout, settings, text_mask=text_mask, return_blocks=True)
    first, last = shards.heads(heads, key_heads)
    if all_blocks.counts.shape[1] > 1:
        all_blocks = all_blocks.to_mask()[:, first:last]
    else:
        all_blocks = all_blocks.to_mask()
    assert torch.equal(blocks.to_mask(), all_blocks), "not the same selection"
    agrees(out, local(expected, shards))
    assert out.transpose(1, 2).is_contiguous()


def agrees(out, expected):
    """To rounding: fewer heads are matrix products of another shape, which a CPU may add up in another order."""
    atol = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-3, torch.float16: 2e-3}[expected.dtype]
    torch.testing.assert_close(out, expected, rtol=2 * torch.finfo(expected.dtype).eps, atol=atol)


def gradients(layout=TEXT, split="video", heads=4, key_heads=None, batch=2, masked=False, **options):
    """Gradients of a loss over what all ranks hold add up over the ranks, of the whole runs too, whose part of the loss they divide."""
    settings, shards = config(**options), Shards.of(None, layout, split)
    qkv = [x.requires_grad_() for x in inputs(layout, heads, key_heads, batch, torch.float64)]
    text_mask = mask(layout, batch) if masked else None
    expected = ssta_attention(*qkv, layout, settings, text_mask=text_mask)
    own = [local(x.detach(), shards).requires_grad_() for x in qkv]
    out = ssta_attention(*own, layout, settings, text_mask=text_mask, group=dist.group.WORLD, split=split)
    same_gradients(own, out, qkv, expected, shards)


def same_gradients(own, out, qkv, expected, shards):
    weight = inputs(TokenLayout((DenseRun(expected.shape[2]),)), expected.shape[1], batch=len(expected), dtype=torch.float64, seed=1)[0]
    (expected * weight).sum().backward()
    # Each rank's loss weighs the text by its own number, whose sum over the ranks is what one process has.
    share = torch.cat([torch.ones(place.held[shards.rank], dtype=torch.float64) * (1 if place.shared else (shards.rank + 1) / sum(
        range(shards.ranks + 1))) for place in shards.places])[:, None]
    (out * local(weight, shards) * share).sum().backward()
    for x, whole in zip(own, qkv):
        parts = []
        for place in shards.places:
            part = x.grad.narrow(2, place.local, place.held[shards.rank]).clone()
            if not place.shared:
                dist.all_reduce(part)
            parts.append(part)
        torch.testing.assert_close(torch.cat(parts, 2), local(whole.grad, shards), rtol=0, atol=1e-13)


def sent_ahead():
    """What was sent one by one, in the order v, k, q, is what goes together."""
    shards, settings = Shards.of(None, TEXT), config()
    for key_heads in (4, 2 if dist.get_world_size() == 2 else 4):
        q, k, v = [local(x, shards) for x in inputs(TEXT, 4, key_heads, 2)]
        v_sent = shards.start(v)
        k_sent = shards.start(k)
        q_sent = shards.start(q, key_heads=key_heads)
        own = shards.deal_heads(4, key_heads)[shards.rank]
        assert (q_sent.shape, q_sent.heads, k_sent.heads) == ((2, own, TEXT.length, 16), 4, key_heads)
        out = attend_layer(q_sent, k_sent, v_sent, TEXT, settings, shards=shards).out
        agrees(out, ssta_attention(q, k, v, TEXT, settings, group=dist.group.WORLD))


def sent_in_turn():
    """v and k are in tiles before q is waited for."""
    shards, steps = Shards.of(None, TEXT), []
    qkv = [local(x, shards) for x in inputs(TEXT, batch=2)]

    def noted(spec):
        layer = Layer(spec)
        of = layer.backend
        layer.backend = replace(of, take=noting(of.take, "take", steps), gather_one=noting(of.gather_one, "gather_one", steps))
        return layer

    expected = ssta_attention(*qkv, TEXT, config(), group=dist.group.WORLD)
    sent = [shards.start(x) for x in qkv[::-1]]
    with patch.object(Incoming, "wait", noting(Incoming.wait, "wait", steps)), patch.object(on_ranks, "layer_of", noted):
        out = attend_layer(*sent[::-1], TEXT, config(), shards=shards, note=steps.append).out
    agrees(out, expected)
    assert steps == ["wait", "take", "wait", "gather_one", "wait", "arrived", "gather_one", "take", "attended"], steps


def by_kernels():
    """Kernels of a layer whose q, k and v go together, one by one, or were sent ahead; one rank has two of three heads. Of text that is
    whole, and of several grids, which go as one."""
    settings = config(tile_thw=(2, 3, 4), kernel_thw=(1, 1, 1), topk=2, compensation="linear")
    published = config(tile_thw=(2, 3, 4), kernel_thw=(1, 1, 1), topk=1)
    for layout, of, batch in ((TokenLayout.video_text((3, 4, 3), 5), settings, 1), (TWO_GRIDS, published, 2)):
        shards, text_mask, qkv = Shards.of(None, layout), mask(layout, batch), inputs(layout, 3, batch=batch, dtype=torch.float16)
        options = dict(text_mask=text_mask, impl="triton")
        expected = local(ssta_attention(*qkv, layout, of, **options), shards)
        own = [local(x, shards) for x in qkv]
        for limit, exchanges in ((2**20, 1), (0, 3)):
            steps, sent = [], []
            with patch.object(on_ranks, "TOGETHER", limit), patch.object(Shards, "send", noting(Shards.send, "send", sent)):
                ran = attend_layer(*own, layout, of, shards=shards, note=steps.append, **options)
                agrees(ran.out, expected)
                assert ran.out.transpose(1, 2).is_contiguous() and steps == ["arrived", "attended"], steps
                assert len(sent) == exchanges
                agrees(attend_layer(*own, layout, of, shards=shards, selection=ran.selection, **options).out, expected)
        sent = [shards.start(x) for x in own[::-1]]
        agrees(attend_layer(*sent[::-1], layout, of, shards=shards, **options).out, expected)


def by_hand():
    """to_tokens is the inverse of to_heads, whatever lies where, and to_heads has a rank's heads of the whole sequence."""
    ranks = dist.get_world_size()
    for layout, split, batch, heads, key_heads in (
            (WAN, "video", 1, 4, 4), (WAN, "video", 3, 4, 4), (TEXT, "video", 1, 4, 4), (TEXT, "all", 2, 7, 7), (MIXED, "video", 2, 10, 5),
            (MIXED, "all", 1, 8, 4), (TWICE, "video", 2, 5, 5), (SHORT, "video", 2, 4, 4), (SHORT, "all", 1, 4, 4)):
        shards = Shards.of(None, layout, split)
        assert sum(shards.lengths) == sum([run.length * (1 if run.shared else ranks) for run in shards.runs])
        q, k, v = inputs(layout, heads, key_heads, batch)
        own = [local(x, shards) for x in (q, k, v)]
        arrived = shards.to_heads(*own, key_heads=key_heads)
        for x, whole in zip(arrived, (q, k, v)):
            first, last = shards.heads(whole.shape[1], key_heads)
            assert torch.equal(x, whole[:, first:last]) and x.stride(3) == 1
            assert torch.equal(shards.to_tokens(x, whole.shape[1], key_heads=key_heads), local(whole, shards))
        normed = Deferred((Projection(own[0], RMSNorm(torch.full((16,), 1.5), 0.0)),))
        got, want = (shards.start(x, key_heads=key_heads).wait() for x in (normed, normed.materialize()))
        assert torch.equal(got, want) and not torch.equal(got, arrived[0])
        assert torch.equal(shards.start(Deferred((Projection(own[0]),)), key_heads=key_heads).wait(), arrived[0])
        # Any memory order.
        assert torch.equal(shards.to_heads(own[0].contiguous(), key_heads=key_heads), arrived[0])
        assert torch.equal(shards.to_tokens(arrived[0].contiguous(), heads, key_heads=key_heads), own[0])


def untouched():
    """Nothing writes to what it was given."""
    shards, qkv = Shards.of(None, TEXT), inputs(TEXT, batch=2)
    own = [local(x, shards) for x in qkv]
    before = [x.clone() for x in own]
    ssta_attention(*own, TEXT, config(), group=dist.group.WORLD)
    assert all(torch.equal(x, y) for x, y in zip(own, before))
    whole = shards.to_heads(own[0])
    copy = whole.clone()
    shards.to_tokens(whole, 4)
    assert torch.equal(whole, copy)


def published_names():
    """ssta_3d_attention takes a group too, and a DeviceMesh is one."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    shards, qkv = Shards.of(mesh, TEXT), inputs(TEXT)
    assert shards == Shards.of(None, TEXT)
    options = dict(topk=3, tile_thw=TILE, kernel_thw=(1, 3, 3), text_len=37)
    out = ssta_3d_attention(*[local(x, shards) for x in qkv], (5, 9, 7), group=mesh, **options)
    agrees(out, local(ssta_3d_attention(*qkv, (5, 9, 7), **options), shards))


def in_a_mesh():
    """Two groups of two ranks each: a group shares out its own sequence, whatever the others do."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("videos", "ulysses"))
    shards = Shards.of(mesh["ulysses"], TEXT)
    assert shards.ranks == 2
    qkv = inputs(TEXT, seed=mesh.get_local_rank("videos"))
    out = ssta_attention(*[local(x, shards) for x in qkv], TEXT, config(), group=mesh["ulysses"])
    agrees(out, local(ssta_attention(*qkv, TEXT, config()), shards))
    own = [local(x, shards) for x in qkv]
    refused(ValueError, "DeviceMesh of one dimension, such as mesh['ulysses'], got 2", partial(
        ssta_attention, *own, TEXT, config(), group=mesh))
    others = dist.DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        refused(ValueError, "group must hold this process, got a DeviceMesh of the processes",
                partial(ssta_attention, *own, TEXT, config(), group=others))


def differentiated_once():
    """A second derivative is refused, also by what only the gradient that arrives depends on."""
    own = [local(x, Shards.of(None, TEXT)).requires_grad_() for x in inputs(TEXT)]
    weight = torch.ones_like(own[0], requires_grad=True)
    out = ssta_attention(*own, TEXT, config(), group=dist.group.WORLD)
    first = torch.autograd.grad((out * weight).sum(), own, retain_graph=True)
    again = torch.autograd.grad((out * weight).sum(), own, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    for of in (*own, weight):
        refused(RuntimeError, "ssta_attention and what is built on it must be differentiated at most once",
                lambda of=of: torch.autograd.grad(sum([x.square().sum() for x in again]), of, retain_graph=True))


def freed():
    """Nothing keeps a group that was destroyed."""
    group = dist.new_group()
    own = [local(x, Shards.of(group, TEXT)).requires_grad_() for x in inputs(TEXT)]
    ssta_attention(*own, TEXT, config(), group=group).sum().backward()
    shards = Shards.of(group, TEXT)
    attend_layer(*[shards.start(x) for x in own], TEXT, config(), shards=shards)
    seen = weakref.ref(group)
    dist.destroy_process_group(group)
    del group, shards
    gc.collect()
    assert seen() is None, gc.get_referrers(seen())


def traced():
    """The layer traces into one graph without a break, forward and backward, and gives what it gives outside; one rank has three of five
    heads."""
    torch._dynamo.reset()
    shards = Shards.of(None, TEXT)

    def layer(q, k, v):
        return ssta_attention(q, k, v, TEXT, config(), group=dist.group.WORLD)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    own = [local(x, shards) for x in inputs(TEXT, 5)]
    results = []
    for call in (layer, compiled):
        leaves = [x.clone().requires_grad_() for x in own]
        out = call(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def cache():
    """Chunk after chunk through a cache of a rank's heads is that through a cache of all; more ranks than key heads are refused."""
    settings = SSTAConfig((2, 3, 3), density=0.4, compensation="linear")
    layout, thw = TokenLayout.video_text((3, 5, 7)), (3, 5, 7)
    shards, text = Shards.of(None, layout, "all"), [x[:, 1::2] for x in inputs(TokenLayout.video_text((1, 1, 6)), 8, seed=9)[1:]]
    own, whole = (TileCache(settings, window=5, sink=2, text=6, group=group) for group in (dist.group.WORLD, None))
    for number in range(4):
        qkv = inputs(layout, 8, 4, dtype=torch.float32, seed=number)
        for keep in (False, True):
            given = dict(keep=keep, dense=number == 2, start=3 * number, text=tuple(text) if number == 1 and keep else None)
            out = own.attend(*[local(x, shards) for x in qkv], thw, **given)
            agrees(out, local(whole.attend(*qkv, thw, **given), shards))
    first, last = shards.heads(4)
    assert torch.equal(own.contents().key, whole.contents().key[:, first:last]) and own.frames == whole.frames == 7
    ranks = dist.get_world_size()
    start = 3 if shards.rank == ranks - 1 else own.kept
    refused(ValueError, f"on rank {ranks - 1}: start must be the number of frames kept so far, 12, got 3", lambda: own.attend(
        *[local(x, shards) for x in qkv], thw, start=start))
    q, k, v = [local(x, shards) for x in inputs(layout, 6, ranks - 1)]
    fresh = TileCache(settings, window=5, group=dist.group.WORLD)
    refused(ValueError, f"got {ranks} ranks and {k.shape[1]}", lambda: fresh.attend(q, k, v, thw))
    assert not fresh.nbytes


HEADS = {
    "video": partial(same, WAN),
    "text": partial(same, masked=True, batch=2),
    "text before, between and after": partial(same, MIXED, masked=True, batch=2),
    "sequence as one run": partial(same, MIXED, "all", masked=True, batch=2),
    "two grids": partial(same, TWICE),
    "zeros": partial(same, pad_type="zero", masked=True, batch=2),
    "repetitions": partial(same, MIXED, pad_type="repeat", masked=True),
    "importance": partial(same, sampling_type="importance", pad_type="zero"),
    "a scorer of one's own": partial(same, sampling_type=lambda q, k: -torch.cdist(q, k)),
    "a budget of one's own": partial(same, topk=None, budget=lambda scores: scores > scores.mean(-1, keepdim=True)),
    "window": partial(same, sparse_type="sta", masked=True),
    "budget alone": partial(same, sparse_type="moba"),
    "threshold": partial(same, topk=12, threshold=0.5, kernel_thw=(1, 1, 1), batch=2),
    "density": partial(same, topk=None, density=0.4, batch=2),
    "estimates": partial(same, topk=None, density=0.3, compensation="linear", masked=True),
    "estimates by halves": partial(same, topk=None, density=0.3, compensation="linear", compensation_parts=2),
    "more ranks than frames' tokens": partial(same, SHORT),
    "bfloat16": partial(same, dtype=torch.bfloat16),
    "5 heads": partial(same, heads=5, batch=2, masked=True),
    "6 heads": partial(same, WAN, heads=6),
    "7 heads": partial(same, heads=7),
    "5 key heads": partial(same, heads=10, key_heads=5),
}
GRADIENTS = {
    "gradients": partial(gradients, masked=True),
    "gradients of 5 heads": partial(gradients, MIXED, heads=5, batch=1),
    "gradients of 5 key heads": partial(gradients, heads=10, key_heads=5, batch=1),
    "gradients of one run": partial(gradients, TEXT, "all", batch=1),
    "gradients of several runs": partial(gradients, MIXED, masked=True),
    "gradients of text alone": partial(gradients, TokenLayout((DenseRun(9),)), masked=True),
    "gradients of estimates": partial(gradients, TWICE, topk=None, density=0.3, compensation="linear", batch=1),
}
CASES = {**HEADS, **GRADIENTS, "by hand": by_hand, "untouched": untouched, "sent ahead": sent_ahead, "sent in turn": sent_in_turn,
         "published names": published_names, "errors": errors, "errors of one rank": errors_of_one, "every fact": every_fact,
         "errors before anything is agreed": errors_before_anything_is_agreed, "late": late, "facts": facts, "freed": freed,
         "differentiated once": differentiated_once, "traced": traced, "cache": cache, "in a mesh": in_a_mesh}
if os.environ.get("TRITON_INTERPRET") == "1":
    CASES["by kernels"] = by_kernels
# Tracing and Triton's interpreter take seconds a rank; a mesh of two dimensions needs four.
ON_RANKS = {2: [name for name in CASES if name != "in a mesh"], 4: [name for name in CASES if name not in ("traced", "by kernels")]}


def on_gpus(rank, ranks):
    """On GPUs: forward and backward are one GPU's to the dtype's rounding, no call but the first waits for the device, and what was sent
    ahead arrives."""
    layout, settings = TokenLayout.video_text((7, 18, 20), 77), config(tile_thw=(4, 4, 8), topk=6)
    shards, text_mask = Shards.of(None, layout), mask(layout, 2).cuda()
    qkv = [x.cuda().requires_grad_() for x in inputs(layout, 2 * ranks, batch=2, dtype=torch.bfloat16, dim=64)]
    weight = inputs(layout, 2 * ranks, batch=2, dtype=torch.bfloat16, dim=64, seed=1)[0].cuda()
    own = [local(x.detach(), shards).requires_grad_() for x in qkv]

    def attend(over=None):
        given, loss = (qkv, weight) if over is None else (own, local(weight, shards))
        result = attend_layer(*given, layout, settings, text_mask=text_mask, shards=over)
        return [result.out.detach(), *torch.autograd.grad((result.out[:, :, :-77] * loss[:, :, :-77]).sum(), given)]

    expected = attend()
    attend(shards)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = attend(shards)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Of the text's gradients each rank has its part.
    for x in found[1:]:
        text = x[:, :, -77:].contiguous()
        dist.all_reduce(text)
        x[:, :, -77:] = text
    errors = {x: distance(got, local(want, shards)) for x, got, want in zip(("out", "dq", "dk", "dv"), found, expected)}
    with torch.no_grad():
        sent = [shards.start(x) for x in own[::-1]]
        ahead = attend_layer(*sent[::-1], layout, settings, text_mask=text_mask, shards=shards).out
        # Without gradients it is another call, on which ranks agree once.
        ssta_attention(*own, layout, settings, text_mask=text_mask, group=dist.group.WORLD)
        for limit in (on_ranks.TOGETHER, 0):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                with patch.object(on_ranks, "TOGETHER", limit):
                    out = ssta_attention(*own, layout, settings, text_mask=text_mask, group=dist.group.WORLD)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            errors[f"inference, {limit}"] = distance(out, ahead)
        errors["ahead"] = distance(ahead, local(ssta_attention(*qkv, layout, settings, text_mask=text_mask), shards))
        normed = Deferred((Projection(own[0], RMSNorm(torch.full((64,), 1.5, device="cuda", dtype=torch.bfloat16), 1e-6)),))
        assert torch.equal(*(shards.start(x).wait() for x in (normed, normed.materialize())))
    assert max(errors.values()) < 5e-3, errors
    each_call(dist.group.WORLD, 3, (7, 18, 20), (4, 4, 8), 77, 64, "cuda")


def distance(x, y):
    return float((x - y).double().norm() / y.double().norm())


def run(rank, ranks, names):
    """Of each case what went wrong, None where nothing did, and the seconds it took."""
    found = {}
    for name in names:
        start = time.monotonic()
        try:
            CASES[name]()
            error = None
        except Exception:
            error = traceback.format_exc()
        found[name] = error, time.monotonic() - start
        # The others are in the middle of something.
        if error:
            break
    return found
