"""The estimate in plain torch, which specifies it: blocks' statistics, the merge of their estimate with the exact part, and its gradients.

The formulas, for one head with scale s. Key blocks are estimated as units u: whole blocks, or with ``parts`` = 2 the tokens that lie
lower on the block's first principal key direction, and the others, cut about where their means are as far away. Unit u has n_u tokens, mean
key and value kb_u and vb_u, covariances C_u of keys with values and S_u of keys; G_I is the second moment of some of query block I's
queries, which speak for it. Then

    h_Iu = s^2 / 2 <G_I, S_u>                                   half the variance of a unit's scores, as a query block sees it
    l_qu = s q . kb_u + log n_u + min(h_Iu, 1)                  the log of a unit's estimated mass
    m_Iu = mean over the same queries of the softmax over all units of l_qu, of which "error" selects by m_Iu h_Iu
    w_qu = softmax over the units of unselected blocks,  z_T = logsumexp
    P_Iu = (m_Iu / their sum over the units of unselected blocks) sqrt(min(1, 1 / h_Iu)),  M_I = sum over u of P_Iu C_u
    T_q  = sum over u of w_qu vb_u + s q^T M_I

and with the exact part's output E_q and log-sum-exp z_E, the result O_q = a E_q + b T_q with a = e^z_E / (e^z_E + e^z_T), b = 1 - a.

For blocks drawn from a Gaussian, s q^T C_u is how far a softmax inside the unit moves its mean value, and h how much its mass exceeds that
of its mean key. Real blocks have bounded tails, so both are damped where h > 1. The queries that speak for their block in h and m are
spread over it: 32 or, of blocks of more than 128 tokens, 64. Errors are the same within 1 % as where all do. A head whose blocks' tokens
differ too much to be estimated together (h above 3 in the mean, weighted by mass) does without.

Gradients flow through w, kb, vb and C to q, k and v; h, the damping, m and the cuts count as constants.
"""

from __future__ import annotations

from dataclasses import replace
from math import log

import torch
from torch import Tensor

from ..block_forms import per_query_head, prefix_mask, scatter_mask
from ..estimate import CAP, CUTS, ITERATIONS, Blocks, Estimate, sampled_queries, useful_heads
from .steps import compute_dtype

LN2 = log(2.0)


def key_statistics(k: Tensor, v: Tensor, kv_blocks: Blocks, parts: int, covariances: bool) -> Estimate:
    """The part of ``estimate`` that needs no queries.

    Args:
        k, v: ``[B, Hkv, P', D]`` in the order of blocks.
        kv_blocks: the K key blocks that may be estimated.
        parts: 1 or 2 units of a block.
        covariances: whether those of keys with values are wanted too.

    Returns:
        The statistics in float32, or float64 where k is.
    """
    blocks = _Cut(kv_blocks, k.shape[2])
    k, v = (x.to(compute_dtype(k)) for x in (k, v))
    finite = (blocks.cut(k).isfinite() & blocks.cut(v).isfinite()).flatten(3).all(-1)
    order, lower = None, blocks.lengths.expand(finite.shape)
    if parts > 1:
        order, lower = blocks.principal_order(blocks.cut(k).masked_fill(~finite[..., None, None], 0))
    counts = torch.stack((lower, blocks.lengths - lower), -1)[..., :parts]
    log_count = counts.to(k.dtype).log().masked_fill(~finite[..., None], -torch.inf).flatten(2)
    members, counts = blocks.members(log_count)
    k_mean, v_mean = ((blocks.units(x, order, members).sum(4) / counts[..., None]).flatten(2, 3) for x in (k, v))
    k_spread = blocks.deviations(k, k_mean, order, members)
    moments = (k_spread.mT @ k_spread / counts[..., None, None]).flatten(2, 3)
    mixed = _covariances(k, v, k_mean, v_mean, log_count, order, blocks) if covariances else None
    return Estimate(parts, log_count, order, k_mean, v_mean, moments, mixed)


