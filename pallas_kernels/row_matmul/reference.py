"""The row product in plain jnp; the oracle, and what runs on a CPU.

Both operands are widened to float32 (exact for every stored format) and multiplied at full
precision. The invariant form runs fixed tiles of TILE rows through one compiled product: XLA:CPU
sums in another order below 64 rows, so a short call is padded to a whole tile and a long one loops
over tiles.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels import formats
from pallas_kernels.row_matmul.groups import one_by_one, one_part, one_part_each

TILE = 64


def _product(x: Float[Array, "rows k"], w: Float[Array, "n k"]) -> Float[Array, "rows n"]:
    return jax.lax.dot_general(
        x.astype(jnp.float32), w, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
    )


def matmul(
    x: Float[Array, "rows k"],
    w: Shaped[Array, "n k"],
    scales: Shaped[Array, "nb kb"] | None = None,
    *,
    out_dtype: DTypeLike,
    invariant: bool = False,
) -> Float[Array, "rows n"]:
    """See pallas_kernels.row_matmul.matmul."""
    weight = formats.dequantise(w, scales)
    if not invariant:
        return _product(x, weight).astype(out_dtype)
    rows = x.shape[0]
    tiles = -(-rows // TILE)
    x = jnp.pad(x, ((0, tiles * TILE - rows), (0, 0)))
    if tiles == 1:
        return _product(x, weight)[:rows].astype(out_dtype)
    out = jax.lax.map(lambda tile: _product(tile, weight), x.reshape(tiles, TILE, x.shape[1]))
    return out.reshape(tiles * TILE, w.shape[0])[:rows].astype(out_dtype)


matmul_groups = functools.partial(one_by_one, matmul)
"""See pallas_kernels.row_matmul.matmul_groups."""

partial_products = functools.partial(one_part, matmul)
"""See pallas_kernels.row_matmul.partial_products."""

partial_products_of = functools.partial(one_part_each, matmul)
"""See pallas_kernels.row_matmul.partial_products_of."""
