"""The router's choice as a top k, a sort and a gather."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


def choose(
    score: Float32[Array, "rows experts"],
    bias: Float32[Array, " experts"],
    routes: Int32[Array, "rows k"] | None = None,
    *,
    k: int,
) -> tuple[Int32[Array, "rows k"], Float32[Array, "rows k"]]:
    """See pallas_kernels.router.choose."""
    _, best = jax.lax.top_k(score + bias[None, :], k)
    best = best.astype(jnp.int32)
    if routes is not None:
        best = jnp.where(routes[:, :1] < 0, best, routes)
    chosen = jnp.sort(best, axis=-1)
    return chosen, jnp.take_along_axis(score, chosen, axis=-1)
