"""The same kernels under the signatures that users of other libraries already call; one module a library, loaded when first asked for."""

# As in kernels/__init__.py: under its top-level name this folder stays empty.
if __name__ == "ssta.kernels.interfaces":
    from importlib import import_module

    _MODULES = {
        "flex_block_attn": ("create_sparse_mask", "flex_block_attn_func"),
        "magi_attention": ("SparseArgs", "block_sparse_attn"),
        "flashinfer": ("BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"),
    }
    _HOME = {name: module for module, names in _MODULES.items() for name in names}

    __all__ = sorted([*_MODULES, *_HOME])

    def __getattr__(name: str):
        if name in _HOME:
            return getattr(import_module(f".{_HOME[name]}", __name__), name)
        if name in _MODULES:
            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
