"""What the tail's kernels hold at once, counted without a GPU: tensors of no contents, and nothing launched."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssta.kernels.device import device_limits
from ssta.kernels.portable import tail, tail_order, tail_rows, tail_statistics

HEADS, TOKENS, DIM = 16, 113585, 128


class Held(TorchDispatchMode):
    """Follows the bytes of storages that operators make: now and at the peak."""

    def __init__(self, *given):
        super().__init__()
        self.live, self.peak = {}, 0
        self.given = {x.untyped_storage()._cdata for x in given}

    def now(self):
        self.live = {at: (held, size) for at, (held, size) in self.live.items() if not held.expired()}
        return sum(size for _, size in self.live.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.given:
                storage = x.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return result


@pytest.fixture
def nothing_runs(monkeypatch):
    limits = device_limits(torch.device("cpu"))
    # On a GPU nothing but the result.
    monkeypatch.setattr(tail, "_half_variance", lambda queries, keys: queries.new_empty(*queries.shape[:3], keys.shape[2],
                                                                                      dtype=torch.float32))
    for module in (tail_order, tail_rows, tail_statistics):
        monkeypatch.setattr(module, "device_limits", lambda _: limits)
        for name in [name for name in vars(module) if name.startswith("_launch_")]:
            monkeypatch.setattr(module, name, lambda *args: None)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("blocks, longest", [(360, 384), (888, 128), (960, 128)])
def test_a_layer_holds_no_more_than_a_quarter_of_its_tensors(blocks, longest, parts, nothing_runs):
    """Of HunyuanVideo 1.5 at 720p. Of the quarter, one times q's bytes, attention's own lists take up to 0.64 at 960 blocks."""
    q, k, v, out = (torch.empty(1, HEADS, TOKENS, DIM, dtype=torch.bfloat16, device="meta") for _ in range(4))
    lse = torch.empty(1, HEADS, TOKENS, device="meta")
    offsets = torch.empty(blocks + 2, dtype=torch.int32, device="meta")
    counts, indices = (torch.empty(1, HEADS, blocks + 1, *more, dtype=torch.int32, device="meta") for more in ((), (blocks + 1,)))
    bytes_of_q = 2 * q.numel()
    with Held(q, k, v, out, lse, offsets, counts, indices) as held:
        estimates = tail.estimate(q, k, v, offsets, blocks, longest, 0.1, parts)
        assert held.peak <= 2 * bytes_of_q, "out is not there yet"
        assert held.now() <= 0.35 * bytes_of_q, "waits while attention runs"
        held.peak = 0
        tail.combine(out, lse, q, k, v, offsets, blocks, longest, counts, indices, estimates, 0.1, False)
    assert held.peak + 4 * (lse.numel() + indices.numel()) <= bytes_of_q
