"""One call of a layer in whatever world it comes: plain, with a gradient, traced by a compiler, under a mode, autocast or a transform.

This is the only place of this floor that asks. A plain call runs its ``Layer``; one that records a gradient goes through one function of
autograd; all others see two operators of torch.library, ``layer`` and ``layer_backward``, which are opaque to them and get their
``LayerSpec`` as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .config import SSTAConfig
from .inputs import checked_spec
from .kernels import BlockLists, Deferred, Route, choose_backend
from .kernels.checks import autocast_inputs
from .kernels.memo import Kept, captured
from .kernels.operators import NAMESPACE, on_device, refuse_forward_mode, watched
from .layer import Layer, Ran, Tail, Tape, prepared
from .layout import Input, TileLayout
from .mass import ExactMass
from .selection import Selection
from .sequence import TokenLayout
from .spec import LayerSpec, Peers
from .text import TextMask


class LayerResult(NamedTuple):
    """What a layer of attention gives. Of a sequence that ranks share out, ``out`` is this rank's tokens, and the rest is of its heads.

    Attributes:
        out: ``[B, H, S, D]`` in query's dtype, in the sequence's order.
        selection: what was attended to, over the layout's tiles in tiled order.
        route: which kernels attended, and why no faster ones; None where an operator ran, which chooses by itself.
        mass: of which ``exact_mass`` is made.
        means: of the video tiles of query, key and value in their dtype, ``[B, H, N, D]`` and twice ``[B, Hkv, K, D]``, where they were
            wanted; else none.
    """

    out: Tensor
    selection: Selection
    route: Route | None
    mass: ExactMass | None = None
    means: tuple[Tensor, ...] = ()

    @property
    def exact_mass(self) -> Tensor | None:
        """With a compensation the share of the softmax that was computed exactly, the rest being estimated: float32 ``[B, H, N]`` (float64
        for float64 inputs), the mean of each video tile's rows; NaN for heads without an estimate. Worked out when asked for."""
        return None if self.mass is None else self.mass.tensor()


# Layers by all that is known of a call's arguments beside their values: the same again are neither checked nor described anew.
_known: dict[tuple, Layer] = Kept(256)


def attend(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *, kv_layout: TokenLayout | None = None,
    text_mask: Tensor | TextMask | None = None, scale: float | None = None, deterministic: bool = True, impl: str = "auto",
    selection: Selection | None = None, rows: tuple[tuple[int, int], ...] | None = None, peers: Peers | None = None,
    returned: Callable[[TileLayout], Tensor | None] | None = None, means: bool = False, held: PreparedLayer | None = None,
) -> LayerResult:
    """``ssta_attention`` with all that it knows of itself; the same arguments, results and errors. For use inside the package.

    Args:
        query, key, value: also what other ranks send, which has a tensor's shape, dtype and device and a method ``wait`` that gives it.
        selection: attend to what an earlier call with the same layouts, config and text_mask selected, instead of selecting anew.
        rows: the only queries to be computed, as ``LayerSpec`` has them; out is then of these.
        peers: the ranks that have the other heads.
        returned: gives for the queries' tiles the int64 slots that out consists of, in its order; None = the sequence's. Without a
            gradient.
        means: give the means of the video tiles too; differentiable.
        held: the layer to run, where a user holds one.
    """
    if isinstance(query, Tensor) and query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
        query, key, value = autocast_inputs(query=query, key=key, value=value)
    recorded = torch.is_grad_enabled() and any([isinstance(x, Tensor) and x.requires_grad for x in (query, key, value)])
    options = layout, kv_layout, config, scale, deterministic, impl, rows, peers, means

    def checked() -> LayerSpec:
        return checked_spec(query, key, value, *options, text_mask=text_mask, recorded=recorded)

    seen = [x for x in (query, key, value, text_mask) if isinstance(x, Tensor)]
    if isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor) and watched(*seen):
        spec = checked()
        refuse_forward_mode(query=query, key=key, value=value)
        return _operate(spec, query, key, value, text_mask, selection)
    kind = _kind(query, key, value, text_mask, recorded, options)
    known, layer_of = (_known, _layer_of) if held is None else (held.known, held.layer_of)
    layer = None if kind is None else known.get(kind)
    if layer is None or captured():
        layer = layer_of(checked(), query.device)
        if kind is not None and not captured():
            known[kind] = layer
    with on_device(query), torch.no_grad():
        if not recorded:
            ran = layer.run(query, key, value, text_mask, selection, returned=None if returned is None else returned(layer.tiles))
            return LayerResult(ran.out, ran.selection, ran.route, ran.mass, ran.means)
    kept: list[Ran] = []
    out, *found = _Recorded.apply(query, key, value, layer, text_mask, selection, kept)
    return LayerResult(out, kept[0].selection, kept[0].route, kept[0].mass, tuple(found))


