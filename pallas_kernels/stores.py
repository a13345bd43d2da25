"""Register-level pieces of the Mosaic GPU kernels: from accumulators to memory.

An accumulator holds out^T: 64 weight rows by N rows of x. `rescale` and `store_swiglu` /
`store_plain` finish the values in registers and stage them transposed, one row of the result a line
of 64 or 128 bytes, swizzled so that neither side has bank conflicts; `copy_rows` moves the staged
lines that exist to memory. Plain copies instead of TMA: the number of rows is known only on the
device.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector
from jaxtyping import Array

from pallas_kernels.registers import (
    SCALAR,
    TOP,
    add,
    const,
    element,
    load_bytes,
    member_word,
    mul,
    shifted,
    thread_place,
)

plgpu: Any = mosaic_gpu  # its decorators and transforms are beyond the type checker

PLAIN_16 = (plgpu.TilingTransform((1, 64)), plgpu.SwizzleTransform(128))
PLAIN_32 = (plgpu.TilingTransform((1, 32)), plgpu.SwizzleTransform(128))
PAIRED_16 = (plgpu.TilingTransform((1, 32)), plgpu.SwizzleTransform(64))


def rescale(acc: Array, largest: Array, row_scale, first: Array) -> Array:
    """An accumulator of e4m3 products times the powers of two of its weight rows and its rows.

    Args:
        acc: f32 [64, N] in the WGMMA layout.
        largest: of row_exponents.
        row_scale: GMEM f32, the scale of every row of x.
        first: int32, index into `row_scale` of column 0.
    """
    columns, layout = acc.shape[1], plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, layout, plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=layout),
    )
    def scaled(_, acc, largest, row_scale, first):
        f32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
        pair_type = ir.VectorType.get((2,), f32)
        pointer, start = (
            utils.memref_ptr(row_scale),
            add(first.registers.item(), mul(thread_place()[2], 2)),
        )
        registers = np.empty(acc.registers.shape, dtype=object)
        factors = []
        for member in range(2):
            power = shifted(arith.subi(member_word(largest, member), const(TOP)), 23)
            factors.append(vector.broadcast(pair_type, utils.bitcast(power, f32)))
        for j in range(columns // 8):
            at = [arith.extsi(i64, mul(add(start, const(8 * j + e)), 4)) for e in range(2)]
            pair = vector.from_elements(pair_type, [load_bytes(pointer, a, f32, 4) for a in at])
            for member in range(2):
                index = (0, j, 0, 0, member, 0, 0, 0, 0)
                value = arith.mulf(acc.registers[index], factors[member])
                registers[index] = arith.mulf(value, pair)
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return scaled(acc, largest, row_scale, first)


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
    lane = arith.andi(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), const(31))
    base, done = llvm.ptrtoint(i32, pointer), 0
    while done < len(pairs):
        count = 1 << min(2, (len(pairs) - done).bit_length() - 1)
        row = add(arith.andi(lane, const(8 * count - 1)), const(8 * done))
        turn = arith.andi(row, const(7)) if line == 128 else arith.andi(shifted(row, -1), const(3))
        address = add(mul(row, line), shifted(arith.xori(chunk, turn), 4))
        names = ", ".join(f"${i + 1}" for i in range(count))
        utils.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0], {{{names}}};",
            add(base, address),
            *(utils.bitcast(p, i32) for p in pairs[done : done + count]),
            has_side_effects=True,
            convergent=True,
        )
        done += count


def store_swiglu(
    acc: Array, route, out, first: Array, *, columns: slice, limit: float, shift: int
) -> None:
    """SwiGLU of the pairs (gate, up) of an accumulator, transposed into SMEM.

    Args:
        acc: f32 [64, N] * 2^-shift in the WGMMA layout.
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
        warp, _, lane = thread_place()
        start = add(first.registers.item(), mul(lane, 2))
        pointer, pairs = utils.memref_ptr(route), []
        for j in range(columns.start // 8, columns.stop // 8):
            gate, up = (
                arith.extf(
                    pair_type, _rounded(_scaled(acc.registers[0, j, 0, 0, m, 0, 0, 0, 0], shift))
                )
                for m in range(2)
            )
            hidden = []
            for e in range(2):
                at = arith.extsi(i64, mul(add(start, const(8 * j + e)), 4))
                weight = load_bytes(pointer, at, f32, 4)
                hidden.append(_swiglu(element(gate, e), element(up, e), weight, limit))
            pairs.append(_rounded(vector.from_elements(pair_type, hidden)))
        _store_16(utils.memref_ptr(out), pairs, arith.andi(warp, const(3)), 64)
        return ()

    store(acc, route, out, first)


def store_plain(acc: Array, out, *, columns: slice, shift: int) -> None:
    """Rows of an accumulator times 2^shift, transposed into SMEM.

    Args:
        acc: f32 [64, N] in the WGMMA layout, tile rows as Rows(paired=False).
        out: SMEM bf16 [columns, 64] with PLAIN_16, or f32 [2, columns, 32] with PLAIN_32.
    """
    wide, out_rows = out.dtype == jnp.float32, out.shape[-2]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(PLAIN_32 if wide else PLAIN_16))
    )
    def store(_, acc, out):
        warp, row, lane = thread_place()
        pointer, warp = utils.memref_ptr(out), arith.andi(warp, const(3))
        blocks = range(columns.start // 8, columns.stop // 8)
        for member in range(2):
            values = [_scaled(acc.registers[0, j, 0, 0, member, 0, 0, 0, 0], shift) for j in blocks]
            chunk = add(shifted(warp, 1), const(member))
            if not wide:
                _store_16(pointer, [_rounded(v) for v in values], chunk, 128)
                continue
            # 8 channels are two 16-byte pieces of one of the two halves of 32 channels.
            half, piece = (
                shifted(chunk, -2),
                add(shifted(arith.andi(chunk, const(3)), 1), shifted(row, -2)),
            )
            base = add(mul(half, out_rows * 128), mul(arith.andi(row, const(3)), 4))
            for j, pair in enumerate(values):
                for e in range(2):
                    at = add(mul(lane, 2), const(8 * j + e))
                    turned = shifted(arith.xori(piece, arith.andi(at, const(7))), 4)
                    byte = ir.IntegerType.get_signless(8)
                    address = utils.getelementptr(
                        pointer, [add(add(base, mul(at, 128)), turned)], byte
                    )
                    llvm.store(element(pair, e), address, alignment=4)
        return ()

    store(acc, out)


def copy_rows(
    staged,
    result,
    first: Array,
    count: Array,
    channel: Array,
    *,
    width: int,
    transforms: tuple | None = None,
) -> None:
    """Copies the first `count` staged rows to memory, 16 bytes a thread, and waits for this
    warpgroup.

    Args:
        staged: SMEM [rows, line], as store_swiglu and store_plain leave it.
        result: GMEM [all rows, width].
        first, channel: int32, place of the first staged element in `result`.
        count: int32.
        width: channels of `result`; staged channels past it are dropped.
        transforms: of `staged`, if not as those leave it.
    """
    rows, channels = staged.shape[-2:]
    item = staged.dtype.itemsize
    line = channels * item
    if transforms is None:
        transforms = PAIRED_16 if line == 64 else PLAIN_16 if item == 2 else PLAIN_32
    types = (plgpu.RefType(transforms), plgpu.RefType(), SCALAR, SCALAR, SCALAR)

    @plgpu.inline_mgpu(arg_types=types)
    def copy(_, staged, result, *scalars):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        first, count, channel = (s.registers.item() for s in scalars)
        pieces = line // 16
        thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
        thread = arith.andi(thread, const(127))
        piece, start = arith.andi(thread, const(pieces - 1)), arith.divui(thread, const(pieces))
        source, target = utils.memref_ptr(staged), utils.memref_ptr(result)
        place = add(channel, mul(piece, 16 // item))
        inside = arith.cmpi(arith.CmpIPredicate.slt, place, const(width))
        four = ir.VectorType.get((4,), i32)
        utils.warpgroup_barrier()
        for passed in range(0, rows, 128 // pieces):
            row = add(start, const(passed))
            wanted = arith.andi(arith.cmpi(arith.CmpIPredicate.slt, row, count), inside)
            with utils.when(wanted):
                turn = (
                    arith.andi(row, const(7))
                    if line == 128
                    else arith.andi(shifted(row, -1), const(3))
                )
                at = add(mul(row, line), shifted(arith.xori(piece, turn), 4))
                value = load_bytes(source, at, four, 16)
                line_at = arith.muli(arith.extsi(i64, add(first, row)), utils.c(width * item, i64))
                at = arith.addi(line_at, arith.extsi(i64, mul(place, item)))
                address = utils.getelementptr(target, [at], ir.IntegerType.get_signless(8))
                llvm.store(value, address, alignment=16)
        utils.warpgroup_barrier()
        return ()

    copy(staged, result, first, count, channel)
