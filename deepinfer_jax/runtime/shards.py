"""An engine's programs on the devices of a layout: one program a device, its own slots and pages.

The state is cut along its leading axes: shard i of the mesh axes of "slots" has the i-th run of
slots and the i-th run of pages, whole; shards of other axes (tensor, context, experts that rows do
not cross) hold equal copies and make equal choices from them. The groups of a step stand in as many
equal runs, a request's group in the run of its slot's shard, so a cache is read and written where
it lies and only the model's own collectives (`model/parallel.py`) cross devices. Slot and page
numbers are global on the host and counted from the shard's first one inside.

Moving a request (`admit`, `put`, `take`) is a program on every shard too; only the owner's counts.
On one device everything here is the identity.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.layout import Layout
from deepinfer_jax.model import parallel, transformer
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.runtime import packing, prefill, step
from deepinfer_jax.runtime import state as states
from deepinfer_jax.runtime.packing import Packed
from deepinfer_jax.runtime.sampling_state import RowParams
from deepinfer_jax.runtime.state import State
from deepinfer_jax.runtime.step_types import DecodeInput, Options, PrefillInput, Results, StepOutput
from deepinfer_jax.structured import GrammarState, Pool

WHOLE = PartitionSpec()


def check(layout: Layout, cfg: ModelConfig, widths: tuple[int, ...]) -> None:
    """Raises ValueError for a layout that the engine's programs cannot follow.

    widths: of the prefill rectangles, which context parallelism cuts.
    """
    for phase in ("prefill", "decode"):
        parallel.check(layout, cfg, phase)
    parallel.specs(parallel.placed(transformer.abstract(cfg), layout), layout)
    rows = layout.mesh_axes("rows", "prefill")
    slots = layout.mesh_axes("slots")
    pieces = 2 * layout.ways("rows", "prefill") // layout.ways("slots")
    if rows != slots and any(width % pieces for width in widths):
        raise ValueError(
            f"layout {layout.name!r}: prefill widths {widths} must be multiples of {pieces}, "
            f"two pieces for each shard of {rows[len(slots) :]}"
        )


def own(layout: Layout) -> PartitionSpec:
    """How everything with a leading axis of slots, groups or pages is cut."""
    axes = layout.mesh_axes("slots")
    return PartitionSpec(axes) if axes else WHOLE


def home(layout: Layout, like: jax.Array) -> jax.sharding.Sharding:
    """Where such an array lies, on the devices of ``like``."""
    if isinstance(like.sharding, NamedSharding):
        return NamedSharding(like.sharding.mesh, own(layout))
    return like.sharding


@functools.lru_cache(maxsize=8)
def _maker(lie: jax.sharding.Sharding, arguments: tuple[Any, ...], rejection: bool) -> Any:
    cfg, numerics, slots, pages, block = arguments

    def make() -> State:
        return states.empty(
            cfg, numerics, slots=slots, pages=pages, block=block, rejection=rejection
        )

    return jax.jit(make, out_shardings=lie)


def empty(setup: Setup, options: Options, like: jax.Array, *, slots: int, pages: int) -> State:
    """The state of free slots, each shard's part made where it lies."""
    arguments = (setup.cfg, setup.numerics, slots, pages, options.block)
    return _maker(home(setup.layout, like), arguments, options.rejection)()


def prefill_chunk(
    setup: Setup,
    options: Options,
    tail: int,
    score: bool,
    everywhere: bool,
    weights: Weights,
    state: State,
    pool: Pool,
    inputs: Packed,
) -> tuple[State, Results]:
    """`prefill.prefill_chunk` over the shards; everywhere: the output is whole on every device.

    inputs: a `PrefillInput`."""

    def local(weights: Weights, state: State, pool: Pool, inputs: PrefillInput) -> Any:
        return prefill.prefill_chunk(setup, options, tail, score, weights, state, pool, inputs)

    return _over_shards(setup, local, everywhere, weights, state, pool, inputs)