def _layer_of(spec: LayerSpec, device: torch.device) -> Layer:
    """The layer of a spec. One whose config holds functions of the user's own, which may hold what memory there is, is not remembered."""
    return Layer(spec, device) if spec.config.holds_functions else prepared(spec, device)


class PreparedLayer:
    """A layer of attention that its user holds, ready to run: what follows from the layouts, the configuration and the kind of tensors is
    found once, and lives as long as this object. Made by ``ssta.prepare``.

    Attributes:
        spec: what it is.
        device: where it runs.
        tiles: how the queries' sequence is cut into tiles.
        backend: which implementation runs each step, and why no faster one.
    """

    def __init__(self, spec: LayerSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.known: dict[tuple, Layer] = Kept(64)
        self._layers: dict[bool, Layer] = {}
        layer = self.layer_of(spec, device)
        self.tiles, self.backend = layer.tiles, layer.backend

    def layer_of(self, spec: LayerSpec, device: torch.device) -> Layer:
        """The layer of a call's spec, which must be this one's but for whether a gradient is wanted.

        Raises:
            ValueError: the call's tensors are of another kind than the layer was prepared for.
        """
        if spec._replace(recorded=False) != self.spec or device != self.device:
            ours, theirs = ((of.dtype, of.heads, of.kv_heads, of.head_dim, where) for of, where in (
                (self.spec, self.device), (spec, device)))
            raise ValueError(f"query and key must be of the dtype, heads, key heads, head_dim and device that the layer was prepared for, "
                             f"{ours}, got {theirs}")
        if captured():
            # What is made now is the graph's.
            return self._layers.get(spec.recorded) or Layer(spec, device)
        found = self._layers.get(spec.recorded)
        if found is None:
            # A tensor made in inference mode could not be saved for a later backward pass.
            with torch.inference_mode(False), torch.no_grad():
                found = self._layers[spec.recorded] = Layer(spec, device)
        return found

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, text_mask: Tensor | TextMask | None = None) -> Tensor:
        """``ssta_attention`` of these tensors: ``[B, H, S, D]`` in query's dtype.

        Raises:
            TypeError, ValueError: what ``ssta_attention`` raises, or tensors of another kind than the layer was prepared for.
        """
        of = self.spec
        return attend(query, key, value, of.layout, of.config, kv_layout=None if of.kv_layout == of.layout else of.kv_layout,
                      text_mask=text_mask, scale=of.scale, deterministic=of.deterministic, impl=of.impl, held=self).out


def _kind(query: Any, key: Any, value: Any, text_mask: Any, recorded: bool, options: tuple) -> tuple | None:
    """All that ``checked_spec`` looks at; None where something is of an unexpected type, which it then refuses or converts."""
    layout, kv_layout, config, scale, deterministic, impl, *_ = options
    if not (type(layout) is TokenLayout and type(config) is SSTAConfig and type(impl) is str and type(deterministic) is bool
            and type(scale) in (float, type(None)) and type(kv_layout) in (TokenLayout, type(None))
            and type(query) is type(key) is type(value)) or config.holds_functions:
        return None
    mask: tuple | None = None
    if text_mask is None:
        pass
    elif type(text_mask) is TextMask:
        mask = text_mask.tokens, text_mask.valid.shape, text_mask.valid.device
    elif type(text_mask) is Tensor:
        mask = text_mask.shape, text_mask.dtype, text_mask.device
    else:
        return None
    lengths = (tuple(query.lengths), tuple(key.lengths), tuple(value.lengths)) if type(query) is Deferred else None
    return (*options, mask, recorded, lengths, type(query), query.shape, query.dtype, query.device, key.shape, key.dtype, key.device,
            value.shape, value.dtype, value.device)


