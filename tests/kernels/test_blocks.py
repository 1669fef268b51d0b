"""BlockLists: every conversion there and back, the transpose, and what the constructor refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import everywhere, inputs, patterns
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ssta.kernels import BlockLists, block_sparse_attention, merge_attention

SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 6), st.integers(1, 7))


def random_mask(shape, density=0.5):
    return torch.rand(shape) < density


@given(SHAPES)
def test_mask_there_and_back(shape):
    mask = random_mask(shape)
    lists = BlockLists.from_mask(mask, 16, 32)
    assert torch.equal(lists.to_mask(), mask)
    assert lists.density() == mask.float().mean()
    assert torch.equal(lists.counts, mask.sum(-1).int())
    lists.check_values(shape[2] * 16, shape[3] * 32)


def test_mask_without_batch_and_heads_is_shared():
    mask = random_mask((3, 4))
    assert torch.equal(BlockLists.from_mask(mask, 16, 16).to_mask(), mask[None, None])
    assert BlockLists.from_mask(random_mask((2, 3, 4)), 16, 16).counts.shape == (1, 2, 3)


def test_capacity_cuts_the_longest_lists():
    mask = torch.tensor([[True, True, False, True], [False, False, True, False]])
    lists = BlockLists.from_mask(mask, 16, 16, capacity=2)
    assert lists.capacity == 2
    assert torch.equal(lists.to_mask()[0, 0], torch.tensor([[True, True, False, False], [False, False, True, False]]))


@given(SHAPES)
def test_transpose_is_the_transposed_mask(shape):
    mask = random_mask(shape)
    lists = BlockLists.from_mask(mask, 16, 32)
    assert torch.equal(lists.transpose().to_mask(), mask.mT)
    assert lists.transpose().q_offsets == 32 and lists.transpose().kv_offsets == 16
    assert torch.equal(lists.transpose().transpose().to_mask(), mask)


@given(SHAPES, st.data())
def test_topk_there_and_back(shape, data):
    k = data.draw(st.integers(1, shape[3]))
    indices = torch.rand(shape).topk(k).indices
    lists = BlockLists.from_topk(indices, 16, 16, num_kv_blocks=shape[3])
    assert torch.equal(lists.to_topk(), indices.int())
    assert torch.equal(lists.to_mask(), torch.zeros(shape, dtype=torch.bool).scatter(-1, indices, True))


def test_topk_marks_unused_entries():
    lists = BlockLists.from_mask(torch.tensor([[True, False], [False, False]]), 16, 16)
    assert lists.to_topk().tolist() == [[[[0, -1], [-1, -1]]]]


@given(SHAPES)
def test_bsr_there_and_back(shape):
    mask = random_mask(shape)
    lists = BlockLists.from_mask(mask, 16, 16)
    for batch in range(shape[0]):
        for head in range(shape[1]):
            indptr, indices = lists.to_bsr(batch, head)
            dense = mask[batch, head]
            assert torch.equal(indptr.diff(), dense.sum(-1).int())
            assert torch.equal(indices, dense.nonzero()[:, 1].int())
            again = BlockLists.from_bsr(indptr, indices, 16, 16, num_kv_blocks=shape[3])
            assert torch.equal(again.to_mask()[0, 0], dense)


@given(SHAPES)
def test_flex_block_mask_there_and_back(shape):
    mask = random_mask(shape)
    q_len, kv_len = shape[2] * 128, shape[3] * 128
    flex = BlockLists.from_mask(mask, 128, 128).to_block_mask(q_len, kv_len)
    assert flex.seq_lengths == (q_len, kv_len)
    assert torch.equal(flex.to_dense().bool(), mask)
    assert torch.equal(BlockLists.from_block_mask(flex).to_mask(), mask)


def test_flex_partial_blocks():
    def causal(b, h, q, k):
        return q >= k

    with pytest.raises(ValueError, match="block_mask must not mask inside a block.*causal"):
        BlockLists.from_block_mask(create_block_mask(causal, None, None, 512, 512, device="cpu"))
    # A mask_mod that only ever drops whole blocks is fine, and so is a partial list without a mask_mod.
    whole = create_block_mask(lambda b, h, q, k: q // 128 >= k // 128, None, None, 512, 512, device="cpu")
    assert torch.equal(BlockLists.from_block_mask(whole).to_mask()[0, 0], torch.ones(4, 4).tril().bool())
    counts, indices = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    for some in ((counts, indices), (counts[0], indices[0]), (counts[0, 0].long(), indices[0, 0].long())):
        unmasked = BlockMask.from_kv_blocks(*some, BLOCK_SIZE=128)
        assert BlockLists.from_block_mask(unmasked).to_mask().tolist() == [[[[False, True], [True, True]]]]


def test_ragged_blocks_have_no_flex_form():
    lists = BlockLists.from_mask(torch.ones(2, 2, dtype=torch.bool), torch.tensor([0, 5, 9], dtype=torch.int32), 16)
    with pytest.raises(ValueError, match="uniform blocks"):
        lists.to_block_mask(9, 32)


def test_bounds_of_uniform_and_ragged_blocks():
    lists = BlockLists.from_mask(torch.ones(3, 2, dtype=torch.bool), 16, torch.tensor([0, 5, 9], dtype=torch.int32),
                                 kv_lengths=torch.tensor([[[2, 4]], [[5, 0]]], dtype=torch.int32))
    starts, sizes = lists.q_bounds(40)
    assert starts.tolist() == [[[0, 16, 32]]] and sizes.tolist() == [[[16, 16, 8]]]
    starts, sizes = lists.kv_bounds(9)
    assert starts.tolist() == [[[0, 5]], [[0, 5]]] and sizes.tolist() == [[[2, 4]], [[5, 0]]]
    assert lists.max_q_length == 16 and lists.max_kv_length == 5


def _fields(**changes):
    good = dict(counts=torch.ones(1, 2, 3, dtype=torch.int32), indices=torch.zeros(1, 2, 3, 4, dtype=torch.int32),
                q_offsets=16, kv_offsets=16)
    return good | changes


@pytest.mark.parametrize("changes, error, message", [
    (dict(counts=[1, 2]), TypeError, "counts must be a tensor, got list"),
    (dict(counts=torch.ones(1, 2, 3)), TypeError, "counts must be int32, got torch.float32"),
    (dict(counts=torch.ones(2, 3, dtype=torch.int32)), ValueError, r"counts must be \[batch, heads, query blocks\], got shape \(2, 3\)"),
    (dict(indices=torch.zeros(1, 2, 4, 4, dtype=torch.int32)), ValueError, r"indices must be .* = \[1, 2, 3, any\], got shape"),
    (dict(q_offsets=0), ValueError, "q_offsets must be at least 1, got 0"),
    (dict(kv_offsets=True), TypeError, "kv_offsets must be an int"),
    (dict(q_offsets=torch.zeros(5, dtype=torch.int32)), ValueError, r"q_offsets must be .* = \[any, any, 4\], got shape \(1, 1, 5\)"),
    (dict(q_lengths=torch.zeros(3)), TypeError, "q_lengths must be int32"),
    (dict(kv_lengths=torch.zeros(3, dtype=torch.int32)), ValueError, "num_kv_blocks must be given with kv_lengths"),
    (dict(kv_offsets=torch.zeros(5, dtype=torch.int32), num_kv_blocks=3), ValueError, "num_kv_blocks must be 4"),
    (dict(num_kv_blocks=np.bool_(True)), TypeError, "num_kv_blocks must be an int"),
    (dict(num_kv_blocks=torch.tensor(3)), TypeError, "num_kv_blocks must be an int"),
    (dict(max_q_length=15), ValueError, "max_q_length must be q_offsets = 16 or None with uniform blocks, got 15"),
    (dict(max_kv_length=17), ValueError, "max_kv_length must be kv_offsets = 16 or None with uniform blocks, got 17"),
])
def test_constructor_refuses(changes, error, message):
    with pytest.raises(error, match=message):
        BlockLists(**_fields(**changes))


@pytest.mark.parametrize("changes, message", [
    (dict(counts=torch.full((1, 2, 3), 5, dtype=torch.int32)), r"counts must lie in \[0, 4\], got 5"),
    (dict(indices=torch.full((1, 2, 3, 4), 3, dtype=torch.int32)), r"indices must lie in \[0, 3\), got 3"),
    (dict(counts=torch.full((1, 2, 3), 2, dtype=torch.int32)), "repeated id"),
    (dict(q_offsets=torch.tensor([0, 20, 10, 48], dtype=torch.int32)), "q_offsets must ascend from 0 to 48"),
    (dict(q_offsets=torch.tensor([0, 10, 20, 40], dtype=torch.int32)), "q_offsets must ascend from 0 to 48"),
    (dict(q_lengths=torch.tensor([16, 17, 3], dtype=torch.int32)), "q_lengths must lie between 0 and the block's tokens"),
])
def test_checked_constructor_reads_the_values(changes, message):
    BlockLists.checked(**_fields(), q_len=48, kv_len=48)
    with pytest.raises(ValueError, match=message):
        BlockLists.checked(**_fields(**changes), q_len=48, kv_len=48)


def test_conversions_refuse_what_they_cannot_read():
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        BlockLists.from_mask(torch.ones(2, 2), 16, 16)
    with pytest.raises(TypeError, match="mask must be a bool tensor, got numpy.ndarray of bool, of which torch.as_tensor makes one"):
        BlockLists.from_mask(np.ones((2, 2), dtype=bool), 16, 16)
    with pytest.raises(TypeError, match="q_offsets must be int32, got torch.int64; .int\\(\\) converts it"):
        BlockLists.from_mask(torch.ones(2, 2, dtype=torch.bool), torch.tensor([0, 3, 5]), 16)
    with pytest.raises(ValueError, match="max_q_length must be given with q_offsets that hold no values"):
        BlockLists.from_mask(torch.ones(2, 2, dtype=torch.bool, device="meta"), torch.empty(3, dtype=torch.int32, device="meta"), 16)
    for read in (lambda lists: lists.check_values(32, 32), lambda lists: lists.to_bsr()):
        with pytest.raises(ValueError, match="counts must hold values, got a meta tensor"):
            read(BlockLists.from_mask(torch.ones(2, 2, dtype=torch.bool, device="meta"), 16, 16))
    with pytest.raises(ValueError, match="mask must be"):
        BlockLists.from_mask(torch.ones(2, dtype=torch.bool), 16, 16)
    with pytest.raises(TypeError, match="indices must be an int32 or int64 tensor"):
        BlockLists.from_topk(torch.ones(2, 2), 16, 16)
    with pytest.raises(ValueError, match=r"indptr must be \[Nq \+ 1\]"):
        BlockLists.from_bsr(torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 16, 16, num_kv_blocks=2)
    with pytest.raises(ValueError, match="num_kv_blocks must be given for to_mask"):
        BlockLists(**_fields()).to_mask()


@pytest.mark.parametrize("call, error, message", [
    (lambda b: BlockLists.from_mask(torch.ones(2, 3, dtype=torch.bool), 4, 4, num_kv_blocks=2), ValueError,
     "num_kv_blocks must be the mask's 3 columns or left out, got 2"),
    (lambda b: BlockLists.from_bsr(torch.zeros(2, dtype=torch.int32, device="meta"), torch.zeros(1).int(), 4, 4, num_kv_blocks=2),
     ValueError, "indices must be on meta, got cpu"),
    (lambda b: b.to_bsr(1), ValueError, r"batch must lie in \[-1, 1\), got 1"),
    (lambda b: b.to_bsr(0, 9), ValueError, r"head must lie in \[-2, 2\), got 9"),
    (lambda b: b.to_bsr(-7), ValueError, "batch must be at least -1, got -7"),
    (lambda b: b.to_bsr("0"), TypeError, "batch must be an int, got '0'"),
    (lambda b: b.to_block_mask("a", 48), TypeError, "q_len must be an int, got 'a'"),
    (lambda b: b.to_block_mask(48, None), TypeError, "kv_len must be an int, got None"),
    (lambda b: b.to_block_mask(48, 2.5), TypeError, "kv_len must be an int, got 2.5"),
    (lambda b: b.to_block_mask(-5, 48), ValueError, "q_len must be at least 1, got -5"),
    (lambda b: b.to_block_mask(100, 48), ValueError, "q_len must be cut into 3 blocks of 16 tokens, got 100"),
    (lambda b: b.to_block_mask(48, 3), ValueError, "kv_len must be cut into 3 blocks of 16 tokens, got 3"),
    (lambda b: BlockLists.from_mask(torch.ones(0, 0, dtype=torch.bool), 4, 4).to_block_mask(0, 0), ValueError, "q_len must be at least 1"),
    (lambda b: b.check_values(None, 48), TypeError, "q_len must be an int, got None"),
    (lambda b: b.check_values(48, "48"), TypeError, "kv_len must be an int, got '48'"),
])
def test_methods_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call(BlockLists.from_mask(torch.ones(1, 2, 3, 3, dtype=torch.bool), 16, 16))


@pytest.mark.parametrize("number", [2**32, 2**32 + 1, 2**31, torch.iinfo(torch.int64).min, -1])
def test_ids_of_64_bits_that_name_no_block_are_absent(number):
    absent = [[[[False, False]]]]
    assert BlockLists.from_topk(torch.tensor([[[number]]]), 4, 4, num_kv_blocks=2).to_mask().tolist() == absent
    assert BlockLists.from_bsr(torch.tensor([0, 1]), torch.tensor([number]), 4, 4, num_kv_blocks=2).to_mask().tolist() == absent


@pytest.mark.parametrize("indptr, mask", [
    ([-4, 1, 2], [[True, False], [False, True]]),
    ([0, 2**32 + 1, 2], [[True, True], [False, False]]),
    ([0, 2, 1], [[True, True], [False, False]]),
    ([0, 1, 9], [[True, False], [False, True]]),
])
def test_rows_of_bsr_are_cut_at_the_indices(indptr, mask):
    lists = BlockLists.from_bsr(torch.tensor(indptr), torch.tensor([0, 1]), 4, 4, num_kv_blocks=2)
    assert lists.to_mask()[0, 0].tolist() == mask


def test_zero_sizes():
    none = torch.zeros(0, 1, 3, dtype=torch.int32)
    lists = BlockLists(none, torch.zeros(0, 1, 3, 2, dtype=torch.int32), torch.zeros(0, 1, 4, dtype=torch.int32), 4)
    assert lists.max_q_length == 1
    assert BlockLists.from_mask(torch.ones(0, 0, dtype=torch.bool), 4, 4).num_q_blocks == 0


def test_numpy_integers_are_integers():
    mask = torch.ones(3, 2, dtype=torch.bool)
    lists = BlockLists.from_mask(mask, np.int64(16), np.int32(8), capacity=np.int8(2), num_kv_blocks=np.int64(2))
    assert type(lists.q_offsets) is int and type(lists.num_kv_blocks) is int and type(lists.max_kv_length) is int
    lists.check_values(np.int64(48), np.int64(16))
    assert lists.to_block_mask(np.int64(48), np.int64(16)).seq_lengths == (48, 16)


# Looking at lists, and at parts of them


@pytest.mark.parametrize("name", patterns("cpu"))
def test_fields_there_and_back(name):
    lists = patterns("cpu")[name][0]
    again = BlockLists.from_fields(*lists.to_fields())
    assert all(x is None or isinstance(x, (torch.Tensor, int)) for x in lists.to_fields())
    for field in vars(again):
        old, new = getattr(lists, field), getattr(again, field)
        assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new


@pytest.mark.parametrize("name", patterns("cpu"))
def test_print_says_the_sizes_in_a_few_lines(name):
    lists = patterns("cpu")[name][0]
    text = str(lists)
    assert f"{lists.num_q_blocks} query blocks" in text
    if lists.num_kv_blocks is not None:
        assert f"of {lists.num_kv_blocks} key blocks" in text and f"density {float(lists.density()):.3f}" in text
    assert len(text.splitlines()) <= 18 and max(map(len, text.splitlines())) <= 140
    assert "\n" not in repr(lists) and "tensor(" not in repr(lists)
    assert str(lists.to("meta")) == repr(lists.to("meta")), "what has no values must not be read"


def test_print_draws_the_first_mask():
    mask = torch.tensor([[True, False, False], [False, True, True]])
    assert str(BlockLists.from_mask(mask, 4, 4)).splitlines()[1:] == ["#..", ".##"]


def test_to_moves_every_tensor():
    lists = patterns("cpu")["ragged"][0]
    assert lists.to("cpu") is lists
    moved = lists.to("meta")
    for field, x in vars(lists).items():
        assert getattr(moved, field).device.type == "meta" if isinstance(x, torch.Tensor) else getattr(moved, field) == x


def _of_group(x, batch, kv_head, kv_heads):
    """One batch element's part of a field, of a key head and its query heads; what is shared stays so."""
    if not isinstance(x, torch.Tensor):
        return x
    x, each = x[batch:batch + 1] if len(x) > 1 else x, x.shape[1] // kv_heads
    return x[:, kv_head * each:(kv_head + 1) * each] if x.shape[1] > 1 else x


