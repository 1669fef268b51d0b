"""Chunk after chunk through a cache: dense attention to sink, window and chunk where everything is selected, else the stateless form."""

import pickle
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention

from ssta import SSTAConfig, TileCache, TokenLayout, ssta_attention

# (window, sink, frames of the chunks): windows that move by chunks, long enough to look the same each time, or by fewer frames than a tile
# has; a sink that ends inside a tile; chunks that tiles do not divide; a first chunk that is shorter; one chunk that is all the window.
ROLLS = [(4, 2, [2] * 6), (7, 0, [3] * 6), (6, 3, [3] * 6), (6, 1, [2, 4, 4, 4]), (3, 2, [3] * 5), (5, 2, [1, 3, 3, 3, 3])]
EVERYTHING = [SSTAConfig((2, 2, 3), density=1.0), SSTAConfig((2, 2, 3), topk=999), SSTAConfig((3, 3, 3), topk=999, compensation="linear"),
              SSTAConfig((2, 2, 3), topk=999, compensation="linear", compensation_parts=2)]
SOME = [SSTAConfig((2, 2, 3), density=0.3, compensation="linear"), SSTAConfig((2, 2, 3), topk=3),
        SSTAConfig((2, 2, 3), density=0.3, compensation="linear", compensation_parts=2), SSTAConfig((3, 2, 3), density=0.4),
        SSTAConfig((2, 2, 3), density=0.3, compensation="linear", sampling_type="similarity", sparse_type="ssta", kernel_thw=(1, 3, 1))]


def pairs(configs):
    """Each configuration with two rolls, each roll with a configuration at least."""
    return [(config, ROLLS[(2 * i + j) % len(ROLLS)]) for i, config in enumerate(configs) for j in range(2)]


def chunk(frames, hw=(5, 4), batch=2, heads=4, kv_heads=2, dim=8, dtype=torch.float64, device="cpu"):
    """q, k, v of some frames, as projections leave them, and their (t, h, w)."""
    tokens = frames * hw[0] * hw[1]
    return (*[torch.randn(batch, tokens, of, dim, dtype=dtype, device=device).transpose(1, 2) for of in (heads, kv_heads, kv_heads)],
            (frames, *hw))


