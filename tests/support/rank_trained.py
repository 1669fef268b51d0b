"""Checkpoints that others trained sparse, on several ranks against one process: outputs, gradients, steps. Cases of rank_cases."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from rank_families import backward, same_gradients
from rank_harness import EVEN, ODD, close, forward, parallel, refused, tiny

from ssta.pipelines import apply_sla, apply_ssta, apply_vsa, remove_ssta


def applied(name, method, model):
    """The method on a tiny model, with a layer of random weights in each attention where the method has one."""
    attn = next(module for module in model.modules() if hasattr(module, "to_q"))
    stack, of = ("transformer_blocks.{}.attn", "attn") if name == "minimax_h3" else ("blocks.{}.attn1", "attn1")
    outputs, inputs = (attn.to_q.weight.shape if method == "vsa" else (attn.to_q.out_features // attn.heads,) * 2)
    generator = torch.Generator().manual_seed(3)
    module = "to_gate_compress" if method == "vsa" else "proj_l"
    layers = len(model.get_submodule(stack.partition(".")[0]))
    weights = {f"{stack.format(i)}.{module}.weight": torch.randn(outputs, inputs, generator=generator) / 4 for i in range(layers)}
    if method == "vsa":
        return apply_vsa(model, weights, sparsity=0.6)
    return apply_sla(model, None if name == "minimax_h3" else weights, density=0.5)


def trained(name, method, rank, ranks):
    """As one process: evenly, and, made parallel first, with tokens that ranks do not divide; the gradients of all ranks add up."""
    for thw, anything in ((EVEN, False), (ODD, True)):
        model, call = tiny(name, thw)
        applied(name, method, model)
        want, grads = backward(model, call)
        model, _ = tiny(name, thw)
        if anything:
            model.enable_parallelism(config=parallel(ranks, anything=True))
        handle = applied(name, method, model)
        if not anything:
            model.enable_parallelism(config=parallel(ranks))
        with torch.no_grad():
            close(name, forward(model, call), want)
        out, got = backward(model, call)
        close(name, out, want)
        for of in grads:
            got.setdefault(of, torch.zeros_like(grads[of]))
            dist.all_reduce(got[of])
        same_gradients(got, grads, 1e-5)
        run = handle.report()[0]
        assert (run.rank, run.ranks, run.own_heads, run.heads) == (rank, ranks, 2 // ranks, 2) and run.exchange_seconds > 0
        handle.remove()


def trained_alike(rank, ranks):
    """Ranks that are given other sparsities find out."""
    model, call = tiny("wan")
    model.enable_parallelism(config=parallel(ranks))
    applied("wan", "vsa", model)
    remove_ssta(model)
    weights = {f"blocks.{i}.to_gate_compress.weight": torch.zeros(32, 32) for i in range(2)}
    apply_vsa(model, weights, sparsity=(0.5, 0.75)[rank])
    with torch.no_grad():
        refused(ValueError, "config must be the same on all ranks", partial(forward, model, call))
    remove_ssta(model)
    with apply_ssta(model), torch.no_grad():
        assert forward(model, call).isfinite().all()
