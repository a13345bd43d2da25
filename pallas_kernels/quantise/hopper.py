"""Activations through e4m3 and back in one launch, bound by memory.

A row is read as lines of 128 channels. Four neighbouring threads serve a line: thread p of them
holds channels 8 p to 8 p + 7 of each of its four groups of 32, four loads of 16 bytes, so a group's
largest value is found by two exchanges within the four. A scale is a power of two, hence dividing
by it is multiplying by its reciprocal.

FP4 weights want their rows in another order of K (registers.order_columns): there a thread's 32
values are neighbours, so it can store them in that order, again 16 bytes at a time.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float, Int32

from pallas_kernels import ptx as t

LINE = 128
LINES = 32
"""Lines of a block: one for four of its 128 threads."""
GROUPS = 4
"""Groups of 32 channels in a line, and 16-byte pieces in a group."""


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
        groups = [t.ptx(_ROUND, *words, outputs=4, effects=True) for words in groups]
        stride, step = (64, 16) if fp4 else (16, 64)
        base = t.wide(line, 2 * LINE, t.wide(piece, stride, t.address(out)))
        for i, words in enumerate(_fp4_order(groups) if fp4 else groups):
            t.do(f"st.global.v4.b32 [$0 + {step * i}], {{$1, $2, $3, $4}};", base, *words)

    run(block, x, out, *source)


def _fp4_order(groups: list[Any]) -> list[list[Any]]:
    """Words of a thread's channels as 8 c + 2 group + h: channel 4 h + c of its piece of a group,
    hence the same half of two of its words."""
    select = ("0x5410", "0x7632")
    return [
        [t.ptx(f"prmt.b32 $0, $1, $2, {select[c % 2]};", g[c // 2], g[2 + c // 2]) for g in groups]
        for c in range(4)
    ]


def _round_text() -> str:
    """PTX of eight bf16 in words $4..$7, a quarter of a group, to $0..$3.

    Magnitudes of bf16 and of positive float32 are ordered as their bits are, NaN last, as the
    reference's maxima have it.
    """
    text = "{ .reg .b32 m, n, s, r, a, b, h, w<4>; .reg .b16 q, l, u; .reg .pred p;"
    text += " and.b32 m, $4, 0x7fff7fff;"
    for word in (5, 6, 7):
        text += f" and.b32 n, ${word}, 0x7fff7fff; max.u16x2 m, m, n;"
    for distance in (1, 2):
        text += f" shfl.sync.bfly.b32 n, m, {distance}, 31, 0xffffffff; max.u16x2 m, m, n;"
    text += " shl.b32 n, m, 16; and.b32 m, m, 0xffff0000; max.u32 m, m, n;"
    # max(amax, 1e-4) / 448, then the power of two that is no smaller.
    text += " max.u32 m, m, 0x38d1b717; mov.b32 n, 0x3b124925; mul.rn.f32 m, m, n;"
    text += " add.u32 m, m, 0x7fffff; and.b32 s, m, 0xff800000;"
    # Its reciprocal. An infinite maximum has an infinite scale and a NaN has -0, as the reference
    # has them: 0 and -inf.
    text += " setp.ge.u32 p, s, 0x7f800000; xor.b32 n, s, 0x7f800000;"
    text += " sub.u32 r, 0x7f000000, s; selp.b32 r, n, r, p;"
    for i in range(4):
        text += f" shl.b32 a, ${4 + i}, 16; and.b32 b, ${4 + i}, 0xffff0000;"
        text += " mul.rn.f32 a, a, r; mul.rn.f32 b, b, r;"
        text += " cvt.rn.satfinite.e4m3x2.f32 q, b, a; cvt.rn.f16x2.e4m3x2 h, q;"
        text += " cvt.u16.u32 l, h; shr.u32 h, h, 16; cvt.u16.u32 u, h;"
        text += " cvt.f32.f16 a, l; cvt.f32.f16 b, u; mul.rn.f32 a, a, s; mul.rn.f32 b, b, s;"
        text += f" cvt.rn.bf16x2.f32 w{i}, b, a;"
    return text + "".join(f" mov.b32 ${i}, w{i};" for i in range(4)) + " }"


_ROUND = _round_text()
