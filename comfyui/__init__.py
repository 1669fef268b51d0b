"""Sparse attention for ComfyUI's video models: the nodes SSTA, SSTA (checkpoint trained with it), SSTA report and SSTA remove."""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
