"""How it is computed: block-sparse attention over any pattern of blocks; knows blocks, never videos."""

# From the repository's root this folder also answers to `import kernels`, Hugging Face's kernel loader, which transformers and diffusers
# look for. Under that name it stays empty: it is the package only inside another, which is ssta or a copy of it.
if __name__ != "kernels":
    from .attention import attend_again, attend_owned, block_sparse_attention
    from .blocks import BlockLists
    from .checks import autocast_inputs, require_bool, require_int, require_number, require_strided, resolve_scale, without_autocast
    from .kept import Kept
    from .merge import merge_attention
    from .notices import logger, warn_once
    from .op import partial_gradients
    from .operators import kernels_run, watched
    from .prologue.deferred import Deferred, token_rstd
    from .prologue.lengths import valid_lengths
    from .prologue.projection import Projection, RMSNorm
    from .prologue.reorder import gather_blocks, take_tokens
    from .prologue.select import keep_blocks, score_blocks, select_blocks, topk_blocks
    from .prologue.steps import Steps
    from .routing import IMPLEMENTATIONS, PatternFacts, Route, choose_route, require_impl
    from .tail import BlockEstimates, known_share, per_query_head
    from .tail_op import add_tail, estimate_blocks

    __all__ = [
        # attention
        "IMPLEMENTATIONS", "BlockLists", "Kept", "PatternFacts", "Route", "attend_again", "attend_owned", "autocast_inputs",
        "block_sparse_attention", "choose_route", "logger", "merge_attention", "partial_gradients", "require_bool", "require_impl",
        "require_int", "require_number", "require_strided", "resolve_scale", "warn_once", "watched", "without_autocast",
        # what prepares and selects for it
        "Deferred", "Projection", "RMSNorm", "Steps", "gather_blocks", "keep_blocks", "kernels_run", "score_blocks", "select_blocks",
        "take_tokens", "token_rstd", "topk_blocks", "valid_lengths",
        # what stands in for blocks that were not selected
        "BlockEstimates", "add_tail", "estimate_blocks", "known_share", "per_query_head",
    ]
