"""What every call on a GPU must keep, whatever it computes."""

import torch
from uninitialised import poison_free_memory


def assert_never_waits_and_fits_a_cuda_graph(step):
    """``step() -> tensors`` gives the same bits eagerly, where any wait for the device raises, and replayed from a CUDA graph."""
    stream = torch.cuda.Stream()
    # The inputs may still be in the making.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        poison_free_memory()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    poison_free_memory()
    graph.replay()
    assert len(captured) == len(eager)
    for a, b in zip(captured, eager):
        assert torch.equal(a, b)
