"""Training through SSTA: teacher and student in one call, a density that falls, checkpointing that keeps what was selected."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig
from tiny_hunyuan import SPARSE
from tiny_models import TINY, run, steps_at
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from ssta import SSTAConfig
from ssta.pipelines import Ramp, Schedule, apply_ssta, frozen_checkpoint, set_density, teacher_student
from ssta.pipelines.patch import processor
from ssta.pipelines.schedule.changes import changed
from ssta.pipelines.training.kept_selection import KeptSelection

# No window, so that a density is met exactly; 2 x 2 x 2 tiles.
TILES = SSTAConfig(tile_thw=(2, 3, 4), kernel_thw=(1, 1, 1), sparse_type="block_attn", density=0.25)
ESTIMATED = replace(TILES, compensation="linear")
LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
EACH = pytest.mark.parametrize("name", ["wan", "ltx", "cogvideox", "hunyuan_video"])


def with_lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(7)
    model.add_adapter(LORA, "one")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return model


def gradients(model: nn.Module, call: dict) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**call)[0].square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


class Wrapped(nn.Module):
    """What stands around a transformer: a data-parallel wrapper, or a model that holds one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **call):
        return self.inner(**call)


# Teacher and student


@EACH
def test_the_teacher_is_the_dense_model_without_its_adapters(name):
    model, call = TINY[name].build(), TINY[name].call()
    dense = run(model, call)
    with_lora(model)
    trained = {key: parameter.requires_grad for key, parameter in model.named_parameters()}
    with apply_ssta(model, TILES, schedule=Schedule()) as handle:
        sparse = run(model, call)
        teacher, student = teacher_student(Wrapped(model))(**call)
        torch.testing.assert_close(teacher, dense, rtol=1e-4, atol=1e-4)
        alone = teacher_student(model).teacher(**call)
        assert torch.equal(alone, teacher) and not alone.requires_grad
        assert torch.equal(student, sparse) and not torch.allclose(teacher, student, rtol=1e-2)
        assert student.requires_grad and not teacher.requires_grad
        # Nothing is left behind, and the teacher's forwards are none of the report's.
        assert torch.equal(run(model, call), sparse) and handle.report()[0].steps == 3 and handle.report()[0].dense_steps == 0
        assert {key: parameter.requires_grad for key, parameter in model.named_parameters()} == trained


def test_a_teacher_of_its_own_stays_where_it_is():
    model, call = TINY["wan"].build(), TINY["wan"].call()
    dense = run(model, call)
    for with_ssta in (False, True):
        frozen = copy.deepcopy(model).requires_grad_(False)
        with apply_ssta(model, TILES, schedule=Schedule()):
            frozen = copy.deepcopy(model).requires_grad_(False) if with_ssta else frozen
            both = teacher_student(model, frozen)
            nn.functional.mse_loss(*both(**call)).backward()
            assert all(parameter.grad is None for parameter in frozen.parameters())
            before = copy.deepcopy(model.state_dict())
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            torch.testing.assert_close(both(**call).teacher, dense, rtol=1e-4, atol=1e-4)
            model.load_state_dict(before), model.zero_grad()


def test_distillation_brings_the_sparse_model_nearer_to_the_dense_one():
    model, call = with_lora(TINY["wan"].build()), TINY["wan"].call()
    with apply_ssta(model, TILES, schedule=Schedule()):
        both = teacher_student(model)
        optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
        losses = []
        for _ in range(12):
            loss = nn.functional.mse_loss(*both(**call))
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_weights_that_the_teacher_s_autocast_has_cast_still_get_gradients():
    model, call = with_lora(TINY["wan"].build()), TINY["wan"].call()
    with apply_ssta(model, TILES, schedule=Schedule()):
        with torch.autocast("cpu", torch.bfloat16):
            teacher, student = teacher_student(model)(**call)
        (student.float() - teacher.float()).square().mean().backward()
        assert torch.is_autocast_cache_enabled()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters() if parameter.requires_grad)
    # The same for a model's own weights, here its own teacher's.
    model = TINY["wan"].build()
    with apply_ssta(model, TILES, schedule=Schedule()):
        with torch.autocast("cpu", torch.bfloat16):
            teacher, student = teacher_student(model, model)(**call)
        (student.float() - teacher.float()).square().mean().backward()
    assert model.blocks[0].ffn.net[0].proj.weight.grad.any()


