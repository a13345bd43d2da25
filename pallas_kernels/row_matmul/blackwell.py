"""The row product on Blackwell (pallas_kernels/blackwell.py): one tile shape, one K order for every
number of rows.

bf16 weights run as they are. float32 weights are three bf16 terms, exact products with
bf16 rows. FP8 block weights are widened to bf16 by XLA first: exact, and the tensor cores' own
block scales cover 32 columns of one row only.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels import blackwell, formats
from pallas_kernels.blackwell import Plan
from pallas_kernels.row_matmul.groups import one_by_one, one_part, one_part_each
from pallas_kernels.row_matmul.hopper import check
from pallas_kernels.terms import TERMS
from pallas_kernels.tiles import Product


def terms(w: Float[Array, "n k"]) -> Float[Array, "terms n k"]:
    """float32 as three bf16 terms: their sum is w for every w that is zero or above 2^-102."""
    rest, found = w, []
    for _ in range(TERMS):
        # Explicit rounding: a plain cast there and back may be optimised away.
        found.append(lax.reduce_precision(rest, 8, 7))
        rest = rest - found[-1]
    return jnp.stack(found).astype(jnp.bfloat16)


def matmul(
    x: Float[Array, "rows k"],
    w: Shaped[Array, "n k"],
    scales: Shaped[Array, "nb kb"] | None = None,
    *,
    out_dtype: DTypeLike,
    invariant: bool = False,
    shape: Plan | None = None,
) -> Float[Array, "rows n"]:
    """See pallas_kernels.row_matmul.matmul; `shape` overrides the tile shape."""
    del invariant  # always
    check(x, w, out_dtype)
    shape = shape or Plan(128, 3)
    if w.dtype == jnp.float8_e4m3fn:
        w = formats.dequantise(w, scales).astype(jnp.bfloat16)
    rows, channels = x.shape[0], w.shape[0]
    stacked = terms(w) if w.dtype == jnp.float32 else w[None]
    count = stacked.shape[0]
    flat = stacked.reshape(-1, w.shape[1])
    flat = jnp.pad(flat, ((0, -flat.shape[0] % shape.channels), (0, 0)))
    kept = out_dtype if count == 1 else jnp.float32
    product = Product("bf16", rows, w.shape[1], flat.shape[0], out_dtype=kept)
    out = blackwell.multiply(x, flat, jnp.zeros((128,), jnp.uint8), None, None, product, shape)
    parts = [out[:, channels * t : channels * (t + 1)] for t in range(count)]
    total = parts[-1]
    for part in reversed(parts[:-1]):
        total = total + part
    return total.astype(out_dtype)


matmul_groups = functools.partial(one_by_one, matmul)
"""See pallas_kernels.row_matmul.matmul_groups."""

partial_products = functools.partial(one_part, matmul)
"""See pallas_kernels.row_matmul.partial_products."""

partial_products_of = functools.partial(one_part_each, matmul)
"""See pallas_kernels.row_matmul.partial_products_of."""
