"""One layer for every call of a kind, in whatever world it comes: its spec, what is kept of it, and the same result everywhere."""

import copy
import dataclasses
import pickle
import subprocess
import sys
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection_cases import cases, layer_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid, dense_attention, explain, prepare, ssta_attention
from ssta.attention import attend
from ssta.kernels import Deferred, Projection, Route
from ssta.kernels.lowering.plans import Planned
from ssta.layer import Layer, prepared
from ssta.spec import LayerSpec, Peers
from ssta.text import TextMask

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LAYOUT = TokenLayout((VideoGrid(3, 4, 5), DenseRun(5)))
# For Triton's interpreter, which takes as long as there are tiles.
FEW_TILES = TokenLayout((VideoGrid(3, 4, 3), DenseRun(5)))
MASK = torch.tensor([[True, True, True, False, False]])
BASE = dict(tile_thw=(2, 3, 4), kernel_thw=(1, 1, 1))


def nearest(q, k):
    return -torch.cdist(q, k)


def above_the_mean(scores):
    return scores > scores.mean(-1, keepdim=True)


CONFIGS = {
    "topk": dict(topk=2), "density": dict(density=0.4), "estimate": dict(density=0.4, compensation="linear"),
    "halves": dict(density=0.4, compensation="linear", compensation_parts=2), "padding": dict(topk=2, pad_type="zero"),
    "repetitions": dict(topk=2, pad_type="repeat"), "window": dict(sparse_type="sta"), "threshold": dict(topk=3, threshold=0.6),
    "one pattern": dict(topk=2, mask_share_within_head=True), "own scorer": dict(topk=2, sampling_type=nearest),
    "own budget": dict(budget=above_the_mean), "one tile": dict(tile_thw=(3, 4, 5), topk=1),
}
every_config = pytest.mark.parametrize("name", CONFIGS)


def config_of(name):
    return SSTAConfig(**{**BASE, **CONFIGS[name]})


def inputs(dtype=torch.float64, dim=8, batch=1, grad=False, by_token=True, layout=LAYOUT, key_heads=2):
    """q, k and v, two query heads to a key head, in the memory order of a projection or head by head."""
    found = []
    for heads in (2 * key_heads, key_heads, key_heads):
        x = torch.randn(batch, layout.length, heads, dim, dtype=dtype).to(DEVICE).transpose(1, 2)
        found.append((x if by_token else x.contiguous()).requires_grad_(grad))
    return found


def layers_made(call):
    """(how many layers the call makes, what it gives)"""
    made = []

    def count(frame, event, _):
        if event == "call" and frame.f_code is Layer.__init__.__code__:
            made.append(frame)

    sys.setprofile(count)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return len(made), result


# What is kept


def test_every_call_of_a_kind_has_the_same_layer():
    """Whatever the values, the memory order and the mask."""
    config = SSTAConfig(topk=2, lambda_=0.123, **BASE)
    assert layers_made(lambda: ssta_attention(*inputs(), LAYOUT, config))[0] == 1
    equal = SSTAConfig(topk=2, lambda_=0.123, **BASE), TokenLayout((VideoGrid(3, 4, 5), DenseRun(5)))
    for call in (lambda: ssta_attention(*inputs(), LAYOUT, config), lambda: ssta_attention(*inputs(by_token=False), LAYOUT, config),
                 lambda: ssta_attention(*inputs(), equal[1], equal[0]), lambda: ssta_attention(*inputs(batch=2), LAYOUT, config),
                 lambda: ssta_attention(*inputs(), LAYOUT, config, text_mask=MASK.to(DEVICE)),
                 lambda: ssta_attention(*inputs(), LAYOUT, config, text_mask=MASK.int().to(DEVICE))):
        assert layers_made(call)[0] == 0


