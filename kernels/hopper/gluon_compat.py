"""The Gluon names that drift between Triton releases, under one spelling; the Hopper kernels take them from here."""

from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

try:
    # Triton 3.7 and later.
    from triton.experimental.gluon import aggregate as _aggregate
except ImportError:
    from triton.language.core import _aggregate

# Waits for the warps of the own partition: thread_barrier until 3.6.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Global to shared by TMA, and back: async_load and async_store from 3.9 on.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

if TYPE_CHECKING:
    # To a type checker it is a dataclass.
    from dataclasses import dataclass as aggregate
else:
    def aggregate(cls):
        """A value of several fields inside a kernel, made from them in the order of the class's annotations."""
        # A constexpr, so that the key of a compiled kernel contains it.
        fields = gl.constexpr(tuple(cls.__annotations__))
        constants = gl.constexpr(tuple(name for name, kind in cls.__annotations__.items() if kind is gl.constexpr))

        def __init__(self, *values):
            for name, value in zip(fields.value, values, strict=True):
                setattr(self, name, gl.constexpr(value) if name in constants.value else value)

        # Since Triton 3.9 that is what the decorator does by itself.
        cls.__init__ = gluon.constexpr_function(__init__)
        return _aggregate(cls)


__all__ = ["aggregate", "barrier", "copy_in", "copy_out"]
