"""One program a device: the few places where shards of a layout talk to each other.

A jitted program is wrapped once, in ``spmd``: shard_map over the whole mesh, so that everything
inside sees local arrays only (its own rows, slots, pages, heads, experts) and custom kernels need
no wrapping. What crosses devices is written where it happens; on one device it is the identity:

    total   partial sums over a sharded contraction (heads -> wo_b, ffn -> w2)   all-reduce
    whole   shards of an array axis put together (outputs of `columns`)          all-gather
    columns a product with a weight sharded by outputs (vocabulary)              all-gather
    take    rows of a table sharded by rows (embedding, Engram)                  exchange
    remote  a function computed where an item belongs (experts)                  exchange

An exchange runs in rounds of a fixed capacity between any two shards: a skewed batch takes more
rounds, nothing is dropped and no buffer grows. Every item is computed by itself, so the result of
an item does not depend on the round it travels in.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.layout import Layout
from deepinfer_jax.spec import Param, path_name

UNSHARDED = ("stream", "embed", "q_rank", "kv")


def placed(declared: Any, layout: Layout) -> Any:
    """Declared parameters as they lie on devices: Engram rows rounded up to a multiple of the
    shards (a released table divides by 2 and not by 4; no row past the end is ever addressed), and
    the backbone's experts with the layout's spare slots."""
    ways = layout.ways("engram_rows")

    def leaf(path: tuple[Any, ...], param: Param) -> Param:
        if param.axes[:1] == ("engram_rows",):
            rows = -(-param.shape[0] // ways) * ways
        elif param.axes[:1] == ("expert",) and path_name(path).startswith("layers/"):
            rows = param.shape[0] + layout.spare_experts
        else:
            return param
        return dataclasses.replace(param, shape=(rows, *param.shape[1:]))

    return jax.tree_util.tree_map_with_path(leaf, declared)


def check(layout: Layout, cfg: ModelConfig, phase: str | None = None) -> None:
    """Raises ValueError for a layout that this model does not implement, naming both sides."""

    def rule(logical: str) -> tuple[str, ...]:
        return layout.mesh_axes(logical, phase)

    where = f"layout {layout.name!r}"
    for logical in UNSHARDED:
        if rule(logical):
            raise ValueError(f"{where}: {logical} -> {rule(logical)}; the model keeps it whole")
    for one, other in (("heads", "o_group"), ("slots", "pages")):
        if rule(one) != rule(other):
            raise ValueError(
                f"{where}: {one} -> {rule(one)} but {other} -> {rule(other)}; they go together"
            )
    rows = rule("rows")
    if phase == "decode" and rows != rule("slots"):
        raise ValueError(
            f"{where}: rows -> {rows} in decode but slots -> {rule('slots')}; a decode step has "
            "few rows a sequence, which are not split"
        )
    if rows[: len(rule("slots"))] != rule("slots"):
        raise ValueError(f"{where}: rows -> {rows} must begin with slots -> {rule('slots')}")
    for logical in ("heads", "ffn"):
        if clash := set(rule(logical)) & set(rows):
            raise ValueError(f"{where}: {logical} and rows both on mesh axis {sorted(clash)}")
    if cfg.o_groups % layout.ways("o_group"):
        raise ValueError(
            f"{where}: o_group -> {rule('o_group')} of {layout.ways('o_group')} shards; expected a "
            f"divisor of o_groups = {cfg.o_groups}, a group's heads stay together"
        )
    if clash := set(rule("ffn")) & set(rule("expert")):
        raise ValueError(f"{where}: ffn and expert both on mesh axis {sorted(clash)}")


def specs(declared: Any, layout: Layout, phase: str | None = None) -> Any:
    """A tree of ``Param`` as PartitionSpecs under a layout; errors name the tensor."""
    return jax.tree_util.tree_map_with_path(
        lambda path, param: layout.spec(param.axes, param.shape, path_name(path), phase), declared
    )


def spmd(layout: Layout, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """``function`` over the local shards of its arguments; itself on one device.

    Outputs that name no mesh axis must be equal on every shard; nothing checks that.
    """
    if layout.size == 1:
        return function

    def local(*args: Any) -> Any:
        # jaxlib 0.11.2 dies on a CPU compiling a sharded input without elements that goes through.
        return jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype) if x.size == 0 else x, function(*args)
        )

    return jax.shard_map(
        local,
        mesh=_mesh(layout),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def _mesh(layout: Layout) -> jax.sharding.AbstractMesh:
    """The layout's mesh, of the kind of device that the context is lowered for."""
    plain, device = layout.abstract_mesh, jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return plain
    return jax.sharding.AbstractMesh(
        plain.axis_sizes, plain.axis_names, plain.axis_types, abstract_device=device
    )


def total(
    x: Shaped[Array, "*shape"], layout: Layout, logical: str, phase: str | None = None
) -> Shaped[Array, "*shape"]:
    """Sum of the shards' partial results; pass float32 where the order of summation matters."""
    axes = layout.mesh_axes(logical, phase)
    return lax.psum(x, axes) if axes else x


