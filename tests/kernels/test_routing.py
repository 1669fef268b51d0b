"""Which kernels run: a pure function of GPU, dtype, head_dim and what is known of a pattern; and why not others."""

from functools import partial

import pytest
import torch
from oracles import attention_by
from torch.fx.experimental.proxy_tensor import make_fx

from ssta.kernels import BlockLists, PatternFacts, block_sparse_attention, choose_backend, choose_route, notices, routing
from ssta.kernels.eager.blocks import torch_backward, torch_forward
from ssta.kernels.routing import LONG_BLOCKS, TABLE, Problem, Where

CPU = torch.device("cpu")
SHORT_KEYS = PatternFacts(384, 1)


gpus = pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0), None], ids=["sm80", "sm90", "sm100", "sm120", "amd"])


def route(impl, capability, dtype=torch.float16, dim=64, facts=LONG_BLOCKS, *, heads=1, kv_heads=1, causal=False):
    """On a GPU of such a capability; None: one that is not NVIDIA's."""
    return routing.decide(impl, Problem(Where("cuda", capability, False, dtype, dim), heads, kv_heads, causal, facts))


@gpus
def test_auto_follows_device_dtype_and_shape(capability):
    def name(*of, **options):
        return route("auto", capability, *of, **options).name

    best = "hopper" if capability == (9, 0) else "triton"
    assert choose_route("auto", CPU, torch.bfloat16, 128).name == "torch"
    assert name(torch.bfloat16, 128) == best
    assert name(facts=LONG_BLOCKS._replace(max_q_length=384)) == best
    assert name(facts=LONG_BLOCKS._replace(max_q_length=64)) == best
    short = LONG_BLOCKS._replace(max_q_length=63), LONG_BLOCKS._replace(max_q_length=127)
    found = [name(facts=facts, causal=facts is short[1]) for facts in short]
    assert found == ["triton"] * 2, "short query blocks"
    assert name(facts=SHORT_KEYS) == "triton", "Hopper's tiles of short key blocks would be nearly empty"
    assert name(dim=80) == "triton"
    assert name(torch.float32, 128) == "torch"
    assert name(dim=512) == "torch"


@gpus
def test_the_reasons_name_every_faster_implementation(capability):
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (64, 80, 512):
            taken = route("auto", capability, dtype, dim)
            faster = [row.name for row in TABLE][:[row.name for row in TABLE].index(taken.name)]
            assert [rejected for rejected, _ in taken.rejected] == faster
            assert len(taken.explain()) == len(faster) and all(reason for _, reason in taken.rejected)
    assert route("torch", capability, torch.bfloat16).rejected == (), "nobody asks why the choice is not another"


@pytest.mark.parametrize("older", [(7, 5), (7, 0)])
def test_gpus_without_the_kernels_tensor_cores_take_plain_torch(older):
    """And say why."""
    reason = f"requires an Ampere GPU (sm_80) or a later one, got sm_{older[0]}{older[1]}"
    for facts in (LONG_BLOCKS, SHORT_KEYS, LONG_BLOCKS._replace(max_q_length=1)):
        taken = route("auto", older, facts=facts)
        assert taken.name == "torch" and f"not 'triton', which {reason}" in taken.explain() and taken.slow_fallback.endswith(reason)
        with pytest.raises(ValueError, match="impl='triton' requires an Ampere GPU"):
            route("triton", older, facts=facts)


def test_whose_backward_goes_with_a_forward():
    def kernels(facts, **options):
        taken = route("auto", (9, 0), facts=facts, heads=16, kv_heads=2, **options)
        return taken.name, taken.backward

    assert kernels(LONG_BLOCKS) == ("hopper", "hopper")
    assert kernels(LONG_BLOCKS._replace(max_kv_length=64)) == ("hopper", "triton")
    assert kernels(SHORT_KEYS) == kernels(SHORT_KEYS, causal=True) == ("triton", "triton")


def test_what_a_route_needs():
    hopper, triton, torch_, reference = (route(impl, (9, 0)) for impl in ("hopper", "triton", "torch", "reference"))
    assert (hopper.in_place, triton.in_place, torch_.in_place, reference.in_place) == (True, True, False, False)
    assert (hopper.takes_deterministic, triton.takes_deterministic) == (True, False)
    short = route("hopper", (9, 0), facts=LONG_BLOCKS._replace(max_kv_length=64))
    assert not short.takes_deterministic, "its backward is the portable one"


