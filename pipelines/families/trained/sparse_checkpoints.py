"""apply_vsa and apply_sla: run checkpoints that others trained with video sparse attention or with sparse-linear attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssta import SSTAConfig
from ssta.trained.sla import Q_BLOCK, check_density
from ssta.trained.vsa import vsa_config

from ...patch.apply import SSTAHandle
from .branches import Branch, apply_branch
from .checkpoint import Weights
from .wan import WanSLAProcessor, WanVSAProcessor

VSA = Branch("VSA", "to_gate_compress", ("to_gate_compress", "attn1.to_gate_compress"),
             lambda attn: (attn.to_q.out_features, attn.to_q.in_features), WanVSAProcessor)
# The names in TurboDiffusion's files, in what SGLang and FastVideo make of them, and in models that were saved with apply_sla on them.
SLA = Branch("SLA", "proj_l", ("self_attn.attn_op.local_attn.proj_l", "attn1.attn_op.local_attn.proj_l", "attn1.attn_impl.proj_l",
                               "attn1.proj_l"),
             lambda attn: (attn.to_q.out_features // attn.heads,) * 2, WanSLAProcessor)


def apply_vsa(model: Any, weights: Weights | Mapping[str, Weights] | None = None, *, sparsity: float = 0.8, impl: str = "auto",
              ) -> SSTAHandle:
    """Runs a Wan checkpoint that was trained with video sparse attention (VSA; FastWan), until ``handle.remove()`` or ``remove_ssta``.

    Diffusers loads such a checkpoint without its gates, for which it has no place. They are read here from where the model came from, and
    each attention gets its own as a module ``to_gate_compress``: it moves, trains and is saved with the model, as
    ``blocks.N.attn1.to_gate_compress``, which is read again here. Removing takes them away again. Only attention changes: the sampler
    and its few steps stay what the pipeline has.

    Args:
        model: a Wan transformer, or a pipeline: then its ``transformer``, and ``transformer_2`` if it has one.
        weights: where the gates are: a state dict, a file, a folder (the transformer's or the pipeline's), or the pipeline's name on the
            Hub. For two transformers the pipeline's folder or name, or a dict with an entry for each. None = where ``from_pretrained``
            found the model.
        sparsity: in [0, 1), that of the training: 0.8 for FastWan2.1-T2V-1.3B, 0.9 for Wan2.1-VSA-T2V-14B-720P. Checkpoints do not say it.
        impl: which kernel runs: "auto", or a name that ``block_sparse_attention`` takes.

    Returns:
        A handle, also a context manager, as ``apply_ssta`` returns it.

    Raises:
        TypeError: not a model or a pipeline, or weights of another kind.
        ValueError: no model of Wan's, one that SSTA is applied to already or whose processors are not the original ones, weights that
            cannot be found or do not fit the model (the message says what was found), a sparsity out of range, or an unknown impl.

    The model is as it was after any of them.
    """
    return apply_branch(model, weights, VSA, vsa_config(sparsity), impl)


def apply_sla(model: Any, weights: Weights | Mapping[str, Weights] | None = None, *, density: float = 0.1, impl: str = "auto",
              ) -> SSTAHandle:
    """Runs a Wan checkpoint that was trained with sparse-linear attention (SLA; TurboDiffusion), until ``handle.remove()``.

    As ``apply_vsa`` with the projections ``proj_l``, which are saved as ``blocks.N.attn1.proj_l``. The attention is that of
    ``sparse_linear_attention`` with the softmax feature map and TurboDiffusion's blocks, 128 queries by 64 keys.

    Args:
        model, weights, impl: as there.
        density: in (0, 1], the share of the key blocks that is computed exactly, TurboDiffusion's ``sla_topk``.

    Returns:
        As there.

    Raises:
        TypeError, ValueError: as there.
    """
    # For reports: its tiles are blocks of the sequence.
    config = SSTAConfig(tile_thw=(1, 1, Q_BLOCK), sparse_type="block_attn", sampling_type="similarity", density=check_density(density))
    return apply_branch(model, weights, SLA, config, impl)
