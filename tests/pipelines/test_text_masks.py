"""SSTA takes the inputs of stock processors: arguments of batch 1 beside a larger batch, and text whose valid tokens are anywhere."""

from __future__ import annotations

import pytest
import torch
from tiny_hunyuan import EVERYTHING
from tiny_models import TEXT_LEN, TINY, TOLERANCE, all_dense, cast, run
from torch import Tensor, nn

from ssta.pipelines import Schedule, apply_ssta

CANVAS = (2, 3, 4)


def assert_stock(model: nn.Module, call: dict, stock: Tensor, tolerance: float) -> None:
    """With everything selected, and with all layers dense."""
    for schedule in (Schedule(), all_dense(model)):
        with apply_ssta(model, EVERYTHING, schedule=schedule):
            torch.testing.assert_close(run(model, call), stock, rtol=tolerance, atol=tolerance)


def without(call: dict, *names: str) -> dict:
    return {name: x for name, x in call.items() if name not in names}


@pytest.mark.parametrize("name", TINY)
def test_an_argument_of_batch_1_is_broadcast_as_the_stock_model_does(name):
    """Each tensor by itself, and the text with its mask, if the stock model takes them."""
    tiny = TINY[name]
    model, call = tiny.build(layers=2).to(tiny.dtype), cast(tiny.call(CANVAS, (3, 6)), tiny.dtype)
    batched = [key for key, x in call.items() if isinstance(x, Tensor) and len(x) == 2]
    text = [key for key in batched if key.startswith("encoder_")]
    taken = []
    for keys in (*([key] for key in batched), text):
        # Images of the whole batch stand beside a prompt in Motif-Video.
        single = without(call, *(["image_embeds"] if name == "motif_video" else [])) | {key: call[key][:1] for key in keys}
        try:
            stock = run(model, single)
        except Exception:
            continue
        taken.append(keys)
        assert_stock(model, single, stock, TOLERANCE.get(name, 1e-5))
    if name == "motif_video":
        assert ["encoder_hidden_states", "encoder_attention_mask"] in taken


MASKS = {"left": torch.arange(TEXT_LEN) >= 3, "a hole": torch.arange(TEXT_LEN) != 2, "two": torch.arange(TEXT_LEN) % 3 == 1}


@pytest.mark.parametrize("name", ["motif_video", "mochi", "hunyuan_video", "hunyuan_video_15", "framepack"])
def test_valid_text_may_be_anywhere(name):
    """Also beside a batch element whose valid tokens are first, with images before the text, and in bits where they are first in all."""
    tiny = TINY[name]
    model, call = tiny.build(layers=2).to(tiny.dtype), cast(tiny.call(CANVAS, (3, 6)), tiny.dtype)
    call["encoder_hidden_states"] *= 10
    first = call["encoder_attention_mask"][0]
    for mask in MASKS.values():
        case = call | {"encoder_attention_mask": torch.stack([first, mask.to(first.dtype)])}
        assert_stock(model, case, run(model, case), 1e-5)
