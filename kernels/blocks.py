"""BlockLists: the one description of a block-sparsity pattern, and its conversions to and from everyone else's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .block_masks import full_block_mask, in_range, kept_blocks, prefix_mask, scatter_mask


@dataclass(frozen=True, eq=False)
class BlockLists:
    """For every (batch, head, query block), the key blocks that it attends to.

    Query tokens and key tokens are each cut into consecutive blocks. The leading two dimensions of every tensor are
    ``[B or 1, H or 1]``; a 1 means shared. ``H`` is the number of query heads or of key/value heads.

    Args:
        counts: int32 ``[B|1, H|1, Nq]``. How many key blocks the query block attends to; 0 is legal.
        indices: int32 ``[B|1, H|1, Nq, capacity]``. Their ids, each at most once, in any order. Entries past ``counts``
            are ignored, whatever they hold.
        q_offsets: a uniform block size in tokens (the last block may be shorter), or int32 ``[Nq + 1]`` or
            ``[B|1, H|1, Nq + 1]``: block i owns the tokens from ``q_offsets[i]`` up to ``q_offsets[i + 1]``.
        kv_offsets: the same for the key blocks.
        q_lengths: int32 ``[Nq]`` or ``[B|1, H|1, Nq]``, or None. Only the first ``q_lengths[i]`` tokens of block i are
            real; the rows of the others give out = 0 and lse = -inf.
        kv_lengths: the same for the key blocks; the keys past it are never attended to.
        num_kv_blocks: number of key blocks. With a uniform ``kv_offsets`` it may be left out; ``to_mask`` and what is built on it then
            refuse, and a backward pass transposes the lists anew for every call.
        max_q_length: an upper bound on the tokens of a query block, known on the host. Taken from the size when uniform.
            For ragged offsets on a GPU, leaving it out makes the constructor read them back, which synchronises.
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
    max_q_length: int | None = None
    max_kv_length: int | None = None

    def __post_init__(self) -> None:
        _require_int32("counts", self.counts, 3)
        _require_int32("indices", self.indices, 4)
        if self.indices.shape[:3] != self.counts.shape:
            raise ValueError(f"indices must have counts' shape {tuple(self.counts.shape)} plus a capacity, got {tuple(self.indices.shape)}")
        if self.indices.device != self.counts.device:
            raise ValueError(f"indices must be on counts' device {self.counts.device}, got {self.indices.device}")
        nk = self.num_kv_blocks
        for name, least in (("num_kv_blocks", 0), ("max_q_length", 1), ("max_kv_length", 1)):
            _require_int(name, getattr(self, name), least, optional=True)
        if isinstance(self.kv_offsets, Tensor):
            if self.kv_offsets.dim() == 0 or self.kv_offsets.shape[-1] == 0:
                raise ValueError(f"kv_offsets must hold at least one entry, got shape {tuple(self.kv_offsets.shape)}")
            implied = self.kv_offsets.shape[-1] - 1
            if nk is not None and nk != implied:
                raise ValueError(f"num_kv_blocks must be {implied} for these kv_offsets, got {nk}")
            nk = implied
        self._settle_axis("q", self.counts.shape[2])
        self._settle_axis("kv", nk)
        object.__setattr__(self, "num_kv_blocks", nk)

    def _settle_axis(self, axis: str, blocks: int | None) -> None:
        """Checks one axis' fields and stores them in their full form: three dimensions, a known longest block."""
        offsets, lengths = getattr(self, f"{axis}_offsets"), getattr(self, f"{axis}_lengths")
        longest = getattr(self, f"max_{axis}_length")
        if isinstance(offsets, Tensor):
            offsets = self._settle_tensor(f"{axis}_offsets", offsets, blocks + 1)
            if longest is None:
                longest = max(int(offsets.diff(dim=-1).max()), 1) if blocks else 1
        elif isinstance(offsets, bool) or not isinstance(offsets, int):
            raise TypeError(f"{axis}_offsets must be an int (a uniform block size) or an int32 tensor, got {type(offsets).__name__}")
        elif offsets < 1:
            raise ValueError(f"{axis}_offsets must be a block size of at least 1 token, got {offsets}")
        else:
            longest = offsets
        if lengths is not None:
            if blocks is None:
                raise ValueError(f"num_{axis}_blocks must be given with {axis}_lengths and a uniform block size")
            lengths = self._settle_tensor(f"{axis}_lengths", lengths, blocks)
            if isinstance(offsets, Tensor) and any(a != b and 1 not in (a, b) for a, b in zip(offsets.shape[:2], lengths.shape[:2])):
                raise ValueError(f"{axis}_lengths must have {axis}_offsets' batch and heads {tuple(offsets.shape[:2])} or 1, "
                                 f"got {tuple(lengths.shape[:2])}")
        object.__setattr__(self, f"{axis}_offsets", offsets)
        object.__setattr__(self, f"{axis}_lengths", lengths)
        object.__setattr__(self, f"max_{axis}_length", longest)

    def _settle_tensor(self, name: str, tensor: Tensor, last: int) -> Tensor:
        if isinstance(tensor, Tensor) and tensor.dim() == 1:
            tensor = tensor[None, None]
        _require_int32(name, tensor, 3)
        if tensor.shape[-1] != last:
            raise ValueError(f"{name} must have {last} entries in its last dimension, got {tuple(tensor.shape)}")
        if tensor.device != self.counts.device:
            raise ValueError(f"{name} must be on counts' device {self.counts.device}, got {tensor.device}")
        return tensor

    def relisted(self, counts: Tensor, indices: Tensor, lengths: Tensor | None = None) -> BlockLists:
        """The same blocks with other lists and, where given, other valid lengths ``[B|1, H|1, Nq]`` of both axes.

        For use inside the package, on every call: what is handed over follows from these blocks, and is not checked again.
        """
        if torch.compiler.is_compiling():
            q_lengths, kv_lengths = (self.q_lengths, self.kv_lengths) if lengths is None else (lengths, lengths)
            return BlockLists(counts, indices, self.q_offsets, self.kv_offsets, q_lengths, kv_lengths, self.num_kv_blocks,
                              self.max_q_length, self.max_kv_length)
        new = object.__new__(BlockLists)
        fields = vars(new)
        fields.update(vars(self), counts=counts, indices=indices)
        # What was derived from the old lists.
        fields.pop("_flipped", None)
        if lengths is not None:
            fields.update(q_lengths=lengths, kv_lengths=lengths)
        return new

    # What it says about itself

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
        """First token and number of real tokens of each query block: int32 ``[B|1, H|1, Nq]`` each."""
        return _bounds(self.q_offsets, self.q_lengths, self.num_q_blocks, q_len, self.device)

    def kv_bounds(self, kv_len: int) -> tuple[Tensor, Tensor]:
        """First token and number of real tokens of each key block: int32 ``[B|1, H|1, Nk]`` each."""
        blocks = self.num_kv_blocks
        if blocks is None:
            blocks = -(-kv_len // self.kv_offsets)
        return _bounds(self.kv_offsets, self.kv_lengths, blocks, kv_len, self.device)

    def check_values(self, q_len: int, kv_len: int) -> BlockLists:
        """Reads every value back and checks it; returns self. Synchronises the device: for tests and debugging.

        Raises:
            ValueError: a count outside [0, capacity], an id out of range or listed twice, offsets that do not ascend from 0
                to the sequence's length, or a length beyond its block.
        """
        nk = self.kv_bounds(kv_len)[0].shape[-1]
        if self.counts.numel() and not 0 <= int(self.counts.min()) <= int(self.counts.max()) <= self.capacity:
            raise ValueError(f"counts must lie in [0, {self.capacity}], got {int(self.counts.min())} to {int(self.counts.max())}")
        used = self._used()
        ids = self.indices[used]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < nk:
            raise ValueError(f"indices must lie in [0, {nk}), got {int(ids.min())} to {int(ids.max())}")
        kept = scatter_mask(self.indices, used, nk).sum(-1)
        if not torch.equal(kept, self.counts.to(kept.dtype)):
            raise ValueError("indices must name each key block at most once in a list, got a repeated id")
        _check_axis_values("q", self.q_offsets, self.q_lengths, self.num_q_blocks, q_len, self.max_q_length)
        _check_axis_values("kv", self.kv_offsets, self.kv_lengths, nk, kv_len, self.max_kv_length)
        return self

    @classmethod
    def checked(cls, *args, q_len: int, kv_len: int, **fields) -> BlockLists:
        """The constructor followed by ``check_values``. Synchronises the device."""
        return cls(*args, **fields).check_values(q_len, kv_len)

    # Boolean masks

    @classmethod
    def from_mask(cls, mask: Tensor, q_offsets: int | Tensor, kv_offsets: int | Tensor, *, capacity: int | None = None,
                  **fields) -> BlockLists:
        """From a bool mask ``[Nq, Nk]``, ``[H, Nq, Nk]`` or ``[B, H, Nq, Nk]``; True keeps the block. Ids come out ascending.

        ``capacity`` bounds the longest list (default Nk, which never needs to know the values); a row with more True entries
        than that loses its last ones. ``fields`` are the constructor's. Does not synchronise.
        """
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"mask must be a bool tensor, got {getattr(mask, 'dtype', type(mask).__name__)}")
        if not 2 <= mask.dim() <= 4:
            raise ValueError(f"mask must be [Nq, Nk], [H, Nq, Nk] or [B, H, Nq, Nk], got {tuple(mask.shape)}")
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
        nk = mask.shape[-1]
        _require_int("capacity", capacity, 0, optional=True)
        capacity = nk if capacity is None else capacity
        position = mask.cumsum(-1, dtype=torch.int32)
        counts = position[..., -1] if nk else position.sum(-1, dtype=torch.int32)
        # Entries that are not kept all land in one slot past the end, which is cut off.
        slot = torch.where(mask & (position <= capacity), position - 1, capacity).long()
        ids = torch.arange(nk, dtype=torch.int32, device=mask.device).expand(mask.shape)
        indices = torch.zeros(*mask.shape[:3], capacity + 1, dtype=torch.int32, device=mask.device)
        indices = indices.scatter(-1, slot, ids)[..., :capacity].contiguous()
        fields.setdefault("num_kv_blocks", nk)
        return cls(counts.clamp(max=capacity).contiguous(), indices, q_offsets, kv_offsets, **fields)

    def to_mask(self) -> Tensor:
        """bool ``[B|1, H|1, Nq, Nk]``, True where the block is kept. Does not synchronise."""
        return scatter_mask(self.indices, self._used(), self._known_kv_blocks("to_mask"))

    # Top-k indices

    @classmethod
    def from_topk(cls, indices: Tensor, q_offsets: int | Tensor, kv_offsets: int | Tensor, **fields) -> BlockLists:
        """From integer ids ``[Nq, k]``, ``[H, Nq, k]`` or ``[B, H, Nq, k]``, the same number k for every query block."""
        if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"indices must be an int32 or int64 tensor, got {getattr(indices, 'dtype', type(indices).__name__)}")
        if not 2 <= indices.dim() <= 4:
            raise ValueError(f"indices must be [Nq, k], [H, Nq, k] or [B, H, Nq, k], got {tuple(indices.shape)}")
        indices = indices.reshape((1,) * (4 - indices.dim()) + tuple(indices.shape)).int()
        counts = torch.full(indices.shape[:3], indices.shape[3], dtype=torch.int32, device=indices.device)
        return cls(counts, indices, q_offsets, kv_offsets, **fields)

    def to_topk(self, fill: int = -1) -> Tensor:
        """int32 ids ``[B|1, H|1, Nq, capacity]`` with ``fill`` in the entries past each list's count."""
        return self.indices.masked_fill(~self._used(), fill)

    # BSR

    @classmethod
    def from_bsr(cls, indptr: Tensor, indices: Tensor, q_offsets: int | Tensor, kv_offsets: int | Tensor, *, num_kv_blocks: int,
                 capacity: int | None = None, **fields) -> BlockLists:
        """From block-sparse rows shared by all heads: row i keeps ``indices[indptr[i]:indptr[i + 1]]``.

        Args:
            indptr: int32 or int64 ``[Nq + 1]``.
            indices: int32 or int64 ``[nnz]``.
            num_kv_blocks: number of block columns.
            capacity: bound on the longest row; default num_kv_blocks. Does not synchronise.
        """
        for name, tensor in (("indptr", indptr), ("indices", indices)):
            if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name} must be an int32 or int64 tensor, got {getattr(tensor, 'dtype', type(tensor).__name__)}")
            if tensor.dim() != 1:
                raise ValueError(f"{name} must have one dimension, got {tuple(tensor.shape)}")
        if len(indptr) < 1:
            raise ValueError("indptr must hold at least one entry, got none")
        _require_int("num_kv_blocks", num_kv_blocks, 0)
        _require_int("capacity", capacity, 0, optional=True)
        capacity = num_kv_blocks if capacity is None else capacity
        counts = indptr.diff().int().clamp(max=capacity)
        slots = torch.arange(capacity, device=indptr.device)
        where = (indptr[:-1, None] + slots).clamp(max=max(len(indices) - 1, 0))
        rows = indices[where].int() if len(indices) else torch.zeros_like(where, dtype=torch.int32)
        return cls(counts[None, None], rows[None, None], q_offsets, kv_offsets, num_kv_blocks=num_kv_blocks, **fields)

    def to_bsr(self, batch: int = 0, head: int = 0) -> tuple[Tensor, Tensor]:
        """(indptr int32 ``[Nq + 1]``, indices int32 ``[nnz]``) of one batch element and head. Synchronises: nnz is a shape."""
        counts = self.counts[batch, head]
        indptr = torch.zeros(len(counts) + 1, dtype=torch.int32, device=self.device)
        indptr[1:] = counts.cumsum(0)
        return indptr, self.indices[batch, head][self._used()[batch, head]]

    # FlexAttention

    @classmethod
    def from_block_mask(cls, block_mask) -> BlockLists:
        """From ``torch.nn.attention.flex_attention.BlockMask``.

        Where it holds partial blocks under a ``mask_mod``, this synchronises and evaluates the ``mask_mod`` for every pair of tokens: torch
        calls a block partial also where just the sequence ends inside it.

        Raises:
            TypeError: not a BlockMask.
            ValueError: its ``mask_mod`` masks inside a partial block, which lists of blocks cannot say.
        """
        return cls.from_mask(kept_blocks(block_mask), *block_mask.BLOCK_SIZE)

    def to_block_mask(self, q_len: int, kv_len: int):
        """A FlexAttention ``BlockMask`` of full blocks for sequences of ``q_len`` and ``kv_len`` tokens.

        Lists per key/value head stay so; FlexAttention itself takes one head or all query heads.

        Raises:
            ValueError: the blocks are ragged or have valid lengths; FlexAttention's blocks are uniform.
        """
        if any(isinstance(x, Tensor) for x in (self.q_offsets, self.kv_offsets, self.q_lengths, self.kv_lengths)):
            raise ValueError("to_block_mask requires uniform blocks without valid lengths; FlexAttention has no ragged blocks")
        return full_block_mask(self.counts, self.indices, (self.q_offsets, self.kv_offsets), (q_len, kv_len))

    # The other direction

    def transpose(self) -> BlockLists:
        """Which query blocks look at each key block. Computed once; the backward pass of dK and dV walks it."""
        # A compiled graph keeps nothing between calls, and cannot enter the lock of a cached property.
        return self._flip() if torch.compiler.is_compiling() else self._flipped

    @cached_property
    def _flipped(self) -> BlockLists:
        return self._flip()

    def _flip(self) -> BlockLists:
        return BlockLists.from_mask(
            self.to_mask().mT, self.kv_offsets, self.q_offsets, q_lengths=self.kv_lengths, kv_lengths=self.q_lengths,
            max_q_length=self.max_kv_length, max_kv_length=self.max_q_length)

    def _used(self) -> Tensor:
        return prefix_mask(self.counts, self.capacity)

    def _known_kv_blocks(self, wanted_by: str) -> int:
        if self.num_kv_blocks is None:
            raise ValueError(f"num_kv_blocks must be given for {wanted_by} when kv_offsets is a uniform block size, got None")
        return self.num_kv_blocks


