"""Per-thread code that brings a row's projected mixes to a thread and writes them out.

A block has R rows of C mixes, R C neighbouring numbers of every part. All 128 threads add the parts
up, four numbers a thread at a time, and put the sums into shared memory; then thread t takes row
t % R. Both sides of shared memory go by 16 bytes. Rows past the last one are zeros and are not
written.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir.dialects import arith

from pallas_kernels import ptx as t

plgpu: Any = mosaic_gpu  # its decorators are beyond the type checker
THREADS = 128


def load(parts, mean_square, sums, block, held: int) -> list:
    """The C sums over the parts of this thread's row and its mean square, each float32 [128].

    Args:
        parts: GMEM f32 [parts, rows, C].
        mean_square: GMEM f32 [rows].
        sums: SMEM f32 [held C].
        block: int32 scalar; its rows are held * block and on.
        held: rows of a block, a power of two.
    """
    count, rows, mixes = parts.shape
    wide = _width(mixes)
    pieces, total = held * mixes // wide, rows * mixes // wide

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), t.SCALAR),
        return_type=[t.words(1)] * (mixes + 1),
    )
    def loaded(ctx, parts, mean_square, sums, block):
        del ctx
        thread, block, shared = t.thread(), t.number(block), t.address(sums)
        source = t.address(parts)

        def add_up(turn, carry):
            piece = arith.addi(thread, arith.muli(turn, t.c(THREADS)))
            number = arith.addi(arith.muli(block, t.c(pieces)), piece)
            inside = t.less(piece, t.c(pieces))
            there = arith.andi(inside, t.less(number, t.c(total)))
            number = arith.select(there, number, t.c(-1))
            words = _read(number, wide, source, 0)
            for part in range(1, count):
                more = _read(number, wide, source, 4 * part * rows * mixes)
                pairs = zip(words, more, strict=True)
                words = [t.ptx("add.f32 $0, $1, $2;", *pair) for pair in pairs]
            to = arith.addi(shared, arith.muli(piece, t.c(4 * wide)))
            _write("shared", to, words, inside)
            return carry

        t.repeat(-(-pieces // THREADS), [], add_up)
        utils.warpgroup_barrier()
        mine = arith.andi(thread, t.c(held - 1))
        row = arith.addi(arith.muli(block, t.c(held)), mine)
        at = arith.addi(shared, arith.muli(mine, t.c(4 * mixes)))
        found = []
        for first in range(0, mixes, wide):
            text = f"ld.shared{_vector(wide, 0)}, [${wide} + {4 * first}];"
            words = t.ptx(text, at, outputs=wide, effects=True)
            found += words if isinstance(words, (list, tuple)) else [words]
        there = arith.select(t.less(row, t.c(rows)), row, t.c(-1))
        found.append(t.load_if("b32", there, 4, t.address(mean_square)))
        return [t.pack([word]) for word in found]

    words = loaded(parts, mean_square, sums, block)
    return [lax.bitcast_convert_type(word, jnp.float32) for word in words]


def store(values: list, out, block, held: int) -> None:
    """Writes this thread's numbers as its row of `out`.

    Args:
        values: float32 [128] each.
        out: GMEM f32, first dimension rows, len(values) numbers a row.
        block, held: as in `load`.
    """
    rows, wide = out.shape[0], _width(len(values))

    @plgpu.inline_mgpu(
        arg_types=([t.layout(1)] * len(values), plgpu.RefType(), t.SCALAR), return_type=None
    )
    def stored(ctx, values, out, block):
        del ctx
        thread = t.thread()
        row = arith.addi(arith.muli(t.number(block), t.c(held)), thread)
        there = arith.andi(t.less(thread, t.c(held)), t.less(row, t.c(rows)))
        at = t.wide(row, 4 * len(values), t.address(out))
        words = [t.unpack(value)[0] for value in values]
        for first in range(0, len(words), wide):
            _write("global", at, words[first : first + wide], there, 4 * first)

    stored([lax.bitcast_convert_type(value, jnp.int32) for value in values], out, block)


def _width(numbers: int) -> int:
    """Numbers that one access moves."""
    return 4 if numbers % 4 == 0 else 1


def _read(number, wide: int, source, offset: int) -> list:
    """`wide` words of device memory, zeros if number < 0."""
    if wide == 1:
        return [t.load_if("b32", number, 4, source, offset)]
    words: Any = t.load_row(number, 16, source, offset)
    return list(words)


def _write(space: str, to, words: list, there, offset: int = 0) -> None:
    size, names = _vector(len(words), 1).split(" ", 1)
    t.do(f"st.{space}{size} [$0 + {offset}], {names};", to, *words, predicate=there)


def _vector(wide: int, first: int) -> str:
    """Type and operands of an access that moves `wide` words, "${first}" and on."""
    names = ", ".join(f"${first + i}" for i in range(wide))
    return f".b32 {names}" if wide == 1 else f".v{wide}.b32 {{{names}}}"
