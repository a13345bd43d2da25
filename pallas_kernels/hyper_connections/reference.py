"""Hyper-connections in plain jnp; the oracle, and what runs on a CPU."""

import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def mixes(
    parts: Float32[Array, "parts rows mix"],
    mean_square: Float32[Array, " rows"],
    scale: Float32[Array, " 3"],
    base: Float32[Array, " mix"],
    *,
    n: int,
    eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[Float32[Array, "rows n"], Float32[Array, "rows n"], Float32[Array, "rows n n"]]:
    """See pallas_kernels.hyper_connections.mixes."""
    projected = functools.reduce(operator.add, list(parts))
    m = projected * jax.lax.rsqrt(mean_square[:, None] + jnp.float32(eps))
    pre = jax.nn.sigmoid(m[:, :n] * scale[0] + base[None, :n]) + jnp.float32(hc_eps)
    post = 2.0 * jax.nn.sigmoid(m[:, n : 2 * n] * scale[1] + base[None, n : 2 * n])
    square = m[:, 2 * n :] * scale[2] + base[None, 2 * n :]
    return pre, post, sinkhorn(square.reshape(-1, n, n), iterations, hc_eps)


def sinkhorn(
    logits: Float32[Array, "rows n n"], iterations: int, eps: float
) -> Float32[Array, "rows n n"]:
    """Doubly normalised squares; a loop of small reductions over the whole batch."""
    small = jnp.float32(eps)

    def columns(a: Array) -> Array:
        return a / (jnp.sum(a, axis=1, keepdims=True) + small)

    def both(_: Array, a: Array) -> Array:
        return columns(a / (jnp.sum(a, axis=2, keepdims=True) + small))

    first = columns(jax.nn.softmax(logits, axis=2) + small)
    return jax.lax.fori_loop(0, iterations - 1, both, first)


def update(
    parts: Float[Array, "parts rows d"],
    streams: Float[Array, "rows n d"],
    post: Float32[Array, "rows n"],
    comb: Float32[Array, "rows n n"],
    pre: Float32[Array, "rows n"],
) -> tuple[Float[Array, "rows n d"], Float[Array, "rows d"], Float32[Array, " rows"]]:
    """See pallas_kernels.hyper_connections.update."""
    out = functools.reduce(operator.add, list(parts)).astype(streams.dtype)
    wide = streams.astype(jnp.float32)
    kept = jnp.sum(comb[:, :, :, None] * wide[:, :, None, :], axis=1)
    new = post[:, :, None] * out.astype(jnp.float32)[:, None, :]
    streams = (new + kept).astype(streams.dtype)
    return streams, collapse(streams, pre), mean_square(streams)


def collapse(
    streams: Float[Array, "rows n d"], pre: Float32[Array, "rows n"]
) -> Float[Array, "rows d"]:
    """sum_n pre_n X_n, in the streams' dtype."""
    return jnp.sum(pre[:, :, None] * streams.astype(jnp.float32), axis=1).astype(streams.dtype)


def mean_square(streams: Float[Array, "rows n d"]) -> Float32[Array, " rows"]:
    """Mean over a row's n d values of their squares."""
    flat = streams.reshape(streams.shape[0], -1)
    return jnp.mean(jnp.square(flat.astype(jnp.float32)), axis=-1)
