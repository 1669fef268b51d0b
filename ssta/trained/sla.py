"""Sparse-linear attention: exact attention to each query block's best key blocks, plus a projection of linear attention to all tokens.

The method is that of Zhang et al., "SLA: Beyond Sparsity in Diffusion Transformers via Fine-Tunable Sparse-Linear Attention" (arXiv
2509.24006), in the form of thu-ml/SLA's main branch, by which TurboDiffusion's checkpoints were trained. (The paper's own form, on that
repository's branch SLA-1, leaves the exactly computed blocks out of the linear part; it is not this one.) Blocks are runs of the sequence.
With the means qb_i and kb_j of query block i and key block j, the mean km of all keys, and a feature map f over the channels, for a head,

    K_i   = the max(1, floor(density N)) of the N key blocks j with the largest qb_i . (kb_j - km)
    o_q   = softmax attention of token q of block i to the tokens of the blocks in K_i
    l_q   = f(q) (sum over tokens t of f(k_t)^T v_t) / (1e-5 + f(q) . sum over t of f(k_t))
    out_q = o_q + W l_q + b

W and b are the same for all heads. LightX2V's Turbo-SLA for MiniMax-H3 was trained without them: there out_q = o_q. The selection is a
constant; its means are float32, where the published code rounds them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..checks import LARGEST, require_choice, require_share
from ..inputs import check_tensors
from ..kernels import BlockLists, PatternFacts, block_sparse_attention, choose_route
from ..kernels.checks import DTYPES, autocast_inputs, check_tensor, require_bool, require_int, resolve_scale, without_autocast
from ..result import LayerResult
from ..scoring import block_means
from ..selection import Selection
from ..sequence import DenseRun, TokenLayout

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1), "elu": lambda x: functional.elu(x) + 1, "relu": functional.relu}
# EPS is the published code's, the block sizes are those of TurboDiffusion's checkpoints.
EPS = 1e-5
Q_BLOCK, KV_BLOCK = 128, 64


def sparse_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, density: float = 0.1,
    feature_map: str = "softmax", q_block: int = Q_BLOCK, kv_block: int = KV_BLOCK, scale: float | None = None,
    deterministic: bool = True, impl: str = "auto",
) -> Tensor:
    """Sparse-linear attention (SLA) over a sequence, for checkpoints that were trained with it.

    Args:
        query: ``[B, H, S, D]``, any strides. Under autocast all tensors are cast to its dtype.
        key: ``[B, Hkv, S, D]``, query's dtype and device. H must be a multiple of Hkv.
        value: ``[B, Hkv, S, D]``.
        weight: ``[D, D]``, (out, in) as in ``torch.nn.Linear``; the projection of the linear part. float16, bfloat16, float32 or float64,
            on query's device. None = no linear part.
        bias: ``[D]``, dtype and device as for weight; None = none, as where there is no weight.
        density: in (0, 1], the share of the key blocks that each query block attends to exactly (TurboDiffusion's ``sla_topk``).
        feature_map: "softmax", "elu" (plus 1) or "relu", with which gradients in 16 bit are poor where features nearly vanish, as of the
            published code.
        q_block, kv_block: tokens of a query block and of a key block, at most 2**31 - 1; the last ones may be shorter.
        scale: factor on the scores of the exact part; default 1 / sqrt(D).
        deterministic: whether gradients are the same bits every time; see ``block_sparse_attention``.
        impl: which kernel runs; "auto" chooses by device, dtype and shape. The linear part is two products in plain torch.

    Returns:
        ``[B, H, S, D]`` in query's dtype. Differentiable once in query, key, value, weight and bias, not by torch.func; the
        selection is a constant.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    return sla_layer(query, key, value, weight, bias, density=density, feature_map=feature_map, q_block=q_block, kv_block=kv_block,
                     scale=scale, deterministic=deterministic, impl=impl).out


def sla_layer(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, bias: Tensor | None, *, density: float, feature_map: str = "softmax",
    q_block: int = Q_BLOCK, kv_block: int = KV_BLOCK, scale: float | None = None, deterministic: bool = True, impl: str = "auto",
    selection: Selection | None = None,
) -> LayerResult:
    """``sparse_linear_attention`` with all that it knows of itself; ``selection`` as ``attend`` takes it. For use inside the package."""
    q, k, v = autocast_inputs(query=query, key=key, value=value)
    if q.dim() != 4 or q.shape[2] == 0:
        raise ValueError(f"query must be [batch, heads, tokens, head_dim] with at least one token, got shape {tuple(q.shape)}")
    layout = TokenLayout((DenseRun(q.shape[2]),))
    check_tensors(q, k, v, layout, layout)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    dim = q.shape[3]
    if weight is not None:
        check_tensor("weight", weight, DTYPES, (dim, dim), "[head_dim, head_dim]", q.device)
    elif bias is not None:
        raise ValueError("bias must be None without a weight, whose product it is added to, got one")
    if bias is not None:
        check_tensor("bias", bias, DTYPES, (dim,), "[head_dim]", q.device)
    density = check_density(density)
    require_bool("deterministic", deterministic)
    require_choice("feature_map", feature_map, tuple(FEATURE_MAPS))
    for name, size in (("q_block", q_block), ("kv_block", kv_block)):
        if require_int(name, size, 1) > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST} tokens, got {size}")
    scale = resolve_scale(scale, dim)
    facts = q.device, q.dtype, dim
    choose_route(impl, *facts)
    if selection is None:
        with torch.no_grad(), without_autocast(q.device.type):
            selection = Selection(_select(q, k, density, q_block, kv_block))
    out = block_sparse_attention(q, k, v, selection.blocks, scale=scale, deterministic=deterministic, impl=impl)
    # A pure function: what block_sparse_attention chose by the same facts.
    route = choose_route(impl, *facts, PatternFacts.of(selection.blocks), heads=q.shape[1], kv_heads=k.shape[1],
                         deterministic=deterministic)
    if weight is not None:
        with without_autocast(q.device.type):
            out = out + _linear(q, k, v, weight, bias, FEATURE_MAPS[feature_map])
    return LayerResult(out, route, selection)


