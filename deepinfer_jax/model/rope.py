"""Rotary embedding of the trailing channels, interleaved pairs, with YaRN for the compressed
layers.

The last R channels are read as R/2 complex numbers x_{2i} + j x_{2i+1} and turned by position *
inv_i:
  inv_i = theta^(-2i/R)                                       window-only layers and draft stages,
                                                              theta = rope_theta
  inv_i = YaRN(compress_rope_theta^(-2i/R))                   layers that read a compressed cache
YaRN interpolates between inv_i/factor and inv_i by a ramp over i; there is no attention
temperature. Everything is float32, positions included, as in the reference (V4.1 inference/model.py
precompute_freqs_cis, apply_rotary_emb).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from deepinfer_jax.config import ModelConfig


def inverse_frequencies(cfg: ModelConfig, compressed: bool) -> np.ndarray:
    """float32 [R/2], radians a token."""
    dim = cfg.qk_rope_head_dim
    theta = cfg.compress_rope_theta if compressed else cfg.rope_theta
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    plain = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
    if not compressed:
        return plain
    yarn = cfg.rope_scaling
    low = math.floor(
        _turning_dimension(yarn.beta_fast, dim, theta, yarn.original_max_position_embeddings)
    )
    high = math.ceil(
        _turning_dimension(yarn.beta_slow, dim, theta, yarn.original_max_position_embeddings)
    )
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high > low else 0.001
    index = np.arange(dim // 2, dtype=np.float32)
    ramp = np.clip((index - np.float32(low)) / np.float32(span), 0, 1).astype(np.float32)
    return (plain / np.float32(yarn.factor) * ramp + plain * (1 - ramp)).astype(np.float32)


def rotate(
    x: Float[Array, "rows *heads d"],
    position: Int[Array, " rows"],
    frequencies: np.ndarray,
    *,
    inverse: bool = False,
) -> Float[Array, "rows *heads d"]:
    """x with its last 2 * len(frequencies) channels turned by their row's position (back with
    `inverse`)."""
    with jax.named_scope("rope"):
        half = frequencies.shape[0]
        angle = position.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
        angle = angle.reshape(angle.shape[0], *(1,) * (x.ndim - 2), half)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        if inverse:
            sin = -sin
        kept, turned = x[..., : -2 * half], x[..., -2 * half :].astype(jnp.float32)
        pairs = turned.reshape(*turned.shape[:-1], half, 2)
        even, odd = pairs[..., 0], pairs[..., 1]
        out = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
        return jnp.concatenate([kept, out.reshape(turned.shape).astype(x.dtype)], axis=-1)


def _turning_dimension(rotations: float, dim: int, theta: float, length: int) -> float:
    """The (fractional) pair index whose wave makes `rotations` turns over `length` tokens."""
    return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))
