"""Norm, RoPE and joining in one pass: the kernel does what the modules do, and leaves alone what is not plain."""


import pytest
import torch
from diffusers.models.normalization import MochiRMSNorm, RMSNorm
from tiny_models import TINY
from torch import nn

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid, ssta_attention, tile_layout
from ssta.kernels import Deferred
from ssta.kernels.prologue import norm_rope_kernel
from ssta.pipelines import Schedule, apply_ssta
from ssta.pipelines.families.joint import JointSSTAProcessor
from ssta.pipelines.families.mochi import MochiSSTAProcessor
from ssta.pipelines.patch import streams
from ssta.pipelines.patch.streams import Stream
from ssta.scoring import descriptors

# The package gives its name to the function.
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HEADS, DIM = 3, 24
# norm, across heads, angles: none, of all heads, of each head, and then each once in memory
CASES = [(RMSNorm, False, "shared"), (RMSNorm, False, None), (MochiRMSNorm, False, "once"), (nn.RMSNorm, True, "shared"),
         (nn.RMSNorm, True, "each"), (None, False, "each"), (None, False, None)]
# What the families say of their norms.
NORMS = {**streams.TORCH_NORMS, **JointSSTAProcessor.norms, **MochiSSTAProcessor.norms}
NAMES = ["HunyuanVideo", "text", "Mochi", "Wan", "LTX-Video", "RoPE alone", "nothing"]


@pytest.fixture
def by_kernel(monkeypatch):
    """What each launch of the kernel was given."""
    launches = []

    def launch(*args):
        launches.append(args)
        real(*args)

    real = norm_rope_kernel.materialize
    monkeypatch.setattr(norm_rope_kernel, "materialize", launch)
    return launches


def materialized(*queries, heads, across_heads=False, impl="triton"):
    """q of these streams, by Triton's kernel also on a CPU, where its interpreter runs it; k and v have nothing that a kernel would do."""
    plain = [Stream(queries[0].projected)]
    return made(streams.joined((queries, plain, plain), heads=heads, across_heads=across_heads, norms=NORMS, impl=impl)[0])


def made(x):
    """``[B, S, H, D]``, deferred or not."""
    return x.materialize().transpose(1, 2) if isinstance(x, Deferred) else x


def norm_of(kind, channels, dtype):
    if kind is None:
        return None
    norm = kind(channels, eps=1e-5).to(DEVICE, dtype).requires_grad_(False)
    norm.weight.uniform_(0.5, 3)
    return norm


def stream_of(case, tokens, dtype, heads=HEADS, dim=DIM, batch=2):
    kind, across_heads, angles = case
    found = None
    if angles is not None:
        shape = {"shared": (tokens, 1), "each": (batch, tokens, heads), "once": (tokens, heads)}[angles]
        radians = 7 * torch.randn(*shape, dim // 2, device=DEVICE)
        found = tuple(of if angles == "once" else of.repeat_interleave(2, -1) for of in (radians.cos(), radians.sin()))
    x = torch.randn(batch, tokens, heads * dim).to(DEVICE, dtype)
    return Stream(x, norm_of(kind, heads * dim if across_heads else dim, dtype), found)


def same(found, expected):
    """Differences of a rounding in few places, from another order of the sums."""
    eps = torch.finfo(found.dtype).eps
    pairs = expected.float().unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True).expand(*expected.shape[:-1], -1, 2).flatten(-2)
    difference = (found.float() - expected.float()).abs()
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert bool((difference <= 4 * eps * pairs).all())
    assert found.dtype == torch.float32 or (difference > 0).float().mean() < 0.02


@pytest.mark.parametrize("case", CASES, ids=NAMES)
# Triton's row takes float16 in the interpreter, which does not round to bfloat16 as a GPU does.
@pytest.mark.parametrize("dtype", [torch.float16])
def test_the_kernel_does_what_the_modules_do(by_kernel, case, dtype):
    parts = stream_of(case, 37, dtype), stream_of((case[0], case[1], None), 5, dtype)
    for some in (parts, parts[:1]):
        found = materialized(*some, heads=HEADS, across_heads=case[1])
        same(found, materialized(*some, heads=HEADS, across_heads=case[1], impl="torch"))
    assert len(by_kernel) == (2 if case[0] is None and case[2] is None else 3) and found.stride() == torch.empty_like(found).stride()


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_one_of_them_by_itself_is_the_same(by_kernel, case):
    parts = stream_of(case, 37, torch.float16), stream_of((case[0], case[1], None), 5, torch.float16)
    options = dict(heads=HEADS, across_heads=case[1], norms=NORMS, impl="triton")
    assert torch.equal(made(streams.joined((parts,), **options)[0]), made(streams.joined((parts,) * 3, **options)[0]))


