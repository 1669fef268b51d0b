"""Public calls share no memory with later ones: all that was taken and given is written to, and later calls do not notice."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor

from ssta import (
    DenseRun,
    SSTAConfig,
    TextMask,
    TileCache,
    TokenLayout,
    VideoGrid,
    dense_attention,
    explain,
    sparse_linear_attention,
    ssta_3d_attention,
    ssta_attention,
    tile_layout,
    video_sparse_attention,
)
from ssta.interfaces import create_sta_3d_mask
from ssta.kernels import BlockLists, Deferred, Projection, block_sparse_attention, merge_attention, take_tokens

LAYOUT = TokenLayout((DenseRun(5), VideoGrid(3, 4, 5)))
TILE = (2, 2, 3)
CONFIGS = {
    "window": SSTAConfig(TILE, kernel_thw=(1, 3, 1), sparse_type="sta"),
    "topk": SSTAConfig(TILE, topk=2),
    "padded": SSTAConfig(TILE, topk=2, pad_type="repeat"),
    "density": SSTAConfig(TILE, density=0.4),
    "estimated": SSTAConfig(TILE, density=0.4, compensation="linear", compensation_parts=2),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors_in(x):
    """All tensors of ``x``, its fields and entries."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        for value in x.values():
            yield from tensors_in(value)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from tensors_in(value)
    elif is_dataclass(x):
        for of in fields(x):
            yield from tensors_in(getattr(x, of.name, None))


def overwrite(x) -> None:
    """Other values in every tensor of ``x``."""
    with torch.no_grad():
        for tensor in tensors_in(x):
            if tensor.dtype == torch.bool:
                tensor.logical_not_()
            else:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 3)


def numbers(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.float16 if device == "cuda" else dtype)


def qkv(device, tokens=LAYOUT.length, number=3):
    return list(numbers(device, number, 2, 2, tokens, 16).unbind())


def valid(device):
    return (torch.arange(5) < torch.tensor([[3], [5]])).to(device)


def lists_of_a_layer(device, config, masked):
    x, mask = qkv(device), valid(device) if masked else None
    out, blocks = ssta_attention(*x, LAYOUT, config, text_mask=mask, return_blocks=True)
    return [out, blocks.to_mask()], [x, mask, blocks]


def gradients(device, config):
    leaves = [x.requires_grad_() for x in qkv(device)]
    out = ssta_attention(*leaves, LAYOUT, config)
    dout = numbers(device, *out.shape, seed=1)
    grads = torch.autograd.grad(out, leaves, dout)
    return [out.detach(), *grads], [leaves, dout]


def published_call(device):
    x = qkv(device)
    return [ssta_3d_attention(*x, (5, 3, 4), tile_thw=TILE, topk=2, text_len=5, text_mask=valid(device))], [x]


def dense(device):
    x, mask = qkv(device), valid(device)
    result = dense_attention(*x, LAYOUT, mask)
    return [result.out, result.selection.blocks.to_mask()], [x, mask, result.selection]


def report(device):
    x, mask = qkv(device), valid(device)
    found = explain(x[0], x[1], LAYOUT, replace(CONFIGS["topk"], topk=1), value=x[2], text_mask=mask)
    said = [found.attention_kept, found.output_error, found.tile_density, found.flops]
    return [torch.tensor(said), found.layout.tile(qkv(device)[0])], [x, mask, found.blocks, found.near, found.layout]


def tiles(device):
    layout, x = tile_layout(LAYOUT, TILE, "repeat", device), qkv(device)[0]
    tiled = layout.tile(x)
    found = [tiled, layout.untile(tiled), ssta_attention(*qkv(device), LAYOUT, CONFIGS["padded"])]
    return found, [x, layout]


def mask_of_a_window(device):
    found = create_sta_3d_mask((4, 4, 4), (2, 2, 2), (1, 3, 1))
    return [found], []


def video_sparse(device):
    x = qkv(device, 60, 4)
    return [video_sparse_attention(*x, (3, 4, 5), 0.5, tile_thw=TILE)], [x]


def sparse_linear(device):
    x, weight, bias = qkv(device), numbers(device, 16, 16), numbers(device, 16)
    return [sparse_linear_attention(*x, weight, bias, density=0.5, q_block=16, kv_block=16)], [x, weight, bias]


def merged(device):
    outs = [numbers(device, 1, 2, 5, 8, dtype=torch.float32, seed=seed) for seed in (0, 1)]
    lses = [numbers("cpu", 1, 2, 5, seed=seed).to(device) for seed in (2, 3)]
    return [*merge_attention(outs, lses)], [outs, lses]


def tokens_in_their_order(device):
    x, index = qkv(device)[0], torch.arange(LAYOUT.length, device=device)
    return [take_tokens(x, index)], [x, index]


def projections_that_are_ready(device):
    x = qkv(device)
    return [ssta_attention(*[Deferred((Projection(of),)) for of in x], LAYOUT, CONFIGS["topk"])], [x]


