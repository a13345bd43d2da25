"""Rows through an RMS norm and their way through e4m3, in one launch.

A block has a row. Thread t holds its pieces t, t + 128, ... of eight neighbouring channels, rounded
to bfloat16; four neighbouring threads have a group of 32. Squares are added in float32: a thread's
own in order, then a warp's by exchanges, then the four warps' in order, whatever the number of
rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu
from jax.typing import DTypeLike
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float

from pallas_kernels import ptx as t
from pallas_kernels.quantise import threads
from pallas_kernels.quantise.threads import LINE

plgpu: Any = mosaic_gpu  # its decorators are beyond the type checker
PIECE = 8
"""Channels a thread takes at a time: 16 bytes of bfloat16."""
MOST = 8192
"""Channels of a row that the threads of a block keep in their registers."""


def normed(
    parts: Float[Array, "parts rows k"],
    weight: Float[Array, " k"],
    *,
    eps: float,
    dtype: DTypeLike,
) -> tuple[Float[Array, "rows k"], Float[Array, "rows k"]]:
    """See pallas_kernels.quantise.normed."""
    count, rows, k = parts.shape
    if jnp.dtype(dtype) != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"rows are {jnp.dtype(dtype)} and the weight {weight.dtype}, the kernel takes bfloat16"
        )
    if parts.dtype != jnp.float32 and (parts.dtype != jnp.bfloat16 or count > 1):
        raise NotImplementedError(
            f"{count} parts are {parts.dtype}, expected float32, or one in bfloat16"
        )
    if k % LINE or k > MOST:
        raise NotImplementedError(f"K = {k} is not a multiple of {LINE} up to {MOST}")
    if count * rows * k == 0:
        raise NotImplementedError("no rows")
    return _program(count, rows, k, parts.dtype == jnp.float32, eps)(parts, weight)


@functools.lru_cache(maxsize=64)
def _program(count: int, rows: int, k: int, wide: bool, eps: float):
    """The callable for one shape."""

    def body(parts, weight, normed, rounded, scratch):
        refs = (parts, weight, normed, rounded, scratch)
        one_row(lax.axis_index("row"), *refs, count=count, rows=rows, k=k, wide=wide, eps=eps)

    out = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16)
    return plgpu.kernel(
        body,
        out_type=(out, out),
        grid=(rows,),
        grid_names=("row",),
        scratch_types=[plgpu.SMEM((64,), jnp.int32)],
        kernel_name=f"norm_quantise_k{k}" + (f"_{count}parts" if wide else ""),
        compiler_params=t.PARAMETERS,
    )


def one_row(
    row,
    parts,
    weight,
    normed,
    rounded,
    scratch,
    *,
    count: int,
    rows: int,
    k: int,
    wide: bool,
    eps: float,
) -> None:
    """A row of a block.

    Args:
        row: int32.
        parts: GMEM [count, rows, k], float32 if wide, else bf16 and one.
        weight: GMEM bf16 [k].
        normed, rounded: GMEM bf16 [rows, k].
        scratch: SMEM int32 [64].
    """

    @plgpu.inline_mgpu(arg_types=(t.SCALAR, *(plgpu.RefType(),) * 5))
    def run(_, row, parts, weight, normed, rounded, scratch):
        team, row = t.Threads(t.address(scratch)), t.number(row)
        pieces = _pieces(team.index, k // PIECE)
        sources = [_row(t.address(parts), i * rows, row, k, 4 if wide else 2) for i in range(count)]
        held = [_read(piece, sources, wide) for piece in pieces]
        factors = [_factors(piece, t.address(weight)) for piece in pieces]
        squares = t.c(0)
        for words in held:
            squares = t.ptx(_SQUARES, squares, *words)
        total = team.float_total(squares)
        inverse = t.ptx(_INVERSE, total, t.c(_bits(k)), t.c(_bits(eps)))
        outs = [_row(t.address(out), 0, row, k, 2) for out in (normed, rounded)]
        for piece, words, factor in zip(pieces, held, factors, strict=True):
            words: Any = t.ptx(_NORM, *words, *factor, inverse, outputs=4)
            for out, found in zip(outs, (words, threads.rounded([words])[0]), strict=True):
                inside = t.less(t.c(-1), piece)
                place = t.wide(piece, 2 * PIECE, out)
                t.do("st.global.v4.b32 [$0], {$1, $2, $3, $4};", place, *found, predicate=inside)

    run(row, parts, weight, normed, rounded, scratch)


def _pieces(thread, count: int) -> list:
    """Numbers of a thread's pieces of a row of `count`, -1 where there is none."""
    found = [arith.addi(thread, t.c(first)) for first in range(0, count, 128)]
    if count % 128:
        found[-1] = arith.select(t.less(found[-1], t.c(count)), found[-1], t.c(-1))
    return found


