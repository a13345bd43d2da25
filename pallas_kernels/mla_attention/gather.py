"""Per-thread code that brings stored rows into shared memory as bfloat16 tiles for the tensor cores.

A block is 64 rows of 512 channels, in 8 x 64 tiles with the 128-byte swizzle: 16-byte chunk c of
row r lies at 8192 (r / 8) + 1024 (c / 8) + 128 (r % 8) + 16 ((c % 8) ^ (r % 8)). One warpgroup fills
it. A thread always serves row r % 8 = lane % 8, so that eight lanes write eight different banks,
and the same channels of every eighth row, 64 neighbouring bytes a row and warp.

Stored formats, expanded exactly:
  bfloat16   copied asynchronously, an empty slot is filled with zeros without a read;
  e4m3 + e8m0 a 32 channels    bits s eeee mmm -> bfloat16 s 0000eeee mmm0000, times 2^120, times scale;
  e2m1 + e4m3 a 16 channels    bits s ee m -> bfloat16 s 000000ee m000000, times 2^126, times scale.
Both products run on bfloat16 pairs and neither can round. An empty slot has scale 0.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

BLOCK = 64
WIDTH = 512
STEPS = BLOCK // 8
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

_E2M1_WORD = (
    """{
.reg .b32 w, t<4>, s<4>;
shr.u32 w, $4, 8;
shl.b32 s0, $4, 12; shl.b32 t0, $4, 6; shl.b32 s1, $4, 8; shl.b32 t1, $4, 2;
shl.b32 s2, w, 12; shl.b32 t2, w, 6; shl.b32 s3, w, 8; shl.b32 t3, w, 2;
"""
    + "".join(
        f"and.b32 s{i}, s{i}, 0x80008000; and.b32 t{i}, t{i}, 0x01c001c0; or.b32 t{i}, t{i}, s{i};"
        f" mul.rn.bf16x2 t{i}, t{i}, $6; mul.rn.bf16x2 t{i}, t{i}, $5;\n"
        for i in range(4)
    )
    + """prmt.b32 $0, t0, t1, 0x5410; prmt.b32 $1, t2, t3, 0x5410;
prmt.b32 $2, t0, t1, 0x7632; prmt.b32 $3, t2, t3, 0x7632;
}"""
)

_E4M3_PAIR = """{{
.reg .b32 t, s;
prmt.b32 t, $1, 0, {pick};
shl.b32 s, t, 8; shl.b32 t, t, 4; and.b32 s, s, 0x80008000; and.b32 t, t, 0x07f007f0;
or.b32 t, t, s; mul.rn.bf16x2 t, t, $3; mul.rn.bf16x2 $0, t, $2;
}}"""
_LOW, _HIGH = "0x4140", "0x4342"  # bytes 0, 1 or 2, 3 of a word into the low bytes of a pair
_TWO_126, _TWO_120, _ONE = 0x7E807E80, 0x7B807B80, 0x3F803F80


def _i32():
    return ir.IntegerType.get_signless(32)


def _i64():
    return ir.IntegerType.get_signless(64)


def _c(x: int):
    return mgpu.c(x, _i32())


def _ptx(text: str, *args, outputs: int = 1, effects: bool = False):
    out = utils.inline_ptx(
        text, *args, result_types=[_i32()] * outputs, has_side_effects=effects
    )
    return out[0] if outputs == 1 else out


def _lane():
    """(lane % 8, chunk column 0..15): which row of eight, and which 16th of it, a thread serves."""
    thread = arith.andi(mgpu.thread_idx(), _c(127))
    return arith.andi(thread, _c(7)), arith.shrui(thread, _c(3))


def _address(ref, space_bits):
    pointer = utils.memref_ptr(ref)
    return llvm.ptrtoint(_i32() if space_bits == 32 else _i64(), pointer)


def _wide(index, stride: int, base):
    """base + index * stride, 64 bits."""
    return utils.inline_ptx(
        "mad.wide.s32 $0, $1, $2, $3;", index, _c(stride), base, result_types=_i64()
    )


def _vector(words):
    out = llvm.mlir_undef(ir.VectorType.get((4,), _i32()))
    for i, word in enumerate(words):
        out = llvm.insertelement(out, word, _c(i))
    return out


def _words(vector):
    return [llvm.extractelement(vector, _c(i)) for i in range(4)]


def _load16(address):
    text = "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];"
    return _ptx(text, address, outputs=4, effects=True)


def _fragments(vectors):
    registers = np.array(vectors, dtype=object)
    layout = mgpu.WGStridedFragLayout((512 * len(vectors),), 4)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def words(count: int):
    """Type of `count` vectors of four words a thread, carried between the steps of the producer."""
    return plgpu.ShapeDtypeStruct(
        (512 * count,), jnp.int32, layout=plgpu.Layout.WG_STRIDED((512 * count,), vec_size=4)
    )


def _layout(count: int):
    return plgpu.Layout.WG_STRIDED((512 * count,), vec_size=4)


def load_index(index):
    """The rows of a block that this thread serves: `index` is a reference to 64 int32."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=words(2))
    def load(ctx, index):
        del ctx
        row, _ = _lane()
        base = _wide(row, 4, _address(index, 64))
        found = []
        for step in range(STEPS):
            text = f"ld.global.nc.b32 $0, [$1 + {32 * step}];"
            found.append(_ptx(text, base, effects=True))
        return _fragments([_vector(found[:4]), _vector(found[4:])])

    return load(index)


