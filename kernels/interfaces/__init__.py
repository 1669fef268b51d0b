"""Other libraries' interfaces on these kernels: change the import and keep the code. Each module is imported when it is first asked for."""

import importlib

_MODULES = {
    "seer_attention": (
        "attn_pooling", "attn_pooling_qk_varlen", "block_1d_gqa_sparse_attn_varlen_func", "block_1d_gqa_sparse_attn_varlen_sim_func",
        "block_2d_sparse_attn_varlen_func"),
    "seer_decode": (
        "block_sparse_flash_decode_gqa_indice", "block_sparse_flash_decode_gqa_mask", "block_sparse_flash_decode_leftpad_gqa_indice",
        "block_sparse_flash_decode_leftpad_gqa_mask"),
    "native_sparse_attention": ("parallel_nsa", "selected_attention"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
