"""What the processes of test_parallel.py run: every case is a function of (rank, ranks) that asserts, all of them in one spawn."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import sys
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import diffusers
import diffusers.hooks.context_parallel as hooks
import tiny_models
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from tiny_models import TINY, cast
from tiny_pipelines import PIPELINES, latents, wan_with_frames
from torch import nn

from ssta import SSTAConfig
from ssta.pipelines import Schedule, apply_ssta, cp_plan

SPARSE = SSTAConfig(tile_thw=(2, 3, 4), kernel_thw=(1, 1, 1), topk=2)
EVEN, ODD = (4, 6, 8), (5, 7, 9)
# Their linear layers see other numbers of rows on a rank (text and video in one product, or audio beside it), and add in another order.
ROUNDED = ("ltx2", "ltx2_gated", "cogvideox", "cogvideox_2b", "cogvideox_1.5", "consisid")
# 4 heads need these, too.
WIDER = {"ltx": {"cross_attention_dim": 64}, "kandinsky5": {"model_dim": 64}, "wan_i2v": {"added_kv_proj_dim": 64},
         "ltx2": {"cross_attention_dim": 64, "audio_num_attention_heads": 4, "audio_cross_attention_dim": 32, "caption_channels": 12}}


def run_all(rank: int, ranks: int, cases: dict) -> dict[str, str | None]:
    """By each case's name the traceback of what it raised, or None."""
    torch.manual_seed(0)
    # diffusers divides ranks by the number of accelerators, of which a CPU has none; gloo gathers equal lengths only.
    torch.accelerator.device_count = lambda: 1
    hooks._all_gather_anything = _gathered
    diffusers.logging.set_verbosity_error()
    found: dict[str, str | None] = {}
    for name, case in cases.items():
        try:
            case(rank, ranks)
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
    return found


def _gathered(tensor, dim, group):
    sizes = hooks.gather_size_by_comm(tensor.shape[dim], group)
    padding = [0, 0] * (tensor.dim() - 1 - dim) + [0, max(sizes) - tensor.shape[dim]]
    mine = nn.functional.pad(tensor, padding).contiguous()
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine, group=group)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes)], dim)


def tiny(name: str, thw=EVEN, prompts=(4,), heads: int = 2, **options):
    """(the model, a call of it), of which ranks can share everything out evenly if the canvas lets them."""
    made = TINY[name]
    if name == "minimax_h3":
        made = replace(made, inputs=partial(tiny_models.minimax_h3, audio=6))
    if heads != 2 and name != "kandinsky5":
        options |= {"num_attention_heads": heads}
    if heads == 4:
        options |= WIDER.get(name, {})
    call = made.call(thw, prompts)
    if heads == 4 and name == "ltx2":
        call |= {of: call[of].repeat(1, 1, 2) for of in ("encoder_hidden_states", "audio_encoder_hidden_states")}
    return made.build(**options).to(made.dtype), cast(call, made.dtype)


def forward(model, call):
    out = model(**call)
    return out[0] if isinstance(out, tuple) else out


def alone(model, call, config=SPARSE, schedule=None):
    """What one process gives."""
    with torch.no_grad(), apply_ssta(model, config, schedule=schedule or Schedule()):
        return forward(model, call)


