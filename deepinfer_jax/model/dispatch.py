"""Rows to experts and back: the routed half of a MoE layer, inside the per-device program.

    y[r] = sum over slots j (in order, f32) of expert[index[r, j]](x[r], weight[r, j])

On one device the (row, slot) pairs are sorted by expert, one grouped product runs over them, and
each row sums its slots. With experts sharded over mesh axes X and rows over R:

- ``gather``: rows are all-gathered over the axes X and R share; each shard runs its experts over
  all of them. Slots are summed before the reduce-scatter (or, ``exact``, after one of k times the
  size that adds zeros only, so that the sum keeps the slot order and the bits of one device).
- ``alltoall``: each pair travels to its expert's shard and its output travels back, in rounds
  (``parallel.remote``); rows that several shards hold are first divided among them. Bits are those
  of one device.
- ``ragged``: the same rounds through ``lax.ragged_all_to_all``, which moves only the pairs there
  are (GPU and TPU; XLA:CPU does not implement it).

Experts split over ``ffn`` give partial sums, added in f32. Replicated experts (EPLB) are an index
table, ``Placement``. A negative index is an unused slot.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from deepinfer_jax.layout import Layout
from deepinfer_jax.model import parallel
from pallas_kernels import grouping

Mlp = Callable[..., Array]
"""(x [tok, d], source [n], group_sizes [e], weight [n]) -> [n, d]: rows x[source], by expert."""
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
    experts: int,
    mlp: Mlp,
    *,
    layout: Layout,
    phase: str | None = None,
    exact: bool = False,
    wire: Wire | None = None,
    implementation: str = "auto",
) -> Float[Array, "tok d"]:
    """Sum of the routed experts of every local row, f32.

    x: [tok, d] rows of this shard; index: global expert (physical slot) of each slot, or -1;
    weight f32; experts: how many experts this shard holds; mlp: runs them over sorted rows, rows
    past the sum of group_sizes give zero. wire: encode and decode for the rows' way to the experts
    (fp8 values and scales); decoded rows must give the same ``mlp`` bits. exact: see the module.
    implementation: of pallas_kernels.grouping.
    """
    expert_axes, ffn_axes = layout.mesh_axes("expert"), layout.mesh_axes("ffn")
    row_axes = layout.mesh_axes("rows", phase)
    encode, decode = wire or (lambda rows: rows, lambda rows: rows)
    grouped = functools.partial(_grouped, experts=experts, mlp=mlp, implementation=implementation)

    if layout.moe_dispatch != "gather" and expert_axes:

        def exchange(local: tuple[Array, Array, Array]) -> Array:
            return _exchange(*local, experts, grouped, layout, row_axes, (encode, decode))

        return parallel.spread((x, index, weight), row_axes, expert_axes, layout, exchange, -1)

    shared = tuple(axis for axis in expert_axes if axis in row_axes)
    if shared:

        def gather(leaf: Array) -> Array:
            return lax.all_gather(leaf, shared, tiled=True)

        x, index, weight = decode(jax.tree.map(gather, encode(x))), gather(index), gather(weight)
    first = lax.axis_index(expert_axes) * experts if expert_axes else 0
    tok, k = index.shape
    flat = index.reshape(-1)
    mine = (flat >= first) & (flat < first + experts)
    y = grouped(x, k, flat - first, mine, weight.reshape(-1))
    y = y.reshape(tok, k, -1)
    if ffn_axes:
        y = y.astype(jnp.float32)
    out = y if exact else _sum_slots(y)
    if shared:
        out = lax.psum_scatter(out, shared, tiled=True)
    if rest := tuple(axis for axis in expert_axes if axis not in shared) + ffn_axes:
        out = lax.psum(out, rest)
    return _sum_slots(out) if exact else out


def _exchange(
    x: Float[Array, "tok d"],
    index: Int32[Array, "tok k"],
    weight: Float[Array, "tok k"],
    experts: int,
    grouped: Callable[..., Array],
    layout: Layout,
    row_axes: tuple[str, ...],
    wire: Wire,
) -> Float[Array, "tok d"]:
    encode, decode = wire
    axes, ffn_axes = layout.mesh_axes("expert"), layout.mesh_axes("ffn")
    shards, k = layout.ways("expert"), index.shape[1]
    flat, scale = index.reshape(-1), weight.reshape(-1)
    travelling = encode(x)

    def pick(pair: Int32[Array, " m"]) -> Any:
        rows = jax.tree.map(lambda leaf: leaf[pair // k], travelling)
        return rows, jnp.remainder(flat[pair], experts), scale[pair]

    def run(items: Any, present: Bool[Array, " m"]) -> Float[Array, "m d"]:
        rows, expert, scale = items
        y = grouped(decode(rows), 1, expert, present, scale)
        return lax.psum(y.astype(jnp.float32), ffn_axes) if ffn_axes else y

    y = parallel.remote(
        pick,
        jnp.where(flat < 0, shards, flat // experts),
        run,
        layout=layout,
        axes=axes,
        every=parallel.joined(row_axes, axes),
        capacity=parallel.capacity(flat.size, shards, layout),
    )
    return _sum_slots(y.reshape(*index.shape, -1))


def _sum_slots(y: Float[Array, "tok k d"]) -> Float[Array, "tok d"]:
    out = y[:, 0].astype(jnp.float32)
    for slot in range(1, y.shape[1]):
        out = out + y[:, slot].astype(jnp.float32)
    return out


def _grouped(
    x: Float[Array, "tok d"],
    per_row: int,
    expert: Int32[Array, " n"],
    mine: Bool[Array, " n"],
    weight: Float[Array, " n"],
    *,
    experts: int,
    mlp: Mlp,
    implementation: str,
) -> Float[Array, "n d"]:
    """Each row of x through the experts of its `per_row` pairs, zero where not ``mine``: sort, run,
    unsort."""
    key = jnp.where(mine, expert, experts)
    order, row, place, sizes = grouping.group(
        key, experts=experts, per_row=per_row, implementation=implementation
    )

    def take(leaf: Array, index: Array) -> Array:
        return leaf.at[index].get(mode="promise_in_bounds")

    y = mlp(x, row, sizes, take(weight, order))
    return take(y, place)