def test_another_kind_has_another_layer():
    q, k, _ = inputs()
    config = config_of("topk")
    first = layer_of(q, k, LAYOUT, config)
    assert first is layer_of(q.clone(), k.clone(), LAYOUT, config)
    others = [layer_of(q.float(), k.float(), LAYOUT, config), layer_of(q[:, :2], k, LAYOUT, config), layer_of(q, k[:, :1], LAYOUT, config),
              layer_of(q[..., :4], k[..., :4], LAYOUT, config), layer_of(q, k, LAYOUT, config_of("density")),
              layer_of(q, k, TokenLayout((DenseRun(5), VideoGrid(3, 4, 5))), config), layer_of(q, k, LAYOUT, config, scale=0.5),
              layer_of(q, k, LAYOUT, config, impl="reference"), layer_of(q, k, LAYOUT, config, recorded=True)]
    assert len({id(layer) for layer in (first, *others)}) == 1 + len(others)


def test_nothing_leaks_from_call_to_call():
    """Calls of several kinds in turn give what each gives by itself, from a layer that has run nothing before."""
    q, k, v = inputs()
    longer = inputs(batch=2)
    calls = [(q, k, v, name, mask) for name in ("topk", "estimate", "padding", "window") for mask in (None, MASK.to(DEVICE))]
    calls += [(*longer, "estimate", None), (q, k, v, "estimate", None)]
    together = [attend(q, k, v, LAYOUT, config_of(name), text_mask=mask) for q, k, v, name, mask in calls + calls]
    for (q, k, v, name, mask), *found in zip(calls, together, together[len(calls):]):
        alone = Layer(layer_of(q, k, LAYOUT, config_of(name)).spec).run(q, k, v, mask)
        for result in found:
            assert torch.equal(result.out, alone.out)
            assert torch.equal(result.selection.blocks.to_mask(), alone.found.selection.blocks.to_mask())


def test_the_64_used_last_are_kept_and_another_one_takes_the_place_of_one():
    q, k, _ = inputs()
    layers = [layer_of(q, k, LAYOUT, config_of("topk"), scale=1.0 + number) for number in range(70)]
    assert len(prepared.kept) == 64
    assert layer_of(q, k, LAYOUT, config_of("topk"), scale=7.0) is layers[6], "used again, and therefore the last to go"
    before = set(prepared.kept)
    layer_of(q, k, LAYOUT, config_of("topk"), scale=1000.0)
    assert len(before - set(prepared.kept)) == 1 and layer_of(q, k, LAYOUT, config_of("topk"), scale=7.0) is layers[6]


# The spec


@given(cases(), st.booleans(), st.booleans(), st.sampled_from((None, ((0, 3), (5, 2)))), st.sampled_from((None, Peers("0", 8, 4))))
def test_a_spec_is_what_its_text_says(case, deterministic, recorded, rows, peers):
    spec = LayerSpec(case.tokens, case.tokens, case.config, 0.1 + 0.2, case.q.dtype, case.q.device, 4, 2, 8, "auto", deterministic,
                     recorded, rows, peers)
    again = LayerSpec.from_text(spec.text, spec.device)
    assert again == spec and hash(again) == hash(spec) and again.text == spec.text
    assert [again.config.selected_by, again.config.scored_by] == [spec.config.selected_by, spec.config.scored_by]
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_spec_is_read_in_another_process_unless_it_holds_functions():
    """A function's number means nothing there, even if that process has numbered functions of its own."""
    texts = [layer_of(*inputs()[:2], LAYOUT, config_of(name)).spec.text for name in ("halves", "own scorer")]
    program = ("import sys\nimport torch\nfrom ssta import SSTAConfig\nfrom ssta.spec import LayerSpec\n"
               "SSTAConfig(sampling_type=lambda q, k: q @ k.mT, budget=lambda scores: scores > 0).plain\n"
               "device = torch.device('cpu')\nprint(LayerSpec.from_text(sys.argv[1], device).text)\n"
               "LayerSpec.from_text(sys.argv[2], device)")
    run = subprocess.run([sys.executable, "-c", program, *texts], capture_output=True, text=True)
    assert run.stdout.strip() == texts[0]
    assert "ValueError: sampling_type and budget must be named ones in a program that another process runs" in run.stderr


# Worlds