def parallel(ranks: int, ring: int = 1, anything: bool = False) -> ContextParallelConfig:
    return ContextParallelConfig(ulysses_degree=ranks // ring, ring_degree=ring, ulysses_anything=anything)


def distance(got, want) -> float:
    return float((got - want).abs().max() / want.abs().max())


def close(name, got, want, even=True):
    """As one process: the same bits where every rank's work has the same shapes, and to rounding elsewhere."""
    if even and name not in ROUNDED:
        assert torch.equal(got, want), distance(got, want)
    else:
        bound = {torch.float64: 1e-14, torch.float32: 1e-5}[want.dtype] if name != "kandinsky5" else tiny_models.TOLERANCE[name]
        assert distance(got, want) < bound, distance(got, want)


# The families


def sparse_dense_and_removed(name, rank, ranks):
    """Applied first, then made parallel; sparse and dense; afterwards as if neither had been, or parallel as diffusers has it."""
    model, call = tiny(name)
    with torch.no_grad():
        stock = forward(model, call)
    plan = model._cp_plan
    for schedule in (Schedule(), Schedule(dense_above=0.0)):
        want = alone(model, call, schedule=schedule)
        handle = apply_ssta(model, SPARSE, schedule=schedule)
        if getattr(model, "_parallel_config", None) is None:
            model.enable_parallelism(config=parallel(ranks))
        with torch.no_grad():
            close(name, forward(model, call), want)
            close(name, forward(model, call), want)
        assert all(run.ranks == ranks and run.rank == rank and run.own_heads == 1 for run in handle.report())
        handle.remove()
        assert model._cp_plan is plan and not handle.active
        with torch.no_grad():
            again = forward(model, call)
        if model._parallel_config is None:
            assert torch.equal(again, stock)
        else:
            assert name in ("wan", "wan_i2v", "wan_ti2v", "wan_vace", "skyreels_v2", "kandinsky5", "minimax_h3")
            assert distance(again, stock) < (1e-4 if stock.dtype == torch.float32 else 1e-14)
            # One process' result asks for a whole model.
            model, _ = tiny(name)


def parallel_first_and_odd(name, rank, ranks):
    """Made parallel first, with tokens that ranks do not divide, two prompts of two lengths, and zero padding."""
    model, call = tiny(name, ODD, prompts=(4, 2))
    config = replace(SPARSE, pad_type="zero", kernel_thw=(1, 3, 1))
    want = alone(model, call, config)
    model.enable_parallelism(config=parallel(ranks, anything=True), cp_plan=cp_plan(model))
    with apply_ssta(model, config, schedule=Schedule()), torch.no_grad():
        close(name, forward(model, call), want, even=False)


def backward(model, call) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output and the gradients of a weighted sum of it."""
    model.zero_grad()
    out = forward(model, call)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)).sum().backward()
    return out, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def same_gradients(got, want, bound):
    # A bias before a softmax has a gradient of rounding errors alone.
    largest = max(float(grad.abs().max()) for grad in want.values())
    for name, grad in want.items():
        error = float((got[name] - grad).abs().max()) / max(float(grad.abs().max()), 1e-2 * largest)
        assert error < bound, (name, error)


def gradients(name, rank, ranks, ring=1):
    """Ranks' gradients are parts that add up to one process', with checkpointing too."""
    model, call = tiny(name)
    apply_ssta(model, SPARSE, schedule=Schedule())
    want = backward(model, call)[1]
    for checkpointing in (False, True):
        model, _ = tiny(name)
        apply_ssta(model, SPARSE, schedule=Schedule())
        model.enable_parallelism(config=parallel(ranks, ring))
        if checkpointing:
            model.enable_gradient_checkpointing()
            model.train()
        out, got = backward(model, call)
        for of in want:
            got.setdefault(of, torch.zeros_like(want[of]))
            dist.all_reduce(got[of])
        # Norms and modulations are float32 in most models.
        same_gradients(got, want, 1e-5 if out.dtype == torch.float64 else 1e-2 if name == "kandinsky5" else 1e-3)


def sharded(name, rank, ranks):
    """FSDP2 over the same ranks, whose means need the loss times their number; with checkpointing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, call = tiny(name)
    apply_ssta(model, SPARSE, schedule=Schedule())
    out, want = backward(model, call)
    model, _ = tiny(name)
    model.enable_gradient_checkpointing()
    model.train()
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("ring", "ulysses"))
    apply_ssta(model, SPARSE, schedule=Schedule())
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks, mesh=mesh))
    shard = mesh["ring", "ulysses"]._flatten("shard")
    for block in next(child for child in model.children() if isinstance(child, nn.ModuleList)):
        fully_shard(block, mesh=shard)
    fully_shard(model, mesh=shard)
    model.register_forward_hook(lambda module, args, output: (_times(output[0], ranks), *output[1:]))
    got_out, got = backward(model, call)
    assert torch.equal(got_out, out)
    same_gradients({of: grad.full_tensor() for of, grad in got.items()}, want, 1e-5)


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def _times(x, factor):
    return _Times.apply(x, factor)