def per_query_head(x: Tensor, batch: int, heads: int) -> Tensor:
    """``[B|1, H|1, ...]`` with its shared batch and shared or key/value heads spelled out: ``[batch, heads, ...]``."""
    return x.repeat_interleave(heads // x.shape[1], dim=1).expand(batch, *(-1,) * (x.dim() - 1))


def _require_int(name: str, value: int | None, least: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    # Under torch.compile a size may be symbolic.
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _require_int32(name: str, tensor: Tensor, dims: int) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be an int32 tensor, got {type(tensor).__name__}")
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {tensor.dtype}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(tensor.shape)}")


def _bounds(offsets: int | Tensor, lengths: Tensor | None, blocks: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    if isinstance(offsets, Tensor):
        starts, ends = offsets[..., :-1], offsets[..., 1:]
    else:
        starts = torch.arange(blocks, dtype=torch.int32, device=device)[None, None] * offsets
        ends = (starts + offsets).clamp(max=tokens)
    sizes = ends - starts
    if lengths is not None:
        sizes = torch.minimum(sizes, lengths)
    # Two tensors of one shape, so that one pair of strides serves both.
    starts, sizes = torch.broadcast_tensors(starts, sizes)
    return starts.contiguous(), sizes.contiguous()


def _check_axis_values(axis: str, offsets: int | Tensor, lengths: Tensor | None, blocks: int, tokens: int, longest: int) -> None:
    if isinstance(offsets, int):
        if blocks != -(-tokens // offsets):
            raise ValueError(f"{axis}_offsets = {offsets} cuts {tokens} tokens into {-(-tokens // offsets)} blocks, got {blocks}")
        sizes = offsets
    else:
        sizes = offsets.diff(dim=-1)
        if bool((sizes < 0).any()) or bool((offsets[..., 0] != 0).any()) or bool((offsets[..., -1] != tokens).any()):
            raise ValueError(f"{axis}_offsets must ascend from 0 to {tokens}, got {offsets.tolist()}")
        if sizes.numel() and int(sizes.max()) > longest:
            raise ValueError(f"max_{axis}_length must be at least the longest block's {int(sizes.max())} tokens, got {longest}")
    if lengths is not None and (bool((lengths < 0).any()) or bool((lengths > sizes).any())):
        raise ValueError(f"{axis}_lengths must lie between 0 and the block's tokens, got {lengths.tolist()}")
