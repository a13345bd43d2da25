"""y = x W^T for a stored weight [out, in], accumulated in float32.

With `Numerics.act_quant` the input of an FP8 or FP4 weight goes through e4m3 first (groups of 32
channels, power-of-two scales), as the released code does; unquantised weights take their input as
it is. Rows that a kernel has made for products (`Prepared`) are there both ways already.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.model import parallel
from deepinfer_jax.model.compile import shared
from deepinfer_jax.model.norm import Prepared, normed, normed_parts
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.spec import Leaf, Quantized
from pallas_kernels import formats, quantise, row_matmul


@shared("setup", "dtype")
def linear(
    setup: Setup,
    x: Float[Array, "rows k"] | Prepared,
    weight: Leaf,
    *,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "rows n"]:
    """x [rows, in] times `weight` [out, in] transposed, in x's dtype or `dtype`."""
    x = _operand(setup, x, weight)
    return row_matmul.matmul(
        x,
        *_stored(weight, x.dtype),
        out_dtype=x.dtype if dtype is None else dtype,
        invariant=setup.numerics.invariant,
        implementation=setup.kernels["row_matmul"],
    )


@shared("setup")
def linear_parts(
    setup: Setup, x: Float[Array, "rows k"] | Prepared, weights: tuple[Leaf, ...]
) -> list[Float[Array, "parts rows n"]]:
    """`linear` with several weights of one kind, each before the sum over its parts of K
    (row_matmul.partial_products)."""
    x = _operand(setup, x, weights[0])
    stored = tuple(_stored(weight, x.dtype) for weight in weights)
    return row_matmul.partial_products_of(
        x,
        stored,
        out_dtype=x.dtype,
        invariant=setup.numerics.invariant,
        implementation=setup.kernels["row_matmul"],
    )


@shared("setup")
def linear_normed(
    setup: Setup, x: Float[Array, "rows k"] | Prepared, weight: Leaf, scale: Float[Array, " n"]
) -> Prepared:
    """The norm with weight `scale` of `linear`, whose parts its kernel adds."""
    if not setup.numerics.act_quant:
        return normed(setup, linear(setup, x, weight), scale)
    x = _operand(setup, x, weight)
    parts = row_matmul.partial_products(
        x,
        *_stored(weight, x.dtype),
        out_dtype=x.dtype,
        invariant=setup.numerics.invariant,
        implementation=setup.kernels["row_matmul"],
    )
    return normed_parts(setup, parts, scale, x.dtype)


def _operand(
    setup: Setup, x: Float[Array, "rows k"] | Prepared, weight: Leaf
) -> Float[Array, "rows k"]:
    """What the product with the weight takes."""
    rounds = rounds_input(setup, weight)
    if isinstance(x, Prepared):
        return x.rounded if rounds and x.rounded is not None else x.rows
    return quantise.round_trip(x, implementation=setup.kernels["quantise"]) if rounds else x


def linear_total(
    setup: Setup,
    x: Float[Array, "rows k"] | Prepared,
    weight: Leaf,
    logical: str,
) -> Float[Array, "rows n"]:
    """`linear` whose contraction may be sharded: `logical` is the weight's column axis. Partial
    sums are added in float32 before the one rounding."""
    if not setup.layout.mesh_axes(logical):
        return linear(setup, x, weight)
    partial = linear(setup, x, weight, dtype=jnp.dtype(jnp.float32))
    return parallel.total(partial, setup.layout, logical).astype(x.dtype)


def rounds_input(setup: Setup, weight: Leaf) -> bool:
    """Whether products with the weight take their rows through e4m3."""
    return isinstance(weight, Quantized) and setup.numerics.act_quant


def _stored(weight: Leaf, dtype: jnp.dtype) -> tuple[Array, Array | None]:
    """(numbers, scales or None) of a weight; numbers without scales in `dtype`."""
    if isinstance(weight, Quantized):
        return weight.values, weight.scales
    return weight.astype(dtype), None


def dequantise(weight: Leaf, dtype: jnp.dtype) -> Float[Array, "*lead n k"]:
    """A stored weight as numbers (exact in bfloat16)."""
    if isinstance(weight, Quantized):
        return formats.dequantise(weight.values, weight.scales).astype(dtype)
    return weight.astype(dtype)
