"""ComfyUI's video transformers that SSTA knows: what the sequence of their self-attention consists of. Imports no ComfyUI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ssta import DenseRun, TokenLayout, VideoGrid

# A forward's arguments by name.
ForwardArguments = Mapping[str, Any]


@dataclass(frozen=True)
class Sequence:
    """What self-attention over a video is over.

    Attributes:
        layout: its tokens.
        droppable: of the last dense run, how many tokens the model may leave out, which only the device knows.
    """

    layout: TokenLayout
    droppable: int = 0

    def of_length(self, tokens: int) -> TokenLayout | None:
        """The layout of a sequence of ``tokens``, None where that is no such sequence."""
        dropped = self.layout.length - tokens
        if dropped == 0:
            return self.layout
        if not 0 < dropped <= self.droppable:
            return None
        *others, last = self.layout.segments
        return TokenLayout((*others, DenseRun(last.length - dropped)) if last.length > dropped else tuple(others))


@dataclass(frozen=True)
class ComfyModel:
    """One of ComfyUI's transformers.

    Attributes:
        name: what messages call it.
        width: its attribute that holds the channels of the video's queries, of all heads together.
        stacks: its lists of blocks, in the order in which they run; each block has one self-attention over the video.
        joint: whether text is part of that sequence. Then a mask over it is taken.
        around: ``around(model, x, call)`` is that sequence, x being the video's latent, or says why it cannot be known or is no video.
    """

    name: str
    width: str
    stacks: tuple[str, ...]
    joint: bool
    around: Callable[[Any, Any, ForwardArguments], Sequence | str]

    def sequence(self, model: Any, call: ForwardArguments) -> Sequence | str:
        """What self-attention is over in a call; or why that cannot be known or is no video."""
        # With sound the video is the first of two latents.
        x = call["x"][0] if isinstance(call["x"], (list, tuple)) else call["x"]
        if x.ndim != 5:
            return f"its latent is {tuple(x.shape)}, which is no video [batch, channels, t, h, w]"
        return self.around(model, x, call)

    def block_names(self, model: Any) -> list[str]:
        """Dotted names of the blocks."""
        return [f"{stack}.{i}" for stack in self.stacks for i in range(len(getattr(model, stack)))]


def comfy_model(model: Any) -> ComfyModel:
    """What is known of one of ComfyUI's ``diffusion_model``, by its class or the nearest base class."""
    for base in type(model).__mro__:
        if base.__name__ in MODELS:
            found = MODELS[base.__name__]
            lacking = [name for name in (found.width, *found.stacks) if not hasattr(model, name)]
            if lacking:
                raise ValueError(f"model must have {', '.join(lacking)} as ComfyUI's {found.name} does, got a {type(model).__name__} "
                                 "without: SSTA does not know this version of ComfyUI")
            return found
    raise ValueError(f"model must be a video model of ComfyUI's that SSTA knows ({', '.join(MODELS)}), got {type(model).__name__}")


def _patches(size: Any, patch: Any, *, padded: bool) -> tuple[int, int, int]:
    """How many patches a latent ``[..., t, h, w]`` is cut into, the last ones padded or left out."""
    t, h, w = (-(-n // p) if padded else n // p for n, p in zip(size[-3:], patch))
    return t, h, w


def _sequence(before: list[int], thw: tuple[int, int, int], after: list[int], droppable: int = 0,
              across: tuple[int, ...] = ()) -> Sequence | str:
    """Dense runs around a video, unless there is none; ``across`` are the tokens that cross-attention goes to."""
    if thw[0] == 1:
        return "its video is a single frame"
    found = Sequence(TokenLayout((*[DenseRun(n) for n in before if n], VideoGrid(*thw), *[DenseRun(n) for n in after if n])), droppable)
    for tokens in across:
        if found.of_length(tokens) is not None:
            return f"its self-attention over {tokens} tokens cannot be told from its cross-attention to as many"
    return found


def _wan(model: Any, x: Any, call: ForwardArguments) -> Sequence | str:
    """[a reference image | video, with what is appended to it in time | references in context], padded to whole patches."""
    clip = call.get("clip_fea")
    t, h, w = _patches(x.shape, model.patch_size, padded=True)
    if call.get("time_dim_concat") is not None:
        t += _patches(call["time_dim_concat"].shape, model.patch_size, padded=True)[0]
    before = 0
    if getattr(model, "ref_conv", None) is not None and call.get("reference_latent") is not None:
        before = prod(n // p for n, p in zip(call["reference_latent"].shape[-2:], model.patch_size[1:]))
    after = [prod(_patches(latent.shape, model.patch_size, padded=True)) for latent in call.get("context_latents") or ()]
    across = (call["context"].shape[1], 0 if clip is None else clip.shape[1])
    return _sequence([before], (t, h, w), after, across=across)


def _hunyuan_video(model: Any, x: Any, call: ForwardArguments) -> Sequence | str:
    """[text | video] since HunyuanVideo 1.5 came to ComfyUI, [video | text] before, which its blocks say; a reference stands before the
    video. Text is [vision | glyphs | words] or [words | glyphs]."""
    thw = _patches(x.shape, model.patch_size, padded=False)
    text, glyphs, vision, reference = call["context"].shape[1], call.get("txt_byt5"), call.get("clip_fea"), call.get("ref_latent")
    if glyphs is not None and getattr(model, "byt5_in", None) is not None:
        text += glyphs.shape[1]
    if vision is not None and getattr(model, "vision_in", None) is not None:
        text += vision.shape[1]
    before = 0 if reference is None else prod(_patches(reference.shape, model.patch_size, padded=False))
    if getattr(model.double_blocks[0], "flipped_img_txt", False):
        return _sequence([before], thw, [text])
    return _sequence([text, before], thw, [])


def _ltx(model: Any, x: Any, call: ForwardArguments) -> Sequence | str:
    """[video | guiding frames], of which the model may leave out some tokens."""
    guides = call.get("keyframe_idxs")
    t, h, w = _patches(x.shape, model.patchifier.patch_size, padded=False)
    guiding, across = 0 if guides is None else guides.shape[2], (call["context"].shape[1],)
    frames, rest = divmod(guiding, h * w)
    if rest or frames >= t:
        return f"{guiding} guiding tokens are no whole frames among {t} of {h} x {w}"
    return _sequence([], (t - frames, h, w), [guiding], droppable=guiding, across=across)


# Class names in ComfyUI.
MODELS = {
    "WanModel": ComfyModel("WanModel", "dim", ("blocks",), False, _wan),
    "HunyuanVideo": ComfyModel("HunyuanVideo", "hidden_size", ("double_blocks", "single_blocks"), True, _hunyuan_video),
    "LTXVModel": ComfyModel("LTXVModel", "inner_dim", ("transformer_blocks",), False, _ltx),
    "LTXBaseModel": ComfyModel("LTXBaseModel", "inner_dim", ("transformer_blocks",), False, _ltx),
}
