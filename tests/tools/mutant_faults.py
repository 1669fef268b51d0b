"""The faults that mutants.py plants: what is wrong, a text that its file holds once, what is put there, and who must see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One deliberate fault.

    Attributes:
        name: what is wrong.
        file: from the repository's root.
        old: a text that ``file`` holds exactly once.
        new: what replaces it.
        tests: pytest's names of files or functions of which at least one must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


LAWS = "tests/kernels/test_laws.py"
AGAINST_FLOAT64 = (f"{LAWS}::test_against_float64",)
PARTS = "tests/kernels/test_hopper_emulated.py::test_parts_of_lists_are_merged"
COMPILED = ("tests/kernels/test_compile.py::test_kernels_of_a_card_compile_well",)
# A quality that users would see: other tests see these faults too, but the gate has to by itself.
GATE = ("tests/benchmark/test_gate.py::test_the_toy_s_decibels",)

FAULTS = (
    # Attention to the blocks that are listed
    Fault("portable: the scale of one head", "kernels/portable/forward.py",
          "    kv_head = head // group\n",
          "    kv_head = head // group\n    scale_log2 *= tl.where(head == heads - 1, 1.02, 1.0)\n", AGAINST_FLOAT64),
    Fault("portable: query heads share the wrong key head", "kernels/portable/forward.py",
          "    kv_head = head // group\n", "    kv_head = head % (heads // group)\n", AGAINST_FLOAT64),
    Fault("portable: what was summed is not rescaled when the largest score grows", "kernels/portable/forward.py",
          "        acc = acc * alpha[:, None]\n", "", AGAINST_FLOAT64),
    Fault("portable: the last full chunk is left out", "kernels/portable/forward.py",
          "    for i in range(n_full):\n", "    for i in range(tl.maximum(n_full - 1, tl.minimum(n_full, 1))):\n", AGAINST_FLOAT64),
    Fault("portable: a key more than a partial chunk has", "kernels/lowering/primitives.py",
          "    visible = (keys < size) &", "    visible = (keys <= size) &", AGAINST_FLOAT64),
    Fault("portable: causal order one key late", "kernels/lowering/primitives.py",
          "query + tl.arange(0, M)[:, None] + shift)\n", "query + tl.arange(0, M)[:, None] + shift + 1)\n", AGAINST_FLOAT64),
    Fault("portable: lse off by 0.005", "kernels/lowering/primitives.py",
          "(row_max + tl.log2(divisor)) * LN2)\n", "(row_max + tl.log2(divisor)) * LN2 + 0.005)\n", AGAINST_FLOAT64),
    Fault("portable: an optimistic row that overflowed is not done again", "kernels/portable/forward.py",
          "        if some:\n", "        if some and rows < 0:\n",
          ("tests/kernels/test_numerics.py::test_scores_far_above_those_of_the_first_chunk",)),
    Fault("torch: query heads share the wrong key head", "kernels/eager/steps.py",
          "sequence // (heads // kv_heads) * kv_len", "sequence % kv_heads * kv_len", AGAINST_FLOAT64),
    Fault("torch: lists leave out the first block", "kernels/eager/steps.py",
          "    listed = in_range(", "    listed = (indices > 0) & in_range(", AGAINST_FLOAT64),

    # Its gradients
    Fault("Hopper: keys beyond a tile's end are measured", "kernels/hopper/backward_partitions.py",
          "select_keys(work.selector, group, tile_field(work, tile, ROWS) - group * KEYS)", "select_keys(work.selector, group, KEYS)",
          ("tests/kernels/test_hopper_emulated.py::test_gradients_of_blocks_that_end_within_a_chunk",)),
    Fault("Hopper: a chunk's rows go on beyond its block", "kernels/hopper/backward_partitions.py",
          "size = gl.minimum(at.size - at.chunk * QUERIES, QUERIES)", "size = gl.minimum(lists.q_len - start, QUERIES)",
          ("tests/kernels/test_hopper_emulated.py::test_gradients_of_blocks_that_end_within_a_chunk",)),
    Fault("portable: dK without delta", "kernels/portable/backward.py",
          "    dscores = weights * (dweights - row_delta[None, :])\n", "    dscores = weights * dweights\n", AGAINST_FLOAT64),
    Fault("portable: dQ without the gradient that arrives through lse", "kernels/portable/backward.py",
          '        row_delta -= tl.where(row_lse == float("-inf"), 0.0, row_dlse)\n', "", AGAINST_FLOAT64),
    Fault("portable: dK and dV without the last query head of a group", "kernels/portable/backward.py",
          "    for head in range(kv_head * group, kv_head * group + group):\n",
          "    for head in range(kv_head * group, kv_head * group + tl.maximum(group - 1, 1)):\n", AGAINST_FLOAT64),
    Fault("torch: dK without delta", "kernels/eager/blocks.py",
          ".sub_(step.of_queries(delta)[..., None])", "", AGAINST_FLOAT64),
    Fault("torch: dV without a block's last query", "kernels/eager/blocks.py",
          "        step.add_to_keys(dv, weights.mT @ step_dout)\n",
          "        step.add_to_keys(dv, weights[..., :-1, :].mT @ step_dout[..., :-1, :])\n", AGAINST_FLOAT64),
    Fault("a gradient's gradient is 0", "kernels/operators.py", "[None if x is None else x + tie for x in found]", "found",
          ("tests/ssta/test_derivatives.py::test_a_second_derivative_raises",)),

    # Merging parts
    Fault("hopper: lse of merged parts", "kernels/lowering/primitives.py",
          "lse_max + tl.log(divisor))\n", "lse_max + tl.log(divisor) * 0.99)\n", (PARTS,)),
    Fault("hopper: a part of a merge counts twice", "kernels/hopper/forward_merge.py",
          "        row_sum += weights\n", "        row_sum += weights * (1 + (part == 0))\n", (PARTS,)),
    Fault("torch: a merge measures from the first part", "kernels/merge.py",
          "    lse_max = every.detach().amax(0)\n", "    lse_max = every.detach()[0] + 1e-3\n", ("tests/kernels/test_merge.py",)),

    # The estimate: what stands in for blocks that no list names
    Fault("portable: the mixture without damping", "kernels/portable/estimate_rows.py",
          "        share *= tl.sqrt(tl.minimum(CAP / tl.maximum(h, 1e-6), 1.0))\n", "",
          ("tests/kernels/test_estimate.py", "tests/kernels/test_estimate_backward.py")),
    Fault("portable: h without its cap in a unit's bias", "kernels/portable/estimate_rows.py",
          "        value += tl.minimum(h, CAP)\n", "        value += h\n", ("tests/kernels/test_estimate.py",)),
    Fault("portable: the estimate's lse off by 0.005", "kernels/portable/estimate_rows.py",
          "    acc, row_estimate = finish_softmax(acc, row_max, row_sum)\n",
          "    acc, row_estimate = finish_softmax(acc, row_max, row_sum)\n    row_estimate += 0.005\n",
          ("tests/kernels/test_estimate.py",)),
    Fault("portable: one block's mass off by 2 %", "kernels/portable/estimate_rows.py",
          "    share = 1.0 / tl.minimum(tl.maximum(sizes, 1), SAMPLE).to(tl.float32)\n",
          "    share = tl.where(block == 1, 1.02, 1.0) / tl.minimum(tl.maximum(sizes, 1), SAMPLE).to(tl.float32)\n",
          ("tests/kernels/test_estimate_mass.py",)),
    Fault("portable: the merged lse is the larger one", "kernels/portable/estimate_rows.py",
          "    tl.store(lse + at * tokens + row + lines, total, mask=written)\n",
          "    tl.store(lse + at * tokens + row + lines, larger, mask=written)\n", ("tests/kernels/test_estimate.py",)),
    Fault("Hopper: the estimate's biases lose their last bits", "kernels/hopper/estimate_merge.py",
          "gl.where(columns < 3, parts, 0.0)", "gl.where(columns < 2, parts, 0.0)",
          ("tests/kernels/test_hopper_estimate.py::test_emulated_ragged_blocks",)),
    Fault("Hopper: the merged share of the estimate grows by 0.5 %", "kernels/hopper/estimate_merge.py",
          "(estimated / whole * factor)[:, None]", "(1.005 * estimated / whole * factor)[:, None]",
          ("tests/kernels/test_hopper_estimate.py::test_emulated_ragged_blocks",)),
    Fault("portable: dq of the estimate takes 1 % more through the matrix", "kernels/portable/estimate_backward.py",
          "    c += scale * tl.sum(acc", "    c += 1.01 * scale * tl.sum(acc",
          ("tests/kernels/test_estimate_backward.py::test_the_kernels_compute_the_formulas",)),
    Fault("launches: what was compiled for whole addresses serves odd ones", "kernels/launch.py",
          "(x.dtype, x.get_device(), x.data_ptr() % 16) if type(x) is Tensor", "(x.dtype, x.get_device()) if type(x) is Tensor",
          ("tests/kernels/test_launch.py",)),
    Fault("launches: what was compiled for one number serves all", "kernels/launch.py",
          "*numbers, *map(type, numbers)", "*map(type, numbers)", ("tests/kernels/test_launch.py",)),
    Fault("launches: a kernel that is gone has left its number to another", "kernels/launch.py",
          "_compiled[key] = kernel, compiled", "_compiled[key] = None, compiled", ("tests/kernels/test_launch.py",)),
    Fault("portable: dK of the estimate without the covariances", "kernels/portable/estimate_backward.py",
          "        new_dk = _with_moments(values.to(v.dtype.element_ty), to_keys, new_dk)\n", "",
          ("tests/kernels/test_estimate_backward.py",)),
    Fault("torch: the mixture without damping", "kernels/eager/estimate.py",
          " * (CAP / half_variance.clamp(min=1e-6)).clamp(max=1).sqrt()", "", ("tests/kernels/test_estimate.py",)),
    Fault("torch: the merged share of the estimate grows by 0.5 %", "kernels/eager/estimate.py",
          " + of_estimate[..., None] * estimate_out\n", " + 1.005 * of_estimate[..., None] * estimate_out\n",
          ("tests/kernels/test_estimate.py::test_the_result_is_a_mean_however_large_scores_are",)),
    Fault("torch: h is the whole variance", "kernels/eager/estimate.py",
          "    half_variance = 0.5 * scale**2 *", "    half_variance = scale**2 *", ("tests/kernels/test_estimate.py",)),
    Fault("torch: dK of the estimate without the covariances", "kernels/eager/estimate.py",
          "blocks.deviations(v.to(wide), v_mean, order, members), dcovariance.mT)\n",
          "blocks.deviations(v.to(wide), v_mean, order, members), 0 * dcovariance.mT)\n",
          ("tests/kernels/test_estimate_backward.py::test_plain_torch_has_the_gradients_of_the_formulas",)),
    Fault("portable: blocks are cut after an iteration less", "kernels/portable/estimate_order.py",
          "    for _step in range(ITERATIONS):\n", "    for _step in range(ITERATIONS - 1):\n",
          ("tests/kernels/test_estimate.py::test_kernels_and_plain_torch_cut_blocks_alike",)),
    Fault("portable: blocks are cut at the mean", "kernels/portable/estimate_order.py",
          "    for cut in range(CUTS + 1):\n", "    for cut in range(1):\n",
          ("tests/kernels/test_estimate.py::test_kernels_and_plain_torch_cut_blocks_alike",)),
    Fault("gate: exact tiles are chosen by their mass alone", "kernels/eager/estimate.py",
          "    found = (mass * half_variance).unflatten", "    found = mass.unflatten", GATE),
    Fault("gate: units are estimated by their means alone", "kernels/eager/estimate.py",
          " + scale * rows.join(rows.cut(queries) @ matrix)\n", "\n", GATE),
    Fault("gate: the mixture without damping", "kernels/eager/estimate.py",
          " * (CAP / half_variance.clamp(min=1e-6)).clamp(max=1).sqrt()", "", GATE),
    Fault("gate: a list loses its first block", "kernels/eager/steps.py",
          "    listed = in_range(", "    listed = (indices > 0) & in_range(", GATE),

    # What the compiler makes of kernels, and who waits for whom
    Fault("launches: tiles are reckoned at half their bytes", "kernels/portable/config.py",
          "        return 2 * dim * (stationary * m +", "        return dim * (stationary * m +",
          COMPILED),
    Fault("launches: nothing is loaded ahead", "kernels/portable/config.py",
          "else min(config.num_warps, 4), stages)\n", "else min(config.num_warps, 4), 1)\n",
          COMPILED),
    Fault("Hopper: additions to dQ wait for a turn too many", "kernels/lowering/dq_schedule.py",
          "(other[None, :] < when[:, None])", "(other[None, :] <= when[:, None])", ("tests/kernels/test_dq_schedule.py",)),
    Fault("transposed lists: a pass over query blocks forgets how many came before", "kernels/lowering/transposed.py",
          "count += tl.sum(kept, 0)", "count = tl.sum(kept, 0)", ("tests/kernels/test_transposed.py",)),

    # Tiles
    Fault("tokens come back from a neighbour's slot on grids of odd width", "ssta/layout.py",
          "        inverses.append(slot[:t, :h, :w].flatten())\n",
          "        inverses.append(slot[:t, :h, :w].roll(w % 2, 2).flatten())\n", ("tests/ssta/test_layout.py",)),
    Fault("padding takes the gradient of the last column", "ssta/layout.py",
          "last = cube.narrow(axis, real - 1, padded - real + 1)", "last = cube.narrow(axis, real - 1, 1)",
          ("tests/ssta/test_attention.py::test_attention_is_the_definition_with_its_gradients",)),
    Fault("portable: a tile's mean over one token too many", "kernels/prologue/reorder_kernel.py",
          "(tl.sum(total, 0) / (last - first))", "(tl.sum(total, 0) / (last - first + 1))",
          ("tests/kernels/test_steps.py::test_gathered_blocks_are_the_tokens_of_each_and_their_means",)),

    # Which tiles are selected
    Fault("the window stands one tile further", "ssta/window.py",
          "    return (centre[:, None] - tile).abs() <= reach\n", "    return (centre[:, None] + 1 - tile).abs() <= reach\n",
          ("tests/ssta/test_window.py",)),
    Fault("the window shrinks at the far border", "ssta/window.py",
          ".clamp(max=n - 1 - reach)", ".clamp(max=n - 1)", ("tests/ssta/test_window.py",)),
    Fault("a density has one tile too many in the last row", "ssta/budget.py",
          "+ SLACK).floor()\n", "+ SLACK).floor()\n    bounds[-1] += 1\n", ("tests/ssta/test_budget.py",)),
    Fault("a cache's window has a frame too many", "ssta/ring.py",
          "(window - newer).clamp(min=0)", "(window + 1 - newer).clamp(min=0)",
          ("tests/ssta/test_cache.py::test_everything_selected_is_dense",)),
    Fault("the oldest frames of a cached tile do not come last", "ssta/ring.py",
          "flipped = (depth - 1 - token // area) * area", "flipped = token // area * area",
          ("tests/ssta/test_cache.py::test_everything_selected_is_dense",)),
    Fault("a slab of coded covariances takes another one's share", "kernels/portable/coded.py",
          "scales + 3 * DIM + begin // (4 * GROUP)", "scales + 3 * DIM", ("tests/kernels/test_coded.py",)),
    Fault("a cached tile that lost frames keeps its statistics", "ssta/cached_layer.py", "        if cut:\n", "        if False:\n",
          ("tests/ssta/test_cache.py::test_part_of_it_selected_is_the_stateless_form",)),
    Fault("a threshold stops one tile early", "ssta/budget.py",
          "    needed = reached.shape[-1] - reached.sum(-1) + 1\n", "    needed = reached.shape[-1] - reached.sum(-1)\n",
          ("tests/ssta/test_selection.py",)),
    Fault("torch: the last of the selected tiles is dropped", "kernels/eager/ranking.py",
          "taken = torch.arange(scores.shape[-1], device=scores.device) < number\n",
          "taken = torch.arange(scores.shape[-1], device=scores.device) < number - 1\n",
          ("tests/ssta/test_selection.py::test_topk_takes_the_best_and_of_equals_the_first",)),
    Fault("portable: of equal scores one tile is dropped", "kernels/prologue/select_kernel.py",
          "tl.cumsum(equal.to(tl.int32), 0) <= left)", "tl.cumsum(equal.to(tl.int32), 0) < left)",
          ("tests/kernels/test_steps.py::test_selected_blocks_are_the_best_and_the_forced",)),
    Fault("portable: redundancy without the share of relevance", "kernels/prologue/select_kernel.py",
          "            shared = lambda_ * 0.5 - (1 - lambda_) * redundancy\n", "            shared = lambda_ * 0.5 - redundancy\n",
          ("tests/kernels/test_steps.py::test_scores_are_those_of_the_definition",)),
    Fault("torch: redundancy counts the tile itself", "kernels/eager/ranking.py",
          "((k.sum(2, keepdim=True) - k) * k).sum(-1)", "(k.sum(2, keepdim=True) * k).sum(-1)",
          ("tests/ssta/test_selection.py::test_importance_is_its_formula_and_ignores_the_length_of_descriptors",)),
    Fault("text columns are not forced", "ssta/selection.py",
          "    window = tuple([0 if of is None",
          "    forced[:tiles.num_video_tiles, kv_tiles.num_video_tiles:] = False\n    window = tuple([0 if of is None",
          ("tests/ssta/test_selection.py",)),
    Fault("text that is not valid is attended to", "ssta/selection.py",
          "    return Left(left, None) if whole else Left(None, left)\n",
          "    left = tiles.lengths.repeat(len(left), 1, 1)\n    return Left(left, None) if whole else Left(None, left)\n",
          ("tests/ssta/test_attention.py::test_invalid_text_changes_nothing_without_padding",
           "tests/ssta/test_attention.py::test_attention_is_the_definition_with_its_gradients")),

    # Interfaces
    Fault("FlashInfer's plan keeps its caller's mask", "interfaces/flashinfer/plan.py",
          "mask = mask.to(device, non_blocking=non_blocking, copy=True)", "mask = mask.to(device, non_blocking=non_blocking)",
          ("tests/interfaces/test_shared_memory.py::test_a_plan_keeps_no_buffer_of_its_caller",)),
    Fault("a mask of pairs lies on torch's default device", "interfaces/flex_block_attn.py",
          "torch.zeros(number, number, dtype=torch.bool, device=\"cpu\")", "torch.zeros(number, number, dtype=torch.bool)",
          ("tests/interfaces/test_shared_memory.py::test_torchs_defaults_change_no_bit_of_a_call",)),
    Fault("short key blocks with a causal mask are compacted", "interfaces/tokens/blocks.py",
          "if causal or not uniform", "if not uniform",
          ("tests/interfaces/test_short_blocks.py::test_how_short_key_blocks_are_read",)),
    Fault("Block-Sparse-Attention: streaming heads see a block less", "interfaces/block_sparse_attn.py",
          "(column >= seen - local)", "(column > seen - local)",
          ("tests/interfaces/test_mit_block_sparse_attn.py::test_every_kind_of_head",)),
    Fault("Block-Sparse-Attention: a window's first block counts as seen wholly", "interfaces/block_sparse_attn.py",
          "(key > query_end - local)", "(key > query - local)",
          ("tests/interfaces/test_mit_block_sparse_attn.py::test_streaming_by_tokens",)),

    # Trained by others
    Fault("VSA's budget counts the tiles before the video", "ssta/trained/vsa.py",
          "config.density * cut.num_video_tiles", "config.density * cut.num_tiles",
          ("tests/ssta/test_vsa.py::test_what_stands_before_the_video_is_attended_to_whole_and_pooled_in_tiles_of_its_own",)),
    Fault("VSA's branch is lost where the schedule says dense", "pipelines/patch/context.py",
          "density == 1 and self.method is None", "density == 1",
          ("tests/pipelines/test_sparse_checkpoints.py::test_a_density_of_one_keeps_the_branch_and_counts_as_no_dense_step",)),
    Fault("a step takes the density of the one before", "pipelines/schedule/schedule.py",
          "self.densities[index * len(self.densities) // count]", "self.densities[max(index - 1, 0) * len(self.densities) // count]",
          ("tests/pipelines/test_schedule.py::test_which_density_a_step_has",)),

    # Pipelines
    Fault("a field that is changed holds on some canvases only", "pipelines/schedule/changes.py",
          "for name, value in dict(overrides).items() if name not in settled}", "for name, value in dict(overrides).items()}",
          ("tests/pipelines/test_training.py::test_a_density_takes_the_place_of_any_budget_in_all_variants",)),
    Fault("a report forgets the kernels of dense steps", "pipelines/patch/processor.py",
          "        if dense:\n            self._last_dense", "        if True:\n            self._last_dense",
          ("tests/pipelines/test_run_report.py::test_a_layer_says_what_its_last_dense_step_ran",)),
    Fault("the doctor passes what is NaN", "pipelines/doctor.py",
          ".nan_to_num(nan=float(\"inf\"))", ".nan_to_num()", ("tests/pipelines/test_doctor.py::test_wrong_attention_fails",)),

    Fault("text that was put first is not put back", "pipelines/families/joint.py", "if order is not None and not self.stays_first:",
          "if order is not None and self.stays_first:",
          ("tests/pipelines/test_text_masks.py::test_valid_text_may_be_anywhere",)),
    Fault("a wrapper's arguments by position are the model's", "pipelines/patch/arguments.py",
          "if of.kind in _POSITIONAL and of.name not in positions]", "if of.kind in _POSITIONAL]",
          ("tests/pipelines/test_arguments.py::test_positions_go_on_where_the_outer_forward_ends",)),
    Fault("layers of the other transformer are dense too", "pipelines/schedule/schedule.py",
          "for layer in self.dense_layers if under(layer) in (None, name)]", "for layer in self.dense_layers]",
          ("tests/pipelines/test_what_is_said.py::test_layers_of_two_transformers_go_by_the_names_of_the_report",)),

    # Ranks
    Fault("ranks send the wrong heads", "ssta/ranks/exchange.py",
          "x.narrow(2, place.local, place.length).narrow(1, sum(counts[:shards.rank]) % x.shape[1], counts[shards.rank])",
          "x.narrow(2, place.local, place.length).narrow(1, sum(counts[shards.rank + 1:]) % x.shape[1], counts[shards.rank])",
          ("tests/ssta/test_parallel.py::test_on_ranks[2]",)),
    Fault("ranks that repeat different calls go on", "ssta/ranks/agreement.py", "    made.note(agreement)\n", "    made.note(0)\n",
          ("tests/ssta/test_parallel.py::test_on_ranks[2]",)),
    Fault("ranks that were given other facts go on", "ssta/ranks/agreement.py", "if value != values[0]:", "if value is None:",
          ("tests/ssta/test_parallel.py::test_on_ranks[2]",)),
)
