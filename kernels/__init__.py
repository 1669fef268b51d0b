"""How it is computed: block-sparse attention over any pattern of blocks; knows blocks, never videos."""

# From the repository's root this folder also answers to `import kernels`, Hugging Face's kernel loader, which transformers and diffusers
# look for. Under that name it stays empty: a second import would register the operators twice.
if __name__ == "ssta.kernels":
    from .attention import IMPLEMENTATIONS, attend_in_place, autocast_inputs, block_sparse_attention, resolve_impl, resolve_scale
    from .blocks import BlockLists
    from .operators import kernels_run
    from .prologue.deferred import Deferred
    from .prologue.reorder import gather_blocks, take_tokens
    from .prologue.select import score_blocks, select_blocks, topk_blocks

    __all__ = ["IMPLEMENTATIONS", "BlockLists", "Deferred", "attend_in_place", "autocast_inputs", "topk_blocks", "block_sparse_attention",
               "gather_blocks", "kernels_run", "select_blocks", "resolve_impl", "resolve_scale", "score_blocks", "take_tokens"]
