"""Layers that follow a plan give the bits of those that look at everything anew, and none is followed that was not made for such inputs."""

import sys

import pytest
import torch

from ssta import SSTAConfig, TokenLayout, ssta_attention
from ssta.attention import ssta_layer
from ssta.kernels import Deferred, Kept, Projection, RMSNorm
from ssta.plan import Plan, kind_of
from ssta.text import TextMask

LAYOUT = TokenLayout.video_text((2, 3, 4), 7)
BASE = dict(tile_thw=(2, 2, 3), kernel_thw=(1, 1, 1), topk=2)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    """Without a GPU the interpreter runs the kernels that a GPU would; attention itself is plain torch, for speed."""
    if DEVICE == "cpu":
        for module in ("ssta.plan", "ssta.layout", "ssta.scoring", "ssta.kernels.prologue.reorder", "ssta.kernels.prologue.select",
                       "ssta.kernels.prologue.lengths"):
            monkeypatch.setattr(f"{module}.kernels_run", lambda x: x.dtype != torch.float64)
    monkeypatch.setattr("ssta.attention._plans", Kept(64))


def inputs(seed, batch=1, kv_heads=1):
    torch.manual_seed(seed)
    return [torch.randn(batch, LAYOUT.length, heads, 16, device=DEVICE).half().transpose(1, 2) for heads in (2, kv_heads, kv_heads)]


def mask(*valid):
    return torch.arange(7, device=DEVICE) < torch.tensor(valid, device=DEVICE)[:, None]


def followed(monkeypatch):
    """The names of what plans do, as they do it."""
    steps = []
    for name in ("run", "_select"):
        step = getattr(Plan, name)

        def noted(*args, name=name, step=step, **options):
            steps.append(name)
            return step(*args, **options)

        monkeypatch.setattr(Plan, name, noted)
    return steps


@pytest.mark.parametrize("changes, masks", [
    (dict(sampling_type="importance"), [None]), (dict(topk=None, density=0.6), [mask(3, 7), mask(0, 4)]),
    (dict(mask_share_within_head=True), [mask(3).int(), mask(5).int()]), (dict(pad_type="zero"), [mask(1), mask(7)]),
    (dict(pad_type="repeat", sparse_type="block_attn"), [None]), (dict(sparse_type="sta"), [mask(2), mask(0)]),
    (dict(threshold=0.5), [mask(2)]),
    (dict(compensation="linear"), [mask(4)])],
    ids=lambda of: str(of) if isinstance(of, dict) else "")
@torch.no_grad()
def test_a_plan_gives_the_bits_of_a_layer_without_one(changes, masks, monkeypatch):
    config, expected = SSTAConfig(**BASE | changes), []
    batch = 1 if masks[0] is None else len(masks[0])
    cases = [(inputs(seed, batch), masks[seed % len(masks)]) for seed in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr("ssta.attention.kind_of", lambda *_: None)
        for qkv, text_mask in cases:
            expected.append(ssta_attention(*qkv, LAYOUT, config, text_mask=text_mask, return_blocks=True))
    steps = followed(monkeypatch)
    for (qkv, text_mask), (out, blocks) in zip(cases, expected):
        got, lists = ssta_attention(*qkv, LAYOUT, config, text_mask=text_mask, return_blocks=True)
        assert torch.equal(got, out) and got.stride() == out.stride() and torch.equal(lists.to_mask(), blocks.to_mask())
        if text_mask is not None:
            shared = TextMask.of(text_mask, batch, LAYOUT, got.device)
            assert torch.equal(ssta_attention(*qkv, LAYOUT, config, text_mask=shared), out)
    # The first call of a kind makes the plan.
    assert steps.count("run") == (2 if masks[0] is None else 4)
    assert ("_select" in steps) == ("threshold" not in changes and changes.get("sparse_type") != "sta")


@torch.no_grad()
def test_deferred_inputs_follow_plans_too(monkeypatch):
    config, text_mask, video = SSTAConfig(**BASE), mask(3), LAYOUT.video_length

    def deferred(seed):
        weight = torch.linspace(0.5, 2, 16, device=DEVICE).half()
        return [Deferred(tuple([Projection(part, RMSNorm(weight, 1e-6)) for part in (x[:, :, :video], x[:, :, video:])]))
                for x in inputs(seed)]

    expected = [ssta_attention(*[x.materialize() for x in deferred(seed)], LAYOUT, config, text_mask=text_mask, return_blocks=True)
                for seed in range(3)]
    steps = followed(monkeypatch)
    for seed, (out, blocks) in enumerate(expected):
        got, lists = ssta_attention(*deferred(seed), LAYOUT, config, text_mask=text_mask, return_blocks=True)
        assert torch.equal(got, out) and torch.equal(lists.to_mask(), blocks.to_mask())
    assert steps == ["run", "_select"] * 2
    (q, k, v), (other, *_) = deferred(0), inputs(0)
    whole = Deferred((Projection(other),))
    assert len({kind(of) for of in ((q, k, v), (whole, k, v), (q, whole, v), (whole, whole, whole), inputs(0))} - {None}) == 5


@torch.no_grad()
def test_a_selection_may_be_attended_to_again():
    """Also one of other lists than the plan's own."""
    config, (q, k, v), text_mask = SSTAConfig(**BASE), inputs(0), mask(3)
    for keep_scores in (False, True):
        first = ssta_layer(q, k, v, LAYOUT, config, text_mask=text_mask, keep_scores=keep_scores)
        again = ssta_layer(q, k, v, LAYOUT, config, text_mask=text_mask, selection=first.selection)
        assert torch.equal(first.out, again.out) and again.route is first.route
    whole = ssta_layer(q, k, v, LAYOUT, config).selection
    expected = ssta_layer(q.double(), k.double(), v.double(), LAYOUT, config, selection=whole).out
    torch.testing.assert_close(ssta_layer(q, k, v, LAYOUT, config, text_mask=text_mask, selection=whole).out.double(), expected,
                               atol=2e-3, rtol=0)


def kind(qkv=None, config=None, text_mask=None, **changes):
    return kind_of(*(inputs(0) if qkv is None else qkv), LAYOUT, config or SSTAConfig(**BASE), text_mask,
                   *(dict(scale=None, impl="auto") | changes).values())


def test_inputs_of_one_kind_share_a_plan_and_others_do_not():
    assert kind() == kind(inputs(1)) is not None and kind(text_mask=mask(2)) == kind(text_mask=mask(5))
    shared = TextMask.of(mask(2), 1, LAYOUT, torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE))
    q, k, v = inputs(0, kv_heads=2)
    kinds = [kind(), kind(inputs(0, batch=2)), kind((q, k, v)), kind((q, k, v.contiguous())), kind((q.contiguous(), k, v)),
             kind((q, k.float(), v)), kind((q[..., :8], k, v)), kind(config=SSTAConfig(**BASE | dict(topk=3))), kind(scale=0.5),
             kind(impl="torch"), kind(text_mask=mask(2)), kind(text_mask=mask(2).int()), kind(text_mask=mask(2)[:, :5]),
             kind(text_mask=shared)]
    assert None not in kinds and len(set(kinds)) == len(kinds)