def _rows_of(index):
    return [word for vector in index.registers.flat for word in _words(vector)]


def write_mask(index, mask):
    """Writes 0 for a filled and -inf for an empty slot of the block to 64 float32 in shared memory."""

    @plgpu.inline_mgpu(arg_types=(_layout(2), plgpu.RefType()))
    def write(ctx, index, mask):
        del ctx
        row, column = _lane()
        first = arith.cmpi(arith.CmpIPredicate.eq, column, _c(0))
        base = arith.addi(_address(mask, 32), arith.muli(row, _c(4)))
        for step, slot in enumerate(_rows_of(index)):
            empty = arith.cmpi(arith.CmpIPredicate.slt, slot, _c(0))
            value = arith.select(empty, _c(-(2**23)), _c(0))  # the bits of -inf and of 0
            utils.inline_ptx(
                f"st.shared.b32 [$0 + {32 * step}], $1;",
                base, value, predicate=first, has_side_effects=True,
            )

    write(index, mask)


def load_e2m1(index, values, scales):
    """Loads 64 rows of 256 + 32 bytes -> (8 vectors of codes, 2 vectors of scale pairs) a thread."""

    @plgpu.inline_mgpu(
        arg_types=(_layout(2), plgpu.RefType(), plgpu.RefType()), return_type=(words(8), words(2))
    )
    def load(ctx, index, values, scales):
        del ctx
        _, column = _lane()
        value_base = _wide(column, 16, _address(values, 64))
        scale_base = _wide(column, 2, _address(scales, 64))
        codes, pairs = [], []
        for slot in _rows_of(index):
            empty = arith.cmpi(arith.CmpIPredicate.slt, slot, _c(0))
            row = arith.select(empty, _c(0), slot)
            codes.append(_vector(_load16(_wide(row, WIDTH // 2, value_base))))
            text = "{ .reg .b16 h; ld.global.nc.b16 h, [$1]; cvt.u32.u16 $0, h; }"
            pair = _ptx(text, _wide(row, WIDTH // 16, scale_base), effects=True)
            pairs.append(arith.select(empty, _c(0), pair))
        return _fragments(codes), _fragments([_vector(pairs[:4]), _vector(pairs[4:])])

    return load(index, values, scales)


def _chunk_offsets(row, chunk, count: int):
    """Addresses, within a tile row of blocks, of `count` chunks from `chunk` on (same 64 channels)."""
    tile = arith.addi(
        arith.muli(arith.shrui(chunk, _c(3)), _c(1024)), arith.muli(row, _c(128))
    )
    first = arith.andi(chunk, _c(7))
    out = []
    for i in range(count):
        swizzled = arith.xori(arith.addi(first, _c(i)), row)
        out.append(arith.addi(tile, arith.muli(swizzled, _c(16))))
    return out


def _store16(address, offset: int, values):
    utils.inline_ptx(
        f"st.shared.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};",
        address, *values, has_side_effects=True,
    )


def store_e2m1(codes, pairs, block):
    """Expands what load_e2m1 gave into a block."""

    @plgpu.inline_mgpu(arg_types=(_layout(8), _layout(2), plgpu.RefType(TRANSFORMS)))
    def store(ctx, codes, pairs, block):
        del ctx
        row, column = _lane()
        base = _address(block, 32)
        offsets = _chunk_offsets(row, arith.muli(column, _c(4)), 4)
        offsets = [arith.addi(base, x) for x in offsets]
        one, two_120, two_126 = _c(_ONE), _c(_TWO_120), _c(_TWO_126)
        for step, pair in enumerate(_rows_of(pairs)):
            both = _ptx(_E4M3_PAIR.format(pick=_LOW), pair, one, two_120)
            scale = [_ptx(f"prmt.b32 $0, $1, $1, {p};", both) for p in ("0x1010", "0x3232")]
            for i, word in enumerate(_words(codes.registers.flat[step])):
                values = _ptx(_E2M1_WORD, word, scale[i // 2], two_126, outputs=4)
                _store16(offsets[i], 8192 * step, values)

    store(codes, pairs, block)


def load_e4m3(index, values, scales, half: int):
    """Loads 256 of the 512 channels of 64 rows -> (8 vectors of values, 2 vectors of scale bytes)."""

    @plgpu.inline_mgpu(
        arg_types=(_layout(2), plgpu.RefType(), plgpu.RefType()), return_type=(words(8), words(2))
    )
    def load(ctx, index, values, scales):
        del ctx
        _, column = _lane()
        column = arith.addi(column, _c(16 * half))
        value_base = _wide(column, 16, _address(values, 64))
        scale_base = _wide(arith.shrui(column, _c(1)), 1, _address(scales, 64))
        codes, bytes_ = [], []
        for slot in _rows_of(index):
            empty = arith.cmpi(arith.CmpIPredicate.slt, slot, _c(0))
            row = arith.select(empty, _c(0), slot)
            codes.append(_vector(_load16(_wide(row, WIDTH, value_base))))
            text = "{ .reg .b16 h; ld.global.nc.b8 h, [$1]; cvt.u32.u16 $0, h; }"
            scale = _ptx(text, _wide(row, WIDTH // 32, scale_base), effects=True)
            # e8m0 byte b is bfloat16 with exponent b; byte 0 is the subnormal 2^-127
            lowest = arith.cmpi(arith.CmpIPredicate.eq, scale, _c(0))
            scale = arith.select(lowest, _c(0x40), arith.shli(scale, _c(7)))
            bytes_.append(arith.select(empty, _c(0), scale))
        return _fragments(codes), _fragments([_vector(bytes_[:4]), _vector(bytes_[4:])])

    return load(index, values, scales)


def store_e4m3(codes, scales, block, half: int):
    """Expands what load_e4m3 gave into its half of a block."""

    @plgpu.inline_mgpu(arg_types=(_layout(8), _layout(2), plgpu.RefType(TRANSFORMS)))
    def store(ctx, codes, scales, block):
        del ctx
        row, column = _lane()
        base = _address(block, 32)
        chunk = arith.muli(arith.addi(column, _c(16 * half)), _c(2))
        offsets = [arith.addi(base, x) for x in _chunk_offsets(row, chunk, 2)]
        two_120 = _c(_TWO_120)
        for step, scale in enumerate(_rows_of(scales)):
            scale = _ptx("prmt.b32 $0, $1, $1, 0x1010;", scale)
            pairs = []
            for word in _words(codes.registers.flat[step]):
                for pick in (_LOW, _HIGH):
                    pairs.append(_ptx(_E4M3_PAIR.format(pick=pick), word, scale, two_120))
            for i in range(2):
                _store16(offsets[i], 8192 * step, pairs[4 * i : 4 * i + 4])

    store(codes, scales, block)


def copy_bfloat16(index, rows, block):
    """Starts copying 64 rows into a block; `finish_copies` waits for them."""

    @plgpu.inline_mgpu(arg_types=(_layout(2), plgpu.RefType(), plgpu.RefType(TRANSFORMS)))
    def copy(ctx, index, rows, block):
        del ctx
        row, column = _lane()
        source = _wide(column, 16, _address(rows, 64))
        base = _address(block, 32)
        offset = arith.addi(base, _chunk_offsets(row, column, 1)[0])
        for step, slot in enumerate(_rows_of(index)):
            empty = arith.cmpi(arith.CmpIPredicate.slt, slot, _c(0))
            size = arith.select(empty, _c(0), _c(16))
            start = _wide(arith.select(empty, _c(0), slot), 2 * WIDTH, source)
            for i in range(4):
                utils.inline_ptx(
                    f"cp.async.cg.shared.global.L2::128B [$0 + {8192 * step + 2048 * i}], "
                    f"[$1 + {256 * i}], 16, $2;",
                    offset, start, size, has_side_effects=True,
                )
        utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    copy(index, rows, block)


def finish_copies(pending: int = 0):
    """Waits until at most `pending` groups of this thread's copies are under way."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        del ctx
        utils.inline_ptx(f"cp.async.wait_group {pending};", has_side_effects=True)

    wait()


def publish():
    """Makes this thread's writes to shared memory visible to the tensor cores; then arrive."""

    @plgpu.inline_mgpu()
    def fence(ctx):
        del ctx
        utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    fence()
