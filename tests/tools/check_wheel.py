"""Run by the python of an environment that holds only the wheel and torch: the package works without its extras."""

import importlib.util
import sys
from pathlib import Path

import torch

import ssta
import ssta.interfaces
import ssta.kernels

for package in ("ssta", "ssta.kernels", "ssta.interfaces", "ssta.pipelines"):
    origin = Path(importlib.util.find_spec(package).origin)
    assert origin.is_relative_to(sys.prefix), f"{package} comes from {origin}, not from the wheel"
assert importlib.util.find_spec("diffusers") is None, "diffusers is installed here, so this checks nothing"
# A CUDA build of torch depends on triton; elsewhere its absence is what is tested.
assert torch.version.cuda or importlib.util.find_spec("triton") is None, "triton is installed here, so this checks nothing"

thw, text_len = (4, 8, 8), 16
q, k, v = torch.randn(3, 1, 2, 4 * 8 * 8 + text_len, 32).unbind()
out = ssta.ssta_3d_attention(q, k, v, thw, topk=8, tile_thw=(2, 4, 4), text_len=text_len)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5, rtol=1e-4)
mask = ssta.interfaces.create_sparse_mask(q, 68, [(i, j) for i in range(4) for j in range(4)])
out = ssta.interfaces.flex_block_attn_func(q, k, v, 68, 68, mask)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5, rtol=1e-4)
print(f"the wheel works by itself: ssta {ssta.__version__}, torch {torch.__version__}")
