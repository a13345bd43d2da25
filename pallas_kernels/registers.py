"""Register-level pieces of the Mosaic GPU kernels: expansion of FP4 and FP8 weights, and transposed
stores.

The kernels compute out^T = W x^T with weights as the left operand of `wgmma`, taken from registers,
so that stored weights never exist in a wider form in memory. A warpgroup owns 64 weight rows.
Thread (warp w, lane l) holds two of them, `Rows.local`: rows 16 w + l / 4 and 8 more ("plain"), or
the same channel of two matrices ("paired": gate and up), so that SwiGLU needs no exchange.

Order of K. Lane l takes one 16-byte piece per row, number l % 4: 32 FP4 codes of every 128 columns
(one scale group), or 16 FP8 values of every 64. Its registers i = 0, 1, ... are what `wgmma` reads
as columns 8 i + 2 (l % 4) + {0, 1}, so x must come in the matching order: `order_columns`. Every
tile shape uses this one order, hence a row has the same bits in all.

Expansion. A code moved to the bfloat16 fields is value * 2^-BIAS (subnormals included); one
multiplication by 2^(byte - 127 + BIAS - SHIFT) leaves weight * 2^-SHIFT, exact for scale bytes 28
to 160, and the accumulator is multiplied by 2^SHIFT at the end.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector
from jaxtyping import Array, Shaped

SHIFT = 32
SCALAR = plgpu.Layout.WG_SPLAT(())
PLAIN_16 = (plgpu.TilingTransform((1, 64)), plgpu.SwizzleTransform(128))
PLAIN_32 = (plgpu.TilingTransform((1, 32)), plgpu.SwizzleTransform(128))
PAIRED_16 = (plgpu.TilingTransform((1, 32)), plgpu.SwizzleTransform(64))


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
        warp, row, _ = _thread()
        stride, offset = (8, self.height // 2) if self.paired else (16, 8)
        return _add(_add(_mul(warp, stride), row), _i32(member * offset))


def order_columns(x: Shaped[Array, "rows k"], kind: str) -> Shaped[Array, "blocks rows 64"]:
    """x in the K order of weights of this kind, as [K / 64, rows, 64] so that one copy takes whole
    lines."""
    rows, k = x.shape
    if kind == "fp4":
        blocks = x.reshape(rows, k // 128, 4, 4, 2, 4)  # row, block of 128, lane, j, e, p
        ordered = blocks.transpose(1, 3, 5, 0, 2, 4).reshape(k // 128, 2, 8, rows, 8)
        return ordered.transpose(0, 1, 3, 2, 4).reshape(k // 64, rows, 64)
    if kind == "fp8":
        blocks = x.reshape(rows, k // 64, 4, 4, 2, 2)  # row, block of 64, lane, j, e, p
        return blocks.transpose(1, 0, 3, 5, 2, 4).reshape(k // 64, rows, 64)
    return x.reshape(rows, k // 64, 64).transpose(1, 0, 2)


def _i32(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _add(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.addi(a, b)


def _mul(a: ir.Value, b: int) -> ir.Value:
    return arith.muli(a, _i32(b))


def _thread() -> tuple[ir.Value, ir.Value, ir.Value]:
    """(warp within the block, lane / 4, lane % 4) as i32."""
    thread = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
    lane = arith.andi(thread, _i32(31))
    return arith.shrui(thread, _i32(5)), arith.shrui(lane, _i32(2)), arith.andi(lane, _i32(3))


def _load(pointer: ir.Value, offset: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    byte = ir.IntegerType.get_signless(8)
    return llvm.load(kind, utils.getelementptr(pointer, [offset], byte), alignment=align)


def _element(values: ir.Value, index: int) -> ir.Value:
    at = ir.DenseI64ArrayAttr.get([index])
    return vector.extract(values, dynamic_position=[], static_position=at)


def _shift(word: ir.Value, left: int) -> ir.Value:
    if left == 0:
        return word
    return arith.shli(word, _i32(left)) if left > 0 else arith.shrui(word, _i32(-left))


def _spread(word: ir.Value, sign: int, magnitude: int, mask: int, factor: ir.Value) -> ir.Value:
    """Two codes of a word as a bf16 pair times `factor`; shifts to the left are positive."""
    i32 = ir.IntegerType.get_signless(32)
    bits = arith.andi(_shift(word, sign), _i32(0x80008000 - (1 << 32)))
    bits = arith.ori(arith.andi(_shift(word, magnitude), _i32(mask)), bits)
    pair = utils.inline_ptx("mul.rn.bf16x2 $0, $1, $2;", bits, factor, result_types=i32)
    return utils.bitcast(pair, ir.VectorType.get((2,), ir.BF16Type.get()))


def _factor(byte: ir.Value, bias: int) -> ir.Value:
    """2^(byte - 127 + bias - SHIFT) in both halves of a word."""
    offset = (bias - SHIFT) << 7
    word = _mul(arith.extui(ir.IntegerType.get_signless(32), byte), 0x00800080)
    return _add(word, _i32(offset | offset << 16))


def _expand_fp4(words: ir.Value, factor: ir.Value) -> list[ir.Value]:
    """16 bytes -> 16 bf16 pairs; pair 4 j + p holds codes 8 j + p and 8 j + p + 4."""
    return [
        _spread(_element(words, j), 12 - 4 * p, 6 - 4 * p, 0x01C001C0, factor)
        for j in range(4)
        for p in range(4)
    ]


def _expand_fp8(words: ir.Value, factor: ir.Value) -> list[ir.Value]:
    """16 bytes -> 8 bf16 pairs; pair 2 j + p holds bytes 4 j + p and 4 j + p + 2."""
    return [
        _spread(_element(words, j), 8 - 8 * p, 4 - 8 * p, 0x07F007F0, factor)
        for j in range(4)
        for p in range(2)
    ]


def expand(kind: str, weights, scales, scale_at: Array, *, rows: Rows, pitch: int) -> Array:
    """64 or 128 columns of this warpgroup's weights in registers, ready for `plgpu.wgmma`.

    Args:
        kind: "fp4" or "fp8".
        weights: SMEM uint8 [height, 64]: the codes of 128 (fp4) or 64 (fp8) columns.
        scales: uint8, flat. fp4: SMEM scales of the tile, rows of `pitch` bytes. fp8: GMEM block
            scales, block rows of `pitch` bytes.
        scale_at: int32, byte of tile row 0 and the first of these columns. fp8 paired: int32 for
            each member.

    Returns:
        bf16 [64, 128 or 64] * 2^-SHIFT in the WGMMA layout.
    """
    shape = (64, 128 if kind == "fp4" else 64)
    starts = scale_at if isinstance(scale_at, tuple) else (scale_at, scale_at)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def load(_, weights, scales, *starts):
        i8, words = ir.IntegerType.get_signless(8), ir.VectorType.get((4,), _i32(0).type)
        lane = _thread()[2]
        code_pointer, scale_pointer = utils.memref_ptr(weights), utils.memref_ptr(scales)
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        for member in range(2):
            row, start = rows.local(member), starts[member].registers.item()
            at = _add(_mul(row, 64), _mul(lane, 16))
            codes = _load(code_pointer, at, words, 16)
            if kind == "fp4":
                at = _add(_add(start, lane), _mul(row, pitch))
                pairs = _expand_fp4(codes, _factor(_load(scale_pointer, at, i8, 1), 126))
            else:
                block = arith.shrui(row, _i32(5))
                if rows.paired and member:
                    block = arith.subi(block, _i32(rows.height // 64))
                at = _add(_add(start, arith.shrui(lane, _i32(1))), _mul(block, pitch))
                pairs = _expand_fp8(codes, _factor(_load(scale_pointer, at, i8, 1), 120))
            for i, pair in enumerate(pairs):
                registers[0, i, 0, 0, member, 0, 0, 0, 0] = pair
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return load(weights, scales, *starts)


def _swiglu(gate: ir.Value, up: ir.Value, route: ir.Value, limit: float) -> ir.Value:
    """route * (silu(min(gate, limit)) * clamp(up)); a NaN stays a NaN."""
    f32 = ir.F32Type.get()
    gate = arith.minimumf(gate, utils.c(limit, f32))
    up = arith.maximumf(arith.minimumf(up, utils.c(limit, f32)), utils.c(-limit, f32))
    power = arith.mulf(gate, utils.c(-1.4426950408889634, f32))
    power = utils.inline_ptx("ex2.approx.f32 $0, $1;", power, result_types=f32)
    weight = arith.addf(power, utils.c(1.0, f32))
    weight = utils.inline_ptx("rcp.approx.f32 $0, $1;", weight, result_types=f32)
    return arith.mulf(arith.mulf(arith.mulf(gate, weight), up), route)


def _scaled(values: ir.Value, shift: int) -> ir.Value:
    """f32 pair * 2^shift."""
    if not shift:
        return values
    kind = ir.VectorType.get((2,), ir.F32Type.get())
    return arith.mulf(values, vector.broadcast(kind, utils.c(2.0**shift, ir.F32Type.get())))


def _rounded(values: ir.Value) -> ir.Value:
    return arith.truncf(ir.VectorType.get((2,), ir.BF16Type.get()), values)


def _store_16(pointer: ir.Value, pairs: list[ir.Value], chunk: ir.Value, line: int) -> None:
    """Stores 8 x 8 bf16 blocks transposed: pairs[j] of lane l are rows 8 j + 2 (l % 4) + {0, 1},
    column l / 4.

    Rows have `line` bytes (64 or 128) swizzled by as much; the warp writes 16-byte piece `chunk` of
    every row.
    """
    i32 = ir.IntegerType.get_signless(32)
    lane = arith.andi(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), _i32(31))
    base, done = llvm.ptrtoint(i32, pointer), 0
    while done < len(pairs):
        count = 1 << min(2, (len(pairs) - done).bit_length() - 1)
        row = _add(arith.andi(lane, _i32(8 * count - 1)), _i32(8 * done))
        turn = arith.andi(row, _i32(7)) if line == 128 else arith.andi(_shift(row, -1), _i32(3))
        address = _add(_mul(row, line), _shift(arith.xori(chunk, turn), 4))
        names = ", ".join(f"${i + 1}" for i in range(count))
        utils.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0], {{{names}}};",
            _add(base, address),
            *(utils.bitcast(p, i32) for p in pairs[done : done + count]),
            has_side_effects=True,
            convergent=True,
        )
        done += count


def store_swiglu(acc: Array, route, out, first: Array, *, columns: slice, limit: float) -> None:
    """SwiGLU of the pairs (gate, up) of an accumulator, transposed into SMEM.

    Args:
        acc: f32 [64, N] * 2^-SHIFT in the WGMMA layout.
        route: GMEM f32, the routing weights.
        out: SMEM bf16 [columns, 32] with PAIRED_16.
        first: int32, index into `route` of accumulator column 0.
        columns: the columns of `acc` to store, a multiple of 8.
        limit: bound of the activation's inputs.
    """
    types = (plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(PAIRED_16), SCALAR)

    @plgpu.inline_mgpu(arg_types=types)
    def store(_, acc, route, out, first):
        f32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
        pair_type = ir.VectorType.get((2,), f32)
        warp, _, lane = _thread()
        start = _add(first.registers.item(), _mul(lane, 2))
        pointer, pairs = utils.memref_ptr(route), []
        for j in range(columns.start // 8, columns.stop // 8):
            gate, up = (
                arith.extf(
                    pair_type, _rounded(_scaled(acc.registers[0, j, 0, 0, m, 0, 0, 0, 0], SHIFT))
                )
                for m in range(2)
            )
            hidden = []
            for e in range(2):
                at = arith.extsi(i64, _mul(_add(start, _i32(8 * j + e)), 4))
                weight = _load(pointer, at, f32, 4)
                hidden.append(_swiglu(_element(gate, e), _element(up, e), weight, limit))
            pairs.append(_rounded(vector.from_elements(pair_type, hidden)))
        _store_16(utils.memref_ptr(out), pairs, arith.andi(warp, _i32(3)), 64)
        return ()

    store(acc, route, out, first)


def store_plain(acc: Array, out, *, columns: slice, shift: int) -> None:
    """Rows of an accumulator times 2^shift, transposed into SMEM.

    Args:
        acc: f32 [64, N] in the WGMMA layout, tile rows as Rows(paired=False).
        out: SMEM bf16 [columns, 64] with PLAIN_16, or f32 [2, columns, 32] with PLAIN_32.
    """
    wide = out.dtype == jnp.float32

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(PLAIN_32 if wide else PLAIN_16))
    )
    def store(_, acc, out):
        warp, row, lane = _thread()
        pointer, warp = utils.memref_ptr(out), arith.andi(warp, _i32(3))
        blocks = range(columns.start // 8, columns.stop // 8)
        for member in range(2):
            values = [_scaled(acc.registers[0, j, 0, 0, member, 0, 0, 0, 0], shift) for j in blocks]
            chunk = _add(_shift(warp, 1), _i32(member))
            if not wide:
                _store_16(pointer, [_rounded(v) for v in values], chunk, 128)
                continue
            # 8 channels are two 16-byte pieces of one of the two halves of 32 channels.
            half, piece = (
                _shift(chunk, -2),
                _add(_shift(arith.andi(chunk, _i32(3)), 1), _shift(row, -2)),
            )
            base = _add(
                _mul(half, (columns.stop - columns.start) * 128), _mul(arith.andi(row, _i32(3)), 4)
            )
            for j, pair in enumerate(values):
                for e in range(2):
                    at = _add(_mul(lane, 2), _i32(8 * j + e))
                    turned = _shift(arith.xori(piece, arith.andi(at, _i32(7))), 4)
                    byte = ir.IntegerType.get_signless(8)
                    address = utils.getelementptr(
                        pointer, [_add(_add(base, _mul(at, 128)), turned)], byte
                    )
                    llvm.store(_element(pair, e), address, alignment=4)
        return ()

    store(acc, out)
