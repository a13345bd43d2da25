"""What goes into and comes out of a step, and the static choices of its program."""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from deepinfer_jax.model import rows as row_lists
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.runtime import drafting
from deepinfer_jax.runtime.sampling_state import RowParams
from deepinfer_jax.runtime.state import State
from deepinfer_jax.spec import Leaf
from deepinfer_jax.structured import Pool


class Options(NamedTuple):
    """Static choices of a program: draft tokens a slot (0: no speculation), acceptance by
    "rejection" instead of "coupled", alternatives reported a token, captured names."""

    block: int = 0
    rejection: bool = False
    top: int = 0
    capture: tuple[str, ...] = ()


@flax.struct.dataclass
class PrefillInput:
    """Chunks of n sequences.

    token int32 [n, width]; slot (-1: unused), start, count, total (prompt length) int32 [n]; last
    bool [n]: the chunk ends the prompt; output_from int32 [n]: position from which tokens count as
    output (a request computed again); following int32 [n, width]: the token after each place (-1:
    unknown), read for prompt log-probabilities; pages int32 [n, P]; forced int32 [n]: the first
    output token (-1: sampled); params, limit: one entry a slot.
    """

    token: Leaf
    slot: Leaf
    start: Leaf
    count: Leaf
    total: Leaf
    last: Leaf
    output_from: Leaf
    following: Leaf
    pages: Leaf
    forced: Leaf
    params: RowParams
    limit: Leaf


@flax.struct.dataclass
class DecodeInput:
    """A turn of each group.

    slot int32 [groups] (-1: unused); pages int32 [groups, P]; room int32 [groups]: most drafts to
    verify; budget int32: draft rows in all; forced int32 [slots, context]: output tokens by
    position (-1: sampled), or None; params, limit: one entry a slot.
    """

    slot: Leaf
    pages: Leaf
    room: Leaf
    budget: Leaf
    forced: Leaf
    params: RowParams
    limit: Leaf


@flax.struct.dataclass
class StepOutput:
    """Per group of the step, places along the second axis.

    tokens int32 [g, w], count int32 [g] valid ones; failed bool [g]: no valid distribution;
    logprob f32 [g, w], top_ids, top_logprobs [g, w, top]; verified int32 [g]: draft rows fed;
    confidence f32 [g, block]: of the drafts that were judged; prompt: log-probabilities of
    `following`, [g, width] and twice [g, width, top], or None; captured: name -> layer ->
    [g, w, ...].
    """

    tokens: Leaf
    count: Leaf
    failed: Leaf
    logprob: Leaf
    top_ids: Leaf
    top_logprobs: Leaf
    verified: Leaf
    confidence: Leaf
    prompt: Leaf
    captured: dict[str, dict[int, Leaf]]


def draft_next(
    setup: Setup,
    options: Options,
    weights: Weights,
    state: State,
    pool: Pool,
    params: RowParams,
    limit: Int32[Array, " slots"],
    place: Int32[Array, " groups"],
    anchor: Int32[Array, " groups"],
    position: Int32[Array, " groups"],
) -> State:
    """The state with the next block of the slots in `place` (-1: none)."""
    slot = jnp.maximum(place, 0)
    block = drafting.draft(
        setup,
        weights,
        state.cache,
        pool,
        anchor=anchor,
        position=position,
        slot=slot,
        active=place >= 0,
        params=params.take(slot),
        tables=state.tables,
        grammar=jax.tree.map(lambda leaf: leaf[slot], state.grammar),
        limit=limit[slot],
        block=options.block,
        rejection=options.rejection,
    )
    kept = state.draft_weights
    return dataclasses.replace(
        state,
        drafts=put(state.drafts, place, block.drafts),
        confidence=put(state.confidence, place, block.confidence),
        draft_weights=kept if block.weights is None else put(kept, place, block.weights),
    )


def captured(recorder: Capture, rows: Rows) -> dict[str, dict[int, Any]]:
    return jax.tree.map(lambda leaf: row_lists.to_rectangle(rows, leaf), recorder.found)


def put(store: Array, place: Int32[Array, " groups"], value: Array) -> Array:
    """store[place] = value; a place of -1 writes nothing."""
    return store.at[jnp.where(place < 0, store.shape[0], place)].set(value, mode="drop")


def put_tree(store: Any, place: Int32[Array, " groups"], value: Any) -> Any:
    return jax.tree.map(lambda old, new: put(old, place, new), store, value)