def results(run, tensors, weight):
    """(out, mask of the selection, gradients where wanted) of ``run``."""
    out, blocks = run(*tensors)
    grads = torch.autograd.grad((out * weight).sum(), tensors) if tensors[0].requires_grad else ()
    return out, blocks.to_mask(), *grads


def same(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert torch.equal(a, b) and a.stride() == b.stride()


def layer_call(name, mask=None, **options):
    config = config_of(name)
    return lambda q, k, v: ssta_attention(q, k, v, LAYOUT, config, text_mask=mask, return_blocks=True, **options)


@pytest.mark.parametrize("name, grad, masked, by_token", [
    (name, i % 4 != 3, i % 2 == 0, i % 3 == 0) for i, name in enumerate(CONFIGS)])
@pytest.mark.slow
def test_compiled_into_one_graph_it_gives_the_same_bits(name, grad, masked, by_token):
    torch._dynamo.reset()
    call = layer_call(name, MASK.to(DEVICE) if masked else None)
    tensors = inputs(grad=grad, by_token=by_token)
    weight = torch.randn_like(tensors[0])
    same(results(torch.compile(call, fullgraph=True, backend="aot_eager"), tensors, weight), results(call, tensors, weight))


@pytest.mark.slow
def test_some_rows_of_a_layer_that_moves_nothing_in_one_graph():
    torch._dynamo.reset()
    layout, tensors = TokenLayout((DenseRun(7), DenseRun(5))), [torch.randn(1, 2, 12, 8, device=DEVICE).requires_grad_() for _ in range(3)]
    weight = torch.randn(1, 2, 5, 8, device=DEVICE)

    def call(*x):
        result = dense_attention(*x, layout, rows=((2, 3), (8, 2)))
        return result.out, result.selection.blocks

    same(results(torch.compile(call, fullgraph=True, backend="aot_eager"), tensors, weight), results(call, tensors, weight))


@every_config
@pytest.mark.parametrize("world", ["checkpoint", "reentrant checkpoint", "saved tensors", "twice"])
def test_gradients_are_the_same_bits(name, world):
    """Of layers that are computed again in the backward, whose tensors go elsewhere in between, and through which a gradient goes twice."""
    call = layer_call(name, MASK.to(DEVICE))
    tensors = inputs(grad=True)
    weight = torch.randn_like(tensors[0])
    expected = results(call, tensors, weight)
    if world == "saved tensors":
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone().cpu(), lambda x: x.to(DEVICE)):
            same(results(call, tensors, weight), expected)
    elif world == "twice":
        out, _ = call(*tensors)
        for _ in range(2):
            same(torch.autograd.grad((out * weight).sum(), tensors, retain_graph=True), expected[2:])
    else:
        out = checkpoint(lambda *x: call(*x)[0], *tensors, use_reentrant=world == "reentrant checkpoint")
        (out * weight).sum().backward()
        same((out, *[x.grad for x in tensors]), (expected[0], *expected[2:]))


@every_config
def test_without_a_gradient_the_result_is_the_same_bits(name):
    q, k, v = inputs(grad=True)
    with_gradient, _ = layer_call(name)(q, k, v)
    with torch.no_grad():
        assert torch.equal(layer_call(name)(q, k, v)[0], with_gradient)
    with torch.inference_mode():
        assert torch.equal(layer_call(name)(q.detach(), k.detach(), v.detach())[0], with_gradient)


@every_config
def test_mapped_over_another_dimension(name):
    many = [torch.stack([x, y]) for x, y in zip(inputs(), inputs())]
    call = layer_call(name)
    out = torch.vmap(lambda q, k, v: call(q, k, v)[0])(*many)
    for number in range(2):
        assert torch.equal(out[number], call(*[x[number] for x in many])[0])


@every_config
def test_gradients_of_several_results_at_once(name):
    tensors = inputs(grad=True)
    out, _ = layer_call(name)(*tensors)
    weights = torch.randn(3, *out.shape, dtype=out.dtype, device=DEVICE)
    batched = torch.autograd.grad(out, tensors, weights, is_grads_batched=True, retain_graph=True)
    for number, weight in enumerate(weights):
        alone = torch.autograd.grad(out, tensors, weight, retain_graph=True)
        same([x[number].contiguous() for x in batched], [x.contiguous() for x in alone])


