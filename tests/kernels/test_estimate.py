"""The estimate's kernels against its specification in float64: in Triton's interpreter without a GPU, and on one, every row of the backend
table."""

import dataclasses

import pytest
import torch
from backend_rows import DEVICE, rows
from estimate_cases import estimate_case, no_worse, same_estimates
from gpu_laws import assert_never_waits_and_fits_a_cuda_graph

from ssta.kernels.eager import estimate as eager
from ssta.kernels.estimate import Estimate, useful_heads
from ssta.kernels.portable import estimate, estimate_order

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
both_parts = pytest.mark.parametrize("parts", [1, 2])


def check(case, blocks=None, change=lambda estimates: estimates, row="triton"):
    """Both steps against the specification, each of the same arguments; returns (results, what they were made of, estimates)."""
    estimates = case.estimate(row)
    same_estimates(case, estimates, case.specified_estimates(estimates))
    estimates = change(estimates)
    blocks = case.some_blocks() if blocks is None else blocks
    (out, lse), _ = case.exact(blocks)
    results = case.add(out, lse, blocks, estimates, row)
    same_result(case, results, out, lse, blocks, estimates)
    assert results[0].dtype == out.dtype and results[0].stride() == out.stride()
    assert same_bits([x[:, :, case.slots:] for x in results[:2]], [x[:, :, case.slots:] for x in (out, lse)]), "rows of other blocks"
    return results, (out, lse, blocks), estimates


def same_result(case, results, out, lse, blocks, estimates):
    """out within twice what rounding costs the formulas; lse and share, which are of products that are exact, within float32's rounding."""
    wanted = case.specified(out, lse, blocks, estimates)
    assert torch.equal(results[0].isnan(), wanted[0].isnan())
    rounded = case.rounded_out(out, lse, blocks, estimates)
    no_worse("out", *(case.by_block(x.double() - wanted[0]) for x in (results[0], rounded)), 1e-6)
    for got, expected in zip(results[1:], wanted[1:]):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-5, equal_nan=True)


def same_bits(*two):
    return all(torch.equal(a.nan_to_num(7e3), b.nan_to_num(7e3)) for a, b in zip(*two))


@both_parts
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_blocks(dtype, parts):
    _, _, estimates = check(estimate_case([40, 17, 0, 33, 2, 70, 21], 5, dtype=dtype, parts=parts, device=DEVICE))
    assert (estimates.half_variance > 1.2).any() and (estimates.half_variance < 0.8).any(), "on both sides of the cap"