def test_views_and_no_tokens(by_kernel):
    stream = stream_of(CASES[0], 20, torch.float16)
    whole = materialized(stream, heads=HEADS)
    every = Stream(stream.projected[:, ::2], stream.norm, tuple(of[::2] for of in stream.angles))
    same(materialized(every, heads=HEADS), whole[:, ::2])
    chunk = stream.projected.repeat(1, 1, 2).chunk(2, dim=-1)[1]
    same(materialized(Stream(chunk, stream.norm, stream.angles), heads=HEADS), whole)
    strided = Stream(stream.projected, stream.norm, (stream.angles[0], stream.angles[1].mT.contiguous().mT))
    same(materialized(strided, heads=HEADS), whole)
    none = Stream(stream.projected[:, :0], stream.norm)
    same(materialized(stream, none, heads=HEADS), whole)
    assert len(by_kernel) == 6


LAYOUT = TokenLayout((VideoGrid(3, 5, 4), VideoGrid(2, 3, 3), DenseRun(7)))


def tiled(case, padding, dtype, heads=HEADS, dim=DIM):
    """(q, its means) in tiles by one kernel, and by the modules and the layout; with a second stream that is neither video nor rotated."""
    video, text = LAYOUT.video_length, LAYOUT.dense_length
    parts = stream_of(case, video, dtype, heads, dim), stream_of((case[0], case[1], None), text, dtype, heads, dim)
    layout = tile_layout(LAYOUT, (2, 2, 3), padding, DEVICE)
    options = dict(heads=heads, across_heads=case[1])
    q, k, _ = streams.joined((parts, parts, [Stream(part.projected) for part in parts]), **options, norms=NORMS, impl="triton")
    assert isinstance(q, Deferred) and q.shape == k.shape == (2, heads, LAYOUT.length, dim) and q.dtype == dtype
    found = q.gather_blocks(layout.source, layout.offsets, layout.num_video_tiles)
    assert found[0].stride()[1:] == (dim, dim * heads, 1), "in the projections' memory order"
    expected = layout.tile(materialized(*parts, **options).transpose(1, 2))
    return found, expected, descriptors(expected.double(), layout)


