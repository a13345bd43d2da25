"""Register-level pieces of the Mosaic GPU kernels: expansion of FP4 and FP8 weights, and transposed
stores.

The kernels compute out^T = W x^T with weights as the left operand of `wgmma`, taken from registers,
so that stored weights never exist in a wider form in memory. A warpgroup owns 64 weight rows.
Thread (warp w, lane l) holds two of them, `Rows.local`: rows 16 w + l / 4 and 8 more ("plain"), or
the same channel of two matrices ("paired": gate and up), so that SwiGLU needs no exchange.

Order of K. FP8 and bf16 weights are multiplied in the order of their columns: the four lanes of a
row read the same 16 bytes and each takes its own. For FP4 that would cost more than the expansion
itself, so lane l % 4 takes one 16-byte piece, the 32 codes of one scale group of every 128 columns,
and x must come in the matching order, `order_columns`. Every tile shape uses the one order of its
format, hence a row has the same bits in all of them.

Expansion. A code moved to the bfloat16 fields is value * 2^-BIAS (subnormals included); one
multiplication by 2^(byte - 127 + BIAS - SHIFT) leaves weight * 2^-SHIFT, exact for scale bytes 28
to 160, and the accumulator is multiplied by 2^SHIFT at the end.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector
from jaxtyping import Array, Shaped

plgpu: Any = mosaic_gpu  # its decorators and transforms are beyond the type checker

SHIFT = 32
TOP = 6
CODES = {
    "fp4": (),
    "fp8": (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64)),
    "bf16": (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
    "f32": (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
}
"""How the weights of a step lie in shared memory."""
SCALAR = plgpu.Layout.WG_SPLAT(())


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows of a block's weight tile a thread holds.

    Attributes:
        paired: members are the two halves of the tile (gate, up) instead of neighbours.
        height: rows of the tile, 64 a warpgroup.
    """

    paired: bool
    height: int

    def local(self, member: int) -> ir.Value:
        """Tile row of this thread's member 0 or 1, as i32."""
        warp, row, _ = thread_place()
        stride, offset = (8, self.height // 2) if self.paired else (16, 8)
        return add(add(mul(warp, stride), row), const(member * offset))


def order_columns(
    x: Shaped[Array, "rows k"], kind: str, *, e4m3: bool = False
) -> Shaped[Array, "rows blocks 64"]:
    """x in the K order of weights of this kind, in blocks of 64 columns."""
    rows, k = x.shape
    if e4m3:
        # Code 4 i + e of lane l becomes column 16 i + 4 l + e of the 128.
        x = x.reshape(rows, k // 128, 4, 8, 4).transpose(0, 1, 3, 2, 4)
    elif kind == "fp4":
        # Code 8 j + p + 4 e of lane l becomes column 8 (4 j + p) + 2 l + e of the 128.
        x = x.reshape(rows, k // 128, 4, 4, 2, 4).transpose(0, 1, 3, 5, 2, 4)
    return x.reshape(rows, k // 64, 64)


def const(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def add(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.addi(a, b)


def mul(a: ir.Value, b: int) -> ir.Value:
    return arith.muli(a, const(b))


def thread_place() -> tuple[ir.Value, ir.Value, ir.Value]:
    """(warp within the block, lane / 4, lane % 4) as i32."""
    thread = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
    lane = arith.andi(thread, const(31))
    return arith.shrui(thread, const(5)), arith.shrui(lane, const(2)), arith.andi(lane, const(3))


def load_bytes(pointer: ir.Value, offset: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    byte = ir.IntegerType.get_signless(8)
    return llvm.load(kind, utils.getelementptr(pointer, [offset], byte), alignment=align)


def element(values: ir.Value, index: int) -> ir.Value:
    at = ir.DenseI64ArrayAttr.get([index])
    return vector.extract(values, dynamic_position=[], static_position=at)


def shifted(word: ir.Value, left: int) -> ir.Value:
    if left == 0:
        return word
    return arith.shli(word, const(left)) if left > 0 else arith.shrui(word, const(-left))


def _spread(word: ir.Value, sign: int, magnitude: int, mask: int, factor: ir.Value) -> ir.Value:
    """Two codes of a word as a bf16 pair times `factor`; shifts to the left are positive."""
    i32 = ir.IntegerType.get_signless(32)
    bits = arith.andi(shifted(word, sign), const(0x80008000 - (1 << 32)))
    bits = arith.ori(arith.andi(shifted(word, magnitude), const(mask)), bits)
    # A side effect keeps the product behind the wait for the registers it is written to.
    pair = utils.inline_ptx(
        "mul.rn.bf16x2 $0, $1, $2;", bits, factor, result_types=i32, has_side_effects=True
    )
    return utils.bitcast(pair, ir.VectorType.get((2,), ir.BF16Type.get()))


def scale_factor(byte: ir.Value, bias: int) -> ir.Value:
    """2^(byte - 127 + bias - SHIFT) in both halves of a word."""
    offset = (bias - SHIFT) << 7
    word = mul(arith.extui(ir.IntegerType.get_signless(32), byte), 0x00800080)
    return add(word, const(offset | offset << 16))


def expand_word(word: ir.Value, factor: ir.Value) -> list[ir.Value]:
    """Eight codes -> four bf16 pairs; pair p holds codes p and p + 4."""
    return [_spread(word, 12 - 4 * p, 6 - 4 * p, 0x01C001C0, factor) for p in range(4)]


def e4m3_words(word: ir.Value, low: ir.Value, high: ir.Value) -> list[ir.Value]:
    """Eight codes -> two words of four e4m3 values, magnitudes from the table (low, high)."""
    i32 = word.type
    four = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
    signs, magnitudes = const(0x80808080 - (1 << 32)), arith.andi(word, const(0x77777777))

    def permute(low: ir.Value, high: ir.Value, select: ir.Value) -> ir.Value:
        ptx = "prmt.b32 $0, $1, $2, $3;"
        return utils.inline_ptx(ptx, low, high, select, result_types=i32, has_side_effects=True)

    found = []
    for b in range(2):
        # A selector with its high bit set repeats the chosen byte's sign: 0xFF, and 0x80 without.
        sign = arith.andi(shifted(permute(signs, signs, shifted(word, -16 * b)), 1), signs)
        value = arith.ori(permute(low, high, shifted(magnitudes, -16 * b)), sign)
        found.append(utils.bitcast(value, four))
    return found


def _expand_fp8(words: ir.Value, factor: ir.Value, lane: ir.Value) -> list[ir.Value]:
    """16 bytes -> 2 bf16 pairs: bytes 2 lane + {0, 1} of either half."""
    select = add(mul(lane, 0x2020), const(0x1000))
    word, found = ir.IntegerType.get_signless(32), []
    for half in range(2):
        low, high = element(words, 2 * half), element(words, 2 * half + 1)
        ptx = "prmt.b32 $0, $1, $2, $3;"
        both = utils.inline_ptx(ptx, low, high, select, result_types=word)
        found.append(_spread(both, 0, -4, 0x07F007F0, factor))
    return found


def load_fp4(
    codes, scales, start: Array, largest: Array | None = None, *, rows: Rows, pitch: int
) -> tuple[Array, Array]:
    """This thread's codes of 128 columns and what its scales make of them, still packed.

    Args:
        codes: SMEM uint8 [height, 64].
        scales: SMEM uint8, flat, one row of `pitch` bytes for a tile row.
        start: int32, byte of tile row 0 and of these columns in `scales`.
        largest: of row_exponents, to expand into e4m3; None expands into bf16.

    Returns:
        int32 [64, 16] and [64, 8] whose places in the WGMMA layout carry the words.
    """
    i32 = jnp.dtype(jnp.int32)
    layout = plgpu.Layout.WGMMA
    extra = () if largest is None else (largest,)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, *(layout for _ in extra)),
        return_type=(
            plgpu.ShapeDtypeStruct((64, 16), i32, layout=layout),
            plgpu.ShapeDtypeStruct((64, 8), i32, layout=layout),
        ),
    )
    def load(_, codes, scales, start, *extra):
        lane, byte = thread_place()[2], ir.IntegerType.get_signless(8)
        code_pointer, scale_pointer = utils.memref_ptr(codes), utils.memref_ptr(scales)
        two = ir.VectorType.get((2,), const(0).type)
        words = np.empty(fa.WGMMA_LAYOUT.registers_shape((64, 16)), dtype=object)
        tables = np.empty(fa.WGMMA_LAYOUT.registers_shape((64, 8)), dtype=object)
        for member in range(2):
            row = rows.local(member)
            at = add(mul(row, 64), mul(lane, 16))
            four = load_bytes(code_pointer, at, ir.VectorType.get((4,), const(0).type), 16)
            for j in range(2):
                pair = [element(four, 2 * j), element(four, 2 * j + 1)]
                words[0, j, 0, 0, member, 0, 0, 0, 0] = vector.from_elements(two, pair)
            at = add(add(start.registers.item(), lane), mul(row, pitch))
            scale = load_bytes(scale_pointer, at, byte, 1)
            table = [scale_factor(scale, 126)] * 2
            if extra:
                table = _e4m3_table(scale, member_word(extra[0], member))
            tables[0, 0, 0, 0, member, 0, 0, 0, 0] = vector.from_elements(two, table)
        return tuple(
            fa.FragmentedArray(_registers=r, _layout=fa.WGMMA_LAYOUT, _is_signed=True)
            for r in (words, tables)
        )

    return load(codes, scales, start, *extra)


def member_word(words: fa.FragmentedArray, member: int, index: int = 0) -> ir.Value:
    """A word of this thread's row `member` in a [64, 8] container."""
    return element(words.registers[0, 0, 0, 0, member, 0, 0, 0, 0], index)


def _e4m3_table(scale: ir.Value, largest: ir.Value) -> list[ir.Value]:
    """e4m3 of 0 .5 1 1.5 and of 2 3 4 6 times 2^(scale - largest + TOP); zero below 2^-5."""
    power = add(arith.subi(arith.extui(const(0).type, scale), largest), const(TOP))
    kept = arith.cmpi(arith.CmpIPredicate.sge, power, const(-5))
    low, high = add(mul(power, 0x08080800), const(0x3C383000)), mul(power, 0x08080808)
    high = add(high, const(0x4C484440))
    return [arith.select(kept, low, const(0)), arith.select(kept, high, const(0))]


def expand_fp4(words: Array, tables: Array, half: int, *, e4m3: bool = False) -> Array:
    """64 of the 128 columns of `load_fp4`, ready for `plgpu.wgmma`.

    Returns:
        bf16 [64, 64] * 2^-SHIFT, or e4m3 [64, 64] with the largest scale of a row at 2^TOP: exact
        down to 2^-11 of that scale, zero below.
    """
    shape, layout = (64, 64), plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=layout)
    if e4m3:
        kind = jnp.dtype(jnp.float8_e4m3fn)
        result = plgpu.ShapeDtypeStruct(shape, kind, layout=plgpu.Layout.WGMMA_8BIT)

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=result)
    def expand(_, words, tables):
        layout = fa.WGMMA_LAYOUT_8BIT if e4m3 else fa.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        for member in range(2):
            table = [member_word(tables, member, index) for index in range(2)]
            two = words.registers[0, half, 0, 0, member, 0, 0, 0, 0]
            for j in range(2):
                word = element(two, j)
                found = e4m3_words(word, *table) if e4m3 else expand_word(word, table[0])
                for p, value in enumerate(found):
                    registers[0, len(found) * j + p, 0, 0, member, 0, 0, 0, 0] = value
        return fa.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return expand(words, tables)


def row_exponents(scales, start: Array, *, rows: Rows, pitch: int) -> Array:
    """Largest scale byte of each of this thread's two rows.

    Args:
        scales: SMEM uint8, flat, one row of `pitch` bytes for a tile row.
        start: int32, byte of tile row 0.

    Returns:
        int32 [64, 8] whose places in the WGMMA layout carry the bytes.
    """
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((64, 8), jnp.dtype(jnp.int32), layout=layout),
    )
    def largest(_, scales, start):
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        lane, pointer = thread_place()[2], utils.memref_ptr(scales)
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape((64, 8)), dtype=object)
        for member in range(2):
            at = add(add(start.registers.item(), lane), mul(rows.local(member), pitch))
            found = const(0)
            for group in range(0, pitch, 4):
                value = load_bytes(pointer, add(at, const(group)), byte, 1)
                found = arith.maxui(found, arith.extui(i32, value))
            for distance in (1, 2):
                found = arith.maxui(found, utils.shfl_bfly(found, distance))
            both = vector.from_elements(ir.VectorType.get((2,), i32), [found, found])
            registers[0, 0, 0, 0, member, 0, 0, 0, 0] = both
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=True)

    return largest(scales, start)