# What is attended to, and when


def settings(rank, ranks):
    """Every padding, kind of selection, budget and estimate."""
    model, call = tiny("hunyuan_video_15", prompts=(4, 2))
    for changes in ({"pad_type": "repeat"}, {"threshold": 0.5, "topk": 4, "sampling_type": "similarity"}, {"compensation": "linear"},
                    {"density": 0.4, "topk": None}, {"mask_share_within_head": True}, {"sparse_type": "sta", "kernel_thw": (1, 3, 1)}):
        config = replace(SPARSE, **changes)
        want = alone(model, call, config)
        model.enable_parallelism(config=parallel(ranks), cp_plan=cp_plan(model))
        with apply_ssta(model, config, schedule=Schedule()), torch.no_grad():
            close("hunyuan_video_15", forward(model, call), want, even=not config.mask_share_within_head)


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
            assert torch.equal(forward(model, call), want)
        finally:
            type(attn.processor).__call__ = stock
    assert len(seen) == 2


def pipelines(rank, ranks):
    """Guidance in two passes, a warm-up, selections that serve two steps, two transformers, a density that follows the noise."""
    by_noise = Schedule(density=lambda level: 0.3 if level < 0 else 0.6, dense_steps=0.25)
    for name, schedule in (("wan_2.2", Schedule(dense_steps=0.3, refresh=2)), ("hunyuan_video_15", by_noise), ("ltx", Schedule.warm_up()),
                           ("hunyuan_video_token_replace", Schedule()), ("skyreels_v2_forcing", Schedule())):
        made = PIPELINES[name]
        pipe = made.build()
        config = SSTAConfig(tile_thw=(2, 3, 4), kernel_thw=(1, 1, 1), density=0.3) if schedule is by_noise else SPARSE
        reports = []
        for parallelly in (False, True):
            handle = apply_ssta(pipe, None if schedule is by_noise else config, schedule=schedule, check_ranks=parallelly)
            if parallelly:
                for _, transformer, _, _ in handle.layers():
                    transformer.enable_parallelism(config=parallel(ranks))
            out = latents(pipe, **made.call)
            reports.append(handle.report())
            if not parallelly:
                want = out
                handle.remove()
        assert torch.equal(out, want), name
        for one, part in zip(*reports):
            assert (part.dense_steps, part.steps, part.chosen_steps) == (one.dense_steps, one.steps, one.chosen_steps)


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
    assert torch.equal(latents(pipe, **call), want)
    assert len(handle.report()) == 2


def compiled(rank, ranks):
    """Blocks in one graph each, the exchange in it."""
    model, call = tiny("hunyuan_video_15")
    model = model.float()
    call = cast(call, torch.float32)
    want = alone(model, call)
    apply_ssta(model, SPARSE, schedule=Schedule())
    model.enable_parallelism(config=parallel(ranks))
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
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
        assert torch.equal(*written)


# Mistakes: every rank raises the same, nobody waits for another


def refused(kind, message, function):
    try:
        function()
    except kind as error:
            assert re.search(message, str(error)), str(error)
    else:
        raise AssertionError(f"nothing was raised that says {message!r}")
    # Had a collective begun on some ranks only, this one would not fit it.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == dist.get_world_size()