def check_density(density: float) -> float:
    """``density``, a share of the key blocks."""
    return require_share("density", density, "(0, 1]", "a share of the key blocks")


def _select(q: Tensor, k: Tensor, density: float, q_block: int, kv_block: int) -> BlockLists:
    wide = torch.promote_types(q.dtype, torch.float32)
    q_means, k_means = block_means(q, q_block, wide), block_means(k, kv_block, wide) - k.mean(2, keepdim=True, dtype=wide)
    scores = q_means @ k_means.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    kept = max(1, int(density * scores.shape[-1]))
    best = scores.masked_fill(scores.isnan(), -torch.inf).topk(kept, sorted=False).indices.sort().values.int()
    counts = torch.full(best.shape[:3], kept, dtype=torch.int32, device=q.device)
    return BlockLists(counts, best, q_block, kv_block, num_kv_blocks=scores.shape[-1])


def _linear(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, feature_map: Callable[[Tensor], Tensor]) -> Tensor:
    """W l + b. W, which is linear too, is multiplied into the small sum over the tokens; both sums are taken over their number, so that
    float16 can hold them."""
    wide, tokens = torch.promote_types(q.dtype, torch.float32), k.shape[2]
    features = feature_map(k)
    matrix = (features.mT @ v).to(wide) @ weight.to(wide).mT / tokens
    total = features.sum(2, dtype=wide)[..., None] / tokens
    matrix, total = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).to(q.dtype) for x in (matrix, total))
    features = feature_map(q)
    # In float16 EPS / tokens is 0, and so are all features of some rows under "relu".
    eps = max(EPS / tokens, torch.finfo(q.dtype).tiny * torch.finfo(q.dtype).eps)
    out = (features @ matrix) / (features @ total + eps)
    return out if bias is None else out + bias.to(q.dtype)
