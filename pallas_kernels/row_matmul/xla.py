"""The row product by XLA's own matrix product: the fast way where bits may depend on the number of
rows.

Operands keep the rows' dtype (stored weights are exact in bfloat16) and the sum is float32. The
invariant form loops over fixed tiles of TILE rows; XLA may still fuse a single tile differently, so
it is what is left where no kernel of ours runs.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels import formats
from pallas_kernels.row_matmul.groups import one_by_one, one_part, one_part_each

TILE = 128


def _product(x: Float[Array, "rows k"], w: Float[Array, "n k"]) -> Float[Array, "rows n"]:
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contract = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, contract, exact, preferred_element_type=jnp.float32)


def matmul(
    x: Float[Array, "rows k"],
    w: Shaped[Array, "n k"],
    scales: Shaped[Array, "nb kb"] | None = None,
    *,
    out_dtype: DTypeLike,
    invariant: bool = False,
) -> Float[Array, "rows n"]:
    """See pallas_kernels.row_matmul.matmul."""
    if w.dtype == jnp.float32:
        x = x.astype(jnp.float32)
    weight = formats.dequantise(w, scales).astype(x.dtype)
    rows = x.shape[0]
    if not invariant or rows == 0:
        return _product(x, weight).astype(out_dtype)
    tiles = -(-rows // TILE)
    padded = jnp.pad(x, ((0, tiles * TILE - rows), (0, 0))).reshape(tiles, TILE, -1)
    out = jax.lax.map(lambda tile: _product(tile, weight), padded)
    return out.reshape(tiles * TILE, -1)[:rows].astype(out_dtype)


matmul_groups = functools.partial(one_by_one, matmul)
"""See pallas_kernels.row_matmul.matmul_groups."""

partial_products = functools.partial(one_part, matmul)
"""See pallas_kernels.row_matmul.partial_products."""

partial_products_of = functools.partial(one_part_each, matmul)
"""See pallas_kernels.row_matmul.partial_products_of."""
