"""Covariances in two bits an entry: what is written is what the levels say, and products with it are those with matrices made of it."""

import pytest
import torch
from backend_rows import DEVICE

from ssta.kernels.portable import coded

# Of products of bfloat16; the interpreter cuts their last bits off.
ROUNDED = 0.006 if DEVICE == "cuda" else 0.012


def half(x):
    """What is kept of symmetric matrices ``[..., D, D]``."""
    dim = x.shape[-1]
    return torch.cat([x[..., begin:begin + 32, begin:].flatten(-2) for begin in range(0, dim, 32)], -1)


def levels(byte, place):
    return (2 * (byte.int() >> 2 * place & 3) - 3).double()


def whole(codes, scales):
    """Covariances of keys ``[..., D, D]``."""
    dim, at = (scales.shape[-1] - 8) // 3, 0
    s, r = scales[..., :dim].double(), scales[..., 3 * dim:].double().repeat_interleave(32, -1)[..., :dim, None]
    x = torch.zeros(*scales.shape[:-1], dim, dim, dtype=torch.float64, device=codes.device)
    for begin in range(0, dim, 32):
        for row in range(8):
            line = codes[..., at:at + dim - begin]
            at += dim - begin
            for place in range(4):
                if begin + row + 8 * place < dim:
                    x[..., begin + row + 8 * place, begin:] = levels(line, place)
    assert at == codes.shape[-1]
    upper = x.triu(1)
    # Where a slab's square is kept whole, both halves of it are.
    own = torch.arange(dim, device=x.device) // 32
    lower = torch.where(own[:, None] == own, x.tril(-1), upper.mT)
    # A slab's mirror image has its r.
    lower = torch.where(own[:, None] == own, lower * r, lower * r.mT)
    return (upper * r + lower) * s[..., None] * s[..., None, :] + torch.diag_embed(s**2)


def mixed(codes, scales):
    """Covariances of keys with values ``[..., D, D]``."""
    dim = (scales.shape[-1] - 8) // 3
    a, b = scales[..., dim:2 * dim].double(), scales[..., 2 * dim:3 * dim].double()
    rows = codes.unflatten(-1, (-1, 8, dim))
    x = torch.stack([levels(rows, place) for place in range(4)], -3).flatten(-4, -2)[..., :dim, :]
    return x * a[..., None] * b[..., None, :]


def statistics(dim, units=5, batch=2, heads=2, common=0.0):
    torch.manual_seed(dim)
    k, v = (torch.randn(batch, heads, units, 3 * dim, dim, device=DEVICE) * torch.rand(dim, device=DEVICE) for _ in range(2))
    # The first channels may have more in common than others have.
    k[..., :24] += common * torch.randn(batch, heads, units, 3 * dim, 1, device=DEVICE) * torch.randn(24, device=DEVICE)[:dim]
    k, v = (x - x.mean(3, keepdim=True) for x in (k, v))
    covariance, mixture = k.mT @ k / (3 * dim), k.mT @ v / (3 * dim)
    means = [torch.randn(batch, heads, units, dim, device=DEVICE).half() for _ in range(2)]
    log_count = torch.randn(batch, heads, units, device=DEVICE)
    return log_count, *means, half(covariance).bfloat16(), mixture.flatten(-2).bfloat16()


def room(found, units):
    batch, heads, _, dim = found[1].shape
    moments, covariances, scales = coded.code_sizes(dim)
    like = [(), (dim,), (dim,), (moments,), (covariances,), (scales,)]
    dtypes = [x.dtype for x in found[:3]] + [torch.uint8] * 2 + [torch.bfloat16]
    return tuple([torch.zeros(batch, heads, units, *shape, dtype=dtype, device=DEVICE) for shape, dtype in zip(like, dtypes)])


def written(found, into, places=None):
    coded.write(found, into, places)
    return into


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 128])
def test_what_is_written_is_near_and_of_the_same_share(dim):
    found = statistics(dim)
    log_count, k_mean, v_mean, moments, covariances, scales = written(found, room(found, 5))
    for x, y in zip((log_count, k_mean, v_mean), found):
        assert torch.equal(x, y)
    s = scales[..., :dim].double()
    off = half(1 - torch.eye(dim, device=DEVICE)).double()
    beside = half(s[..., None] * s[..., None, :]) / off
    known = found[3].double()
    torch.testing.assert_close(half(whole(moments, scales))[..., off == 0], known[..., off == 0], rtol=0.02, atol=0)
    for got, wanted in ((half(whole(moments, scales)) / beside, known / beside),
                        (mixed(covariances, scales).flatten(-2), found[4].double())):
        assert (got - wanted).norm() <= 0.45 * wanted.norm()
        torch.testing.assert_close((got * wanted).sum(-1), (wanted**2).sum(-1), rtol=0.02, atol=0)


def test_units_go_to_the_places_that_they_are_given():
    found = statistics(32, units=3)
    places = torch.tensor([4, 0, 7], device=DEVICE)
    into, every = written(found, room(found, 8), places), written(found, room(found, 3))
    for x, y in zip(into, every):
        assert torch.equal(x[:, :, places], y)
        assert not x[:, :, [1, 2, 3, 5, 6]].count_nonzero()


@pytest.mark.parametrize("dim, units, rows, group", [(128, 5, 3, 1), (32, 20, 9, 2), (80, 3, 40, 1), (64, 33, 2, 1)])
def test_products_with_it_are_those_with_its_matrices(dim, units, rows, group):
    found = statistics(dim, units=units, batch=1, common=1.0)
    *_, moments, covariances, scales = written(found, room(found, units))
    queries = torch.randn(1, 2 * group, rows, 2 * dim, dim, device=DEVICE)
    # Of a small diagonal, so that the rest counts.
    queries = queries.mT @ queries - 1.9 * dim * torch.eye(dim, device=DEVICE)
    # As ``query_moments`` writes them: what is not kept is added to what is.
    twice = torch.arange(dim, device=DEVICE) // 32
    known = half(queries * (1 + (twice[:, None] != twice))).bfloat16()
    got = torch.empty(1, 2 * group, rows, coded.slabs(dim) * units, device=DEVICE)
    coded.half_variances(known, moments, scales, got)
    got = got.unflatten(3, (-1, units)).sum(3)
    per_head = whole(moments, scales).repeat_interleave(group, 1)
    wanted = known.double() @ half(per_head).mT
    assert (got - wanted).norm() <= ROUNDED * wanted.norm()

    mixture = torch.rand(1, 2 * group, rows, 8 * (-(-units // 8)), device=DEVICE).bfloat16()[..., :units]
    got = torch.empty(1, 2 * group, rows, dim * dim, dtype=torch.bfloat16, device=DEVICE)
    coded.mixtures(mixture, covariances, scales, got)
    wanted = mixture.double() @ mixed(covariances, scales).flatten(-2).repeat_interleave(group, 1)
    assert (got - wanted).norm() <= ROUNDED * wanted.norm()