def decode_step(
    setup: Setup,
    options: Options,
    size: int,
    everywhere: bool,
    weights: Weights,
    state: State,
    pool: Pool,
    inputs: Packed,
) -> tuple[State, Results]:
    """`step.decode_step` over the shards; size: rows of all of them together.

    inputs: a `DecodeInput`."""
    rows = size // setup.layout.ways("slots")

    def local(weights: Weights, state: State, pool: Pool, inputs: DecodeInput) -> Any:
        return step.decode_step(setup, options, rows, weights, state, pool, inputs)

    return _over_shards(setup, local, everywhere, weights, state, pool, inputs)


def admit(
    layout: Layout,
    state: State,
    slot: Int32[Array, " n"],
    params: RowParams,
    limit: Int32[Array, " n"],
    bias: Float[Array, "n vocab"],
    stop: Bool[Array, "n vocab"],
    seen: Bool[Array, "n vocab"],
    grammar: GrammarState,
) -> State:
    """See `state.admit`; slot: -1 admits nobody."""

    def local(state: State, slot: Array, *row: Any) -> State:
        return states.admit(state, _drop(layout, slot, _slots(state)), *row)

    cut = own(layout)
    given = slot, params, limit, bias, stop, seen, grammar
    specs = (cut, *[WHOLE] * len(given))
    return parallel.spmd(layout, local, specs, cut)(state, *given)


def put(
    layout: Layout, state: State, slot: Int32[Array, ""], pages: Int32[Array, " held"], saved: Any
) -> State:
    """See `state.put`."""

    def local(state: State, slot: Array, pages: Array, saved: Any) -> State:
        here = _here(layout, pages, _pages(state))
        return states.put(state, _drop(layout, slot, _slots(state)), here, saved)

    cut = own(layout)
    specs = (cut, WHOLE, WHOLE, WHOLE)
    return parallel.spmd(layout, local, specs, cut)(state, slot, pages, saved)


def take(layout: Layout, state: State, slot: Int32[Array, ""], pages: Int32[Array, " held"]) -> Any:
    """See `state.take`; the owner's share on every device."""

    def local(state: State, slot: Array, pages: Array) -> Any:
        place, here = _here(layout, slot, _slots(state)), _here(layout, pages, _pages(state))
        rows, held = states.take(state, jnp.maximum(place, 0), here)
        return _from_owner(layout, rows, place >= 0), _from_owner(layout, held, place >= 0)

    return parallel.spmd(layout, local, (own(layout), WHOLE, WHOLE), WHOLE)(state, slot, pages)


def grammar_of(layout: Layout, state: State, slot: Int32[Array, ""]) -> GrammarState:
    """See `state.grammar_of`; the owner's on every device."""
    return _of_slot(layout, state, slot, states.grammar_of)


def take_rings(layout: Layout, state: State, slot: Int32[Array, ""]) -> Any:
    """See `state.take_rings`; the owner's on every device."""
    return _of_slot(layout, state, slot, states.take_rings)


def put_rings(layout: Layout, state: State, slot: Int32[Array, ""], rings: Any) -> State:
    """See `state.put_rings`."""

    def local(state: State, slot: Array, rings: Any) -> State:
        return states.put_rings(state, _drop(layout, slot, _slots(state)), rings)

    cut = own(layout)
    return parallel.spmd(layout, local, (cut, WHOLE, WHOLE), cut)(state, slot, rings)


def take_pages(layout: Layout, state: State, pages: Int32[Array, " n"]) -> list[Any]:
    """See `state.take_pages`; each of any shard, on every device."""

    def local(state: State, pages: Array) -> list[Any]:
        here = _here(layout, pages, _pages(state))
        found = states.take_pages(state, here)
        return [_from_owner(layout, page, here[i] >= 0) for i, page in enumerate(found)]

    return parallel.spmd(layout, local, (own(layout), WHOLE), WHOLE)(state, pages)