@every_config
@pytest.mark.parametrize("grad", [False, True], ids=["", "gradient"])
def test_fake_tensors_have_the_form_of_true_ones(name, grad):
    call = layer_call(name)
    tensors = inputs(grad=grad)
    out, blocks = call(*tensors)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in tensors]
        fake, lists = call(*fakes)
        grads = torch.autograd.grad(fake.sum(), fakes) if grad else ()
    assert (fake.shape, fake.stride(), fake.dtype) == (out.shape, out.stride(), out.dtype) and fake.requires_grad == grad
    assert lists.counts.shape == blocks.counts.shape and lists.indices.shape[:3] == blocks.indices.shape[:3]
    assert [x.shape for x in grads] == [x.shape for x in tensors if grad]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["topk", "halves", "padding", "window"])
def test_the_operator_keeps_its_contract(name, recorded):
    """torch.library's own checks: schema, fake tensors, no aliasing of inputs."""
    q, k, v = inputs()
    spec = layer_of(q, k, LAYOUT, config_of(name), recorded=recorded).spec
    arguments = (q, k, v, MASK.to(DEVICE), None, None, None, None, spec.text)
    torch.library.opcheck(torch.ops.ssta.layer, arguments, test_utils=("test_schema", "test_faketensor"))


def test_lists_that_a_layer_returns_can_be_copied():
    q, k, v = inputs()
    torch._dynamo.reset()
    for call in (layer_call("topk"), torch.compile(layer_call("topk"), fullgraph=True, backend="aot_eager")):
        _, blocks = call(q, k, v)
        for copied in (copy.copy(blocks), copy.deepcopy(blocks), pickle.loads(pickle.dumps(blocks))):
            assert torch.equal(copied.to_mask(), blocks.to_mask()) and copied.max_q_length == blocks.max_q_length


class Watched(Layer):
    """Its last step wants tiled k and v to be gone."""

    def gather(self, q, k, v, note):
        tiled = super().gather(q, k, v, note)
        self.held = [weakref.ref(x) for x in tiled[1:3]]
        return tiled

    def take(self, out):
        assert [x() for x in self.held] == [None, None]
        return super().take(out)


@pytest.mark.parametrize("name", ["topk", "padding", "estimate"])
def test_what_is_read_is_gone(name):
    q, k, v = inputs()
    with torch.no_grad():
        Watched(layer_of(q, k, LAYOUT, config_of(name)).spec).run(q, k, v)


# Which kernels


