"""The grouped product in fixed row tiles: work is proportional to the rows, memory to one expert.

Groups are cut into tiles of TILE rows, each tile within one expert (the last tile of a group is
partly empty), and

    out[tile] = x[tile] @ W[expert(tile)]^T

runs in a loop over tiles that stops after the last tile in use. Every tile is the same compiled
product, so a row's bits depend neither on the other rows nor on how many there are. Small weight
stacks are dequantised once before the loop, large ones one expert at a time inside it: the values
are equal, so the bits are too.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels import formats
from pallas_kernels.grouped_gemm.reference import swiglu

TILE = 16
WHOLE_STACK = 1 << 22
"""Weight stacks of at most this many elements are dequantised as a whole (16 MiB in float32)."""


def _tiles(group_sizes: Int32[Array, " experts"], rows: int) -> tuple[Array, Array, Array]:
    """(expert of each tile, first row of each tile, number of tiles in use)."""
    experts = group_sizes.shape[0]
    most = -(-rows // TILE) + min(experts, rows)
    per_group = -(-group_sizes // TILE)
    tile_ends = jnp.cumsum(per_group)
    row_starts = jnp.cumsum(group_sizes) - group_sizes
    tile = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.searchsorted(tile_ends, tile, side="right").astype(jnp.int32)
    expert = jnp.minimum(expert, experts - 1)
    first = row_starts[expert] + (tile - (tile_ends - per_group)[expert]) * TILE
    return expert, first, tile_ends[-1]


def _product(
    x: Float[Array, "rows k"],
    values: Shaped[Array, "experts *out stored"],
    scales: Shaped[Array, "experts *lead sr sc"] | None,
    group_sizes: Int32[Array, " experts"],
) -> Float[Array, "rows flat"]:
    """x[r] @ W[expert(r)]^T in float32 with the output axes flattened; rows past the last group are
    zero."""
    rows, k = x.shape
    if values.size * (2 if values.dtype == jnp.uint8 else 1) <= WHOLE_STACK:
        values, scales = formats.dequantise(values, scales), None
    out = values[0].size // values.shape[-1]
    expert, first, used = _tiles(group_sizes, rows)
    last = jnp.cumsum(group_sizes)[expert]
    # One tile of padding: a tile that starts near the end reads past the last row, and writes there
    # before the next does.
    padded = jnp.pad(x.astype(jnp.float32), ((0, TILE), (0, 0)))

    def one(tile: Array, result: Array) -> Array:
        index, start = expert[tile], first[tile]
        weight = formats.dequantise(
            values[index], None if scales is None else scales[index]
        ).reshape(out, k)
        real = start + jnp.arange(TILE, dtype=jnp.int32) < last[tile]
        block = jax.lax.dynamic_slice(padded, (start, 0), (TILE, k))
        block = jnp.where(real[:, None], block, 0.0)
        product = jax.lax.dot_general(
            block, weight, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
        )
        return jax.lax.dynamic_update_slice(result, product, (start, 0))

    result = jax.lax.fori_loop(0, used, one, jnp.zeros((rows + TILE, out), jnp.float32))
    return result[:rows]


def gate_up(
    x: Float[Array, "tok k"],
    values: Shaped[Array, "experts two inner stored"],
    scales: Shaped[Array, "experts two sr sc"] | None,
    group_sizes: Int32[Array, " experts"],
    route_weight: Float[Array, " rows"],
    source: Int32[Array, " rows"] | None = None,
    *,
    limit: float,
    act_quant: bool,
) -> Float[Array, "rows inner"]:
    """See pallas_kernels.grouped_gemm.gate_up."""
    x = x if source is None else x[source]
    real = jnp.arange(x.shape[0]) < jnp.sum(group_sizes)
    x = jnp.where(real[:, None], x, jnp.zeros((), x.dtype))
    x = formats.round_trip_activations(x) if act_quant else x
    product = formats.rounded(_product(x, values, scales, group_sizes), x.dtype)
    product = product.reshape(x.shape[0], 2, -1)
    return swiglu(product[:, 0], product[:, 1], jnp.where(real, route_weight, 0.0), limit).astype(
        x.dtype
    )


def down(
    h: Float[Array, "rows k"],
    values: Shaped[Array, "experts out stored"],
    scales: Shaped[Array, "experts sr sc"] | None,
    group_sizes: Int32[Array, " experts"],
    *,
    act_quant: bool,
) -> Float[Array, "rows out"]:
    """See pallas_kernels.grouped_gemm.down."""
    real = jnp.arange(h.shape[0]) < jnp.sum(group_sizes)
    h = jnp.where(real[:, None], h, jnp.zeros((), h.dtype))
    h = formats.round_trip_activations(h) if act_quant else h
    return _product(h, values, scales, group_sizes).astype(h.dtype)
