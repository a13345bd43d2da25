"""float32 weights as left operands of bf16 products: three terms, split in registers.

    w = t0 + t1 + t2      t0 = bf16(w), t1 = bf16(w - t0), t2 = bf16(w - t0 - t1)

Every rounding is to the nearest and every difference is exact, so the terms add up to w for every w
that is zero or above 2^-102, and with bf16 rows only the accumulation rounds. Weights stay float32
in memory and in shared memory; a thread splits the ones it feeds to wgmma (registers.py has the
layout).
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array

from pallas_kernels.registers import (
    CODES,
    Rows,
    add,
    const,
    element,
    load_bytes,
    mul,
    shifted,
    thread_place,
)

plgpu: Any = mosaic_gpu  # its decorators and transforms are beyond the type checker

TERMS = 3


def split(weights, *, rows: Rows) -> tuple[Array, Array, Array]:
    """64 columns of float32 weights as terms ready for `plgpu.wgmma`, the largest first.

    Args:
        weights: SMEM f32 [height, 64] with CODES["f32"].

    Returns:
        Three bf16 [64, 64].
    """
    layout = plgpu.Layout.WGMMA
    term = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(CODES["f32"]),), return_type=(term,) * TERMS)
    def split(_, weights):
        found = [np.empty(fa.WGMMA_LAYOUT.registers_shape((64, 64)), object) for _ in range(TERMS)]
        pointer = utils.memref_ptr(weights)
        for member in range(2):
            for group in range(8):
                words = split_pair(load_pair(pointer, rows.local(member), group))
                for registers, word in zip(found, words, strict=True):
                    registers[0, group, 0, 0, member, 0, 0, 0, 0] = as_pair(word)
        return tuple(
            fa.FragmentedArray(_registers=r, _layout=fa.WGMMA_LAYOUT, _is_signed=None)
            for r in found
        )

    return split(weights)


def load_pair(pointer: ir.Value, row: ir.Value, group: int) -> ir.Value:
    """Columns 8 group + 2 (lane % 4) + {0, 1} of a row: tiles of 8 x 32, swizzled by 128 bytes."""
    lane, inner = thread_place()[2], arith.andi(row, const(7))
    piece = add(const(2 * (group % 4)), shifted(lane, -1))
    at = add(mul(shifted(row, -3), 2048), add(const(1024 * (group // 4)), mul(inner, 128)))
    at = add(at, shifted(arith.xori(piece, inner), 4))
    at = add(at, shifted(arith.andi(lane, const(1)), 3))
    return load_bytes(pointer, at, ir.VectorType.get((2,), ir.F32Type.get()), 8)


def split_pair(pair: ir.Value) -> list[ir.Value]:
    """The terms of two float32, each a word of two bf16, the largest first."""
    f32, found = ir.F32Type.get(), []
    low, high = element(pair, 0), element(pair, 1)
    for left in reversed(range(TERMS)):
        # A side effect keeps the words behind the wait for the registers they are written to.
        word = utils.inline_ptx(
            "cvt.rn.bf16x2.f32 $0, $1, $2;",
            high,
            low,
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        found.append(word)
        if left:
            top = arith.andi(word, const(0xFFFF0000 - (1 << 32)))
            high = arith.subf(high, utils.bitcast(top, f32))
            low = arith.subf(low, utils.bitcast(shifted(word, 16), f32))
    return found


def as_pair(word: ir.Value) -> ir.Value:
    """A word as vector<2xbf16>."""
    return utils.bitcast(word, ir.VectorType.get((2,), ir.BF16Type.get()))
