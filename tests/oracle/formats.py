"""Number formats from their definitions, in numpy float64: tables of all codes, nearest rounding.

Nothing here imports our packages. A value is rounded by looking for its neighbours in the table of
the format's magnitudes, so a mistake in bit arithmetic cannot be shared with the code under test.
  e4m3   (-1)^s 2^(e-7) (1 + m/8), e = 0: 2^-6 m/8; 0x7F and 0xFF are NaN, there is no infinity
  e8m0   2^(b-127), 255 is NaN
  e2m1   0 .5 1 1.5 2 3 4 6 and their negatives; two codes a byte, low nibble first
"""

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [
        m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        for e in range(16)
        for m in range(8)
    ][:127]
)


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """uint8 -> float64."""
    table = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]])
    return table[codes]


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """uint8 -> float64 powers of two."""
    table = np.array([2.0 ** (b - 127) for b in range(255)] + [np.nan])
    return table[codes]


def decode_e2m1(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., n] -> float64 [..., 2 n]."""
    table = np.concatenate([E2M1, -E2M1])
    return np.stack([table[packed & 15], table[packed >> 4]], axis=-1).reshape(
        *packed.shape[:-1], -1
    )


def nearest(x: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """x rounded to +-magnitudes (ascending codes), ties to the even code, saturating."""
    size = np.minimum(np.abs(x), magnitudes[-1])
    above = np.clip(np.searchsorted(magnitudes, size), 1, len(magnitudes) - 1)
    below = above - 1
    down, up = size - magnitudes[below], magnitudes[above] - size
    take_up = (up < down) | ((up == down) & (above % 2 == 0))
    return np.copysign(magnitudes[np.where(take_up, above, below)], x)


def half(x: np.ndarray) -> np.ndarray:
    """x rounded to bfloat16."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(x.dtype)


def power_above(x: np.ndarray) -> np.ndarray:
    """The smallest power of two >= x > 0."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(1.0, np.where(fraction == 0.5, exponent - 1, exponent))


def _scaled_groups(x, group, floor, inverse):
    """x in groups and each group's power-of-two scale; the product is taken in float32."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    amax = np.maximum(np.abs(groups).max(-1, keepdims=True), floor).astype(np.float32)
    return groups, power_above((amax * np.float32(inverse)).astype(np.float64))


def fp8_groups(x: np.ndarray) -> np.ndarray:
    """e4m3 in groups of 32 with a power-of-two scale: activations and window KV."""
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)])
    groups, scale = _scaled_groups(padded, 32, 1e-4, 1 / 448)
    rounded = nearest(groups / scale, E4M3) * scale
    return rounded.reshape(padded.shape)[..., : x.shape[-1]].astype(x.dtype)


def fp4_groups(x: np.ndarray) -> np.ndarray:
    """e2m1 in groups of 32 with a power-of-two scale: index keys and queries."""
    groups, scale = _scaled_groups(x, 32, 6 * 2.0**-126, 1 / 6)
    return (nearest(groups / scale, E2M1) * scale).reshape(x.shape).astype(x.dtype)


def fp4_entries(x: np.ndarray) -> np.ndarray:
    """e2m1 in groups of 16 with an e4m3 scale: compressed KV."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // 16, 16)
    amax = np.maximum(np.abs(groups).max(-1, keepdims=True), 6 * 2.0**-9).astype(np.float32)
    scale = nearest((amax / np.float32(6)).astype(np.float64), E4M3)
    return (nearest(groups / scale, E2M1) * scale).reshape(x.shape).astype(x.dtype)