@pytest.mark.parametrize("impl, capability, dtype, dim, message", [
    ("hopper", (9, 0), torch.float16, 80, "a head_dim of 64 or 128, got torch.float16 and 80"),
    ("hopper", (8, 0), torch.float16, 64, r"requires a Hopper GPU \(sm_90\), got sm_80"),
    ("hopper", (8, 0), torch.float32, 80, r"requires a Hopper GPU \(sm_90\), got sm_80"),
    ("triton", (8, 0), torch.float32, 64, "requires float16 or bfloat16 and a head_dim of 16 to 256, got torch.float32 and 64"),
    ("triton", (7, 5), torch.float32, 64, r"requires an Ampere GPU \(sm_80\) or a later one, got sm_75"),
    ("triton", (8, 0), torch.float16, 8, "got torch.float16 and 8"),
])
def test_an_explicit_choice_that_cannot_run_raises(impl, capability, dtype, dim, message):
    with pytest.raises(ValueError, match=message):
        route(impl, capability, dtype, dim)


@pytest.mark.parametrize("dtype, dim", [(torch.float32, 40), (torch.bfloat16, 128)])
def test_on_a_cpu_the_device_is_the_first_reason(dtype, dim, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert all(["got tensors on cpu" in sentence for sentence in choose_route("auto", "cpu", dtype, dim).explain()])
    reasons = [reason for step in choose_backend("auto", "cpu", dtype, dim).chosen for name, reason in step.rejected if name == "triton"]
    assert reasons and all(["got tensors on cpu" in reason for reason in reasons])
    for impl in ("hopper", "triton"):
        with pytest.raises(ValueError, match="got tensors on cpu"):
            choose_route(impl, "cpu", dtype, dim)


@pytest.mark.parametrize("choose", [choose_route, choose_backend])
def test_devices_and_dtypes_are_taken_as_torch_takes_them(choose):
    right = choose("auto", torch.device("cpu"), torch.float32, 64)
    assert choose("auto", "cpu", torch.float32, 64) == right
    for device, error, words in ((3.5, TypeError, "device must be a torch.device, a string or a GPU's number, got 3.5"),
                                 ("gpu", ValueError, "device must be a device that torch knows, .* got 'gpu'")):
        with pytest.raises(error, match=words):
            choose("auto", device, torch.float32, 64)
    with pytest.raises(TypeError, match="dtype must be a torch.dtype such as torch.bfloat16, got 'bf16'"):
        choose("auto", "cpu", "bf16", 64)


@pytest.mark.parametrize("impl, message", [
    ("hopper", r"impl='hopper' requires a Hopper GPU \(sm_90\), got tensors on cpu"),
    ("gather", "impl must be one of 'auto', 'reference', 'torch', 'triton', 'cudnn', 'hopper', got 'gather'"),
    ("cuda", "impl must be one of 'auto', 'reference', 'torch', 'triton', 'cudnn', 'hopper', got 'cuda'"),
    (None, "impl must be one of .*, got None"),
])
def test_an_impl_that_a_cpu_has_not_raises(impl, message):
    with pytest.raises(ValueError, match=message):
        choose_route(impl, CPU, torch.float16, 64)


def test_every_row_names_functions_that_exist():
    pytest.importorskip("triton")
    for row in TABLE:
        for path in (row.forward, row.backward):
            assert callable(routing.load(row.name, path))


@gpus
def test_a_much_slower_fallback_warns_once(monkeypatch, capability):
    assert route("auto", capability, torch.float32).slow_fallback.startswith("attention runs in plain torch on a GPU")
    assert route("torch", capability, torch.float32).slow_fallback is None, "chosen, not fallen back to"
    assert choose_route("auto", CPU, torch.float32, 64).slow_fallback is None
    monkeypatch.setattr(notices, "_said", set())
    with pytest.warns(RuntimeWarning, match="plain torch"):
        notices.warn_once("key", "plain torch")
    notices.warn_once("key", "plain torch")  # a second one would be an error under -W error


@pytest.mark.gpu
def test_float32_on_a_gpu_warns(monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    x = torch.randn(1, 1, 32, 16, device="cuda")
    with pytest.warns(RuntimeWarning, match="many times slower"):
        block_sparse_attention(x, x, x, BlockLists.from_mask(torch.ones(2, 2, dtype=torch.bool, device="cuda"), 16, 16))


def test_forward_mode_is_refused_where_it_would_be_zero():
    blocks = BlockLists.from_mask(torch.ones(2, 2, dtype=torch.bool), 4, 4)
    x, tangent = torch.randn(2, 1, 2, 8, 4)
    with pytest.raises(ValueError, match="q must have no tangent"):
        torch.func.jvp(lambda x: block_sparse_attention(x, x, x, blocks), (x,), (tangent,))

    def plain(x):
        return torch.softmax(x @ x.mT * 0.5, -1) @ x

    got = torch.func.jvp(lambda x: block_sparse_attention(x, x, x, blocks, impl="reference"), (x,), (tangent,))[1]
    torch.testing.assert_close(got, torch.func.jvp(plain, (x,), (tangent,))[1])


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, lambda x: torch.nested.nested_tensor([x[0], x[0]]), torch.Tensor.to_mkldnn],
                         ids=["sparse", "nested", "mkldnn"])
