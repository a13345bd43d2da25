"""The decode program: one jitted step of batched decoding with speculative verification.

For `groups` slots and at most `size` rows in all:
  widths    confidences choose how many drafts of each slot are fed, within the budget (verify.py)
  trunk     the newest tokens and drafts as one flat list of rows         (model/transformer.py)
  sample    every row as if decoded one by one                                     (sampling.py)
  verify    the accepted prefix, the token after it, stops                           (verify.py)
  commit    lengths, counts and grammar states move; the context goes into the draft rings
  draft     the next block                                                         (drafting.py)
Nothing is undone for rejected rows: the caches are addressed by position. The state is donated;
tokens, lengths and drafts stay on the device, so the host prepares the next step meanwhile. Prompts
go through `prefill.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from deepinfer_jax.model import dspark, transformer
from deepinfer_jax.model import rows as row_lists
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.head import head_logits
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.runtime import drafting, sampling, sampling_state, verify
from deepinfer_jax.runtime.state import State
from deepinfer_jax.runtime.step_types import (
    DecodeInput,
    Options,
    StepOutput,
    captured,
    draft_next,
    put,
    put_tree,
)
from deepinfer_jax.structured import GrammarState, Pool


def decode_step(
    setup: Setup,
    options: Options,
    size: int,
    weights: Weights,
    state: State,
    pool: Pool,
    inputs: DecodeInput,
) -> tuple[State, StepOutput]:
    """One turn of every group: verify its drafts, emit at least one token, draft the next block."""
    slot = jnp.maximum(inputs.slot, 0)
    length, limit = state.length[slot], state.limit[slot]
    active = (inputs.slot >= 0) & ~state.done[slot]
    drafts, confidence = state.drafts[slot], state.confidence[slot]
    fed = jnp.zeros_like(slot)
    if options.block:
        room = jnp.where(active, jnp.minimum(inputs.room, limit - length - 2), 0)
        fed = verify.widths(confidence / inputs.temperature, room, inputs.budget[0])
    rows = row_lists.flat(
        jnp.concatenate([state.last[slot][:, None], drafts], axis=1),
        start=length,
        count=jnp.where(active, 1 + fed, 0),
        slot=slot,
        pages=inputs.pages,
        size=size,
    )
    recorder = Capture(options.capture)
    ahead = rows.position - inputs.known[rows.group]
    routes = None if inputs.routes is None else _at(inputs.routes, rows, ahead)
    trunk = transformer.trunk(setup, weights, rows, state.cache, recorder, routes=routes)
    x = transformer.collapse(setup, weights, trunk.hidden, recorder)
    logits = head_logits(setup, x, weights.norm, weights.head)
    recorder.add("logits", setup.cfg.num_hidden_layers, logits)

    along = _grammar_along(pool, jax.tree.map(lambda leaf: leaf[slot], state.grammar), drafts)
    place = rows.position - rows.start[rows.group]
    row_slot = slot[rows.group]
    predicted = rows.position + 1
    earlier = jnp.where(
        jnp.arange(options.block, dtype=jnp.int32)[None, :] < place[:, None],
        drafts[rows.group],
        -1,
    )
    allowed = drafting.grammar_mask(
        pool,
        jax.tree.map(lambda leaf: leaf[place, rows.group], along),
        state.limit[row_slot] - predicted,
    )
    sampled = sampling.sample(
        logits,
        state.params.take(row_slot),
        state.tables,
        row_slot,
        predicted,
        earlier=earlier,
        allowed=allowed,
        forced=_at(inputs.forced, rows, ahead + 1),
        top=options.top,
    )
    wide = jax.tree.map(lambda leaf: row_lists.to_rectangle(rows, leaf), sampled)
    stop = state.tables.stop[slot]
    if options.rejection and options.block:
        masked = sampling.adjust(
            logits,
            state.params.take(row_slot),
            state.tables,
            row_slot,
            predicted,
            earlier,
            allowed,
        )
        z = sampling.distribution(masked, state.params.take(row_slot))
        verified = verify.rejection(
            row_lists.to_rectangle(rows, z),
            state.draft_weights[slot],
            state.params.take(slot),
            row_lists.to_rectangle(rows, predicted),
            wide.valid,
            stop,
            drafts,
            rows.count,
        )
    else:
        ends = jnp.take_along_axis(stop, wide.token, axis=1)
        verified = verify.coupled(wide.token, wide.valid, ends, drafts, rows.count)
    state = _commit(
        setup, options, weights, state, pool, inputs, rows, trunk, verified, along, active
    )
    return state, StepOutput(
        tokens=verified.tokens,
        count=verified.count,
        failed=verified.failed,
        logprob=wide.logprob,
        top_ids=wide.top_ids,
        top_logprobs=wide.top_logprobs,
        verified=fed,
        judged=verified.judged,
        stood=verified.stood,
        confidence=confidence,
        ahead=state.confidence[slot],
        prompt=None,
        captured=captured(recorder, rows),
    )


def _commit(
    setup: Setup,
    options: Options,
    weights: Weights,
    state: State,
    pool: Pool,
    inputs: DecodeInput,
    rows: Rows,
    trunk: transformer.Trunk,
    verified: verify.Verified,
    along: GrammarState,
    active: Bool[Array, " groups"],
) -> State:
    """Advances the slots by what stands and drafts their next block."""
    count = verified.count
    newest = jnp.maximum(count - 1, 0)
    token = jnp.take_along_axis(verified.tokens, newest[:, None], axis=1)[:, 0]
    length = rows.start + count
    place = jnp.where(active, inputs.slot, -1)
    moved = jnp.where(count > 0, place, -1)
    width = verified.tokens.shape[1]
    counted = jnp.arange(width, dtype=jnp.int32)[None, :] < count[:, None]
    tables = sampling_state.count_output(
        state.tables,
        jnp.broadcast_to(place[:, None], counted.shape).reshape(-1),
        jnp.where(counted, verified.tokens, -1).reshape(-1),
    )
    grammar = jax.tree.map(
        lambda leaf: leaf[newest, jnp.arange(newest.shape[0], dtype=jnp.int32)], along
    )
    grammar = drafting.advance(pool, grammar, token)
    limit = state.limit[jnp.maximum(inputs.slot, 0)]
    done = verified.stopped | verified.failed | (length + 1 >= limit)
    state = dataclasses.replace(
        state,
        cache=trunk.cache,
        tables=tables,
        last=put(state.last, moved, token),
        length=put(state.length, moved, length),
        done=put(state.done, place, done),
        grammar=put_tree(state.grammar, moved, grammar),
    )
    if not options.block:
        return state
    standing = rows.valid & (rows.position < length[rows.group])
    context = dataclasses.replace(rows, valid=standing, count=count)
    cache = dspark.remember(setup, weights.draft, context, state.cache, trunk.taps)
    state = dataclasses.replace(state, cache=cache)
    return draft_next(
        setup,
        options,
        weights,
        state,
        pool,
        jnp.where(done, -1, moved),
        token,
        length,
    )


def _at(
    values: Int32[Array, " groups reach *rest"], rows: Rows, place: Int32[Array, " rows"]
) -> Int32[Array, " rows *rest"]:
    """values[group of the row, place]; -1 outside."""
    inside = (place >= 0) & (place < values.shape[1])
    found = values[rows.group, jnp.clip(place, 0, values.shape[1] - 1)]
    return jnp.where(inside.reshape(-1, *(1,) * (found.ndim - 1)), found, -1)


def _grammar_along(
    pool: Pool, grammar: GrammarState, drafts: Int32[Array, "groups block"]
) -> GrammarState:
    """Grammar states of each group after 0, 1, ... drafts, stacked on a leading axis."""

    def one(before: GrammarState, token: Int32[Array, " groups"]) -> tuple[GrammarState, Any]:
        after = drafting.advance(pool, before, jnp.maximum(token, 0))
        return after, after

    _, along = drafting.one_by_one(one, grammar, drafts.swapaxes(0, 1))
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), grammar, along)
