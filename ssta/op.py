"""One call of a layer in whatever world it comes: plain, with a gradient, traced by a compiler, under a mode, autocast or a transform.

This is the only place of this floor that asks. A plain call runs its ``Layer``; one that records a gradient goes through one function of
autograd; all others see two operators of torch.library, ``layer`` and ``layer_backward``, which are opaque to them and get their
``LayerSpec`` as text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kernels import BlockLists
from .kernels.memo import traced
from .kernels.operators import NAMESPACE, differentiable_once, differentiated_once, on_device, recorded, refuse_transforms, watched
from .layer import Layer, prepared
from .layout import Input
from .result import ExactMass, LayerResult, Tape
from .returns import TAPE, everything, own_tensors, results, tensors
from .selection import Selection
from .spec import LayerSpec
from .text import TextMask


class World(NamedTuple):
    """In which world a call comes.

    Attributes:
        recorded: whether a gradient of query, key or value is wanted.
        watched: whether a compiler, a mode, a transform or a tracer sees an operator called on these tensors, or they are no plain ones.
    """

    recorded: bool
    watched: bool


def world_of(query: Any, key: Any, value: Any, text_mask: Any) -> World:
    """The world of a call, of whose arguments nothing is known yet."""
    seen = [x for x in (query, key, value, text_mask) if isinstance(x, Tensor)]
    return World(recorded(query, key, value), watched(*seen) if seen else traced())


def in_autocast(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Query, key and value in autocast's dtype where it casts them. What is wrong with them their checks say."""
    device = query.device.type if isinstance(query, Tensor) else "meta"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    query, key, value = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
                         for x in (query, key, value)]
    return query, key, value


def layer_of(spec: LayerSpec) -> Layer:
    """The layer of a spec. One whose config holds functions of the user's own, which may hold what memory there is, is not remembered."""
    return Layer(spec) if spec.config.holds_functions else prepared(spec)


def run_layer(query: Input, key: Input, value: Input, spec: LayerSpec, world: World, text_mask: Tensor | TextMask | None,
              selection: Selection | None = None) -> LayerResult:
    """The layer of ``spec`` on tensors that it describes.

    Args:
        text_mask: of the keys' dense runs, checked.
        selection: as ``attention.attend`` takes it.
    """
    if world.watched and isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor):
        refuse_transforms("ssta_attention", query=query, key=key, value=value)
        return _operate(query, key, value, spec, text_mask, selection)
    layer = layer_of(spec)
    if not spec.recorded:
        with on_device(query):
            return layer.run(query, key, value, text_mask, selection)
    kept: list[LayerResult] = []
    out, *means = _Recorded.apply(query, key, value, layer, text_mask, selection, kept)
    result, = kept
    result.out, result.means = out, tuple(means)
    return result


