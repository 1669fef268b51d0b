"""Runs the calls that ``random_specs`` draws, on whichever checkout ``import ssta`` finds, through its public names alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ssta
from ssta import kernels

Named = dict[str, Tensor]
# How names of tensors of a list of blocks begin.
LIST = "list:"
# Odd multipliers that mix the bits of an index.
MIX, MIX_AGAIN = -7046029254386353131, -4658895280553007687


def names() -> list[str]:
    """The public names and settings of this checkout, as specs ask for them."""
    fields = [f"SSTAConfig.{name}" for name in ssta.SSTAConfig.__dataclass_fields__]
    return [*[f"ssta.{name}" for name in ssta.__all__], *[f"kernels.{name}" for name in kernels.__all__], *fields]


class Call:
    """A spec, with the settings that its calls share.

    Args:
        wide: compute in float64, by plain torch, on the same inputs.
        group: the ranks that share it.
    """

    def __init__(self, spec: dict, device: str, wide: bool = False, group: Any = None) -> None:
        self.spec, self.device, self.wide, self.group = spec, torch.device(device), wide, group
        self.dtype = getattr(torch, spec["dtype"])
        self.impl = "torch" if wide else spec["impl"]
        self.layout = self._layout(spec["segments"]) if "segments" in spec else None
        self.config = self._config() if "config" in spec else None
        self.mask = self._mask()
        what = {"one part": "attention", "two parts": "attention", "estimated cache": "cache"}.get(spec["kind"], spec["kind"])
        if spec.get("shared"):
            what = "attention" if "segments" in spec else "cache"
        self._what: tuple[Callable, Callable] = {
            "attention": (self._sequence, self._attend), "dense": (self._sequence, self._dense),
            "deferred": (self._projections, self._deferred), "kernel": (self._blocks, self._kernel), "vsa": (self._gated, self._vsa),
            "sla": (self._projected, self._sla), "cache": (self._chunks, self._cache)}[what]
        self.lists = self._lists() if what == "kernel" else ()

    @property
    def _computed(self) -> torch.dtype:
        return torch.float64 if self.wide else self.dtype

    def inputs(self, number: int) -> list[Tensor]:
        """The inputs of call ``number``."""
        self._draw = torch.Generator(self.device).manual_seed(self.spec["seed"] + number)
        return [x.to(torch.float64) if self.wide and x.is_floating_point() else x for x in self._what[0]()]

    def step(self, inputs: list[Tensor]) -> Named:
        """Results, selection and gradients by name."""
        return self._what[1](*inputs)

    # Inputs

    def _random(self, batch: int, heads: int, tokens: int, dim: int) -> Tensor:
        """``[B, H, S, D]`` that lies as the spec says."""
        strides = self.spec["strides"]

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, device=self.device, dtype=torch.float32, generator=self._draw).to(self.dtype)

        if strides == "bshd":
            return made(batch, tokens, heads, dim).transpose(1, 2)
        if strides == "packed":
            return made(batch, tokens, heads + 1, dim)[:, :, 1:].transpose(1, 2)
        if strides == "gap":
            return made(batch, heads, tokens, 2 * dim)[..., dim:]
        if strides == "odd":
            return made(batch * heads * tokens * dim + 1)[1:].view(batch, heads, tokens, dim)
        return made(batch, heads, tokens, dim)

    def _qkv(self, tokens: int, kv_tokens: int) -> list[Tensor]:
        spec = self.spec
        q, k, v = (self._random(spec["batch"], heads, n, spec["dim"]) for heads, n in (
            (spec["heads"], tokens), (spec["kv_heads"], kv_tokens), (spec["kv_heads"], kv_tokens)))
        if spec["inputs"] == "long":
            q.mul_(2)
            k.mul_(2)
        elif spec["inputs"] == "outlier":
            k[:, :, :: 97] *= 8
        elif spec["inputs"] == "means":
            # Neighbours alike, as in videos.
            for x in (q, k, v):
                x.add_(x[:, :, :1].clone()).add_(torch.sin(torch.arange(x.shape[2], device=self.device) / 50).to(x.dtype)[:, None])
        return [q, k, v]

    def _sequence(self) -> list[Tensor]:
        kv = self.spec.get("kv_segments")
        tokens = self.layout.length
        qkv = self._qkv(tokens, self._layout(kv).length if kv else tokens)
        return [*qkv, self._random(*qkv[0].shape)] if self.spec["grad"] else qkv

    def _gated(self) -> list[Tensor]:
        inputs = self._sequence()
        return [*inputs, self._random(*inputs[0].shape)] if self.spec["gate"] else inputs

    def _projected(self) -> list[Tensor]:
        inputs, dim = self._sequence(), self.spec["dim"]
        if self.spec["weight"]:
            inputs += [self._random(1, 1, dim, dim)[0, 0].contiguous() / dim**0.5]
            inputs += [self._random(1, 1, 1, dim).flatten()] if self.spec["bias"] else []
        return inputs

    def _projections(self) -> list[Tensor]:
        spec, tokens = self.spec, self.layout.length
        q, k, v = self._sequence()
        weights = [self._random(1, 1, 1, spec["dim"]).flatten() + 1 for _ in range(2)]
        angles = torch.randn(1, 1, tokens, spec["dim"] // 2, device=self.device, generator=self._draw)
        return [q, k, v, *weights, angles.cos(), angles.sin()]

    def _blocks(self) -> list[Tensor]:
        spec = self.spec
        qkv = self._qkv(sum(spec["q_blocks"]), sum(spec["kv_blocks"]))
        if spec["grad"]:
            qkv += [self._random(*qkv[0].shape), torch.randn(qkv[0].shape[:3], device=self.device, generator=self._draw)]
        return qkv

    def _chunks(self) -> list[Tensor]:
        spec = self.spec
        h, w = spec["hw"]
        inputs = [x for _ in spec["passes"] for x in self._qkv(spec["frames"] * h * w, spec["frames"] * h * w)]
        if spec["text"]:
            inputs += self._qkv(1, spec["text"])[1:]
        return inputs

    # Settings

    @staticmethod
    def _layout(segments: list[list[int]]) -> ssta.TokenLayout:
        return ssta.TokenLayout(tuple([ssta.VideoGrid(*numbers) if len(numbers) == 3 else ssta.DenseRun(*numbers) for numbers in segments]))

    def _config(self) -> ssta.SSTAConfig:
        return ssta.SSTAConfig(**{name: tuple(value) if isinstance(value, list) else value for name, value in self.spec["config"].items()})

    def _mask(self) -> Tensor | None:
        """``text_mask``."""
        valid = self.spec.get("mask")
        if valid is None:
            return None
        runs = [segment[0] for segment in self.spec["segments"] if len(segment) == 1]
        mask = torch.tensor([[i < n for length, n in zip(runs, row) for i in range(length)] for row in valid])
        return mask.to(self.device, getattr(torch, self.spec["mask_dtype"]))

    def _lists(self) -> tuple[Any, ...]:
        """The lists of blocks; two of disjoint keys where their results are merged."""
        spec = self.spec
        draw = torch.Generator().manual_seed(spec["seed"])
        shape = spec["list_batch"], spec["list_heads"], len(spec["q_blocks"]), len(spec["kv_blocks"])
        mask = torch.rand(shape, generator=draw) < spec["density"]
        if spec["empty_rows"]:
            mask[:, :, 0] = False
        fields: dict[str, Any] = {}
        places: list[Any] = []
        for axis in ("q", "kv"):
            sizes = spec[f"{axis}_blocks"]
            places.append(torch.tensor([0, *sizes]).cumsum(0).int().to(self.device) if spec["ragged"] else spec[f"{axis}_block"])
            if spec["ragged"]:
                # The bound decides about the kernel, which a length must not do.
                fields[f"max_{axis}_length"] = spec[f"{axis}_block"]
            if spec[f"{axis}_lengths"]:
                fields[f"{axis}_lengths"] = torch.tensor(spec[f"{axis}_lengths"], dtype=torch.int32, device=self.device)
        if spec["merged"]:
            even = torch.arange(shape[3]) % 2 == 0
            masks = [mask & even, mask & ~even]
        else:
            masks = [mask]
        lists = [kernels.BlockLists.from_mask(part.to(self.device), *places, **fields) for part in masks]
        if spec["outside"]:
            lists[0].indices[..., -1:] = shape[3] + 5
        return tuple(lists)

    # Calls

    def _recorded(self, function: Callable[..., Named], inputs: list[Tensor], douts: list[Tensor], labels: list[str]) -> Named:
        """``function(*inputs)``, and with ``douts``, the gradients of its results, also its inputs' gradients by ``labels``."""
        if not douts:
            return function(*inputs)
        leaves = [x.detach().requires_grad_() for x in inputs]
        named = function(*leaves)
        results = [named[name] for name in ("out", "lse") if name in named and named[name].requires_grad][:len(douts)]
        # A row that attends to nothing has an lse of -inf, whose gradient is 0.
        gradients = torch.autograd.grad(results, leaves, [dout.to(x.dtype) for dout, x in zip(douts, results)], allow_unused=True)
        return ({name: x.detach() for name, x in named.items()}
                | {f"d{label}": x for label, x in zip(labels, gradients) if x is not None})

    def _attend(self, *inputs: Tensor) -> Named:
        spec, options = self.spec, dict(text_mask=self.mask, scale=self.spec["scale"], impl=self.impl)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Named:
            if spec["call"] == "ssta_3d_attention":
                thw, text = self.layout.video[0].thw, self.layout.dense_length
                return dict(out=ssta.ssta_3d_attention(q, k, v, thw, text_len=text, **self._by_name(), **options))
            if self.group is not None:
                options.update(group=self.group, split=spec["split"])
            kv = spec["kv_segments"]
            out, blocks = ssta.ssta_attention(q, k, v, self.layout, self.config, kv_layout=self._layout(kv) if kv else None,
                                              return_blocks=True, **options)
            return {"out": out, "selection": blocks.to_mask(), f"{LIST} counts": blocks.counts, f"{LIST} indices": blocks.indices}

        if self.group is not None:
            inputs = tuple(self._mine(x) for x in inputs)
        return self._recorded(attend, list(inputs[:3]), list(inputs[3:]), ["q", "k", "v"])

    def _by_name(self) -> dict[str, Any]:
        return {"topk": None} | {name: tuple(value) if isinstance(value, list) else value for name, value in self.spec["config"].items()}

    def _deferred(self, q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, *angles: Tensor) -> Named:
        spec = self.spec

        def deferred(x: Tensor, weight: Tensor | None) -> kernels.Deferred:
            norm = None
            if weight is not None and spec["norm"]:
                if spec["across"]:
                    norm = kernels.RMSNorm.across_heads(x, weight.repeat(x.shape[1], 1), 1e-6)
                else:
                    norm = kernels.RMSNorm(weight, 1e-6)
            rope = angles if weight is not None and spec["rope"] else None
            return kernels.Deferred((kernels.Projection(x, norm, rope),))

        out, blocks = ssta.ssta_attention(deferred(q, q_weight), deferred(k, k_weight), deferred(v, None), self.layout, self.config,
                                          text_mask=self.mask, impl=self.impl, return_blocks=True)
        return dict(out=out, selection=blocks.to_mask())

    def _dense(self, *inputs: Tensor) -> Named:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Named:
            return dict(out=ssta.dense_attention(q, k, v, self.layout, self.mask, scale=self.spec["scale"], impl=self.impl).out)

        return self._recorded(attend, list(inputs[:3]), list(inputs[3:]), ["q", "k", "v"])

    def _kernel(self, *inputs: Tensor) -> Named:
        spec, options = self.spec, dict(scale=self.spec["scale"], causal=self.spec["causal"], impl=self.impl)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Named:
            if spec["merged"]:
                parts = [kernels.block_sparse_attention(q, k, v, lists, return_lse=True, **options) for lists in self.lists]
                out, lse = kernels.merge_attention([part[0] for part in parts], [part[1] for part in parts])
                return dict(out=out, lse=lse)
            if not spec["lse"]:
                return dict(out=kernels.block_sparse_attention(q, k, v, self.lists[0], **options))
            out, lse = kernels.block_sparse_attention(q, k, v, self.lists[0], return_lse=True, **options)
            return dict(out=out, lse=lse)

        return self._recorded(attend, list(inputs[:3]), list(inputs[3:]), ["q", "k", "v"])

    def _vsa(self, *inputs: Tensor) -> Named:
        spec = self.spec
        tensors, gate = (list(inputs[:-1]), [inputs[-1]]) if spec["gate"] else (list(inputs), [])
        *before, thw = spec["segments"]

        def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None) -> Named:
            return dict(out=ssta.video_sparse_attention(q, k, v, gate, tuple(thw), spec["sparsity"], before=[n for n, in before],
                                                        tile_thw=tuple(spec["tile"]), scale=spec["scale"], impl=self.impl))

        return self._recorded(attend, tensors[:3] + gate, tensors[3:], ["q", "k", "v", "gate"])

    def _sla(self, *inputs: Tensor) -> Named:
        spec = self.spec
        first = 4 if spec["grad"] else 3

        def attend(q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Named:
            return dict(out=ssta.sparse_linear_attention(q, k, v, weight, bias, density=spec["density"], feature_map=spec["feature_map"],
                                                         q_block=spec["q_block"], kv_block=spec["kv_block"], scale=spec["scale"],
                                                         impl=self.impl))

        return self._recorded(attend, [*inputs[:3], *inputs[first:]], list(inputs[3:first]), ["q", "k", "v", "weight", "bias"])

    @torch.no_grad()
    def _cache(self, *inputs: Tensor) -> Named:
        spec = self.spec

        def new() -> ssta.TileCache:
            return ssta.TileCache(self.config, window=spec["window"], sink=spec["sink"], text=spec["text"], chunk=spec["frames"],
                                  rotary=_rotary if spec["rotary"] else None, scale=spec["scale"], impl=self.impl, group=self.group)

        cache, named = new(), {}
        thw = spec["frames"], *spec["hw"]
        for number, (qkv, options) in enumerate(zip(zip(*[iter(inputs)] * 3), spec["passes"])):
            text = tuple(inputs[-2:]) if spec["text"] and number == 0 else None
            if self.group is not None:
                qkv = tuple(self._mine(x) for x in qkv)
            named[f"out of chunk {number}"] = cache.attend(*qkv, thw, text=text, **options)
            if spec["saved"] and number == 1:
                state = copy.deepcopy(cache.state_dict())
                cache = new()
                cache.load_state_dict(state)
        held = cache.contents()
        return named | dict(key=held.key, value=held.value)

    def _mine(self, x: Tensor) -> Tensor:
        return self.share(x, dist.get_rank(self.group), dist.get_world_size(self.group))

    def share(self, x: Tensor, rank: int, ranks: int) -> Tensor:
        """A rank's tokens of ``x`` ``[B, H, S, D]``."""
        if self.spec.get("split", "all") == "all":
            return x.tensor_split(ranks, 2)[rank]
        assert self.layout is not None
        parts = x.split([segment.length for segment in self.layout.segments], 2)
        return torch.cat([part.tensor_split(ranks, 2)[rank] if isinstance(segment, ssta.VideoGrid) else part
                          for part, segment in zip(parts, self.layout.segments)], 2)

    def tile_of_token(self) -> Tensor | None:
        """int64 ``[S]``: the row of the selection that decides about each query token; None of calls without a selection."""
        if self.layout is None or self.config is None:
            return None
        tiles = ssta.tile_layout(self.layout, self.config.tile_thw, self.config.pad_type, self.device)
        return torch.searchsorted(tiles.offsets[1:].long(), tiles.inverse, right=True)


def _rotary(key: Tensor, first: Tensor) -> Tensor:
    return key * (1 + 0.01 * first).to(key.dtype)


def digests(named: Named) -> dict[str, Tensor]:
    """By name a number, int64 on the tensor's device, that other bits of one element always change; nothing waits for it. Lists have none:
    their order is nothing, nor are the entries behind their counts."""
    return {name: digest(x) for name, x in named.items() if not name.startswith(LIST)}


def digest(x: Tensor) -> Tensor:
    flat = x.detach().contiguous().flatten()
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]).long()
    # Odd factors, so that no difference of one word is lost modulo 2**64.
    factors = torch.arange(1, len(words) + 1, device=x.device) * MIX
    factors = ((factors ^ (factors >> 29)) * MIX_AGAIN) | 1
    return (words * factors).sum()


def texts(named: Named, sums: dict[str, Tensor]) -> dict[str, str]:
    """``sums``, the digests of ``named``, as texts that tell dtypes and shapes apart too."""
    return {name: f"{value.item() & 0xFFFFFFFFFFFFFFFF:016x} {str(named[name].dtype).split('.')[1]} {list(named[name].shape)}"
            for name, value in sums.items()}


def run(call: Call) -> tuple[Named, dict[str, Tensor]]:
    """All calls of a spec, one after the other, nothing freed: (their tensors, the digests of these when they were returned). The names of
    later calls' tensors end in the call's number."""
    every: Named = {}
    sums: dict[str, Tensor] = {}
    memory: list[Tensor] = []
    for number in range(call.spec["calls"]):
        inputs = call.inputs(number)
        if call.spec["same_memory"] and memory:
            for x, new in zip(memory, inputs):
                x.copy_(new)
            inputs = memory
        memory = inputs
        named = {name if number == 0 else f"{name} (call {number})": x for name, x in call.step(inputs).items()}
        every |= named
        sums |= digests(named)
    return every, sums
