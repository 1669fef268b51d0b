"""Reuse: selections of tiles that serve several steps, for each of a step's forwards its own; where layers find them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ssta.kernels import BlockLists
from ssta.selection import Selection

from .progress import Generation, Step, is_fake

# Of a step. Some pipelines call the model for one part of a long video after the other; what is kept must not pile up.
_FORWARDS_KEPT = 8


class KeptSelection:
    """One layer's selection for one of a step's forwards, and the query's shape that it was for; None before it was chosen.

    A bit for each pair of tiles: lists, whose rows of text hold every tile, are 32 times as much, and ascend in either form.
    """

    def __init__(self) -> None:
        self._bits: Tensor | None = None
        # What else there is to the lists: without lists, or where a compiled graph must leave them behind as arguments of from_mask.
        self._rest: BlockLists | None = None
        self._fields: tuple | None = None
        self._shape: tuple[int, ...] | None = None
        # The heads whose other tiles are estimated.
        self._useful: Tensor | None = None

    def selection(self, shape: tuple[int, ...]) -> Selection | None:
        """What was chosen for a query of ``shape``."""
        if self._shape != shape or self._bits is None:
            return None
        if self._fields is None:
            assert self._rest is not None
            lists = BlockLists.from_mask(_unpacked(self._bits, _columns(self._rest)), 1, 1)
            return Selection(self._rest.relisted(lists.counts, lists.indices), useful=self._useful)
        tiles, q_offsets, kv_offsets, q_lengths, kv_lengths, max_q_length, max_kv_length = self._fields
        return Selection(BlockLists.from_mask(_unpacked(self._bits, tiles), q_offsets, kv_offsets, q_lengths=q_lengths,
                                              kv_lengths=kv_lengths, max_q_length=max_q_length, max_kv_length=max_kv_length),
                         useful=self._useful)

    def keep(self, selection: Selection, shape: tuple[int, ...]) -> None:
        of = selection.blocks
        self._bits, self._shape, self._useful = _packed(of.to_mask()), shape, selection.useful
        if torch.compiler.is_compiling():
            self._fields = (_columns(of), of.q_offsets, of.kv_offsets, of.q_lengths, of.kv_lengths, of.max_q_length, of.max_kv_length)
        else:
            self._rest = of.relisted(of.counts, of.indices.new_empty(0).expand(*of.counts.shape, 0))

    def drop(self) -> None:
        self._bits = self._rest = self._fields = self._shape = self._useful = None


def _columns(blocks: BlockLists) -> int:
    """Lists over tiles have as many columns as rows, and need not say so."""
    return blocks.num_kv_blocks or blocks.num_q_blocks


def _packed(mask: Tensor) -> Tensor:
    """uint8 ``[..., ceil(N / 8)]`` of bool ``[..., N]``."""
    rows = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (rows.to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8)


def _unpacked(bits: Tensor, length: int) -> Tensor:
    """bool ``[..., length]``, what was packed."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[..., None] >> places & 1).flatten(-2)[..., :length].bool()


class Holder:
    """Where a layer's processor finds the ``KeptSelection`` of its thread's forward; None = choose, and keep nothing.

    ``kept`` serves generation; ``frozen``, which goes before, one forward of a training and its recomputation (``frozen_checkpoint``).
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    def __reduce__(self) -> tuple:
        return Holder, ()

    @property
    def kept(self) -> KeptSelection | None:
        return getattr(self._thread, "kept", None)

    @kept.setter
    def kept(self, kept: KeptSelection | None) -> None:
        self._thread.kept = kept

    @property
    def frozen(self) -> KeptSelection | None:
        return getattr(self._thread, "frozen", None)

    @frozen.setter
    def frozen(self, kept: KeptSelection | None) -> None:
        self._thread.frozen = kept


class _Forward:
    """One of a step's forwards: what it was called with and at which step its layers chose."""

    def __init__(self) -> None:
        self.signature: tuple | None = None
        self.place = 0
        self.layers: dict[str, KeptSelection] = {}

    def drop(self) -> None:
        for kept in self.layers.values():
            kept.drop()


class Reuse:
    """What one thread's forwards of one model have chosen in the generation in progress.

    A forward is known by its number among those of its step, because guidance calls the model in the same order at every step, and by what
    it is called with: a prompt at another address is another prompt.
    """

    def __init__(self) -> None:
        self._generation: Generation | None = None
        self._position = -1
        self._number = -1
        self._forwards: list[_Forward] = []

    def begin(self, step: Step, steps: int, signature: tuple | None, layers: Mapping[str, Holder]) -> bool:
        """Gives ``layers`` what they are to use in the forward that begins; whether they choose anew.

        Args:
            step: the forward's.
            steps: for how many a selection serves.
            signature: what the forward was called with; None = nothing is kept of it, nor used.
            layers: their holders, by name.
        """
        if step.generation is not self._generation:
            self.drop()
            self._generation, self._position = step.generation, -1
        self._number = self._number + 1 if step.position == self._position else 0
        self._position = step.position
        if signature is None or self._number >= _FORWARDS_KEPT:
            choose_anew(layers.values())
            return True
        while self._number >= len(self._forwards):
            self._forwards.append(_Forward())
        forward = self._forwards[self._number]
        chosen = forward.signature != signature or not 0 <= step.position - forward.place < steps
        if chosen:
            # Layers that a cache skips now choose when they next run.
            forward.drop()
            forward.signature, forward.place = signature, step.position
        for name, holder in layers.items():
            holder.kept = forward.layers.setdefault(name, KeptSelection())
        return chosen

    def end(self) -> None:
        """Of a forward of the generation's last step: drops what it kept."""
        if 0 <= self._number < len(self._forwards):
            self._forwards[self._number].drop()

    def drop(self) -> None:
        """Frees everything that was kept."""
        for forward in self._forwards:
            forward.drop()
        self._forwards = []


def choose_anew(layers: Iterable[Holder]) -> None:
    """Lets the layers of this thread's forward choose, and keep nothing."""
    for holder in layers:
        holder.kept = None


def signature_of(arguments: Mapping[str, Any], *others: object) -> tuple | None:
    """What must be the same for a selection to serve again: shapes and devices of a forward's tensors, where in memory its prompts and
    their masks lie, and ``others``. None where tensors hold no values, whose addresses say nothing.

    Values lie on the device, and are not looked at. The prompts are the arguments whose names begin with "encoder_", as all of diffusers'
    transformers name them.
    """
    parts: list[tuple] = [others]
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        if value.is_meta or is_fake(value):
            return None
        prompt = None
        if name.startswith("encoder_"):
            prompt = value.data_ptr(), None if value.is_inference() else value._version
        parts.append((name, value.shape, value.device, prompt))
    return tuple(parts)


def capturing() -> bool:
    """Whether a CUDA graph records what is done: lists in its memory would be overwritten by the next replay."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
