"""Plans and inputs that FlashInfer's tests share."""

import torch

from ssta.kernels.interfaces import BlockSparseAttentionWrapper


def small_plan(**options):
    wrapper = BlockSparseAttentionWrapper(torch.empty(1))
    wrapper.plan(torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1]), 8, 8, 4, 4, 2, 1, 16,
                 **dict(q_data_type="float32", o_data_type="float32") | options)
    return wrapper


def small_inputs(dtype=torch.float32):
    return torch.randn(8, 2, 16, dtype=dtype), *torch.randn(2, 8, 1, 16, dtype=dtype).unbind()
