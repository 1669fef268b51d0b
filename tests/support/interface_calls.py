"""A small call of every function of every interface, for laws that all of them keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ssta import interfaces
from ssta.interfaces import create_moba_3d_mask, create_ssta_3d_mask, create_sta_3d_mask


class InterfaceCall(NamedTuple):
    """A function of tensors by name, and the makers of these: attention's inputs, and the pattern."""

    call: Callable[..., Any]
    values: dict[str, Callable[[], torch.Tensor]]
    pattern: dict[str, Callable[[], torch.Tensor]]
    differentiable: bool = True

    def inputs(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        values = {name: make().to(device, dtype) for name, make in self.values.items()}
        return values | {name: make().to(device) for name, make in self.pattern.items()}


def random(*shape):
    return lambda: torch.randn(*shape)


def mask(*shape):
    """Every row keeps its first entry."""
    def make():
        kept = torch.rand(*shape) < 0.6
        kept[..., 0] = True
        return kept
    return make


def ints(*values, dtype=torch.int32):
    return lambda: torch.tensor(values, dtype=dtype)


def ids(number, *shape, dtype=torch.int32):
    """Different numbers below ``number`` along the last dimension."""
    return lambda: torch.rand(*shape[:-1], number).argsort(-1)[..., :shape[-1]].to(dtype).contiguous()


def heads_first(q=32, kv=32):
    return dict(q=random(1, 2, q, 16), k=random(1, 1, kv, 16), v=random(1, 1, kv, 16))


def tokens_first(tokens=32, heads=2, kv_heads=1):
    return dict(q=random(tokens, heads, 16), k=random(tokens, kv_heads, 16), v=random(tokens, kv_heads, 16))


def batched(tokens=32):
    return dict(q=random(1, tokens, 2, 16), k=random(1, tokens, 1, 16), v=random(1, tokens, 1, 16))


def cache():
    return dict(q=random(2, 2, 16), k_cache=random(2, 24, 1, 16), v_cache=random(2, 24, 1, 16))


def cuts(*names):
    """Two sequences of 20 and 12 tokens."""
    return {name: ints(0, 20, 32) for name in names}


VIDEO = dict(canvas_thw=(2, 4, 4), tile_thw=(1, 2, 2), kernel_thw=(1, 1, 1))
VIDEO_VALUES = dict(q=random(1, 2, 32, 16), k=random(1, 2, 32, 16))
# Every key is taken below, so that no result is a row of zeros that hides a change.
CALLS = {
    "flex_block_attn_func": InterfaceCall(
        lambda q, k, v, block_mask: interfaces.flex_block_attn_func(q, k, v, 8, 4, block_mask), heads_first(),
        dict(block_mask=mask(2, 4, 8))),
    "create_sparse_mask": InterfaceCall(
        lambda Q, selected_blocks: interfaces.create_sparse_mask(Q, 8, selected_blocks), dict(Q=random(1, 1, 32, 8)),
        dict(selected_blocks=lambda: torch.tensor([[0, 1], [2, 3]])), False),
    "create_sparse_mask of pairs": InterfaceCall(
        lambda Q: interfaces.create_sparse_mask(Q, 8, [(0, 1), (2, 3)]), dict(Q=random(1, 1, 32, 8)), {}, False),
    "create_sta_3d_mask": InterfaceCall(lambda: create_sta_3d_mask(**VIDEO), {}, {}, False),
    "create_sta_3d_mask with text": InterfaceCall(lambda: create_sta_3d_mask(**VIDEO, text_block_num=1), {}, {}, False),
    "create_moba_3d_mask": InterfaceCall(lambda q, k: create_moba_3d_mask(q, k, topk=3, **VIDEO), VIDEO_VALUES, {}, False),
    "create_ssta_3d_mask": InterfaceCall(
        lambda q, k, text_mask: create_ssta_3d_mask(q, k, topk=2, text_block_num=2, text_mask=text_mask, **VIDEO), VIDEO_VALUES,
        dict(text_mask=lambda: torch.arange(8) < 3), False),
    "magi block_sparse_attn": InterfaceCall(
        lambda q, k, v, topk_indices: interfaces.magi.block_sparse_attn(q, k, v, 8, 4, topk_indices), tokens_first(),
        dict(topk_indices=ids(8, 1, 4, 3))),
    "magi block_sparse_attn int64": InterfaceCall(
        lambda q, k, v, topk_indices: interfaces.magi.block_sparse_attn(q, k, v, 8, 16, topk_indices), tokens_first(),
        dict(topk_indices=ids(2, 1, 4, 1, dtype=torch.int64))),
    "block_sparse_attn_func": InterfaceCall(
        lambda q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, base_blockmask: interfaces.block_sparse_attn_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, base_blockmask, 140, 140, 0.0, is_causal=True,
            return_attn_probs=True), tokens_first(160, 3),
        dict(cu_seqlens_q=ints(0, 140, 160), cu_seqlens_k=ints(0, 140, 160), head_mask_type=ints(1, -1, 0),
             streaming_info=ints(1, 1, 1, 1, 1, 1), base_blockmask=mask(2, 1, 2, 2))),
    "token_streaming_attn_func": InterfaceCall(
        lambda q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info: interfaces.token_streaming_attn_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, 140, 140), tokens_first(160),
        dict(cu_seqlens_q=ints(0, 140, 160), cu_seqlens_k=ints(0, 140, 160), head_mask_type=ints(-1, 0),
             streaming_info=ints(4, 30, 4, 30)), False),
    "block_streaming_attn_func": InterfaceCall(
        lambda q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info: interfaces.block_streaming_attn_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, 140, 140, 0.0), tokens_first(160),
        dict(cu_seqlens_q=ints(0, 140, 160), cu_seqlens_k=ints(0, 140, 160), head_mask_type=ints(-1, 0),
             streaming_info=ints(1, 1, 1, 1))),
    "unpad_input": InterfaceCall(
        lambda hidden_states, attention_mask: interfaces.unpad_input(hidden_states, attention_mask), dict(hidden_states=random(2, 5, 3)),
        dict(attention_mask=mask(2, 5))),
    "pad_input": InterfaceCall(lambda hidden_states, indices: interfaces.pad_input(hidden_states, indices, 2, 5),
                               dict(hidden_states=random(4, 3)), dict(indices=ids(10, 4, dtype=torch.int64))),
    "selected_attention": InterfaceCall(
        lambda q, k, v, block_indices, block_counts, cu_seqlens: interfaces.selected_attention(
            q, k, v, block_indices, block_counts, 4, cu_seqlens=cu_seqlens, return_lse=True), batched(),
        dict(block_indices=ids(8, 1, 32, 1, 4), block_counts=lambda: torch.randint(1, 5, (1, 32, 1)), **cuts("cu_seqlens"))),
    "parallel_nsa": InterfaceCall(
        lambda q, k, v, g_cmp, g_slc, g_swa, block_counts: interfaces.parallel_nsa(
            q, k, v, g_cmp, g_slc, g_swa, block_counts=block_counts, block_size=4, window_size=5),
        batched() | {name: random(1, 32, 2) for name in ("g_cmp", "g_slc", "g_swa")},
        dict(block_counts=lambda: torch.randint(1, 5, (1, 32, 1)))),
    "parallel_nsa_fwd": InterfaceCall(
        lambda q, k, v, block_indices, cu_seqlens_q, cu_seqlens_k: interfaces.parallel_nsa_fwd(
            q, k, v, block_indices, None, 4, None, cu_seqlens_q, cu_seqlens_k), batched(),
        dict(block_indices=ids(8, 1, 32, 1, 4), **cuts("cu_seqlens_q", "cu_seqlens_k"))),
    "parallel_nsa_compression": InterfaceCall(
        lambda q, k, v: interfaces.parallel_nsa_compression(q, k, v, 32, 4),
        batched() | dict(k=random(1, 8, 1, 16), v=random(1, 8, 1, 16)), {}),
    "parallel_nsa_topk": InterfaceCall(
        lambda q, k, block_counts: interfaces.parallel_nsa_topk(q, k, 32, None, block_counts, 4),
        dict(q=random(1, 32, 2, 16), k=random(1, 8, 1, 16)), dict(block_counts=lambda: torch.randint(1, 5, (1, 32, 1))), False),
    "native_sparse_attention": InterfaceCall(
        lambda q, k, v, block_indices: interfaces.native_sparse_attention(
            1, 2, 32, 16, True, None, 4, 2, 4)(q, k, v, block_indices), batched(), dict(block_indices=ids(8, 1, 32, 1, 4))),
    "block_1d_gqa_sparse_attn_varlen_func": InterfaceCall(
        lambda q, k, v, cu_seqlens_k, cu_seqlens_q, block_mask: interfaces.block_1d_gqa_sparse_attn_varlen_func(
            q, k, v, cu_seqlens_k, cu_seqlens_q, 20, 0.3, block_mask, 4), tokens_first(),
        dict(**cuts("cu_seqlens_k", "cu_seqlens_q"), block_mask=mask(2, 1, 20, 5))),
    "block_2d_sparse_attn_varlen_func": InterfaceCall(
        lambda q, k, v, cu_seqlens_k, cu_seqlens_q, block_mask: interfaces.block_2d_sparse_attn_varlen_func(
            q, k, v, cu_seqlens_k, cu_seqlens_q, 20, 0.3, block_mask, 4), tokens_first(),
        dict(**cuts("cu_seqlens_k", "cu_seqlens_q"), block_mask=mask(2, 1, 5, 5))),
    "attn_pooling": InterfaceCall(lambda q, k, cu_seqlens: interfaces.attn_pooling(q, k, cu_seqlens, 20, 0.3, 4),
                                  dict(q=random(32, 2, 16), k=random(32, 1, 16)), cuts("cu_seqlens"), False),
    "attn_pooling_qkv_varlen": InterfaceCall(
        lambda q, k, v, cu_seqlens: interfaces.attn_pooling_qkv_varlen(q, k, v, cu_seqlens, 20, 0.3, 4), tokens_first(),
        cuts("cu_seqlens")),
    "decode_gqa_indice": InterfaceCall(
        lambda cache_seqlens, block_indices, **tensors: interfaces.block_sparse_flash_decode_gqa_indice(
            **tensors, cache_seqlens=cache_seqlens, max_cache_seqlen=24, max_selected_blocks=3, block_indices=block_indices, block_size=4),
        cache(), dict(cache_seqlens=ints(24, 9), block_indices=ids(6, 2, 1, 3)), False),
    "decode_gqa_mask": InterfaceCall(
        lambda cache_seqlens, block_mask, **tensors: interfaces.block_sparse_flash_decode_gqa_mask(
            **tensors, cache_seqlens=cache_seqlens, max_cache_seqlen=24, block_mask=block_mask, block_size=4),
        cache(), dict(cache_seqlens=ints(24, 9), block_mask=mask(2, 1, 6)), False),
    "decode_leftpad_gqa_indice": InterfaceCall(
        lambda cache_seqlens, block_indices, **tensors: interfaces.block_sparse_flash_decode_leftpad_gqa_indice(
            **tensors, cache_seqlens=cache_seqlens, block_indices=block_indices, block_size=4),
        cache(), dict(cache_seqlens=ints(24, 9), block_indices=ids(6, 2, 1, 3)), False),
    "decode_leftpad_gqa_mask": InterfaceCall(
        lambda cache_seqlens, block_mask, **tensors: interfaces.block_sparse_flash_decode_leftpad_gqa_mask(
            **tensors, cache_seqlens=cache_seqlens, block_mask=block_mask, block_size=4, first_block_unmasked=True),
        cache(), dict(cache_seqlens=ints(24, 9), block_mask=mask(2, 1, 6)), False),
    "convert_bsr_mask_layout": InterfaceCall(
        lambda values, indptr: interfaces.convert_bsr_mask_layout(values, indptr), dict(values=random(3, 2, 2)),
        dict(indptr=ints(0, 1, 3)), False),
}


