"""Per-thread code of the indexer: stored keys -> tensor-core fragments, dot products -> scores.

A tile is 64 keys. Thread (warp, lane) owns rows 16 warp + lane / 4 and 8 below it, and of those rows
the 16 bytes, 32 channels and one scale, number lane % 4. e2m1 bits s ee m become bfloat16
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
from jaxlib.mlir.dialects import arith, llvm, scf
from jaxtyping import Array, Float

from pallas_kernels.index_topk.pick import Threads, pick
from pallas_kernels.mla_attention import ptx as t
from pallas_kernels.mla_attention.ptx import c, do, i32, i64, less, ptx

SHIFT = 40
TILE = 64
EMPTY = 0xFF80FF80 - 2**32  # -inf, twice


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


def load_entries(entries, start):
    """Rows of the two keys of this thread in the tile at `start`; -1 past the end of the list."""
    length = entries.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), t.SCALAR), return_type=t.words(2))
    def load(ctx, entries, start):
        del ctx
        row, _ = _place()
        start = t.number(start)
        inside = less(start, c(length))
        position = arith.addi(arith.select(inside, start, c(0)), row)
        base = t.wide(position, 4, t.address(entries))
        out = []
        for offset in (0, 32):
            word = ptx(f"ld.global.nc.b32 $0, [$1 + {offset}];", base, effects=True)
            out.append(arith.select(inside, word, c(-1)))
        return t.pack(out)

    return load(entries, start)


def load_keys(entries, values, scales):
    """16 bytes of each of this thread's two keys and the multipliers of their 32 channels."""

    @plgpu.inline_mgpu(
        arg_types=(t.layout(2), plgpu.RefType(), plgpu.RefType()), return_type=t.words(10)
    )
    def load(ctx, entries, values, scales):
        del ctx
        _, lane = _place()
        value_base, scale_base = (
            t.wide(lane, 16, t.address(values)),
            t.wide(lane, 1, t.address(scales)),
        )
        words, factors = [], []
        for entry in t.unpack(entries):
            empty = less(entry, c(0))
            row = arith.select(empty, c(0), entry)
            words += t.load128(t.wide(row, 64, value_base))
            scale = t.load_byte(t.wide(row, 4, scale_base))
            exponent = arith.minui(arith.addi(scale, c(126 - SHIFT)), c(254))
            factor = arith.muli(exponent, c(0x00800080))
            factors.append(arith.select(empty, c(0), factor))
        return t.pack([*words, *factors])

    return load(entries, values, scales)


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
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        flat = [None] * registers.size
        for row in range(2):
            for j in range(2):
                out = ptx(t.E2M1_WORD, words[4 * row + 2 * half + j], words[8 + row], outputs=4)
                for i, word in enumerate(out):
                    flat[2 * (4 * j + i) + row] = llvm.bitcast(pair, word)
        registers.flat = flat
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return run(raw)


def _swizzled(byte):
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

    position, offset: number of the tile's first key in the list and in the chunk; nothing is written
    for a negative offset. scores: reference [rows, chunk]; maxima: () or a reference [rows, blocks]
    in device memory for block maxima.
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
                byte = _swizzled(arith.muli(arith.addi(offset, here), c(2)))
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
    row_base = arith.addi(t.address(maxima), mgpu.c(2 * row * _row_length(maxima), i64()))
    leader = arith.andi(leader, t.equal(arith.andi(key, c(7)), c(0)))
    text = "{ .reg .b16 h; cvt.u16.u32 h, $1; @$2 st.global.b16 [$0], h; }"
    do(text, t.wide(block, 2, row_base), word, leader)


def _row_length(ref) -> int:
    return ir.MemRefType(ref.type).shape[-1]


def _fill(threads: Threads, first, last, write):
    """Calls write(p) for p = first .. last - 1, spread over the threads."""
    loop = scf.ForOp(arith.addi(first, threads.index), last, c(threads.count), [])
    with ir.InsertionPoint(loop.body):
        write(loop.induction_variable)
        scf.YieldOp([])


def _store16(base, place, word, take):
    text = "{ .reg .b16 h; cvt.u16.u32 h, $1; @$2 st.global.b16 [$0], h; }"
    do(text, t.wide(place, 2, base), word, take)


def _store32(base, place, word, take):
    do("st.global.b32 [$0], $1;", t.wide(place, 4, base), word, predicate=take)


