"""Sparse attention for ComfyUI's video models: the nodes SSTA, SSTA (checkpoint trained with it), SSTA report and SSTA remove."""

from importlib.util import find_spec

if find_spec("ssta") is None:
    raise ImportError("these nodes need the library that they are a part of in ComfyUI's environment: `python -m pip install .` in a "
                      "checkout of SSTA, as README.md says; what a package registry has under that name is not it")

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
