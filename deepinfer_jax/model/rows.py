"""Rows: the flat list of tokens one call computes, and the groups they belong to.

A row is one token of one sequence; a group is the rows of one sequence in this call, in order and
without gaps. Whole
sequences, prefill chunks and decode steps with or without draft rows are all such lists, so the
model has one code path:
  rectangle   g groups of `width` rows each (row = group * width + place); shorter groups end in
              invalid rows
  flat        groups of any length up to `width` one after another, padded to a bucket of rows at
              the end
`slot` is where a group's state lives in the cache, `pages` [g, P] its page table. Invalid rows
write nothing.
"""

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

from deepinfer_jax.spec import Leaf


@flax.struct.dataclass
class Rows:
    """token, position, group int32 [rows], valid bool [rows]; slot, start, count, first, floor,
    begin, own int32 [groups].

    start: position of the group's first row; first: its row number; count: valid rows.
    floor: the least position that the decoder half's windows may see (0 unless a prompt is
    replayed).
    begin: the least position that any window may see, own: the least one whose compressed entries
    are written (0, unless rings are rebuilt for pages that are there already).
    pages: int32 [groups, P], page of the compressed caches that holds tokens 128 i .. 128 i + 127
    (-1: none).
    width: most rows of a group; dense: the rows form a rectangle.
        whole, axes, order: under context parallelism the rows of all shards, the mesh axes they are
    spread over and which piece is where (context.py).
    """

    token: Leaf
    position: Leaf
    group: Leaf
    valid: Leaf
    slot: Leaf
    start: Leaf
    count: Leaf
    first: Leaf
    floor: Leaf
    begin: Leaf
    own: Leaf
    pages: Leaf
    width: int = flax.struct.field(pytree_node=False)
    dense: bool = flax.struct.field(pytree_node=False)
    whole: Any = None
    axes: tuple[str, ...] = flax.struct.field(pytree_node=False, default=())
    order: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())

    @property
    def everyone(self) -> "Rows":
        """The rows of all context shards (context.py); these rows if nothing is split."""
        return self if self.whole is None else self.whole

    @property
    def size(self) -> int:
        """Rows, invalid ones included."""
        return self.token.shape[0]

    @property
    def groups(self) -> int:
        return self.slot.shape[0]

    def last(self) -> Int32[Array, " groups"]:
        """Row number of each group's last valid row (its first row if it has none)."""
        return self.first + jnp.maximum(self.count - 1, 0)


def rectangle(
    token: Int32[Array, "groups width"],
    *,
    start: Int32[Array, " groups"],
    count: Int32[Array, " groups"],
    slot: Int32[Array, " groups"],
    pages: Int32[Array, "groups pages"],
    floor: Int32[Array, " groups"] | None = None,
    begin: Int32[Array, " groups"] | None = None,
    own: Int32[Array, " groups"] | None = None,
) -> Rows:
    """Groups of `width` places each, of which the first `count` are valid."""
    groups, width = token.shape
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    valid = place < count[:, None]
    return Rows(
        token=token.reshape(-1),
        position=jnp.where(valid, start[:, None] + place, 0).reshape(-1),
        group=jnp.repeat(jnp.arange(groups, dtype=jnp.int32), width),
        valid=valid.reshape(-1),
        slot=slot,
        start=start,
        count=count,
        first=jnp.arange(groups, dtype=jnp.int32) * width,
        floor=jnp.zeros_like(start) if floor is None else floor,
        begin=jnp.zeros_like(start) if begin is None else begin,
        own=jnp.zeros_like(start) if own is None else own,
        pages=pages,
        width=width,
        dense=True,
    )


def flat(
    token: Int32[Array, "groups width"],
    *,
    start: Int32[Array, " groups"],
    count: Int32[Array, " groups"],
    slot: Int32[Array, " groups"],
    pages: Int32[Array, "groups pages"],
    size: int,
) -> Rows:
    """The valid places of a rectangle packed one after another into `size` rows.

    sum(count) must be at most `size`: later rows would be lost.
    """
    groups, width = token.shape
    ends = jnp.cumsum(count)
    first = (ends - count).astype(jnp.int32)
    row = jnp.arange(size, dtype=jnp.int32)
    # All compared at once: a binary search is a loop, which a GPU program is cut at.
    found = jnp.searchsorted(ends, row, side="right", method="compare_all")
    group = jnp.minimum(found, groups - 1).astype(jnp.int32)
    valid = row < ends[-1]
    place = jnp.where(valid, row - first[group], 0)
    return Rows(
        token=jnp.where(valid, token[group, place], 0),
        position=jnp.where(valid, start[group] + place, 0),
        group=group,
        valid=valid,
        slot=slot,
        start=start,
        count=count,
        first=first,
        floor=jnp.zeros_like(start),
        begin=jnp.zeros_like(start),
        own=jnp.zeros_like(start),
        pages=pages,
        width=width,
        dense=False,
    )


def to_rectangle(
    rows: Rows, x: Shaped[Array, " rows *rest"]
) -> Shaped[Array, "groups width *rest"]:
    """Per-row values as [groups, width, ...]; places without a row hold some other row's value."""
    if rows.dense:
        return x.reshape(rows.groups, rows.width, *x.shape[1:])
    place = jnp.arange(rows.width, dtype=jnp.int32)[None, :]
    return x[jnp.minimum(rows.first[:, None] + place, rows.size - 1)]


def occupied(rows: Rows) -> Bool[Array, "groups width"]:
    """Which places of the rectangle hold a valid row."""
    return jnp.arange(rows.width, dtype=jnp.int32)[None, :] < rows.count[:, None]


def from_rectangle(
    rows: Rows, x: Shaped[Array, "groups width *rest"]
) -> Shaped[Array, " rows *rest"]:
    """Back to one value a row."""
    packed = x.reshape(-1, *x.shape[2:])
    if rows.dense:
        return packed
    place = jnp.clip(rows.position - rows.start[rows.group], 0, rows.width - 1)
    return packed[rows.group * rows.width + place]


def suffix(rows: Rows, keep: int) -> tuple[Rows, Int32[Array, " kept"]]:
    """The rows of a rectangle at positions >= floor, as a rectangle `keep` wide, and their row
    numbers.

    Only the last `keep` valid rows of a group can be kept; a group without any has count 0. Used by
    bounded replay.
    """
    end = rows.start + rows.count
    start = jnp.minimum(jnp.maximum(rows.start, rows.floor), end)
    count = end - start
    place = jnp.arange(keep, dtype=jnp.int32)[None, :]
    source = rows.first[:, None] + (start - rows.start)[:, None] + place
    source = jnp.minimum(source, rows.size - 1)
    kept = rectangle(
        rows.token[source],
        start=start,
        count=count,
        slot=rows.slot,
        pages=rows.pages,
        floor=rows.floor,
        begin=rows.begin,
        own=rows.own,
    )
    return kept, source.reshape(-1)
