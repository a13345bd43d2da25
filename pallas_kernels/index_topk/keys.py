"""Per-thread code of the indexer: stored keys -> tensor-core fragments, dot products -> scores.

A tile is 64 keys. Thread (warp, lane) owns rows 16 warp + lane / 4 and 8 below it, and of those
rows the 16 bytes, 32 channels and one scale, number lane % 4. e2m1 bits s ee m become bfloat16
s 000000ee m000000; the scale 2^(b - 127), times 2^126 for the exponent bias and 2^-40 against
overflow, is applied in the same product, and the head weights are multiplied by 2^40 in return:
all of it exact for scales up to 2^41.

Rounding is that of `reference.py`: the dot product to bfloat16, relu, its product with the weight
to bfloat16, the sum over heads in float32, then bfloat16.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Float

from pallas_kernels import ptx as t
from pallas_kernels.ptx import c, do, i32, i64, less, ptx

SHIFT = 40
TILE = 64
WIDTH = 128
DEPTH = 4  # tiles that are on their way
TILE_BYTES = 128 * (2 * 16 + 2 * 4)


def permute_queries(q: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """Channels in the order in which `expand` lays out those of the keys."""
    step, pair, lane, low = np.meshgrid(range(8), range(2), range(4), range(2), indexing="ij")
    channel = 32 * lane + 8 * (step // 2) + 2 * (step % 2) + pair + 4 * low
    order = np.empty(128, np.int32)
    order[(16 * step + 8 * pair + 2 * lane + low).ravel()] = channel.ravel()
    return q[..., order]


def _place():
    """(first row of this thread in a tile, lane % 4)."""
    thread = arith.andi(utils.thread_idx(), c(127))
    lane = arith.andi(thread, c(31))
    row = arith.addi(arith.muli(arith.shrui(thread, c(5)), c(16)), arith.shrui(lane, c(2)))
    return row, arith.andi(lane, c(3))


def load_weights(weights, columns: int):
    """The pairs of head weights, times 2^40, that go with this thread's columns."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=t.words(columns // 8))
    def load(ctx, weights):
        del ctx
        _, lane = _place()
        base = t.wide(lane, 4, t.address(weights))
        factor = c((127 + SHIFT) << 23 | (127 + SHIFT) << 7)
        out = []
        for tile in range(columns // 8):
            word = ptx(f"ld.global.nc.b32 $0, [$1 + {16 * tile}];", base, effects=True)
            out.append(ptx("mul.rn.bf16x2 $0, $1, $2;", word, factor))
        return t.pack(out)

    return load(weights)


def load_visible(visible, rows: int):
    """The number of visible entries of each row."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=t.words(rows))
    def load(ctx, visible):
        del ctx
        base = t.address(visible)
        text = "ld.global.nc.b32 $0, [$1 + {}];"
        return t.pack([ptx(text.format(4 * i), base, effects=True) for i in range(rows)])

    return load(visible)


def tiles(sight, rows: int, start, most: int):
    """Tiles of a chunk up to the last entry visible to some row, an even number of them."""

    @plgpu.inline_mgpu(arg_types=(t.layout(rows), t.SCALAR), return_type=t.NUMBER)
    def count(ctx, sight, start):
        del ctx
        last = c(0)
        for word in t.unpack(sight):
            last = arith.maxsi(last, word)
        found = arith.shrsi(arith.addi(arith.subi(last, t.number(start)), c(2 * TILE - 1)), c(7))
        found = arith.muli(found, c(2))
        return t.scalar(arith.maxsi(arith.minsi(found, c(most)), c(0)))

    return count(sight, start)


def load_entries(entries, start, end):
    """Rows of the two keys of this thread in the tile at `start` of a list; -1 from `end` on."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), t.SCALAR, t.SCALAR), return_type=t.words(2))
    def load(ctx, entries, start, end):
        del ctx
        row, _ = _place()
        position = arith.addi(t.number(start), row)
        inside = arith.select(less(t.number(start), t.number(end)), position, c(-1))
        base = t.address(entries)
        return t.pack([t.load_if("b32", inside, 4, base, at, otherwise=-1) for at in (0, 32)])

    return load(entries, start, end)


def _ring(ring, tile):
    """Where this thread keeps its pieces of a tile: two of 16 bytes, two words."""
    slot = arith.andi(tile, c(DEPTH - 1))
    base = arith.addi(t.address(ring), arith.muli(slot, c(TILE_BYTES)))
    thread = t.thread()
    wide = arith.addi(base, arith.muli(thread, c(16)))
    return wide, arith.addi(arith.addi(base, c(4096)), arith.muli(thread, c(4)))


def start_keys(entries, values, scales, ring, tile):
    """Starts copying this thread's two keys of a tile: 16 bytes of each and its four scales."""

    @plgpu.inline_mgpu(
        arg_types=(t.layout(2), plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), t.SCALAR)
    )
    def start(ctx, entries, values, scales, ring, tile):
        del ctx
        _, lane = _place()
        value_base, scale_base = t.wide(lane, 16, t.address(values)), t.address(scales)
        codes, words = _ring(ring, t.number(tile))
        for i, entry in enumerate(t.unpack(entries)):
            t.copy_row(16, entry, WIDTH // 2, value_base, arith.addi(codes, c(2048 * i)))
            t.copy_row(4, entry, WIDTH // 32, scale_base, arith.addi(words, c(512 * i)))
        t.commit_copies()

    start(entries, values, scales, ring, tile)


def take_keys(ring, tile):
    """This thread's pieces of a tile, started DEPTH tiles ago: codes of two keys, their scales."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), t.SCALAR), return_type=t.words(10))
    def take(ctx, ring, tile):
        del ctx
        t.wait_copies(DEPTH - 1)
        codes, words = _ring(ring, t.number(tile))
        found = []
        for i in range(2):
            text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {2048 * i}];"
            found += ptx(text, codes, outputs=4, effects=True)
        text = "ld.shared.b32 $0, [$1 + {}];"
        found += [ptx(text.format(512 * i), words, effects=True) for i in range(2)]
        return t.pack(found)

    return take(ring, tile)


def finish_copies():
    """Waits for every started copy, before the ring is used for another list."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        del ctx
        t.wait_copies(0)

    wait()


def expand(raw, half: int):
    """Half of the channels of the tile's keys as a left operand [64, 64] of the tensor cores."""
    shape = (TILE, 64)

    @plgpu.inline_mgpu(
        arg_types=(t.layout(10),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def run(ctx, raw):
        del ctx
        words = t.unpack(raw)
        _, lane = _place()
        shift = arith.muli(lane, c(8))
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        flat = [None] * registers.size
        for row in range(2):
            byte = arith.andi(arith.shrui(words[8 + row], shift), c(255))
            exponent = arith.minsi(arith.addi(byte, c(126 - SHIFT)), c(254))
            factor = arith.muli(exponent, c(0x00800080))
            for j in range(2):
                out = ptx(t.E2M1_WORD, words[4 * row + 2 * half + j], factor, outputs=4)
                for i, word in enumerate(out):
                    flat[2 * (4 * j + i) + row] = llvm.bitcast(pair, word)
        for place, word in zip(np.ndindex(registers.shape), flat, strict=True):
            registers[place] = word
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return run(raw)


def swizzled(byte):
    """Byte address in a row of scores, so that threads read their parts without bank conflicts."""
    return arith.xori(byte, arith.shli(arith.andi(arith.shrui(byte, c(7)), c(7)), c(4)))


_HEADS = """{
.reg .b32 p, x; .reg .f32 lo, hi;
cvt.rn.relu.bf16x2.f32 p, $2, $1;
mul.rn.bf16x2 p, p, $3;
shl.b32 x, p, 16; mov.b32 lo, x; and.b32 x, p, 0xffff0000; mov.b32 hi, x;
add.f32 lo, lo, $4; add.f32 $0, lo, hi;
}"""


def score(dots, weight, sight, position, offset, scores, maxima, heads: int):
    """Dot products of a tile [64, rows x heads] -> bfloat16 scores in shared memory.

    position, offset: number of the tile's first key in the list and in the chunk; nothing is
    written for a negative offset. scores: reference [rows, chunk]; maxima: () or a reference
    [rows, blocks] in device memory for block maxima.
    """
    rows, chunk = scores.shape
    columns = rows * heads
    refs = (plgpu.RefType(),) * (1 + len(maxima))

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            t.layout(columns // 8),
            t.layout(rows),
            t.SCALAR,
            t.SCALAR,
            *refs,
        )
    )
    def run(ctx, dots, weight, sight, position, offset, scores, *maxima):
        del ctx
        f32 = ir.F32Type.get()
        first, lane = _place()
        values, weights, limits = dots.registers.flat, t.unpack(weight), t.unpack(sight)
        position, offset = t.number(position), t.number(offset)
        real = less(c(-1), offset)
        leader = arith.andi(real, t.equal(lane, c(0)))
        base = t.address(scores)
        for row in range(rows):
            for i in range(2):
                total = mgpu.c(0.0, f32)
                for j in range(row * heads // 8, (row + 1) * heads // 8):
                    pair = values[2 * j + i]
                    low, high = (llvm.extractelement(pair, c(n)) for n in range(2))
                    total = utils.inline_ptx(_HEADS, low, high, weights[j], total, result_types=f32)
                for distance in (1, 2):
                    other = utils.inline_ptx(
                        f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;",
                        total,
                        result_types=f32,
                        has_side_effects=True,
                    )
                    total = arith.addf(total, other)
                here = arith.addi(first, c(8 * i))
                bits = ptx("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; cvt.u32.u16 $0, h; }", total)
                key = arith.addi(position, here)
                bits = arith.select(less(key, limits[row]), bits, c(0xFF80))
                byte = swizzled(arith.muli(arith.addi(offset, here), c(2)))
                address = arith.addi(base, arith.addi(byte, c(2 * chunk * row)))
                text = "{ .reg .b16 h; cvt.u16.u32 h, $1; @$2 st.shared.b16 [$0], h; }"
                do(text, address, bits, leader)
                if maxima:
                    _write_maximum(maxima[0], row, bits, key, limits[row], leader)

    run(dots, weight, sight, position, offset, scores, *maxima)


def _write_maximum(maxima, row: int, bits, key, limit, leader):
    """Maximum of a block of 8 keys, which lie in lanes 4 apart; +inf for the newest visible one."""
    f32 = ir.F32Type.get()
    value = llvm.bitcast(f32, arith.shli(bits, c(16)))
    for distance in (4, 8, 16):
        other = utils.inline_ptx(
            f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;",
            value,
            result_types=f32,
            has_side_effects=True,
        )
        value = arith.maximumf(value, other)
    block = arith.shrsi(key, c(3))
    newest = arith.shrsi(arith.subi(limit, c(1)), c(3))
    pinned = t.equal(block, newest)
    word = arith.select(pinned, c(0x7F80), arith.shrui(llvm.bitcast(i32(), value), c(16)))
    row_base = arith.addi(t.address(maxima), mgpu.c(2 * row * row_length(maxima), i64()))
    leader = arith.andi(leader, t.equal(arith.andi(key, c(7)), c(0)))
    text = "{ .reg .b16 h; cvt.u16.u32 h, $1; @$2 st.global.b16 [$0], h; }"
    do(text, t.wide(block, 2, row_base), word, leader)


def row_length(ref) -> int:
    """Length of the last axis of a reference inside per-thread code."""
    return ir.MemRefType(ref.type).shape[-1]
