"""What ranks refuse, on all of them and before any token is sent; cases of parallel_cases."""

import warnings
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from parallel_inputs import MIXED, TEXT, TILE, WAN, config, inputs, local, mask, refused

from ssta import TokenLayout, ssta_3d_attention, ssta_attention
from ssta.attention import attend as attend_layer
from ssta.kernels import Deferred, Projection
from ssta.ranks import Shards, agreement, check_ranks


def errors():
    """What is wrong on every rank is refused on every rank."""
    ranks, world = dist.get_world_size(), dist.group.WORLD
    shards, settings = Shards.of(None, TEXT), config()
    q, k, v = (local(x, shards) for x in inputs(TEXT))

    def attend(*tensors, layout=TEXT, settings=settings, group=world, **options):
        return lambda: ssta_attention(*tensors, layout, settings, group=group, **options)

    few = [x[:, :ranks - 1] for x in (q, k, v)]
    refused(ValueError, f"group must have at most as many ranks as there are heads, got {ranks} ranks and {ranks - 1} heads; take at "
            f"most {ranks - 1} ranks, which is ulysses_degree in diffusers", attend(*few))
    refused(ValueError, f"as many ranks as there are key heads, got {ranks} ranks and 1 key heads", attend(q, k[:, :1], v[:, :1]))
    refused(ValueError, "got 352 in shape", attend(*inputs(TEXT)))
    refused(ValueError, f"of 315 tokens and the 37 that are whole, together {shards.local_length}, got 5", attend(q[:, :, :5], k, v))
    refused(ValueError, f"share of {Shards.of(None, TEXT, 'all').local_length} of 352 tokens, got", attend(q[:, :, :5], k, v, split="all"))
    refused(TypeError, "key must have query's dtype", attend(q, k.double(), v))
    refused(TypeError, "group must be a torch.distributed ProcessGroup or a 1-D DeviceMesh, got int", attend(q, k, v, group=2))
    refused(ValueError, "split must be one of 'video', 'all', got 'text'", attend(q, k, v, split="text"))
    refused(ValueError, "split must be 'video' without a group", attend(q, k, v, split="all", group=None))
    refused(ValueError, "text_mask must be", attend(q, k, v, text_mask=torch.ones(1, 36, dtype=torch.bool)))
    refused(ValueError, "mask_share_within_head must be False with a group", attend(q, k, v, settings=config(mask_share_within_head=True)))
    refused(TypeError, "query must be a tensor, got Deferred", attend(*[Deferred((Projection(x),)) for x in (q, k, v)]))
    elsewhere = [dist.new_group([rank]) for rank in range(ranks)]
    refused(ValueError, "group must hold this process", attend(q, k, v, group=elsewhere[dist.get_rank() - 1]))
    refused(ValueError, "must be alike in batch", lambda: shards.start(q, k.double()))
    refused(ValueError, "must be given at least one tensor", lambda: shards.start())
    refused(ValueError, "heads, got 3", lambda: shards.to_tokens(torch.zeros(1, 3, TEXT.length, 8), 4))
    refused(ValueError, f"x must have the sequence's 352 tokens, got {shards.local_length}", lambda: shards.to_tokens(q, 4))
    sent = [shards.start(x) for x in (q, k, v)]
    mixed = sent[0], sent[1], v
    refused(TypeError, "value must be Sent as query is, got Tensor", lambda: attend_layer(*mixed, TEXT, settings, shards=shards))
    other = Shards.of(None, TEXT, "all")
    refused(ValueError, "query must have been sent by the layer's own shards", lambda: attend_layer(*sent, TEXT, settings, shards=other))
    attend_layer(*sent, TEXT, settings, shards=shards)
    refused(RuntimeError, "can be waited for once", sent[0].wait)


def errors_of_one():
    """What is wrong on one rank is refused on all of them, and the next call, without the mistake, finds them together."""
    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    last, plain = rank == ranks - 1, config()
    # A sequence that nobody has asked for yet: its first use is when ranks compare.
    layout = TokenLayout.video_text((3, 5, 7), 11 + ranks)
    shards = Shards.of(None, layout)
    own = [local(x, shards) for x in inputs(layout)]

    def attend(*tensors, layout=layout, settings=plain, **options):
        return lambda: ssta_attention(*tensors, layout, settings, group=world, **options)

    cut = [x[:, :, :-1] for x in own] if last else own
    refused(ValueError, f"on rank {ranks - 1}: query must have rank {ranks - 1} of {ranks}'s share of", attend(*cut))
    refused(TypeError, f"on rank {ranks - 1}: query must be a tensor, got NoneType", attend(None if last else own[0], *own[1:]))
    refused(TypeError, f"on rank {ranks - 1}: key must have query's dtype", attend(own[0], own[1].double() if last else own[1], own[2]))
    doubled = [torch.cat([x, x]) for x in own] if last else own
    refused(ValueError, "query's batch, heads and head_dim must be the same on all ranks, got (1, 4, 16) on rank 0", attend(*doubled))
    refused(ValueError, "config must be the same on all ranks, got SSTAConfig(", attend(*own, settings=config(topk=2 + last)))
    refused(ValueError, "text_mask must be the same", attend(*own, text_mask=mask(layout, 1) if last else None))
    another = TokenLayout.video_text((3, 5, 7), 11 + ranks + last)
    theirs = [local(x, Shards.of(None, another)) for x in inputs(another)]
    refused(ValueError, "sequence must be the same on all ranks, got ", attend(*theirs, layout=another))
    refused(ValueError, f"on rank {ranks - 1}: x must have", lambda: shards.start(cut[0]))
    assert torch.equal(attend(*own)(), local(ssta_attention(*inputs(layout), layout, config()), shards))
    # They have compared: now each looks for itself, and no collective is needed.
    refused(ValueError, f"query must have rank {rank} of {ranks}'s share", attend(*[x[:, :, :-1] for x in own]))