def test_schedules_are_the_student_s():
    """A step that is dense for the student is counted once, and the teacher's is not at all."""
    model, call, scheduler = with_lora(TINY["wan"].build()), TINY["wan"].call(), steps_at(500.0, 200.0, 100.0)
    with apply_ssta(model, TILES, schedule=Schedule(dense_steps=0.3), scheduler=scheduler) as handle:
        both = teacher_student(model)
        apart = []
        for timestep in scheduler.timesteps:
            teacher, student = both(**call | {"timestep": timestep.expand(1)})
            model.disable_adapters()
            apart.append(not torch.allclose(run(model, call | {"timestep": timestep.expand(1)}), teacher, atol=1e-5))
            model.enable_adapters()
        assert apart == [False, True, True]
        assert [(layer.steps, layer.dense_steps) for layer in handle.report()] == [(3, 1)] * 2


def test_bad_models():
    model = TINY["wan"].build()
    with pytest.raises(TypeError, match="model must be a module, got str"):
        teacher_student("wan")
    with pytest.raises(ValueError, match="model must have SSTA applied, got WanTransformer3DModel without it"):
        teacher_student(model)
    with apply_ssta(model, TILES):
        with pytest.raises(TypeError, match="teacher must be a module, got int"):
            teacher_student(model, 3)
        with pytest.raises(ValueError, match="teacher must be given where model's own weights are trained, got None, and .* more that req"):
            teacher_student(model)
        teacher_student(model.requires_grad_(False))
        # An adapter beside weights that are trained too.
        with_lora(model).proj_out.requires_grad_(True)
        with pytest.raises(ValueError, match="got None, and proj_out.weight and 1 more"):
            teacher_student(model)


# The density


def test_a_density_that_is_set_is_the_one_that_was_applied():
    model, call = TINY["wan"].build(layers=4), TINY["wan"].call()
    own = replace(TILES, density=0.25)
    dense, schedule = run(model, call), Schedule(layer_configs={1: own}, dense_layers=(3,))
    expected = {}
    for density in (0.5, 0.125):
        with apply_ssta(model, replace(TILES, density=density), schedule=schedule):
            expected[density] = run(model, call)
    # In place of a density, and of another budget.
    for config in (TILES, replace(TILES, density=None, topk=2)):
        with apply_ssta(model, config, schedule=schedule) as handle:
            for density in (0.5, 0.125, 0.5):
                set_density(handle, density)
                assert torch.equal(run(model, call), expected[density]) and handle.config.density == density
                assert [layer.density for layer in handle.report()] == [density, 0.25, density, 1]
            set_density(handle, 1)
            torch.testing.assert_close(run(model, call), dense, rtol=1e-4, atol=1e-4)
            assert handle.report()[0].layer and handle.report()[0].dense_steps == 1 and "dense" in str(handle.report())
            set_density(handle, 0.5)
            assert torch.equal(run(model, call), expected[0.5])
        assert torch.equal(run(model, call), dense)


def test_a_density_takes_the_place_of_any_budget_in_all_variants():
    config = changed(SSTAConfig.hunyuan_video_15(), density=0.3)
    assert config.density == 0.3 and config.topk is None and config.tile_thw == (6, 8, 8)
    image = config.for_canvas((1, 45, 80))
    assert (image.density, image.topk, image.tile_thw) == (0.3, None, (1, 16, 24)) and config.for_canvas((31, 45, 80)).topk is None
    varied = replace(TILES, density=0.7, variants=((1, {"density": 0.9, "tile_thw": (1, 4, 4)}),))
    assert changed(varied, density=0.2).for_canvas((1, 8, 8)) == replace(TILES, tile_thw=(1, 4, 4), density=0.2)


def test_bad_densities():
    model = TINY["wan"].build()
    handle = apply_ssta(model, TILES)
    for density, error, message in ((0, ValueError, r"density must lie in \(0, 1\].* got 0"), (1.5, ValueError, "got 1.5"),
                                    (float("nan"), ValueError, "got nan"), ("half", TypeError, "density must be a number, got 'half'")):
        with pytest.raises(error, match=message):
            set_density(handle, density)
    with pytest.raises(TypeError, match="handle must be what apply_ssta returned, got WanTransformer3DModel"):
        set_density(model, 0.5)
    assert handle.config == TILES
    handle.remove()
    with pytest.raises(ValueError, match="handle must be one whose SSTA is still applied"):
        set_density(handle, 0.5)
    for config, schedule, message in (
            (TILES, Schedule(layer_configs={0: TILES, 1: TILES}), "configuration of their own, got none in WanTransformer3DModel"),
            (SSTAConfig(tile_thw=(2, 3, 4), kernel_thw=(3, 1, 1), sparse_type="sta"), Schedule(), "sparse_type must be .* density = 0.5")):
        with apply_ssta(model, config, schedule=schedule) as handle, pytest.raises(ValueError, match=message):
            set_density(handle, 0.5)