CALLS = {
    **{f"lists, {name}, {masked}": lambda device, config=config, masked=masked: lists_of_a_layer(device, config, masked)
       for name, config in CONFIGS.items() for masked in (False, True)},
    **{f"gradients, {name}": lambda device, config=CONFIGS[name]: gradients(device, config) for name in ("topk", "estimated")},
    **{call.__name__: call for call in (published_call, dense, report, tiles, mask_of_a_window, video_sparse, sparse_linear,
                                        merged, tokens_in_their_order, projections_that_are_ready)},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_does_not_notice_what_is_done_to_another_ones_tensors(call, device):
    results, shared = call(device)
    expected, inputs = [x.clone() for x in results], [x.clone() for x in tensors_in(shared)]
    results_again, shared_again = call(device)
    for x, right in zip(tensors_in(shared_again), inputs, strict=True):
        assert torch.equal(x, right), "nothing that is taken is written to"
    overwrite([results, shared, results_again])
    for x, right in zip(call(device)[0], expected, strict=True):
        assert torch.equal(x, right)
    overwrite(shared_again)
    for x, right in zip(call(device)[0], expected, strict=True):
        assert torch.equal(x, right)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_text_mask_keeps_what_it_was_made_of(dtype, device):
    mine = valid(device).to(dtype)
    shared = TextMask.of(mine, 2, LAYOUT, qkv(device)[0].device)
    expected = ssta_attention(*qkv(device), LAYOUT, CONFIGS["topk"], text_mask=shared)
    exact = dense_attention(*qkv(device), LAYOUT, shared).out
    overwrite([mine, shared.in_sequence])
    assert torch.equal(ssta_attention(*qkv(device), LAYOUT, CONFIGS["topk"], text_mask=shared), expected)
    assert torch.equal(dense_attention(*qkv(device), LAYOUT, shared).out, exact)
    shared.valid[0, 1] = False
    with pytest.raises(ValueError, match="text_mask must not be written to once it is a TextMask"):
        ssta_attention(*qkv(device), LAYOUT, CONFIGS["topk"], text_mask=shared)


CACHED = SSTAConfig(tile_thw=(1, 2, 2), density=0.5, compensation="linear")


def rotated(key, first):
    """Positions by frame."""
    angle = 0.1 * (torch.arange(key.shape[2], device=key.device) // 16 + first).to(key.dtype)
    return key * torch.cos(angle)[:, None]


def rotated_and_counted(key, first):
    """The same, and with the number of the first one a mistake that is easy to make."""
    keys = rotated(key, first)
    first += 1000
    return keys


def cache_of(rotary=None):
    return TileCache(CACHED, window=3, sink=1, text=4, rotary=rotary)


def chunk(device, number):
    """The query, key and value of a chunk of a frame of 16 tokens."""
    return list(numbers(device, 3, 1, 2, 16, 16, seed=number).unbind())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotary, careful", [(None, None), (rotated_and_counted, rotated)], ids=["none", "rotated"])
def test_a_cache_goes_on_whatever_is_done_to_what_it_took_and_gave(rotary, careful, device):
    touched, untouched = cache_of(rotary), cache_of(careful)
    for number in range(6):
        text = list(numbers(device, 2, 1, 2, 3, 16, seed=99).unbind())
        first = dict(text=tuple(text)) if number == 0 else {}
        x, y = chunk(device, number), chunk(device, number)
        out, expected = touched.attend(*x, (1, 4, 4), **first), untouched.attend(*y, (1, 4, 4), **{
            name: tuple([of.clone() for of in pair]) for name, pair in first.items()})
        assert torch.equal(out, expected)
        overwrite([x, out, text, touched.contents(), touched.state_dict()])
    for mine, right in zip(tensors_in(touched.state_dict()), tensors_in(untouched.state_dict()), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("meanwhile", ["reset", "more chunks", "nothing"])
def test_a_caches_state_is_that_of_the_moment_whatever_happens_meanwhile(meanwhile, device):
    cache = cache_of(lambda key, first: key * 1)
    for number in range(3):
        cache.attend(*chunk(device, number), (1, 4, 4))
    expected, state = cache.attend(*chunk(device, 9), (1, 4, 4), keep=False), cache.state_dict()
    if meanwhile == "reset":
        cache.reset()
    elif meanwhile == "more chunks":
        for number in range(3, 6):
            cache.attend(*chunk(device, number), (1, 4, 4))
    for _ in range(2):
        cache.load_state_dict(state)
        assert torch.equal(cache.attend(*chunk(device, 9), (1, 4, 4), keep=False, start=3), expected)
        # A state that was loaded is the caller's again.
        cache.attend(*chunk(device, 3), (1, 4, 4))
    cache.load_state_dict(state)
    overwrite(state)
    assert torch.equal(cache.attend(*chunk(device, 9), (1, 4, 4), keep=False, start=3), expected)


def test_a_rotary_that_writes_over_keys_is_refused():
    cache = cache_of(lambda key, first: key.mul_(2))
    with pytest.raises(ValueError, match="rotary must return keys in new memory, got a function that writes over the keys"):
        cache.attend(*chunk("cpu", 0), (1, 4, 4))
    assert cache.kept == 0


PATTERN = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)


def ragged():
    return dict(q_offsets=torch.tensor([0, 3, 5, 9], dtype=torch.int32), kv_offsets=torch.tensor([0, 2, 6, 7, 12], dtype=torch.int32),
                q_lengths=torch.tensor([3, 1, 4], dtype=torch.int32), max_q_length=4, max_kv_length=5)


def by_block_mask():
    form = BlockLists.from_mask(PATTERN, 16, 16).to_block_mask(48, 64)
    return form, BlockLists.from_block_mask(form)


def by(make, *sources, **more):
    return (sources, more), make(*sources, **(more or dict(q_offsets=16, kv_offsets=16)))


CONVERSIONS = {
    "from_mask": lambda: by(BlockLists.from_mask, PATTERN.clone()),
    "from_topk": lambda: by(BlockLists.from_topk, torch.tensor([[0, 2], [3, 1], [2, 3]], dtype=torch.int32), q_offsets=16, kv_offsets=16,
                            num_kv_blocks=4),
    "from_topk, int64": lambda: by(BlockLists.from_topk, torch.tensor([[0, 2], [3, 1], [2, 3]]), q_offsets=16, kv_offsets=16,
                                   num_kv_blocks=4),
    "from_bsr": lambda: by(BlockLists.from_bsr, torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 0]), q_offsets=16, kv_offsets=16,
                           num_kv_blocks=4),
    "from_block_mask": by_block_mask,
    "clone": lambda: ((of := BlockLists.from_mask(PATTERN, **ragged())), of.clone()),
    "transpose": lambda: ((of := BlockLists.from_mask(PATTERN, **ragged())), of.transpose()),
}