def dense(q, keys, values, window, sink, frame):
    """Attention to the sink, the window and the last of the chunks of ``keys``."""
    frames = [x.shape[2] // frame for x in keys]
    number, before = torch.arange(sum(frames)), sum(frames[:-1])
    attended = ((number < sink) | (number >= before - window)).repeat_interleave(frame)
    k, v = (torch.cat(x, 2)[:, :, attended].repeat_interleave(q.shape[1] // keys[0].shape[1], 1) for x in (keys, values))
    return scaled_dot_product_attention(q, k, v)


def stateless(cache, q, k, v, thw):
    """The same by ``ssta_attention`` over what the cache holds and the chunk."""
    held, layout = cache.contents(), TokenLayout.video_text(thw)
    shorter = thw[0] < cache._memory.geometry.chunk and cache.config.selected_by == "ssta"
    budget_alone = dict(sparse_type="block_attn", kernel_thw=None) if shorter else {}
    config = replace(cache.config, tile_thw=cache._memory.geometry.tile, **budget_alone)
    return ssta_attention(q, torch.cat([held.key, k], 2), torch.cat([held.value, v], 2), layout, config,
                          kv_layout=TokenLayout(held.segments + layout.segments), impl=cache.impl)


@pytest.mark.parametrize("config, roll", pairs(EVERYTHING))
def test_everything_selected_is_dense(config, roll):
    window, sink, chunks = roll
    cache = TileCache(config, window=window, sink=sink, chunk=max(chunks))
    for _ in range(2):
        keys, values = [], []
        for number, frames in enumerate(chunks):
            for keep in (False, True):
                q, k, v, thw = chunk(frames)
                out = cache.attend(q, k, v, thw, keep=keep, dense=number % 2 == keep, start=sum(chunks[:number]))
                torch.testing.assert_close(out, dense(q, [*keys, k], [*values, v], window, sink, 20), atol=1e-14, rtol=0)
            keys.append(k)
            values.append(v)
            assert cache.kept == sum(chunks[:number + 1]) and cache.frames == min(cache.kept, window + sink)
        cache.reset()
        assert cache.frames == 0 and cache.contents().segments == ()


@pytest.mark.parametrize("config, roll", pairs(SOME))
def test_part_of_it_selected_is_the_stateless_form(config, roll):
    window, sink, chunks = roll
    cache = TileCache(config, window=window, sink=sink, chunk=max(chunks))
    for frames in chunks:
        for keep in (False, True):
            q, k, v, thw = chunk(frames)
            cache.allocate(q, k, thw)
            expected = stateless(cache, q, k, v, thw)
            torch.testing.assert_close(cache.attend(q, k, v, thw, keep=keep), expected, atol=1e-14, rtol=0)


def test_gradients_flow_through_one_chunk_whose_cached_keys_are_constant():
    window, sink, chunks = 7, 2, [3] * 4
    cache = TileCache(SSTAConfig((2, 2, 3), topk=999, compensation="linear"), window=window, sink=sink)
    keys, values = [], []
    for frames in chunks:
        *qkv, thw = chunk(frames)
        mine, expected = ([x.clone().requires_grad_() for x in qkv] for _ in range(2))
        weight = torch.randn_like(qkv[0])
        dense(expected[0], [*keys, expected[1]], [*values, expected[2]], window, sink, 20).backward(weight)
        other = deepcopy(cache)
        cache.attend(*mine, thw).backward(weight)
        for x, y in zip(mine, expected):
            torch.testing.assert_close(x.grad, y.grad, atol=1e-13, rtol=0)
        # It stored what a call without gradients does.
        other.attend(*qkv, thw)
        for x, y in zip(cache.state_dict().values(), other.state_dict().values()):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        keys.append(qkv[1])
        values.append(qkv[2])
    cache = TileCache(SOME[0], window=6)
    for frames in chunks:
        q, k, v, thw = chunk(frames)
        recorded = cache.attend(q.clone().requires_grad_(), k, v, thw, keep=False)
        torch.testing.assert_close(recorded, cache.attend(q, k, v, thw), atol=1e-14, rtol=0)


def test_text_is_attended_to_until_other_text_comes():
    cache = TileCache(SSTAConfig((2, 2, 3), topk=999, compensation="linear"), window=6, sink=2, text=15)
    empty, text = torch.zeros(2, 2, 0, 8, dtype=torch.float64), None
    for number in range(4):
        q, k, v, thw = chunk(3)
        cache.allocate(q, k, thw)
        given = tuple(torch.randn(2, 2, 5 * number, 8, dtype=torch.float64) for _ in range(2)) if number % 2 else None
        # Text comes first.
        held = [x[:, :, (text or (empty,))[0].shape[2]:] for x in cache.contents()[:2]]
        text = given or text
        for keep, new in ((False, given), (True, None)):
            out = cache.attend(q, k, v, thw, keep=keep, text=new)
            attended = [torch.cat([of, frames, x], 2).repeat_interleave(2, 1) for of, frames, x in zip(text or (empty,) * 2, held, (k, v))]
            torch.testing.assert_close(out, scaled_dot_product_attention(q, *attended), atol=1e-14, rtol=0)
    # Longer chunks take other memory, and the text along.
    first, second = TileCache(cache.config, window=6, text=15), TileCache(cache.config, window=6, text=15)
    first.attend(*chunk(1), keep=False, text=text)
    assert torch.equal(first.attend(q, k, v, thw), second.attend(q, k, v, thw, text=text))
    for bad in (text[0], (text[0],), tuple(x[..., :4] for x in text), (torch.zeros(2, 2, 16, 8, dtype=torch.float64),) * 2):
        with pytest.raises((TypeError, ValueError), match="text must"):
            cache.attend(q, k, v, thw, text=bad)


def turned(key, first):
    """Rotary positions of frames of 20 tokens, as complex numbers."""
    frame = first + torch.arange(key.shape[2]) // 20
    angles = frame[:, None].double() / 3.0 ** torch.arange(key.shape[3] // 2)
    return torch.view_as_real(torch.view_as_complex(key.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
                              ).flatten(-2).to(key.dtype)


def test_a_rotary_moves_the_sink_along_with_the_window():
    window, sink = 5, 2
    cache = TileCache(EVERYTHING[2], window=window, sink=sink, rotary=turned)
    keys, values = [], []
    for number in range(5):
        q, k, v, thw = chunk(3)
        held = min(3 * number, window + sink)
        # As if what is held were counted from 0 on: the scores depend on distances alone.
        indexed = torch.cat(keys, 2) if keys else k[:, :, :0]
        frames = torch.arange(3 * number)
        kept = ((frames < sink) | (frames >= 3 * number - window)).repeat_interleave(20)
        indexed = turned(torch.cat([indexed[:, :, kept], k], 2), 0).repeat_interleave(2, 1)
        all_values = torch.cat([torch.cat(values, 2)[:, :, kept] if values else v[:, :, :0], v], 2).repeat_interleave(2, 1)
        exact = scaled_dot_product_attention(turned(q, held), indexed, all_values)
        torch.testing.assert_close(cache.attend(turned(q, 3 * number), k, v, thw), exact, atol=1e-13, rtol=0)
        keys, values = [*keys, k], [*values, v]
    other = TileCache(EVERYTHING[2], window=window, sink=sink, rotary=turned)
    other.load_state_dict(deepcopy(cache.state_dict()))
    for _ in range(2):
        q, k, v, thw = chunk(3)
        torch.testing.assert_close(cache.attend(q, k, v, thw), other.attend(q, k, v, thw), atol=1e-13, rtol=0)
    with pytest.raises(ValueError, match="rotary"):
        TileCache(EVERYTHING[2], window=window, sink=sink).load_state_dict(cache.state_dict())
    with pytest.raises(ValueError, match="rotary must return"):
        TileCache(window=6, rotary=lambda key, first: key[..., :1]).attend(*chunk(3))
    # One that cannot turn the sink, which has two frames.
    cache = TileCache(window=6, sink=2, rotary=lambda key, first: key[:, :, :60].clone().view(2, 2, 60, 8))
    with pytest.raises(RuntimeError, match="invalid for input"):
        cache.attend(*chunk(3))
    assert cache.state_dict() == {}


@pytest.mark.parametrize("config", [SOME[0], SOME[3]], ids=["linear", "density"])
def test_a_state_goes_to_another_cache(config):
    cache = TileCache(config, window=7, sink=2)
    for _ in range(4):
        cache.attend(*chunk(3))
    other = TileCache(config, window=7, sink=2).to("cpu")
    other.load_state_dict(deepcopy(cache.state_dict()))
    assert (other.frames, other.kept, other.nbytes) == (9, 12, cache.nbytes)
    copies = deepcopy(cache), pickle.loads(pickle.dumps(cache))
    for keep in (False, True, False):
        q, k, v, thw = chunk(3)
        out = cache.attend(q, k, v, thw, keep=keep)
        torch.testing.assert_close(out, other.attend(q, k, v, thw, keep=keep), atol=1e-14, rtol=0)
        assert all([torch.equal(out, of.attend(q, k, v, thw, keep=keep)) for of in copies])
    with pytest.raises(ValueError, match="window=7.*window=6|window=6.*window=7"):
        TileCache(config, window=6, sink=2).load_state_dict(cache.state_dict())
    other.load_state_dict(TileCache(config, window=7, sink=2).state_dict())
    assert other.frames == 0


@pytest.mark.parametrize("changed, message", [
    (dict(value=None), r"state\['value'\] must be a Tensor of shape \(2, 2, 340, 8\), got None"), (dict(other=1), "got .*'other'"),
    (dict(frames=torch.zeros(9, dtype=torch.int64)), r"state\['frames'\] must .*\(6,\), got .*9"), (dict(key=torch.zeros(3)), "key"),
    (dict(geometry=(1, 2)), "geometry of 7 entries"), (dict(geometry=3), "geometry of 7 entries"), (dict(first=None), "first"),
    (dict(number=1.5), "number"), (dict(heads=3), "multiple of the key's 2, got 3"), (None, "state must be what")])
def test_a_state_that_does_not_fit_changes_nothing(changed, message):
    cache = TileCache(SOME[0], window=7, sink=2)
    cache.attend(*chunk(3))
    state, before = cache.state_dict(), deepcopy(cache.state_dict())
    with pytest.raises((TypeError, ValueError), match=message):
        cache.load_state_dict(3 if changed is None else {**state, **changed})
    for x, y in zip(before.values(), cache.state_dict().values()):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes_round_as_dense_attention_does(dtype):
    cache = TileCache(SSTAConfig((2, 2, 3), topk=999, compensation="linear"), window=6, sink=2)
    keys, values = [], []
    for _ in range(4):
        q, k, v, thw = chunk(3, dtype=dtype)
        keys, values = [*keys, k], [*values, v]
        exact = dense(q.double(), [x.double() for x in keys], [x.double() for x in values], 6, 2, 20)
        error, allowed = ((x.double() - exact).abs().max() for x in (cache.attend(q, k, v, thw), dense(q, keys, values, 6, 2, 20)))
        assert error <= 2 * allowed + torch.finfo(dtype).eps


@pytest.mark.slow
def test_kernels_do_what_plain_torch_does():
    # One page is cut, by the sink first and then by the window.
    config = SSTAConfig((2, 4, 4), density=0.4, compensation="linear")
    mine, plain = (TileCache(config, window=3, sink=1, impl=impl) for impl in ("triton", "torch"))
    for _ in range(3):
        q, k, v, thw = chunk(2, (4, 8), 1, 2, 1, 16, torch.float16)
        wide = q.double(), k.double(), v.double()
        exact = plain.attend(*wide, thw, keep=False, dense=True)
        assert (mine.attend(q, k, v, thw, keep=False, dense=True) - exact).abs().mean() <= 0.003 * exact.abs().mean()
        # The kernels' covariances have two bits an entry.
        off, allowed = ((x - exact).norm() for x in (mine.attend(q, k, v, thw), plain.attend(*wide, thw)))
        assert abs(off - allowed) <= 0.15 * allowed


def test_a_ring_of_any_shape_is_written_by_kernels():
    """Where the interpreter cannot estimate, plain torch's covariances of two dimensions are in rings that kernels write."""
    from ssta.kernels.eager import held as plain
    from ssta.kernels.portable import held as kernels

    mine = [torch.randn(2, 1, 9, *shape) for shape in ((), (5,), (3, 5))]
    right, rows = [x.clone() for x in mine], torch.arange(3)
    for held, xs in ((plain, right), (kernels, mine)):
        held.write_ring(xs, rows, rows, torch.tensor([1]), 4, 6)
    assert all([torch.equal(x, y) for x, y in zip(mine, right)]) and torch.equal(right[0][:, :, [4, 5, 0]], right[0][:, :, 6:])


@pytest.mark.parametrize("config", [SSTAConfig((3, 2, 3), density=0.4, compensation="linear"), SOME[1]], ids=["linear", "dropped"])
def test_a_compiler_sees_one_graph_for_all_chunks(config):
    torch._dynamo.reset()
    plain, traced = (TileCache(config, window=6, sink=2) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k, v, thw, keep, cache):
        return 2 * cache.attend(q, k, v, thw, keep=keep)

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for number in range(5):
        for keep in (False, True):
            q, k, v, thw = chunk(3, dtype=torch.float32)
            if number == 0 and not keep:
                with pytest.raises(Exception, match="cache.allocate"):
                    compiled(q, k, v, thw, keep, traced)
                traced.allocate(q, k, thw)
            assert torch.equal(step(q, k, v, thw, keep, plain), compiled(q, k, v, thw, keep, traced))
        if number == 2:
            seen = counter.frame_count
    assert counter.frame_count == seen and traced.frames == 8
    for x, y in zip(plain.state_dict().values(), traced.state_dict().values()):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_a_compiler_is_told_of_chunks_that_the_cache_does_not_know():
    cache = TileCache(SSTAConfig(tile_thw=(2, 2, 2), density=0.5), window=4, chunk=2)
    x = torch.randn(1, 2, 16, 16)
    cache.allocate(x.repeat(1, 1, 2, 1), x.repeat(1, 1, 2, 1), (2, 4, 4))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"chunks of 1 frames before a compiler sees one; cache.allocate\("):
        torch.compile(lambda x: cache.attend(x, x, x, (1, 4, 4), keep=False), backend="eager", fullgraph=True)(x)


def test_it_has_no_more_than_it_says():
    cache = TileCache(SSTAConfig((3, 8, 16), density=0.25), window=12, sink=3)
    assert cache.nbytes == 0 and "0 frames" in repr(cache)
    q, k, v, thw = chunk(3, (16, 32), 1, 2, 2, 64, torch.bfloat16)
    out = cache.attend(q, k, v, thw, keep=False)
    assert cache.frames == 0 and out.shape == q.shape
    plain = (12 + 3 + 3) * 512 * 2 * 64 * 2 * 2
    assert plain <= cache.nbytes <= 1.01 * plain
    before = [x.data_ptr() for x in cache._memory.storage.tensors]
    for _ in range(6):
        cache.attend(*chunk(3, (16, 32), 1, 2, 2, 64, torch.bfloat16))
    assert before == [x.data_ptr() for x in cache._memory.storage.tensors]


def mistakes():
    q, k, v, thw = chunk(3)
    other = chunk(3, (4, 4))
    yield "another grid", (*other,), {}, r"\(5, 4\).*\(4, 4\)"
    yield "a longer chunk", chunk(4), {}, "3 frames.*got 4"
    yield "a chunk longer than the window", chunk(7), {}, "6 frames.*got 7"
    yield "a shorter chunk that is kept", chunk(2), {}, "3 frames.*got 2"
    yield "kept twice, or by two layers", (q, k, v, thw), dict(start=3), "so far, 6, got 3"
    yield "other heads", (*chunk(3, heads=8)[:1], k, v, thw), {}, "heads"
    yield "another batch", chunk(3, batch=1), {}, "batch"
    yield "another dtype", chunk(3, dtype=torch.float32), {}, "dtype"
    yield "tokens of another number", (q, k, v, (2, 5, 4)), {}, "40 tokens, got 60"
    yield "no grid", (q, k, v, (3, 5)), {}, "thw"
    yield "keep is no bool", (q, k, v, thw), dict(keep=1), "keep"


@pytest.mark.parametrize("name", [name for name, *_ in mistakes()])
def test_a_call_that_raises_stores_nothing(name):
    cache = TileCache(SOME[0], window=6, sink=1)
    for _ in range(2):
        cache.attend(*chunk(3))
    before = deepcopy(cache.state_dict())
    args, options, message = next(rest for of, *rest in mistakes() if of == name)
    with pytest.raises((TypeError, ValueError), match=message):
        cache.attend(*args, **options)
    for x, y in zip(before.values(), cache.state_dict().values()):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_entries_of_a_mapped_dimension_are_refused():
    *qkv, thw = chunk(3, batch=1)
    cache = TileCache(SOME[0], window=6, sink=1)
    with pytest.raises(ValueError, match="under torch.func.vmap"):
        torch.func.vmap(lambda q, k, v: cache.attend(q, k, v, thw))(*[torch.stack([x, x]) for x in qkv])
    assert not cache.kept


@pytest.mark.parametrize("config, options, message", [
    (SSTAConfig((4, 2, 3)), dict(window=3), r"4 frames \(tile_thw \(4, 2, 3\)\), got 3"),
    (None, dict(window=0), "window"), (None, dict(window=6, sink=-1), "sink"), (None, dict(window=6, chunk=7), "6 frames, got 7"),
    (SSTAConfig((2, 2, 3), pad_type="zero"), dict(window=6), "pad_type"),
    (SSTAConfig((2, 2, 3), threshold=0.5), dict(window=6), "threshold must be 0 in a cache, got 0.5"),
    (SSTAConfig((2, 2, 3), sparse_type="sta"), dict(window=6), "sparse_type"), ("near", dict(window=6), "SSTAConfig"),
    (SSTAConfig((2, 2, 3), variants=((3, dict(pad_type="zero")),)), dict(window=6), "pad_type"),
    (SSTAConfig((2, 2, 3), sampling_type="importance"), dict(window=6), "importance"), (None, dict(window=6, impl="cuda"), "impl"),
    (None, dict(window=6, scale=-1.0), "scale"), (None, dict(window=6, rotary=1.5), "rotary must be a function"),
    (None, dict(window=np.ones(3)), "window must be an int")])
def test_settings_that_it_cannot_follow(config, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        TileCache(config, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dim, tile, impl", [(128, (4, 8, 4), "auto"), (64, (2, 8, 8), "auto"), (128, (4, 8, 4), "triton")])
@torch.no_grad()
def test_on_a_gpu_it_rounds_as_dense_attention_does_and_estimates_as_plain_torch_does(dim, tile, impl):
    caches = [TileCache(SSTAConfig(tile, compensation="linear", **budget), window=10, sink=3, chunk=4, impl=of)
              for budget, of in ((dict(topk=999), impl), (dict(density=0.3), impl), (dict(density=0.3), "torch"))]
    keys, values = [], []
    for frames in (2, 4, 4, 4, 4):
        q, k, v, thw = chunk(frames, (12, 16), 1, 4, 2, dim, torch.bfloat16, "cuda")
        keys, values = [*keys, k], [*values, v]
        exact, rounded = (dense(q.to(of), [x.to(of) for x in keys], [x.to(of) for x in values], 10, 3, 192).double()
                          for of in (torch.float64, torch.bfloat16))
        everything, some = (cache.attend(q, k, v, thw).double() for cache in caches[:2])
        expected = caches[2].attend(q.double(), k.double(), v.double(), thw)
        assert (everything - exact).abs().max() <= 2 * (rounded - exact).abs().max() + torch.finfo(torch.bfloat16).eps
        # Of tiles that matter alike others may be chosen: both are off from dense attention by as much.
        off, allowed = ((x - exact).norm() for x in (some, expected))
        assert abs(off - allowed) <= 0.1 * allowed + 0.01 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("config, window, sink", [
    (SSTAConfig((4, 8, 4), density=0.3, compensation="linear"), 8, 4), (SSTAConfig((4, 8, 4), density=0.3, compensation="linear"), 9, 3),
    (SSTAConfig((3, 8, 4), density=0.3), 9, 3)], ids=["settled", "cut", "dropped"])
@torch.no_grad()
def test_on_a_gpu_a_graph_of_a_call_that_keeps_goes_on_as_the_window_moves(config, window, sink):
    plain, captured = (TileCache(config, window=window, sink=sink) for _ in range(2))
    static = chunk(4, (12, 16), 1, 4, 2, 128, torch.bfloat16, "cuda")[:3]
    graph, thw = torch.cuda.CUDAGraph(), (4, 12, 16)
    for number in range(7):
        fresh = chunk(4, (12, 16), 1, 4, 2, 128, torch.bfloat16, "cuda")[:3]
        for x, y in zip(static, fresh):
            x.copy_(y)
        if number == 2:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            expected = [plain.attend(*fresh, thw, keep=keep) for keep in (False, True)]
            if number < 3:
                out = [captured.attend(*static, thw, keep=keep) for keep in (False, True)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if number == 3:
            with torch.cuda.graph(graph):
                out = [captured.attend(*static, thw, keep=keep) for keep in (False, True)]
        if number >= 3:
            graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(out, expected)), number
    assert all(torch.equal(x, y) for x, y in zip(plain._memory.storage.counts, captured._memory.storage.counts))