def put_pages(layout: Layout, state: State, pages: Int32[Array, " n"], content: Any) -> State:
    """See `state.put_pages`."""

    def local(state: State, pages: Array, content: Any) -> State:
        return states.put_pages(state, _here(layout, pages, _pages(state)), content)

    cut = own(layout)
    return parallel.spmd(layout, local, (cut, WHOLE, WHOLE), cut)(state, pages, content)


def _of_slot(layout: Layout, state: State, slot: Array, read: Callable[..., Any]) -> Any:
    """What `read` gives of a slot's place in its owner's share, on every device."""

    def local(state: State, slot: Array) -> Any:
        place = _here(layout, slot, _slots(state))
        return _from_owner(layout, read(state, jnp.maximum(place, 0)), place >= 0)

    return parallel.spmd(layout, local, (own(layout), WHOLE), WHOLE)(state, slot)


def _over_shards(
    setup: Setup,
    local: Callable[..., tuple[State, StepOutput]],
    everywhere: bool,
    weights: Weights,
    state: State,
    pool: Pool,
    inputs: Packed,
) -> tuple[State, Results]:
    layout = setup.layout

    def unpacked(weights: Weights, state: State, pool: Pool, inputs: Packed) -> Any:
        mine = _counted_here(layout, state, packing.unpack(inputs))
        state, output = local(weights, state, pool, mine)
        results = Results(packing.pack(dataclasses.replace(output, captured={})), output.captured)
        return state, _given(layout, results, everywhere)

    if layout.size == 1:
        return unpacked(weights, state, pool, inputs)
    mine = own(layout)
    specs = (transformer.weight_specs(setup, weights), mine, WHOLE, mine)
    outs = (mine, WHOLE if everywhere else mine)
    return parallel.spmd(layout, unpacked, specs, outs)(weights, state, pool, inputs)


def _counted_here(layout: Layout, state: State, inputs: Any) -> Any:
    """Inputs of this shard's groups with slots and pages counted from the shard's first ones."""
    if not layout.mesh_axes("slots"):
        return inputs
    return dataclasses.replace(
        inputs,
        slot=_here(layout, inputs.slot, _slots(state)),
        pages=_here(layout, inputs.pages, _pages(state)),
    )


def _here(layout: Layout, number: Int32[Array, "..."], count: int) -> Int32[Array, "..."]:
    """A global number counted from the first of this shard's ``count``; -1 for another's, and for
    -1."""
    axes = layout.mesh_axes("slots")
    if not axes:
        return number
    here = number - lax.axis_index(axes) * count
    return jnp.where((number >= 0) & (here >= 0) & (here < count), here, -1)


def _drop(layout: Layout, slot: Int32[Array, "..."], count: int) -> Int32[Array, "..."]:
    """A slot of this shard; past the end, where a scatter drops it, if it is another's or -1."""
    here = _here(layout, slot, count)
    return jnp.where(here < 0, count, here)


def _slots(state: State) -> int:
    return state.last.shape[0]


def _pages(state: State) -> int:
    """Pages of this shard; 1 for a model without compressed entries."""
    pools = jax.tree.leaves(state.cache.entries)
    return pools[0].shape[0] if pools else 1


def _from_owner(layout: Layout, tree: Any, mine: Bool[Array, ""]) -> Any:
    """Values of the one shard whose they are, on all of them, to the bit."""
    axes = layout.mesh_axes("slots")
    if not axes:
        return tree

    def leaf(x: Array) -> Array:
        if x.dtype == jnp.bool_:
            return parallel.sum_bits(x[None].astype(jnp.uint8), mine[None], axes)[0] > 0
        return parallel.sum_bits(x[None], mine[None], axes)[0]

    return jax.tree.map(leaf, tree)


def _given(layout: Layout, results: Results, everywhere: bool) -> Results:
    """A step's results, the groups of all shards together if everybody wants them."""
    axes = layout.mesh_axes("slots")
    if not everywhere or not axes:
        return results
    return jax.tree.map(lambda leaf: lax.all_gather(leaf, axes, tiled=True), results)
