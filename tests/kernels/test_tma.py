"""TMA descriptors: dtypes that no kernel takes are refused, and one that a launch knows is of the same memory, shape and tiles."""

import pytest
import torch

triton = pytest.importorskip("triton")

from ssta.kernels.lowering import tma  # noqa: E402


@pytest.mark.parametrize("start, size", [(0, 32), (0, 1), (5, 0), (37, 20), (38, 32), (69, 1), (70, 0)])
def test_a_chunk_has_its_own_tokens_and_no_others(start, size):
    """By the arithmetic that TMA does: inside of all axes an address, outside of one a zero."""
    x, rows = torch.arange(2 * 70 * 3 * 64).to(torch.float16).view(2, 70, 3, 64).transpose(1, 2), 32
    made, far = tma.tma_chunks(x, rows), tma.FAR.value
    for row in range(rows):
        at = (far, 2, tma.batch_tokens(x) + start + size, far - size + row, 0)
        inside = all(0 <= place < length for place, length in zip(at, made.shape))
        # Addresses wrap around.
        address = (made.base.data_ptr() + 2 * sum(place * stride for place, stride in zip(at, made.strides))) % 2**64
        assert inside == (row < size) and (not inside or address == x[1, 2, start + row].data_ptr())


@pytest.mark.parametrize("make", [tma.tma_descriptor, tma.tma_chunks])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype, make):
    with pytest.raises(TypeError, match=f"float16 or bfloat16 tensor here, got {dtype}"):
        make(torch.zeros(1, 1, 64, 64).to(dtype), 64)


def test_what_has_no_whole_number_of_tokens_between_batch_elements_is_copied():
    x = torch.arange(70 * 3 * 2 * 64).to(torch.float16).view(70, 3, 2, 64).permute(2, 1, 0, 3)
    assert tma.batch_tokens(x) is None and tma.batch_tokens(x[:1]) == 0
    made = tma.chunks_ready(x)
    assert tma.batch_tokens(made) == 3 * 70 and torch.equal(made, x) and tma.chunks_ready(made) is made


def test_windows_that_overlap_are_copied():
    """A gradient in their memory order would have another distance between batch elements."""
    x = torch.arange(80 * 64).to(torch.float16).view(80, 64).as_strided((2, 1, 70, 64), (64, 70 * 64, 64, 1))
    made = tma.chunks_ready(x)
    assert tma.batch_tokens(x) is None and torch.equal(made, x) and tma.batch_tokens(torch.empty_like(made)) == 70
