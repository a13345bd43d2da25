"""SwiGLU of a gate and an up product and its way through e4m3, one launch instead of two.

The products come as they are stored: bf16, or float32 parts of K that are added here, in order.
Four neighbouring threads serve 32 channels, 8 each; every part of both products is loaded before
the first is added. The exponential and the reciprocal are the hardware's, as in grouped_gemm: about
1e-7 |gate| + 4e-7 of the result, so that its rounding to bf16, and the one to e4m3 after it, now
and then take the other of two neighbours.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float

from pallas_kernels import formats
from pallas_kernels import ptx as t
from pallas_kernels.quantise import threads

GROUPS = 32
"""Groups of 32 channels of a block: one for four of its 128 threads."""
PARTS = 10
"""Parts of both products that a thread has on their way at once: 160 registers."""


def swiglu(
    gate: Float[Array, "parts rows n"],
    up: Float[Array, "parts rows n"],
    *,
    limit: float,
    dtype: DTypeLike,
    act_quant: bool,
) -> Float[Array, "rows n"]:
    """See pallas_kernels.quantise.swiglu."""
    parts, rows, n = gate.shape
    if jnp.dtype(dtype) != jnp.bfloat16 or not act_quant:
        raise NotImplementedError("the kernel makes bfloat16 rows that went through e4m3")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise NotImplementedError(
            f"gate is {gate.dtype}{list(gate.shape)}, up is {up.dtype}{list(up.shape)}"
        )
    if gate.dtype != jnp.float32 and (gate.dtype != jnp.bfloat16 or parts > 1):
        raise NotImplementedError(f"{parts} parts of {gate.dtype}, expected float32")
    if n % formats.GROUP:
        raise NotImplementedError(f"{n} channels are not a multiple of {formats.GROUP}")
    if gate.size == 0:
        raise NotImplementedError("no rows")
    wide = gate.dtype == jnp.float32
    found = _program(rows * n // formats.GROUP, parts, wide, float(limit), n)
    return found(*(x.reshape(-1, formats.GROUP) for x in (gate, up))).reshape(rows, n)


@functools.lru_cache(maxsize=64)
def _program(groups: int, parts: int, wide: bool, limit: float, n: int):
    """The callable for one shape: two of [parts groups, 32], `wide` if float32 -> [groups, 32]."""

    def body(gate, up, out):
        block = lax.axis_index("block")
        one_block(block, gate, up, out, groups=groups, parts=parts, wide=wide, limit=limit)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((groups, formats.GROUP), jnp.bfloat16),
        grid=(-(-groups // GROUPS),),
        grid_names=("block",),
        kernel_name=f"swiglu_quantise_k{n}",
    )


def one_block(block, gate, up, out, *, groups: int, parts: int, wide: bool, limit: float) -> None:
    """The groups of a block; threads past the last group repeat that one.

    Args:
        block: int32.
        gate, up: GMEM [parts groups, 32], float32 if `wide`, else bf16.
        out: GMEM bf16 [groups, 32].
    """
    arrays = (gate, up, out)

    @plgpu.inline_mgpu(arg_types=(t.SCALAR, *(plgpu.RefType() for _ in arrays)))
    def run(_, block, *arrays):
        gate, up, out = arrays
        thread = t.thread()
        group = arith.addi(arith.muli(t.number(block), t.c(GROUPS)), arith.shrui(thread, t.c(2)))
        group = arith.minui(group, t.c(groups - 1))
        piece = arith.andi(thread, t.c(3))
        bases = [t.wide(piece, 32 if wide else 16, t.address(ref)) for ref in (gate, up)]
        if wide:
            words = [_pairs(total) for total in _totals(bases, group, groups, parts)]
        else:
            words = [_four(t.wide(group, 64, base), 0) for base in bases]
        hidden = t.ptx(_text(limit), *words[0], *words[1], outputs=4, effects=True)
        (rounded,) = threads.rounded([hidden])
        at = t.wide(group, 64, t.wide(piece, 16, t.address(out)))
        t.do("st.global.v4.b32 [$0], {$1, $2, $3, $4};", at, *rounded)

    run(block, *arrays)


def _four(address, offset: int) -> Any:
    """The four words at an address."""
    text = "ld.global.nc.v4.b32 {$0, $1, $2, $3}, "
    return t.ptx(f"{text}[$4 + {offset}];", address, outputs=4, effects=True)


def _totals(bases: list[Any], group, groups: int, parts: int) -> list[list[Any]]:
    """Sums over the parts, in order, of a thread's eight float32 at each of the bases."""
    totals: list[list[Any]] = [[] for _ in bases]
    for first in range(0, parts, PARTS):
        loaded = []
        for part in range(first, min(first + PARTS, parts)):
            line = arith.addi(group, t.c(part * groups))
            places = [t.wide(line, 128, base) for base in bases]
            loaded.append([_four(place, 0) + _four(place, 16) for place in places])
        for pieces in loaded:
            for side, words in enumerate(pieces):
                before = totals[side]
                totals[side] = (
                    [_sum(*ab) for ab in zip(before, words, strict=True)] if before else words
                )
    return totals


def _sum(a, b):
    """The sum of two float32."""
    return t.ptx("add.rn.f32 $0, $1, $2;", a, b)


def _pairs(values: list[Any]) -> list[Any]:
    """Eight float32 as four words of two bf16."""
    text = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    return [t.ptx(text, values[i + 1], values[i]) for i in range(0, 8, 2)]


def _text(limit: float) -> str:
    """PTX of eight pairs: gate in words $4..$7, up in $8..$11, SwiGLU to $0..$3, all bf16."""
    bits = int(np.float32(limit).view(np.uint32))
    text = "{ .reg .b32 a, b, e, x, y, l, m, k, one, w<4>;"
    text += f" mov.b32 l, {bits:#x}; mov.b32 m, {bits ^ 1 << 31:#x};"
    text += " mov.b32 k, 0xbfb8aa3b; mov.b32 one, 0x3f800000;"  # k = -log2(e)
    for i in range(4):
        text += f" shl.b32 a, ${4 + i}, 16; and.b32 b, ${4 + i}, 0xffff0000;"
        text += f" shl.b32 x, ${8 + i}, 16; and.b32 y, ${8 + i}, 0xffff0000;"
        for gate, up in (("a", "x"), ("b", "y")):
            text += f" min.NaN.f32 {gate}, {gate}, l; max.NaN.f32 {up}, {up}, m;"
            text += f" min.NaN.f32 {up}, {up}, l; mul.rn.f32 e, {gate}, k;"
            text += " ex2.approx.ftz.f32 e, e; add.rn.f32 e, e, one; rcp.approx.ftz.f32 e, e;"
            text += f" mul.rn.f32 {gate}, {gate}, e; mul.rn.f32 {gate}, {gate}, {up};"
        text += f" cvt.rn.bf16x2.f32 w{i}, b, a;"
    return text + "".join(f" mov.b32 ${i}, w{i};" for i in range(4)) + " }"
