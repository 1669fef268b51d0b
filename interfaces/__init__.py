"""Other libraries' names on this library's kernels: a module or package a library, loaded when asked for.

Unless a docstring says otherwise, a wrong argument is a TypeError or a ValueError that names it, the requirement and the value. Functions
are differentiable, give the same bits for the same inputs, never wait for the device, and fit into CUDA graphs and compiled graphs. A row
without keys gives out = 0 and lse = -inf. No call and no plan keeps memory of its arguments. Differences from upstream are listed in
docs/interfaces.md.
"""

from importlib import import_module

from .modules import install, uninstall

_MODULES = {
    "block_sparse_attn": ("block_sparse_attn_func", "block_streaming_attn_func", "pad_input", "token_streaming_attn_func", "unpad_input"),
    "flashinfer": ("BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"),
    "flex_block_attn": ("create_moba_3d_mask", "create_sparse_mask", "create_ssta_3d_mask", "create_sta_3d_mask", "flex_block_attn_func"),
    # Upstream's function is named as another library, so it is taken from the module: ssta.interfaces.magi.block_sparse_attn.
    "magi": ("SparseArgs",),
    "nsa": ("native_sparse_attention", "parallel_nsa", "parallel_nsa_compression", "parallel_nsa_fwd", "parallel_nsa_topk",
            "selected_attention"),
    "seer": ("attn_pooling", "attn_pooling_qk_varlen", "attn_pooling_qkv_varlen", "block_1d_gqa_sparse_attn_varlen_func",
             "block_1d_gqa_sparse_attn_varlen_sim_func", "block_2d_sparse_attn_varlen_func", "block_sparse_flash_decode_gqa_indice",
             "block_sparse_flash_decode_gqa_mask", "block_sparse_flash_decode_leftpad_gqa_indice",
             "block_sparse_flash_decode_leftpad_gqa_mask"),
    "tokens": (),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["install", "uninstall", *sorted([*_MODULES, *_HOME])]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
