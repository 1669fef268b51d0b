"""The Gluon names that drift between Triton releases, under one spelling; the Hopper kernels take them from here."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

try:
    # Triton 3.7 and later.
    from triton.experimental.gluon import aggregate
except ImportError:
    from triton.language.core import _aggregate as aggregate

# Waits for the warps of the own partition: thread_barrier until 3.6.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Global to shared through the copy engine, and back: async_load and async_store from 3.9 on.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

__all__ = ["aggregate", "barrier", "copy_in", "copy_out"]
