"""Mistakes on several ranks: every rank raises the same, nobody waits for another. Cases of rank_cases."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import diffusers
import torch
from rank_harness import ODD, SPARSE, alone, close, forward, parallel, refused, tiny
from tiny_pipelines import PIPELINES

from ssta.pipelines import Schedule, apply_ssta


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


def caches_that_look(rank, ranks):
    model, call = tiny("wan")
    with apply_ssta(model, SPARSE, schedule=Schedule()), torch.no_grad():
        model.enable_parallelism(config=parallel(ranks))
        model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
        refused(ValueError, "FirstBlockCacheConfig", lambda: forward(model, call))


def shared_patterns(rank, ranks):
    """A rank sees its own heads, and the pattern is for all."""
    model, call = tiny("wan")
    processor = model.blocks[0].attn1.processor
    shared = replace(SPARSE, mask_share_within_head=True)
    with apply_ssta(model, shared, schedule=Schedule()), torch.no_grad():
        model.enable_parallelism(config=parallel(ranks))
        refused(ValueError, "mask_share_within_head = False on several ranks", lambda: forward(model, call))
    refused(ValueError, "mask_share_within_head = False on several ranks", lambda: apply_ssta(model, shared, schedule=Schedule()))
    assert model.blocks[0].attn1.processor is processor and processor._parallel_config is model._parallel_config


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


def settings_that_differ(rank, ranks):
    """Another configuration, or another kind of step, on one rank is an error on all of them in the first step, without any check_ranks."""
    for settings, schedule in (({"topk": 2 + rank}, Schedule()), ({}, Schedule(dense_layers=range(2) if rank else ()))):
        # A canvas that no case has had: what ranks know of already they do not compare.
        model, call = tiny("wan", (4, 6, 10))
        with apply_ssta(model, replace(SPARSE, **settings), schedule=schedule), torch.no_grad():
            model.enable_parallelism(config=parallel(ranks))
            refused(ValueError, "config must be the same on all ranks", lambda model=model, call=call: forward(model, call))


def another_negative_prompt(rank, ranks):
    """check_ranks looks at all forwards of a generation's first step: guidance takes two."""
    pipe = PIPELINES["wan"].build()
    call = {**PIPELINES["wan"].call, "guidance_scale": 5.0}
    handle = apply_ssta(pipe, SPARSE, schedule=Schedule(), check_ranks=True)
    pipe.transformer.enable_parallelism(config=parallel(ranks))
    negative = {"negative_prompt": "red" if rank else "blue"} if "prompt" in call else {
        "negative_prompt_embeds": call["negative_prompt_embeds"] + rank}
    refused(ValueError, "encoder_hidden_states must be the same on all ranks", partial(
        pipe, **{**call, **negative}, num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="latent"))
    handle.remove()


def more_ranks_than_heads(rank, ranks):
    for name in ("wan", "hunyuan_video_15", "ltx2", "minimax_h3"):
        model, call = tiny(name)
        message = "must have heads that 4 ranks divide, .*, got 2 heads" if name == "ltx2" else (
            "4 ranks and 2 heads; take at most 2 ranks, which is ulysses_degree in diffusers")
        with apply_ssta(model, SPARSE, schedule=Schedule()), torch.no_grad():
            model.enable_parallelism(config=parallel(ranks))
            refused(ValueError, message, lambda model=model, call=call: forward(model, call))


def rings(rank, ranks):
    """Refused whichever comes first, and gone after remove."""
    message = r"ring_degree must be 1 under SSTA, got 2 with ulysses_degree = 2; take ContextParallelConfig\(ulysses_degree=4\)"
    config = diffusers.ContextParallelConfig(ring_degree=2, ulysses_degree=ranks // 2)
    model, call = tiny("wan", heads=4)
    with torch.no_grad():
        stock = forward(model, call)
        with apply_ssta(model, SPARSE, schedule=Schedule()):
            model.enable_parallelism(config=config)
            refused(ValueError, message, lambda: forward(model, call))
        assert model._parallel_config is None and torch.equal(forward(model, call), stock)
        model.enable_parallelism(config=config)
        refused(ValueError, message, lambda: apply_ssta(model, SPARSE, schedule=Schedule()))


def without_rope(rank, ranks):
    """An argument that the plan splits and the caller leaves out is none."""
    model, call = tiny("cogvideox_2b")
    call.pop("image_rotary_emb", None)
    want = alone(model, call)
    with apply_ssta(model, SPARSE, schedule=Schedule()), torch.no_grad():
        model.enable_parallelism(config=parallel(ranks))
        close("cogvideox_2b", forward(model, call), want)
