"""Stored number formats of the kernels, decoded and encoded in plain jnp.

* e8m0: one byte b is the scale 2^(b - 127); 0 is 2^-127 (not zero) and 255 is NaN.
* e2m1 ("FP4"): sign, two exponent bits, one mantissa bit: 0 .5 1 1.5 2 3 4 6. Two codes a byte, the
  low nibble is the even column. MXFP4 weights carry one e8m0 scale for 32 consecutive columns of a
  row.
* e4m3 ("FP8"): weights carry one e8m0 scale for a 32 x 32 block, the last block of a row or column
  may be partial.
* activations: e4m3 with a power-of-two scale for 32 consecutive channels of a row,
  s = pow2ceil(max(amax, 1e-4) * (1/448)), q = e4m3(clamp(x / s, +-448)).

Products of these values with their scales are exact in bfloat16, so "dequantised" loses nothing
(V4.1 inference/kernel.py). XLA:CPU flushes subnormal float32 operands to zero; scales are therefore
applied as two normal factors.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Shaped, UInt8

GROUP = 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AMAX_FLOOR = np.float32(1e-4)
INV_E4M3_MAX = np.float32(1 / 448)

Rows = Shaped[Array, "_ _"] | tuple[Shaped[Array, "_ _"], Shaped[Array, "_ _"]]
"""Stored rows of a cache: an array, or (values, scales)."""
Keys = Float[Array, "g t d"] | tuple[Array, Array, Int32[Array, "g t"]]
"""Index keys: an array a group, or paged (values, scales, entry index)."""


def scale_bytes(scales: Shaped[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """e8m0 scales, given as float8_e8m0fnu or already as bytes, as their bytes."""
    if scales.dtype == jnp.uint8:
        return scales
    if scales.dtype != jnp.float8_e8m0fnu:
        raise TypeError(f"scales: expected float8_e8m0fnu or uint8, got {scales.dtype}")
    return jax.lax.bitcast_convert_type(scales, jnp.uint8)


def decode_e8m0(scales: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """e8m0 scales as float32, exact: byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    exponent = scale_bytes(scales).astype(jnp.uint32)
    bits = jnp.where(exponent == 0, jnp.uint32(1 << 22), exponent << 23)
    bits = jnp.where(exponent == 255, jnp.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def apply_e8m0(
    values: Float[Array, "*shape"], scales: Shaped[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """values * 2^(byte - 127) in float32, both factors of the scale being normal numbers."""
    exponent = scale_bytes(scales).astype(jnp.int32) - 127
    half = exponent >> 1

    def power(e: Array) -> Array:
        bits = jax.lax.bitcast_convert_type((e + 127) << 23, jnp.float32)
        return jnp.where(exponent == 128, jnp.float32(jnp.nan), bits)

    return values.astype(jnp.float32) * power(half) * power(exponent - half)


def decode_e2m1(packed: UInt8[Array, "*rows half"]) -> Float[Array, "*rows cols"]:
    """Two e2m1 codes a byte, low nibble first -> float32 [..., 2 * half]."""
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    magnitude = (codes & 7).astype(jnp.uint32)
    # 0 and 0.5 are the subnormals of the format; the others are an exponent and one mantissa bit
    # moved into place.
    normal = ((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22
    bits = jnp.where(magnitude < 2, magnitude * jnp.uint32(126 << 23), normal)
    sign = (codes & 8).astype(jnp.uint32) << 28
    return jax.lax.bitcast_convert_type(bits | sign, jnp.float32)


def check_scales(
    values: Shaped[Array, "*lead rows stored"], scales: Shaped[Array, "*lead rb cb"] | None
) -> None:
    """Every product with a stored weight begins with this: a kernel finds a scale by the weight's
    shape alone, so with scales of another shape it would read others, or past the last.

    Raises:
        ValueError: scales that are missing, not wanted, or not of the shape that `values` implies.
    """
    if values.dtype not in (jnp.uint8, jnp.float8_e4m3fn):
        if scales is not None:
            raise ValueError(f"scales: {values.dtype} weights carry none, got {scales.shape}")
        return
    *lead, rows, stored = values.shape
    if values.dtype == jnp.uint8:
        kind, per = "MXFP4", "for 32 columns of a row"
        expected = (*lead, rows, -(-2 * stored // GROUP))
    else:
        kind, per = "e4m3", "for a 32 x 32 block"
        expected = (*lead, -(-rows // GROUP), -(-stored // GROUP))
    if scales is None or scales.shape != expected:
        raise ValueError(
            f"scales: {kind} weights need one e8m0 scale {per}: expected shape {expected} for "
            f"values {values.shape}, got {None if scales is None else scales.shape}"
        )


def dequantise_rows(
    packed: UInt8[Array, "*rows half"], scales: Shaped[Array, "*rows groups"]
) -> Float[Array, "*rows cols"]:
    """MXFP4 with one e8m0 scale for 32 columns of a row -> float32 [..., cols]."""
    values = decode_e2m1(packed)
    spread = jnp.repeat(scale_bytes(scales), GROUP, axis=-1)[..., : values.shape[-1]]
    return apply_e8m0(values, spread)


def dequantise_blocks(
    values: Shaped[Array, "*lead rows cols"], scales: Shaped[Array, "*lead rb cb"]
) -> Float[Array, "*lead rows cols"]:
    """e4m3 with one e8m0 scale for a 32 x 32 block -> float32; the last blocks may be partial."""
    check_scales(values, scales)
    rows, cols = values.shape[-2:]
    spread = jnp.repeat(scale_bytes(scales), GROUP, axis=-2)[..., :rows, :]
    spread = jnp.repeat(spread, GROUP, axis=-1)[..., :cols]
    return apply_e8m0(values.astype(jnp.float32), spread)


def dequantise(
    values: Shaped[Array, "*lead rows stored"], scales: Shaped[Array, "*lead rb cb"] | None
) -> Float[Array, "*lead rows cols"]:
    """A stored weight in float32: uint8 is MXFP4, e4m3 has 32 x 32 blocks, anything else has no
    scales.

    Raises:
        ValueError: as check_scales.
    """
    check_scales(values, scales)
    if scales is None:
        return values.astype(jnp.float32)
    if values.dtype == jnp.uint8:
        return dequantise_rows(values, scales)
    return dequantise_blocks(values, scales)


def pow2ceil(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The smallest power of two >= x for normal positive float32 x, by exponent bits."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)


def rounded(x: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """float32 in `dtype`, rounded even where the result is widened again at once.

    XLA:GPU drops a cast to a narrow type and back as "excess precision"; an explicit rounding it
    keeps.
    """
    if dtype == jnp.bfloat16:
        x = jax.lax.reduce_precision(x, 8, 7)
    return x.astype(dtype)


def round_e4m3(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """float32 within +-448 to the nearest e4m3 value, ties to even, still float32.

    Written out because XLA:GPU drops a cast to e4m3 and back as "excess precision".
    """
    subnormal = jnp.round(x * 512.0) * jnp.float32(1 / 512)
    return jnp.where(jnp.abs(x) < 2.0**-6, subnormal, jax.lax.reduce_precision(x, 8, 3))


def quantise_activations(
    x: Float[Array, "*rows k"],
) -> tuple[Float[Array, "*rows padded"], Float[Array, "*rows groups"]]:
    """x -> (e4m3 values padded to whole groups, float32 power-of-two scales), 32 channels a
    group."""
    k = x.shape[-1]
    groups = -(-k // GROUP)
    padded = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, groups * GROUP - k)])
    grouped = padded.reshape(*x.shape[:-1], groups, GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(grouped), axis=-1), AMAX_FLOOR)
    scale = pow2ceil(amax * INV_E4M3_MAX)
    rounded = round_e4m3(jnp.clip(grouped / scale[..., None], -448.0, 448.0))
    quantised = rounded.astype(jnp.float8_e4m3fn)
    return quantised.reshape(padded.shape), scale


def round_trip_activations(x: Float[Array, "*rows k"]) -> Float[Array, "*rows k"]:
    """x after quantise_activations and back, in x's dtype (exact there)."""
    quantised, scale = quantise_activations(x)
    spread = jnp.repeat(scale, GROUP, axis=-1)
    return (quantised.astype(jnp.float32) * spread)[..., : x.shape[-1]].astype(x.dtype)


def one_scale_a_row(
    x: Float[Array, "rows k"],
) -> tuple[Float[Array, "rows k"], Float[Array, " rows"]]:
    """Rows quantised as quantise_activations does, then brought to one power of two for a row.

    A group keeps its e4m3 values exactly unless its scale is far below the row's largest: then its
    smallest values round once more. K must be a multiple of 32.

    Returns:
        (e4m3 values, float32 scale of each row).
    """
    quantised, scale = quantise_activations(x)
    largest = jnp.max(scale, axis=-1, keepdims=True)
    spread = jnp.repeat(scale / largest, GROUP, axis=-1)
    return round_e4m3(quantised.astype(jnp.float32) * spread).astype(quantised.dtype), largest[:, 0]
