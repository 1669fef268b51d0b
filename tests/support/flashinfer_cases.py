"""Plans and inputs that FlashInfer's tests share."""

import torch

from ssta.interfaces import BlockSparseAttentionWrapper


def small_plan(**options):
    wrapper = BlockSparseAttentionWrapper(torch.empty(1))
    wrapper.plan(torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1]), 8, 8, 4, 4, 2, 1, 16,
                 **dict(q_data_type="float32", o_data_type="float32") | options)
    return wrapper


def small_inputs(dtype=torch.float32):
    return torch.randn(8, 2, 16, dtype=dtype), *torch.randn(2, 8, 1, 16, dtype=dtype).unbind()


def paged(page_size, layout, device="cpu", dtype=torch.float64, **changes):
    """(planned wrapper, q, k and v of 24 entries or more in pages): every row lists five entries, some of them in one page."""
    heads, kv_heads, dim, rows, entries = 4, 2, 64, 6, 24
    q = torch.randn(rows, heads, dim, device=device, dtype=dtype)
    k, v = torch.randn(2, entries // page_size + 1, page_size, kv_heads, dim, device=device, dtype=dtype)
    route = torch.stack([torch.randperm(entries)[:5] for _ in range(rows)]).int().to(device)
    indptr = torch.arange(0, 5 * rows + 1, 5, dtype=torch.int32, device=device)
    if layout == "HND":
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
    arguments = dict(indptr=indptr, indices=route.flatten(), M=rows, N=entries, R=1, C=1, num_qo_heads=heads, num_kv_heads=kv_heads,
                     head_dim=dim, kv_cache_page_size=page_size, q_data_type=dtype, o_data_type=dtype)
    wrapper = BlockSparseAttentionWrapper(torch.empty(1, device=device), kv_layout=layout)
    wrapper.plan(**(arguments | changes))
    return wrapper, q, k, v, route