@everywhere
@pytest.mark.parametrize("name", patterns("cpu"))
def test_a_batch_element_and_its_heads_alone(device, impl, name):
    lists, heads, kv_heads, q_len, kv_len = patterns(device)[name]
    q, k, v = inputs(2, heads, kv_heads, q_len, kv_len, 16, device, impl=impl)
    whole = block_sparse_attention(q, k, v, lists, impl=impl)
    for batch in range(2):
        for kv_head in range(kv_heads):
            group = heads // kv_heads
            queries = slice(kv_head * group, (kv_head + 1) * group)
            part = BlockLists.from_fields(*[_of_group(x, batch, kv_head, kv_heads) for x in lists.to_fields()])
            alone = block_sparse_attention(q[batch:batch + 1, queries], *(x[batch:batch + 1, kv_head:kv_head + 1] for x in (k, v)), part,
                                           impl=impl)
            # How many tiles a launch has decides which lists are split, and so the order of sums.
            close = dict(rtol=1e-3, atol=1e-3) if impl == "hopper" else {}
            torch.testing.assert_close(alone[0], whole[batch, queries], **close)


@everywhere
@pytest.mark.parametrize("name", patterns("cpu"))
def test_shares_of_the_keys_merge_to_the_whole(device, impl, name):
    """Attention to key blocks [0, cut) and [cut, Nk), merged by lse, is attention to all."""
    lists, heads, kv_heads, q_len, kv_len = patterns(device)[name]
    if name == "offsets per key head":  # a share begins at the same token for all
        lists = BlockLists.from_mask(lists.to_mask(), lists.q_offsets, lists.kv_offsets[:, :1])
    q, k, v = inputs(2, heads, kv_heads, q_len, kv_len, 16, device, impl=impl)
    whole, whole_lse = block_sparse_attention(q, k, v, lists, return_lse=True, impl=impl)
    starts, parts = lists.kv_bounds(kv_len)[0][0, 0].tolist() + [kv_len], []
    number = len(starts) - 1
    for first, last in ((0, number // 2), (number // 2, number)):
        offsets, lengths = lists.kv_offsets, lists.kv_lengths
        share = BlockLists.from_mask(
            replace(lists, num_kv_blocks=number).to_mask()[..., first:last], lists.q_offsets,
            offsets if isinstance(offsets, int) else offsets[..., first:last + 1] - offsets[..., first:first + 1],
            q_lengths=lists.q_lengths, kv_lengths=None if lengths is None else lengths[..., first:last].contiguous())
        share.check_values(q_len, starts[last] - starts[first])
        parts.append(block_sparse_attention(q, *(x[:, :, starts[first]:starts[last]] for x in (k, v)), share, return_lse=True, impl=impl))
    merged, lse = merge_attention(*zip(*parts))
    assert (merged - whole).abs().max() < 4e-3
    torch.testing.assert_close(lse, whole_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("make, name", [
    (lambda: BlockLists.from_mask(torch.eye(2).bool().to_sparse(), 4, 4), "mask"),
    (lambda: BlockLists.from_topk(torch.eye(2).int().to_sparse(), 4, 4), "indices"),
    (lambda: BlockLists.from_bsr(torch.tensor([0, 1, 2]), torch.tensor([0, 1]).to_sparse(), 4, 4, num_kv_blocks=2), "indices"),
], ids=["mask", "top-k", "BSR"])
def test_what_lists_are_made_of_has_strides(make, name):
    with pytest.raises(TypeError, match=f"{name} must be a dense, strided tensor"):
        make()


def test_axes_that_share_their_offsets_share_their_bounds():
    offsets, lengths = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([[[3, 1]]], dtype=torch.int32)
    blocks = BlockLists(torch.zeros(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 0, dtype=torch.int32), offsets, offsets)
    whole = blocks.relisted(blocks.counts, blocks.indices)
    assert all(a is b for a, b in zip(whole.q_bounds(8), whole.kv_bounds(8)))
    starts = torch.tensor([[[0, 3]]], dtype=torch.int32)
    for known in ((), (starts, 8)):
        cut = blocks.relisted(blocks.counts, blocks.indices, lengths, *known)
        assert all(a is b for a, b in zip(cut.q_bounds(8), cut.kv_bounds(8)))
        assert [x.tolist() for x in cut.q_bounds(8)] == [[[[0, 3]]], [[[3, 1]]]]
