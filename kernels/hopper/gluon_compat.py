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
    # The wait alone speaks for the own thread (PTX, cp.async.bulk.wait_group): on an H200 additions from another multiprocessor came in
    # between once in a hundred million times. A fence that also acquires would empty the first cache, in which the lists are.
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; fence.proxy.async.global; fence.release.gpu; mov.u32 $0, $1;", "=r,r",
                              [gl.to_tensor(0)], gl.int32, False, 1)


@gluon.jit
def prefetch(pointer, size):
    """Has the copy engine bring ``size`` bytes, a multiple of 16, from ``pointer`` on into L2; for a partition of one warp."""
    gl.inline_asm_elementwise("{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
                              "@first cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, lane; }", "=r,l,r",
                              [pointer.to(gl.int64), gl.to_tensor(size)], gl.int32, False, 1)


__all__ = ["aggregate", "barrier", "copies_done", "copy_add", "copy_in", "copy_out", "prefetch"]