class _Recorded(torch.autograd.Function):
    """A layer's run with a gradient, for tensors that nobody watches: the operators without the dispatcher, which takes longer than all
    else before a launch."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, layer: Layer, text_mask: Tensor | TextMask | None,
                selection: Selection | None, kept: list[LayerResult]) -> tuple[Tensor, ...]:
        with on_device(query):
            ran = layer.run(query, key, value, text_mask, selection)
        blocks, tape, ran.tape = ran.selection.blocks, ran.tape, None
        assert tape is not None, "the layer records a gradient"
        # The lists are saved too, so that writing to them before the backward is an error.
        ctx.save_for_backward(query, key, value, blocks.counts, blocks.indices, blocks.kv_lengths, *tape)
        ctx.layer = layer
        kept.append(ran)
        return ran.out, *ran.means

    @staticmethod
    @differentiable_once("ssta_attention")
    def backward(ctx, saved: tuple[Any, ...], dout: Tensor, *dmeans: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, counts, indices, lengths, *tape = saved
        layer: Layer = ctx.layer
        if watched(dout, *dmeans):
            grads = _layer_backward(dout, query, key, value, counts, indices, lengths, *(dmeans or (None,) * 3), *tape, layer.spec.text)
        else:
            with on_device(dout):
                grads = layer.backward(Tape._make(tape), dout, layer.fixed.relisted(counts, indices, lengths), dmeans)
        return *grads, None, None, None, None


# The operators.


@torch.library.custom_op(f"{NAMESPACE}::layer", mutates_args=())
def _layer(query: Tensor, key: Tensor, value: Tensor, text_mask: Tensor | None, counts: Tensor | None, indices: Tensor | None,
           lengths: Tensor | None, useful: Tensor | None, spec: str) -> list[Tensor]:
    of = LayerSpec.from_text(spec, query.device)
    layer = prepared(of)
    fixed = layer.fixed
    selection = None if counts is None or indices is None else Selection(fixed.relisted(counts, indices, lengths), useful)
    with on_device(query):
        ran = layer.run(query, key, value, text_mask, selection)
    expected = {name: like.empty("meta") for name, like in everything(of, query, text_mask, indices).items()}
    return own_tensors(tensors(ran), expected, (
        query, key, value, counts, indices, lengths, useful, fixed.lists.counts, fixed.lists.indices, layer.tiles.offsets,
        layer.kv_tiles.offsets))


@_layer.register_fake
def _(query, key, value, text_mask, counts, indices, lengths, useful, spec):
    described = everything(LayerSpec.from_text(spec, query.device), query, text_mask, indices)
    return [like.empty(query.device) for like in described.values()]


# Every tensor by itself: gradients of several results at once find no way through lists of tensors.
_BACKWARD = ("(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor counts, Tensor indices, Tensor? lengths, Tensor? dq_means, "
             f"Tensor? dk_means, Tensor? dv_means, {''.join([f'Tensor? {name}, ' for name in TAPE])}str spec) -> (Tensor, Tensor, Tensor)")


@torch.library.custom_op(f"{NAMESPACE}::layer_backward", mutates_args=(), schema=_BACKWARD)
def _layer_backward(dout, query, key, value, counts, indices, lengths, dq_means, dk_means, dv_means, *rest):
    *kept, spec = rest
    layer = prepared(LayerSpec.from_text(spec, query.device))
    # A tensor that is used in the order in which it came is not on the tape.
    kept[:3] = [x if of is None else of for x, of in zip((query, key, value), kept)]
    with on_device(query), torch.no_grad():
        grads = layer.backward(Tape._make(kept), dout, layer.fixed.relisted(counts, indices, lengths), (dq_means, dk_means, dv_means))
    inputs = dict(q=query, k=key, v=value)
    return tuple(own_tensors(dict(zip("qkv", grads)), {name: torch.empty_like(x, device="meta") for name, x in inputs.items()},
                             inputs.values()))


@_layer_backward.register_fake
def _(dout, query, key, value, *_):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx, inputs, output) -> None:
    query, key, value, text_mask, _, indices, *_, ctx.spec = inputs
    named = dict(zip(everything(LayerSpec.from_text(ctx.spec, query.device), query, text_mask, indices), output))
    ctx.save_for_backward(query, key, value, named["counts"], named["indices"], named.get("lengths"), *[named.get(name) for name in TAPE])
    ctx.names = list(named)


def _differentiate(ctx, grads):
    saved, by_name = ctx.saved_tensors, dict(zip(ctx.names, grads))
    dout, *dmeans = [by_name.get(name) for name in ("out", "q_means", "k_means", "v_means")]
    if all([x is None for x in (dout, *dmeans)]):
        return (None,) * 9
    dout = torch.zeros_like(saved[0]) if dout is None else dout
    return *_layer_backward(dout, *saved[:6], *dmeans, *saved[6:], ctx.spec), *(None,) * 6


_layer.register_autograd(_differentiate, setup_context=_save)
differentiated_once(_layer_backward, "ssta_attention")


def _one_by_one(operator):
    """How torch.vmap runs an operator: one call for each entry of the mapped dimension."""
    def run(info, in_dims, *args):
        def entry(x, dim, number):
            return x.select(dim, number) if isinstance(x, Tensor) and dim is not None else x

        every = [operator(*[entry(x, dim, number) for x, dim in zip(args, in_dims)]) for number in range(info.batch_size)]
        kind = type(every[0])
        return kind([torch.stack(parts) for parts in zip(*every)]), kind([0] * len(every[0]))

    return run


for _operator in (_layer, _layer_backward):
    _operator.register_vmap(_one_by_one(_operator))


def _operate(query: Tensor, key: Tensor, value: Tensor, spec: LayerSpec, text_mask: Tensor | TextMask | None, selection: Selection | None
             ) -> LayerResult:
    """A layer by its operator, for all who watch."""
    valid = text_mask.valid if isinstance(text_mask, TextMask) else text_mask
    given: tuple = (None,) * 4
    if selection is not None:
        blocks = selection.blocks
        given = blocks.counts, blocks.indices, blocks.kv_lengths, selection.useful
    found = _layer(query, key, value, valid, *given, spec.text)
    named = dict(zip(results(spec, query, valid, given[1]), found))
    (cut, kv_cut), lengths = spec.cuts, named.get("lengths")
    blocks = BlockLists(
        named["counts"], named["indices"], cut.tile_length or named["q_offsets"], kv_cut.tile_length or named["kv_offsets"],
        lengths if spec.layout == spec.kv_layout else None, lengths, num_kv_blocks=kv_cut.num_tiles, max_q_length=cut.max_tile_length,
        max_kv_length=kv_cut.max_tile_length)
    means = tuple([named[name] for name in ("q_means", "k_means", "v_means")]) if spec.means else ()
    mass = ExactMass(named["exact_mass"]) if "exact_mass" in named else None
    return LayerResult(named["out"], None, Selection(blocks, useful=named.get("useful")), mass, means=means)
