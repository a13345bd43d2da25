"""Sinkhorn's normalisation as a loop over the whole batch."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32


def normalise(
    logits: Float32[Array, "rows n n"], *, iterations: int, eps: float
) -> Float32[Array, "rows n n"]:
    """See pallas_kernels.sinkhorn.normalise."""
    small = jnp.float32(eps)

    def columns(a: Array) -> Array:
        return a / (jnp.sum(a, axis=1, keepdims=True) + small)

    def both(_: Array, a: Array) -> Array:
        return columns(a / (jnp.sum(a, axis=2, keepdims=True) + small))

    first = columns(jax.nn.softmax(logits, axis=2) + small)
    return jax.lax.fori_loop(0, iterations - 1, both, first)
