"""Grouping as a sort, a histogram and a scatter; the tiles as sums over comparisons."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels import grouping


def group(
    expert: Int32[Array, " n"], *, experts: int, per_row: int = 1
) -> tuple[Int32[Array, " n"], Int32[Array, " n"], Int32[Array, " n"], Int32[Array, " experts"]]:
    """See pallas_kernels.grouping.group: sorts words of expert over pair number, no payload."""
    n = expert.size
    bits = max(n - 1, 0).bit_length()
    if (experts + 1) << bits > 1 << 32:
        raise ValueError(f"{n} pairs of {experts} experts; expected as many as 32 bits number")
    number = jnp.arange(n, dtype=jnp.int32)
    key = (expert.astype(jnp.uint32) << bits) | number.astype(jnp.uint32)
    # No two words are equal; XLA would make a stable sort of one by adding the payload.
    ordered = jax.lax.sort(key, is_stable=False)
    order = (ordered & jnp.uint32((1 << bits) - 1)).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(number, unique_indices=True)
    sizes = jnp.bincount(expert, length=experts + 1)[:experts].astype(jnp.int32)
    return order, order // per_row, place, sizes


def row_tiles(
    sizes: Int32[Array, " experts"], *, rows: int, height: int
) -> Int32[Array, "three lines"]:
    """See pallas_kernels.grouping.row_tiles."""
    experts = sizes.shape[0]
    used = jnp.sum(sizes)
    sizes = jnp.append(sizes, rows - used)
    most = grouping.lines(experts, rows, height) - 1
    group, index = jnp.arange(experts + 1), jnp.arange(most)
    before = group[:, None] < group[None, :]
    tiles_of = -(-sizes // height)
    first_tile = jnp.sum(jnp.where(before, tiles_of[:, None], 0), axis=0)
    first_row = jnp.sum(jnp.where(before, sizes[:, None], 0), axis=0)
    inner = index[:, None] - first_tile[None, :]
    mine = (inner >= 0) & (inner < tiles_of[None, :])

    def pick(values: Array) -> Array:
        return jnp.sum(jnp.where(mine, values, 0), axis=1)

    matrix = pick(jnp.where(group < experts, group, -1)[None, :])
    first = pick(first_row[None, :] + inner * height)
    count = pick(jnp.minimum(sizes[None, :] - inner * height, height))
    last = jnp.stack([jnp.sum(tiles_of), used, jnp.zeros_like(used)])
    table = jnp.stack([matrix, first, count])
    return jnp.concatenate([table, last[:, None]], axis=1).astype(jnp.int32)
