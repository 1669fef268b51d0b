"""Every family on several ranks against one process: outputs, removal, gradients, sharded weights. Cases of rank_cases."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from rank_harness import ODD, SPARSE, alone, close, distance, forward, parallel, tiny
from tiny_models import TINY, all_dense, cast, helios_with_histories
from torch import nn

from ssta.pipelines import Schedule, apply_ssta, cp_plan


def sparse_dense_and_removed(name, rank, ranks):
    """Applied first, then made parallel; sparse and dense; afterwards as if neither had been, or parallel as diffusers has it."""
    model, call = tiny(name)
    with torch.no_grad():
        stock = forward(model, call)
    plan = model._cp_plan
    for schedule in (Schedule(), all_dense(model)):
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
            assert name in ("wan", "wan_i2v", "wan_ti2v", "wan_vace", "chronoedit", "skyreels_v2", "kandinsky5", "minimax_h3")
            assert distance(again, stock) < (1e-4 if stock.dtype == torch.float32 else 1e-12)
            # One process' result asks for a whole model.
            model, _ = tiny(name)


def parallel_first_and_odd(name, rank, ranks):
    """Made parallel first, with tokens that ranks do not divide, two prompts of two lengths, and zero padding."""
    model, call = tiny(name, ODD, prompts=(4, 2))
    config = replace(SPARSE, pad_type="zero", kernel_thw=(1, 3, 1))
    want = alone(model, call, config)
    model.enable_parallelism(config=parallel(ranks, anything=True), cp_plan=cp_plan(model))
    with apply_ssta(model, config, schedule=Schedule()), torch.no_grad():
        close(name, forward(model, call), want)


def backward(model, call, times=1) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output and the gradients of a weighted sum of it, so many times."""
    model.zero_grad()
    out = forward(model, call)
    (times * out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)).sum().backward()
    return out, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def same_gradients(got, want, bound):
    # A bias before a softmax has a gradient of rounding errors alone.
    largest = max(float(grad.abs().max()) for grad in want.values())
    for name, grad in want.items():
        error = float((got[name] - grad).abs().max()) / max(float(grad.abs().max()), 1e-2 * largest)
        assert error < bound, (name, error)


def gradients(name, rank, ranks):
    """Ranks' gradients are parts that add up to one process', with checkpointing, and for some families without it."""
    model, call = tiny(name)
    apply_ssta(model, SPARSE, schedule=Schedule())
    want = backward(model, call)[1]
    for checkpointing in (False, True) if name in ("wan", "hunyuan_video", "ltx") else (True,):
        model, _ = tiny(name)
        apply_ssta(model, SPARSE, schedule=Schedule())
        model.enable_parallelism(config=parallel(ranks))
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
    got_out, got = backward(model, call, times=ranks)
    close(name, got_out, out)
    same_gradients({of: grad.full_tensor() for of, grad in got.items()}, want, 1e-5)


def four(name, rank, ranks):
    """4 heads on 4 ranks."""
    model, call = tiny(name, heads=4)
    want = alone(model, call)
    apply_ssta(model, SPARSE, schedule=Schedule())
    model.enable_parallelism(config=parallel(ranks))
    with torch.no_grad():
        close(name, forward(model, call), want)


def uneven_heads(rank, ranks):
    """6 heads on 4 ranks: 2, 2, 1, 1."""
    model, call = tiny("wan", ODD, heads=6)
    want = alone(model, call)
    handle = apply_ssta(model, SPARSE, schedule=Schedule())
    model.enable_parallelism(config=parallel(ranks, anything=True))
    with torch.no_grad():
        close("wan", forward(model, call), want)
    assert handle.report()[0].own_heads == (2, 2, 1, 1)[rank]


def whole_after(rank, ranks):
    """Models whose stock processors would be right on the ranks, but for their heads, are whole after remove."""
    for heads, anything in ((6, True), (4, False)):
        model, call = tiny("wan", heads=heads)
        with torch.no_grad():
            stock = forward(model, call)
            handle = apply_ssta(model, SPARSE, schedule=Schedule())
            model.enable_parallelism(config=parallel(ranks, anything=anything))
            forward(model, call)
            handle.remove()
            assert (model._parallel_config is None) == (heads == 6)
            again = forward(model, call)
        assert torch.equal(again, stock) if model._parallel_config is None else distance(again, stock) < 1e-4


def histories(rank, ranks):
    """Helios' histories and its chunk as one run, of which a rank may have none of the chunk; outputs and gradients."""
    tiny_helios = replace(TINY["helios"], inputs=helios_with_histories)
    for thw in (ODD, (1, 4, 4)):
        call = cast(tiny_helios.call(thw, (4,)), torch.float64)
        model = tiny_helios.build(num_attention_heads=4).double()
        apply_ssta(model, SPARSE, schedule=Schedule())
        want = backward(model, call)[1]
        with torch.no_grad():
            expected = forward(model, call)
        model = tiny_helios.build(num_attention_heads=4).double()
        apply_ssta(model, SPARSE, schedule=Schedule())
        model.enable_parallelism(config=parallel(ranks, anything=True))
        with torch.no_grad():
            close("helios", forward(model, call), expected)
        got = backward(model, call)[1]
        for of in want:
            got.setdefault(of, torch.zeros_like(want[of]))
            dist.all_reduce(got[of])
        same_gradients(got, want, 1e-5)