def _row(base, before: int, row, k: int, size: int):
    """Address of a row of k numbers of `size` bytes, `before` rows further than its number says."""
    return t.wide(arith.addi(row, t.c(before)), size * k, base)


def _read(piece, sources: list, wide: bool) -> list:
    """A piece of the sum of the parts in bfloat16, two channels a word; zeros where it is -1."""
    if not wide:
        return _load(piece, 2 * PIECE, sources[0])
    total = []
    for base in sources:
        more = _load(piece, 4 * PIECE, base) + _load(piece, 4 * PIECE, base, 16)
        pairs = zip(total, more, strict=True) if total else ()
        # Part by part, so that no more of them are held than the assembler finds registers for.
        total = [t.ptx("add.f32 $0, $1, $2;", *pair) for pair in pairs] or more
    pairs = zip(total[::2], total[1::2], strict=True)
    return [t.ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", *pair) for pair in pairs]


def _load(piece, stride: int, base, offset: int = 0) -> list:
    """Four words that are read once."""
    words: Any = t.load_row(piece, stride, base, offset)
    return list(words)


def _factors(piece, base) -> list:
    """Four words of the weight, which every row reads: they may stay near the block's processor."""
    place = t.wide(arith.maxsi(piece, t.c(0)), 2 * PIECE, base)
    text = "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];"
    words: Any = t.ptx(text, place, outputs=4, effects=True)
    return list(words)


def _bits(number: int | float) -> int:
    """A positive number as float32 bits."""
    return int(np.float32(number).view(np.uint32))


def _halves(word: str, low: str, high: str) -> str:
    """PTX of the two bf16 of a word in float32."""
    return f" shl.b32 {low}, {word}, 16; and.b32 {high}, {word}, 0xffff0000;"


_SQUARES = "{ .reg .b32 a, b, s; mov.b32 s, $1;"
_SQUARES += "".join(
    _halves(f"${2 + i}", "a", "b")
    + " mul.rn.f32 a, a, a; add.f32 s, s, a; mul.rn.f32 b, b, b; add.f32 s, s, b;"
    for i in range(4)
)
_SQUARES += " mov.b32 $0, s; }"
"""$1 plus the squares of the eight bf16 in words $2..$5."""

_INVERSE = (
    "{ .reg .b32 m; div.rn.f32 m, $1, $2; add.f32 m, m, $3; rsqrt.approx.f32 m, m; mov.b32 $0, m; }"
)
"""1 / sqrt($1 / $2 + $3)."""

_NORM = "{ .reg .b32 a, b, x, y, w<4>;"
_NORM += "".join(
    _halves(f"${4 + i}", "a", "b")
    + _halves(f"${8 + i}", "x", "y")
    + " mul.rn.f32 a, a, $12; mul.rn.f32 b, b, $12; mul.rn.f32 a, x, a; mul.rn.f32 b, y, b;"
    + f" cvt.rn.bf16x2.f32 w{i}, b, a;"
    for i in range(4)
)
_NORM += "".join(f" mov.b32 ${i}, w{i};" for i in range(4)) + " }"
"""The eight bf16 in $4..$7 times $12 times the factors in $8..$11, rounded once."""