def errors_before_anything_is_agreed():
    """What a layout or a configuration is made of is looked at with all the others too, in a group's first call."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    last, own = rank == ranks - 1, [local(x, Shards.of(None, TEXT)) for x in inputs(TEXT)]

    def attend(thw=(5, 9, 7), group=None, **options):
        return lambda: ssta_3d_attention(*own, thw, group=group, **{"tile_thw": TILE, "topk": 3, "text_len": 37, **options})

    for name, good, bad, text in (("topk", 3, 0, "topk must be"), ("text_len", 37, -1, "text_len must be"),
                                  ("tile_thw", TILE, (10**5,) * 3, "tile_thw must"), ("thw", (5, 9, 7), (0, 9, 7), "thw[0] must be")):
        group = dist.new_group()
        options = {"pad_type": "zero"} if name == "tile_thw" else {}
        refused(ValueError, f"on rank {ranks - 1}: {text}", attend(group=group, **options, **{name: bad if last else good}))
        attend(group=group)()
    group = dist.new_group()
    refused(ValueError, f"on rank {ranks - 1}: split must be one of", lambda: ssta_attention(
        *own, TEXT, config(), group=group, split="nope" if last else "video"))
    group = dist.new_group()
    refused(TypeError, f"on rank {ranks - 1}: layout must be a TokenLayout", lambda: ssta_attention(
        *own, (2, 4, 4) if last else TEXT, config(), group=group))


def every_fact():
    """Each new combination of what ranks must have in common is compared, on a sequence that they have agreed on too. (A rank that repeats
    an agreed call while another brings a new one does not compare: its scale is new here.)"""
    rank, shards = dist.get_rank(), Shards.of(None, TEXT)
    own = [local(x, shards) for x in inputs(TEXT)]
    attend = partial(ssta_attention, *own, TEXT, config(), group=dist.group.WORLD)
    attend()
    for name, values in (("scale", (0.375, 0.5)), ("deterministic", (True, False)), ("impl", ("torch", "reference"))):
        refused(ValueError, f"{name} must be the same on all ranks", partial(attend, **{"scale": 0.75, name: values[rank > 0]}))
    leaves = [x.clone().requires_grad_(rank == 1) for x in own]
    refused(ValueError, "gradients must be the same on all ranks, got False on rank 0 and True on rank 1", lambda: ssta_attention(
        *leaves, TEXT, config(), group=dist.group.WORLD, scale=0.75))
    # What was sent before attention is compared with the rest of the call.
    sent = [shards.start(x) for x in own]
    refused(ValueError, "config must be the same on all ranks", lambda: attend_layer(*sent, TEXT, config(topk=4 + rank), shards=shards))
    turned = TokenLayout.video_text((9, 5, 7) if rank else (5, 9, 7), 37)
    refused(ValueError, "layout must be the same on all ranks", lambda: ssta_attention(
        *own, turned, config(), group=dist.group.WORLD, scale=0.75))
    attend()


def late():
    """A rank that the others do not follow into a new call soon says what is new there, and raises it when its group's time is up."""
    rank, group = dist.get_rank(), dist.new_group()
    own, store = [local(x, Shards.of(group, TEXT)) for x in inputs(TEXT)], group.get_group_store()
    attend = partial(ssta_attention, *own, TEXT, config(), group=group)
    attend()
    attend(scale=0.5)
    if rank == 1:
        others = "[0]" if dist.get_world_size() == 2 else "[0, 2, 3]"
        said = f"waits for ranks {others} of its group to make a call that they have not agreed on yet, the first with scale = 0.75 where"
        patience = store.timeout
        store.set_timeout(timedelta(milliseconds=100))
        with patch.object(agreement, "SOON", timedelta(milliseconds=50)), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            try:
                attend(scale=0.75)
            except ValueError as error:
                assert said in str(error) and "sequence" not in str(error)
            else:
                raise AssertionError("nobody came")
        assert any([said in str(of.message) for of in found])
        store.set_timeout(patience)
    dist.barrier()


def facts():
    """check_ranks names what differs, on all ranks, and nothing where nothing does."""
    def scorer(q, k):
        return q @ k.mT

    rank, world = dist.get_rank(), dist.group.WORLD
    plain = dict(canvas=(5, 9, 7), step=3, config=config(sampling_type=scorer), layout=MIXED, noise=torch.zeros(2, 3), options={"a": 1.5})
    check_ranks(world, **plain)
    check_ranks(None)
    for name, value, said in (
            ("canvas", (5, 9, 8), "got (5, 9, 7) on rank 0 and (5, 9, 8) on rank 1"), ("step", 4, "got 3 on rank 0 and 4 on rank 1"),
            ("config", config(topk=4), "topk=4"), ("layout", WAN, "TokenLayout("), ("noise", torch.zeros(2, 4), "tensor (2, 4) of"),
            ("seed", 0, "got nothing on rank 0 and 0 on rank 1")):
        changed = {**plain, name: value} if rank == 1 else plain
        for text in (f"{name} must be the same on all ranks", said):
            refused(ValueError, text, partial(check_ranks, world, **changed))
