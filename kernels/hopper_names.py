"""The Gluon names that drift between Triton releases, under one spelling; the Hopper kernels take them from here."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
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



@builtin
def copy_add(tiles, coordinates, source, _semantic=None):
    """Shared to global through the copy engine, added to what is there. Gluon has the operation, but no name for it on Hopper."""
    at = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tiles.handle, at, source.handle)


@gluon.jit
def copies_done():
    """Waits until all that the partition made the copy engine write is written for the whole GPU; ``store_wait`` waits until it is read."""
    # The wait alone speaks for the own thread (PTX, cp.async.bulk.wait_group): another multiprocessor may still come in between.
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; fence.proxy.async.global; fence.acq_rel.gpu; mov.u32 $0, $1;", "=r,r",
                              [gl.to_tensor(0)], gl.int32, False, 1)


__all__ = ["aggregate", "barrier", "copies_done", "copy_add", "copy_in", "copy_out"]
