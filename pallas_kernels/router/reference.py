"""The router as a top k, a sort and a gather."""

import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.router import SUM_EPS


def route(
    parts: Float32[Array, "parts rows experts"],
    bias: Float32[Array, " experts"],
    routes: Int32[Array, "rows k"] | None = None,
    *,
    k: int,
    scale: float,
) -> tuple[Int32[Array, "rows k"], Float32[Array, "rows k"]]:
    """See pallas_kernels.router.route."""
    score = jnp.sqrt(jax.nn.softplus(functools.reduce(operator.add, list(parts))))
    _, best = jax.lax.top_k(score + bias[None, :], k)
    best = best.astype(jnp.int32)
    if routes is not None:
        best = jnp.where(routes[:, :1] < 0, best, routes)
    chosen = jnp.sort(best, axis=-1)
    taken = jnp.take_along_axis(score, chosen, axis=-1)
    # Column by column, so that a GPU adds and divides where the weights are used.
    columns = [taken[:, slot : slot + 1] for slot in range(k)]
    total = functools.reduce(operator.add, columns) + jnp.float32(SUM_EPS)
    return chosen, taken / total * jnp.float32(scale)