def test_a_ramp_falls_in_equal_factors_to_its_target():
    handle = apply_ssta(TINY["wan"].build(), TILES)
    ramp = Ramp(handle, 0.125, 30)
    assert ramp.densities == pytest.approx((1, 0.5, 0.25, 0.125))
    assert [ramp.at(step) for step in (0, 9, 10, 19, 20, 29, 30, 10**6)] == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125])
    assert Ramp(handle, 0.2, 0).densities == (0.2,) and Ramp(handle, 1, 9).densities == (1,)
    # With fewer steps there are those that a step has.
    short = Ramp(handle, 0.25, 2)
    assert tuple(short.at(step) for step in range(3)) == short.densities == pytest.approx((1, 0.25 ** (1 / 3), 0.25))
    assert Ramp(handle, 0.25, 1).densities == (1, 0.25)
    assert ramp.set(25) == handle.config.density == ramp.densities[2]


@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_a_ramp_follows_the_optimizer_of_a_loop_that_knows_nothing_of_it(name, tmp_path):
    """A LoRA in accelerate's loop, with gradients accumulated; what is resumed goes on with the bits of what never stopped."""
    calls, reached = [TINY[name].call() for _ in range(8)], []

    def train(first: int, last: int, resume: bool = False) -> list[torch.Tensor]:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = with_lora(TINY[name].build())
        handle = apply_ssta(model, TILES, schedule=Schedule())
        model.enable_gradient_checkpointing(frozen_checkpoint)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
        accelerator.register_for_checkpointing(Ramp(handle, 0.25, steps=3).follow(optimizer))
        if resume:
            accelerator.load_state(str(tmp_path))
        velocities = teacher_student(model)
        for call in calls[first:last]:
            reached.append(handle.config.density)
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(*velocities(**call)))
                optimizer.step(), optimizer.zero_grad()
        if last < len(calls):
            accelerator.save_state(str(tmp_path))
        return [parameter.detach().clone() for parameter in trained]

    whole = train(0, 8)
    assert reached == pytest.approx([x for x in (1, 0.25 ** (1 / 3), 0.25 ** (2 / 3), 0.25) for _ in range(2)])
    start = train(0, 0)
    assert all(not torch.equal(x, y) for x, y in zip(whole, start))
    train(0, 4)
    resumed = train(4, 8, resume=True)
    assert all(torch.equal(x, y) for x, y in zip(whole, resumed))


def test_a_ramp_ends_with_its_ssta():
    model = TINY["wan"].build()
    handle, optimizer = apply_ssta(model, TILES, schedule=Schedule()), torch.optim.SGD(model.parameters())
    ramp = Ramp(handle, 0.25, steps=1).follow(optimizer)
    assert handle.config.density == 1 and ramp.state_dict() == {"step": 0}
    optimizer.step()
    assert handle.config.density == 0.25
    handle.remove()
    optimizer.step(), optimizer.step()
    assert ramp.state_dict() == {"step": 1}
    with pytest.raises(TypeError, match="optimizer must be one of torch's, or accelerate's around it, got list"):
        ramp.follow([])


@pytest.mark.parametrize("options, error, message", [
    (dict(target=0), ValueError, r"target must lie in \(0, 1\]"), (dict(steps=-1), ValueError, "steps must be at least 0"),
    (dict(steps=0.5), TypeError, "steps must be"), (dict(handle=None), TypeError, "handle must be what apply_ssta returned, got NoneType")])
def test_bad_ramps(options, error, message):
    handle = apply_ssta(TINY["wan"].build(), TILES)
    with pytest.raises(error, match=message):
        Ramp(**{"handle": handle, "target": 0.2, "steps": 5} | options)


# Checkpointing


@EACH
@pytest.mark.parametrize("config", [SPARSE, TILES, ESTIMATED], ids=["window", "density", "estimated"])
def test_checkpointing_recomputes_with_the_same_selection(name, config, monkeypatch):
    """The same gradients as without it; and each selection is made once."""
    model, call = TINY[name].build(), TINY[name].call(prompts=(3, 6))
    layer, given = processor.attend, []

    def noted(*args, **options):
        result = layer(*args, **options)
        given.append((options["selection"] is not None, result.selection.blocks.to_mask()))
        return result

    with apply_ssta(model, config, schedule=Schedule(dense_layers=(1,))) as handle:
        plain = gradients(model, call)
        monkeypatch.setattr(processor, "attend", noted)
        model.enable_gradient_checkpointing(frozen_checkpoint)
        again = gradients(model, call)
        assert plain.keys() == again.keys() and all(torch.equal(again[key], grad) for key, grad in plain.items())
        assert [reused for reused, _ in given] == [False, True] and torch.equal(given[0][1], given[1][1])
        assert all(of.holder.frozen is None for *_, layers in handle.layers() for _, of in layers)


