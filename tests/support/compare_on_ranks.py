"""What torchrun starts in test_compare.py: the command on a tiny pipeline; the ranks that $BROKEN names fail in the middle of a forward."""

import os
import sys

import diffusers
from tiny_pipelines import wan_with_prompts

from ssta.pipelines import compare


def broken(*_):
    raise ValueError("no such forward")


if __name__ == "__main__":
    pipe = wan_with_prompts()
    diffusers.DiffusionPipeline.from_pretrained = staticmethod(lambda model, **_: pipe)
    if os.environ["RANK"] in os.environ.get("BROKEN", ""):
        pipe.transformer.blocks[1].register_forward_pre_hook(broken)
    compare.main(sys.argv[1:])