class WrapperCase(NamedTuple):
    """A plan of one of FlashInfer's wrappers: its buffers by name, and the shapes of q, k and v that then run."""

    wrapper: str
    buffers: dict[str, Callable[[], torch.Tensor]]
    options: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...] = ((8, 2, 16), (8, 1, 16), (8, 1, 16))

    def plan(self, buffers: dict[str, torch.Tensor], workspace: torch.Tensor, dtype: torch.dtype = torch.float32):
        wrapper = getattr(interfaces, self.wrapper)(workspace)
        dtypes = {} if "block_size" in self.options else dict(q_data_type=dtype)
        if self.wrapper == "BlockSparseAttentionWrapper" and dtypes:
            dtypes |= dict(o_data_type=dtype)
        wrapper.plan(**buffers, **self.options, num_qo_heads=2, num_kv_heads=1, head_dim=16, **dtypes)
        return wrapper


_BSR = dict(indptr=ints(0, 1, 3), indices=ints(1, 0, 1))
_SIZES = dict(M=8, N=8, R=4, C=4)
_LOOSE = ((1, 8, 2, 16), (1, 8, 1, 16), (1, 8, 1, 16))
WRAPPERS = {
    "lists": WrapperCase("BlockSparseAttentionWrapper", _BSR, _SIZES),
    "lists of 64 bits": WrapperCase("BlockSparseAttentionWrapper", {name: lambda make=make: make().long() for name, make in _BSR.items()},
                                    _SIZES),
    "causal lists": WrapperCase("BlockSparseAttentionWrapper", _BSR, _SIZES | dict(causal=True)),
    "mask": WrapperCase("BlockSparseAttentionWrapper", _BSR | dict(mask=mask(3, 4, 4)), _SIZES),
    "packed mask": WrapperCase("BlockSparseAttentionWrapper", _BSR | dict(
        packed_mask=lambda: torch.randint(1, 255, (6,), dtype=torch.uint8)), _SIZES),
    "block mask": WrapperCase("BlockSparseAttentionWrapper", dict(block_mask=mask(1, 2, 2)), _SIZES | dict(indptr=None, indices=None)),
    "causal block mask": WrapperCase("BlockSparseAttentionWrapper", dict(block_mask=mask(1, 2, 2)),
                                     _SIZES | dict(indptr=None, indices=None, causal=True)),
    "pages": WrapperCase("BlockSparseAttentionWrapper", dict(indptr=ints(0, 2, 5), indices=ints(1, 7, 0, 3, 4)),
                         dict(M=2, N=8, R=1, C=1, kv_cache_page_size=4), ((2, 2, 16), (2, 4, 1, 16), (2, 4, 1, 16))),
    "loose": WrapperCase("BlockSparseAttentionWrapper", dict(
        indptr=random(*_LOOSE[0]), indices=random(*_LOOSE[1]), M=random(*_LOOSE[2]), N=mask(1, 2, 2)), dict(block_size=4), _LOOSE),
    "blocks of any sizes": WrapperCase("VariableBlockSparseAttentionWrapper", dict(
        block_mask_map=mask(1, 2, 2), block_row_sz=ints([3, 5]), block_col_sz=ints([6, 2])), {}, ((2, 8, 16), (1, 8, 16), (1, 8, 16))),
    "causal blocks of any sizes": WrapperCase("VariableBlockSparseAttentionWrapper", dict(
        block_mask_map=mask(1, 2, 2), block_row_sz=ints([3, 5]), block_col_sz=ints([6, 2])), dict(causal=True),
        ((2, 8, 16), (1, 8, 16), (1, 8, 16))),
}


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples and lists."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [x for part in result for x in tensors_of(part)] if isinstance(result, (tuple, list)) else []


def overwrite(x: torch.Tensor) -> None:
    """Other values in the same memory: a bool turned round, an integer of 0, a float of NaN."""
    with torch.no_grad():
        x.copy_(~x) if x.dtype == torch.bool else x.fill_(float("nan") if x.is_floating_point() else 0)
