"""Expert balance of a running engine: counts recorded step by step, experts moved between slots.

    with experts.recorded(llm) as counts:          # forward results are the same
        llm.generate(prompts)
    experts.rebalance(llm, counts.traces())        # nothing compiles for the next generate

A layout with ``spare_experts`` holds each backbone layer's experts in more slots than there are
experts; `eplb.py` decides from a trace which slots hold what. Moving weights and exchanging the
index table (`dispatch.Placement`) are data, so the compiled steps stay; which slot computes a
token's expert changes no value. Only requests that have ended may be rebalanced under.
"""

import contextlib
import dataclasses
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from deepinfer_jax.layout import Layout
from deepinfer_jax.model import parallel, transformer
from deepinfer_jax.model.compile import jit
from deepinfer_jax.model.dispatch import Placement
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.runtime import cluster, eplb, groups
from deepinfer_jax.runtime.eplb import Assignment


class Counts:
    """Tokens routed to each expert, by layer and step."""

    def __init__(self, experts: int):
        self._experts = experts
        self._steps: dict[int, list[Int[np.ndarray, " experts"]]] = {}

    def add(self, routes: Mapping[int, np.ndarray], used: Iterable[tuple[int, int]]) -> None:
        """A step. routes: layer -> int32 [groups, width, k]; used: (group, its rows) that count."""
        used = list(used)
        for layer, chosen in routes.items():
            ids = [chosen[group, :rows].reshape(-1) for group, rows in used]
            step = np.bincount(np.concatenate(ids), minlength=self._experts)
            self._steps.setdefault(layer, []).append(step)

    def traces(self) -> dict[int, Int[np.ndarray, "steps experts"]]:
        """Layer -> counts of every step."""
        return {layer: np.stack(steps) for layer, steps in self._steps.items()}

    def save(self, path: str | Path) -> None:
        """An npz file with one array a layer; `load` reads it."""
        arrays: dict[str, Any] = {f"layer_{layer}": x for layer, x in self.traces().items()}
        np.savez_compressed(path, **arrays)


