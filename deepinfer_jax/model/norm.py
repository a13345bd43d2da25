"""RMS norm: y = w * x / sqrt(mean(x^2) + eps), in float32, cast back to the input's dtype.

eps is 1e-20 for every norm of the V4.1 text model (representable in float32 and bfloat16 only), so
an all-zero row stays zero and nothing may be computed in float16. The weight is stored in bfloat16
and multiplied in float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.model.compile import shared


def inverse_rms(x: Float[Array, "*lead d"], eps: float) -> Float[Array, "*lead 1"]:
    """1 / sqrt(mean over the last axis of x^2 + eps) in float32."""
    squares = jnp.square(x.astype(jnp.float32))
    return jax.lax.rsqrt(jnp.mean(squares, axis=-1, keepdims=True) + jnp.float32(eps))


@shared("eps")
def rms_norm(
    x: Float[Array, "*lead d"], weight: Float[Array, " d"], eps: float
) -> Float[Array, "*lead d"]:
    """The norm over the last axis; weight [d]."""
    with jax.named_scope("rms_norm"):
        scaled = x.astype(jnp.float32) * inverse_rms(x, eps)
        shape = (1,) * (x.ndim - 1) + weight.shape
        return (weight.astype(jnp.float32).reshape(shape) * scaled).astype(x.dtype)