class _Recorded(torch.autograd.Function):
    """A layer's run with a gradient, for tensors that nobody watches: the operators without the dispatcher, which takes longer than all
    else before a launch."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, layer: Layer, text_mask: Tensor | TextMask | None,
                selection: Selection | None, kept: list[Ran]) -> tuple[Tensor, ...]:
        with on_device(query):
            ran = layer.run(query, key, value, text_mask, selection)
        blocks = ran.selection.blocks
        # The lists are saved too, so that writing to them before the backward is an error.
        assert ran.tape is not None, "the spec says that a gradient is wanted"
        ctx.save_for_backward(query, key, value, blocks.counts, blocks.indices, blocks.kv_lengths, *ran.tape.flat)
        ctx.layer, ctx.blocks = layer, blocks
        kept.append(ran._replace(tape=None))
        return ran.out, *ran.means

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor, *dmeans: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, counts, indices, lengths, *tape = ctx.saved_tensors
        if watched(dout, *dmeans):
            empty = query.new_empty(0)
            lengths, *tape = (empty if x is None else x for x in (lengths, *tape))
            dmeans = dmeans or (empty,) * 3
            grads = _layer_backward(dout, query, key, value, counts, indices, lengths, *dmeans, *tape, ctx.layer.spec.text)
        else:
            with on_device(dout):
                grads = ctx.layer.backward(Tape.of(tape), dout, ctx.blocks, dmeans)
        return *grads, None, None, None, None


# The operators. They return lists of tensors of which some are empty: what a spec does not have, and what is one of the inputs.


def _outputs(spec: LayerSpec, query: Tensor, text_mask: Tensor | None, given: Tensor | None, device: torch.device | str) -> list[Tensor]:
    """Uninitialised tensors such as the operator ``layer`` returns, on ``device``: out, counts, indices, lengths, useful, exact mass,
    offsets of the queries' and of the keys' tiles, the tiles' means, and the tape.

    Args:
        given: the counts of a selection to attend to.
    """
    config, batch, heads, kv_heads, dim = spec.config, query.shape[0], spec.heads, spec.kv_heads, spec.head_dim
    cut, kv_cut = spec.cuts
    wide = torch.float64 if spec.dtype == torch.float64 else torch.float32
    video, kv_video, parts = cut.num_video_tiles, kv_cut.num_video_tiles, config.compensation_parts
    estimates = spec.estimates
    masked = text_mask is not None and bool(kv_cut.dense)
    whole = masked and config.pad_type != "none"

    def new(*shape: int, dtype: torch.dtype = torch.int32, here: bool = True) -> Tensor:
        return torch.empty(shape if here else (0,), dtype=dtype, device=device)

    def tokens(number: int, of_heads: int = heads, here: bool = True) -> Tensor:
        if not here:
            return new(0, dtype=spec.dtype)
        row = of_heads * dim
        by_token = query.stride(1) < query.stride(2)
        strides = (number * row, dim, row, 1) if by_token else (number * row, number * dim, dim, 1)
        return torch.empty_strided((batch, of_heads, number, dim), strides, dtype=spec.dtype, device=device)

    lists = tuple(given.shape[:2]) if given is not None else (
        (batch, 1 if config.mask_share_within_head else heads) if spec.chooses else (batch if whole else 1, 1))
    rows = spec.layout.length if spec.rows is None else sum([count for _, count in spec.rows])
    slots = cut.num_slots if spec.rows is None else rows
    found = [tokens(rows), new(*lists, cut.num_tiles), new(*lists, cut.num_tiles, kv_cut.num_tiles),
             new(batch, 1, kv_cut.num_tiles, here=masked and not whole), new(batch, heads, dtype=torch.bool, here=estimates),
             new(batch, heads, video, dtype=wide, here=estimates), new(1, 1, cut.num_tiles + 1, here=cut.tile_length is None),
             new(1, 1, kv_cut.num_tiles + 1, here=kv_cut.tile_length is None),
             *[new(batch, of_heads, tiles, dim, dtype=spec.dtype, here=spec.means)
               for of_heads, tiles in ((heads, video), (kv_heads, kv_video), (kv_heads, kv_video))]]
    if not spec.recorded:
        return found
    moves = cut.moves or kv_cut.moves
    plain = estimates and choose_backend(spec.impl, query.device, spec.dtype, dim, parts).by_torch("estimate")
    units = batch, kv_heads, kv_video * parts
    mean: dict[str, Any] = dict(dtype=wide if plain else spec.dtype)
    number: dict[str, Any] = dict(dtype=wide, here=estimates)
    return [*found, tokens(slots, here=moves), tokens(kv_cut.num_slots, kv_heads, moves), tokens(kv_cut.num_slots, kv_heads, moves),
            tokens(slots), new(batch, heads, slots, dtype=wide), tokens(cut.num_slots, here=estimates),
            new(batch, heads, cut.num_slots, **number), new(batch, heads, cut.num_slots, **number),
            new(batch, heads, video, kv_video * parts, **number),
            new(batch, heads, video, kv_video * parts, dtype=wide if plain else torch.bfloat16, here=estimates), new(*units, **number),
            new(batch, kv_heads, kv_cut.num_slots, here=estimates and parts > 1), new(*units, dim, **mean, here=estimates),
            new(*units, dim, **mean, here=estimates), tokens(cut.num_slots, here=estimates and spec.rows is not None)]


def _kept_to(found: Sequence[Tensor | None], expected: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """``found`` as new tensors with the strides of ``expected``."""
    own = []
    for x, like in zip(found, expected):
        if x is None or not like.numel() and like.dim() == 1:
            own.append(torch.empty_like(like, device=inputs[0].device))
        elif x.stride() != like.stride() or any([x.data_ptr() == other.data_ptr() for other in (*inputs, *own)]):
            own.append(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=x.device).copy_(x))
        else:
            own.append(x)
    return own


@torch.library.custom_op(f"{NAMESPACE}::layer", mutates_args=())
def _layer(query: Tensor, key: Tensor, value: Tensor, text_mask: Tensor | None, counts: Tensor | None, indices: Tensor | None,
           lengths: Tensor | None, useful: Tensor | None, spec: str) -> list[Tensor]:
    of = LayerSpec.from_text(spec)
    layer = prepared(of, query.device)
    selection = None if counts is None or indices is None else Selection(layer.fixed.relisted(counts, indices, lengths), useful=useful)
    with on_device(query), torch.no_grad():
        ran = layer.run(query, key, value, text_mask, selection)
    blocks, fixed = ran.selection.blocks, layer.fixed
    offsets = [x.clone() if isinstance(x, Tensor) else None for x in (blocks.q_offsets, blocks.kv_offsets)]
    means = ran.means or (None,) * 3
    exact_mass = None if ran.mass is None else ran.mass.tensor()
    found = [ran.out, blocks.counts, blocks.indices, blocks.kv_lengths, ran.selection.useful, exact_mass, *offsets, *means]
    expected = _outputs(of, query, text_mask, counts, "meta")
    inputs = [x for x in (query, key, value, counts, indices, lengths, useful, fixed.lists.counts, fixed.lists.indices) if x is not None]
    return _kept_to([*found, *(() if ran.tape is None else ran.tape.flat)], expected, inputs)


@_layer.register_fake
def _(query, key, value, text_mask, counts, indices, lengths, useful, spec):
    return _outputs(LayerSpec.from_text(spec), query, text_mask, counts, query.device)


# Every tensor by itself: gradients of several results at once find no way through lists of tensors.
_TAPE = "".join([f"Tensor tape{number}, " for number in range(len(Tape._fields) - 1 + len(Tail._fields))])
_BACKWARD = ("(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor counts, Tensor indices, Tensor lengths, Tensor dq_means, "
             f"Tensor dk_means, Tensor dv_means, {_TAPE}str spec) -> (Tensor, Tensor, Tensor)")


@torch.library.custom_op(f"{NAMESPACE}::layer_backward", mutates_args=(), schema=_BACKWARD)
def _layer_backward(dout, query, key, value, counts, indices, lengths, *rest):
    *tape, spec = rest[3:]
    layer = prepared(LayerSpec.from_text(spec), query.device)
    blocks = layer.fixed.relisted(counts, indices, _present(lengths))
    kept = [_present(x) for x in tape]
    kept[:3] = [x if found is None else found for x, found in zip((query, key, value), kept)]
    with on_device(query), torch.no_grad():
        grads = layer.backward(Tape.of(kept), dout, blocks, [_present(x) for x in rest[:3]])
    return tuple(_kept_to(grads, [torch.empty_like(x, device="meta") for x in (query, key, value)], [query, key, value]))


@_layer_backward.register_fake
def _(dout, query, key, value, *_):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _present(x: Tensor) -> Tensor | None:
    """None in the place of what an operator had to return something for."""
    return None if x.dim() == 1 and not x.numel() else x


def _save(ctx, inputs, output) -> None:
    query, key, value, *_, spec = inputs
    _, counts, indices, lengths, _, _, _, _, _, _, _, *tape = output
    ctx.save_for_backward(query, key, value, counts, indices, lengths, *tape)
    ctx.spec = spec


def _differentiate(ctx, grads):
    query, key, value, counts, indices, lengths, *tape = ctx.saved_tensors
    dout, dmeans = grads[0], grads[8:11]
    if all([x is None for x in (dout, *dmeans)]):
        return (None,) * 9
    dout = torch.zeros_like(query) if dout is None else dout
    dmeans = [query.new_empty(0) if x is None else x for x in dmeans]
    return *_layer_backward(dout, query, key, value, counts, indices, lengths, *dmeans, *tape, ctx.spec), *(None,) * 6


_layer.register_autograd(_differentiate, setup_context=_save)


def _one_by_one(operator):
    """How torch.vmap runs an operator: one call for each entry of the mapped dimension."""
    def run(info, in_dims, *args):
        def entry(x, dim, number):
            if isinstance(x, (list, tuple)):
                return [entry(of, at, number) for of, at in zip(x, dim)]
            return x.select(dim, number) if isinstance(x, Tensor) and dim is not None else x

        every = [operator(*[entry(x, dim, number) for x, dim in zip(args, in_dims)]) for number in range(info.batch_size)]
        kind = type(every[0])
        return kind([torch.stack(parts) for parts in zip(*every)]), kind([0] * len(every[0]))

    return run


for _operator in (_layer, _layer_backward):
    _operator.register_vmap(_one_by_one(_operator))


def _operate(spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor, text_mask: Tensor | TextMask | None, selection: Selection | None
             ) -> LayerResult:
    """A layer by its operator, for all who watch."""
    valid = text_mask.valid if isinstance(text_mask, TextMask) else text_mask
    given: tuple = (None,) * 4
    if selection is not None:
        blocks = selection.blocks
        given = blocks.counts, blocks.indices, blocks.kv_lengths, selection.useful
    out, counts, indices, lengths, useful, exact_mass, q_offsets, kv_offsets, *rest = _layer(query, key, value, valid, *given, spec.text)
    cut, kv_cut = spec.cuts
    estimated = _present(exact_mass) is not None
    blocks = BlockLists(
        counts, indices, cut.tile_length or q_offsets, kv_cut.tile_length or kv_offsets,
        _present(lengths) if spec.layout == spec.kv_layout else None, _present(lengths), num_kv_blocks=kv_cut.num_tiles,
        max_q_length=cut.max_tile_length, max_kv_length=kv_cut.max_tile_length)
    return LayerResult(out, Selection(blocks, useful=_present(useful)), None, ExactMass(exact_mass) if estimated else None,
                       tuple(rest[:3] if spec.means else ()))
