"""How it is computed: block-sparse attention over any pattern of blocks; knows blocks, never videos."""

# From the repository's root this folder also answers to `import kernels`, Hugging Face's kernel loader, which transformers and diffusers
# look for. Under that name it stays empty: a second import would register the operators twice.
if __name__ == "ssta.kernels":
    from .attention import IMPLEMENTATIONS, autocast_inputs, block_sparse_attention, resolve_impl, resolve_scale
    from .blocks import BlockLists

    __all__ = ["IMPLEMENTATIONS", "BlockLists", "autocast_inputs", "block_sparse_attention", "resolve_impl", "resolve_scale"]
