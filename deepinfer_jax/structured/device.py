"""The mask and the next state of grammars, on the device: pure functions of fixed-shape tables.

    allowed[row, class] = need after the class <= max(remaining - 1, need now - 1)
    mask[row, token]    = allowed[row, class of token]
    state after token   = outcomes[state][pattern[state][class of token]]

``need`` is the least number of tokens that still completes the text, EOS included (`stack`), so one
comparison does three things: it forbids what the grammar forbids (need is infinite), it keeps the
end within reach of the tokens that remain, and EOS passes exactly where the text may end. With too
few tokens left it follows a shortest completion. Everything a row needs is a few gathers; there is
no loop over bytes and none over the vocabulary but the last gather.

A grammar is a range of one int32 arena and a row of token classes; ``header`` says where its parts
start. A new grammar overwrites cells, so nothing compiles when one arrives. States are local to
their grammar: a sequence can move to another pool or slot. Rolling back is keeping an older state.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, Int32

from deepinfer_jax.structured.pushdown import DEAD, DONE, MAX_POP, START
from deepinfer_jax.structured.stack import MAX_PUSH
from deepinfer_jax.structured.tokens import BIAS

FREE = -1  # grammar of a row that is not constrained
MAX_TRIGGER = 16  # token ids of a trigger
# Fields of a header: offsets into the arena, then sizes.
BASE, STATES, EDGES, EXITS, RETURNS, RETURN_COUNT, TRIGGER, TRIGGER_LENGTH = range(8)
HEADER = 8
STATE = 3  # a state: its pattern, its outcomes (both from the start of the block), its cost
EDGE = 2 + MAX_PUSH  # an edge: next state (-1: exit), cost, return symbols
HEIGHT = 24  # a cost is need + (height << HEIGHT)
_NEED = (1 << HEIGHT) - 1
_NEVER = np.int32(1 << 30)


@struct.dataclass
class Pool:
    """Tables of the grammars that are loaded; see `pool.PoolManager`, which fills it.

    token_class: uint16 [grammars, vocab]. header: int32 [grammars, HEADER]. arena: int32 [cells].
    classes, edges, exits: most that one grammar may have, static.
    """

    token_class: Any
    header: Any
    arena: Any
    classes: int = struct.field(pytree_node=False)
    edges: int = struct.field(pytree_node=False)
    exits: int = struct.field(pytree_node=False)


@struct.dataclass
class GrammarState:
    """Where sequences are in their grammars; all fields int32 with the same leading dimensions.

    grammar: index in the pool, FREE without one. state: state of the automaton. trigger: tokens of
    the trigger seen so far, -1 once it is complete. depth, stack [..., levels]: open calls.
    """

    grammar: Any
    state: Any
    trigger: Any
    depth: Any
    stack: Any


def start(grammar: int, *, levels: int, trigger: bool = False) -> GrammarState:
    """The state of a new sequence, without leading dimensions; grammar FREE: unconstrained."""
    zero = jnp.zeros((), jnp.int32)
    return GrammarState(
        grammar=zero + grammar,
        state=zero + START,
        trigger=zero + (0 if trigger else -1),
        depth=zero,
        stack=jnp.zeros((levels,), jnp.int32),
    )


def free(shape: tuple[int, ...], *, levels: int) -> GrammarState:
    """Unconstrained states with leading dimensions ``shape``."""
    one = start(FREE, levels=levels)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), one)


def reset(
    state: GrammarState,
    rows: Bool[Array, "*lead"],
    grammar: Int32[Array, "*lead"],
    trigger: Bool[Array, "*lead"],
) -> GrammarState:
    """States with new sequences in some rows: their grammars (FREE: none), and whether those wait
    for a trigger."""
    return GrammarState(
        grammar=jnp.where(rows, grammar, state.grammar),
        state=jnp.where(rows, START, state.state),
        trigger=jnp.where(rows, jnp.where(trigger, 0, -1), state.trigger),
        depth=jnp.where(rows, 0, state.depth),
        stack=jnp.where(rows[..., None], 0, state.stack),
    )


def _read(arena: Int32[Array, " cells"], index: Int[Array, "..."]) -> Int32[Array, "..."]:
    """Cells of the arena. Rows that are not constrained read anywhere; their result is dropped."""
    return jnp.take(arena, index, mode="clip")


def _rows(state: GrammarState) -> tuple[GrammarState, tuple[int, ...]]:
    lead = state.state.shape
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[len(lead) :])), state), lead


def _active(state: GrammarState) -> Bool[Array, " rows"]:
    return (state.grammar >= 0) & (state.trigger < 0) & (state.state > DONE)


def _pop(
    pool: Pool, head: Any, outcome: Any, stack: Int32[Array, "rows levels"], depth: Any
) -> tuple[Int32[Array, "rows n"], Int32[Array, "rows n"]]:
    """Follow exits down the stack: the outcome that is none, and the depth it is at.

    outcome: int32 [rows, n] with absolute next states, depth: int32 [rows, 1].
    """
    with jax.named_scope("grammar_pop"):
        depth = jnp.broadcast_to(depth, outcome.shape)
        for _ in range(MAX_POP):
            edge = -1 - outcome
            leaves = (outcome < 0) & (_read(pool.arena, head[EDGES] + edge * EDGE) < 0)
            top = jnp.take_along_axis(stack, jnp.maximum(depth - 1, 0), axis=1)
            cell = head[EXITS] + edge * head[RETURN_COUNT] + top
            after = jnp.where(depth > 0, _read(pool.arena, cell), DEAD)
            outcome = jnp.where(leaves, after, outcome)
            depth = depth - leaves.astype(jnp.int32)
        return outcome, depth


def _header(pool: Pool, grammar: Int32[Array, " rows"]) -> list[Int32[Array, "rows 1"]]:
    head = pool.header[jnp.maximum(grammar, 0)]
    return [head[:, i : i + 1] for i in range(HEADER)]


def _outcomes(pool: Pool, head: Any, state: Any, classes: Any) -> Int32[Array, "rows n"]:
    """Outcomes of token classes, [rows or 1, n], in the states of rows; next states relative."""
    at = head[STATES] + STATE * state[:, None]
    position = _read(pool.arena, head[BASE] + _read(pool.arena, at) + classes)
    listed = _read(pool.arena, head[BASE] + _read(pool.arena, at + 1) + position)
    return jnp.where(position > 0, listed, DEAD)


def _cost(pool: Pool, head: Any, state: Any) -> Int32[Array, "rows n"]:
    """Costs of states, [rows, n]."""
    return _read(pool.arena, head[STATES] + STATE * state + 2)


def _total(below: Any, cost: Any, depth: Any) -> Int32[Array, "rows n"]:
    """Need of whole sequences in states of a cost; never where the stack would not hold it.

    below: need of the lowest frames, by their number, int32 [rows, levels + 1]. depth: [rows, n].
    """
    need = cost & _NEED
    whole = need + jnp.take_along_axis(below, depth, axis=1)
    possible = (need < _NEED) & (depth + (cost >> HEIGHT) < below.shape[1])
    return jnp.where(possible, whole, _NEVER)


def _edge_need(pool: Pool, head: Any, state: GrammarState, below: Any) -> Int32[Array, "rows e"]:
    """Need after each edge of the grammar; exits come first and follow the stack."""
    depth = state.depth[:, None]
    exits = jnp.arange(pool.exits, dtype=jnp.int32)[None, :]
    leaving = jnp.broadcast_to(-1 - exits, (depth.shape[0], pool.exits))
    outcome, after = _pop(pool, head, leaving, state.stack, depth)
    returned = _cost(pool, head, outcome - BIAS)
    pushed = _read(pool.arena, head[EDGES] + (-1 - outcome) * EDGE + 1)
    cost = jnp.where(outcome > 0, returned, pushed)
    exit_need = _total(below, jnp.where(outcome == DEAD, _NEED, cost), after)
    rest = jnp.arange(pool.exits, pool.edges, dtype=jnp.int32)[None, :]
    pushed = _read(pool.arena, head[EDGES] + rest * EDGE + 1)
    push_need = _total(below, pushed, jnp.broadcast_to(depth, pushed.shape))
    return jnp.concatenate([exit_need, push_need], axis=1)


def _class_need(
    pool: Pool, head: Any, state: GrammarState
) -> tuple[Int32[Array, "rows k"], Int32[Array, "rows 1"]]:
    """Need after each token class, and need now."""
    levels = state.stack.shape[1]
    here = state.depth[:, None]
    owed = _read(pool.arena, head[RETURNS] + state.stack)
    owed = jnp.where(jnp.arange(levels, dtype=jnp.int32)[None, :] < here, owed, 0)
    below = jnp.cumsum(jnp.pad(owed, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
    # The barriers keep the compiler from computing an edge anew for each class that takes it, and
    # a class for each of its tokens.
    edge_need = jax.lax.optimization_barrier(_edge_need(pool, head, state, below))

    classes = jnp.arange(pool.classes, dtype=jnp.int32)[None, :]
    outcome = _outcomes(pool, head, state.state, classes)
    after = _cost(pool, head, state.state[:, None] + outcome - BIAS)
    plain = _total(below, after, jnp.broadcast_to(here, outcome.shape))
    edge = jnp.clip(-1 - outcome, 0, pool.edges - 1)
    moved = jnp.take_along_axis(edge_need, edge, axis=1)
    need = jnp.where(outcome > 0, plain, jnp.where(outcome < 0, moved, _NEVER))
    now = _cost(pool, head, state.state[:, None]) & _NEED
    return need, now + jnp.take_along_axis(below, here, axis=1)


def mask(
    pool: Pool, state: GrammarState, remaining: Int32[Array, "*lead"]
) -> Bool[Array, "*lead vocab"]:
    """Tokens that each row may sample now.

    remaining: tokens that the sequence may still produce, this one and EOS included. Rows that are
    free, waiting for their trigger or past their end allow everything. A constrained row allows at
    least one token.
    """
    with jax.named_scope("grammar_mask"):
        state, lead = _rows(state)
        head = _header(pool, state.grammar)
        need, now = _class_need(pool, head, state)
        limit = jnp.maximum(jnp.maximum(remaining.reshape(-1, 1), now), 1) - 1
        allowed = jax.lax.optimization_barrier(need <= limit)
        of_token = pool.token_class[jnp.maximum(state.grammar, 0)].astype(jnp.int32)
        allowed = jnp.take_along_axis(allowed, of_token, axis=1, mode="promise_in_bounds")
        allowed = allowed | ~_active(state)[:, None]
        return allowed.reshape(*lead, allowed.shape[1])


def advance(pool: Pool, state: GrammarState, token: Int32[Array, "*lead"]) -> GrammarState:
    """States after one more token each.

    A token that the mask forbids leaves a state that allows everything: such a row is never kept.
    The end of sequence makes a row free.
    """
    with jax.named_scope("grammar_advance"):
        state, lead = _rows(state)
        token = token.reshape(-1)
        head = _header(pool, state.grammar)
        levels = state.stack.shape[1]
        of_token = pool.token_class[jnp.maximum(state.grammar, 0), token].astype(jnp.int32)
        outcome = _outcomes(pool, head, state.state, of_token[:, None])
        outcome = jnp.where(outcome > 0, outcome + state.state[:, None], outcome)
        outcome, depth = _pop(pool, head, outcome, state.stack, state.depth[:, None])

        edge = head[EDGES] + jnp.maximum(-1 - outcome, 0) * EDGE
        pushes = outcome < 0
        target = jnp.where(pushes, _read(pool.arena, edge), outcome - BIAS)[:, 0]
        symbols = _read(pool.arena, edge + 2 + jnp.arange(MAX_PUSH, dtype=jnp.int32)[None, :])
        count = jnp.where(pushes, (symbols >= 0).sum(axis=1, keepdims=True, dtype=jnp.int32), 0)
        position = jnp.arange(levels, dtype=jnp.int32)[None, :]
        offset = position - depth
        opened = jnp.take_along_axis(symbols, jnp.clip(offset, 0, MAX_PUSH - 1), axis=1)
        stack = jnp.where((offset >= 0) & (offset < count), opened, state.stack)
        depth = depth + count
        stack = jnp.where(position < depth, stack, 0)
        forbidden = (outcome == DEAD) | (depth > levels)
        target = jnp.where(forbidden[:, 0], DEAD, target)
        depth = jnp.minimum(depth, levels)

        active = _active(state)
        moved = dataclasses.replace(
            state,
            grammar=jnp.where(active & (target == DONE), FREE, state.grammar),
            state=jnp.where(active, target, state.state),
            trigger=_trigger(pool, head, state, token),
            depth=jnp.where(active, depth[:, 0], state.depth),
            stack=jnp.where(active[:, None], stack, state.stack),
        )
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), moved)


def walk(pool: Pool, state: GrammarState, tokens: Int32[Array, "*lead k"]) -> GrammarState:
    """States before, between and after the tokens of a draft: a new last axis of k + 1."""
    states = [state]
    for i in range(tokens.shape[-1]):
        states.append(advance(pool, states[-1], tokens[..., i]))
    axis = tokens.ndim - 1
    return jax.tree.map(lambda *x: jnp.stack(x, axis=axis), *states)


def take(states: GrammarState, index: Int32[Array, "*lead"]) -> GrammarState:
    """Of the states of a draft, the one after ``index`` tokens of each sequence: the rollback."""

    def one(x: Any) -> Any:
        at = index.reshape(*index.shape, *[1] * (x.ndim - index.ndim))
        return jnp.take_along_axis(x, at, axis=index.ndim).squeeze(index.ndim)

    return jax.tree.map(one, states)


def _trigger(
    pool: Pool, head: Any, state: GrammarState, token: Int32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """Progress in the trigger: a Knuth-Morris-Pratt automaton over its distinct tokens."""
    slots = jnp.arange(MAX_TRIGGER, dtype=jnp.int32)[None, :]
    same = _read(pool.arena, head[TRIGGER] + slots) == token[:, None]
    slot = jnp.argmax(same, axis=1, keepdims=True).astype(jnp.int32)
    cell = head[TRIGGER] + MAX_TRIGGER * (1 + jnp.maximum(state.trigger[:, None], 0)) + slot
    seen = jnp.where(same.any(axis=1), _read(pool.arena, cell)[:, 0], 0)
    seen = jnp.where(seen == head[TRIGGER_LENGTH][:, 0], -1, seen)
    waiting = (state.grammar >= 0) & (state.trigger >= 0)
    return jnp.where(waiting, seen, state.trigger)
