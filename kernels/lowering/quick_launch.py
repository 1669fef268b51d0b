"""Where token-level kernels find ``FUSED``."""

from ..launch import FUSED as FUSED