def test_every_call_looks_anew_where_more_than_the_kind_decides():
    q, k, v = inputs(0)
    assert kind((q.clone().requires_grad_(), k, v)) is None
    with torch.no_grad():
        assert kind((q.clone().requires_grad_(), k, v)) == kind()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert kind() is None
    assert kind(config=SSTAConfig(**BASE, sampling_type=lambda q, k: q @ k.mT)) is None
    assert kind(config=SSTAConfig(**BASE | dict(topk=None), budget=lambda scores: scores > 0)) is None
    assert kind((torch.nn.Parameter(q, requires_grad=False), k, v)) is None and kind((q.double(), k.double(), v.double())) is None
    assert kind(text_mask=mask(2).to_sparse()) is None and kind(text_mask=[[1] * 7]) is None and kind(scale=True) is None
    seen = []
    torch.vmap(lambda x: seen.append(kind((x, k, v))) or x)(q[None])
    assert seen == [None]


@torch.no_grad()
def test_what_the_kind_decides_is_found_out_once():
    config, seen = SSTAConfig(**BASE), {}

    def count(frame, event, _):
        if event == "call":
            seen[frame.f_code.co_name] = seen.get(frame.f_code.co_name, 0) + 1

    for seed in range(3):
        qkv, text_mask = inputs(seed), mask(seed)
        seen.clear()
        sys.setprofile(count)
        try:
            ssta_attention(*qkv, LAYOUT, config, text_mask=text_mask)
        finally:
            sys.setprofile(None)
    assert seen["kind_of"] == seen["watched"] == 1
    for name in ("check_inputs", "autocast_inputs", "checked_layout", "fixed_tiles", "choose_route", "_key", "new_tokens", "launch_take"):
        assert name not in seen, name


def test_wrong_arguments_are_refused_as_ever():
    """After a right call, too."""
    q, k, v = inputs(0)
    config, shared = SSTAConfig(**BASE), TextMask.of(mask(2, 3), 2, LAYOUT, q.device)
    for _ in range(2):
        ssta_attention(q, k, v, LAYOUT, config, text_mask=mask(2))
        with pytest.raises(ValueError, match="text_mask must be .batch, dense tokens"):
            ssta_attention(q, k, v, LAYOUT, config, text_mask=shared)
        with pytest.raises(TypeError, match="text_mask must be bool or integer"):
            ssta_attention(q, k, v, LAYOUT, config, text_mask=mask(2).half())
        with pytest.raises(ValueError, match="key must be|key must have"):
            ssta_attention(q, k[..., :8], v, LAYOUT, config)
        with pytest.raises(ValueError, match="scale must be positive"):
            ssta_attention(q, k, v, LAYOUT, config, scale=-1.0)
