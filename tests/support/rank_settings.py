"""What is attended to on several ranks, and when: settings, masks, pipelines, caches, graphs, reports, scripts. Cases of rank_cases."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import diffusers
import torch
import torch.distributed as dist
from rank_harness import EVEN, SPARSE, alone, close, distance, forward, parallel, tiny
from tiny_models import cast, note_projections
from tiny_pipelines import PIPELINES, latents, wan_with_frames

from ssta import SSTAConfig
from ssta.kernels.prologue import norm_rope_kernel
from ssta.pipelines import Schedule, apply_ssta, cp_plan


def settings(rank, ranks):
    """Every padding, kind of selection, budget and estimate."""
    model, call = tiny("hunyuan_video_15", prompts=(4, 2))
    for changes in ({"pad_type": "repeat"}, {"threshold": 0.5, "topk": 4, "sampling_type": "similarity"}, {"compensation": "linear"},
                    {"density": 0.4, "topk": None},
                    {"sparse_type": "sta", "kernel_thw": (1, 3, 1), "topk": None}):
        config = replace(SPARSE, **changes)
        want = alone(model, call, config)
        model.enable_parallelism(config=parallel(ranks), cp_plan=cp_plan(model))
        with apply_ssta(model, config, schedule=Schedule()), torch.no_grad():
            close("hunyuan_video_15", forward(model, call), want)


def masks(rank, ranks):
    """A mask over all keys, of which the conditions' part is taken behind the whole video."""
    model, call = tiny("hunyuan_video_15")
    seen = []
    attn = model.transformer_blocks[0].attn
    with apply_ssta(model, SPARSE, schedule=Schedule()), torch.no_grad():
        stock = type(attn.processor).__call__
        try:
            def long(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
                text = attention_mask if attention_mask.dim() == 2 else attention_mask[:, 0, 0, -encoder_hidden_states.shape[1]:]
                whole = torch.cat([text.new_ones(1, math.prod(EVEN)), text], dim=1)[:, None, None]
                seen.append(whole.shape)
                return stock(self, attn, hidden_states, encoder_hidden_states, whole, image_rotary_emb)

            want = forward(model, call)
            model.enable_parallelism(config=parallel(ranks))
            type(attn.processor).__call__ = long
            close("hunyuan_video_15", forward(model, call), want)
        finally:
            type(attn.processor).__call__ = stock
    assert len(seen) == 2


def copied(rank, ranks):
    """A model that has run on ranks is copied, whose process groups are not."""
    model, call = tiny("wan")
    with apply_ssta(model, SPARSE, schedule=Schedule()), torch.no_grad():
        model.enable_parallelism(config=parallel(ranks))
        found = forward(model, call)
        assert torch.equal(forward(copy.deepcopy(model), call), found)


def order(rank, ranks):
    """v is sent before k is projected, and k before q is; each is projected once, the text's too."""
    calls = []

    def noting(real):
        def noted(*args, **options):
            calls.append((None, ">"))
            return real(*args, **options)

        return noted

    for name in ("wan", "hunyuan_video_15", "hunyuan_video_i2v", "mochi", "cogvideox", "kandinsky5", "ltx", "ltx2", "minimax_h3"):
        model, call = tiny(name)
        want = alone(model, call)
        projections = note_projections(model, calls)
        handle = apply_ssta(model, SPARSE, schedule=Schedule())
        model.enable_parallelism(config=parallel(ranks))
        calls.clear()
        with torch.no_grad(), patch.object(dist, "all_to_all_single", noting(dist.all_to_all_single)), \
                patch.object(dist, "batch_isend_irecv", noting(dist.batch_isend_irecv)):
            close(name, forward(model, call), want)
        assert projections == len({module for module, _ in calls}) - 1 == sum(module is not None for module, _ in calls)
        # The fourth is the result.
        steps = re.sub(r"([qkv])\1+", r"\1", "".join(kind for _, kind in calls))
        assert steps == "v>k>q>>" * len(handle.report()), (name, steps)


def packed(rank, ranks):
    """Where the kernel of norms and RoPE runs it writes what is sent: q and k, and v where its streams are joined."""
    real, written = norm_rope_kernel.materialize, []

    def noted(x, out, *rest):
        written.append(out.dim())
        real(x, out, *rest)

    for name, packets in (("wan", 2 * [2]), ("hunyuan_video", [3, 2])):
        model, call = tiny(name, (2, 6, 8))
        model, call = model.half(), cast(call, torch.float16)
        # The kernel takes angles in float32, which wan keeps in the model.
        model.rope.float()
        with patch.object(norm_rope_kernel, "materialize", noted), torch.no_grad():
            with apply_ssta(model, SPARSE, schedule=Schedule(), impl="triton"):
                want = forward(model, call)
            assert 5 not in written
            apply_ssta(model, SPARSE, schedule=Schedule(), impl="triton")
            model.enable_parallelism(config=parallel(ranks))
            assert distance(forward(model, call), want) < 1e-2
        assert written.count(5) == sum(packets), (name, written)
        written.clear()


def pipelines(rank, ranks):
    """Guidance in two passes, warm-ups, two transformers, another configuration than the default."""
    warm, estimated = Schedule(dense_steps=0.25), SSTAConfig(tile_thw=(2, 3, 4), kernel_thw=(1, 1, 1), density=0.3)
    for name, schedule in (("wan_2.2", Schedule(dense_steps=0.3)), ("hunyuan_video_15", warm), ("ltx", Schedule.warm_up()),
                           ("hunyuan_video_token_replace", Schedule()), ("skyreels_v2_forcing", Schedule())):
        made = PIPELINES[name]
        pipe = made.build()
        config = estimated if schedule is warm else SPARSE
        reports = []
        for parallelly in (False, True):
            handle = apply_ssta(pipe, config, schedule=schedule, check_ranks=parallelly)
            if parallelly:
                for _, transformer, _, _ in handle.layers():
                    transformer.enable_parallelism(config=parallel(ranks))
            out = latents(pipe, **made.call)
            reports.append(handle.report())
            if not parallelly:
                want = out
                handle.remove()
        assert distance(out, want) < 1e-5, name
        for one, part in zip(*reports):
            assert (part.dense_steps, part.steps) == (one.dense_steps, one.steps)


def cached(rank, ranks):
    """A cache that skips steps by their number skips the same ones everywhere."""
    pipe = PIPELINES["wan"].build()
    call = PIPELINES["wan"].call

    def enable():
        pipe.transformer.enable_cache(diffusers.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(0, 1000),
            spatial_attention_block_identifiers=["blocks"], current_timestep_callback=lambda: 500))

    with apply_ssta(pipe, SPARSE, schedule=Schedule()):
        enable()
        want = latents(pipe, **call)
        pipe.transformer.disable_cache()
    handle = apply_ssta(pipe, SPARSE, schedule=Schedule())
    pipe.transformer.enable_parallelism(config=parallel(ranks))
    enable()
    assert distance(latents(pipe, **call), want) < 1e-5
    assert len(handle.report()) == 2