def whole(
    x: Shaped[Array, "..."], layout: Layout, logical: str, axis: int, phase: str | None = None
) -> Shaped[Array, "..."]:
    """The shards of a logical axis joined along array axis ``axis``."""
    axes = layout.mesh_axes(logical, phase)
    return lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x


def columns(
    function: Callable[[Any], Array],
    x: Any,
    layout: Layout,
    logical: str,
    phase: str | None = None,
) -> Float[Array, "rows n"]:
    """All columns of ``function(x)``, a product with a weight whose output axis is ``logical``;
    x: [rows, d], or a tree of such.

    Shards that work on the same rows join their columns. Shards that work on different rows
    compute everybody's rows and hand each its own.
    """
    axes, row_axes = layout.mesh_axes(logical), layout.mesh_axes("rows", phase)
    if not set(axes) & set(row_axes):
        return whole(function(x), layout, logical, axis=1)
    if not set(axes) <= set(row_axes):
        raise ValueError(
            f"layout {layout.name!r}: {logical!r} -> {axes} shares only some mesh axes with rows "
            f"-> {row_axes}; expected all or none"
        )
    y = function(lax.all_gather(x, axes, tiled=True))
    return lax.all_to_all(y, axes, split_axis=0, concat_axis=1, tiled=True)


def take(
    table: Any,
    index: Int32[Array, "*where"],
    layout: Layout,
    logical: str,
    phase: str | None = None,
) -> Any:
    """Rows ``index`` (global numbers) of a table whose leading axis is ``logical``, shard by shard.

    table: tree of [rows here, ...]. Returns the tree of [*where, ...]. Shards that work on the same
    rows read what they hold and add up (bytes are summed as integers: exact); shards that work on
    different rows send each number to its owner and get the row back.
    """
    axes = layout.mesh_axes(logical)
    if not axes:
        return jax.tree.map(lambda leaf: _read(leaf, index), table)
    shards = layout.ways(logical)
    here = jax.tree.leaves(table)[0].shape[0]
    row_axes = layout.mesh_axes("rows", phase)
    flat = index.reshape(-1)
    if not set(axes) & set(row_axes):
        local = flat - lax.axis_index(axes) * here
        mine = (local >= 0) & (local < here)
        found = jax.tree.map(lambda leaf: _read(leaf, jnp.where(mine, local, 0)), table)
        found = jax.tree.map(lambda leaf: sum_bits(leaf, mine, axes), found)
    else:

        def read(items: Any, _: Bool[Array, " n"]) -> Any:
            return jax.tree.map(lambda leaf: _read(leaf, items), table)

        found = spread(
            flat,
            row_axes,
            axes,
            layout,
            lambda mine: remote(
                lambda item: jnp.remainder(mine, here)[item],
                mine // here,
                read,
                layout=layout,
                axes=axes,
                every=joined(row_axes, axes),
                capacity=capacity(mine.size, shards, layout),
            ),
        )
    return jax.tree.map(lambda leaf: leaf.reshape(*index.shape, *leaf.shape[1:]), found)


def joined(first: Sequence[str], second: Sequence[str]) -> tuple[str, ...]:
    """Axes of both, in order, once each."""
    return (*first, *(axis for axis in second if axis not in first))


def capacity(items: int, shards: int, layout: Layout) -> int:
    """Items that one round carries between two shards."""
    return max(1, min(items, math.ceil(layout.moe_capacity * items / shards)))


