"""What torchrun starts in test_compare.py: the command on a tiny pipeline."""

import sys

import diffusers
from tiny_pipelines import wan_with_prompts

from ssta.pipelines.evaluation import compare

if __name__ == "__main__":
    pipe = wan_with_prompts()
    diffusers.DiffusionPipeline.from_pretrained = staticmethod(lambda model, **_: pipe)
    compare.main(sys.argv[1:])