def compiled(rank, ranks):
    """Blocks in one graph each, the exchange in it."""
    model, call = tiny("hunyuan_video_15")
    model = model.float()
    call = cast(call, torch.float32)
    want = alone(model, call)
    apply_ssta(model, SPARSE, schedule=Schedule())
    model.enable_parallelism(config=parallel(ranks))
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            assert distance(forward(model, call), want) < 1e-5


def reported(rank, ranks):
    """A table of one rank's own, made without the others."""
    model, call = tiny("wan")
    handle = apply_ssta(model, SPARSE, schedule=Schedule())
    with torch.no_grad():
        forward(model, call)
    assert handle.report()[0].where == handle.report()[0].implementation and "exchange" not in str(handle.report())
    handle.remove()
    handle = apply_ssta(model, SPARSE, schedule=Schedule())
    model.enable_parallelism(config=parallel(ranks))
    with torch.no_grad():
        forward(model, call)
    if rank == 0:
        first = handle.report()[0]
        assert (first.rank, first.ranks, first.own_heads, first.heads, first.tokens) == (0, ranks, 1, 2, 192)
        assert 0 < first.exchange_seconds < first.seconds
        shown = str(handle.report())
        assert f"torch, 1 of 2 heads, rank 0 of {ranks}" in shown and "exchange, ms" in shown.splitlines()[0]


def example(rank, ranks):
    """A script under torchrun: one video, which the first rank writes and reports."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import generate
    import wan

    written, printed = [], io.StringIO()
    generate.require_video_writer = lambda: None
    generate.write_video = lambda video, path, fps: written.append(video)
    pipe = wan_with_frames()
    pipe.to = lambda device: pipe
    diffusers.WanPipeline.from_pretrained = staticmethod(lambda model, **_: pipe)
    arguments = ["--cpu", "--height", "96", "--width", "128", "--num-frames", "9", "--num-inference-steps", "2", "--topk", "1",
                 "--dense-steps", "0", "--side-by-side"]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        generate.main(wan.WAN, "about", arguments)
    assert len(written) == (rank == 0) and bool(printed.getvalue()) == (rank == 0)
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0"}
    pipe = wan_with_frames()
    pipe.to = lambda device: pipe
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
        generate.main(wan.WAN, "about", arguments)
    if rank == 0:
        assert "1 of 2 heads, rank 0 of 2" in printed.getvalue()
        assert distance(*written) < 1e-4