def expand_fp8(
    codes,
    scales,
    starts: tuple[Array, Array],
    last: Array | None = None,
    which: Array | int = 0,
    *,
    rows: Rows,
    pitch: int,
) -> Array:
    """64 columns of e4m3 weights with 32 x 32 block scales, ready for `plgpu.wgmma`.

    Args:
        codes: SMEM uint8 [height, 64] with CODES["fp8"].
        scales: of every weight GMEM uint8, flat, one row of `pitch` bytes for 32 rows.
        starts: int32, byte of the first block row and of these columns, for each member.
        last: int32, the last block row that exists, counted from the tile's first; None if all do.
        which: int32, the weight that the codes are of.

    Returns:
        bf16 [64, 64] * 2^-SHIFT.
    """
    layout = plgpu.Layout.WGMMA
    scalars = starts if last is None else (*starts, last)
    chosen = () if len(scales) == 1 else (which,)
    types = (SCALAR,) * (len(chosen) + len(scalars)) + (plgpu.RefType(),) * len(scales)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(CODES["fp8"]), *types),
        return_type=plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=layout),
    )
    def expand(_, codes, *rest):
        number, starts = rest[: len(chosen)], rest[len(chosen) : -len(scales)]
        sources = [utils.memref_ptr(ref) for ref in rest[-len(scales) :]]
        byte, word = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        words, lane = ir.VectorType.get((4,), word), thread_place()[2]
        code_pointer, scale_pointer = utils.memref_ptr(codes), sources[0]
        for i, other in enumerate(sources[1:], 1):
            here = arith.cmpi(arith.CmpIPredicate.eq, number[0].registers.item(), const(i))
            scale_pointer = arith.select(here, other, scale_pointer)
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape((64, 64)), dtype=object)
        for member in range(2):
            row = rows.local(member)
            block = arith.shrui(row, const(5))
            if rows.paired and member:
                block = arith.subi(block, const(rows.height // 64))
            if last is not None:
                block = arith.minui(block, starts[2].registers.item())
            at = add(starts[member].registers.item(), mul(block, pitch))
            turn = arith.andi(shifted(row, -1), const(3))
            for group in range(2):
                scale = load_bytes(scale_pointer, add(at, const(group)), byte, 1)
                factor = scale_factor(scale, 120)
                for piece in (2 * group, 2 * group + 1):
                    chunk = shifted(arith.xori(turn, const(piece)), 4)
                    found = load_bytes(code_pointer, add(mul(row, 64), chunk), words, 16)
                    for h, pair in enumerate(_expand_fp8(found, factor, lane)):
                        registers[0, 2 * piece + h, 0, 0, member, 0, 0, 0, 0] = pair
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return expand(codes, *chosen, *scalars, *scales)