def spread(
    items: Any,
    row_axes: Sequence[str],
    axes: Sequence[str],
    layout: Layout,
    function: Callable[[Any], Any],
    fill: int = 0,
) -> Any:
    """``function`` on each shard's own part of items that are equal over some of ``axes``.

    Shards of the axes that do not split rows hold the same items; each takes a part (the last ones
    padded with ``fill``) and the results are gathered, so that no work is done twice.
    """
    same = tuple(axis for axis in axes if axis not in row_axes)
    if not same:
        return function(items)
    ways = math.prod(layout.axis_size(axis) for axis in same)
    count = jax.tree.leaves(items)[0].shape[0]
    part = -(-count // ways)

    def cut(leaf: Array) -> Array:
        pad = [(0, part * ways - count)] + [(0, 0)] * (leaf.ndim - 1)
        padded = jnp.pad(leaf, pad, constant_values=jnp.asarray(fill, leaf.dtype))
        return lax.dynamic_slice_in_dim(padded, lax.axis_index(same) * part, part)

    out = function(jax.tree.map(cut, items))
    return jax.tree.map(lambda leaf: lax.all_gather(leaf, same, tiled=True)[:count], out)


def remote(
    pick: Callable[[Int32[Array, " m"]], Any],
    to: Int32[Array, " n"],
    function: Callable[[Any, Bool[Array, " m"]], Any],
    *,
    layout: Layout,
    axes: Sequence[str],
    every: Sequence[str],
    capacity: int,
) -> Any:
    """function(items, present) computed on the shard ``to`` (of ``axes``) of each item.

    pick(number) gives the items of these numbers as a tree of [m, ...]; ``to`` is the shard of each
    of the n items, a value >= the number of shards for none. ``function`` works row by row; rows
    that are not ``present`` hold anything. Returns its result for every item, [n, ...], zero for
    items that went nowhere. every: the axes whose shards must run equally many rounds.
    """
    axes, every = tuple(axes), tuple(every)
    shards = math.prod(layout.axis_size(axis) for axis in axes)
    number = jnp.arange(to.size, dtype=jnp.int32)
    to = jnp.minimum(to, shards)
    place, counts = _rank_within(to, shards)
    move = _ragged if layout.moe_dispatch == "ragged" else _padded
    within = jnp.arange(shards * capacity, dtype=jnp.int32) % capacity

    def one_round(turn: Int32[Array, ""], out: Any) -> Any:
        slot = place - turn * capacity
        mine = (slot >= 0) & (slot < capacity) & (to < shards)
        slot = jnp.where(mine, to * capacity + slot, shards * capacity)
        source = jnp.zeros((shards * capacity,), jnp.int32).at[slot].set(number, mode="drop")
        send = jnp.clip(counts - turn * capacity, 0, capacity)
        receive = lax.all_to_all(send, axes, 0, 0, tiled=True)
        items = jax.tree.map(lambda leaf: move(leaf, send, receive, axes, capacity), pick(source))
        present = within < jnp.repeat(receive, capacity, total_repeat_length=within.size)
        back = jax.tree.map(
            lambda leaf: move(leaf, receive, send, axes, capacity), function(items, present)
        )
        slot = jnp.where(mine, slot, 0)

        def fill(old: Array, new: Array) -> Array:
            keep = mine.reshape(-1, *[1] * (new.ndim - 1))
            return jnp.where(keep, new[slot], old)

        return jax.tree.map(fill, out, back)

    like = jax.eval_shape(
        lambda: function(pick(jnp.zeros_like(within)), jnp.zeros(within.shape, jnp.bool_))
    )
    start = jax.tree.map(lambda leaf: jnp.zeros((to.size, *leaf.shape[1:]), leaf.dtype), like)
    if capacity >= to.size:
        return one_round(jnp.int32(0), start)
    rounds = lax.pmax(-(-jnp.max(counts) // capacity), every)
    return lax.while_loop(
        lambda carry: carry[0] < rounds,
        lambda carry: (carry[0] + 1, one_round(*carry)),
        (jnp.int32(0), start),
    )[1]


def _read(table: Shaped[Array, "n ..."], index: Int32[Array, "*where"]) -> Shaped[Array, "..."]:
    """table[index]; a table in pinned host memory is read by the host, inside the program."""
    if jax.typeof(table).memory_space != jax.memory.Space.Host:
        return table[index]
    on_host = compute_on(compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
    read = on_host(lambda rows, where: rows[where])
    return read(table, jax.device_put(index, jax.memory.Space.Host))


def _rank_within(
    key: Int[Array, " n"], keys: int
) -> tuple[Int32[Array, " n"], Int32[Array, " keys"]]:
    """How many earlier entries have the same key, and the number of entries of each key < keys."""
    order = jnp.argsort(key, stable=True)
    counts = jnp.bincount(key, length=keys + 1).astype(jnp.int32)
    start = jnp.cumsum(counts) - counts
    rank = jnp.arange(key.size, dtype=jnp.int32) - start[key[order]]
    return jnp.zeros_like(rank).at[order].set(rank), counts[:keys]


def _padded(
    leaf: Shaped[Array, "n ..."], send: Array, receive: Array, axes: tuple[str, ...], room: int
) -> Shaped[Array, "n ..."]:
    return lax.all_to_all(leaf, axes, 0, 0, tiled=True)


def _ragged(
    leaf: Shaped[Array, "n ..."], send: Array, receive: Array, axes: tuple[str, ...], room: int
) -> Shaped[Array, "n ..."]:
    """Send the first send[i] rows of block i to shard i; ``room`` rows a block on both sides."""
    starts = jnp.arange(send.size, dtype=jnp.int32) * room
    at = jnp.full_like(starts, lax.axis_index(axes) * room)
    empty = jnp.zeros_like(leaf)
    return lax.ragged_all_to_all(leaf, empty, starts, send, at, receive, axis_name=axes)


def sum_bits(
    rows: Shaped[Array, "n ..."], mine: Bool[Array, " n"], axes: tuple[str, ...]
) -> Shaped[Array, "n ..."]:
    """Each row from the one shard that holds it: bits added as integers, zero elsewhere."""
    whole_bits = jnp.dtype(f"uint{rows.dtype.itemsize * 8}")
    bits = lax.bitcast_convert_type(rows, whole_bits)
    bits = jnp.where(mine.reshape(-1, *[1] * (rows.ndim - 1)), bits, jnp.zeros_like(bits))
    return lax.bitcast_convert_type(lax.psum(bits, axes), rows.dtype)