@both_parts
@pytest.mark.parametrize("kv_lengths, kv_number", [([20, 33, 9, 41], 3), ([12, 5, 40, 0, 9, 33, 17, 21, 8, 30], 9)], ids=["few", "many"])
def test_keys_with_blocks_of_their_own(kv_lengths, kv_number, parts):
    check(estimate_case([40, 17, 0, 33, 2, 70, 21], 5, heads=4, kv_heads=2, parts=parts, kv_lengths=kv_lengths, kv_number=kv_number,
                    device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("longest", [70, 140])
def test_blocks_of_more_queries_than_speak_for_them(longest, dtype):
    """And of as many, and fewer; more blocks than one program takes."""
    check(estimate_case([9, 40, 17, 33, 2, longest, 32, 12, 5, 64, 8], 10, dtype=dtype, device=DEVICE))


@both_parts
@pytest.mark.parametrize("dim", [32, 64, 80])
def test_head_dims(dim, parts):
    check(estimate_case([66, 50, 10], 3, dim=dim, parts=parts, device=DEVICE))


@both_parts
@pytest.mark.parametrize("listed_heads", [1, 2, 4])
@pytest.mark.slow
def test_batch_and_grouped_heads(listed_heads, parts):
    """Lists of query heads, of key/value heads, or for all."""
    case = estimate_case([20, 35, 9, 12], 3, heads=4, kv_heads=2, batch=2, parts=parts, device=DEVICE)
    mask = torch.rand(2, listed_heads, 4, 4, device=DEVICE) < 0.5
    mask[..., 3:] = True
    by_head = mask.repeat_interleave(4 // listed_heads, 1)
    results, (out, lse, _), estimates = check(case, case.lists(by_head))
    assert same_bits(case.add(out, lse, case.lists(mask), estimates), results)


def test_heads_done_in_groups_are_the_heads():
    """With lists of key/value heads, and of query heads for all batch elements."""
    case = estimate_case([20, 9, 12], 2, heads=4, kv_heads=2, batch=2, parts=2, device=DEVICE)
    calls = []
    for batch, heads in ((2, 2), (1, 4)):
        mask = torch.rand(batch, heads, 3, 3, device=DEVICE) < 0.4
        mask[..., 2:] = True
        blocks = case.lists(mask)
        calls.append((*case.exact(blocks)[0], blocks))
    whole = case.estimate()
    added = [case.add(*call, whole) for call in calls]
    case = dataclasses.replace(case, budget=0.0)
    grouped = case.estimate()
    torch.testing.assert_close(grouped.half_variance, whole.half_variance)
    torch.testing.assert_close(grouped.mass, whole.mass)
    for call, wanted in zip(calls, added):
        torch.testing.assert_close(case.add(*call, grouped), wanted)


@pytest.mark.parametrize("batch, most, sizes", [
    (1, 16, [16]), (1, 15, [8, 8]), (1, 8, [8, 8]), (1, 6, [6, 6, 4]), (2, 6, [6, 6, 4, 6, 6, 4]), (2, 16, [16, 16]), (2, 32, [32]),
    (1, 0.5, [1] * 16)])
def test_groups_of_heads_are_all_heads(batch, most, sizes):
    """As few as the budget allows, of nearly the same size. ``most``: how many heads it is enough for."""
    q, x = torch.empty(batch, 32, 40, 64, dtype=torch.bfloat16, device="meta"), torch.arange(batch * 16).view(batch, 16)
    found = list(estimate.head_groups(q, q[:, ::2], int(estimate.BUDGET * q.numel() * 2 / most)))
    groups = [x[shared] for _, shared in found]
    assert [part.numel() for part in groups] == sizes and torch.equal(torch.cat([part.flatten() for part in groups]), x.flatten())
    queries = torch.arange(batch * 32).view(batch, 32)
    assert all(torch.equal(queries[own].unflatten(1, (-1, 2))[..., 0] // 2, x[shared]) for own, shared in found)


@pytest.mark.parametrize("row, parts, budget", [("triton", 1, 1e9), ("triton", 2, 0.0), ("torch", 1, None), ("torch", 2, None)])
def test_statistics_of_keys_that_were_found_before(row, parts, budget):
    """Found once for all keys, or for some blocks and for others: the estimates, and what is made of them, have the same bits."""
    case = estimate_case([20, 33, 17, 9, 12], 4, heads=4, kv_heads=2, batch=2, parts=parts, device=DEVICE)
    case.budget = budget
    backend, blocks = case.backend(row), case.some_blocks()
    offsets, _, longest = case.shape[1]
    every = backend.key_statistics(case.k, case.v, case.shape[1], parts, True)
    first = backend.key_statistics(case.k[:, :, :53], case.v[:, :, :53], (offsets[:3], 2, longest), parts, True)
    others = backend.key_statistics(case.k[:, :, 53:], case.v[:, :, 53:], (offsets[2:] - offsets[2], 2, longest), parts, True)
    joined = {name: torch.cat([getattr(first, name), getattr(others, name)], 2)
              for name in ("log_count", "k_mean", "v_mean", "moments", "covariances")}
    if parts > 1:
        joined["order"] = torch.cat([first.order, others.order + 53], 2)
    wanted = case.estimate(row)
    (out, lse), _ = case.exact(blocks)
    added = case.add(out, lse, blocks, wanted, row)
    for known in (every, dataclasses.replace(every, **joined)):
        found = case.estimate(row, known=known)
        for name in ("log_count", "half_variance", "mass", "k_mean", "v_mean", "useful"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
        assert found.covariances is known.covariances
        assert all(torch.equal(a, b) for a, b in zip(case.add(out, lse, blocks, found, row), added))


@both_parts
def test_scores_and_useful_heads_are_sums_over_units(parts):
    case = estimate_case([40, 1, 30, 33], 4, heads=4, kv_heads=2, batch=2, parts=parts, device=DEVICE)
    case.v[1, 0, 60, 2] = torch.nan
    estimates = case.estimate()
    scores, mass, half_variance = estimates.scores, estimates.mass.float(), estimates.half_variance.float()
    assert (scores[1, :2, :, 2] == -torch.inf).all() and scores.isinf().sum() == 8
    torch.testing.assert_close(scores, eager.scores(mass, half_variance, estimates.log_count, parts))
    errors = (mass * half_variance).unflatten(-1, (4, parts)).sum(-1)
    tokens = torch.tensor([40, 1, 30, 33], device=DEVICE)
    torch.testing.assert_close((scores * tokens)[0], errors[0])
    assert torch.equal(estimates.useful, useful_heads((mass * half_variance).sum(-1)))


@both_parts
def test_what_is_not_finite_stays_where_it_is(parts):
    """A key or value: its block is not estimated. A query: its own row, and nothing of what its block has in common."""
    case = estimate_case([40, 17, 30, 33, 21], 4, heads=2, kv_heads=2, parts=parts, device=DEVICE)
    eye = torch.eye(5, dtype=torch.bool, device=DEVICE)[None, None].expand(1, 2, 5, 5).clone()
    eye[..., 4] = eye[..., 4, :] = True
    # Nobody attends to these exactly.
    eye[:, 0, :, 1] = eye[:, 1, :, 3] = False
    case.k[0, 0, 45, 3], case.v[0, 1, 90, 2], case.q[0, 0, 60, 1] = torch.nan, torch.inf, torch.nan
    results, _, estimates = check(case, case.lists(eye))
    bad = estimates.log_count.isneginf().unflatten(-1, (4, parts)).all(-1)
    assert bad.nonzero().tolist() == [[0, 0, 1], [0, 1, 3]]
    assert (estimates.scores[bad[:, :, None].expand(-1, -1, 4, -1)] < -1e30).all()
    rows = results[0].isnan().any(-1).nonzero().tolist()
    # Rows of text attend to all that is listed.
    assert [0, 0, 60] in rows and all(row == [0, 0, 60] or row[2] >= 120 for row in rows)


@both_parts
def test_rows_that_leave_nothing_out_keep_their_bits(parts):
    case = estimate_case([40, 17, 30, 33], 3, parts=parts, device=DEVICE)
    mask = torch.rand(1, 2, 4, 4, device=DEVICE) < 0.3
    mask[..., 3] = mask[..., 1, :] = True
    blocks = case.lists(mask)
    (out, lse), _ = case.exact(blocks)
    added, added_lse, share = case.add(out, lse, blocks, case.estimate())
    full = mask[0].all(-1)
    for head in range(2):
        for block, (first, last) in enumerate(zip(case.offsets.tolist(), case.offsets.tolist()[1:])):
            rows = 0, head, slice(first, last)
            same = same_bits((added[rows], added_lse[rows]), (out[rows], lse[rows]))
            assert same == (bool(full[head, block]) or block == 3)
    assert (share[0][full[:, :3]] == 1).all() and (share[0][~full[:, :3]] < 1).all()


def test_heads_that_are_not_useful_do_without():
    def useless(estimates):
        mass = estimates.mass.clone()
        mass[0, 2] *= 1e6
        return dataclasses.replace(estimates, mass=mass, useful=useful_heads((mass * estimates.half_variance).sum(-1)))

    case = estimate_case([40, 17, 30], 3, heads=4, kv_heads=2, device=DEVICE)
    (added, added_lse, share), (out, lse, _), estimates = check(case, change=useless)
    assert estimates.useful.tolist() == [[True, True, False, True]]
    assert same_bits((added[0, 2], added_lse[0, 2]), (out[0, 2], lse[0, 2])) and (share[0, 2] == 1).all()


@both_parts
def test_blocks_of_equal_keys_and_values_are_estimated_exactly(parts):
    """Also those of one token, of which one unit is empty."""
    case = estimate_case([20, 1, 33, 5], 4, dtype=torch.float32, parts=parts, device=DEVICE)
    for first, last in zip(case.offsets.tolist(), case.offsets.tolist()[1:]):
        case.k[:, :, first:last], case.v[:, :, first:last] = case.k[:, :, first:first + 1].clone(), case.v[:, :, first:first + 1].clone()
    (out, lse), _ = case.exact(case.lists(torch.eye(4, dtype=torch.bool, device=DEVICE)))
    results = case.add(out, lse, case.lists(torch.eye(4, dtype=torch.bool, device=DEVICE)), case.estimate())
    dense = case.exact(case.lists(torch.ones(4, 4, dtype=torch.bool, device=DEVICE)))[0]
    for got, wanted in zip(results, dense):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


by_both = pytest.mark.parametrize("row", ["torch", "triton"])


def merged_of_equal_keys(case, row, q, k, v, scale):
    """out where all keys and values are equal, and blocks list themselves alone."""
    case.q, case.k, case.v, case.scale = q, k.expand_as(case.k).contiguous(), torch.full_like(case.v, v), scale
    blocks = case.lists(torch.eye(len(case.lengths), dtype=torch.bool, device=DEVICE))
    return case.add(*case.exact(blocks)[0], blocks, case.estimate(row), row)[0]


@by_both
@pytest.mark.parametrize("score", [1e2, 1e3, 1e4, 1e5, 1e6, 1e7])
def test_the_result_is_a_mean_however_large_scores_are(score, row):
    """Values are all 1, and so is every result: no weight has the rounding of a large lse."""
    case = estimate_case([16, 12, 20, 9], 4, dtype=torch.float32, device=DEVICE)
    q, k = torch.randn_like(case.q) * score**0.5, torch.randn(16, device=DEVICE) * score**0.5
    torch.testing.assert_close(merged_of_equal_keys(case, row, q, k, 1.0, 0.3), torch.ones_like(q), rtol=0, atol=1e-6)


@by_both
def test_nothing_overflows_at_the_extremes_of_float16(row):
    case = estimate_case([16, 12, 20, 9], 4, device=DEVICE)
    q, k = torch.randn_like(case.q).sign() * 60, torch.randn(16, device=DEVICE).sign().half() * 6e4
    out = merged_of_equal_keys(case, row, q, k, 6e4, 1.7)
    torch.testing.assert_close(out, torch.full_like(out, 6e4), rtol=2**-10, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_are_cut_across_the_first_principal_direction(dtype):
    """Each block's order names its tokens once, in either unit by ascending place; of equal projections all are in one unit."""
    lengths = [40, 17, 0, 70, 1, 2]
    case = estimate_case(lengths, 6, kv_heads=2, heads=2, batch=2, parts=2, dtype=dtype, device=DEVICE)
    # A direction that stands out, so that ten iterations find it.
    along = torch.randn(2, 2, 1, 16, device=DEVICE)
    along /= along.norm(dim=-1, keepdim=True)
    case.k += 5 * along * torch.randn(2, 2, sum(lengths), 1, device=DEVICE)
    case.k[0, 1, :40] = 0.5
    case.k[1, 0, 57:127] = along[1, 0] * torch.tensor([-1.0] * 20 + [0.0] * 30 + [1.0] * 20, device=DEVICE)[torch.randperm(70), None]
    case.k[1, 1, 3, 2] = torch.nan
    estimates = case.estimate()
    order, lower, bounds = estimates.order, case.lower(estimates), case.offsets.tolist()
    for block, (first, last) in enumerate(zip(bounds, bounds[1:])):
        found = order[..., first:last]
        assert torch.equal(found.sort().values, torch.arange(first, last, device=DEVICE).int().expand(2, 2, -1))
        for tokens, middle in zip(found.flatten(0, 1), lower[..., block].flatten()):
            assert (tokens[:middle].diff() > 0).all() and (tokens[middle:].diff() > 0).all()
    for sample in (0, 1):
        assert torch.equal(order[sample, 1, :40], torch.arange(40, device=DEVICE).int()), "equal keys, or one that is not finite"
    for head in (0, 1):
        keys, middle = case.k.double()[1, head, 57:127], int(lower[1, head, 3])
        axis = torch.linalg.eigh((keys - keys.mean(0)).mT @ (keys - keys.mean(0))).eigenvectors[:, -1]
        projected = (keys @ axis)[(order[1, head, 57:127] - 57).long()]
        low, high = sorted((projected[:middle], projected[middle:]), key=torch.mean)
        assert low.max() <= high.min() + 1e-3
        assert abs((low.mean() + high.mean()) / 2 - (low.max() + high.min()) / 2) < 1, "about where means are as far away"
    assert lower[1, 0, 3] in (20, 50)


@pytest.mark.parametrize("longest", [50, 600])
def test_kernels_and_plain_torch_cut_blocks_alike(longest):
    """Of keys without a direction that stands out: ten iterations find none, so that what they start from decides. Also of more tokens
    than are looked at at once."""
    assert 50 < estimate_order.WIDTH < 600
    lengths = [2 + 7 * i % 23 for i in range(23)] + [longest]
    case = estimate_case(lengths, 24, dim=32, kv_heads=2, parts=2, dtype=torch.float32, device=DEVICE)
    case.k = torch.randn_like(case.k)
    got, wanted = case.estimate(), case.specified_estimates()
    assert torch.equal(got.order, wanted.order) and torch.equal(case.lower(got), case.lower(wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@both_parts
def test_moments_where_means_are_large(dtype, parts):
    """Channels whose mean is 30 times the deviation: what is left of h when their squares cancel."""
    case = estimate_case([64, 50], 2, dtype=dtype, parts=parts, device=DEVICE)
    common = torch.zeros(16, device=DEVICE)
    common[:3] = torch.tensor([30.0, -30.0, 20.0])
    case.k = (0.7 * torch.randn_like(case.k.float()) + 0.7 * common).to(dtype)
    case.q = torch.randn_like(case.q.float()).to(dtype)
    got = case.estimate()
    expected = case.specified_estimates(got)
    torch.testing.assert_close(got.half_variance.double(), expected.half_variance, rtol=2**-6 if DEVICE == "cuda" else 2**-5, atol=0)


def test_ids_out_of_range_and_negative_counts_list_nothing():
    case = estimate_case([40, 17, 30], 3, device=DEVICE)
    blocks, estimates = case.lists(torch.eye(3, dtype=torch.bool, device=DEVICE)), case.estimate()
    (out, lse), _ = case.exact(blocks)
    indices = torch.full((1, 1, 3, 3), 99, dtype=torch.int32, device=DEVICE)
    indices[..., 1] = -5
    indices[..., 2] = torch.arange(3, device=DEVICE)
    strange = dataclasses.replace(blocks, indices=indices, counts=torch.tensor([[[3, 3, 9]]], dtype=torch.int32, device=DEVICE))
    for got, wanted in zip(case.add(out, lse, strange, estimates), case.add(out, lse, blocks, estimates)):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2**-9)
    nothing = dataclasses.replace(blocks, counts=torch.full_like(blocks.counts, -1))
    assert (case.add(torch.zeros_like(out), torch.full_like(lse, -torch.inf), nothing, estimates)[2] == 0).all()


def test_no_tokens_at_all():
    case = estimate_case([4, 4], 2, device=DEVICE)
    case.q, case.k, case.v = (x[:0] for x in (case.q, case.k, case.v))
    estimates = case.estimate()
    assert isinstance(estimates, Estimate) and estimates.mass.shape == (0, 2, 2, 2)
    out, lse, share = case.add(torch.empty_like(case.q), torch.empty(0, 2, 8, device=DEVICE), case.some_blocks(), estimates)
    assert out.shape == case.q.shape and share.shape == (0, 2, 2)


REAL = [384] * 20 + [336] * 3 + [130, 7, 384, 255]


@pytest.mark.gpu
@rows
@both_parts
@pytest.mark.parametrize("dim, dtype", [(128, torch.bfloat16), (64, torch.float16), (64, torch.bfloat16), (96, torch.bfloat16),
                                        (256, torch.bfloat16)], ids=str)
def test_on_a_gpu(dim, dtype, parts, row):
    case = estimate_case(REAL, 26, heads=4, kv_heads=2, dim=dim, dtype=dtype, parts=parts, device="cuda", spread=0.5)
    check(case, row=row)


@pytest.mark.gpu
@rows
@both_parts
def test_many_blocks_of_128_on_a_gpu(parts, row, monkeypatch):
    case = estimate_case([128] * 600 + [300], 600, heads=2, kv_heads=2, dim=128, dtype=torch.bfloat16, parts=parts, device="cuda",
                         spread=0.5)
    monkeypatch.setattr(case, "exact", exact_by_kernels(case))
    check(case, row=row)


def exact_by_kernels(case):
    """The reference would hold all scores in float64."""
    from ssta.kernels import block_sparse_attention

    def exact(blocks):
        out, lse = block_sparse_attention(case.q, case.k, case.v, blocks, scale=case.scale, return_lse=True)
        return (out, lse), (out.double(), lse.double())

    return exact


@pytest.mark.gpu
@rows
@both_parts
def test_never_waits_and_fits_a_cuda_graph(parts, row):
    case = estimate_case(REAL, 26, heads=4, kv_heads=2, dim=128, dtype=torch.bfloat16, parts=parts, device="cuda")
    blocks = case.some_blocks()
    (out, lse), _ = case.exact(blocks)

    def step():
        estimates = case.estimate(row)
        return estimates.mass, estimates.half_variance, *case.add(out, lse, blocks, estimates, row)

    assert_never_waits_and_fits_a_cuda_graph(step)


@pytest.mark.gpu
def test_memory_on_a_gpu():
    """Beside q, k, v and out no more than a quarter of them; out is not there yet while blocks are estimated."""
    case = estimate_case([128] * 300 + [200], 300, heads=8, kv_heads=8, dim=128, dtype=torch.bfloat16, parts=2, device="cuda")
    blocks = case.some_blocks()
    exact = exact_by_kernels(case)(blocks)[0]
    bytes_of_q = case.q.numel() * 2

    def peak(run):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        return result, torch.cuda.max_memory_allocated() - before

    estimates, used = peak(case.estimate)
    assert used <= 2 * bytes_of_q
    assert peak(lambda: case.add(*exact, blocks, estimates))[1] <= bytes_of_q + sum(x.nbytes for x in exact)