def everything_said(blocks):
    return [blocks.to_mask(), blocks.to_topk(), *blocks.to_bsr(), blocks.density(), *blocks.q_bounds(60), *blocks.kv_bounds(60),
            *tensors_in(blocks.transpose())]


@pytest.mark.parametrize("make", CONVERSIONS.values(), ids=CONVERSIONS)
def test_lists_have_memory_of_their_own_beside_their_other_forms(make):
    form, blocks = make()
    expected = [x.clone() for x in everything_said(blocks)]
    if not isinstance(form, (BlockLists, tuple)):
        form = [form.kv_num_blocks, form.kv_indices, form.full_kv_num_blocks, form.full_kv_indices]
    overwrite(form)
    overwrite(everything_said(blocks))
    if isinstance(blocks.q_offsets, int) and blocks.num_kv_blocks == 4:
        back = blocks.to_block_mask(48, 64)
        overwrite([back.kv_num_blocks, back.kv_indices, back.full_kv_num_blocks, back.full_kv_indices])
    for mine, right in zip(everything_said(blocks), expected, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("uneven", [False, True])
def test_lists_hold_the_callers_tensors_and_follow_them(uneven, device):
    """As the constructor says; no call relies on values that it saw earlier."""
    q, k, v = numbers(device, 3, 1, 2, 9 if uneven else 48, 16).unbind()
    fresh = BlockLists.from_mask(PATTERN[:3, :3], *([ragged()["q_offsets"]] * 2 if uneven else (16, 16)), max_q_length=16,
                                 max_kv_length=16).to(device)
    blocks = BlockLists(fresh.counts, fresh.indices, fresh.q_offsets, fresh.kv_offsets, num_kv_blocks=3, max_q_length=16, max_kv_length=16)
    before = block_sparse_attention(q, k, v, blocks)
    blocks.counts.copy_(torch.tensor([1, 3, 2]))
    blocks.indices.copy_(torch.tensor([[1, 0, 0], [2, 1, 0], [2, 0, 0]]))
    if uneven:
        blocks.q_offsets.copy_(torch.tensor([0, 1, 6, 9]))
    now = block_sparse_attention(q, k, v, blocks)
    assert not torch.equal(now, before)
    assert torch.equal(now, block_sparse_attention(q, k, v, blocks.clone()))


def test_functions_of_the_users_own_keep_what_they_return():
    """They may write to their arguments. Nobody writes to their results."""
    scores, keep = torch.randn(2, 2, 8, 8), torch.rand(2, 2, 8, 8) < 0.4
    before = scores.clone(), keep.clone()

    def scorer(q, k):
        overwrite([q, k])
        return scores

    def budget(found):
        overwrite(found)
        return keep

    config = SSTAConfig(TILE, kernel_thw=(1, 1, 1), sampling_type=scorer, budget=budget)
    expected = ssta_attention(*qkv("cpu"), LAYOUT, config)
    assert torch.equal(ssta_attention(*qkv("cpu"), LAYOUT, config), expected)
    assert torch.equal(scores, before[0]) and torch.equal(keep, before[1])
