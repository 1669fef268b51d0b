"""Attention is differentiable once, by autograd alone: whatever asks for more raises, and never gets a wrong number."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ssta import (
    SSTAConfig,
    TokenLayout,
    dense_attention,
    sparse_linear_attention,
    ssta_3d_attention,
    ssta_attention,
    video_sparse_attention,
)
from ssta.interfaces import selected_attention
from ssta.kernels import BlockLists, block_sparse_attention, merge_attention

THW = (2, 3, 4)
LAYOUT = TokenLayout.video_text(THW)
TILES = dict(tile_thw=(1, 2, 2), kernel_thw=(1, 1, 1), density=0.3)
CONFIG = SSTAConfig(**TILES)
WEIGHT = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
EVERY_BLOCK = torch.arange(6, dtype=torch.int32).expand(1, 24, 2, 6)


def blocks(heads=2):
    return BlockLists.from_mask((torch.arange(72).view(2, 6, 6) % 5 < 3)[:heads], 4, 4)


def by_token(q, k, v):
    return selected_attention(*[x.transpose(1, 2) for x in (q, k, v)], EVERY_BLOCK, block_size=4).transpose(1, 2)


CALLS = {
    "ssta_3d_attention": lambda q, k, v: ssta_3d_attention(q, k, v, THW, **TILES),
    "estimates": lambda q, k, v: ssta_3d_attention(q, k, v, THW, compensation="linear", **TILES),
    "ssta_attention": lambda q, k, v: ssta_attention(q, k, v, LAYOUT, CONFIG),
    "dense_attention": lambda q, k, v: dense_attention(q, k, v, LAYOUT).out,
    "video_sparse_attention": lambda q, k, v: video_sparse_attention(q, k, v, None, THW, 0.5, tile_thw=(1, 2, 2)),
    "sparse_linear_attention": lambda q, k, v: sparse_linear_attention(q, k, v, WEIGHT, q_block=4, kv_block=4),
    "block_sparse_attention": lambda q, k, v: block_sparse_attention(q, k, v, blocks()),
    "its lse": lambda q, k, v: block_sparse_attention(q, k, v, blocks(), return_lse=True)[1],
    "selected_attention": by_token,
    "merged": lambda q, k, v: merge_attention(*zip(*[block_sparse_attention(q, k, v, blocks(), return_lse=True), (v, q[..., 0])]))[0],
}


class Watching(TorchDispatchMode):
    """Sees every operator, and changes nothing."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


TWICE = "must be differentiated at most once, got a gradient of their gradient"
every_call = pytest.mark.parametrize("name", CALLS)


def leaves(number=3):
    return [x.requires_grad_() for x in torch.randn(number, 1, 2, 24, 4, dtype=torch.float64)]


def gradients(call, inputs, wanted=None, **options):
    return torch.autograd.grad(call(*inputs).square().sum(), inputs if wanted is None else wanted, **options)


def refused(of, inputs):
    """That ``of`` has no derivative by any of ``inputs``, alone, beside a term that has one, or by ``backward``."""
    for x in inputs:
        for loss in (of, of + x.pow(3).sum()):
            with pytest.raises(RuntimeError, match=TWICE):
                torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match=TWICE):
        of.backward(retain_graph=True)


@every_call
def test_a_second_derivative_raises(name):
    inputs = leaves()
    once, first = gradients(CALLS[name], inputs), gradients(CALLS[name], inputs, create_graph=True)
    for x, y in zip(once, first):
        assert torch.equal(x, y)
    for x in first:
        if x.any():
            refused(x.square().sum(), inputs)


@every_call
def test_a_gradient_is_no_constant_of_the_one_that_arrives(name):
    """As where layers behind the attention have weights."""
    inputs = leaves()
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    first = torch.autograd.grad((CALLS[name](*inputs) * weight).sum(), inputs[0], create_graph=True)[0]
    refused(first.square().sum(), [weight])


@every_call
def test_a_second_derivative_of_one_input_raises(name):
    q, k, v = leaves()
    first, = gradients(CALLS[name], (q, k.detach(), v.detach()), (q,), create_graph=True)
    refused(first.sum(), [q])


@pytest.mark.parametrize("name", ["estimates", "block_sparse_attention"])
@pytest.mark.parametrize("kind", ["checkpoint", "save_on_cpu", "several gradients at once", "a mode"])
def test_a_second_derivative_raises_however_the_first_was_made(name, kind):
    inputs, call = leaves(), CALLS[name]
    expected = gradients(call, inputs)
    if kind == "checkpoint":
        first = gradients(lambda *x: checkpoint(call, *x, use_reentrant=False), inputs, create_graph=True)
    elif kind == "save_on_cpu":
        with save_on_cpu():
            out = call(*[x * 1 for x in inputs])
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    elif kind == "a mode":
        with Watching():
            first = gradients(call, inputs, create_graph=True)
    else:
        out = call(*inputs)
        several = torch.stack([2 * out.detach(), out.detach()])
        first = torch.autograd.grad(out, inputs, several, is_grads_batched=True, create_graph=True)
        refused(sum([x[1].sum() for x in first]), inputs)
        first = [x[0] for x in first]
    for x, y in zip(expected, first):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
    refused(sum([x.sum() for x in first]), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["estimates", "block_sparse_attention"])