def mistakes(rank, ranks):
    with torch.no_grad():
        model, call = tiny("wan", ODD)
        with apply_ssta(model, SPARSE, schedule=Schedule()):
            model.enable_parallelism(config=parallel(ranks))
            refused(ValueError, "hidden_states must have tokens that 2 ranks divide, got 315 with a canvas of 5 x 7 x 9.*ulysses_anything",
                    lambda: forward(model, call))
            attn, tokens = model.blocks[0].attn1, tiny("wan")[1]
            forward(model, tokens)
            refused(ValueError, f"hidden_states must have rank {rank} of 2's 96 of the canvas' 4 x 6 x 8 tokens, got 192 video tokens",
                    lambda: attn(torch.zeros(1, 192, 32, dtype=torch.float64)))
        model, call = tiny("minimax_h3")
        with apply_ssta(model, SPARSE, schedule=Schedule()):
            model.enable_parallelism(config=parallel(ranks))
            forward(model, call)
            refused(ValueError, f"hidden_states must have rank {rank} of 2's 104 of 208 tokens, got 208",
                    lambda: model.transformer_blocks[0].attn(torch.zeros(1, 208, 24, dtype=torch.float64)))
        # More ranks than tokens, and a schedule that ranks could follow differently.
        model, call = tiny("wan", (1, 1, 1))
        with apply_ssta(model, SPARSE, schedule=Schedule()):
            model.enable_parallelism(config=parallel(ranks, anything=True))
            refused(ValueError, "at least a token for each of 2 ranks, got 1", lambda: forward(model, call))
    for name in ("ltx", "ltx2"):
        model, call = tiny(name)
        model.enable_parallelism(config=parallel(ranks))
        refused(ValueError, "model must be split over ranks by SSTA's plan, got LTX.*with another, of '', 'rope', 'proj_out'; pass cp_pl",
                partial(apply_ssta, model))
        model, call = tiny(name)
        plan = type(model)._cp_plan
        with apply_ssta(model, SPARSE, schedule=Schedule()):
            model.enable_parallelism(config=parallel(ranks), cp_plan=plan)
            refused(ValueError, "by SSTA's plan", lambda model=model, call=call: forward(model, call))
    model, call = tiny("ltx2")
    with apply_ssta(model, SPARSE, schedule=Schedule()):
        model.enable_parallelism(config=parallel(ranks))
        refused(ValueError, "gradients of LTX2VideoTransformer3DModel must not be recorded on 2 ranks, because its audio",
                lambda: forward(model, call))


def refused_programs(rank, ranks):
    from ssta.pipelines.calibrate import calibrate
    from ssta.pipelines.compare import compare
    from ssta.pipelines.configurations import dense

    pipe = PIPELINES["wan"].build()
    configuration = dense(pipe)
    pipe.transformer.enable_parallelism(config=parallel(ranks))
    refused(ValueError, "on 1 rank.*WanTransformer3DModel on 2", lambda: calibrate(pipe, ["a"], target=0.1))
    refused(ValueError, "on 1 rank.*WanTransformer3DModel on 2", lambda: compare(pipe, [configuration], {"num_inference_steps": 2}))


def caches_that_look(rank, ranks):
    model, call = tiny("wan")
    with apply_ssta(model, SPARSE, schedule=Schedule()), torch.no_grad():
        model.enable_parallelism(config=parallel(ranks))
        model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
        refused(ValueError, "FirstBlockCacheConfig", lambda: forward(model, call))


def shared_patterns(rank, ranks):
    """A scorer of the user's own sees a rank's heads, and the pattern is for all."""
    model, call = tiny("wan")
    processor = model.blocks[0].attn1.processor
    shared = replace(SPARSE, mask_share_within_head=True, sampling_type=similarity)
    with apply_ssta(model, shared, schedule=Schedule()), torch.no_grad():
        model.enable_parallelism(config=parallel(ranks))
        refused(ValueError, "on several ranks with mask_share_within_head", lambda: forward(model, call))
    refused(ValueError, "on several ranks with mask_share_within_head", lambda: apply_ssta(model, shared, schedule=Schedule()))
    assert model.blocks[0].attn1.processor is processor and processor._parallel_config is model._parallel_config


def similarity(q, k):
    return q @ k.mT


def ranks_that_differ(rank, ranks):
    """Without the check other noise on another rank gives a video of both; with it an error on both."""
    pipe = PIPELINES["wan"].build()
    call = PIPELINES["wan"].call
    for setting, message in (({}, "hidden_states must be the same on all ranks, got .* on rank 0 and .* on rank 1"),
                             ({"topk": 2 + rank}, "config must be the same on all ranks")):
        handle = apply_ssta(pipe, replace(SPARSE, **setting), schedule=Schedule(), check_ranks=True)
        if pipe.transformer._parallel_config is None:
            pipe.transformer.enable_parallelism(config=parallel(ranks))
        seed = 0 if setting else rank
        generator = torch.Generator().manual_seed(seed)
        refused(ValueError, message, partial(pipe, **call, num_inference_steps=2, generator=generator, output_type="latent"))
        handle.remove()


