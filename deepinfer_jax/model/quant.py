"""Cache formats: what is written to and read from the window rings and the compressed pages.

With `Numerics.cache_qdq` rows are stored in the released formats, as bytes (reference
inference/kernel.py act_quant, fp4_act_quant); a row's stored form is a tuple (values, scales):
  window KV      e4m3 [d],        e8m0 [d/32]   scale 2^ceil(log2(max(amax, 1e-4) / 448))
  compressed KV  e2m1 [d/2] uint8, e4m3 [d/16]  scale e4m3(max(amax, 6 * 2^-9) / 6), saturating
  index keys     e2m1 [d/2] uint8, e8m0 [d/32]  scale 2^ceil(log2(max(amax, 6 * 2^-126) / 6))
Without it a row is stored as it is, in the compute type. Code times scale is exact in bfloat16, so
the bytes lose nothing against a cache of quantised-dequantised bfloat16 rows. Rounding is to
nearest, ties to even, saturating.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt8

from pallas_kernels import formats

Stored = Shaped[Array, "..."] | tuple[Shaped[Array, "..."], Shaped[Array, "..."]]

INV_E2M1_MAX = np.float32(1 / 6)
E4M3_MAX = np.float32(448)
ENTRY_GROUP = 16
ENTRY_AMAX_FLOOR = np.float32(6 * 2.0**-9)
INDEX_AMAX_FLOOR = np.float32(6 * 2.0**-126)


def store_window(kv: Float[Array, "*lead d"], cache_qdq: bool) -> Stored:
    """Window KV rows as stored."""
    if not cache_qdq:
        return kv
    values, scale = formats.quantise_activations(kv)
    return values, _to_e8m0(scale)


def load_window(stored: Stored, dtype: jnp.dtype) -> Float[Array, "*lead d"]:
    """Stored window rows as numbers."""
    if not isinstance(stored, tuple):
        return stored
    values, scales = stored
    spread = jnp.repeat(formats.scale_bytes(scales), formats.GROUP, axis=-1)
    return formats.apply_e8m0(values.astype(jnp.float32), spread).astype(dtype)


def store_entry(kv: Float[Array, "*lead d"], cache_qdq: bool) -> Stored:
    """Compressed KV entries as stored."""
    if not cache_qdq:
        return kv
    groups = kv.astype(jnp.float32).reshape(*kv.shape[:-1], -1, ENTRY_GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), ENTRY_AMAX_FLOOR)
    # Beyond 448 a cast to e4m3 gives NaN.
    scale = formats.round_e4m3(jnp.minimum(amax / jnp.float32(6), E4M3_MAX))
    return encode_e2m1(groups, scale, kv.shape), scale.astype(jnp.float8_e4m3fn)


def load_entry(stored: Stored, dtype: jnp.dtype) -> Float[Array, "*lead d"]:
    """Stored compressed entries as numbers."""
    if not isinstance(stored, tuple):
        return stored
    packed, scales = stored
    spread = jnp.repeat(scales.astype(jnp.float32), ENTRY_GROUP, axis=-1)
    return (formats.decode_e2m1(packed) * spread).astype(dtype)


def store_index(key: Float[Array, "*lead d"], cache_qdq: bool) -> Stored:
    """Index keys as stored."""
    if not cache_qdq:
        return key
    groups = key.astype(jnp.float32).reshape(*key.shape[:-1], -1, formats.GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), INDEX_AMAX_FLOOR)
    scale = formats.pow2ceil(amax * INV_E2M1_MAX)
    return encode_e2m1(groups, scale, key.shape), _to_e8m0(scale)


def load_index(stored: Stored, dtype: jnp.dtype) -> Float[Array, "*lead d"]:
    """Stored index keys as numbers."""
    if not isinstance(stored, tuple):
        return stored
    return formats.dequantise_rows(*stored).astype(dtype)


def encode_e2m1(
    x: Float[Array, "*groups n"], scale: Float[Array, "*groups"], shape: tuple[int, ...]
) -> UInt8[Array, "..."]:
    """x / scale -> e2m1 codes, two a byte (low nibble first), reshaped to [*shape[:-1], shape[-1] /
    2].

    Nothing is divided: XLA divides a group by its scale as a product with the rounded reciprocal,
    which misses exact ties. Midpoints times a scale of few bits are exact.
    """
    magnitude = jnp.abs(x)
    # Ties go to the even code: the thresholds below an odd code are strict, those below an even one
    # are not.
    code = jnp.zeros(x.shape, jnp.uint8)
    for midpoint, to_upper in (
        (0.25, False),
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        edge = (midpoint * scale)[..., None]
        code += ((magnitude >= edge) if to_upper else (magnitude > edge)).astype(jnp.uint8)
    code = code | jnp.signbit(x).astype(jnp.uint8) << 3
    pairs = code.reshape(*shape[:-1], shape[-1] // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def _to_e8m0(scale: Float[Array, "..."]) -> Shaped[Array, "..."]:
    """Float32 powers of two as e8m0."""
    exponent = jax.lax.bitcast_convert_type(scale, jnp.uint32) >> 23
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)
