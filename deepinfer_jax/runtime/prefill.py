"""The prefill program: prompt chunks of several sequences, one rectangle of rows.

Every row goes through the encoder half and writes the compressed entries of its sequence. Which
rows go on through the decoder half is the replay mode (`Numerics.replay`): all of them ("full", and
"mask" with narrowed windows), or the last `ModelConfig.replay_keep` of the prompt ("compact"). The
last chunk of a prompt samples the first token and drafts the block after it. Under a layout with
context parallelism every shard of a group is given all rows and computes its own part of them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from deepinfer_jax.model import context, dspark, engram_hash, transformer
from deepinfer_jax.model import rows as row_lists
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.head import head_logits
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.runtime import drafting, sampling, sampling_state
from deepinfer_jax.runtime.sampling import Sampled
from deepinfer_jax.runtime.sampling_state import RowParams, Tables
from deepinfer_jax.runtime.state import State
from deepinfer_jax.runtime.step_types import (
    Options,
    PrefillInput,
    StepOutput,
    captured,
    draft_next,
    put,
    put_tree,
)
from deepinfer_jax.structured import Pool


def prefill_chunk(
    setup: Setup,
    options: Options,
    tail: int,
    score: bool,
    weights: Weights,
    state: State,
    pool: Pool,
    inputs: PrefillInput,
) -> tuple[State, StepOutput]:
    """Prompt chunks of several sequences; the last chunk of a prompt samples its first token.

    tail: most rows of a chunk that the decoder half sees; with 0 only the encoder half and the last
    KV source run (read under replay "compact" only). score: report the log-probability of every
    prompt token, which needs every row through every layer.
    """
    cfg, replay = setup.cfg, setup.numerics.replay
    whole = score or replay == "full"
    floor = jnp.maximum(inputs.prompt - cfg.replay_keep, 0)
    slot = jnp.maximum(inputs.slot, 0)
    every = row_lists.rectangle(
        inputs.token,
        start=inputs.start,
        count=jnp.where(inputs.slot >= 0, inputs.count, 0),
        slot=slot,
        pages=inputs.pages,
        floor=jnp.zeros_like(floor) if whole else floor,
        begin=inputs.begin,
        own=inputs.own,
    )
    rows = context.split(every, setup.layout, setup.phase)
    state = dataclasses.replace(state, tables=_count_prompt(state.tables, every, inputs))
    cache = state.cache
    if cfg.engram_layer_ids:
        cache = engram_hash.remember(weights.token_map, every, cache, inputs.before)
    keep = tail if not whole and replay == "compact" else None
    recorder = Capture(options.capture)
    routes = None
    if inputs.routes is not None:
        routes = context.part(rows, inputs.routes.reshape(-1, *inputs.routes.shape[2:]))
    trunk = transformer.trunk(setup, weights, rows, cache, recorder, keep=keep, routes=routes)
    state = dataclasses.replace(state, cache=trunk.cache)
    last = inputs.last & (every.count > 0)
    position = every.start + every.count
    state = dataclasses.replace(state, length=put(state.length, inputs.slot, position))
    if keep == 0:
        output = _nothing(rows.groups, options)
        return state, dataclasses.replace(output, captured=captured(recorder, rows))
    x = transformer.collapse(setup, weights, trunk.hidden, recorder)
    params = state.params.take(slot)
    grammar = jax.tree.map(lambda leaf: leaf[slot], state.grammar)
    # From here on there is one row a group, the same on all context shards, as in a decode step.
    after = setup._replace(phase="decode")
    newest = context.fetch(trunk.rows, x, trunk.rows.everyone.last())
    logits = head_logits(after, newest, weights.norm, weights.head)
    if recorder.wants("logits"):
        every_one = head_logits(setup, x, weights.norm, weights.head)
        recorder.add("logits", cfg.num_hidden_layers, every_one)
    allowed = drafting.grammar_mask(pool, grammar, state.limit[slot] - position)
    first = sampling.sample(
        logits,
        params,
        state.tables,
        slot,
        position,
        allowed=allowed,
        forced=inputs.forced,
        top=options.top,
    )
    prompt = None
    if score:
        x = context.together(rows, x)
        prompt = _prompt_report(after, weights, x, inputs, every, params, options)
    ends = jnp.take_along_axis(state.tables.stop[slot], first.token[:, None], axis=1)[:, 0]
    live = last & first.valid
    done = ends | (position + 1 >= state.limit[slot])
    place = jnp.where(live, inputs.slot, -1)
    grammar = drafting.advance(pool, grammar, first.token)
    state = dataclasses.replace(
        state,
        last=put(state.last, place, first.token),
        done=put(state.done, jnp.where(last, inputs.slot, -1), done | ~first.valid),
        tables=sampling_state.count_output(state.tables, place, first.token),
        grammar=put_tree(state.grammar, place, grammar),
    )
    if options.block:
        cache = dspark.remember(setup, weights.draft, trunk.rows, state.cache, trunk.taps)
        state = dataclasses.replace(state, cache=cache)
        state = draft_next(
            after,
            options,
            weights,
            state,
            pool,
            jnp.where(live & ~done, inputs.slot, -1),
            first.token,
            position,
        )
    output = _output(rows.groups, options, first, live.astype(jnp.int32), last & ~first.valid)
    kept = captured(recorder, rows, kept=trunk.rows, border=cfg.decoder_start)
    if recorder.wants("logits"):  # those that were sampled from, whatever a wider product rounds
        at = jnp.arange(slot.shape[0]), jnp.maximum(trunk.rows.everyone.count - 1, 0)
        wide = kept["logits"][cfg.num_hidden_layers]
        kept["logits"][cfg.num_hidden_layers] = wide.at[at].set(logits)
    return state, dataclasses.replace(
        output, ahead=state.confidence[slot], prompt=prompt, captured=kept
    )


def _count_prompt(tables: Tables, rows: Rows, inputs: PrefillInput) -> Tables:
    slot = jnp.where(rows.valid, inputs.slot[rows.group], -1)
    output = rows.position >= inputs.prompt[rows.group]
    tables = sampling_state.count_prompt(tables, jnp.where(output, -1, slot), rows.token)
    return sampling_state.count_output(tables, jnp.where(output, slot, -1), rows.token)


def _prompt_report(
    setup: Setup,
    weights: Weights,
    x: Array,
    inputs: PrefillInput,
    rows: Rows,
    params: RowParams,
    options: Options,
) -> tuple[Array, Array, Array]:
    """Raw log-probabilities of the tokens after each place, one row of places at a time."""

    def column(place: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        hidden, token = place
        logits = head_logits(setup, hidden, weights.norm, weights.head)
        wanted = jnp.maximum(params.logprobs, 0)
        return sampling.report(logits, jnp.maximum(token, 0), wanted, options.top)

    wide = row_lists.to_rectangle(rows, x).swapaxes(0, 1)
    found = jax.lax.map(column, (wide, inputs.following.swapaxes(0, 1)))
    return tuple(leaf.swapaxes(0, 1) for leaf in found)


def _output(
    groups: int, options: Options, sampled: Sampled, count: Array, failed: Array
) -> StepOutput:
    """A step's output with one place a group."""
    one = jax.tree.map(lambda leaf: leaf[:, None], sampled)
    zero = jnp.zeros((groups,), jnp.int32)
    return StepOutput(
        tokens=one.token,
        count=count,
        failed=failed,
        logprob=one.logprob,
        top_ids=one.top_ids,
        top_logprobs=one.top_logprobs,
        verified=zero,
        judged=zero,
        stood=zero,
        confidence=jnp.zeros((groups, options.block), jnp.float32),
        ahead=jnp.zeros((groups, options.block), jnp.float32),
        prompt=None,
        captured={},
    )


def _nothing(groups: int, options: Options) -> StepOutput:
    """The output of a step that samples nothing."""
    zero, real = jnp.zeros((groups,), jnp.int32), jnp.zeros((groups,), jnp.float32)
    top = (groups, options.top)
    none = Sampled(zero, zero > 0, real, jnp.zeros(top, jnp.int32), jnp.zeros(top, jnp.float32))
    return _output(groups, options, none, zero, zero > 0)
