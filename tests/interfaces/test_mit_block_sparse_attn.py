"""Block-Sparse-Attention's interface: every kind of head against float64, by loops over the definition; and as programs call it."""

from functools import partial

import pytest
import torch
from gpu_laws import assert_never_waits_and_fits_a_cuda_graph
from interface_oracle import EVERYWHERE, assert_exact, dense, with_gradients

from ssta.interfaces import (
    block_sparse_attn_func,
    block_streaming_attn_func,
    install,
    pad_input,
    token_streaming_attn_func,
    unpad_input,
)

BLOCK = 128
# (queries, keys) of packed sequences: fewer, more and as many queries, without keys, without queries.
LENGTHS = ((150, 300), (290, 140), (200, 200), (3, 0), (0, 5))
KINDS = [0, 1, -1, 1, -2, 0]  # of six heads over three of keys


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(lengths, device):
    return ints([0, *torch.tensor(lengths).cumsum(0).tolist()], device)


def streamed_blocks(row, q_len, k_len, sink, local, causal):
    """As the published tests make them: the key blocks of a block of queries."""
    start = max((q_len - k_len) // BLOCK, 0) if causal else 0
    if row < start:
        return set()
    past = -(-max(k_len - q_len, 0) // BLOCK) + 1 + row - start if causal else -(-k_len // BLOCK)
    return {*range(sink), *range(max(past - local, 0), past)}


def visible(lengths, kinds, info, mask, causal, exact=False):
    """bool [H, Tq, Tk], one sequence and head after the other."""
    seen = torch.zeros(len(kinds), sum(q for q, _ in lengths), sum(k for _, k in lengths), dtype=torch.bool)
    q_at = k_at = 0
    for b, (q_len, k_len) in enumerate(lengths):
        query, key = torch.arange(q_len)[:, None], torch.arange(k_len)
        last = query + k_len - q_len
        for h, kind in enumerate(kinds):
            sink, local = info[2 * h:2 * h + 2]
            if kind > 0:
                kept = mask[b, kinds[:h].count(1)][query // BLOCK, key // BLOCK]
            elif kind < 0 and exact:
                kept = (key < sink) | (key > last - local)
            elif kind < 0:
                kept = torch.zeros(-(-q_len // BLOCK), -(-k_len // BLOCK), dtype=torch.bool)
                for row, blocks in enumerate(kept):
                    for block in streamed_blocks(row, q_len, k_len, sink, local, causal) & {*range(len(blocks))}:
                        blocks[block] = True
                kept = kept[query // BLOCK, key // BLOCK]
            else:
                kept = torch.ones(q_len, k_len, dtype=torch.bool)
            seen[h, q_at:q_at + q_len, k_at:k_at + k_len] = kept & (key <= last) if causal else kept
        q_at, k_at = q_at + q_len, k_at + k_len
    return seen


class Case:
    """Packed inputs with more tokens behind the last sequence, and what is seen of them."""

    def __init__(self, device, dtype, info, *, causal, exact=False, lengths=LENGTHS, kinds=KINDS):
        self.lengths = lengths
        q_lengths, k_lengths = zip(*lengths)
        self.inputs = [torch.randn(sum(own) + 7, heads, 64, device=device, dtype=dtype)
                       for own, heads in ((q_lengths, len(kinds)), (k_lengths, len(kinds) // 2), (k_lengths, len(kinds) // 2))]
        self.longest = max(q_lengths), max(k_lengths)
        mask = torch.rand(len(lengths), kinds.count(1), *(-(-x // BLOCK) for x in self.longest)) < 0.5
        mask[0, :, 0] = False
        self.options = dict(cu_seqlens_q=offsets(q_lengths, device), cu_seqlens_k=offsets(k_lengths, device),
                            head_mask_type=ints(kinds, device), streaming_info=ints(info, device), base_blockmask=mask.to(device),
                            max_seqlen_q_=self.longest[0], max_seqlen_k_=self.longest[1], p_dropout=0.0, is_causal=causal,
                            exact_streaming=exact)
        seen = visible(lengths, kinds, info, mask, causal, exact)
        self.seen = torch.nn.functional.pad(seen, (0, 7, 0, 7)).to(device)

    def attend(self, *inputs, **changes):
        """(out, lse [H, Tq]), lse taken out of upstream's padded form, where it must be +inf past a sequence's end."""
        out, padded, nothing = block_sparse_attn_func(*inputs, **self.options | changes, return_attn_probs=True)
        assert out.shape == inputs[0].shape and out.dtype == inputs[0].dtype and nothing.numel() == 0
        assert padded.shape == (len(self.lengths), inputs[0].shape[1], self.longest[0])
        for b, (q_len, _) in enumerate(self.lengths):
            assert (padded[b, :, q_len:] == float("inf")).all()
        behind = padded.new_full((padded.shape[1], 7), float("inf"))
        lse = torch.cat([*(padded[b, :, :q_len] for b, (q_len, _) in enumerate(self.lengths)), behind], 1)
        return out, torch.where(lse == float("inf"), float("-inf"), lse)

    def truth(self, *inputs):
        out, lse = dense(*(x.transpose(0, 1)[None] for x in inputs), self.seen[None])
        return out[0].transpose(0, 1), lse[0]


@pytest.mark.parametrize("device, dtype", EVERYWHERE)
@pytest.mark.parametrize("causal", [False, True])
def test_every_kind_of_head(device, dtype, causal):
    case = Case(device, dtype, [1, 2, 1, 2, 1, 1, 0, 1, 0, 2, 1, 1], causal=causal)
    weights = torch.randn_like(case.inputs[0]), torch.randn(6, len(case.inputs[0]), device=device)
    assert_exact(*(with_gradients(f, [x.to(t) for x in case.inputs], weights) for f, t in (
        (case.attend, dtype), (case.truth, dtype), (case.truth, torch.float64))))


@pytest.mark.parametrize("device, dtype", EVERYWHERE)
@pytest.mark.parametrize("sink, local", [(70, 150), (0, 1), (128, 128), (70, 20), (300, 20)])
def test_streaming_by_tokens(device, dtype, sink, local):
    case = Case(device, dtype, [sink, local] * 6, causal=True, exact=True)
    results = [[x.detach() for x in f(*(x.to(t) for x in case.inputs))] for f, t in (
        (case.attend, dtype), (case.truth, dtype), (case.truth, torch.float64))]
    assert_exact(*results)
    leaf = case.inputs[0].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="exact_streaming has no gradient"):
        case.attend(leaf, *case.inputs[1:])[0].sum().backward()


def test_one_tensor_of_offsets_is_no_copy_and_changes_nothing():
    case = Case("cpu", torch.float64, [1, 1] * 6, causal=True, lengths=((200, 200), (130, 130)))
    out, _ = case.attend(*case.inputs)
    assert torch.equal(case.attend(*case.inputs, cu_seqlens_k=case.options["cu_seqlens_q"])[0], out)
    # A longer buffer of keys behind the same sequences: the diagonal stays where it is.
    longer = [case.inputs[0], *(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 90)) for x in case.inputs[1:])]
    assert torch.equal(case.attend(*longer, cu_seqlens_k=case.options["cu_seqlens_q"])[0], out)


def test_numbers_counted_up_beforehand():
    case = Case("cpu", torch.float64, [1, 1] * 4, causal=False, kinds=[1, 1, 0, 1])
    out, _ = case.attend(*case.inputs)
    assert torch.equal(case.attend(*case.inputs, head_mask_type=ints([1, 2, 0, 3], "cpu"))[0], out)
    masks = case.options["base_blockmask"]
    assert torch.equal(case.attend(*case.inputs, head_mask_type=ints([3, 2, 0, 2], "cpu"), base_blockmask=masks[:, [2, 1, 0]])[0][:, 0],
                       case.attend(*case.inputs, base_blockmask=masks)[0][:, 0])
    assert torch.equal(case.attend(*case.inputs, base_blockmask=masks.to(torch.uint8))[0], out)
    nothing = case.attend(*case.inputs, head_mask_type=ints([4, -1, 0, 1], "cpu"), streaming_info=None)[0]
    assert not nothing[:, :2].any() and torch.equal(nothing[:, 2], out[:, 2]) and nothing[:, 3].any()


def test_the_streaming_functions():
    case = Case("cpu", torch.float64, [1, 1, 1, 2, 0, 1, 1, 0], causal=True, kinds=[0, -1, -1, 0])
    names = ("cu_seqlens_q", "cu_seqlens_k", "head_mask_type", "streaming_info", "max_seqlen_q_", "max_seqlen_k_")
    arguments = [*case.inputs, *(case.options[name] for name in names)]
    assert torch.equal(block_streaming_attn_func(*arguments, 0.0), case.attend(*case.inputs)[0])
    assert torch.equal(block_streaming_attn_func(*arguments, 0.0, is_causal=False), case.attend(*case.inputs, is_causal=False)[0])
    assert torch.equal(token_streaming_attn_func(*arguments), case.attend(*case.inputs, exact_streaming=True)[0])
    scaled = token_streaming_attn_func(*arguments, softmax_scale=0.5, return_attn_probs=True)
    assert len(scaled) == 3 and torch.equal(scaled[0], case.attend(*case.inputs, exact_streaming=True, softmax_scale=0.5)[0])


def windows(x, heads):
    """[1, f, h, w, heads * dim] as FlashVSR's [f * h * w, heads, dim]: windows of 2 x 8 x 8 behind one another."""
    _, f, h, w, _ = x.shape
    x = x.view(f // 2, 2, h // 8, 8, w // 8, 8, heads, -1)
    return x.permute(0, 2, 4, 1, 3, 5, 6, 7).flatten(0, 5)


@pytest.mark.parametrize("device, dtype", EVERYWHERE)
def test_flashvsr(device, dtype):
    """Its streamed step: two latent frames to themselves and to cached windows; the best windows within 9 x 9 of the same head, kept by a
    threshold over all windows of the step, and its call, none of whose arguments stays at its default."""
    heads, cached, f, h, w, topk = 3, 2, 2, 16, 24, 14
    make = partial(torch.randn, device=device, dtype=dtype)
    q, k, v = (windows(make(1, f, h, w, heads * 64), heads) for _ in range(3))
    per_step = len(q) // BLOCK
    k, v = (torch.cat([make(cached * len(q), heads, 64), x]) for x in (k, v))
    # In float32, where no two scores are alike.
    q_means, k_means = (x.float().unflatten(0, (-1, BLOCK)).mean(1).transpose(0, 1) for x in (q, k))
    row, column = torch.arange(per_step, device=device) // (w // 8), torch.arange(per_step, device=device) % (w // 8)
    near = ((row[:, None] - row).abs() <= 4) & ((column[:, None] - column).abs() <= 1)
    scores = (q_means @ k_means.mT / 8).masked_fill(~near.repeat(1, cached + 1), float("-inf")).softmax(-1)
    threshold = scores.flatten(1).topk(topk + 1).values[:, -1]
    mask = (scores > threshold[:, None, None])[None]
    assert mask.sum() == heads * topk and (mask.sum(-1) == 0).any()

    with install("block_sparse_attn"):
        from block_sparse_attn import block_sparse_attn_func as installed

        out = installed(
            q, k, v, ints([0, len(q)], device), ints([0, len(k)], device), ints([1] * heads, device), None, mask, len(q), len(k), 0.0,
            deterministic=False, softmax_scale=None, is_causal=False, exact_streaming=False, return_attn_probs=False)
    seen = mask.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
    results = [dense(*(x.transpose(0, 1)[None].to(t) for x in (q, k, v)), seen)[0] for t in (dtype, torch.float64)]
    assert_exact([out.transpose(0, 1)[None]], *([x] for x in results))


def test_bert_padding():
    with install("block_sparse_attn"):
        from block_sparse_attn.bert_padding import pad_input as by_name

    assert by_name is pad_input
    padded = torch.randn(3, 5, 2, 4, requires_grad=True)
    valid = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 0]])
    tokens, places, cu_seqlens, longest = unpad_input(padded, valid)
    assert torch.equal(tokens, padded[valid.bool()]) and cu_seqlens.tolist() == [0, 2, 2, 5] and longest == 3
    assert cu_seqlens.dtype == torch.int32 and places.tolist() == [0, 1, 10, 12, 13]
    back = pad_input(tokens, places, 3, 5)
    assert torch.equal(back, padded * valid[:, :, None, None])
    back.sum().backward()
    assert torch.equal(padded.grad, valid[:, :, None, None].expand_as(padded).float())
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, S\] = \[3, 5\], got shape \(3, 4\)"):
        unpad_input(padded, valid[:, :4])
    with pytest.raises(ValueError, match=r"indices must be \[n\] = \[5\], got shape \(4,\)"):
        pad_input(tokens, places[:4], 3, 5)


@pytest.mark.parametrize("changes, error, message", [
    (dict(q=torch.zeros(1, 200, 2, 64)), ValueError, r"q must be \[tokens, heads, head_dim\]"),
    (dict(v=torch.zeros(300, 1, 32)), ValueError, "v must have k's shape"),
    (dict(p_dropout=0.1), ValueError, "p_dropout must be 0, got 0.1"),
    (dict(head_mask_type=torch.zeros(3, dtype=torch.int32)), ValueError, r"head_mask_type must be \[heads\] = \[2\], got shape \(3,\)"),
    (dict(head_mask_type=[0, 0]), TypeError, "head_mask_type must be a tensor, got list"),
    (dict(head_mask_type=torch.zeros(2)), TypeError, "head_mask_type must be int32 or int64, got torch.float32"),
    (dict(streaming_info=torch.zeros(2, 2, dtype=torch.int32)), ValueError, r"streaming_info must be \[2 \* heads\] = \[4\]"),
    (dict(base_blockmask=torch.ones(1, 1, 2, 2)), TypeError, "base_blockmask must be bool, uint8, .*, got torch.float32"),
    (dict(base_blockmask=torch.ones(1, 1, 2, 2, dtype=torch.bool)), ValueError, r"base_blockmask must be .* = \[1, any, 2, 3\], got"),
    (dict(cu_seqlens_q=torch.zeros(1, dtype=torch.int32)), ValueError, "cu_seqlens_q must hold at least two entries, got 1"),
    (dict(cu_seqlens_k=torch.zeros(3, dtype=torch.int32)), ValueError, r"cu_seqlens_k must be \[B \+ 1\] = \[2\], got shape \(3,\)"),
    (dict(max_seqlen_q_=0), ValueError, "max_seqlen_q_ must be at least 1, got 0"),
    (dict(max_seqlen_k_=2.5), TypeError, "max_seqlen_k_ must be an int"),
    (dict(is_causal=1), TypeError, "is_causal must be a bool, got int"),
    (dict(softmax_scale=-1.0), ValueError, "scale must be positive"),
    (dict(exact_streaming=True), ValueError, "exact_streaming must be False unless .* got is_causal=False and streaming_info given"),
    (dict(exact_streaming=True, is_causal=True, streaming_info=None), ValueError, "exact_streaming .* streaming_info None"),
])
def test_refuses(changes, error, message):
    arguments = dict(q=torch.zeros(200, 2, 64), k=torch.zeros(300, 1, 64), v=torch.zeros(300, 1, 64), cu_seqlens_q=ints([0, 200], "cpu"),
                     cu_seqlens_k=ints([0, 300], "cpu"), head_mask_type=ints([0, 1], "cpu"), streaming_info=ints([1, 1] * 2, "cpu"),
                     base_blockmask=torch.ones(1, 1, 2, 3, dtype=torch.bool), max_seqlen_q_=200, max_seqlen_k_=300, p_dropout=0.0)
    with pytest.raises(error, match=message):
        block_sparse_attn_func(**arguments | changes)


@pytest.mark.gpu
@pytest.mark.parametrize("causal, exact", [(False, False), (True, False), (True, True)])
def test_never_waits_and_fits_a_cuda_graph(causal, exact):
    case = Case("cuda", torch.bfloat16, [1, 2] * 6, causal=causal, exact=exact)
    assert_never_waits_and_fits_a_cuda_graph(lambda: block_sparse_attn_func(*case.inputs, **case.options))
