"""BlockLists: every conversion there and back, the transpose, and what the constructor refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ssta.kernels import BlockLists

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
    assert lists.transpose() is lists.transpose(), "the transpose must be made once"
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
    (dict(counts=[1, 2]), TypeError, "counts must be an int32 tensor, got list"),
    (dict(counts=torch.ones(1, 2, 3)), TypeError, "counts must be int32, got torch.float32"),
    (dict(counts=torch.ones(2, 3, dtype=torch.int32)), ValueError, r"counts must have 3 dimensions, got shape \(2, 3\)"),
    (dict(indices=torch.zeros(1, 2, 4, 4, dtype=torch.int32)), ValueError, "indices must have counts' shape"),
    (dict(q_offsets=0), ValueError, "q_offsets must be at least 1, got 0"),
    (dict(kv_offsets=True), TypeError, "kv_offsets must be an int"),
    (dict(q_offsets=torch.zeros(5, dtype=torch.int32)), ValueError, "q_offsets must have 4 entries"),
    (dict(q_lengths=torch.zeros(3)), TypeError, "q_lengths must be int32"),
    (dict(kv_lengths=torch.zeros(3, dtype=torch.int32)), ValueError, "num_kv_blocks must be given with kv_lengths"),
    (dict(kv_offsets=torch.zeros(5, dtype=torch.int32), num_kv_blocks=3), ValueError, "num_kv_blocks must be 4"),
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
    with pytest.raises(ValueError, match="mask must be"):
        BlockLists.from_mask(torch.ones(2, dtype=torch.bool), 16, 16)
    with pytest.raises(TypeError, match="indices must be an int32 or int64 tensor"):
        BlockLists.from_topk(torch.ones(2, 2), 16, 16)
    with pytest.raises(ValueError, match="indptr must have one dimension"):
        BlockLists.from_bsr(torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 16, 16, num_kv_blocks=2)
    with pytest.raises(ValueError, match="num_kv_blocks must be given for to_mask"):
        BlockLists(**_fields()).to_mask()
