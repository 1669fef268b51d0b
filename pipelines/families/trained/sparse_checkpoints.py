"""apply_vsa and apply_sla: run checkpoints that others trained with video sparse attention or with sparse-linear attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ssta import SSTAConfig, TokenLayout
from ssta.kernels import Deferred
from ssta.result import LayerResult
from ssta.selection import Selection
from ssta.trained.sla import Q_BLOCK, check_density, sla_layer
from ssta.trained.vsa import vsa_config, vsa_layer

from ...patch.apply import SSTAHandle
from ...patch.streams import Operand
from ...schedule.schedule import Schedule
from .branched import BranchedProcessor
from .branches import Branch, apply_branch
from .checkpoint import Weights


def attend_vsa(
    processor: BranchedProcessor, attn: Any, hidden_states: Tensor, query: Operand, key: Operand, value: Operand, layout: TokenLayout,
) -> Tensor:
    """As VSA does; the attention module has the trained gate ``to_gate_compress``, a projection of what comes into it."""
    gate = attn.to_gate_compress(hidden_states).unflatten(2, (attn.heads, -1))
    # Text, conditions and audio, which the layout may count as one, are pooled apart.
    layout, config = processor.video_alone(hidden_states.shape[1]), processor.ruling.config

    def attended(selection: Selection | None, q: Any, k: Any, v: Any, gate: Tensor) -> LayerResult:
        return vsa_layer(q, k, v, gate, layout, config, impl=processor.context.impl, selection=selection)

    return processor.attend_by(attended, query, key, value, layout, gate)


def attend_sla(
    processor: BranchedProcessor, attn: Any, hidden_states: Tensor, query: Operand, key: Operand, value: Operand, layout: TokenLayout,
) -> Tensor:
    """As SLA does, over the tokens in the order that the model has them; the attention module may have the projection ``proj_l``."""
    projection, density = getattr(attn, "proj_l", None), processor.ruling.config.density
    weight, bias = (None, None) if projection is None else (projection.weight, projection.bias)
    assert density is not None

    def attended(selection: Selection | None, *qkv: Any) -> LayerResult:
        q, k, v = (x.materialize() if isinstance(x, Deferred) else x for x in qkv)
        return sla_layer(q, k, v, weight, bias, density=density, impl=processor.context.impl, selection=selection)

    return processor.attend_by(attended, query, key, value, layout)


# FastVideo's names for Wan and MiniMax-H3, of which its adapters have "set_weight" in the place of "weight".
VSA = Branch("VSA", "to_gate_compress", ("to_gate_compress", "attn1.to_gate_compress", "attn.to_gate_compress"),
             lambda attn: (attn.to_q.out_features, attn.to_q.in_features), attend_vsa)
# The names in TurboDiffusion's files, in what SGLang and FastVideo make of them, and in models that were saved with apply_sla on them.
SLA = Branch("SLA", "proj_l", ("self_attn.attn_op.local_attn.proj_l", "attn1.attn_op.local_attn.proj_l", "attn1.attn_impl.proj_l",
                               "attn1.proj_l", "attn.proj_l"),
             lambda attn: (attn.to_q.out_features // attn.heads,) * 2, attend_sla, without=("MiniMaxH3Transformer3DModel",))


def apply_vsa(model: Any, weights: Weights | Mapping[str, Weights] | None = None, *, sparsity: float = 0.8,
              schedule: Schedule | None = None, impl: str = "auto") -> SSTAHandle:
    """Runs a checkpoint that was trained with video sparse attention (VSA; FastWan, FastH3), until ``handle.remove()`` or ``remove_ssta``.

    Diffusers loads such a checkpoint without its gates, for which it has no place. They are read here from where the model came from, and
    each attention gets its own as a module ``to_gate_compress``: it moves, trains and is saved with the model, as
    ``blocks.N.attn1.to_gate_compress``, which is read again here. Removing takes them away again. Only attention changes: the sampler
    and its few steps stay what the pipeline has.

    Args:
        model: a transformer of Wan's or MiniMax-H3, or a pipeline: then its ``transformer``, and ``transformer_2`` or ``transformer_ref``
            if it has one.
        weights: where the gates are: a state dict, a file, a folder (the transformer's or the pipeline's), or the pipeline's name on the
            Hub. For two transformers the pipeline's folder or name, or a dict with an entry for each; one without an entry stays as it is.
            None = where ``from_pretrained`` found the model.
        sparsity: in [0, 1), that of the training: 0.8 for FastWan2.1-T2V-1.3B, 0.9 for Wan2.1-VSA-T2V-14B-720P and FastH3. Checkpoints do
            not say it.
        schedule: steps and layers that attend to all tiles, where the gated branch stays, and densities (1 - sparsity) by step; None =
            ``sparsity`` everywhere.
        impl: which kernel runs: "auto", or a name that ``block_sparse_attention`` takes.

    Returns:
        A handle, also a context manager, as ``apply_ssta`` returns it.

    Raises:
        TypeError: not a model or a pipeline, weights of another kind, or no Schedule.
        ValueError: another model, one that SSTA is applied to already or whose processors are not the original ones, weights that cannot be
            found or do not fit the model (the message says what was found), a sparsity out of range, a schedule with configurations for
            layers, or one that counts steps without a scheduler, or an unknown impl.

    The model is as it was after any of them.
    """
    return apply_branch(model, weights, VSA, vsa_config(sparsity), schedule, impl)


def apply_sla(model: Any, weights: Weights | Mapping[str, Weights] | None = None, *, density: float = 0.1,
              schedule: Schedule | None = None, impl: str = "auto") -> SSTAHandle:
    """Runs a checkpoint that was trained with sparse-linear attention (SLA; TurboDiffusion, Turbo-SLA), until ``handle.remove()``.

    As ``apply_vsa`` with the projections ``proj_l``, which are saved as ``blocks.N.attn1.proj_l``. The attention is that of
    ``sparse_linear_attention`` with the softmax feature map and TurboDiffusion's blocks, 128 queries by 64 keys. Turbo-SLA for MiniMax-H3
    is a LoRA, which the pipeline loads, and has no projections: there ``weights`` are left out, and attention is the exact part alone.

    Args:
        model, weights, schedule, impl: as there.
        density: in (0, 1], the share of the key blocks that is computed exactly: TurboDiffusion's ``sla_topk``; 0.15 for Turbo-SLA.

    Returns:
        As there.

    Raises:
        TypeError, ValueError: as there.
    """
    # For reports: its tiles are blocks of the sequence.
    config = SSTAConfig(tile_thw=(1, 1, Q_BLOCK), sparse_type="block_attn", sampling_type="similarity", density=check_density(density))
    return apply_branch(model, weights, SLA, config, schedule, impl)
