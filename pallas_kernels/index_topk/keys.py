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

from pallas_kernels.index_topk.pick import Threads, c, do, i32, i64, pick, ptx

SHIFT = 40
TILE = 64
EMPTY = 0xFF80FF80 - 2**32  # -inf, twice
SCALAR = plgpu.Layout.WG_SPLAT(())
NUMBER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

_PAIRS = (
    """{
.reg .b32 w, t<4>, s<4>;
shr.u32 w, $4, 8;
shl.b32 s0, $4, 12; shl.b32 t0, $4, 6; shl.b32 s1, $4, 8; shl.b32 t1, $4, 2;
shl.b32 s2, w, 12; shl.b32 t2, w, 6; shl.b32 s3, w, 8; shl.b32 t3, w, 2;
"""
    + "".join(
        f"and.b32 s{i}, s{i}, 0x80008000; and.b32 t{i}, t{i}, 0x01c001c0; or.b32 t{i}, t{i}, s{i};"
        f" mul.rn.bf16x2 t{i}, t{i}, $5;\n"
        for i in range(4)
    )
    + "mov.b32 $0, t0; mov.b32 $1, t1; mov.b32 $2, t2; mov.b32 $3, t3;\n}"
)


def permute_queries(q: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """Channels in the order in which `expand` lays out those of the keys."""
    step, pair, lane, low = np.meshgrid(range(8), range(2), range(4), range(2), indexing="ij")
    channel = 32 * lane + 8 * (step // 2) + 2 * (step % 2) + pair + 4 * low
    order = np.empty(128, np.int32)
    order[(16 * step + 8 * pair + 2 * lane + low).ravel()] = channel.ravel()
    return q[..., order]


def _layout(count: int):
    return plgpu.Layout.WG_STRIDED((512 * count,), vec_size=4)


def _words(count: int):
    return plgpu.ShapeDtypeStruct((512 * count,), jnp.int32, layout=_layout(count))


def _pack(words):
    """Any number of words of this thread as an array of vectors of four."""
    words = [*words, *[c(0)] * (-len(words) % 4)]
    vectors = []
    for start in range(0, len(words), 4):
        vector = llvm.mlir_undef(ir.VectorType.get((4,), i32()))
        for i, word in enumerate(words[start : start + 4]):
            vector = llvm.insertelement(vector, word, c(i))
        vectors.append(vector)
    layout = mgpu.WGStridedFragLayout((128 * len(words),), 4)
    registers = np.array(vectors, dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def _unpack(array):
    return [llvm.extractelement(v, c(i)) for v in array.registers.flat for i in range(4)]


def _number(array):
    return array.registers.item()


def _scalar(value):
    registers = np.array(value, dtype=object)
    layout = mgpu.WGSplatFragLayout(())
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def _at(ref):
    """Address of a reference: 64 bits in device memory, 32 bits in shared memory."""
    pointer = utils.memref_ptr(ref)
    return llvm.ptrtoint(i32() if utils.is_smem_ref(ref) else i64(), pointer)


def _wide(index, stride: int, base):
    return utils.inline_ptx(
        "mad.wide.s32 $0, $1, $2, $3;", index, c(stride), base, result_types=i64()
    )


def _place():
    """(first row of this thread in a tile, lane % 4)."""
    thread = arith.andi(utils.thread_idx(), c(127))
    lane = arith.andi(thread, c(31))
    row = arith.addi(arith.muli(arith.shrui(thread, c(5)), c(16)), arith.shrui(lane, c(2)))
    return row, arith.andi(lane, c(3))


def _less(a, b):
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def load_weights(weights, columns: int):
    """The pairs of head weights, times 2^40, that go with this thread's columns."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=_words(-(-columns // 32))
    )
    def load(ctx, weights):
        del ctx
        _, lane = _place()
        base = _wide(lane, 4, _at(weights))
        factor = c((127 + SHIFT) << 23 | (127 + SHIFT) << 7)
        out = []
        for tile in range(columns // 8):
            word = ptx(f"ld.global.nc.b32 $0, [$1 + {16 * tile}];", base, effects=True)
            out.append(ptx("mul.rn.bf16x2 $0, $1, $2;", word, factor))
        return _pack(out)

    return load(weights)


def load_visible(visible, rows: int):
    """The number of visible entries of each of at most four rows."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_words(1))
    def load(ctx, visible):
        del ctx
        base = _at(visible)
        text = "ld.global.nc.b32 $0, [$1 + {}];"
        return _pack([ptx(text.format(4 * i), base, effects=True) for i in range(rows)])

    return load(visible)


def tiles(sight, start, most: int, entries: int):
    """Tiles of a chunk that hold an entry visible to some row."""

    @plgpu.inline_mgpu(arg_types=(_layout(1), SCALAR), return_type=NUMBER)
    def count(ctx, sight, start):
        del ctx
        last = c(0)
        for word in _unpack(sight):
            last = arith.maxsi(last, word)
        last = arith.minsi(last, c(entries))
        found = arith.shrsi(arith.addi(arith.subi(last, _number(start)), c(TILE - 1)), c(6))
        return _scalar(arith.maxsi(arith.minsi(found, c(most)), c(0)))

    return count(sight, start)


def load_entries(entries, start):
    """Rows of the two keys of this thread in the tile at `start`; -1 past the end of the list."""
    length = entries.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=_words(1))
    def load(ctx, entries, start):
        del ctx
        row, _ = _place()
        start = _number(start)
        inside = _less(start, c(length))
        position = arith.addi(arith.select(inside, start, c(0)), row)
        base = _wide(position, 4, _at(entries))
        out = []
        for offset in (0, 32):
            word = ptx(f"ld.global.nc.b32 $0, [$1 + {offset}];", base, effects=True)
            out.append(arith.select(inside, word, c(-1)))
        return _pack(out)

    return load(entries, start)


def load_keys(entries, values, scales):
    """16 bytes of each of this thread's two keys and the multipliers of their 32 channels."""

    @plgpu.inline_mgpu(
        arg_types=(_layout(1), plgpu.RefType(), plgpu.RefType()), return_type=_words(3)
    )
    def load(ctx, entries, values, scales):
        del ctx
        _, lane = _place()
        value_base, scale_base = _wide(lane, 16, _at(values)), _wide(lane, 1, _at(scales))
        words, factors = [], []
        for entry in _unpack(entries)[:2]:
            empty = _less(entry, c(0))
            row = arith.select(empty, c(0), entry)
            text = "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];"
            words += ptx(text, _wide(row, 64, value_base), outputs=4, effects=True)
            text = "{ .reg .b16 h; ld.global.nc.b8 h, [$1]; cvt.u32.u16 $0, h; }"
            scale = ptx(text, _wide(row, 4, scale_base), effects=True)
            exponent = arith.minui(arith.addi(scale, c(126 - SHIFT)), c(254))
            factor = arith.muli(exponent, c(0x00800080))
            factors.append(arith.select(empty, c(0), factor))
        return _pack([*words, *factors])

    return load(entries, values, scales)


def expand(raw, half: int):
    """Half of the channels of the tile's keys as a left operand [64, 64] of the tensor cores."""
    shape = (TILE, 64)

    @plgpu.inline_mgpu(
        arg_types=(_layout(3),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def run(ctx, raw):
        del ctx
        words = _unpack(raw)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        flat = [None] * registers.size
        for row in range(2):
            for j in range(2):
                out = ptx(_PAIRS, words[4 * row + 2 * half + j], words[8 + row], outputs=4)
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

    position, offset: number of the tile's first key in the list and in the chunk. scores: reference
    [rows, chunk]; maxima: () or a reference [rows, blocks] in device memory for block maxima.
    """
    rows, chunk = scores.shape
    columns = rows * heads
    words = -(-columns // 32)
    refs = (plgpu.RefType(),) * (1 + len(maxima))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, _layout(words), _layout(1), SCALAR, SCALAR, *refs)
    )
    def run(ctx, dots, weight, sight, position, offset, scores, *maxima):
        del ctx
        f32 = ir.F32Type.get()
        first, lane = _place()
        leader = arith.cmpi(arith.CmpIPredicate.eq, lane, c(0))
        values, weights, limits = dots.registers.flat, _unpack(weight), _unpack(sight)
        position, offset = _number(position), _number(offset)
        base = _at(scores)
        for row in range(rows):
            for i in range(2):
                total = mgpu.c(0.0, f32)
                for j in range(row * heads // 8, (row + 1) * heads // 8):
                    pair = values[2 * j + i]
                    low, high = (llvm.extractelement(pair, c(n)) for n in range(2))
                    total = utils.inline_ptx(
                        _HEADS, low, high, weights[j], total, result_types=f32
                    )
                for distance in (1, 2):
                    other = utils.inline_ptx(
                        f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;",
                        total, result_types=f32, has_side_effects=True,
                    )
                    total = arith.addf(total, other)
                here = arith.addi(first, c(8 * i))
                bits = ptx("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; cvt.u32.u16 $0, h; }", total)
                key = arith.addi(position, here)
                bits = arith.select(_less(key, limits[row]), bits, c(0xFF80))
                byte = _swizzled(arith.muli(arith.addi(offset, here), c(2)))
                address = arith.addi(base, arith.addi(byte, c(2 * chunk * row)))
                text = "{ .reg .b16 h; cvt.u16.u32 h, $1; @$2 st.shared.b16 [$0], h; }"
                do(text, address, bits, leader)
                if maxima:
                    _write_maximum(maxima[0], row, bits, key, limits[row], lane)

    run(dots, weight, sight, position, offset, scores, *maxima)


def _write_maximum(maxima, row: int, bits, key, limit, lane):
    """Maximum of a block of 8 keys, which lie in lanes 4 apart; +inf for the newest visible one."""
    f32 = ir.F32Type.get()
    value = llvm.bitcast(f32, arith.shli(bits, c(16)))
    for distance in (4, 8, 16):
        other = utils.inline_ptx(
            f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;",
            value, result_types=f32, has_side_effects=True,
        )
        value = arith.maximumf(value, other)
    block = arith.shrsi(key, c(3))
    newest = arith.shrsi(arith.subi(limit, c(1)), c(3))
    pinned = arith.cmpi(arith.CmpIPredicate.eq, block, newest)
    word = arith.select(pinned, c(0x7F80), arith.shrui(llvm.bitcast(i32(), value), c(16)))
    row_base = arith.addi(_at(maxima), mgpu.c(2 * row * _row_length(maxima), i64()))
    first_key = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(key, c(7)), c(0))
    leader = arith.andi(first_key, arith.cmpi(arith.CmpIPredicate.eq, lane, c(0)))
    text = "{ .reg .b16 h; cvt.u16.u32 h, $1; @$2 st.global.b16 [$0], h; }"
    do(text, _wide(block, 2, row_base), word, leader)


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
    do(text, _wide(place, 2, base), word, take)


def _store32(base, place, word, take):
    do("st.global.b32 [$0], $1;", _wide(place, 4, base), word, predicate=take)


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

    @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR, SCALAR, *refs))
    def run(ctx, count, start, place, scores, scratch, best, index, *maxima):
        del ctx
        threads = Threads(128, _at(scratch))
        threads.sync()
        count, start, place = _number(count), _number(start), _number(place)
        first = arith.muli(threads.index, c(part))
        scored = _less(first, arith.muli(count, c(TILE)))
        list_start = arith.muli(place, c(keep))
        for row in range(rows):
            words = []
            for chunk_of_8 in range(part // 8):
                byte = _swizzled(arith.addi(arith.muli(first, c(2)), c(16 * chunk_of_8)))
                address = arith.addi(_at(scores), arith.addi(byte, c(2 * chunk * row)))
                text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
                words += ptx(text, address, outputs=4, effects=True)
            words = [arith.select(scored, word, c(EMPTY)) for word in words]
            row_length = _row_length(best)
            base = mgpu.c(row * row_length, i64())
            best_row = arith.addi(_at(best), arith.muli(base, mgpu.c(2, i64())))
            index_row = arith.addi(_at(index), arith.muli(base, mgpu.c(4, i64())))
            best_row, index_row = _wide(list_start, 2, best_row), _wide(list_start, 4, index_row)
            key = arith.addi(start, first)

            def write(which, place, take, words=words, key=key, to=(best_row, index_row)):
                _store16(to[0], place, _half(words, which), take)
                _store32(to[1], place, arith.addi(key, c(which)), take)

            found = pick(threads, words, k, write)
            _fill_list(threads, best_row, index_row, found, keep)
            if maxima:
                blocks = _row_length(maxima[0])
                row_base = arith.addi(_at(maxima[0]), mgpu.c(2 * row * blocks, i64()))
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
        inside = _less(position, c(size))
        address = _wide(arith.select(inside, position, c(0)), 2, _at(scores))
        text = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
        loaded = ptx(text, address, outputs=4, effects=True)
        words += [arith.select(inside, word, c(EMPTY)) for word in loaded]
    return first, words


def merge(best, index, best_out, index_out, scratch, size: int, k: int, keep: int):
    """The k best of a list of scores and indices in order, into `keep` places."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 5)
    def run(ctx, best, index, best_out, index_out, scratch):
        del ctx
        threads = Threads(128, _at(scratch))
        first, words = _load_part(threads, best, size)
        source, best_to, index_to = _at(index), _at(best_out), _at(index_out)

        def write(which, place, take):
            _store16(best_to, place, _half(words, which), take)
            position = arith.addi(first, c(which))
            text = "{ .reg .b32 t; @$2 ld.global.b32 t, [$0]; @$2 st.global.b32 [$1], t; }"
            do(text, _wide(position, 4, source), _wide(place, 4, index_to), take)

        found = pick(threads, words, k, write)
        _fill_list(threads, best_to, index_to, found, keep)

    run(best, index, best_out, index_out, scratch)


def mask(maxima, out, scratch, blocks: int, k: int, count: int):
    """One byte a block: whether it is among the k best of its row."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
    def run(ctx, maxima, out, scratch):
        del ctx
        threads = Threads(count, _at(scratch))
        first, words = _load_part(threads, maxima, blocks)
        to = _at(out)

        def write(which, place, take):
            del place
            position = arith.addi(first, c(which))
            value = arith.extui(i32(), take)
            inside = _less(position, c(blocks))
            text = "{ .reg .b16 h; cvt.u16.u32 h, $1; @$2 st.global.b8 [$0], h; }"
            do(text, _wide(position, 1, to), value, inside)

        pick(threads, words, k, write)

    run(maxima, out, scratch)
