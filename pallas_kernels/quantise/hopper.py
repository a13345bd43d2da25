"""Activations through e4m3 and back in one launch, bound by memory; after SwiGLU in
gated.py, after the norm in norm.py.

A row is read as lines of 128 channels, four threads a line; threads.py says who holds what.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float, Int32

from pallas_kernels import ptx as t
from pallas_kernels.quantise import threads
from pallas_kernels.quantise.gated import swiglu as swiglu
from pallas_kernels.quantise.norm import normed as normed
from pallas_kernels.quantise.threads import GROUPS, LINE

LINES = 32
"""Lines of a block: one for four of its 128 threads."""


def round_trip(
    x: Float[Array, "tok k"], source: Int32[Array, " rows"] | None = None, *, kind: str = "fp8"
) -> Float[Array, "rows k"]:
    """See pallas_kernels.quantise.round_trip.

    Args:
        source: the result's row r is made of x[source[r]]; None takes every row once, in order. No
            index may be out of range.
        kind: of the weights that the rows are for; their channels come in its order of K
            (registers.order_columns).
    """
    rows, k = x.shape[0] if source is None else source.shape[0], x.shape[1]
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"rows are {x.dtype}, the kernel takes bfloat16")
    if k % LINE:
        raise NotImplementedError(f"K = {k} is not a multiple of {LINE}")
    if rows * k == 0 or x.size == 0:
        raise NotImplementedError("no rows")
    found = _program(rows, k // LINE, source is not None, kind == "fp4")
    lines = x.reshape(-1, LINE)
    return (found(lines) if source is None else found(lines, source)).reshape(rows, k)


@functools.lru_cache(maxsize=64)
def _program(rows: int, per_row: int, gathered: bool, fp4: bool):
    """The callable for one shape: [lines, 128] and perhaps source -> [rows per_row, 128]."""
    lines = rows * per_row

    def body(x, *rest):
        *source, out = rest
        one_block(lax.axis_index("block"), x, out, *source, lines=lines, per_row=per_row, fp4=fp4)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((lines, LINE), jnp.bfloat16),
        grid=(-(-lines // LINES),),
        grid_names=("block",),
        kernel_name=f"quantise_k{per_row * LINE}",
    )


def one_block(block, x, out, *source, lines: int, per_row: int, fp4: bool) -> None:
    """The lines of a block; threads past the last line repeat that one.

    Args:
        block: int32.
        x, out: GMEM bf16 [_, 128]; `out` has `lines` of them.
        source: GMEM int32 [lines / per_row], or nothing.
        per_row: lines of a row.
        fp4: store in the order of FP4 weights.
    """
    refs = (plgpu.RefType(),) * (2 + len(source))

    @plgpu.inline_mgpu(arg_types=(t.SCALAR, *refs))
    def run(_, block, x, out, *source):
        thread = t.thread()
        line = arith.addi(arith.muli(t.number(block), t.c(LINES)), arith.shrui(thread, t.c(2)))
        line = arith.minui(line, t.c(lines - 1))
        start = line
        if source:
            row = arith.divui(line, t.c(per_row))
            column = arith.subi(line, arith.muli(row, t.c(per_row)))
            place = t.wide(row, 4, t.address(source[0]))
            row = t.ptx("ld.global.nc.b32 $0, [$1];", place, effects=True)
            start = arith.addi(arith.muli(row, t.c(per_row)), column)
        piece = arith.andi(thread, t.c(3))
        base = t.wide(start, 2 * LINE, t.wide(piece, 16, t.address(x)))
        text = "ld.global.nc.v4.b32 {{$0, $1, $2, $3}}, [$4 + {}];"
        groups = [t.ptx(text.format(64 * g), base, outputs=4, effects=True) for g in range(GROUPS)]
        threads.store(threads.rounded(groups), line, piece, t.address(out), fp4=fp4)

    run(block, x, out, *source)
