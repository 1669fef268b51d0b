"""TMA descriptors: what is made fast is what Triton makes, and dtypes that no kernel takes are refused."""

import pytest
import torch

triton = pytest.importorskip("triton")

from ssta.kernels.lowering import tma  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_fast_way_gives_what_the_public_way_gives(dtype, monkeypatch):
    x = torch.zeros(2, 70, 3, 64, dtype=dtype).transpose(1, 2)
    assert tma.FIELDS_KNOWN
    fast = tma.tma_descriptor(x, 32)
    monkeypatch.setattr(tma, "FIELDS_KNOWN", False)
    public = tma.tma_descriptor(x, 32)
    assert fast.base is x and public.base is x
    mine, theirs = ({name: value for name, value in vars(made).items() if name != "base"} for made in (fast, public))
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in mine.items()} == theirs


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype, known, monkeypatch):
    monkeypatch.setattr(tma, "FIELDS_KNOWN", known)
    with pytest.raises(TypeError, match=f"float16 or bfloat16 tensor here, got {dtype}"):
        tma.tma_descriptor(torch.zeros(1, 1, 64, 64).to(dtype), 64)
