"""The package: its releases, and what its block-sparse attention can do."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from ..device import asked_once

PACKAGE = "nvidia-cudnn-frontend"
# The releases whose interface was read and whose results were looked at. It calls itself experimental, and each release may move something.
CHECKED = ("1.32.0",)
# Tokens of its blocks.
SLOTS = (64, 128)
# The extra "blackwell" in pyproject.toml installs this.
INSTALL = "pip install 'nvidia-cudnn-frontend[cutedsl]==1.32.*'"


class Kernels(NamedTuple):
    """What the package has for a GPU and blocks of one length."""

    head_dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    grouped: bool                     # several query heads to a key head
    backward_dims: tuple[int, ...]    # head_dims of the backward, which is for bfloat16 and heads of their own keys


_BOTH, _BF16 = (torch.float16, torch.bfloat16), (torch.bfloat16,)
_HOPPER, _CONSUMER = Kernels((64, 96, 128), _BOTH, True, (128,)), Kernels((128,), _BOTH, True, ())
_BLACKWELL = {128: Kernels((64, 96, 128), _BOTH, True, (64, 128)), 64: Kernels((128,), _BF16, False, (128,))}
# By compute capability and tokens of a block, as cudnn/block_sparse_attention/api.py of nvidia-cudnn-frontend 1.32.0 says it. On
# sm_110 the backward for 128 takes no sizes of blocks.
KERNELS = {(9, 0): {128: _HOPPER, 64: _HOPPER}, (10, 0): _BLACKWELL, (10, 3): _BLACKWELL,
           (11, 0): _BLACKWELL | {128: _BLACKWELL[128]._replace(backward_dims=())}, (12, 0): {128: _CONSUMER, 64: _CONSUMER}}


@asked_once
def installed(package: str) -> str | None:
    """The version of what is installed, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def slot_of(max_q_length: int, max_kv_length: int) -> int:
    """Tokens of the slots that blocks of up to so many tokens stand in."""
    return SLOTS[0] if max(max_q_length, max_kv_length) <= SLOTS[0] else SLOTS[1]
