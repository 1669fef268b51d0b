"""What the Hopper kernels are made of: views of tiles, register layouts, and cleaning what a product must not see."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def product_layout(columns):
    """The registers of a product of 64 rows by four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def matrix(buffer):
    """A [1, 1, rows, D] tile as the matrix it is."""
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def anew(x):
    """x, an int32, of which the compiler knows nothing: what follows from it is computed here, and not kept in registers through a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def not_finite(x):
    return (x != x) | (gl.abs(x.to(gl.float32)) == float("inf"))


@gluon.jit
def clean(buffer, size, share: gl.constexpr, SHARES: gl.constexpr, FINITE: gl.constexpr):
    """Zeroes the rows from ``size`` on in one of SHARES equal parts of a [CHUNK, D] matrix: a weight of zero times a NaN is NaN.

    FINITE: also what is not finite in the rows before.
    """
    ROWS: gl.constexpr = buffer.shape[0] // SHARES
    part = buffer.slice(share * ROWS, ROWS)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = part.load(layout)
    rows = share * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    kept = (rows < size)[:, None]
    if FINITE:
        kept = kept & (not_finite(values) == 0)
    part.store(gl.where(kept, values, 0.0))
