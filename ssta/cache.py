"""TileCache: keys and values of earlier chunks, in tiles whose statistics are known, for video that is generated chunk after chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .attention import attend
from .cache_checks import Kind, check_state, check_text, checked_config
from .cache_memory import Memory
from .cache_op import compiling, recount, run_chunk
from .checks import require_device, require_function, require_triple
from .config import SSTAConfig
from .inputs import check_tensors
from .kernels.checks import autocast_inputs, require_bool, require_int, require_values, resolve_scale
from .kernels.operators import on_device, recorded, refuse_transforms
from .kernels.routing import require_impl
from .ranks.agreement import said_to
from .ranks.shards import Shards
from .ring import Geometry
from .sequence import DenseRun, TokenLayout, VideoGrid
from .spec import LayerSpec

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

# The configuration of a cache that is given none.
DEFAULT = SSTAConfig(tile_thw=(4, 8, 8), density=0.25, compensation="linear")


class Contents(NamedTuple):
    """What a cache holds, in the order of the sequence.

    Attributes:
        key, value: ``[B, Hkv, S, D]``.
        segments: what these tokens are: text and the sink as a DenseRun each, then the frames of each layer of tiles as a VideoGrid, the
            oldest first.
    """

    key: Tensor
    value: Tensor
    segments: tuple[VideoGrid | DenseRun, ...]


class TileCache:
    """Keys and values of earlier chunks of a video, for one attention layer.

    A chunk's queries attend to the first ``sink`` frames that were kept, exactly and always; of the others to the last ``window`` frames;
    and to the chunk itself. Of the tiles of window and chunk ``config`` computes some exactly and estimates the rest. A kept chunk stays in
    the tiles that it was cut into, with their means and covariances, which are computed once; frames that leave the window leave these
    tiles exactly.

    Memory is allocated at the first call, and written in place from then on; no call waits for the device. A CUDA graph or a compiled
    function may hold calls of a chunk of one length, those that keep it too, and goes on being right as the window moves.

    Args:
        config: what is attended to; None = a quarter of the tile pairs, the others estimated. A chunk's frames are shared out evenly among
            tiles of at most ``tile_thw[0]`` frames. ``density`` counts pairs with the tiles of window and chunk, and at density 1
            everything is computed exactly. ``topk`` may name more tiles than there are yet. Windows of tiles (``kernel_thw``) stay inside
            the chunk; one that is shorter than others has none.
        window: frames, at least those of a chunk and those of a tile.
        sink: frames.
        chunk: the most frames of a chunk; None = those of the first call. Of those that are kept only the first may have fewer.
        text: the most tokens of text, which everything attends to, exactly and always.
        rotary: ``f(key, first)``, which applies positions to keys ``[B, Hkv, n * h * w, D]`` of n frames, the number of the first one being
            the int64 tensor ``first``, on the device; without a wait and in new memory, not written over ``key``. Given one, ``attend``
            takes keys without positions, and the sink's are moved along: it ends where the window begins. As rotary scores depend on the
            distance alone, that is the same as counting the frames that are held from 0 on.
        scale: factor on the scores; default 1 / sqrt(D).
        impl: as of ``ssta_attention``.
        group: ranks that share out a chunk's tokens, all of them in one run by ``torch.tensor_split``'s rule. Each gives its tokens of all
            heads, which are exchanged for all tokens of its heads, and holds these alone: at most as many ranks as there are key heads.
            Text comes with all its tokens and heads to every rank.

    Attributes:
        config, window, sink, text, rotary, scale, impl, group: as given.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """

    def __init__(self, config: SSTAConfig | None = None, *, window: int, sink: int = 0, chunk: int | None = None,
                 text: int = 0, rotary: Callable[[Tensor, Tensor], Tensor] | None = None, scale: float | None = None, impl: str = "auto",
                 group: ProcessGroup | DeviceMesh | None = None) -> None:
        self.config = DEFAULT if config is None else checked_config(config)
        self.window, self.sink = require_int("window", window, 1), require_int("sink", sink, 0)
        self.text = require_int("text", text, 0)
        self.rotary = None if rotary is None else require_function("rotary", rotary, "key", "first")
        self.scale = None if scale is None else resolve_scale(scale, 1)
        self.impl = require_impl(impl)
        self.group = group
        if group is not None and self.config.mask_share_within_head:
            raise ValueError("mask_share_within_head must be False in a cache with a group, each rank of which holds some heads, got True")
        self._most = None if chunk is None else require_int("chunk", chunk, 1)
        if self.window < self.config.tile_thw[0]:
            raise ValueError(f"window must be at least a tile's {self.config.tile_thw[0]} frames (tile_thw {self.config.tile_thw}), got "
                             f"{self.window}")
        if self._most is not None and self._most > self.window:
            raise ValueError(f"chunk must be at most the window's {self.window} frames, got {self._most}")
        self._memory: Memory | None = None
        self._first = 0
        self._kept = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, thw: tuple[int, int, int], *, keep: bool = True, dense: bool = False,
               start: int | None = None, text: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attention of a chunk to what is held and to itself.

        Args:
            query: ``[B, H, t * h * w, D]``, or a rank's share of these tokens, positions already applied; any strides. Under autocast all
                three are cast to its dtype.
            key, value: ``[B, Hkv, t * h * w, D]``, query's dtype and device. H must be a multiple of Hkv.
            thw: (t, h, w) tokens of the chunk; h and w are the same for all of them.
            keep: whether the chunk's keys and values stay, as of its last denoising pass; without, nothing is stored.
            dense: compute everything exactly, as in dense steps.
            start: the number of the chunk's first frame, where the caller knows it: it must be that of the frames kept so far, and
                given on all ranks or on none, which wait for one another where it is a new one.
            text: keys and values ``[B, Hkv, n, D]`` of text, constants, which stay until others are given.

        Returns:
            As query. Differentiable in query, key and value, once; what is held is a constant. A call that
            records a gradient waits for the device, to gather what is held in the order of the sequence.

        Raises:
            TypeError, ValueError: the argument's name, what was required and what came. Nothing is stored then.
        """
        require_bool("keep", keep)
        require_bool("dense", dense)
        query, key, value = autocast_inputs(query=query, key=key, value=value)
        refuse_transforms("TileCache.attend", query=query, key=key, value=value)
        t, h, w = require_triple("thw", thw)
        layout = TokenLayout.video_text((t, h, w))
        if self.group is None:
            self._check_start(start)
            check_tensors(query, key, value, layout, layout)
            return self._attend(query, key, value, layout, keep, dense, text)
        shards, heads, kv_heads = self._shared(self.group, query, key, value, layout, text, start)
        facts = dict(config=self.config, window=self.window, sink=self.sink, chunk=self._most, keep=keep, dense=dense, start=start)
        shards.agreed(facts)
        if text is not None:
            first, last = shards.heads(kv_heads)
            text = text[0][:, first:last], text[1][:, first:last]
        query, key, value = shards.to_heads(query, key, value, key_heads=kv_heads)
        out = self._attend(query, key, value, layout, keep, dense, text)
        return shards.to_tokens(out, heads, key_heads=kv_heads)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout, keep: bool, dense: bool,
                text: tuple[Tensor, Tensor] | None) -> Tensor:
        """``attend`` on one rank."""
        t, h, w = layout.video[0].thw
        if text is not None:
            check_text(text, key, self.text)
        memory = self._fit(Kind.of(query, key), (t, h, w), keep)
        chunks, storage, raw = [memory.chunk(t)], memory.storage, key
        if self.rotary is not None:
            key = self._rotated(key, storage.counts.kept[0])
        if text is not None:
            memory.put_text(*text)
        dense = dense or self.config.density == 1
        stays: tuple[bool, ...] = ()
        out = None
        if recorded(query, key, value):
            out = self._attend_recorded(query, key, value, layout, memory.spec_of(t).config, dense)
            if not keep:
                return out
            query, key, value, dense = query.detach(), key.detach(), value.detach(), True
        if keep:
            first = self._first if self._kept else t
            chunks += [of for frames, of in memory.chunks.items() if frames != t]
            settled = memory.geometry.settles(first) and self._kept >= self.sink + self.window
            stays = self._kept < self.sink, memory.geometry.cuts(first), settled
            if memory.raw_sink is not None:
                with torch.no_grad():
                    # The sink's keys as they came, before the chunk is counted in.
                    here, token = memory.ring.fills(storage.counts, t)
                    memory.raw_sink.copy_(torch.where(here, raw.index_select(2, token), memory.raw_sink))
        ran = run_chunk(query, key, value, storage, chunks, dense, stays)
        if keep:
            if memory.raw_sink is not None:
                with torch.no_grad():
                    # The sink ends where the window begins.
                    sink = memory.ring.tokens(storage.k)[2]
                    sink.copy_(self._rotated(memory.raw_sink, memory.ring.sink_start(storage.counts)))
            self._first, self._kept = first, self._kept + t
        return ran if out is None else out

    def allocate(self, query: Tensor, key: Tensor, thw: tuple[int, int, int]) -> None:
        """Takes the memory that ``attend`` of such tensors needs, which it otherwise does when first called: before ``torch.compile``.

        Raises:
            TypeError, ValueError: as ``attend``.
        """
        query, key = autocast_inputs(query=query, key=key)
        thw = require_triple("thw", thw)
        layout = TokenLayout.video_text(thw)
        if self.group is None:
            check_tensors(query, key, key, layout, layout)
            kind = Kind.of(query, key)
        else:
            shards, heads, kv_heads = self._shared(self.group, query, key, key, layout)
            heads, kv_heads = shards.deal_heads(heads, kv_heads)[shards.rank], shards.deal_heads(kv_heads)[shards.rank]
            kind = Kind.of(query, key)._replace(heads=heads, kv_heads=kv_heads)
        self._fit(kind, thw, True).chunk(thw[0])

    def reset(self) -> None:
        """Forgets all frames and keeps the memory."""
        self._first = self._kept = 0
        memory = self._memory
        if memory is not None:
            with torch.no_grad(), on_device(memory.storage.k):
                memory.layer.clear(memory.storage)
                recount(memory.storage, memory.chunks.values())

    def contents(self) -> Contents:
        """What is held, as ``ssta_attention`` takes it with a ``kv_layout`` of these segments and the chunk's. Waits for the device.

        Raises:
            ValueError: there is no memory yet.
        """
        if self._memory is None:
            raise ValueError("contents must be asked for after a first call, got a cache without memory")
        storage = self._memory.storage
        require_values("contents", storage.k)
        frames, *rest = (x.tolist() for x in storage.counts)
        found = list(self._memory.ring.in_sequence(frames, *[number for number, in rest]))
        places = torch.cat([torch.zeros(0, dtype=torch.int64, device=storage.k.device), *[places for _, places in found]])
        return Contents(storage.k.index_select(2, places), storage.v.index_select(2, places), tuple([segment for segment, _ in found]))

    @property
    def frames(self) -> int:
        """Frames that are held: of the sink and of the window. Frames that replayed CUDA graphs kept are not counted."""
        return min(self._kept, self.sink + self.window)

    @property
    def kept(self) -> int:
        """Frames that were kept since the last reset, as ``start`` counts them; those of replayed CUDA graphs are not counted."""
        return self._kept

    @property
    def nbytes(self) -> int:
        """Bytes of the memory: keys, values, and what is known of their tiles; 0 before it is allocated."""
        memory = self._memory
        tensors = [] if memory is None else [*memory.storage.tensors, *([] if memory.raw_sink is None else [memory.raw_sink])]
        return sum([x.numel() * x.element_size() for x in tensors])

    def to(self, device: torch.device | str) -> TileCache:
        """Moves it to another device, in place; returns itself."""
        device = require_device("device", device)
        memory = self._memory
        if memory is not None and memory.spec.device != device:
            self.load_state_dict(self._state(memory.state, memory), device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """What is held, as plain numbers and as tensors in memory of their own, which later calls leave alone: keys, values and where they
        lie. The statistics of tiles follow from these."""
        memory = self._memory
        if memory is None:
            return {}
        with torch.no_grad():
            return self._state({name: x.clone() for name, x in memory.state.items()}, memory)

    def _state(self, tensors: dict[str, Tensor], memory: Memory) -> dict[str, Any]:
        return {**tensors, "geometry": tuple(memory.geometry), "heads": memory.spec.heads, "first": self._first, "number": self._kept}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | str | None = None) -> None:
        """Takes over what ``state_dict`` of a cache with these settings gave.

        Args:
            device: where it goes; None = where the state's tensors are.

        Raises:
            TypeError, ValueError: it is none, or of a cache with another window, sink, chunk or tile. Nothing is taken over then.
        """
        check_state(state, self.rotary is not None and self.sink > 0)
        if not state:
            self.reset()
            return
        key, found = state["key"], Geometry(*state["geometry"])
        wanted = self._geometry_of((self._most or found.chunk, found.height, found.width))
        if found != wanted:
            raise ValueError(f"state must be of a cache with {wanted}, got {found}")
        device = key.device if device is None else require_device("device", device)
        memory = self._made(Kind(key.shape[0], state["heads"], key.shape[1], key.shape[3], key.dtype, device), found)
        for name, own in memory.state.items():
            if not isinstance(x := state[name], Tensor) or x.shape != own.shape:
                raise ValueError(f"state[{name!r}] must be a Tensor of shape {tuple(own.shape)}, got {getattr(x, 'shape', x)}")
        with torch.no_grad(), on_device(memory.storage.k):
            for name, own in memory.state.items():
                own.copy_(state[name])
            memory.layer.describe_pages(memory.storage, memory.ring.order)
        self._memory = memory
        self._first, self._kept = state["first"], state["number"]

    def __repr__(self) -> str:
        return (f"TileCache(window={self.window}, sink={self.sink}): {self.frames} frames held of {self._kept} kept, "
                f"{self.nbytes / 2**20:,.1f} MiB")

    # The rest is of use inside.

    def _check_start(self, start: int | None) -> None:
        if start is not None and require_int("start", start, 0) != self._kept:
            raise ValueError(f"start must be the number of frames kept so far, {self._kept}, got {start}: a chunk is kept once, and each "
                             "layer has a cache of its own")

    def _shared(self, group: ProcessGroup | DeviceMesh, query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout,
                text: tuple[Tensor, Tensor] | None = None, start: int | None = None) -> tuple[Shards, int, int]:
        """(how ranks share a chunk out, H, Hkv); what is wrong with a call is said on all of them."""
        def made() -> tuple[Shards, int, int]:
            self._check_start(start)
            shards = Shards.of(group, layout, "all")
            heads, kv_heads, _ = check_tensors(query, key, value, layout, layout, whole=shards.whole)
            shards.deal_heads(heads, kv_heads)
            if text is not None:
                check_text(text, key, self.text)
            return shards, heads, kv_heads

        return said_to(group, made)

    def _rotated(self, key: Tensor, first: Tensor) -> Tensor:
        assert self.rotary is not None
        checked = not (key.is_inference() or compiling())
        version = key._version if checked else 0
        found = self.rotary(key, first.clone())
        if checked and key._version != version:
            raise ValueError("rotary must return keys in new memory, got a function that writes over the keys it is given")
        if not isinstance(found, Tensor) or found.shape != key.shape or found.dtype != key.dtype:
            raise ValueError(f"rotary must return keys of shape {tuple(key.shape)} and {key.dtype}, got "
                             f"{(tuple(found.shape), found.dtype) if isinstance(found, Tensor) else type(found).__name__}")
        return found

    def _attend_recorded(self, query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout, config: SSTAConfig, dense: bool) -> Tensor:
        """The same in the stateless form, which records a gradient."""
        held = self.contents()
        kv_layout = TokenLayout(held.segments + layout.segments)
        key, value = torch.cat([held.key, key], 2), torch.cat([held.value, value], 2)
        if dense:
            layout, kv_layout = (TokenLayout((DenseRun(of.length),)) for of in (layout, kv_layout))
            config = replace(config, density=None, compensation="none", compensation_parts=1, sampling_type=None)
        return attend(query, key, value, layout, config, kv_layout=kv_layout, scale=self.scale, impl=self.impl).out

    def _fit(self, came: Kind, thw: tuple[int, int, int], keep: bool) -> Memory:
        """The memory, which a chunk fits; takes it where there is none for such a chunk and nothing would be lost.

        Raises:
            ValueError: it does not fit.
        """
        (t, h, w), memory = thw, self._memory
        if t > self.window:
            raise ValueError(f"thw must have at most the window's {self.window} frames, got {t}")
        if not self._kept or memory is None:
            if self._most is not None and t > self._most:
                raise ValueError(f"thw must have at most the {self._most} frames of the cache's chunks, got {t}")
            if memory is None or memory.geometry.thw(t) != thw or t > memory.geometry.chunk or came != memory.kind:
                stays = memory is not None and memory.kind._replace(heads=came.heads) == came
                text = [x.clone() for x in memory.text()] if memory is not None and stays else []
                # The old memory is freed before the new one is made.
                memory = self._memory = None
                memory = self._made(came, self._geometry_of((self._most or t, h, w)))
                with torch.inference_mode(False), torch.no_grad():
                    for own, x in zip(memory.text(), text):
                        own.copy_(x)
                self._memory = memory
            return memory
        have = memory.geometry
        if (h, w) != (have.height, have.width):
            raise ValueError(f"thw must have frames of {(have.height, have.width)} tokens, as those that are held, got {(h, w)}; reset() "
                             "forgets these")
        if came != memory.kind:
            raise ValueError("query and key must be of the batch, heads, key heads, head_dim, dtype and device of what is held, "
                             f"{tuple(memory.kind)}, got {tuple(came)}; reset() forgets it")
        if t > have.chunk:
            raise ValueError(f"thw must have at most the {have.chunk} frames of the cache's chunks, got {t}; TileCache(chunk={t}) takes "
                             "shorter ones first")
        if keep and t != have.chunk:
            raise ValueError(f"thw must have the {have.chunk} frames of the cache's chunks where one is kept and not the first, got {t}")
        return memory

    def _geometry_of(self, thw: tuple[int, int, int]) -> Geometry:
        """Where frames lie where the longest chunk is of ``thw`` tokens."""
        return Geometry.of(*thw, self.config.for_canvas(thw).tile_thw, self.window, self.sink, self.text)

    def _made(self, kind: Kind, geometry: Geometry) -> Memory:
        """Memory that holds nothing."""
        if compiling():
            raise ValueError("the cache must have its memory before a compiler sees it, got none for such tensors; cache.allocate(query, "
                             "key, thw) takes it")
        _, heads, kv_heads, dim, dtype, device = kind
        thw = geometry.thw(geometry.chunk)
        config = self.config.for_canvas(thw)
        # At density 1 there is nothing to choose.
        config = SSTAConfig(geometry.tile) if config.density == 1 else replace(config, tile_thw=geometry.tile)
        spec = LayerSpec(TokenLayout.video_text(thw), geometry.kv_layout, config, resolve_scale(self.scale, dim), dtype, device, heads,
                         kv_heads, dim, self.impl, True, False)
        memory = Memory(geometry, spec, kind, self.rotary is not None)
        if memory.raw_sink is not None:
            # A rotary that cannot move a sink raises here, before anything is stored.
            with torch.no_grad():
                self._rotated(memory.raw_sink, memory.storage.counts.kept[0])
        return memory