@pytest.mark.parametrize("impl", ["triton", pytest.param("hopper", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["topk", "repetitions", "threshold", pytest.param("halves", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_layer_by_kernels_is_the_layer_in_plain_torch(name, impl):
    """Forward and backward, by hand and in one graph: at most twice the error that plain torch makes in the same dtype."""
    config = config_of(name)
    if config.compensation != "none":
        # By "error" tiles whose estimates are rounded otherwise might be selected, which are about as good.
        config = dataclasses.replace(config, sampling_type="similarity")
    tensors = inputs(torch.float16, 64 if impl == "hopper" else 16, layout=FEW_TILES)
    # A direction that stands out: between two that hardly differ rounding would say where halves are cut.
    tensors[1][..., 3] *= 4
    weight = torch.randn_like(tensors[0])

    def run(impl, dtype=torch.float16, wrap=lambda call: call):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        return results(wrap(lambda *x: ssta_attention(*x, FEW_TILES, config, impl=impl, return_blocks=True)), leaves, weight.to(dtype))

    torch._dynamo.reset()
    exact, plain, eager = run("reference", torch.float64), run("torch"), run(impl)
    assert torch.equal(eager[1], plain[1]) and torch.equal(plain[1], exact[1])
    if name == "halves":
        # Of all steps.
        same(run(impl, wrap=lambda call: torch.compile(call, fullgraph=True, backend="aot_eager")), eager)
    for got, rounded, wanted in zip((eager[0], *eager[2:]), (plain[0], *plain[2:]), (exact[0], *exact[2:])):
        assert got.stride() == rounded.stride()
        error, allowed = ((x.double() - wanted).norm() / wanted.norm() for x in (got, rounded))
        estimated = 2**-7 if config.compensation != "none" else 0  # covariances and mixtures are bfloat16
        assert error <= 2 * allowed + 2**-10 + estimated


@pytest.mark.parametrize("name, recorded", [("topk", True), ("estimate", False), ("halves", True), ("window", False), ("threshold", False)])
def test_by_kernels_all_steps_are_one_plan(name, recorded):
    """Of several kinds of tensors in turn, twice: the same bits as step by step. A threshold is torch's, and so no part of a plan."""
    batch = 1 if recorded else 2
    mask = MASK.expand(batch, -1).clone().to(DEVICE)
    q, k, v = inputs(torch.float16, 16, layout=FEW_TILES, key_heads=1)
    calls = [((q, k, v), None), (inputs(torch.float16, 16, batch, by_token=False, layout=FEW_TILES, key_heads=1), mask)]
    calls += [((q + 1, k, v), None), (calls[1][0], TextMask.of(mask, batch, FEW_TILES, q.device))]
    of = layer_of(q, k, FEW_TILES, config_of(name), impl="triton").spec._replace(recorded=recorded)
    whole, steps, known = Layer(of), Layer(of), []
    steps._whole = None
    for number, (tensors, text) in enumerate(calls):
        with torch.no_grad():
            # The last call is the second one with its mask looked at before.
            ran, wanted = whole.run(*tensors, text), known[1] if number == 3 else steps.run(*tensors, text)
        known.append(wanted)
        assert ran.out.stride() == wanted.out.stride() and ran.route == wanted.route
        (selection, mass, tape), others = ran.found, wanted.found
        assert torch.equal(selection.blocks.to_mask(), others.selection.blocks.to_mask())
        found = [(ran.out, wanted.out), (selection.blocks.kv_lengths, others.selection.blocks.kv_lengths),
                 (selection.useful, others.selection.useful)]
        found += [(mass.tensor(), others.mass.tensor())] if mass else []
        if recorded and number in (1, 2):
            found += zip(*[layer.backward(of.tape, tensors[0], of.selection.blocks) for layer, of in ((whole, ran.found), (steps, others))])
        assert all(x is y is None or torch.equal(x, y) for x, y in found) and (tape is None) == (others.tape is None) == (not recorded)
    planned = [isinstance(plan, Planned) for plan in whole._whole.kinds.values()]
    assert planned == [name != "threshold"] * 3


class Emulated(Route):
    """A route whose backward is Hopper's in the emulator, on two multiprocessors."""

    planned_backward = True

    def run_backward(self, *of):
        from hopper_emulator import module

        return module("backward").hopper_backward(*of, processors=2)


@pytest.mark.parametrize("name", ["topk", pytest.param("halves", marks=pytest.mark.slow)])
def test_a_backward_is_one_plan_too(name):
    """Of other gradients in turn, with a mask and without: the same bits as step by step. Without a GPU Hopper's kernel is emulated."""
    # Hopper's own route wants tiles of more than 64 tokens.
    layout = TokenLayout((VideoGrid(4, 20, 24), DenseRun(5))) if GPU else FEW_TILES
    config = SSTAConfig(**{**BASE, **CONFIGS[name], **(dict(tile_thw=(2, 8, 8)) if GPU else {})})
    q, k, v = inputs(torch.bfloat16 if GPU else torch.float16, 64, layout=layout, key_heads=1)
    whole, steps = (Layer(layer_of(q, k, layout, config, impl="auto" if GPU else "triton").spec._replace(recorded=True)) for _ in range(2))
    if not GPU:
        for layer in (whole, steps):
            layer._route = lambda blocks, of=layer._route: Emulated(**vars(of(blocks)))
    shared = torch.randn_like(q[:, :1]).expand_as(q)
    for mask, dout in ((None, torch.randn_like(q)), (MASK.to(DEVICE), shared), (None, torch.randn_like(q))):
        ran = whole.run(q, k, v, mask)
        found = whole.planned_backward(ran.planned, ran.held, dout)
        same(found, steps.backward(ran.find(ran.held).tape, dout, ran.found.selection.blocks))
    assert [isinstance(plan, Planned) for plan in whole._whole_backward.kinds.values()] == [True] * 2


@pytest.mark.parametrize("shared", [False, True])
def test_tensors_that_hooks_give_back_in_other_strides_have_the_same_gradients(shared):
    """As ``save_on_cpu(pin_memory=True)`` does. A sequence without a video is not moved, so its backward reads the caller's own tensors."""
    layout, tokens = TokenLayout((DenseRun(20),)), torch.randn(1, 20, 2, 16, dtype=torch.float16, device=DEVICE)
    grads = []
    for hooks in (nullcontext(), torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda x: x)):
        q = tokens.transpose(1, 2).detach().requires_grad_()
        k = q[:, :1].expand_as(q) if shared else q
        with hooks:
            out = ssta_attention(q, k, q * 2, layout, SSTAConfig(), impl="triton")
        grads += torch.autograd.grad(out, q, out.detach())
    assert torch.equal(*grads)


@pytest.mark.parametrize("recorded, width, room", [(False, 8, 0.6), (True, 4, 0.0)])
def test_matrices_of_the_last_heads_come_where_keys_and_values_were(recorded, width, room):
    """In groups of other sizes: the same bits, and with a tape, on which keys and values stay, what backward needs. There is room for the
    matrices of one head, and where keys and values were, which are wide, for those of the last two."""
    layout, config = TokenLayout((VideoGrid(3, 4, width), DenseRun(5))), dataclasses.replace(config_of("estimate"), tile_thw=(2, 3, width))
    tensors = inputs(torch.float16, 16, layout=layout, key_heads=3)
    of = layer_of(*tensors[:2], layout, config, impl="triton").spec._replace(recorded=recorded)
    found, wanted = Layer(of), Layer(of)
    for layer, own in ((found, room), (wanted, 1e9)):
        layer.backend = dataclasses.replace(layer.backend, combine=partial(layer.backend.combine, room=own))
    with torch.no_grad():
        ran, expected = found.run(*tensors), wanted.run(*tensors)
    products = [sum(hasattr(step, "function") for step in next(iter(layer._whole.kinds.values())).steps) for layer in (found, wanted)]
    assert products[0] - products[1] == (2 if recorded else 1)
    assert torch.equal(ran.out, expected.out)
    if recorded:
        assert all(map(torch.equal, *[of.find(of.held).tape[:7] for of in (ran, expected)]))


class Late:
    """As other ranks send a tensor: its memory holds nothing before it was waited for, and is the layer's from then on."""

    def __init__(self, name, x, steps):
        self.memory, self.x, self.name, self.steps = torch.full_like(x, float("nan")), x, name, steps
        self.sent = None if name == "k" else torch.full((x.numel(),), float("nan"), dtype=x.dtype, device=x.device)
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device

    def wait(self):
        self.steps.append(self.name)
        return self.memory.copy_(self.x)


@pytest.mark.parametrize("name", ["topk", "estimate", "threshold"])
def test_what_is_on_its_way_is_waited_for_where_it_is_read(name):
    """Twice, by one plan where there is one: the same bits, here of tokens in the order in which ranks send them on."""
    mask = MASK.to(DEVICE)
    of = layer_of(*inputs(torch.float16, 16, layout=FEW_TILES)[:2], FEW_TILES, config_of(name), impl="triton").spec
    plain, late = Layer(of), Layer(of._replace(returned=((20, 16), (36, 5), (0, 20), (36, 5))))
    order = torch.cat([torch.arange(first, first + count, device=DEVICE) for first, count in late.spec.returned])
    assert LayerSpec.from_text(late.spec.text, of.device) == late.spec
    for _ in range(2):
        q, k, v = inputs(torch.float16, 16, layout=FEW_TILES)
        steps = []
        with torch.no_grad():
            wanted = plain.run(q, k, v, mask)
            ran = late.run(*[Late(name, x, steps) for name, x in zip("qkv", (q, k, v))], mask)
        assert torch.equal(ran.out, wanted.out[:, :, order]) and steps == ["v", "k", "q"]
        assert torch.equal(ran.found.selection.blocks.to_mask(), wanted.found.selection.blocks.to_mask())
    assert [isinstance(plan, Planned) for plan in late._whole.kinds.values()] == [name != "threshold"]


@pytest.mark.parametrize("impl, row", [("torch", "torch"), ("reference", "torch"), ("triton", "triton")])
def test_impl_reaches_every_step_and_a_report_says_so(impl, row):
    q, k, v = inputs(torch.float16, 16)
    report = explain(q, k, LAYOUT, config_of("estimate"), value=v, impl=impl)
    assert report.implementation == impl and {of.name for of in report.backend.chosen} == {row}
    assert [of.step for of in report.backend.chosen] == ["gather", "estimate", "score", "select", "combine", "take"]
    lines = [line.strip() for line in str(report).splitlines()]
    for step in ("estimate", "combine"):
        assert any(line.endswith(f"{step}: {row}") for line in lines)


@pytest.mark.parametrize("name", ["estimate", "topk", "own budget"])
def test_a_report_shows_the_selection_that_the_layer_made(name):
    """Of a NaN in value too, which estimates read, and under autocast, which rounds what is compared."""
    q, k, v = inputs(torch.float32)
    v[0, 1, 7] = float("nan")
    for enabled in (False, True):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            report = explain(q, k, LAYOUT, config_of(name), value=v)
            _, blocks = ssta_attention(q, k, v, LAYOUT, config_of(name), return_blocks=True)
        assert torch.equal(report.blocks.to_mask(), blocks.to_mask())
        assert report.dtype == ("bfloat16" if enabled else "float32")
    if name == "estimate":
        assert not torch.equal(explain(q, k, LAYOUT, config_of(name), value=v.nan_to_num(0)).blocks.to_mask(),
                               explain(q, k, LAYOUT, config_of(name), value=v).blocks.to_mask())


@pytest.mark.parametrize("layout", [LAYOUT, TokenLayout((DenseRun(7), DenseRun(5)))])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_deferred_projections_are_taken_by_layers_in_plain_torch(layout, impl):
    """And by those that move nothing, whatever kernels they have."""
    tensors = inputs(layout=layout)
    deferred = [Deferred((Projection(x),)) for x in tensors]
    config = config_of("topk")
    assert torch.equal(attend(*deferred, layout, config, impl=impl).out, attend(*tensors, layout, config, impl=impl).out)


# CUDA graphs


class Copied(Late):
    """On its way on a stream of its own, which takes its time."""

    def __init__(self, name, x, steps):
        super().__init__(name, x, steps)
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(1_000_000)
            self.memory.copy_(x)

    def wait(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        return self.memory


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["topk", "estimate", "halves"])
def test_on_a_gpu_the_device_waits_for_what_is_on_its_way(name):
    layout, config = TokenLayout.video_text((7, 9, 20), 30), SSTAConfig(**{**BASE, **CONFIGS[name], "tile_thw": (4, 4, 8)})
    q, k, v = (torch.randn(1, layout.length, 6, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    plain = layer_of(q, k, layout, config)
    late = Layer(plain.spec._replace(returned=((700, 560), (1260, 30), (0, 700), (1260, 30))))
    order = torch.cat([torch.arange(first, first + count, device="cuda") for first, count in late.spec.returned])
    for turn in range(3):
        wanted = plain.run(q, k, v)
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            ran = late.run(*[Copied(name, x, []) for name, x in zip("qkv", (q, k, v))])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(ran.out, wanted.out[:, :, order], rtol=2**-7, atol=2e-3)
        assert torch.equal(ran.found.selection.blocks.to_mask(), wanted.found.selection.blocks.to_mask())
        q, k, v = k, q, v
    assert [isinstance(plan, Planned) for plan in late._whole.kinds.values()] == [True]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["topk", "estimate"])
def test_a_layer_that_is_first_seen_while_a_graph_is_captured(name):
    """Nothing that the capture makes is kept, for its memory is the graph's; calls after it and replays give the same."""
    layout, config = TokenLayout.video_text((7, 9, 20), 30), SSTAConfig(**{**BASE, **CONFIGS[name], "tile_thw": (4, 4, 4)})
    q, k, v = (torch.randn(1, 2, layout.length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    other = TokenLayout((VideoGrid(7, 20, 9), DenseRun(30)))
    # Kernels compile before; the layer of the other sequence is new to the capture.
    ssta_attention(q, k, v, layout, config)
    torch.cuda.synchronize()
    kept = set(prepared.kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ssta_attention(q, k, v, other, config)
    assert set(prepared.kept) == kept
    graph.replay()
    expected = ssta_attention(q, k, v, other, config)
    assert torch.equal(captured, expected)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(captured, ssta_attention(q, k, v, other, config)) and not torch.equal(captured, expected)


class TestALayerThatIsHeld:
    """``prepare`` and what it gives."""

    CONFIG = SSTAConfig(tile_thw=(2, 2, 3), density=0.4, compensation="linear")

    @staticmethod
    def qkv(batch=1, kv_heads=2, dtype=torch.float32):
        torch.manual_seed(batch)
        return [torch.randn(batch, heads, LAYOUT.length, 8, dtype=dtype) for heads in (4, kv_heads, kv_heads)]

    def test_it_gives_what_ssta_attention_gives(self):
        layer = prepare(LAYOUT, self.CONFIG, like=self.qkv()[0], key_heads=2)
        for batch in (1, 3, 1):
            q, k, v = self.qkv(batch)
            assert torch.equal(layer(q, k, v), ssta_attention(q, k, v, LAYOUT, self.CONFIG))
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            others = [x.clone().requires_grad_() for x in (q, k, v)]
            layer(*leaves).square().sum().backward()
            ssta_attention(*others, LAYOUT, self.CONFIG).square().sum().backward()
            assert all(torch.equal(x.grad, y.grad) for x, y in zip(leaves, others))
        compiled = torch.compile(lambda *x: layer(*x), fullgraph=True, backend="eager")
        assert torch.equal(compiled(q, k, v), layer(q, k, v))

    def test_it_is_found_once(self, monkeypatch):
        q, k, v = self.qkv()
        layer = prepare(LAYOUT, self.CONFIG, like=q, key_heads=2)
        layer(q, k, v)
        monkeypatch.setattr("ssta.inputs._checked", None)
        monkeypatch.setattr("ssta.attention.Layer", None)
        layer(q, k, v)

    def test_a_module_that_holds_one_is_copied_and_pickled(self):
        q, k, v = self.qkv()
        model = torch.nn.Linear(1, 1)
        model.layer = prepare(LAYOUT, self.CONFIG, like=q, key_heads=2)
        expected = model.layer(q, k, v)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert copied.layer is not model.layer and torch.equal(copied.layer(q, k, v), expected)

    def test_other_tensors_are_refused(self):
        q, k, v = self.qkv()
        layer = prepare(LAYOUT, self.CONFIG, like=q, key_heads=2)
        with pytest.raises(ValueError, match="must be of the dtype, heads, key heads, head_dim and device that the layer was prepared for"):
            layer(*self.qkv(dtype=torch.float64))
        with pytest.raises(ValueError, match="must be of the dtype, heads, key heads"):
            layer(*self.qkv(kv_heads=1))
        with pytest.raises(ValueError, match=r"query must have the layout's \d+ tokens"):
            layer(q[:, :, 1:], k, v)
        with pytest.raises(ValueError, match=r"like must have the layout's \d+ tokens"):
            prepare(LAYOUT, self.CONFIG, like=q[:, :, 1:])
        with pytest.raises(ValueError, match="query's heads must be a multiple of key's 3, got 4"):
            prepare(LAYOUT, self.CONFIG, like=q, key_heads=3)
        with pytest.raises(TypeError, match="like must be a tensor, got None"):
            prepare(LAYOUT, self.CONFIG, like=None)