def test_what_comes_between_forward_and_backward_changes_nothing():
    """Another canvas, another density, the dense teacher, another forward's backward: each recomputation is of its own forward."""
    model, call, other = TINY["wan"].build(layers=3), TINY["wan"].call(), TINY["wan"].call(thw=(4, 6, 10), seed=3)

    def both_gradients(interleaved: bool, then: float = 0.5) -> list[torch.Tensor]:
        model.zero_grad()
        set_density(handle, 0.25)
        first = model(**call)[0].square().sum()
        if not interleaved:
            first.backward()
        set_density(handle, then)
        teacher_student(model, model)(**other)
        second = model(**other)[0].square().sum()
        run(model, call)
        if interleaved:
            first.backward()
        second.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    with apply_ssta(model, TILES, schedule=Schedule()) as handle:
        plain = both_gradients(False)
        model.enable_gradient_checkpointing(frozen_checkpoint)
        assert all(torch.equal(ours, expected) for ours, expected in zip(both_gradients(True), plain, strict=True))
        # A function that SSTA does not know has no forward's state.
        model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=False))
        with pytest.raises(ValueError, match="canvas"):
            both_gradients(True, then=0.25)
        # Lists of another density have another length, which torch sees before the canvas is another one.
        with pytest.raises(CheckpointError, match="different metadata"):
            both_gradients(True)


def test_diffusers_checkpointing_recomputes_at_the_density_of_its_forward():
    model, call = TINY["wan"].build(), TINY["wan"].call()
    with apply_ssta(model, TILES, schedule=Schedule()) as handle:
        plain = gradients(model, call)
        model.enable_gradient_checkpointing()
        model.zero_grad()
        loss = model(**call)[0].square().mean()
        set_density(handle, 0.5)
        loss.backward()
        assert all(torch.equal(model.get_parameter(name).grad, expected) for name, expected in plain.items())


def test_a_selection_that_would_come_out_otherwise_is_kept(monkeypatch):
    """As from kernels that give other bits the second time: chosen anew, the gradients would be those of other tiles."""
    model, call = TINY["wan"].build(), TINY["wan"].call()
    layer, calls = processor.attend, []

    def fickle(query, key, value, layout, config, **options):
        calls.append(0)
        if options["selection"] is None and len(calls) > 2:
            config = replace(config, sampling_type=lambda q, k: -(q @ k.mT))
        return layer(query, key, value, layout, config, **options)

    with apply_ssta(model, TILES, schedule=Schedule()):
        plain = gradients(model, call)
        monkeypatch.setattr(processor, "attend", fickle)
        same = {}
        for function in (None, frozen_checkpoint):
            model.enable_gradient_checkpointing(*([function] if function else []))
            calls.clear()
            again = gradients(model, call)
            same[function] = all(torch.equal(again[key], grad) for key, grad in plain.items())
    assert same == {None: False, frozen_checkpoint: True}


def test_selections_go_with_the_graph():
    import gc
    import weakref

    model, call, kept = TINY["wan"].build(), TINY["wan"].call(), []
    keep = KeptSelection.keep
    with apply_ssta(model, TILES, schedule=Schedule()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeptSelection, "keep", lambda self, *args: kept.append(weakref.ref(self)) or keep(self, *args))
        model.enable_gradient_checkpointing(frozen_checkpoint)
        loss = model(**call)[0].square().mean()
        gc.collect()
        assert len(kept) == 2 and all(of() is not None for of in kept)
        loss.backward()
        del loss
        gc.collect()
        assert all(of() is None for of in kept)


def test_functions_that_it_cannot_look_into():
    with pytest.raises(TypeError, match="function must be a module or a method of one, got function"):
        frozen_checkpoint(lambda x: x, torch.ones(1))
    # What has no SSTA is checkpointed as ever.
    layer = nn.Linear(2, 2)
    assert torch.equal(frozen_checkpoint(layer.__call__, torch.ones(1, 2)), layer(torch.ones(1, 2)))


# Sharded


def test_sharded_weights_get_the_same_gradients(tmp_path):
    """FSDP2 in one process: teacher, student and recomputation, whose blocks gather their weights again."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def gradients_of(model) -> dict[str, torch.Tensor]:
        nn.functional.mse_loss(*teacher_student(model)(**call)).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    model, call = with_lora(TINY["wan"].build()), TINY["wan"].call()
    with apply_ssta(model, TILES, schedule=Schedule()):
        expected = gradients_of(model)
    model = with_lora(TINY["wan"].build())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with apply_ssta(model, TILES, schedule=Schedule()):
            model.enable_gradient_checkpointing(frozen_checkpoint)
            mesh = init_device_mesh("cpu", (1,))
            for block in (*model.blocks, model):
                fully_shard(block, mesh=mesh)
            found = {name: grad.full_tensor() for name, grad in gradients_of(model).items()}
    finally:
        dist.destroy_process_group()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], grad) for name, grad in expected.items())