@pytest.mark.parametrize("backend, text", [("eager", TWICE), ("aot_eager", "does not currently support double backward")])
def test_a_second_derivative_raises_where_the_first_was_compiled(name, backend, text):
    inputs, call = leaves(), CALLS[name]
    if name == "block_sparse_attention":
        lists = blocks()

        def call(q, k, v):
            return block_sparse_attention(q, k, v, lists)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    first = gradients(compiled, inputs, create_graph=True)
    for x, y in zip(first, gradients(call, inputs)):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
    for x in inputs:
        with pytest.raises(RuntimeError, match=text):
            torch.autograd.grad(first[0].sum() + x.pow(3).sum(), x, retain_graph=True)


def test_gradients_with_a_graph_may_be_written_to():
    """As those of weights are where they are clipped."""
    inputs = leaves()
    for x, y in zip(gradients(CALLS["estimates"], inputs), gradients(CALLS["estimates"], inputs, create_graph=True)):
        with torch.no_grad():
            assert torch.equal(y.mul_(0.5), x.mul_(0.5))


@pytest.mark.parametrize("name", ["reference", "merge_attention", "the gate of VSA", "the weight of SLA"])
def test_what_is_plain_torch_has_right_second_derivatives(name):
    """Of the gate and the weight, whose gradients need none of attention's. Of one head: each number is moved by itself."""
    inputs = [x[:, :1].detach().requires_grad_() for x in leaves()]
    if name == "reference":
        assert torch.autograd.gradgradcheck(lambda *x: block_sparse_attention(*x, blocks(1), impl="reference"), inputs)
    elif name == "merge_attention":
        assert torch.autograd.gradgradcheck(lambda *x: merge_attention([x[0], x[1]], [x[2][..., 0], x[2][..., 1]])[0], inputs)
    else:
        extra = WEIGHT.clone().requires_grad_() if "weight" in name else torch.randn_like(inputs[0]).requires_grad_()

        def first(q, extra):
            qkv = q, *[x.detach() for x in inputs[1:]]
            if "weight" in name:
                out = sparse_linear_attention(*qkv, extra, q_block=4, kv_block=4)
            else:
                out = video_sparse_attention(*qkv, extra, THW, 0.5, tile_thw=(1, 2, 2))
            return torch.autograd.grad((out * torch.linspace(0, 1, 4, dtype=out.dtype)).sum(), extra, create_graph=True)[0]

        assert torch.autograd.gradcheck(lambda q: first(q, extra), inputs[0])


@every_call
def test_torch_func_is_refused_with_what_to_call_instead(name):
    q, k, v = torch.randn(3, 1, 2, 24, 4, dtype=torch.float64)

    def loss(q):
        return CALLS[name](q, k, v).sum()

    for gradient in (torch.func.grad(loss), torch.func.jacrev(loss), torch.func.hessian(loss), lambda q: torch.func.vjp(loss, q),
                     lambda q: torch.func.vmap(torch.func.grad(loss))(q[None]),
                     lambda q: torch.func.grad(lambda q: torch.func.vmap(loss)(q).sum())(q[None])):
        with pytest.raises((RuntimeError, ValueError), match="must not be differentiated by torch.func.*torch.autograd.grad"):
            gradient(q)


@every_call
def test_torch_func_may_differentiate_around_attention(name):
    q, k, v = leaves()
    weight = torch.randn_like(q)
    out = CALLS[name](q, k, v)
    weight = weight[..., 0] if out.dim() == 3 else weight
    found = torch.func.grad(lambda weight, q: (CALLS[name](q, k, v) * weight).sum())(weight, q)
    assert torch.equal(found, out)
    found.square().sum().backward()
    for x, y in zip((q, k, v), gradients(CALLS[name], (q, k, v), (q, k, v), allow_unused=True)):
        torch.testing.assert_close(x.grad, y)


@every_call
def test_a_call_that_vmap_maps_has_the_gradients_of_its_entries(name):
    several = [torch.stack(leaves(2)).detach().requires_grad_() for _ in "qkv"]
    mapped = torch.func.vmap(CALLS[name])(*several)
    alone = [CALLS[name](*[x[number] for x in several]) for number in range(2)]
    for one, out in zip(mapped, alone):
        torch.testing.assert_close(one, out)
    found = torch.autograd.grad(mapped.square().sum(), several, allow_unused=True)
    for x, y in zip(found, torch.autograd.grad(sum([out.square().sum() for out in alone]), several, allow_unused=True)):
        torch.testing.assert_close(x, y)
