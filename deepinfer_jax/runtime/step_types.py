"""What goes into and comes out of a step, and the static choices of its program."""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import context
from deepinfer_jax.model import rows as row_lists
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.runtime import drafting
from deepinfer_jax.runtime.packing import Packed
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

    token int32 [n, width]; slot (-1: unused), start, count int32 [n]; last bool [n]: the chunk ends
    what is to be computed; prompt int32 [n]: length of the prompt, tokens from there on are output
    (a request computed again); begin, own int32 [n]: as of `Rows`; before int32 [n, look-back]: the
    tokens before `start`, oldest first (-1: none), for the n-grams across it; following int32
    [n, width]: the token after each place (-1: unknown), read for prompt log-probabilities; pages
    int32 [n, P]; forced int32 [n]: the next output token (-1: sampled); routes int32 [n, width,
    layers, k]: experts by place (-1: the router's), or None.
    """

    token: Leaf
    slot: Leaf
    start: Leaf
    count: Leaf
    last: Leaf
    prompt: Leaf
    begin: Leaf
    own: Leaf
    before: Leaf
    following: Leaf
    pages: Leaf
    forced: Leaf
    routes: Leaf


@flax.struct.dataclass
class DecodeInput:
    """A turn of each group.

    slot int32 [groups] (-1: unused); pages int32 [groups, P]; room int32 [groups]: most drafts to
    verify; budget int32 [groups]: draft rows of all groups of its shard together; temperature f32
    [groups, block]: divides the confidence of each place, equal for every group. forced int32
    [groups, reach] output tokens (-1: sampled), routes int32 [groups, reach, layers, k] experts
    (-1: the router's) or None, both for the positions from `known` on: int32 [groups], the least
    position that the newest token of a group with any of them can have.
    """

    slot: Leaf
    pages: Leaf
    room: Leaf
    budget: Leaf
    temperature: Leaf
    known: Leaf
    forced: Leaf
    routes: Leaf


def reach(block: int) -> int:
    """Positions that `DecodeInput.forced` covers: where the newest token can be after a step that
    the host has not read, its drafts, and the token after them."""
    return 2 * (1 + block) + 1


def look_back(cfg: ModelConfig) -> int:
    """Tokens before a row that its n-grams contain."""
    return cfg.engram_max_ngram_size - 1 if cfg.engram_layer_ids else 0


@flax.struct.dataclass
class StepOutput:
    """Per group of the step, places along the second axis.

    tokens int32 [g, w], count int32 [g] valid ones; failed bool [g]: no valid distribution;
    logprob f32 [g, w], top_ids, top_logprobs [g, w, top]; verified int32 [g]: draft rows fed;
    judged, stood int32 [g]: as of `verify.Verified`; confidence, ahead f32 [g, block]: of the block
    that was verified, of the one made for the next step; prompt: log-probabilities of `following`,
    [g, width] and twice [g, width, top], or None;
    captured: name -> layer -> [g, w, ...].
    """

    tokens: Leaf
    count: Leaf
    failed: Leaf
    logprob: Leaf
    top_ids: Leaf
    top_logprobs: Leaf
    verified: Leaf
    judged: Leaf
    stood: Leaf
    confidence: Leaf
    ahead: Leaf
    prompt: Leaf
    captured: dict[str, dict[int, Leaf]]


class Results(NamedTuple):
    """What a step's program gives: packed, a `StepOutput` without captures, and those."""

    packed: Packed
    captured: dict[str, dict[int, Leaf]]


def draft_next(
    setup: Setup,
    options: Options,
    weights: Weights,
    state: State,
    pool: Pool,
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
        params=state.params.take(slot),
        tables=state.tables,
        grammar=jax.tree.map(lambda leaf: leaf[slot], state.grammar),
        limit=state.limit[slot],
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


def captured(recorder: Capture, rows: Rows, *, kept: Rows | None = None, border: int = 0) -> Any:
    """name -> layer -> [groups, width, ...]. kept: the rows of the layers from `border` on, if they
    are others (bounded replay); `ROW_NAMES` has what is recorded a row."""

    def wide(layer: int, leaf: Array) -> Array:
        there = rows if kept is None or layer < border else kept
        return row_lists.to_rectangle(there.everyone, context.together(there, leaf))

    return {
        name: {layer: wide(layer, leaf) for layer, leaf in layers.items()}
        for name, layers in recorder.found.items()
    }


def put(store: Array, place: Int32[Array, " groups"], value: Array) -> Array:
    """store[place] = value; a place of -1 writes nothing."""
    return store.at[jnp.where(place < 0, store.shape[0], place)].set(value, mode="drop")


def put_tree(store: Any, place: Int32[Array, " groups"], value: Any) -> Any:
    return jax.tree.map(lambda old, new: put(old, place, new), store, value)
