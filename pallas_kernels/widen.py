"""FP4 weights from shared memory to shared memory, wide enough for the tensor cores of Blackwell.

tcgen05 takes both operands from memory and has no e4m3 x e2m1 product, so the codes are widened in
registers on the way: to e4m3 (a table of eight bytes; scales stay apart for the block-scaled
product) or to bf16 (scale applied, times 2^-SHIFT as in registers.py). One thread widens one
16-byte piece, the 32 codes of one scale group of a row, into 32 or 64 bytes of the swizzled tile.
bf16 columns come out in the order of `order_columns`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector
from jaxtyping import Array, Shaped

from pallas_kernels import formats
from pallas_kernels.registers import (
    SCALAR,
    SHIFT,
    add,
    const,
    e4m3_words,
    element,
    expand_word,
    load_bytes,
    mul,
    scale_factor,
    shifted,
)

plgpu: Any = mosaic_gpu  # its decorators and transforms are beyond the type checker

TILE_16 = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
TILE_8 = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))


def order_columns(x: Shaped[Array, "rows k"]) -> Shaped[Array, "rows k"]:
    """x in the order in which bf16 weights are widened: pairs (p, p + 4) of every eight columns."""
    rows, k = x.shape
    return x.reshape(rows, k // 8, 2, 4).swapaxes(2, 3).reshape(rows, k)


def widen(codes, scales, wide, start: Array, *, pitch: int) -> None:
    """Widens [tile rows, 128 columns].

    Args:
        codes: SMEM uint8 [rows, 64].
        scales: SMEM uint8, flat, rows of `pitch` bytes; not read for e4m3.
        wide: SMEM e4m3 [rows, 128] with TILE_8, or bf16 [2, rows, 64] with TILE_16.
        start: int32, byte of row 0 and of these columns in `scales`.
    """
    rows, to_bf16 = codes.shape[0], wide.dtype == jnp.bfloat16
    types = (
        plgpu.RefType(),
        plgpu.RefType(),
        plgpu.RefType(TILE_16 if to_bf16 else TILE_8),
        SCALAR,
    )

    @plgpu.inline_mgpu(arg_types=types)
    def write(_, codes, scales, wide, start):
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        four = ir.VectorType.get((4,), i32)
        source, target = utils.memref_ptr(codes), utils.memref_ptr(wide)
        scale_pointer = utils.memref_ptr(scales)
        thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
        thread = arith.andi(thread, const(127))
        group = arith.andi(thread, const(3))
        for first in range(0, rows, 32):
            row = add(shifted(thread, -2), const(first))
            words = load_bytes(source, add(mul(row, 64), mul(group, 16)), four, 16)
            line, turn = mul(row, 128), arith.andi(row, const(7))
            if to_bf16:
                at = add(add(start.registers.item(), group), mul(row, pitch))
                factor = scale_factor(load_bytes(scale_pointer, at, byte, 1), 126)
                line = add(line, mul(shifted(group, -1), rows * 128))
                base = mul(arith.andi(group, const(1)), 4)
                pieces = [expand_word(element(words, j), factor) for j in range(4)]
            else:
                table = (const(0x3C383000), const(0x4C484440))
                found = [w for j in range(4) for w in e4m3_words(element(words, j), *table)]
                base, pieces = mul(group, 2), [found[:4], found[4:]]
            for piece, values in enumerate(pieces):
                chunk = arith.xori(add(base, const(piece)), turn)
                address = utils.getelementptr(target, [add(line, shifted(chunk, 4))], byte)
                packed = vector.from_elements(four, [utils.bitcast(v, i32) for v in values])
                llvm.store(packed, address, alignment=16)
        return ()

    write(codes, scales, wide, start)


def widen_plainly(codes, scales, wide, start: Array, *, pitch: int) -> None:
    """The same to bf16 in plain operations, for interpret mode."""
    rows = codes.shape[0]
    packed = codes[...]
    pairs = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, 16, 2, 4)
    ordered = formats.decode_e2m1(
        (lambda c: c[..., 0::2] | c[..., 1::2] << 4)(pairs.swapaxes(2, 3).reshape(rows, 128))
    )
    flat = scales[...].reshape(-1)
    at = start + jnp.arange(rows, dtype=jnp.int32)[:, None] * pitch + jnp.arange(4)[None, :]
    scale = formats.decode_e8m0(flat[at]) * jnp.float32(2.0**-SHIFT)
    value = (ordered.reshape(rows, 4, 32) * scale[:, :, None]).reshape(rows, 2, 64)
    wide[...] = jax.lax.transpose(value, (1, 0, 2)).astype(jnp.bfloat16)
