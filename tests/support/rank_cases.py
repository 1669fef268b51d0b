"""What the processes of test_parallel.py run: every case is a function of (rank, ranks) that asserts, all of them in one spawn."""

from __future__ import annotations

from functools import partial

from rank_families import (
    four,
    gradients,
    histories,
    parallel_first_and_odd,
    sharded,
    sparse_dense_and_removed,
    uneven_heads,
    whole_after,
)
from rank_harness import run_all
from rank_mistakes import (
    another_negative_prompt,
    caches_that_look,
    mistakes,
    more_ranks_than_heads,
    ranks_that_differ,
    rings,
    settings_that_differ,
    shared_patterns,
    without_rope,
)
from rank_settings import cached, compiled, copied, example, masks, order, packed, pipelines, reported, settings
from rank_trained import trained, trained_alike
from tiny_models import SPLIT

__all__ = ["CASES", "run_all"]

# Gradients go the same way back in what one processor attends for.
VARIANTS = {"hunyuan_video_i2v", "wan_ti2v", "wan_animate", "chronoedit", "skyreels_v2", "cogvideox_2b", "cogvideox_1.5", "cosmos_2.5"}
TRAINED = [name for name in SPLIT if not name.startswith(("ltx2", "kandinsky6")) and name not in VARIANTS]
TWO = {
    **{f"{name}: sparse, dense, removed": partial(sparse_dense_and_removed, name) for name in SPLIT},
    **{f"{name}: parallel first, odd": partial(parallel_first_and_odd, name) for name in SPLIT},
    **{f"{name}: gradients": partial(gradients, name) for name in TRAINED},
    **{f"{name}: FSDP": partial(sharded, name) for name in ("wan", "hunyuan_video_15", "minimax_h3")},
    **{f"{name}: {method}": partial(trained, name, method) for name in ("wan", "minimax_h3") for method in ("vsa", "sla")},
    **{case.__name__: case for case in (settings, masks, copied, order, packed, pipelines, cached, compiled, reported, example, mistakes,
                                        trained_alike, caches_that_look, shared_patterns, ranks_that_differ, settings_that_differ,
                                        another_negative_prompt, without_rope)},
}
FOUR = {
    **{f"{name}: 4 heads": partial(four, name)
       for name in ("wan", "hunyuan_video_i2v", "motif_video", "ltx", "ltx2", "cogvideox", "mochi", "kandinsky5", "minimax_h3",
                    "skyreels_v2")},
    **{case.__name__: case for case in (histories, uneven_heads, whole_after, more_ranks_than_heads, rings)},
}
CASES = {2: TWO, 4: FOUR}
