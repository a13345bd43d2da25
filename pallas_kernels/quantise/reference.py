"""Activations through e4m3 and back, perhaps after SwiGLU or a norm, in plain jnp."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import formats


def round_trip(x: Float[Array, "rows k"]) -> Float[Array, "rows k"]:
    """See pallas_kernels.quantise.round_trip."""
    return formats.round_trip_activations(x)


def swiglu(
    gate: Float[Array, "parts rows n"],
    up: Float[Array, "parts rows n"],
    *,
    limit: float,
    dtype: DTypeLike,
    act_quant: bool,
) -> Float[Array, "rows n"]:
    """See pallas_kernels.quantise.swiglu."""
    gate, up = (formats.rounded(_total(x), dtype).astype(jnp.float32) for x in (gate, up))
    bound = jnp.float32(limit)
    hidden = jax.nn.silu(jnp.minimum(gate, bound)) * jnp.clip(up, -bound, bound)
    hidden = formats.rounded(hidden, dtype)
    return round_trip(hidden) if act_quant else hidden


def _total(parts: Float[Array, "parts rows n"]) -> Float[Array, "rows n"]:
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total = total + part
    return total


def normed(
    parts: Float[Array, "parts rows k"],
    weight: Float[Array, " k"],
    *,
    eps: float,
    dtype: DTypeLike,
) -> tuple[Float[Array, "rows k"], Float[Array, "rows k"]]:
    """See pallas_kernels.quantise.normed."""
    x = formats.rounded(_total(parts), dtype)
    with jax.named_scope("rms_norm"):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scaled = wide * jax.lax.rsqrt(mean + jnp.float32(eps))
        rows = formats.rounded(weight.astype(jnp.float32)[None] * scaled, dtype)
    return rows, round_trip(rows)