@pytest.mark.parametrize("padding", ["none", "zero", "repeat"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_tiles_come_from_the_same_kernel(by_kernel, case, padding):
    (found, means), expected, exact = tiled(case, padding, torch.float16, heads=4)
    same(found, expected)
    assert torch.equal(found == 0, expected == 0), "padding is zeros"
    rounding = torch.finfo(found.dtype).eps * exact.abs().max() + 12 * torch.finfo(torch.float32).eps * found.abs().max()
    assert (means - exact).abs().max() <= rounding and torch.equal(means, means.to(found.dtype).float())


@pytest.mark.gpu
@pytest.mark.parametrize("padding", ["none", "zero"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_tiles_come_from_the_same_kernel_on_a_gpu(case, padding):
    test_tiles_come_from_the_same_kernel(None, case, padding)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("heads, dim", [(16, 128), (32, 64), (5, 80)])
def test_the_kernel_does_what_the_modules_do_on_a_gpu(case, heads, dim):
    for dtype in (torch.bfloat16, torch.float16):
        parts = stream_of(case, 3001, dtype, heads, dim), stream_of((case[0], case[1], None), 77, dtype, heads, dim)
        found, again = (materialized(*parts, heads=heads, across_heads=case[1]) for _ in range(2))
        assert torch.equal(found, again)
        same(found, materialized(*parts, heads=heads, across_heads=case[1], impl="torch"))


def test_deferred_qkv_fits_the_layout():
    parts = [stream_of(CASES[0], tokens, torch.float32) for tokens in (60, 25)]
    q = Deferred(tuple(streams._projection(part, HEADS, False, NORMS) for part in parts))
    config = SSTAConfig(tile_thw=(2, 2, 3))
    with pytest.raises(TypeError, match="key must be Deferred as query is, got Tensor"):
        ssta_attention(q, torch.zeros(q.shape, device=DEVICE), q, LAYOUT, config)
    with pytest.raises(ValueError, match="query must have the layout's 85 tokens, got 60"):
        ssta_attention(*[Deferred(q.projections[:1])] * 3, LAYOUT, config)
    with pytest.raises(ValueError, match=r"query's projections must end where segments of the layout do, got \[60, 25\] tokens for"):
        ssta_attention(q, q, q, TokenLayout((VideoGrid(5, 4, 4), DenseRun(5))), config)


class Doubled(RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def with_hook(norm):
    norm.register_forward_hook(lambda module, args, output: 2 * output)


def with_forward(norm):
    forward = norm.forward
    norm.forward = lambda x: 2 * forward(x)


@pytest.mark.parametrize("change", [with_hook, with_forward, lambda norm: norm.register_forward_pre_hook(lambda module, args: None),
                                    lambda norm: norm.double(), lambda norm: norm.requires_grad_()])
def test_a_changed_norm_is_called(by_kernel, change):
    x, norm, angles, *_ = stream_of(CASES[0], 8, torch.float16)
    change(norm)
    out = materialized(Stream(x, norm, angles), heads=HEADS)
    expected = streams.apply_rope(norm(x.unflatten(2, (HEADS, -1))), *(of[..., ::2] for of in angles))
    assert not by_kernel and torch.equal(out, expected)
    with torch.no_grad():
        materialized(Stream(x, norm, angles), heads=HEADS)
    assert bool(by_kernel) == norm.weight.requires_grad, "without a gradient to compute the kernel runs"


def test_other_norms_and_who_else_is_left_to_the_modules(by_kernel):
    x, norm, angles, *_ = stream_of(CASES[0], 8, torch.float16)
    for other in (Doubled(DIM, eps=1e-5), nn.LayerNorm(DIM), RMSNorm(DIM, 1e-5, False), RMSNorm(DIM, 1e-5, bias=True), nn.RMSNorm(DIM)):
        materialized(Stream(x, other.to(DEVICE).requires_grad_(False), angles), heads=HEADS)
    materialized(Stream(x.requires_grad_(), norm, angles), heads=HEADS).sum().backward()
    assert x.grad is not None
    x = x.detach()
    materialized(Stream(x, norm, tuple(of.double() for of in angles)), heads=HEADS)
    materialized(Stream(x, norm, (angles[0].requires_grad_(), angles[1])), heads=HEADS)
    doubled = materialized(Stream(x, norm, angles, then=lambda y: 2 * y), heads=HEADS)
    assert torch.equal(doubled, 2 * materialized(Stream(x, norm, angles, then=lambda y: y), heads=HEADS))
    with torch.autocast(DEVICE, torch.bfloat16):
        materialized(Stream(x, norm), heads=HEADS)
    torch.func.vmap(lambda one: materialized(Stream(one, norm), heads=HEADS))(x[None])
    torch.compile(lambda: materialized(Stream(x, norm), heads=HEADS), backend="eager", fullgraph=True)()
    assert not by_kernel
    materialized(Stream(x, norm), heads=HEADS)
    assert len(by_kernel) == 1


def test_a_norm_that_the_family_does_not_name_is_called(by_kernel):
    x, norm, angles, *_ = stream_of(CASES[0], 8, torch.float16)
    plain = [Stream(x)]
    found = made(streams.joined(([Stream(x, norm, angles)], plain, plain), heads=HEADS, impl="triton")[0])
    assert not by_kernel
    same(materialized(Stream(x, norm, angles), heads=HEADS), found)
    assert len(by_kernel) == 1


@pytest.mark.parametrize("name", ["hunyuan_video_15", "hunyuan_video", "wan", "wan_vace", "skyreels_v2", "ltx", "mochi", "motif_video"])
def test_models_give_the_same_either_way(by_kernel, name):
    tiny = TINY[name]
    model = tiny.build().to(DEVICE)
    # All parameters: what is kept in float32 is left to the modules. And no buffers: the angles stay in float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.half()
    call = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in tiny.call().items()}
    call = {name: value.half() if isinstance(value, torch.Tensor) and value.is_floating_point() else value for name, value in call.items()}
    found = {}
    for impl in ("triton", "torch"):
        # The first layer densely, so that both ways to the kernel are taken.
        with torch.no_grad(), apply_ssta(model, SSTAConfig(tile_thw=(2, 4, 4), kernel_thw=(1, 1, 1), topk=2),
                                         schedule=Schedule(dense_layers=(0,)), impl=impl):
            found[impl] = model(**call)[0]
        # The last argument is the order of blocks.
        assert {args[-1] is None for args in by_kernel} == {True, False}
    assert (found["triton"] - found["torch"]).abs().max() <= 2e-2 * found["torch"].abs().max()
