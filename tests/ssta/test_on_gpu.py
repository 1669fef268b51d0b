"""The whole layer on a GPU: over its selection with gradients, captured, compiled, without waiting, and in how much memory."""

from math import prod

import pytest
import torch
from selection_cases import PADDINGS

from ssta import SSTAConfig, TokenLayout, ssta_3d_attention, ssta_attention, tile_layout
from ssta.kernels import block_sparse_attention


@pytest.mark.gpu
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("budget", [
    dict(sparse_type="sta"), dict(sparse_type="block_attn", topk=9, threshold=0.5), dict(topk=9, threshold=0.5), dict(density=0.7),
    dict(sparse_type="block_attn", density=0.7)], ids=str)
def test_never_waits_for_the_gpu_and_can_be_captured(budget, padding):
    inputs = [torch.randn(2, 2, 7 * 9 * 20 + 30, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    text_mask = torch.arange(30, device="cuda") < torch.tensor([[4], [30]], device="cuda")
    config = SSTAConfig(tile_thw=(4, 4, 4), pad_type=padding, **budget)

    def step():
        out = ssta_attention(*inputs, TokenLayout.video_text((7, 9, 20), 30), config, text_mask=text_mask)
        return out, *torch.autograd.grad(out.float().square().sum(), inputs)

    # All on a side stream: a backward on the default stream would tie the inputs to it, which a capture refuses.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step()  # Kernels compile here.
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    assert all(torch.equal(a, b) for a, b in zip(again, expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in inputs:
            x.copy_(torch.randn_like(x))
    graph.replay()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fresh = step()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, fresh))


@pytest.mark.gpu
@pytest.mark.parametrize("compensation", ["none", "linear"])
@torch.no_grad()
def test_plans_are_followed_without_waiting_on_any_stream_and_captures_do_without(compensation):
    layout, config = TokenLayout.video_text((7, 9, 20), 30), SSTAConfig(tile_thw=(4, 4, 4), topk=9, compensation=compensation)
    text_mask = torch.arange(30, device="cuda") < torch.tensor([[4], [30]], device="cuda")
    inputs = [torch.randn(3, 2, 2, layout.length, 64, device="cuda", dtype=torch.bfloat16).unbind() for _ in range(3)]
    # Nothing is followed with gradients, which do not change the result.
    expected = []
    for qkv in inputs:
        with torch.enable_grad():
            expected.append(ssta_attention(*[x.clone().requires_grad_() for x in qkv], layout, config, text_mask=text_mask))
    ssta_attention(*inputs[0], layout, config, text_mask=text_mask)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ssta_attention(*inputs[0], layout, config, text_mask=text_mask)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = [ssta_attention(*qkv, layout, config, text_mask=text_mask) for qkv in inputs]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    held = [x.clone() for x in inputs[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ssta_attention(*held, layout, config, text_mask=text_mask)
    for qkv, out in zip(inputs, expected):
        for x, new in zip(held, qkv):
            x.copy_(new)
        graph.replay()
        assert torch.equal(captured, out)


@pytest.mark.gpu
def test_a_training_of_thousands_of_passes_has_the_same_bits():
    """What goes wrong once in thousands of launches, where others use the GPU too, no single call shows."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 4 * 24 * 40, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout, first = torch.randn_like(q), None
    for step in range(4000):
        out = ssta_3d_attention(q, k, v, (4, 24, 40), tile_thw=(4, 4, 8), density=0.3, compensation="linear")
        found = torch.autograd.grad(out, (q, k, v), dout)
        first = first or found
        if step % 100 == 0:
            assert all(map(torch.equal, found, first))


@pytest.mark.gpu
def test_the_first_call_on_a_gpu_makes_its_layout_without_waiting():
    q, k, v = torch.randn(3, 1, 2, 5 * 9 * 11 + 7, 64, device="cuda", dtype=torch.bfloat16).unbind()
    ssta_3d_attention(q, k, v, (5, 9, 11), topk=3, tile_thw=(4, 4, 4), text_len=7)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for padding in PADDINGS:
            ssta_3d_attention(q, k, v, (5, 11, 9), topk=3, tile_thw=(4, 4, 4), text_len=7, pad_type=padding)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_another_density_neither_waits_nor_compiles():
    from ssta.kernels.prologue import select_kernel

    q, k, v = torch.randn(3, 1, 2, 5 * 9 * 11 + 7, 64, device="cuda", dtype=torch.bfloat16).unbind()
    layout = TokenLayout.video_text((5, 9, 11), 7)

    def compiled():
        """What Triton has compiled of the kernel, by device."""
        return [len(kernels) for kernels, *_ in select_kernel._select_kernel.device_caches.values()]

    def run(density):
        config = SSTAConfig(tile_thw=(4, 4, 4), kernel_thw=(1, 1, 1), density=density)
        return ssta_attention(q, k, v, layout, config, return_blocks=True)[1]

    run(0.5)
    before = compiled()
    assert before
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = {density: run(density) for density in (0.25, 0.3, 0.8, 1.0)}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled() == before
    for density, blocks in found.items():
        # 18 video tiles and 1 of text.
        assert abs(float(blocks.to_mask()[..., :-1, :-1].double().mean()) / density - 1) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("padding, sparse_type, threshold", [("none", "ssta", 0.0), ("zero", "ssta", 0.0), ("repeat", "block_attn", 0.5),
                                                             ("zero", "sta", 0.0)])
def test_compiles_to_one_graph_on_a_gpu(padding, sparse_type, threshold):
    torch._dynamo.reset()
    inputs = [torch.randn(2, 2, 4 * 9 * 20 + 70, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    arguments = dict(topk=9, tile_thw=(4, 4, 4), kernel_thw=(1, 1, 3), text_len=70, sparse_type=sparse_type, pad_type=padding,
                     threshold=threshold, text_mask=torch.arange(70, device="cuda") < torch.tensor([[4], [70]], device="cuda"))
    out = torch.compile(ssta_3d_attention, fullgraph=True)(*inputs, (4, 9, 20), **arguments)
    expected = ssta_3d_attention(*inputs, (4, 9, 20), **arguments)
    torch.testing.assert_close(out, expected)
    for got, wanted in zip(torch.autograd.grad(out.square().sum(), inputs), torch.autograd.grad(expected.square().sum(), inputs)):
        torch.testing.assert_close(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("by_token", [True, False])
def test_a_gpu_attends_over_its_selection_with_its_gradients(padding, by_token):
    """Through the kernels in half precision, and in plain torch in float64 over the same selection."""
    sizes = [(2, 7 * 9 * 20 + 30, heads, 64) for heads in (4, 2, 2)]
    halves = [torch.randn(*size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for size in sizes]
    halves = [(x if by_token else x.contiguous()).requires_grad_() for x in halves]
    text_mask = torch.arange(30, device="cuda") < torch.tensor([[4], [30]], device="cuda")
    config = SSTAConfig(tile_thw=(4, 4, 4), topk=9, sampling_type="importance", pad_type=padding)
    layout = TokenLayout.video_text((7, 9, 20), 30)
    out, blocks = ssta_attention(*halves, layout, config, text_mask=text_mask, return_blocks=True)
    wide = [x.detach().double().requires_grad_() for x in halves]
    tiles = tile_layout(layout, config.tile_thw, padding, "cuda")
    exact = tiles.untile(block_sparse_attention(*map(tiles.tile, wide), blocks, impl="reference"))
    weight = torch.randn_like(out)
    grads = torch.autograd.grad(out, halves, weight)
    exact_grads = torch.autograd.grad(exact, wide, weight.double())
    assert out.stride() == halves[0].stride() and all(grad.stride() == x.stride() for grad, x in zip(grads, halves))
    for got, wanted in zip((out, *grads), (exact, *exact_grads)):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("padding, thw, bound", [("none", (31, 45, 80), 0.82), ("zero", (31, 45, 80), 0.97), ("zero", (31, 30, 53), 1.0)])
def test_memory_on_top_of_the_inputs(padding, thw, bound):
    """In bytes of q, k, v and out: the three tiled copies, in the place of one of which the result comes."""
    heads, text_len = 16, 1985
    q, k, v = (torch.randn(1, prod(thw) + text_len, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    arguments = dict(thw=thw, topk=2, kernel_thw=(1, 1, 3), text_len=text_len, sampling_type="importance", pad_type=padding)
    out = ssta_3d_attention(q, k, v, **arguments)
    assert out.stride() == q.stride()
    del out
    torch.cuda.synchronize()
    # What is asked for: the allocator rounds pieces of this size up to 2 MiB, or not, as it has cut them before.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    ssta_3d_attention(q, k, v, **arguments)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert peak <= bound * 4 * q.numel() * q.element_size(), f"{peak / (4 * q.numel() * q.element_size()):.3f}"


@pytest.mark.gpu
@pytest.mark.parametrize("padding", PADDINGS)
def test_the_result_in_the_place_of_tiled_q_has_the_same_bits(padding):
    """With a gradient the result has memory of its own, without one it takes q's, beside rows of text that nobody computes."""
    thw, text_len, valid = (7, 21, 30), 800, [3, 515]
    q, k, v = (torch.randn(2, 7 * 21 * 30 + text_len, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
               for heads in (4, 2, 2))
    text_mask = torch.arange(text_len, device="cuda") < torch.tensor(valid, device="cuda")[:, None]
    before = q.clone()
    arguments = dict(thw=thw, topk=6, text_len=text_len, text_mask=text_mask, pad_type=padding)
    with torch.no_grad():
        out = ssta_3d_attention(q, k, v, **arguments)
    assert torch.equal(q, before)
    assert torch.equal(out, ssta_3d_attention(q.requires_grad_(), k, v, **arguments))
