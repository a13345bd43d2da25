"""Context parallel: the rows of one sequence spread over the shards of some mesh axes.

A prompt of width w is cut into 2 n pieces for n shards. In "zigzag" order shard r works on pieces r
and 2 n - 1 - r, so that every shard has the same causal work; in "natural" order on two neighbours.
Queries, MoE rows and residual streams stay where they are. What later rows read (window KV,
compressed entries, n-gram classes: a few hundred bytes a row) is gathered and put back in order,
and every shard keeps the whole cache: context parallelism divides work, not cache.

``Rows.whole`` describes the rows of all shards; a call that writes a cache or looks at neighbours
goes through ``together``, everything else sees its own rows only.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Shaped

from deepinfer_jax.layout import Layout
from deepinfer_jax.model.parallel import sum_bits
from deepinfer_jax.model.rows import Rows


def axes_of(layout: Layout, phase: str | None) -> tuple[str, ...]:
    """Mesh axes that split the rows of one sequence: those of "rows" that are not of "slots"."""
    slots = layout.mesh_axes("slots", phase)
    return tuple(axis for axis in layout.mesh_axes("rows", phase) if axis not in slots)


def multiple(layout: Layout, phase: str | None) -> int:
    """What the width of a rectangle must be a multiple of."""
    ways = math.prod(layout.axis_size(axis) for axis in axes_of(layout, phase))
    return 2 * ways if ways > 1 else 1


def split(rows: Rows, layout: Layout, phase: str | None) -> Rows:
    """This shard's part of a rectangle that all context shards were given; ``rows`` without any.

    Raises ValueError if the width is no multiple of twice the shards.
    """
    axes = axes_of(layout, phase)
    if not axes:
        return rows
    ways = math.prod(layout.axis_size(axis) for axis in axes)
    if not rows.dense or rows.width % (2 * ways):
        raise ValueError(
            f"layout {layout.name!r}: rows must be a rectangle whose width is a multiple of "
            f"{2 * ways} (2 x {' x '.join(axes)}), not {rows.width} wide"
        )
    order = _order(ways, layout.prefill_order)
    pieces = jnp.asarray(order.reshape(ways, 2))[lax.axis_index(axes)]
    piece = rows.width // (2 * ways)
    place = (pieces[:, None] * piece + jnp.arange(piece, dtype=jnp.int32)[None, :]).reshape(-1)
    number = (
        jnp.arange(rows.groups, dtype=jnp.int32)[:, None] * rows.width + place[None, :]
    ).reshape(-1)
    width = 2 * piece
    return dataclasses.replace(
        rows,
        token=rows.token[number],
        position=rows.position[number],
        group=rows.group[number],
        valid=rows.valid[number],
        count=jnp.sum(rows.valid[number].reshape(rows.groups, width), axis=1, dtype=jnp.int32),
        first=jnp.arange(rows.groups, dtype=jnp.int32) * width,
        width=width,
        whole=rows,
        axes=axes,
        order=tuple(int(i) for i in order),
    )


def part(rows: Rows, value: Shaped[Array, "rows ..."]) -> Shaped[Array, "own ..."]:
    """This shard's rows of values for all rows of ``rows.whole``."""
    if rows.whole is None:
        return value
    pieces = len(rows.order)
    cut = value.reshape(rows.groups, pieces, -1, *value.shape[1:])
    order = jnp.asarray(np.array(rows.order, np.int32).reshape(-1, 2))
    own = cut[:, order[lax.axis_index(rows.axes)]]
    return own.reshape(-1, *value.shape[1:])


def together(rows: Rows, own: Any) -> Any:
    """Values of this shard's rows [rows, ...] as those of ``rows.whole``, in its order."""
    if rows.whole is None:
        return own
    inverse = jnp.asarray(np.argsort(np.array(rows.order, np.int32)).astype(np.int32))
    pieces, groups = len(rows.order), rows.groups

    def leaf(x: Array) -> Array:
        cut = x.reshape(groups, 2, rows.width // 2, *x.shape[1:])
        all_shards = lax.all_gather(cut, rows.axes)
        by_group = jnp.moveaxis(all_shards, 0, 1).reshape(groups, pieces, *cut.shape[2:])
        return by_group[:, inverse].reshape(-1, *x.shape[1:])

    return jax.tree.map(leaf, own)


def fetch(rows: Rows, own: Any, number: Int32[Array, " n"]) -> Any:
    """Values of the rows ``number`` of ``rows.whole``, on every shard: each from the one that has
    it."""
    if rows.whole is None:
        return jax.tree.map(lambda x: x[number], own)
    piece = rows.width // 2
    at = number % rows.whole.width // piece
    spot = jnp.asarray(np.argsort(np.array(rows.order, np.int32)).astype(np.int32))[at]
    shard, half = spot // 2, spot % 2
    local = number // rows.whole.width * rows.width + half * piece + number % piece
    mine = shard == lax.axis_index(rows.axes)

    def leaf(x: Shaped[Array, "rows ..."]) -> Shaped[Array, "n ..."]:
        return sum_bits(x[local], mine, rows.axes)

    return jax.tree.map(leaf, own)


def _order(ways: int, name: str) -> np.ndarray:
    """Piece of each (shard, half), flattened, int32 [2 ways]."""
    shard = np.arange(ways, dtype=np.int32)
    if name == "natural":
        return np.arange(2 * ways, dtype=np.int32)
    return np.stack([shard, 2 * ways - 1 - shard], axis=1).reshape(-1)
