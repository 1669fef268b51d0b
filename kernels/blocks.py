"""BlockLists: the one description of a block-sparsity pattern, and its conversions to and from everyone else's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import block_forms
from .block_forms import block_bounds, in_range, prefix_mask, scatter_mask
from .checks import require_int, require_integers, require_mask, require_values

# Attributes beside the fields, which the package sets on patterns that it makes itself.
KNOWN = ("_bounds", "_covers")
# The most blocks of a printed picture, and the signs of kept blocks and of others.
PICTURE = (16, 48)
KEPT, LEFT_OUT = "#", "."
TENSORS = ("counts", "indices", "q_offsets", "kv_offsets", "q_lengths", "kv_lengths")


@dataclass(frozen=True, eq=False, repr=False)
class BlockLists:
    """For every (batch, head, query block), the key blocks that it attends to.

    Query tokens and key tokens are each cut into consecutive blocks. The leading two dimensions of every tensor are
    ``[B or 1, H or 1]``; a 1 means shared. ``H`` is the number of query heads or of key/value heads. Wherever an int is wanted, one of
    numpy's is too.

    The constructor holds the tensors themselves: what is written to them is the pattern of later calls. ``clone`` gives the same lists in
    memory of their own, which conversions from other forms have too.

    Args:
        counts: int32 ``[B|1, H|1, Nq]``. How many key blocks the query block attends to; 0 is legal, and what lies outside [0, capacity]
            counts as the nearer bound.
        indices: int32 ``[B|1, H|1, Nq, capacity]``. Their ids, each at most once (which is not checked), in any order. Entries past
            ``counts`` are ignored, whatever they hold, and ids out of range are absent.
        q_offsets: a uniform block size in tokens (the last block may be shorter), or int32 ``[Nq + 1]`` or
            ``[B|1, H|1, Nq + 1]``: block i owns the tokens from ``q_offsets[i]`` up to ``q_offsets[i + 1]``. Offsets that lead outside
            the tensors are cut there, and a block whose end lies before its start is empty.
        kv_offsets: the same for the key blocks. They must not overlap, which offsets that go back would make them do: the forward would
            count such keys twice, and their gradients would depend on the implementation.
        q_lengths: int32 ``[Nq]`` or ``[B|1, H|1, Nq]``, or None. Only the first ``q_lengths[i]`` tokens of block i are
            real; the rows of the others give out = 0 and lse = -inf. A length outside [0, the block's tokens] counts as the nearer bound.
        kv_lengths: the same for the key blocks; the keys past it are never attended to.
        num_kv_blocks: number of key blocks. With a uniform ``kv_offsets`` it may be left out; ``to_mask`` and what is built on it then
            refuse.
        max_q_length: an upper bound on the tokens of a query block, known on the host; a block's tokens past it count as not real. The
            size when uniform. For ragged offsets on a GPU, leaving it out makes the constructor read them back, which synchronises.
        max_kv_length: the same for key blocks.

    Raises:
        TypeError: a field is not a tensor, or has the wrong dtype.
        ValueError: shapes or devices that do not fit one another. Values (index bounds, monotonic offsets) are not read;
            ``check_values`` does that.
    """

    counts: Tensor
    indices: Tensor
    q_offsets: int | Tensor
    kv_offsets: int | Tensor
    q_lengths: Tensor | None = None
    kv_lengths: Tensor | None = None
    num_kv_blocks: int | None = None
    # None is for the constructor only, which settles both.
    max_q_length: int = None  # type: ignore[assignment]
    max_kv_length: int = None  # type: ignore[assignment]

    # No fields, and only of patterns that the package makes: see ``_bounds_of``, and ``covering``, of queries and of
    # keys. A user's tensors may be written to.
    _bounds: ClassVar[dict | None] = None
    _covers: ClassVar[tuple[int, int]] = (0, 0)

    def __post_init__(self) -> None:
        settled = block_forms.settled_fields(self.counts, self.indices, self.q_offsets, self.kv_offsets, self.q_lengths, self.kv_lengths,
                                             self.num_kv_blocks, self.max_q_length, self.max_kv_length)
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    def relisted(self, counts: Tensor, indices: Tensor, lengths: Tensor | None = None, starts: Tensor | None = None, tokens: int = 0, *,
                 kv_lengths: Tensor | None = None) -> BlockLists:
        """The same blocks with other lists and, where given, other valid lengths: ``lengths [B|1, H|1, Nq]`` of both axes, or
        ``kv_lengths`` of the keys alone; then also with the blocks' first tokens, of the same shape, in sequences of ``tokens``.

        For use inside the package, on every call: what is handed over follows from these blocks, and is not checked again; and nobody
        writes to these blocks' tensors.
        """
        new = object.__new__(BlockLists)
        values = vars(new)
        # Where its blocks lie is found once for all patterns that are made of this one.
        if self._bounds is None:
            vars(self)["_bounds"] = {}
        values.update(vars(self), counts=counts, indices=indices)
        if kv_lengths is not None:
            bounds = {} if starts is None else {(False, self.num_kv_blocks, tokens, self.max_kv_length): (starts, kv_lengths)}
            values.update(kv_lengths=kv_lengths, _bounds=bounds, _covers=(self._covers[0], 0))
        if lengths is not None:
            bounds = {} if starts is None else {(True, self.num_q_blocks, tokens, self.max_q_length): (starts, lengths)}
            values.update(q_lengths=lengths, kv_lengths=lengths, _bounds=bounds, _covers=(0, 0))
        return new

    def covering(self, tokens: int) -> BlockLists:
        """These blocks, said to hold each of the first ``tokens`` tokens of both axes, so that kernels need not clear what lies between
        blocks.

        For use inside the package, where that is known; what is ``relisted`` from them says so too, but for other lengths.
        """
        vars(self)["_covers"] = tokens, tokens
        return self

    def __getstate__(self) -> dict:
        # A copy's tensors are the user's, who may write to them.
        return {name: value for name, value in vars(self).items() if name not in KNOWN}

    # Properties

    @property
    def num_q_blocks(self) -> int:
        return self.counts.shape[2]

    @property
    def capacity(self) -> int:
        """The longest list that fits."""
        return self.indices.shape[3]

    @property
    def device(self) -> torch.device:
        return self.counts.device

    def density(self) -> Tensor:
        """Fraction of the (query block, key block) pairs that are kept: a float32 scalar tensor, not synchronised."""
        blocks = self._known_kv_blocks("density")
        return in_range(self.indices, self._used(), blocks).sum(dtype=torch.float32) / (self.counts.numel() * blocks)

    def q_bounds(self, q_len: int) -> tuple[Tensor, Tensor]:
        """First token and number of real tokens of each query block: int32 ``[B|1, H|1, Nq]`` each; shared, not to be written to."""
        return self._bounds_of(self.q_offsets, self.q_lengths, self.num_q_blocks, q_len, self.max_q_length)

    def kv_bounds(self, kv_len: int) -> tuple[Tensor, Tensor]:
        """First token and number of real tokens of each key block: int32 ``[B|1, H|1, Nk]`` each; shared, not to be written to."""
        blocks = -(-kv_len // self.max_kv_length) if self.num_kv_blocks is None else self.num_kv_blocks
        return self._bounds_of(self.kv_offsets, self.kv_lengths, blocks, kv_len, self.max_kv_length)

    def _bounds_of(self, offsets: int | Tensor, lengths: Tensor | None, blocks: int, tokens: int, longest: int) -> tuple[Tensor, Tensor]:
        """Starts and sizes of an axis' blocks. Where no one writes to the fields, they are computed once: five small launches each time
        would be a third of a layer's host time."""
        kept = self._bounds
        if kept is None:
            return block_bounds(offsets, lengths, blocks, tokens, longest, self.device)
        # Axes that share their offsets and lengths share these.
        key = (offsets is self.q_offsets and lengths is self.q_lengths, blocks, tokens, longest)
        found = kept.get(key)
        if found is None:
            found = block_bounds(offsets, lengths, blocks, tokens, longest, self.device)
            # Tensors of a fake or functional mode are valid inside that mode only, and captured ones belong to the graph.
            if type(found[0]) is Tensor and not (found[0].is_cuda and torch.cuda.is_current_stream_capturing()):
                kept[key] = found
        return found

    def check_values(self, q_len: int, kv_len: int) -> BlockLists:
        """Reads every value back and checks it; returns self. Synchronises the device: for tests and debugging.

        Raises:
            TypeError: q_len or kv_len is not an int.
            ValueError: a count outside [0, capacity], an id out of range or listed twice, offsets that do not ascend from 0
                to the sequence's length, or a length beyond its block.
        """
        q_len, kv_len = require_int("q_len", q_len, 0), require_int("kv_len", kv_len, 0)
        require_values("counts", self.counts)
        nk = self.kv_bounds(kv_len)[0].shape[-1]
        block_forms.check_list_values(self.counts, self.indices, nk)
        block_forms.check_axis_values("q", self.q_offsets, self.q_lengths, self.num_q_blocks, q_len, self.max_q_length)
        block_forms.check_axis_values("kv", self.kv_offsets, self.kv_lengths, nk, kv_len, self.max_kv_length)
        return self

    @classmethod
    def checked(cls, *args, q_len: int, kv_len: int, **fields) -> BlockLists:
        """The constructor followed by ``check_values``. Synchronises the device."""
        return cls(*args, **fields).check_values(q_len, kv_len)

    # From and to other forms

    @classmethod
    def from_mask(cls, mask: Tensor, q_offsets: int | Tensor, kv_offsets: int | Tensor, *, capacity: int | None = None,
                  **fields) -> BlockLists:
        """From a bool mask ``[Nq, Nk]``, ``[H, Nq, Nk]`` or ``[B, H, Nq, Nk]``; True keeps the block. Ids come out ascending.

        ``capacity`` bounds the longest list (default Nk, which never needs to know the values); a row with more True entries
        than that loses its last ones. ``fields`` are the constructor's, num_kv_blocks being the mask's. Does not synchronise.
        """
        mask = block_forms.four_dimensional("mask", require_mask("mask", mask), "Nk")
        nk = mask.shape[-1]
        if fields.setdefault("num_kv_blocks", nk) != nk:
            raise ValueError(f"num_kv_blocks must be the mask's {nk} columns or left out, got {fields['num_kv_blocks']!r}")
        lists = block_forms.mask_lists(mask, None if capacity is None else require_int("capacity", capacity, 0))
        return cls(*lists, q_offsets, kv_offsets, **fields)

    def to_mask(self) -> Tensor:
        """bool ``[B|1, H|1, Nq, Nk]``, True where the block is kept. Does not synchronise."""
        return scatter_mask(self.indices, self._used(), self._known_kv_blocks("to_mask"))

    @classmethod
    def from_topk(cls, indices: Tensor, q_offsets: int | Tensor, kv_offsets: int | Tensor, **fields) -> BlockLists:
        """From int32 or int64 ids ``[Nq, k]``, ``[H, Nq, k]`` or ``[B, H, Nq, k]``, the same number k for every query block.

        Ids out of range are absent, whatever the number.
        """
        ids = block_forms.four_dimensional("indices", require_integers("indices", indices), "k")
        ids = ids.clone() if ids.dtype == torch.int32 else block_forms.to_int32(ids)
        return cls(torch.full(ids.shape[:3], ids.shape[3], dtype=torch.int32, device=ids.device), ids, q_offsets, kv_offsets, **fields)

    def to_topk(self) -> Tensor:
        """int32 ids ``[B|1, H|1, Nq, capacity]`` with -1 in the entries past each list's count."""
        return self.indices.masked_fill(~self._used(), -1)

    @classmethod
    def from_bsr(cls, indptr: Tensor, indices: Tensor, q_offsets: int | Tensor, kv_offsets: int | Tensor, *, num_kv_blocks: int,
                 capacity: int | None = None, **fields) -> BlockLists:
        """From block-sparse rows shared by all heads: row i keeps ``indices[indptr[i]:indptr[i + 1]]``.

        Args:
            indptr: int32 or int64 ``[Nq + 1]``. Entries outside [0, nnz] are cut there, and a row that ends before it begins is empty;
                values are not read to refuse them.
            indices: int32 or int64 ``[nnz]``. Ids out of range are absent, whatever the number.
            num_kv_blocks: number of block columns.
            capacity: bound on the longest row; default num_kv_blocks. Does not synchronise.
        """
        num_kv_blocks = require_int("num_kv_blocks", num_kv_blocks, 0)
        lists = block_forms.bsr_lists(indptr, indices, num_kv_blocks if capacity is None else require_int("capacity", capacity, 0))
        return cls(*lists, q_offsets, kv_offsets, num_kv_blocks=num_kv_blocks, **fields)

    def to_bsr(self, batch: int = 0, head: int = 0) -> tuple[Tensor, Tensor]:
        """(indptr int32 ``[Nq + 1]``, indices int32 ``[nnz]``) of one batch element and head. Synchronises: nnz is a shape.

        ``batch`` and ``head`` count the lists' own, of which there is one where they are shared; negative ones from the end.

        Raises:
            TypeError, ValueError: not an int, or out of range.
        """
        for name, value, number in (("batch", batch, self.counts.shape[0]), ("head", head, self.counts.shape[1])):
            if require_int(name, value, -number) >= number:
                raise ValueError(f"{name} must lie in [{-number}, {number}), got {value}")
        counts, indices = require_values("counts", self.counts)[batch, head], self.indices[batch, head]
        indptr = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
        indptr[1:] = counts.cumsum(0)
        return indptr, indices[prefix_mask(counts, self.capacity)]

    @classmethod
    def from_block_mask(cls, block_mask) -> BlockLists:
        """From ``torch.nn.attention.flex_attention.BlockMask``.

        Where it holds partial blocks under a ``mask_mod``, this synchronises and evaluates the ``mask_mod`` for every pair of tokens: torch
        calls a block partial also where just the sequence ends inside it.

        Raises:
            TypeError: not a BlockMask.
            ValueError: its ``mask_mod`` masks inside a partial block, which lists of blocks cannot say.
        """
        return cls.from_mask(block_forms.kept_blocks(block_mask), *block_mask.BLOCK_SIZE)

    def to_block_mask(self, q_len: int, kv_len: int):
        """A FlexAttention ``BlockMask`` of full blocks for sequences of ``q_len`` and ``kv_len`` tokens.

        Lists per key/value head stay so; FlexAttention itself takes one head or all query heads.

        Raises:
            TypeError: q_len or kv_len is not an int.
            ValueError: the blocks are ragged or have valid lengths, where FlexAttention's blocks are uniform; q_len or kv_len is below 1 or
                has not as many blocks.
        """
        if any(isinstance(x, Tensor) for x in (self.q_offsets, self.kv_offsets, self.q_lengths, self.kv_lengths)):
            raise ValueError("to_block_mask requires uniform blocks without valid lengths; FlexAttention has no ragged blocks")
        # FlexAttention itself divides by the number of blocks.
        q_len, kv_len = require_int("q_len", q_len, 1), require_int("kv_len", kv_len, 1)
        for name, tokens, size, number in (("q_len", q_len, self.max_q_length, self.num_q_blocks),
                                           ("kv_len", kv_len, self.max_kv_length, self.num_kv_blocks)):
            if number is not None and -(-tokens // size) != number:
                raise ValueError(f"{name} must be cut into {number} blocks of {size} tokens, got {tokens}")
        return block_forms.full_block_mask(self.counts, self.indices, (self.max_q_length, self.max_kv_length), (q_len, kv_len))

    # The other direction

    def transpose(self) -> BlockLists:
        """Which query blocks attend to each key block, ids ascending."""
        return BlockLists.from_mask(
            self.to_mask().mT, self.kv_offsets, self.q_offsets, q_lengths=self.kv_lengths, kv_lengths=self.q_lengths,
            max_q_length=self.max_kv_length, max_kv_length=self.max_q_length).clone()

    # Places and print

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BlockLists:
        """The same lists on ``device``; self where they are there already."""
        moved: dict[str, Any] = {name: x.to(torch.device(device), non_blocking=non_blocking) for name, x in self._tensors().items()}
        return self if moved["counts"] is self.counts else replace(self, **moved)

    def clone(self) -> BlockLists:
        """The same lists in memory of their own."""
        made: dict[int, Tensor] = {}
        # Axes that share a tensor go on sharing one.
        cloned: dict[str, Any] = {name: made.setdefault(id(x), x.clone()) for name, x in self._tensors().items()}
        return replace(self, **cloned)

    def to_fields(self) -> tuple:
        """The constructor's fields as an operator takes them, tensors, ints and None: ``from_fields`` of them are these lists.

        (counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length, max_kv_length), where offsets of None
        mean uniform blocks of the longest one's size.
        """
        ragged = [x if isinstance(x, Tensor) else None for x in (self.q_offsets, self.kv_offsets)]
        return (self.counts, self.indices, *ragged, self.q_lengths, self.kv_lengths, self.num_kv_blocks, self.max_q_length,
                self.max_kv_length)

    @classmethod
    def from_fields(cls, counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length,
                    max_kv_length) -> BlockLists:
        """The BlockLists on which ``to_fields`` was called; torch.compile can follow it."""
        q_offsets = max_q_length if q_offsets is None else q_offsets
        kv_offsets = max_kv_length if kv_offsets is None else kv_offsets
        return cls(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length, max_kv_length)

    def __repr__(self) -> str:
        """Sizes only; reads no values, so it does not synchronise."""
        return self._described()

    def __str__(self) -> str:
        """Sizes, and on a CPU also the density and a small picture of the first batch element's and head's mask."""
        counts, number, text = self.counts, self.num_kv_blocks, self._described()
        # A tensor that is fake or traced has no values.
        if number is None or counts.device.type != "cpu" or type(counts) is not Tensor or not counts.numel():
            return text
        if number:
            text = f"{text[:-1]}, density {float(self.density()):.3f})"
        picture = self.to_mask()[0, 0, :PICTURE[0], :PICTURE[1]].tolist()
        lines = ["".join(KEPT if kept else LEFT_OUT for kept in row) + (" ..." if number > PICTURE[1] else "") for row in picture]
        return "\n".join([text, *lines, *["..."][:self.num_q_blocks > PICTURE[0]]])

    def _described(self) -> str:
        counts, number = self.counts, self.num_kv_blocks
        q_size, kv_size = (f"up to {longest} tokens" if isinstance(offsets, Tensor) else f"{longest} tokens" for offsets, longest in (
            (self.q_offsets, self.max_q_length), (self.kv_offsets, self.max_kv_length)))
        (batch, heads, rows), capacity = counts.shape, self.capacity
        shared = [f"{name} {size}" if size != 1 else f"any {name}" for name, size in (("batch", batch), ("heads", heads))]
        listed = f"{capacity} key blocks" if number is None else f"{capacity} of {number} key blocks"
        return f"BlockLists({', '.join(shared)}: {rows} query blocks of {q_size}, up to {listed} of {kv_size} each, on {counts.device})"

    def _tensors(self) -> dict[str, Tensor]:
        """The fields that are tensors, by name."""
        return {name: x for name in TENSORS if isinstance(x := getattr(self, name), Tensor)}

    def _used(self) -> Tensor:
        return prefix_mask(self.counts, self.capacity)

    def _known_kv_blocks(self, wanted_by: str) -> int:
        if self.num_kv_blocks is None:
            raise ValueError(f"num_kv_blocks must be given for {wanted_by} when kv_offsets is a uniform block size, got None")
        return self.num_kv_blocks
