"""What the device remembers between steps, and how one request's share of it is moved.

`State` is donated to every step and handed back. Its leaves have a leading axis of slots, except
the compressed caches, which have pages. A preempted request is one slot's row of every leaf and its
pages: `take` copies that out, `put` writes it back, to another slot and other pages if need be; the
bits are the same. `step.py` has the programs that advance a state.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.model import cache as caches
from deepinfer_jax.model.cache import Cache
from deepinfer_jax.runtime import sampling_state
from deepinfer_jax.runtime.sampling_state import RowParams, Tables
from deepinfer_jax.spec import Leaf
from deepinfer_jax.structured.device import GrammarState, free

GRAMMAR_LEVELS = 32  # open calls of a nested grammar
FOREVER = np.iinfo(np.int32).max // 2  # a limit that no measured step comes near


@flax.struct.dataclass
class State:
    """One entry a slot.

    limit: int32, tokens that the request may have in all. last: int32, the newest token, not yet
    fed; length: int32, tokens fed (the position of `last`). done: bool, the request ended on the
    device. drafts int32, confidence f32 [slots, block]: the block drafted after `last`;
    draft_weights: its log-weights f32 [slots, block, vocab], kept for rejection sampling only.
    grammar: where each slot is in its grammar.
    """

    cache: Cache
    tables: Tables
    params: RowParams
    limit: Leaf
    last: Leaf
    length: Leaf
    done: Leaf
    drafts: Leaf
    confidence: Leaf
    draft_weights: Leaf
    grammar: GrammarState


def empty(
    cfg: ModelConfig,
    numerics: Numerics,
    *,
    slots: int,
    pages: int,
    block: int,
    rejection: bool,
) -> State:
    """The state of free slots; block: draft tokens a slot."""
    weights = jnp.zeros((slots, block, cfg.vocab_size), jnp.float32) if rejection else None
    return State(
        cache=caches.empty(cfg, numerics, slots=slots, pages=pages),
        tables=sampling_state.empty_tables(slots, cfg.vocab_size),
        params=jax.tree.map(jnp.asarray, sampling_state.neutral(slots)),
        limit=jnp.zeros((slots,), jnp.int32),
        last=jnp.zeros((slots,), jnp.int32),
        length=jnp.zeros((slots,), jnp.int32),
        done=jnp.ones((slots,), jnp.bool_),
        drafts=jnp.zeros((slots, block), jnp.int32),
        confidence=jnp.zeros((slots, block), jnp.float32),
        draft_weights=weights,
        grammar=free((slots,), levels=GRAMMAR_LEVELS),
    )


def admit(
    state: State,
    slot: Int32[Array, " n"],
    params: RowParams,
    limit: Int32[Array, " n"],
    bias: Float[Array, "n vocab"],
    stop: Bool[Array, "n vocab"],
    seen: Bool[Array, "n vocab"],
    grammar: GrammarState,
) -> State:
    """New requests in slots (past the end: nothing): options, most tokens, bias, stop ids, ids of
    the prompt that is not computed, and grammar (leading axis n)."""
    numbers = jax.tree.map(
        lambda old, new: old.at[slot].set(new, mode="drop"),
        (state.params, state.limit, state.grammar),
        (params, limit, grammar),
    )
    return dataclasses.replace(
        state,
        tables=sampling_state.install(state.tables, slot, bias, stop, seen),
        params=numbers[0],
        limit=numbers[1],
        length=state.length.at[slot].set(0, mode="drop"),
        done=state.done.at[slot].set(False, mode="drop"),
        grammar=numbers[2],
    )


def take(state: State, slot: Int32[Array, ""], pages: Int32[Array, " held"]) -> Any:
    """A slot's share of the state; pages: its page numbers, -1 where it has no more."""
    by_slot, by_page = _split(state)
    held = jnp.maximum(pages, 0)
    return (
        jax.tree.map(lambda leaf: leaf[slot], by_slot),
        jax.tree.map(lambda leaf: leaf[held], by_page),
    )


def share_like(state: State, held: int) -> Any:
    """A slot's share with so many pages, as shapes."""
    slot, pages = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (held,)))
    return jax.eval_shape(take, state, slot, pages)


def cached_like(state: State) -> Any:
    """(content of a page, rings of a slot), as shapes."""
    slot, pages = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (1,)))
    content = jax.eval_shape(take_pages, state, pages)[0]
    return content, jax.eval_shape(take_rings, state, slot)


def grammar_of(state: State, slot: Int32[Array, ""]) -> GrammarState:
    """Where a slot is in its grammar."""
    return jax.tree.map(lambda leaf: leaf[slot], state.grammar)


def put(state: State, slot: Int32[Array, ""], pages: Int32[Array, " held"], saved: Any) -> State:
    """The state with a share written to a slot and to pages (-1: nothing)."""
    by_slot, by_page = _split(state)
    slots = jax.tree.map(lambda leaf, row: leaf.at[slot].set(row), by_slot, saved[0])
    entries, keys = _write_pages(by_page, pages, saved[1])
    return dataclasses.replace(
        slots, cache=dataclasses.replace(slots.cache, entries=entries, keys=keys)
    )


def moved(saved: Any, row: int, limit: int) -> Any:
    """A share as another engine goes on with it: its grammar at another place of the pool, another
    limit."""
    rows, pages = saved
    grammar = dataclasses.replace(rows.grammar, grammar=np.int32(row))
    return dataclasses.replace(rows, grammar=grammar, limit=np.int32(limit)), pages


def take_rings(state: State, slot: Int32[Array, ""]) -> Any:
    """What a slot remembers of a prompt besides its pages."""
    return jax.tree.map(lambda leaf: leaf[slot], _split(state)[0].cache)


def put_rings(state: State, slot: Int32[Array, ""], rings: Any) -> State:
    """The state with rings written to a slot."""
    by_slot, (entries, keys) = _split(state)
    cache = jax.tree.map(lambda leaf, row: leaf.at[slot].set(row), by_slot.cache, rings)
    return dataclasses.replace(state, cache=dataclasses.replace(cache, entries=entries, keys=keys))


def take_pages(state: State, pages: Int32[Array, " n"]) -> list[Any]:
    """The content of each page; -1 gives some page."""
    by_page = _split(state)[1]
    held = jnp.maximum(pages, 0)
    return [jax.tree.map(lambda leaf, i=i: leaf[held[i]], by_page) for i in range(len(pages))]


def put_pages(state: State, pages: Int32[Array, " n"], content: Any) -> State:
    """The state with pages written; -1: nothing."""
    entries, keys = _write_pages(_split(state)[1], pages, content)
    cache = dataclasses.replace(state.cache, entries=entries, keys=keys)
    return dataclasses.replace(state, cache=cache)


def _write_pages(by_page: Any, pages: Int32[Array, " n"], content: Any) -> Any:
    def leaf(old: Array, rows: Array) -> Array:
        place = jnp.where(pages < 0, old.shape[0], pages)
        return old.at[place].set(rows, mode="drop")

    return jax.tree.map(leaf, by_page, content)


def _split(state: State) -> tuple[State, tuple[Any, Any]]:
    """Leaves by slot, and leaves by page."""
    rest = dataclasses.replace(state.cache, entries=(), keys=())
    return dataclasses.replace(state, cache=rest), (state.cache.entries, state.cache.keys)