def _half(words, which: int):
    word = words[which // 2]
    return arith.shrui(word, c(16)) if which % 2 else arith.andi(word, c(0xFFFF))


def _fill_list(threads, best, index, found, keep: int):
    def write(place):
        yes = mgpu.c(1, ir.IntegerType.get_signless(1))
        _store16(best, place, c(0xFF80), yes)
        _store32(index, place, c(-1), yes)

    _fill(threads, found, c(keep), write)


def finish(scores, scratch, count, start, place, k: int, keep: int, out, maxima):
    """Writes a chunk's k best scores and their indices, ascending, into its `keep` places."""
    rows, chunk = scores.shape
    part = chunk // 128
    refs = (plgpu.RefType(),) * (4 + len(maxima))

    @plgpu.inline_mgpu(arg_types=(t.SCALAR, t.SCALAR, t.SCALAR, *refs))
    def run(ctx, count, start, place, scores, scratch, best, index, *maxima):
        del ctx
        threads = Threads(128, t.address(scratch))
        threads.sync()
        count, start, place = t.number(count), t.number(start), t.number(place)
        first = arith.muli(threads.index, c(part))
        scored = less(first, arith.muli(count, c(TILE)))
        list_start = arith.muli(place, c(keep))
        for row in range(rows):
            words = []
            for chunk_of_8 in range(part // 8):
                byte = _swizzled(arith.addi(arith.muli(first, c(2)), c(16 * chunk_of_8)))
                address = arith.addi(t.address(scores), arith.addi(byte, c(2 * chunk * row)))
                text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
                words += ptx(text, address, outputs=4, effects=True)
            words = [arith.select(scored, word, c(EMPTY)) for word in words]
            row_length = _row_length(best)
            base = mgpu.c(row * row_length, i64())
            best_row = arith.addi(t.address(best), arith.muli(base, mgpu.c(2, i64())))
            index_row = arith.addi(t.address(index), arith.muli(base, mgpu.c(4, i64())))
            best_row, index_row = t.wide(list_start, 2, best_row), t.wide(list_start, 4, index_row)
            key = arith.addi(start, first)

            def write(which, place, take, words=words, key=key, to=(best_row, index_row)):
                _store16(to[0], place, _half(words, which), take)
                _store32(to[1], place, arith.addi(key, c(which)), take)

            found = pick(threads, words, k, write)
            _fill_list(threads, best_row, index_row, found, keep)
            if maxima:
                blocks = _row_length(maxima[0])
                row_base = arith.addi(t.address(maxima[0]), mgpu.c(2 * row * blocks, i64()))
                yes = mgpu.c(1, ir.IntegerType.get_signless(1))
                low = arith.shrui(arith.addi(start, arith.muli(count, c(TILE))), c(3))
                high = arith.minui(arith.shrui(arith.addi(start, c(chunk)), c(3)), c(blocks))
                _fill(threads, low, high, lambda p, b=row_base: _store16(b, p, c(0xFF80), yes))

    run(count, start, place, scores, scratch, *out, *maxima)


def _load_part(threads: Threads, scores, size: int):
    """(this thread's first entry, its scores as words) of a list in device memory."""
    part = -(-size // (8 * threads.count)) * 8
    first = arith.muli(threads.index, c(part))
    words = []
    for step in range(part // 8):
        position = arith.addi(first, c(8 * step))
        inside = less(position, c(size))
        address = t.wide(arith.select(inside, position, c(0)), 2, t.address(scores))
        text = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
        loaded = ptx(text, address, outputs=4, effects=True)
        words += [arith.select(inside, word, c(EMPTY)) for word in loaded]
    return first, words


def merge(best, index, best_out, index_out, scratch, places, size: int, k: int, keep: int):
    """The k best of a list of scores and indices in order, into `keep` places."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 6)
    def run(ctx, best, index, best_out, index_out, scratch, places):
        del ctx
        threads = Threads(128, t.address(scratch))
        first, words = _load_part(threads, best, size)
        source, best_to, index_to = t.address(index), t.address(best_out), t.address(index_out)
        chosen = t.address(places)

        def write(which, place, take):
            _store16(best_to, place, _half(words, which), take)
            to = arith.addi(chosen, arith.muli(place, c(4)))
            do("st.shared.b32 [$0], $1;", to, arith.addi(first, c(which)), predicate=take)

        found = pick(threads, words, k, write)
        threads.sync()

        def fetch(place):
            at = arith.addi(chosen, arith.muli(place, c(4)))
            position = ptx("ld.shared.b32 $0, [$1];", at, effects=True)
            entry = ptx("ld.global.b32 $0, [$1];", t.wide(position, 4, source), effects=True)
            _store32(index_to, place, entry, mgpu.c(1, ir.IntegerType.get_signless(1)))

        _fill(threads, c(0), found, fetch)
        _fill_list(threads, best_to, index_to, found, keep)

    run(best, index, best_out, index_out, scratch, places)


def mask(maxima, out, scratch, blocks: int, k: int, count: int):
    """One byte a block: whether it is among the k best of its row."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
    def run(ctx, maxima, out, scratch):
        del ctx
        threads = Threads(count, t.address(scratch))
        first, words = _load_part(threads, maxima, blocks)
        to = t.address(out)

        def write(which, place, take):
            del place
            position = arith.addi(first, c(which))
            value = arith.extui(i32(), take)
            inside = less(position, c(blocks))
            text = "{ .reg .b16 h; cvt.u16.u32 h, $1; @$2 st.global.b8 [$0], h; }"
            do(text, t.wide(position, 1, to), value, inside)

        pick(threads, words, k, write)

    run(maxima, out, scratch)
