"""Mochi: joint attention over [video | text]; the text's padding takes no part."""

from __future__ import annotations

from functools import partial

from diffusers.models.attention_processor import MochiAttnProcessor2_0
from diffusers.models.normalization import MochiRMSNorm

from ..patch.canvas import from_bcfhw
from ..patch.processor import SSTAProcessor
from ..ranks.split import gathered, split, split_outputs
from ..terms import Family, Split, stack_sites
from .joint import JointSSTAProcessor


class MochiSSTAProcessor(JointSSTAProcessor):
    """Attends as ``MochiAttnProcessor2_0`` does, to selected tiles only, for the whole batch at once and without waiting for the device to
    say which text is valid. Rows of invalid text are zero before their projection, as there; and where valid text is not first, its rows
    come out first, as there too."""

    norms = {**SSTAProcessor.norms, MochiRMSNorm: False}
    valid_first, stays_first = False, True


_SITES = partial(stack_sites, stack="transformer_blocks", attention="attn1", stock=MochiAttnProcessor2_0, replacement=MochiSSTAProcessor)
_PLAN = {"rope": split_outputs(3, 0), "transformer_blocks.0": {"hidden_states": split()}, "proj_out": gathered()}
MOCHI = Family("MochiTransformer3DModel", _SITES, from_bcfhw, split=Split(_PLAN))
