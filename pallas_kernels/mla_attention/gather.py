"""Per-thread code that brings stored rows into shared memory as tiles for the tensor cores.

A block is 64 rows of 512 channels in bfloat16, in 8 x 64 tiles with the 128-byte swizzle: 16-byte
chunk c of row r lies at 8192 (r / 8) + 1024 (c / 8) + 128 (r % 8) + 16 ((c % 8) ^ (r % 8)). One
warpgroup fills it, a quarter (128 channels of every row) at a time, so that a product over the
channels can start on the first quarter. A thread serves two rows, 8 warp + lane % 8 and 32 further
down, and every fourth 16 bytes of a quarter from lane / 8 on: eight lanes write eight different
banks, and four lanes read 64 neighbouring bytes of a row.

Stored formats, expanded exactly (an empty slot gives zeros):
  bfloat16             copied asynchronously
  e4m3, e8m0 a 32      bits s eeee mmm -> bfloat16 s 0000eeee mmm0000, times 2^120, times scale
  e2m1, e4m3 a 16      bits s ee m -> bfloat16 s 000000ee m000000, times 2^126, times scale
Both products run on bfloat16 pairs and neither can round.

Stored rows are read a unit at a time, two 16-byte pieces a thread: a quarter of e2m1, half a
quarter of e4m3. A unit is UNIT words a thread between its load and its store.
"""

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_kernels import ptx as t

BLOCK = 64
WIDTH = 512
QUARTERS = 4
UNIT = 10
UNITS = {"bfloat16": 0, "e2m1": 4, "e4m3": 8}
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

_E4M3_PAIR = """{{
.reg .b32 t, s;
prmt.b32 t, $1, 0, {pick};
shl.b32 s, t, 8; shl.b32 t, t, 4; and.b32 s, s, 0x80008000; and.b32 t, t, 0x07f007f0;
or.b32 t, t, s; mul.rn.bf16x2 t, t, $3; mul.rn.bf16x2 $0, t, $2;
}}"""
_LOW, _HIGH = "0x4140", "0x4342"  # bytes 0, 1 or 2, 3 of a word into the low bytes of a pair
_TWO_126, _TWO_120, _ONE = 0x7E807E80, 0x7B807B80, 0x3F803F80


def _lane():
    """(row of this thread in 32 rows, 16-byte piece of its row in four)."""
    thread = t.thread()
    row = arith.addi(arith.andi(thread, t.c(7)), arith.muli(arith.shrui(thread, t.c(5)), t.c(8)))
    return row, arith.andi(arith.shrui(thread, t.c(3)), t.c(3))


def load_index(index):
    """Row numbers of this thread's two slots of a block: `index` is a reference to 64 int32."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=t.words(2))
    def load(ctx, index):
        del ctx
        row, _ = _lane()
        base = t.wide(row, 4, t.address(index))
        text = "ld.global.nc.b32 $0, [$1 + {}];"
        return t.pack([t.ptx(text.format(128 * i), base, effects=True) for i in range(2)])

    return load(index)


def write_mask(index, mask):
    """Writes 0 for a filled and -inf for an empty slot of a block: 64 float32 in shared memory."""

    @plgpu.inline_mgpu(arg_types=(t.layout(2), plgpu.RefType()))
    def write(ctx, index, mask):
        del ctx
        row, piece = _lane()
        first = t.equal(piece, t.c(0))
        base = arith.addi(t.address(mask), arith.muli(row, t.c(4)))
        for i, slot in enumerate(t.unpack(index)):
            bits = arith.select(t.less(slot, t.c(0)), t.c(-(2**23)), t.c(0))  # -inf or 0
            t.do(f"st.shared.b32 [$0 + {128 * i}], $1;", base, bits, predicate=first)

    write(index, mask)


def load_e2m1(index, values, scales, unit: int):
    """Loads a quarter: of each of two rows 16 bytes of codes and a pair of scales."""

    @plgpu.inline_mgpu(
        arg_types=(t.layout(2), plgpu.RefType(), plgpu.RefType()), return_type=t.words(UNIT)
    )
    def load(ctx, index, values, scales):
        del ctx
        _, piece = _lane()
        value_base = t.wide(piece, 16, t.address(values))
        scale_base = t.wide(piece, 2, t.address(scales))
        codes, pairs = [], []
        for slot in t.unpack(index):
            codes += t.load_row(slot, WIDTH // 2, value_base, 64 * unit)
            pairs.append(t.load_if("u16", slot, WIDTH // 16, scale_base, 8 * unit))
        return t.pack([*codes, *pairs])

    return load(index, values, scales)


def load_e4m3(index, values, scales, unit: int):
    """Loads half a quarter: of each of two rows 16 bytes of values and a scale."""

    @plgpu.inline_mgpu(
        arg_types=(t.layout(2), plgpu.RefType(), plgpu.RefType()), return_type=t.words(UNIT)
    )
    def load(ctx, index, values, scales):
        del ctx
        _, piece = _lane()
        value_base = t.wide(piece, 16, t.address(values))
        scale_base = t.wide(arith.shrui(piece, t.c(1)), 1, t.address(scales))
        codes, bytes_ = [], []
        for slot in t.unpack(index):
            codes += t.load_row(slot, WIDTH, value_base, 64 * unit)
            bytes_.append(t.load_if("u8", slot, WIDTH // 32, scale_base, 2 * unit))
        return t.pack([*codes, *bytes_])

    return load(index, values, scales)


def _chunks(block, chunk, count: int):
    """Addresses of `count` chunks from `chunk` on, in the same 64 channels of this thread's row."""
    row, _ = _lane()
    low = arith.andi(row, t.c(7))
    base = arith.addi(t.address(block), arith.muli(arith.shrui(row, t.c(3)), t.c(8192)))
    base = arith.addi(base, arith.muli(low, t.c(128)))
    base = arith.addi(base, arith.muli(arith.shrui(chunk, t.c(3)), t.c(1024)))
    first = arith.andi(chunk, t.c(7))
    swizzled = [arith.xori(arith.addi(first, t.c(i)), low) for i in range(count)]
    return [arith.addi(base, arith.muli(x, t.c(16))) for x in swizzled]


