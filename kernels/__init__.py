"""How it is computed: block-sparse attention over any pattern of blocks; knows blocks, never videos."""

# From the repository's root this folder also answers to `import kernels`, Hugging Face's kernel loader, which transformers and diffusers
# look for. Under that name it stays empty: a second import would register the operators twice.
if __name__ == "ssta.kernels":
    from .attention import attend_owned, block_sparse_attention
    from .blocks import BlockLists
    from .checks import autocast_inputs, require_strided, resolve_scale, without_autocast
    from .notices import logger, warn_once
    from .operators import kernels_run
    from .prologue.deferred import Unfinished
    from .prologue.reorder import gather_blocks, take_tokens
    from .prologue.select import best_blocks, pick_blocks, score_blocks
    from .routing import IMPLEMENTATIONS, PatternFacts, Route, choose_route, require_impl

    __all__ = [
        "IMPLEMENTATIONS", "BlockLists", "PatternFacts", "Route", "Unfinished", "attend_owned", "autocast_inputs", "best_blocks",
        "block_sparse_attention", "choose_route", "gather_blocks", "kernels_run", "logger", "pick_blocks", "require_impl",
        "require_strided", "resolve_scale", "score_blocks", "take_tokens", "warn_once", "without_autocast",
    ]