def estimate(q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, scale: float, parts: int,
             useful: Tensor | None = None, known: Estimate | None = None) -> Estimate:
    """What selection and estimate need to know of blocks.

    Args:
        q: ``[B, H, P, D]`` in the order of blocks.
        k, v: ``[B, Hkv, P', D]``, q's dtype and device.
        q_blocks, kv_blocks: the N query blocks whose rows estimate, and the K key blocks that may be estimated.
        scale: factor on the scores.
        parts: 1 or 2 units of a block.
        useful: ``Estimate.useful`` of an earlier call, whose selection is attended to again.
        known: what ``key_statistics`` has found of k and v, which are then not read.

    Returns:
        The estimates in float32, or float64 where q is.
    """
    keys = key_statistics(k, v, kv_blocks, parts, False) if known is None else known
    rows, heads, log_count, k_mean = _Cut(q_blocks, q.shape[2]), q.shape[1], keys.log_count, keys.k_mean
    assert keys.moments is not None, "queries have been compared with these keys"
    variance = per_query_head(keys.moments, heads)
    sampled, counted = rows.sample()
    queries = rows.cut(q.to(k_mean.dtype)).gather(3, sampled[..., None].expand(*q.shape[:2], -1, -1, q.shape[3]))
    # A query that is not finite is no part of what its block has in common.
    trusted = queries.isfinite().all(-1, keepdim=True) & counted[..., None]
    queries, number = queries.masked_fill(~trusted, 0), counted.sum(1).clamp(min=1)[:, None]
    half_variance = 0.5 * scale**2 * ((queries.mT @ queries / number[..., None]).flatten(3) @ variance.flatten(3).mT)
    logits = (scale * queries.flatten(2, 3) @ per_query_head(k_mean, heads).mT).unflatten(2, sampled.shape)
    mass = (logits + _bias(log_count, half_variance)[..., None, :]).softmax(-1).nan_to_num(0)
    mass = (mass * trusted).sum(3) / number
    useful = useful_heads((mass * half_variance).sum(-1)) if useful is None else useful
    return replace(keys, moments=None, half_variance=half_variance, mass=mass, useful=useful,
                   scores=scores(mass, half_variance, log_count, parts))


def scores(mass: Tensor, half_variance: Tensor, log_count: Tensor, parts: int) -> Tensor:
    """``[B, H, N, K]``: mass x h of each key block over its tokens, of the fields of ``Estimate`` of these names; -inf where nothing
    is estimated of a block."""
    found = (mass * half_variance).unflatten(-1, (-1, parts)).sum(-1)
    # A block of one token has an empty half, which is nothing bad.
    tokens = per_query_head(log_count.exp().unflatten(-1, (-1, parts)).sum(-1), found.shape[1])[:, :, None]
    return (found / tokens).masked_fill(tokens == 0, -torch.inf)


