"""RMS norm: y = w * x / sqrt(mean(x^2) + eps), in float32, cast back to the input's dtype.

eps is 1e-20 for every norm of the V4.1 text model (representable in float32 and bfloat16 only), so
an all-zero row stays zero and nothing may be computed in float16. The weight is stored in bfloat16
and multiplied in float32.

What comes out of a norm mostly goes into products with quantised weights, which round it to e4m3
first; `Prepared` has rows both ways, so that one kernel makes them and no product does it again.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.model.compile import shared
from deepinfer_jax.model.setup import Setup
from pallas_kernels import quantise


@flax.struct.dataclass
class Prepared:
    """Rows for products: [rows, d] as they are, and through e4m3 and back with
    `Numerics.act_quant`, else None."""

    rows: Float[Array, "rows d"]
    rounded: Float[Array, "rows d"] | None

    @property
    def dtype(self) -> jnp.dtype:
        """Of both."""
        return self.rows.dtype


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


@shared("setup")
def normed(setup: Setup, x: Float[Array, "rows d"], weight: Float[Array, " d"]) -> Prepared:
    """`rms_norm` of rows, for products."""
    if not setup.numerics.act_quant:
        return Prepared(rms_norm(x, weight, setup.cfg.rms_norm_eps), None)
    return normed_parts(setup, x[None], weight, x.dtype)


def normed_parts(
    setup: Setup, parts: Float[Array, "parts rows d"], weight: Float[Array, " d"], dtype: jnp.dtype
) -> Prepared:
    """With act_quant, the norm of the sum of row_matmul.partial_products, rounded to dtype."""
    rows, rounded = quantise.normed(
        parts,
        weight,
        eps=setup.cfg.rms_norm_eps,
        dtype=dtype,
        implementation=setup.kernels["quantise"],
    )
    return Prepared(rows, rounded)