def more_ranks_than_heads(rank, ranks):
    for name, ring in (("wan", 1), ("hunyuan_video_15", 1), ("ltx2", 1), ("ltx2", 2), ("minimax_h3", 1)):
        model, call = tiny(name)
        message = "must have heads that 4 ranks divide, .*, got 2 heads" if name == "ltx2" else "4 ranks and 2 heads"
        with apply_ssta(model, SPARSE, schedule=Schedule()), torch.no_grad():
            model.enable_parallelism(config=parallel(ranks, ring))
            refused(ValueError, message, lambda model=model, call=call: forward(model, call))


# Four ranks


def four(name, ring, rank, ranks):
    """4 heads on 4 ranks, as one exchange or, where diffusers has rings, over the same ranks."""
    model, call = tiny(name, heads=4)
    want = alone(model, call)
    apply_ssta(model, SPARSE, schedule=Schedule())
    model.enable_parallelism(config=parallel(ranks, ring))
    with torch.no_grad():
        close(name, forward(model, call), want, even=name != "minimax_h3")


def beyond_the_heads(name, rank, ranks):
    """2 heads on 2 x 2 ranks: along the ring each has rows of its own."""
    model, call = tiny(name, prompts=(4, 2))
    linear = replace(SPARSE, compensation="linear")
    for config, schedule in ((SPARSE, Schedule()), (linear, Schedule()), (SPARSE, Schedule(dense_above=0.0))):
        want = alone(model, call, config, schedule)
        again, _ = tiny(name)
        handle = apply_ssta(again, config, schedule=schedule)
        again.enable_parallelism(config=parallel(ranks, ring=2))
        with torch.no_grad():
            close(name, forward(again, call), want, even=False)
        run = handle.report()[0]
        assert (run.rank, run.ranks, run.own_heads, run.heads) == (rank, 4, 1, 2) and run.exchange_seconds > 0


def uneven_heads(rank, ranks):
    """6 heads on 4 ranks: 2, 2, 1, 1."""
    model, call = tiny("wan", ODD, heads=6)
    want = alone(model, call)
    handle = apply_ssta(model, SPARSE, schedule=Schedule())
    model.enable_parallelism(config=parallel(ranks, anything=True))
    with torch.no_grad():
        close("wan", forward(model, call), want, even=False)
    assert handle.report()[0].own_heads == (2, 2, 1, 1)[rank]


TRAINED = [name for name in TINY if not name.startswith("ltx2")]
TWO = {
    **{f"{name}: sparse, dense, removed": partial(sparse_dense_and_removed, name) for name in TINY},
    **{f"{name}: parallel first, odd": partial(parallel_first_and_odd, name) for name in TINY},
    **{f"{name}: gradients": partial(gradients, name) for name in TRAINED},
    **{f"{name}: FSDP": partial(sharded, name) for name in ("wan", "hunyuan_video_15", "minimax_h3")},
    **{case.__name__: case for case in (settings, masks, pipelines, cached, compiled, reported, example, mistakes, refused_programs,
                                        caches_that_look, shared_patterns, ranks_that_differ)},
}
FOUR = {
    **{f"{name}: 4 heads, ring {ring}": partial(four, name, ring)
       for name, ring in (("wan", 2), ("hunyuan_video_i2v", 1), ("motif_video", 2), ("ltx", 4), ("ltx2", 2), ("cogvideox", 1), ("mochi", 2),
                          ("kandinsky5", 1), ("minimax_h3", 2), ("skyreels_v2", 4))},
    **{f"{name}: beyond the heads": partial(beyond_the_heads, name)
       for name in ("wan", "hunyuan_video_15", "mochi", "motif_video", "minimax_h3")},
    "gradients beyond the heads": partial(gradients, "hunyuan_video", ring=2),
    "uneven heads": uneven_heads, "more ranks than heads": more_ranks_than_heads,
}