def merge(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, counts: Tensor, indices: Tensor,
            estimates: Estimate, scale: float, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention with the blocks that lists leave out estimated, from attention to those that they name; written over out and lse.

    Args:
        out: ``[B, H, P, D]``, attention to the listed blocks, any strides.
        lse: ``[B, H, P]``, float32 or float64, its log-sum-exp.
        q, k, v, q_blocks, kv_blocks, scale: as for ``estimate``, which gave ``estimates``.
        counts, indices: those of ``BlockLists``, whose first query and key blocks are these.
        keep: whether a backward is to come.

    Returns:
        shares: ``[B, H, N, T]`` in lse's dtype, of which a query block's T, however many, sum to the share of the softmax that was computed
            exactly, mean of the block's rows; to 1 where nothing is left out, or what is left out is not estimated.
        estimate_lse: ``[B, H, P]`` in lse's dtype, log-sum-exp of the estimate; -inf in rows that leave nothing out, and in those of other
            blocks. Their out and lse keep their bits. Of no heads unless ``keep``, and so are bias and mixture.
        bias: ``[B, H, N, U]`` in lse's dtype: what a unit's logit has beside scale q . k_mean, in base 2; -inf where it is not estimated.
        mixture: ``[B, H, N, U]``, P of the formulas; float32 or float64.
    """
    rows, blocks, heads = _Cut(q_blocks, q.shape[2]), _Cut(kv_blocks, k.shape[2]), q.shape[1]
    queries, (half_variance, mass, useful) = q.to(compute_dtype(q)), estimates.of_queries
    known = _listed(counts, indices, rows.number, blocks.number, heads).repeat_interleave(estimates.parts, -1)
    known = known | ~useful[..., None, None]
    bias = _bias(estimates.log_count, half_variance).masked_fill(known, -torch.inf)
    left = mass.masked_fill(known, 0)
    mixture = left / left.sum(-1, keepdim=True).clamp(min=1e-30) * (CAP / half_variance.clamp(min=1e-6)).clamp(max=1).sqrt()
    weights, estimate_lse = _weights(queries, estimates.k_mean, bias, rows, scale)
    covariances = estimates.covariances
    if covariances is None:
        covariances = _covariances(k, v, estimates.k_mean, estimates.v_mean, estimates.log_count, estimates.order, blocks)
    matrix = _matrices(covariances, mixture, q.shape[3])
    estimate_out = weights @ per_query_head(estimates.v_mean, heads) + scale * rows.join(rows.cut(queries) @ matrix)
    exact, of_estimate, total = _shares(lse, estimate_lse)
    estimated = ~estimate_lse.isneginf()
    merged = exact[..., None] * _where_some(exact, out.to(estimate_out.dtype)) + of_estimate[..., None] * estimate_out
    out.copy_(torch.where(estimated[..., None], merged.to(out.dtype), out))
    lse.copy_(torch.where(estimated, total, lse))
    shares = rows.cut(exact[..., None]).sum(3) / rows.lengths.clamp(min=1)[:, None]
    kept = slice(None) if keep else slice(0)
    return shares, estimate_lse[:, kept], bias[:, kept] / LN2, mixture[:, kept]


def merge_backward(
    dout: Tensor, exact: Tensor, exact_lse: Tensor, out: Tensor, lse: Tensor, estimate_lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, bias: Tensor, mixture: Tensor, log_count: Tensor,
    order: Tensor | None, k_mean: Tensor, v_mean: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients for the exact part's out and lse, and for q, k and v, shaped and typed like these.

    With delta = dO . O and W_qu = b w_qu, for rows of which something is estimated:

        dE = a dO,  dz_E = a (dO . E - delta),  c_q = dO . (s q^T M_I) - delta
        dl_qu = W_qu (dO . vb_u + c_q),  dq = s sum_u dl_qu kb_u + s b M_I dO
        dkb_u = s sum_q dl_qu q,  dvb_u = sum_q W_qu dO,  dM_I = s sum_q q (b dO)^T,  dC_u = sum_I P_Iu dM_I
        dk_t = (dkb_u + dC_u (v_t - vb_u)) / n_u,  dv_t = (dvb_u + dC_u^T (k_t - kb_u)) / n_u  for a token t of unit u

    Other rows pass on what arrives.

    Args:
        dout: ``[B, H, P, D]``, what arrives for the merged out; nothing does for its lse.
        exact, exact_lse: out and lse of the exact part; out, lse: merged.
        estimate_lse, bias, mixture: what ``merge`` returned with ``keep``.
        q, k, v, q_blocks, kv_blocks, scale: the arguments of ``merge``.
        log_count, order, k_mean, v_mean: those of the estimates.
    """
    heads, kv_heads, wide = q.shape[1], k.shape[1], compute_dtype(q)
    rows, blocks = _Cut(q_blocks, q.shape[2]), _Cut(kv_blocks, k.shape[2])
    parts = log_count.shape[2] // blocks.number
    members, counts = blocks.members(log_count)
    queries, do = q.to(wide), dout.to(wide)
    estimated = ~estimate_lse.isneginf()
    of_exact, of_estimate, _ = _shares(exact_lse, estimate_lse)
    delta = (do * out.to(wide)).sum(-1)
    dexact = torch.where(estimated[..., None], (of_exact[..., None] * do).to(dout.dtype), dout)
    own = (do * _where_some(of_exact, exact.to(wide))).sum(-1)
    dexact_lse = (of_exact * (own - delta)).masked_fill(~estimated, 0)

    matrix = _matrices(_covariances(k, v, k_mean, v_mean, log_count, order, blocks), mixture, q.shape[3])
    weights, _ = _weights(queries, k_mean, bias * LN2, rows, scale)
    weights = weights * of_estimate[..., None]
    through_matrix = rows.join(rows.cut(do) @ matrix.mT)
    # Keys and values that a row attends to exactly may hold NaN, and 0 times NaN is NaN.
    c = (scale * (through_matrix * queries).sum(-1) - delta).masked_fill(~estimated, 0)
    dlogits = weights * (do @ per_query_head(v_mean, heads).mT + c[..., None])
    dq = scale * (dlogits @ per_query_head(k_mean, heads) + of_estimate[..., None] * through_matrix)

    def of_kv_heads(x: Tensor) -> Tensor:
        return x.unflatten(1, (kv_heads, -1)).sum(2)

    dk_mean, dv_mean = of_kv_heads(scale * dlogits.mT @ queries), of_kv_heads(weights.mT @ do)
    dmatrix = scale * rows.cut(queries).mT @ rows.cut(of_estimate[..., None] * do)
    dcovariance = of_kv_heads(mixture.mT @ dmatrix.flatten(3)).unflatten(3, dmatrix.shape[3:]).unflatten(2, (-1, parts))

    def of_tokens(x: Tensor, dmean: Tensor, spread: Tensor, dmatrix: Tensor) -> Tensor:
        found = dmean.unflatten(2, (-1, parts))[..., None, :] + spread @ dmatrix
        return blocks.scattered((found / counts[..., None, None]).masked_fill(~members[..., None], 0).sum(3), order).to(x.dtype)

    dk = of_tokens(k, dk_mean, blocks.deviations(v.to(wide), v_mean, order, members), dcovariance.mT)
    dv = of_tokens(v, dv_mean, blocks.deviations(k.to(wide), k_mean, order, members), dcovariance)
    return dexact, dexact_lse, dq.to(q.dtype), dk, dv


class _Cut:
    """An axis' tokens, block by block: ``[..., P, *]`` <-> ``[..., N, L, *]``, the end of short blocks unused."""

    def __init__(self, blocks: Blocks, tokens: int) -> None:
        offsets, number, longest = blocks
        self.number, self.longest = number, longest
        self.starts, self.lengths = offsets[:number].long(), offsets[:number + 1].diff().long()
        self.place = torch.arange(longest, device=offsets.device)
        self.valid = self.place < self.lengths[:, None]
        self._index = (self.starts[:, None] + self.place).clamp(max=max(tokens - 1, 0)).flatten()
        token = self._token = torch.arange(tokens, device=offsets.device)
        self.inside = token < offsets[number]
        self.of_token = torch.bucketize(token, offsets[1:number + 1].long(), right=True).clamp(max=number - 1)
        self._back = (self.of_token * longest + token - self.starts[self.of_token]).clamp(max=number * longest - 1)

    def cut(self, x: Tensor) -> Tensor:
        """``[B, H, P, C]`` -> ``[B, H, N, L, C]``, zeros where a block has no token."""
        return x.index_select(2, self._index).unflatten(2, (self.number, self.longest)).masked_fill(~self.valid[..., None], 0)

    def join(self, x: Tensor) -> Tensor:
        """``[B, H, N, L, C]`` -> ``[B, H, P, C]``, zeros for tokens of other blocks."""
        return x.flatten(2, 3).index_select(2, self._back).masked_fill(~self.inside[:, None], 0)

    def scattered(self, x: Tensor, order: Tensor | None) -> Tensor:
        """``join`` of what stands at the places of ``Estimate.order``."""
        x = self.join(x)
        return x if order is None else torch.zeros_like(x).scatter(2, self._tokens(order).expand_as(x), x)

    def _tokens(self, order: Tensor) -> Tensor:
        """int64 ``[B, H, P, 1]``: ``order``, which of other blocks' places holds anything, with their own tokens there."""
        return order.long().where(self.inside, self._token)[..., None]

    def members(self, log_count: Tensor) -> tuple[Tensor, Tensor]:
        """(bool ``[B, Hkv, N, parts, L]``: the places of a block that each unit takes; int64 ``[B, Hkv, N, parts]``: how many, at least 1).
        log_count: that of ``Estimate``."""
        counts = log_count.exp().round().long().unflatten(2, (self.number, -1))
        ends = counts.cumsum(-1)
        return (self.place >= (ends - counts)[..., None]) & (self.place < ends[..., None]), counts.clamp(min=1)

    def units(self, x: Tensor, order: Tensor | None, members: Tensor) -> Tensor:
        """``[B, H, P, D]`` -> ``[B, H, N, parts, L, D]``, each unit's tokens at the places of ``order``, 0 elsewhere."""
        x = x if order is None else x.gather(2, self._tokens(order).expand_as(x))
        return self.cut(x)[:, :, :, None].masked_fill(~members[..., None], 0)

    def deviations(self, x: Tensor, means: Tensor, order: Tensor | None, members: Tensor) -> Tensor:
        """``units`` less their ``means``, ``[B, H, U, D]``."""
        means = means.to(x.dtype).unflatten(2, (self.number, -1))
        return (self.units(x, order, members) - means[..., None, :]).masked_fill(~members[..., None], 0)

    def sample(self) -> tuple[Tensor, Tensor]:
        """(int64 ``[N, n]``: places of the queries that speak for a block, bool ``[N, n]``: those that are there).

        One of each of n equal runs of the block's tokens; all tokens where there are no more.
        """
        number = sampled_queries(self.longest)
        run = torch.arange(number, device=self.lengths.device)
        low = run * self.lengths[:, None] // number
        length = (run + 1) * self.lengths[:, None] // number - low
        # Places spread evenly by the golden ratio, and not in step with the lines of a picture.
        return (low + (run * 40503 % 65536 * length >> 16)).clamp(max=self.longest - 1), length > 0

    def principal_order(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """(``Estimate.order`` of two units, of finite keys ``[B, Hkv, N, L, D]``: tokens whose keys lie lower on the block's first
        principal direction, then the others; of other blocks' places 0; int64 ``[B, Hkv, N]``: how many lie lower)."""
        size = self.lengths.clamp(min=1)[:, None, None]
        spread = (k - k.sum(3, keepdim=True) / size).masked_fill(~self.valid[..., None], 0)
        variance = spread.mT @ spread
        # From the diagonal, so that nothing is drawn; 1 keeps blocks of one key apart from 0 / 0.
        direction = 1 + variance.diagonal(dim1=-2, dim2=-1)[..., None] / size
        for _ in range(ITERATIONS):
            direction = variance @ direction
            direction = direction / torch.linalg.vector_norm(direction, dim=-2, keepdim=True).clamp(min=1e-20)
        found = (spread @ direction)[..., 0].masked_fill(~self.valid, 0)
        # First at the mean, then half way between both units' means.
        middle = torch.zeros_like(found[..., :1])
        for _ in range(CUTS):
            below = (found < middle) & self.valid
            number, total = below.sum(-1, keepdim=True), found.where(below, 0).sum(-1, keepdim=True)
            rest = self.lengths[:, None] - number
            between = (total / number.clamp(min=1) + (found.sum(-1, keepdim=True) - total) / rest.clamp(min=1)) / 2
            middle = torch.where((number > 0) & (rest > 0), between, middle)
        lower = (found < middle) & self.valid
        places = ((~lower).long() + (~self.valid).long()).argsort(dim=-1, stable=True)
        return self.join((places + self.starts[:, None])[..., None])[..., 0].int(), lower.sum(-1)


def _listed(counts: Tensor, indices: Tensor, rows: int, number: int, heads: int) -> Tensor:
    """bool ``[B or 1, H or 1, N, K]``: which of ``number`` key blocks each of the first ``rows`` query blocks lists; other ids name
    nothing."""
    mask = scatter_mask(indices[:, :, :rows], prefix_mask(counts[:, :, :rows], indices.shape[3]), number)
    return mask if mask.shape[1] == 1 else per_query_head(mask, heads)


def _bias(log_count: Tensor, half_variance: Tensor) -> Tensor:
    """``[B, H, N, U]``: what a unit's logit has beside its mean key's."""
    return per_query_head(log_count, half_variance.shape[1])[:, :, None] + half_variance.clamp(max=CAP)


def _weights(q: Tensor, k_mean: Tensor, bias: Tensor, blocks: _Cut, scale: float) -> tuple[Tensor, Tensor]:
    """(w ``[B, H, P, U]``, z_T ``[B, H, P]``); 0 and -inf in rows that estimate nothing."""
    logits = scale * q @ per_query_head(k_mean, q.shape[1]).to(q.dtype).mT + bias.index_select(2, blocks.of_token)
    nothing = logits.isneginf().all(-1, keepdim=True) | ~blocks.inside[:, None]
    logits = logits.masked_fill(nothing, 0)
    return logits.softmax(-1).masked_fill(nothing, 0), logits.logsumexp(-1).masked_fill(nothing[..., 0], -torch.inf)


def _covariances(k: Tensor, v: Tensor, k_mean: Tensor, v_mean: Tensor, log_count: Tensor, order: Tensor | None, blocks: _Cut) -> Tensor:
    """C, ``[B, Hkv, U, D * D]``."""
    members, counts = blocks.members(log_count)
    k_spread, v_spread = (blocks.deviations(x.to(compute_dtype(k)), mean, order, members) for x, mean in ((k, k_mean), (v, v_mean)))
    return (k_spread.mT @ v_spread / counts[..., None, None]).flatten(2, 3).flatten(3)


def _matrices(covariances: Tensor, mixture: Tensor, dim: int) -> Tensor:
    """M, ``[B, H, N, D, D]``."""
    return (mixture @ per_query_head(covariances.to(mixture.dtype), mixture.shape[1])).unflatten(3, (dim, dim))


def _shares(exact_lse: Tensor, estimate_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, the merged lse): the parts' shares of the softmax, which add up to 1 however large lse is; 1 and 0 where nothing is
    estimated."""
    larger = torch.maximum(exact_lse, estimate_lse)
    larger = larger.masked_fill(larger.isneginf(), 0)
    exact, estimated = (exact_lse - larger).exp(), (estimate_lse - larger).exp()
    total, nothing = exact + estimated, estimate_lse.isneginf()
    return (exact / total).masked_fill(nothing, 1), (estimated / total).masked_fill(nothing, 0), larger + total.log()


def _where_some(share: Tensor, x: Tensor) -> Tensor:
    """Rows of the exact part, 0 where it has no share of the softmax: what it holds there is ignored."""
    return x.masked_fill((share == 0)[..., None], 0)
