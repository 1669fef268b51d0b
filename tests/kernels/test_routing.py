"""Which kernels run: a pure function of GPU, dtype, head_dim and what is known of a pattern; and why not others."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ssta.kernels import BlockLists, PatternFacts, block_sparse_attention, choose_route, notices, routing
from ssta.kernels.routing import LONG_BLOCKS, TABLE

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHORT_KEYS = PatternFacts(384, 1, 9, 2, True)


@pytest.fixture(params=[(8, 0), (9, 0), (10, 0), (12, 0), None], ids=["sm80", "sm90", "sm100", "sm120", "amd"])
def capability(request, monkeypatch):
    monkeypatch.setattr(routing, "capability", lambda device: request.param)
    return request.param


def on_hopper(monkeypatch):
    monkeypatch.setattr(routing, "capability", lambda device: (9, 0))


def name(*args, **options):
    return choose_route(*args, **options).name


def test_auto_follows_device_dtype_and_shape(capability):
    best = "hopper" if capability == (9, 0) else "triton"
    assert name("auto", CPU, torch.bfloat16, 128) == "torch"
    assert name("auto", GPU, torch.bfloat16, 128) == best
    assert name("auto", GPU, torch.float16, 64, LONG_BLOCKS._replace(max_q_length=384)) == best
    assert name("auto", GPU, torch.float16, 64, LONG_BLOCKS._replace(max_q_length=64)) == best
    short = LONG_BLOCKS._replace(max_q_length=63), LONG_BLOCKS._replace(max_q_length=127)
    found = [name("auto", GPU, torch.float16, 64, facts, causal=facts is short[1]) for facts in short]
    assert found == ["triton"] * 2, "short query blocks"
    assert name("auto", GPU, torch.float16, 64, SHORT_KEYS._replace(uniform=False)) == "triton", "short key blocks are gathered"
    assert name("auto", GPU, torch.float16, 80) == "triton"
    assert name("auto", GPU, torch.float32, 128) == "torch"
    assert name("auto", GPU, torch.float16, 512) == "torch"


def test_the_reasons_name_every_faster_implementation(capability):
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (64, 80, 512):
            route = choose_route("auto", GPU, dtype, dim)
            faster = [row.name for row in TABLE][:[row.name for row in TABLE].index(route.name)]
            assert [rejected for rejected, _ in route.rejected] == faster
            assert len(route.explain()) == len(faster) and all(reason for _, reason in route.rejected)
    assert choose_route("torch", GPU, torch.bfloat16, 64).rejected == (), "nobody asks why the choice is not another"


@pytest.mark.parametrize("older", [(7, 5), (7, 0)])
def test_gpus_without_the_kernels_tensor_cores_take_plain_torch(older, monkeypatch):
    """And say why."""
    monkeypatch.setattr(routing, "capability", lambda device: older)
    reason = f"requires an Ampere GPU (sm_80) or a later one, got sm_{older[0]}{older[1]}"
    for facts in (LONG_BLOCKS, SHORT_KEYS):
        route = choose_route("auto", GPU, torch.float16, 64, facts)
        assert route.name == "torch" and f"not 'triton', which {reason}" in route.explain() and route.slow_fallback.endswith(reason)
    assert routing.choose_token_impl("auto", GPU, torch.float16, 64) == "torch"
    for choose in (choose_route, routing.choose_token_impl):
        with pytest.raises(ValueError, match="impl='triton' requires an Ampere GPU"):
            choose("triton", GPU, torch.float16, 64)


def test_how_short_keys_are_read(monkeypatch):
    on_hopper(monkeypatch)
    def keys(facts, **options):
        route = choose_route("auto", GPU, torch.float16, 64, facts, heads=16, kv_heads=2, **options)
        return route.name, route.forward.keys, route.backward.kernels, route.backward.keys

    assert keys(LONG_BLOCKS) == ("hopper", "tiles", "hopper", "tiles")
    assert keys(LONG_BLOCKS._replace(max_kv_length=64)) == ("hopper", "tiles", "triton", "tiles")
    assert keys(SHORT_KEYS) == ("hopper", "compacted", "hopper", "compacted")
    assert keys(SHORT_KEYS, causal=True) == ("triton", "gathered", "triton", "tiles")
    assert keys(SHORT_KEYS._replace(max_q_length=16)) == ("triton", "gathered", "triton", "compacted")
    assert keys(SHORT_KEYS._replace(uniform=False)) == ("triton", "gathered", "triton", "tiles")


def test_what_a_route_needs(monkeypatch):
    on_hopper(monkeypatch)
    hopper, triton, torch_, reference = (choose_route(impl, GPU, torch.float16, 64) for impl in ("hopper", "triton", "torch", "reference"))
    assert (hopper.in_place, triton.in_place, torch_.in_place, reference.in_place) == (True, True, False, False)
    assert (hopper.takes_deterministic, triton.takes_deterministic) == (True, False)
    short = choose_route("hopper", GPU, torch.float16, 64, LONG_BLOCKS._replace(max_kv_length=64))
    assert not short.takes_deterministic, "its backward is the portable one"
    compacted = choose_route("auto", GPU, torch.float16, 64, SHORT_KEYS, heads=16, kv_heads=2)
    assert not compacted.in_place and compacted.takes_deterministic


@pytest.mark.parametrize("impl, device, dtype, dim, message", [
    ("hopper", CPU, torch.float16, 64, r"impl='hopper' requires a Hopper GPU \(sm_90\), got tensors on cpu"),
    ("hopper", GPU, torch.float16, 80, "a head_dim of 64 or 128, got torch.float16 and 80"),
    ("hopper", GPU, torch.float16, 64, r"requires a Hopper GPU \(sm_90\), got sm_80"),
    ("triton", GPU, torch.float32, 64, "requires float16 or bfloat16 and a head_dim of 16 to 256, got torch.float32 and 64"),
    ("triton", GPU, torch.float16, 8, "got torch.float16 and 8"),
    ("gather", CPU, torch.float32, 64, "impl must be one of 'auto', 'reference', 'torch', 'triton', 'cudnn', 'hopper', got 'gather'"),
    ("cuda", CPU, torch.float16, 64, "impl must be one of 'auto', 'reference', 'torch', 'triton', 'cudnn', 'hopper', got 'cuda'"),
    (None, CPU, torch.float16, 64, "impl must be one of .*, got None"),
])
def test_an_explicit_choice_that_cannot_run_raises(impl, device, dtype, dim, message, monkeypatch):
    monkeypatch.setattr(routing, "capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=message):
        choose_route(impl, device, dtype, dim)


def test_every_row_names_functions_that_exist():
    pytest.importorskip("triton")
    for row in TABLE:
        for path in filter(None, (row.forward, row.backward, row.gathered)):
            for keys in ("tiles", "compacted") if row.triton else ("tiles",):
                assert callable(routing.Pass(row.name, keys, path).load())


def test_a_much_slower_fallback_warns_once(monkeypatch, capability):
    assert choose_route("auto", GPU, torch.float32, 64).slow_fallback.startswith("attention runs in plain torch on a GPU")
    assert choose_route("torch", GPU, torch.float32, 64).slow_fallback is None, "chosen, not fallen back to"
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


def test_a_key_that_nobody_sees_has_no_gradient_whatever_its_value(monkeypatch):
    """As on a GPU in float32: steps are padded, and an unused row must not multiply infinity by zero."""
    from ssta.kernels.eager import blocks as eager
    from ssta.kernels.eager import steps

    monkeypatch.setattr(eager, "steps", steps._padded_steps)
    q, k, v = torch.randn(3, 1, 1, 8, 4).unbind()
    v[0, 0, 0, 0] = -torch.inf
    k.requires_grad_()
    lists = BlockLists.from_mask(torch.tensor([[True, False], [False, True]]), 4, 4, q_lengths=torch.tensor([0, 4], dtype=torch.int32))
    block_sparse_attention(q, k, v, lists, impl="torch").sum().backward()
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