@pytest.mark.parametrize("which", "qkv")
def test_tensors_without_strides_are_refused(make, which):
    x = torch.randn(1, 1, 8, 4)
    blocks = BlockLists.from_mask(torch.ones(2, 2, dtype=torch.bool), 4, 4)
    with pytest.raises(TypeError, match=f"{which} must be a dense, strided tensor"):
        block_sparse_attention(**({name: x for name in "qkv"} | {which: make(x)}), blocks=blocks)


def test_a_key_that_nobody_sees_has_no_gradient_whatever_its_value():
    """As on a GPU in float32: steps are padded, and an unused row must not multiply infinity by zero."""
    q, k, v = torch.randn(3, 1, 1, 8, 4).unbind()
    v[0, 0, 0, 0] = -torch.inf
    k.requires_grad_()
    lists = BlockLists.from_mask(torch.tensor([[True, False], [False, True]]), 4, 4, q_lengths=torch.tensor([0, 4], dtype=torch.int32))
    attend = attention_by(partial(torch_forward, padded=True), partial(torch_backward, padded=True), lists, 0.5)
    attend(q, k, v)[0].sum().backward()
    assert (k.grad[0, 0, 0] == 0).all()


def test_a_padded_step_is_no_longer_than_the_tensors():
    """Whatever bound comes with the blocks, such as one that was read from offsets of any values."""
    from ssta.kernels.eager.steps import _padded_steps

    q, k = torch.randn(1, 1, 8, 4), torch.randn(1, 1, 12, 4)
    blocks = BlockLists.from_mask(torch.tensor([[True, False], [True, True]]), torch.tensor([0, 3, 8], dtype=torch.int32),
                                  torch.tensor([0, 7, 12], dtype=torch.int32), max_q_length=1000, max_kv_length=1000)
    assert [(step.q_rows.shape[-1], step.k_rows.shape[-1]) for step in _padded_steps(q, k, blocks, False)] == [(8, 2 * 12)]


def test_meta_tensors_have_shapes():
    x = torch.randn(1, 2, 8, 4, device="meta")
    blocks = BlockLists.from_mask(torch.ones(2, 2, dtype=torch.bool, device="meta"), 4, 4)
    assert block_sparse_attention(x, x, x, blocks).shape == x.shape


def test_a_symbolic_trace_chooses_its_route():
    """Its numbers cannot be hashed."""
    x = torch.randn(1, 2, 8, 4)
    blocks = BlockLists.from_mask(torch.tensor([[True, False], [True, True]]), 4, 4)

    def attend(q, counts, indices):
        return block_sparse_attention(q, q, q, BlockLists(counts, indices, 4, 4, num_kv_blocks=2))

    inputs = (x, blocks.counts, blocks.indices)
    assert torch.equal(make_fx(attend, tracing_mode="symbolic")(*inputs)(*inputs), attend(*inputs))
