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

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid, explain, ssta_attention
from ssta.attention import attend
from ssta.kernels import Deferred, Projection
from ssta.layer import Layer, prepared
from ssta.ranks import Run, Shards
from ssta.ranks.layer import Exchange
from ssta.spec import LayerSpec

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
            assert torch.equal(result.selection.blocks.to_mask(), alone.selection.blocks.to_mask())


def test_the_64_used_last_are_kept_and_another_one_takes_the_place_of_one():
    q, k, _ = inputs()
    layers = [layer_of(q, k, LAYOUT, config_of("topk"), scale=1.0 + number) for number in range(70)]
    assert len(prepared.kept) == 64
    assert layer_of(q, k, LAYOUT, config_of("topk"), scale=7.0) is layers[6], "used again, and therefore the last to go"
    before = set(prepared.kept)
    layer_of(q, k, LAYOUT, config_of("topk"), scale=1000.0)
    assert len(before - set(prepared.kept)) == 1 and layer_of(q, k, LAYOUT, config_of("topk"), scale=7.0) is layers[6]


# The spec


@given(cases(), st.booleans(), st.booleans(), st.booleans())
def test_a_spec_is_what_its_text_says(case, deterministic, recorded, means):
    spec = LayerSpec(case.tokens, case.tokens, case.config, 0.1 + 0.2, case.q.dtype, case.q.device, 4, 2, 8, "auto", deterministic,
                     recorded, means)
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

    def gather(self, q, k, v):
        tiled = super().gather(q, k, v)
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


class Late:
    """As other ranks send a tensor, which is the layer's own from then on."""

    plain = True

    def __init__(self, name, x, steps):
        self.x, self.name, self.steps = x, name, steps
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device

    def wait(self):
        self.steps.append(self.name)
        x = self.x.clone()
        self.arrived = weakref.ref(x)
        return x


def arriving(layer, steps, *sent):
    """``sent``, q, k and v, as one rank's exchange gives them to a layer."""
    shards = Shards((Run(layer.spec.layout.length, True),), 1, 0, None)
    return partial(Exchange(shards, layer.spec, list(sent), steps.append).tiled, layer)


def test_what_has_arrived_is_gone_once_it_is_in_tiles():
    """And tiles are gone where the result leaves them."""
    q, k, v = inputs()
    late, tiles = [Late(name, x, []) for name, x in zip("qkv", (q, k, v))], []

    class Moved(Layer):
        def means(self, tiled):
            assert [x.arrived() for x in late] == [None] * 3
            tiles.extend(map(weakref.ref, (tiled.q, tiled.k, tiled.v)))
            return super().means(tiled)

        def take(self, out):
            assert [x() for x in tiles] == [None] * 3
            return super().take(out)

    layer = Moved(layer_of(q, k, LAYOUT, config_of("estimate")).spec)
    layer.run(arriving(layer, [], *late))


@pytest.mark.parametrize("name", ["topk", "estimate", "threshold"])
def test_what_is_on_its_way_is_waited_for_where_it_is_read(name):
    """The same bits."""
    mask = MASK.to(DEVICE)
    layer = layer_of(*inputs(torch.float16, 16, layout=FEW_TILES)[:2], FEW_TILES, config_of(name), impl="triton")
    for _ in range(2):
        q, k, v = inputs(torch.float16, 16, layout=FEW_TILES)
        steps = []
        with torch.no_grad():
            wanted = layer.run(q, k, v, mask)
            ran = layer.run(arriving(layer, steps, *[Late(name, x, steps) for name, x in zip("qkv", (q, k, v))]), text_mask=mask)
        assert torch.equal(ran.out, wanted.out) and steps == ["v", "k", "q", "arrived"]
        assert torch.equal(ran.selection.blocks.to_mask(), wanted.selection.blocks.to_mask())


@pytest.mark.parametrize("impl, row", [("torch", "torch"), ("reference", "torch"), ("triton", "triton")])
def test_impl_reaches_every_step_and_a_report_says_so(impl, row):
    q, k, v = inputs(torch.float16, 16)
    report = explain(q, k, LAYOUT, config_of("estimate"), value=v, impl=impl)
    assert report.implementation == impl and {of.name for of in report.backend.chosen} == {row}
    assert [of.step for of in report.backend.chosen] == ["gather", "estimate", "score", "select", "merge", "take"]
    lines = [line.strip() for line in str(report).splitlines()]
    for step in ("estimate", "merge"):
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
        self.memory, self.stream = torch.full_like(x, float("nan")), torch.cuda.Stream()
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
    for turn in range(3):
        wanted = plain.run(q, k, v)
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            ran = plain.run(arriving(plain, [], *[Copied(name, x, []) for name, x in zip("qkv", (q, k, v))]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(ran.out, wanted.out, rtol=2**-7, atol=2e-3)
        assert torch.equal(ran.selection.blocks.to_mask(), wanted.selection.blocks.to_mask())
        q, k, v = k, q, v


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
