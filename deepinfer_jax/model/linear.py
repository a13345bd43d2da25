"""y = x W^T for a stored weight [out, in], accumulated in float32.

With `Numerics.act_quant` the input of an FP8 or FP4 weight goes through e4m3 first (groups of 32
channels, power-of-two scales), as the released code does; unquantised weights take their input as
it is.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.model import parallel
from deepinfer_jax.model.compile import shared
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.spec import Leaf, Quantized
from pallas_kernels import formats, quantise, row_matmul


@shared("setup", "dtype")
def linear(
    setup: Setup, x: Float[Array, "rows k"], weight: Leaf, *, dtype: jnp.dtype | None = None
) -> Float[Array, "rows n"]:
    """x [rows, in] times `weight` [out, in] transposed, in x's dtype or `dtype`."""
    quantized = isinstance(weight, Quantized)
    if quantized and setup.numerics.act_quant:
        x = quantise.round_trip(x, implementation=setup.kernels["quantise"])
    return row_matmul.matmul(
        x,
        weight.values if quantized else weight.astype(x.dtype),
        weight.scales if quantized else None,
        out_dtype=x.dtype if dtype is None else dtype,
        invariant=setup.numerics.invariant,
        implementation=setup.kernels["row_matmul"],
    )


def linear_total(
    setup: Setup, x: Float[Array, "rows k"], weight: Leaf, logical: str
) -> Float[Array, "rows n"]:
    """`linear` whose contraction may be sharded: `logical` is the weight's column axis. Partial
    sums are added in float32 before the one rounding."""
    if not setup.layout.mesh_axes(logical):
        return linear(setup, x, weight)
    partial = linear(setup, x, weight, dtype=jnp.dtype(jnp.float32))
    return parallel.total(partial, setup.layout, logical).astype(x.dtype)


def dequantise(weight: Leaf, dtype: jnp.dtype) -> Float[Array, "*lead n k"]:
    """A stored weight as numbers (exact in bfloat16)."""
    if isinstance(weight, Quantized):
        return formats.dequantise(weight.values, weight.scales).astype(dtype)
    return weight.astype(dtype)
