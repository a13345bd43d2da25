"""Rows to experts and back: the routed half of a MoE layer under any layout.

    y[r] = sum over slots j (in order, f32) of expert[index[r, j]](x[r], weight[r, j])

On one device the (row, slot) pairs are sorted by expert, one grouped product runs over them, and
each row sums its slots. With experts sharded over mesh axes X and rows over R, inside shard_map:

- ``gather``: rows are all-gathered over the axes X and R share; each shard runs its experts over
  all of them. Slots are summed before the reduce-scatter (or, ``exact``, after one of k times the
  size that adds zeros only, so that the sum keeps the slot order and the bits of one device).
- ``alltoall``: each pair travels to its expert's shard and its output travels back. One round
  carries ``capacity`` pairs between two shards; a skewed batch takes more rounds, so nothing is
  dropped and no buffer grows. Rounds are equal on every shard. Bits are those of one device.
- ``ragged``: the same rounds through ``lax.ragged_all_to_all``, which moves only the pairs there
  are (GPU and TPU; XLA:CPU does not implement it).

Experts split over ``ffn`` give partial sums, added in f32. Replicated experts (EPLB) are an index
table, ``Placement``. A negative index is an unused slot.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Int32, Shaped

from deepinfer_jax.layout import Layout

Mlp = Callable[
    ..., Array
]  # (x [n, d], w13, w2, group_sizes [e], weight [n]) -> [n, d], sorted rows
Wire = tuple[Callable[[Array], Any], Callable[[Any], Array]]  # to and from what travels


@struct.dataclass
class Placement:
    """Where the replicas of each logical expert are: slots int32 [expert, replica] (the first
    ``count`` of a row are used), count int32 [expert]."""

    slots: Any
    count: Any


@jax.named_scope("replicas")
def to_physical(
    index: Int32[Array, "tok k"], placement: Placement, row: Int32[Array, " tok"]
) -> Int32[Array, "tok k"]:
    """Physical slot of each routed expert: replica ``row mod count``. Replicas hold equal weights,
    so the choice moves work and not values. Negative stays negative."""
    expert = jnp.maximum(index, 0)
    replica = jnp.remainder(row[:, None], placement.count[expert])
    return jnp.where(index < 0, index, placement.slots[expert, replica])


@jax.named_scope("routed_experts")
def routed(
    x: Float[Array, "tok d"],
    index: Int32[Array, "tok k"],
    weight: Float[Array, "tok k"],
    w13: Any,
    w2: Any,
    mlp: Mlp,
    *,
    layout: Layout,
    phase: str | None = None,
    exact: bool = False,
    wire: Wire | None = None,
) -> Float[Array, "tok d"]:
    """Sum of the routed experts of every row, f32.

    x: [tok, d]; index: expert (physical slot) of each slot or -1; weight f32; w13, w2: trees whose
    leaves lead with the expert axis and carry ``ffn`` where the parameter declarations put it.
    wire: encode and decode for the rows' way to the experts (fp8 values and scales); the decoded
    rows must give the same ``mlp`` bits. exact: see the module docstring.
    """
    experts = jax.tree.leaves(w13)[0].shape[0]
    if layout.size == 1:
        y = _local(x, index, weight, w13, w2, mlp, 0, experts)
        return _sum_slots(y)
    expert_axes, ffn_axes = layout.mesh_axes("expert"), layout.mesh_axes("ffn")
    row_axes = layout.mesh_axes("rows", phase)
    if layout.moe_dispatch != "gather" and expert_axes:
        row_axes += tuple(axis for axis in expert_axes if axis not in row_axes)
    where = f"layout {layout.name!r}, MoE rows"
    if clash := set(ffn_axes) & {*expert_axes, *row_axes}:
        raise ValueError(f"{where}: 'ffn' shares mesh axis {sorted(clash)} with experts or rows")
    ways = math.prod(layout.axis_size(axis) for axis in row_axes)
    if x.shape[0] % ways:
        raise ValueError(f"{where}: {x.shape[0]} rows do not divide over {row_axes} = {ways}")
    shards = math.prod(layout.axis_size(axis) for axis in expert_axes)
    if experts % shards:
        raise ValueError(f"{where}: {experts} experts do not divide over {expert_axes} = {shards}")
    common = dict(mlp=mlp, shards=shards, expert_axes=expert_axes, ffn_axes=ffn_axes, wire=wire)
    if layout.moe_dispatch == "gather" or not expert_axes:
        shared = tuple(axis for axis in expert_axes if axis in row_axes)
        body = partial(_gather, shared=shared, exact=exact, **common)
    else:
        pairs = x.shape[0] // ways * index.shape[1]
        body = partial(
            _exchange,
            capacity=min(pairs, math.ceil(layout.moe_capacity * pairs / shards)),
            ragged=layout.moe_dispatch == "ragged",
            every=row_axes,
            **common,
        )
    rows = PartitionSpec(row_axes or None)
    ffn = ffn_axes or None
    return jax.shard_map(
        body,
        mesh=layout.abstract_mesh,
        in_specs=(
            rows,
            rows,
            rows,
            PartitionSpec(expert_axes or None, None, ffn),
            PartitionSpec(expert_axes or None, None, ffn),
        ),
        out_specs=rows,
        check_vma=False,
    )(x, index, weight, w13, w2)


def _sum_slots(y: Float[Array, "tok k d"]) -> Float[Array, "tok d"]:
    total = y[:, 0].astype(jnp.float32)
    for slot in range(1, y.shape[1]):
        total = total + y[:, slot].astype(jnp.float32)
    return total


def _grouped(x, expert, weight, source, w13, w2, mlp, experts: int):
    """Run ``mlp`` over rows x[source] sorted by expert; unsort. expert [n] in [0, experts]; the
    value ``experts`` marks a row of nobody, whose output is zero."""
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.bincount(expert, length=experts + 1)[:experts].astype(jnp.int32)
    y = mlp(x[source[order]], w13, w2, sizes, weight[order])
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    return y[back]


def _local(x, index, weight, w13, w2, mlp, first, experts: int):
    """Outputs [tok, k, d] of the experts [first, first + experts); zero for the others."""
    tok, k = index.shape
    local = index.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < experts) & (index.reshape(-1) >= 0), local, experts)
    source = jnp.arange(tok * k, dtype=jnp.int32) // k
    y = _grouped(x, local, weight.reshape(-1), source, w13, w2, mlp, experts)
    return y.reshape(tok, k, -1)


def _gather(x, index, weight, w13, w2, *, mlp, shards, expert_axes, ffn_axes, wire, shared, exact):
    experts = jax.tree.leaves(w13)[0].shape[0]
    if shared:
        encode, decode = wire or (lambda rows: rows, lambda rows: rows)
        gather = partial(lax.all_gather, axis_name=shared, tiled=True)
        x = decode(jax.tree.map(gather, encode(x)))
        index, weight = gather(index), gather(weight)
    first = lax.axis_index(expert_axes) * experts if expert_axes else 0
    y = _local(x, index, weight, w13, w2, mlp, first, experts)
    if ffn_axes:
        y = y.astype(jnp.float32)
    total = y if exact else _sum_slots(y)
    if shared:
        total = lax.psum_scatter(total, shared, tiled=True)
    rest = tuple(axis for axis in expert_axes if axis not in shared) + ffn_axes
    if rest:
        total = lax.psum(total, rest)
    return _sum_slots(total) if exact else total


def _exchange(
    x, index, weight, w13, w2, *, mlp, shards, expert_axes, ffn_axes, wire, capacity, ragged, every
):
    experts = jax.tree.leaves(w13)[0].shape[0]
    encode, decode = wire or (lambda rows: rows, lambda rows: rows)
    k = index.shape[1]
    pair_expert, pair_weight = index.reshape(-1), weight.reshape(-1)
    pair = jnp.arange(pair_expert.size, dtype=jnp.int32)
    to = jnp.where(pair_expert < 0, shards, pair_expert // experts)
    place, counts = _rank_within(to, shards)
    travelling = encode(x)

    def move(tree, send, receive):
        if ragged:
            return jax.tree.map(
                lambda leaf: _ragged_move(leaf, send, receive, expert_axes, capacity), tree
            )
        return jax.tree.map(lambda leaf: lax.all_to_all(leaf, expert_axes, 0, 0, tiled=True), tree)

    def one_round(carry):
        turn, out = carry
        slot = place - turn * capacity
        mine = (slot >= 0) & (slot < capacity) & (to < shards)
        slot = jnp.where(mine, to * capacity + slot, shards * capacity)
        source = jnp.full((shards * capacity,), -1, jnp.int32).at[slot].set(pair, mode="drop")
        send = jnp.clip(counts - turn * capacity, 0, capacity)
        receive = lax.all_to_all(send, expert_axes, 0, 0, tiled=True) if ragged else send
        held = jnp.maximum(source, 0)
        label = jnp.where(source < 0, experts, jnp.remainder(pair_expert[held], experts))
        labels = jnp.stack([label, lax.bitcast_convert_type(pair_weight[held], jnp.int32)], axis=1)
        if ragged:  # places that nothing is sent to keep a label of nobody
            labels = labels - jnp.array([experts, 0], jnp.int32)
        rows = jax.tree.map(lambda leaf: leaf[held // k], travelling)
        labels, rows = move((labels, rows), send, receive)
        if ragged:
            labels = labels + jnp.array([experts, 0], jnp.int32)
        there = jnp.arange(shards * capacity, dtype=jnp.int32)
        scale = lax.bitcast_convert_type(labels[:, 1], jnp.float32)
        y = _grouped(decode(rows), labels[:, 0], scale, there, w13, w2, mlp, experts)
        if ffn_axes:
            y = lax.psum(y.astype(jnp.float32), ffn_axes)
        y = y.astype(out.dtype)
        y = move(y, receive, send)
        return turn + 1, jnp.where(mine[:, None], y[jnp.where(mine, slot, 0)], out)

    out_type = jnp.float32 if ffn_axes else x.dtype
    start = (jnp.int32(0), jnp.zeros((pair.size, x.shape[1]), out_type))
    if capacity >= pair.size:
        out = one_round(start)[1]
    else:
        rounds = lax.pmax(-(-jnp.max(counts) // capacity), every)
        out = lax.while_loop(lambda carry: carry[0] < rounds, one_round, start)[1]
    return _sum_slots(out.reshape(*index.shape, -1))


def _rank_within(
    key: Int[Array, " n"], keys: int
) -> tuple[Int32[Array, " n"], Int32[Array, " keys"]]:
    """How many earlier entries have the same key, and the number of entries of each key < keys."""
    order = jnp.argsort(key, stable=True)
    counts = jnp.bincount(key, length=keys + 1).astype(jnp.int32)
    start = jnp.cumsum(counts) - counts
    rank = jnp.arange(key.size, dtype=jnp.int32) - start[key[order]]
    return jnp.zeros_like(rank).at[order].set(rank), counts[:keys]


def _ragged_move(
    leaf: Shaped[Array, "n ..."], send: Int32[Array, " s"], receive: Int32[Array, " s"], axes, room
) -> Shaped[Array, "n ..."]:
    """Send the first send[i] rows of block i to shard i; ``room`` rows a block on both sides."""
    starts = jnp.arange(send.size, dtype=jnp.int32) * room
    at = jnp.full_like(starts, lax.axis_index(axes) * room)
    empty = jnp.zeros_like(leaf)
    return lax.ragged_all_to_all(leaf, empty, starts, send, at, receive, axis_name=axes)
