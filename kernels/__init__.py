"""How it is computed: block-sparse attention over any pattern of blocks; knows blocks, never videos."""

# From the repository's root this folder also answers to `import kernels`, Hugging Face's kernel loader, which transformers and diffusers
# look for. Under that name it stays empty: it is the package only inside another, which is ssta or a copy of it.
if __name__ != "kernels":
    from . import cudnn as cudnn  # isort: skip; registers its row before anything reads the table of routes
    from .attention import block_sparse_attention
    from .backend import Backend, choose_backend, take_tokens
    from .blocks import BlockLists
    from .merge import merge_attention
    from .prologue.projection import Deferred, Projection, RMSNorm
    from .routing import PatternFacts, Route, choose_route

    __all__ = ["Backend", "BlockLists", "Deferred", "PatternFacts", "Projection", "RMSNorm", "Route", "block_sparse_attention",
               "choose_backend", "choose_route", "merge_attention", "take_tokens"]
