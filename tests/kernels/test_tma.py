"""TMA descriptors: what is made fast is what Triton makes, and dtypes that no kernel takes are refused."""

import pytest
import torch

triton = pytest.importorskip("triton")

from ssta.kernels.lowering import tma  # noqa: E402


@pytest.mark.parametrize("make", [tma.tma_descriptor, tma.tma_chunks])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_fast_way_gives_what_the_public_way_gives(dtype, make, monkeypatch):
    x = torch.zeros(2, 70, 3, 64, dtype=dtype).transpose(1, 2)
    assert tma.FIELDS_KNOWN
    fast = make(x, 32)
    monkeypatch.setattr(tma, "FIELDS_KNOWN", False)
    public = make(x, 32)
    assert fast.base.data_ptr() == public.base.data_ptr() and getattr(fast.base, "tensor", fast.base) is x
    mine, theirs = ({name: value for name, value in vars(made).items() if name != "base"} for made in (fast, public))
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in mine.items()} == theirs


@pytest.mark.parametrize("start, size", [(0, 32), (0, 1), (5, 0), (37, 20), (38, 32), (69, 1), (70, 0)])
def test_a_chunk_has_its_own_tokens_and_no_others(start, size):
    """By the arithmetic that TMA does: inside of all axes an address, outside of one a zero."""
    x, rows = torch.arange(2 * 70 * 3 * 64).to(torch.float16).view(2, 70, 3, 64).transpose(1, 2), 32
    made = tma.tma_chunks(x, rows)
    for row in range(rows):
        at = (1, 2, start + size, rows - size + row, 0)
        inside = all(0 <= place < length for place, length in zip(at, made.shape))
        address = made.base.data_ptr() + 2 * sum(place * stride for place, stride in zip(at, made.strides))
        assert inside == (row < size) and (not inside or address == x[1, 2, start + row].data_ptr())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("make", [tma.tma_descriptor, tma.tma_chunks])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype, make, known, monkeypatch):
    monkeypatch.setattr(tma, "FIELDS_KNOWN", known)
    with pytest.raises(TypeError, match=f"float16 or bfloat16 tensor here, got {dtype}"):
        make(torch.zeros(1, 1, 64, 64).to(dtype), 64)