def load(path: str | Path) -> dict[int, Int[np.ndarray, "steps experts"]]:
    """Traces that `Counts.save` wrote. Raises ValueError for another file."""
    with open(path, "rb") as raw:
        if not zipfile.is_zipfile(raw):
            raise ValueError(f"{path}: not an npz file; expected one of Counts.save")
    try:
        with np.load(path) as file:
            found = {name: file[name] for name in file.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a file of recorded experts ({error})") from None
    if not found or not all(re.fullmatch("layer_[0-9]+", name) for name in found):
        raise ValueError(f"{path}: expected arrays layer_N, found {', '.join(found) or 'none'}")
    for name, counts in found.items():
        if counts.ndim != 2 or not np.issubdtype(counts.dtype, np.integer):
            raise ValueError(
                f"{path}: {name}: {counts.dtype}{list(counts.shape)}; expected integers "
                "[steps, experts]"
            )
    return {int(name.removeprefix("layer_")): counts for name, counts in found.items()}


@contextlib.contextmanager
def recorded(llm: Any) -> Iterator[Counts]:
    """Counts what the requests inside are routed to; the engine's steps also give their routes."""
    loop = llm._loop
    before, loop.counts = loop.counts, Counts(llm.model.cfg.n_routed_experts)
    try:
        yield loop.counts
    finally:
        loop.counts = before


def rebalance(
    llm: Any, traces: Mapping[int, np.ndarray], policy: str = "sum_of_max"
) -> dict[int, Assignment]:
    """Replicas and placement of every layer that has a trace; what was chosen.

    A prefill group of the same layout follows, one of another layout keeps its placement. The
    engine's old arrays are given up, also where a `Model` that it was made from has them. Under
    several processes the first one's traces count. Raises ValueError while requests are in flight,
    without spare experts, or for a layer that is none.
    """
    layout, cfg = llm.model.setup.layout, llm.model.cfg
    if len(llm._loop):
        raise ValueError("rebalance: requests are in flight")
    if not layout.spare_experts:
        raise ValueError(f"layout {layout.name!r}: rebalance needs spare_experts > 0")
    if wrong := sorted(set(traces) - set(range(cfg.num_hidden_layers))):
        raise ValueError(f"rebalance: layer {wrong[0]}; expected 0..{cfg.num_hidden_layers - 1}")

    def choose() -> list[tuple[int, list[int]]]:
        shards, spare = layout.ways("expert"), layout.spare_experts
        found = {
            layer: eplb.balance(trace, shards, spare, policy) for layer, trace in traces.items()
        }
        return [(layer, one.physical.tolist()) for layer, one in found.items()]

    chosen = {
        layer: Assignment(np.array(physical, np.int32), cfg.n_routed_experts, layout.ways("expert"))
        for layer, physical in cluster.from_first(choose)
    }
    alike: dict[Any, list[Any]] = {}  # loops on the same devices have the same arrays
    for programs in [loop.programs for loop in llm._every if loop.programs.setup.layout == layout]:
        alike.setdefault(_buffers(programs.weights), []).append(programs)
    for several in alike.values():
        weights = placed(llm.model.setup, several[0].weights, chosen)
        for programs in several:
            programs.weights = weights
    llm.model = dataclasses.replace(llm.model, weights=llm._loops[0].programs.weights)
    return chosen


def first(weights: Weights, setup: Setup) -> Weights:
    """Freshly read weights with the placement that reading gave them (`eplb` policy "none")."""
    if not setup.layout.spare_experts:
        return weights
    start = _start(setup.layout, setup.cfg.n_routed_experts)
    table = _table(start, setup.layout, weights)
    layers = tuple(_with(layer, table) for layer in weights.layers)
    return dataclasses.replace(weights, layers=layers)


def placed(setup: Setup, weights: Weights, chosen: Mapping[int, Assignment]) -> Weights:
    """The weights with some layers' experts moved; the old arrays of those are given up."""
    layers, specs = list(weights.layers), transformer.weight_specs(setup, weights).layers
    for layer, after in chosen.items():
        ffn = layers[layer].ffn
        source = after.sources(_held(ffn.placement, after.shards))
        stacks = (ffn.w13, ffn.w2)
        leaves, structure = jax.tree.flatten((specs[layer].ffn.w13, specs[layer].ffn.w2))
        w13, w2 = _move(setup.layout, (tuple(leaves), structure), stacks, source)
        ffn = dataclasses.replace(ffn, w13=w13, w2=w2)
        block = dataclasses.replace(layers[layer], ffn=ffn)
        layers[layer] = _with(block, _table(after, setup.layout, weights))
    return dataclasses.replace(weights, layers=tuple(layers))


def _exchange(
    layout: Layout, cut: tuple[Any, Any], stacks: Any, source: Int32[Array, " slots"]
) -> Any:
    """Every slot's new expert from the slot ``source`` that has it; cut: the stacks' PartitionSpecs
    as (leaves, structure)."""
    axes = layout.mesh_axes("expert")
    specs = jax.tree.unflatten(cut[1], cut[0])

    def local(stacks: Any, source: Int32[Array, " mine"]) -> Any:
        if not axes:
            return jax.tree.map(lambda leaf: leaf[source], stacks)
        here = source.size
        return parallel.remote(
            lambda item: jnp.remainder(source, here)[item],
            source // here,
            lambda item, _: jax.tree.map(lambda leaf: leaf[item], stacks),
            layout=layout,
            axes=axes,
            every=axes,
            capacity=parallel.capacity(here, layout.ways("expert"), layout),
        )

    own = layout.spec(("expert",), source.shape, "expert slots")
    return parallel.spmd(layout, local, (specs, own), specs)(stacks, source)


_move = jit(_exchange, static_argnums=(0, 1), donate_argnums=2)


def _buffers(weights: Weights) -> tuple[int, ...]:
    """Where the first layer's experts lie. Arrays of one buffer need not be one object."""
    leaf = jax.tree.leaves(weights.layers[0].ffn.w2)[0]
    return tuple(shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards)


def _start(layout: Layout, experts: int) -> Assignment:
    counts = np.ones((1, experts))
    return eplb.balance(counts, layout.ways("expert"), layout.spare_experts, "none")


def _held(placement: Placement, shards: int) -> Assignment:
    """What a table says that the slots hold."""
    slots, count = jax.device_get((placement.slots, placement.count))
    physical = np.zeros(int(count.sum()), np.int32)
    for expert, used in enumerate(count):
        physical[slots[expert, :used]] = expert
    return Assignment(physical, len(count), shards)


def _table(chosen: Assignment, layout: Layout, weights: Weights) -> Placement:
    """As wide as the spare slots allow, so that every placement has one shape."""
    slots, count = chosen.tables(width=1 + layout.spare_experts)
    home = groups.whole(weights.norm)
    return Placement(jax.device_put(slots, home), jax.device_put(count, home))


def _with(block: Any, table: Placement) -> Any:
    return dataclasses.replace(block, ffn=dataclasses.replace(block.ffn, placement=table))
