"""Trainable numbers and the checkpoint's bits: one rounding, used in training and in the file.

`trainable` turns the model's declarations into float32 arrays of the logical shapes. `rounded`
gives what the file will hold, as numbers: gradients pass straight through, so training sees the
stored weights. `packed` gives the bits themselves, and dequantising them gives `rounded` exactly.

    FP8 (32 x 32 blocks, Engram rows of 32)   s = pow2ceil(amax / 448),  e4m3(w / s)
    FP4 (rows of 32)                          s = pow2ceil(amax / 6),    e2m1(w / s)
    the rest                                  bfloat16 or float32
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from deepinfer_jax.model import quant
from deepinfer_jax.spec import Param, Quantized
from pallas_kernels import formats

BLOCK = 32
TINY = np.float32(2.0**-100)  # keeps the scale of an all-zero block a normal number


def is_weight(node: Any) -> bool:
    """A leaf of the declared tree that is one weight: both parts of a quantised pair together."""
    return isinstance(node, Param | Quantized)


def kind(declared: Param | Quantized) -> str:
    """ "fp4", "fp8", "rows" (FP8 with a scale for 32 columns of a row), or the plain dtype."""
    if isinstance(declared, Param):
        return declared.dtype
    if declared.values.dtype == "uint8":
        return "fp4"
    return "fp8" if declared.block == (BLOCK, BLOCK) else "rows"


def logical_shape(declared: Param | Quantized) -> tuple[int, ...]:
    """Shape of the weight as numbers."""
    if isinstance(declared, Param):
        return declared.shape
    shape = declared.values.shape
    return (*shape[:-1], shape[-1] * 2) if kind(declared) == "fp4" else shape


def rounded(w: Float[Array, "..."], how: str) -> Float[Array, "..."]:
    """The stored weight as float32, gradients straight through; how: of `kind`."""
    if how == "float32":
        return w
    if how == "bfloat16":
        near = jax.lax.reduce_precision(w, 8, 7)  # XLA:GPU drops a cast there and back
    elif how == "fp4":
        near = formats.dequantise_rows(*_fp4(w))
    elif how == "rows":
        values, scale = _fp8_rows(w)
        near = values * jnp.repeat(scale, BLOCK, axis=-1)
    else:
        values, scale = _fp8_blocks(w)
        near = values * _spread(scale, w.shape)
    return w + jax.lax.stop_gradient(near - w)


def packed(w: Float[Array, "..."], declared: Param | Quantized) -> Any:
    """The bits: an array, or a `Quantized` pair of values and scales."""
    how = kind(declared)
    if isinstance(declared, Param):
        return w.astype(declared.dtype)
    if how == "fp4":
        values, scale = _fp4(w)
        return Quantized(values, scale, declared.block)
    values, scale = _fp8_rows(w) if how == "rows" else _fp8_blocks(w)
    return Quantized(values.astype(jnp.float8_e4m3fn), _e8m0(scale), declared.block)


def numbers(bits: Any) -> Float[Array, "..."]:
    """What `packed` made, as float32 of the logical shape."""
    if not isinstance(bits, Quantized):
        return bits.astype(jnp.float32)
    if bits.block == (1, BLOCK) and bits.values.dtype != jnp.uint8:
        scale = formats.decode_e8m0(jnp.repeat(bits.scales, BLOCK, axis=-1))
        return bits.values.astype(jnp.float32) * scale
    return formats.dequantise(bits.values, bits.scales)


def _fp4(w: Float[Array, "..."]) -> tuple[Array, Array]:
    groups = w.reshape(*w.shape[:-1], -1, BLOCK)
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), TINY)
    scale = formats.pow2ceil(amax * jnp.float32(1 / 6))
    return quant.encode_e2m1(groups, scale, w.shape), _e8m0(scale)


def _fp8_rows(w: Float[Array, "..."]) -> tuple[Array, Array]:
    """e4m3 values as float32 and their scales."""
    groups = w.reshape(*w.shape[:-1], -1, BLOCK)
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), TINY)
    scale = formats.pow2ceil(amax * formats.INV_E4M3_MAX)
    return formats.round_e4m3(groups / scale[..., None]).reshape(w.shape), scale


def _fp8_blocks(w: Float[Array, "n k"]) -> tuple[Array, Array]:
    rows, cols = w.shape
    padded = jnp.pad(w, ((0, -rows % BLOCK), (0, -cols % BLOCK)))
    tiles = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    amax = jnp.maximum(jnp.max(jnp.abs(tiles), axis=(1, 3)), TINY)
    scale = formats.pow2ceil(amax * formats.INV_E4M3_MAX)
    return formats.round_e4m3(w / _spread(scale, w.shape)), scale


def _spread(scale: Float[Array, "rb cb"], shape: tuple[int, ...]) -> Float[Array, "n k"]:
    wide = jnp.repeat(jnp.repeat(scale, BLOCK, axis=0), BLOCK, axis=1)
    return wide[: shape[0], : shape[1]]


def _e8m0(scale: Float[Array, "..."]) -> Array:
    exponent = (jax.lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(exponent, jnp.float8_e8m0fnu)