def _store128(address, offset: int, values):
    t.do(f"st.shared.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};", address, *values)


def store_e2m1(raw, block, unit: int):
    """Expands what load_e2m1 gave into its quarter of a block."""

    @plgpu.inline_mgpu(arg_types=(t.layout(UNIT), plgpu.RefType(TRANSFORMS)))
    def store(ctx, raw, block):
        del ctx
        _, piece = _lane()
        raw = t.unpack(raw)
        to = _chunks(block, arith.muli(piece, t.c(4)), 4)
        one, two_120, two_126 = t.c(_ONE), t.c(_TWO_120), t.c(_TWO_126)
        for row in range(2):
            both = t.ptx(_E4M3_PAIR.format(pick=_LOW), raw[8 + row], one, two_120)
            scales = [t.ptx(f"prmt.b32 $0, $1, $1, {p};", both) for p in ("0x1010", "0x3232")]
            for i, word in enumerate(raw[4 * row : 4 * row + 4]):
                pairs = t.ptx(t.E2M1_WORD, word, two_126, outputs=4)
                pairs = [t.ptx("mul.rn.bf16x2 $0, $1, $2;", x, scales[i // 2]) for x in pairs]
                # the pairs are (0, 4), (1, 5), (2, 6), (3, 7): back to the order of the channels
                out = []
                for pick in ("0x5410", "0x7632"):
                    for low, high in (pairs[:2], pairs[2:]):
                        out.append(t.ptx(f"prmt.b32 $0, $1, $2, {pick};", low, high))
                _store128(to[i], 2048 * unit + 32768 * row, out)

    store(raw, block)


def store_e4m3(raw, block, unit: int):
    """Expands what load_e4m3 gave into its half of a quarter of a block."""

    @plgpu.inline_mgpu(arg_types=(t.layout(UNIT), plgpu.RefType(TRANSFORMS)))
    def store(ctx, raw, block):
        del ctx
        _, piece = _lane()
        raw = t.unpack(raw)
        to = _chunks(block, arith.muli(piece, t.c(2)), 2)
        two_120 = t.c(_TWO_120)
        for row in range(2):
            byte = raw[8 + row]
            # e8m0 byte b is bfloat16 with exponent b; byte 0 is the subnormal 2^-127
            scale = arith.select(t.equal(byte, t.c(0)), t.c(0x40), arith.shli(byte, t.c(7)))
            scale = t.ptx("prmt.b32 $0, $1, $1, 0x1010;", scale)
            pairs = []
            for word in raw[4 * row : 4 * row + 4]:
                for pick in (_LOW, _HIGH):
                    pairs.append(t.ptx(_E4M3_PAIR.format(pick=pick), word, scale, two_120))
            for i in range(2):
                _store128(to[i], 1024 * unit + 32768 * row, pairs[4 * i : 4 * i + 4])

    store(raw, block)


def copy_bfloat16(index, rows, block, quarter: int):
    """Starts copying a quarter of a block; `finish_copies` waits for it."""

    @plgpu.inline_mgpu(arg_types=(t.layout(2), plgpu.RefType(), plgpu.RefType(TRANSFORMS)))
    def copy(ctx, index, rows, block):
        del ctx
        _, piece = _lane()
        source = t.wide(piece, 16, t.address(rows))
        to = _chunks(block, piece, 1)[0], _chunks(block, arith.addi(piece, t.c(4)), 1)[0]
        for row, slot in enumerate(t.unpack(index)):
            size = arith.select(t.less(slot, t.c(0)), t.c(0), t.c(16))
            start = t.wide(arith.maxsi(slot, t.c(0)), 2 * WIDTH, source)
            for i in range(4):
                offset = 2048 * quarter + 1024 * (i // 2) + 32768 * row
                text = f"cp.async.cg.shared.global.L2::128B [$0 + {offset}], "
                text += f"[$1 + {256 * quarter + 64 * i}], 16, $2;"
                t.do(text, to[i % 2], start, size)
        t.commit_copies()

    copy(index, rows, block)


def nothing():
    """What stands for a unit where rows are copied asynchronously."""

    @plgpu.inline_mgpu(return_type=t.words(UNIT))
    def make(ctx):
        del ctx
        return t.pack([t.c(0)] * UNIT)

    return make()


def finish_copies(pending: int):
    """Waits until at most `pending` of this thread's started quarters are under way."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        del ctx
        t.wait_copies(pending)

    wait()


def publish():
    """Makes this thread's writes to shared memory visible to the tensor cores; then arrive."""

    @plgpu.inline_mgpu()
    def fence(ctx):
        del ctx
        t.do("fence.proxy.async.shared::cta;")

    fence()
