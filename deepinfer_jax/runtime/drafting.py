"""Drafting the next block inside a step, with the request's own sampling options.

The drafter proposes from its distribution after the same penalties, grammar mask and truncation as
the target. Under `accept="coupled"` it also uses the target's noise of each position, so that it
proposes what the target would sample wherever the two agree; under `"rejection"` it draws with a
stream of its own and keeps its log-weights for the verification.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from deepinfer_jax import structured
from deepinfer_jax.model import dspark
from deepinfer_jax.model import rows as row_lists
from deepinfer_jax.model.cache import Cache
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.compile import shared
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.runtime import noise, sampling
from deepinfer_jax.runtime.sampling_state import RowParams, Tables
from deepinfer_jax.structured import GrammarState, Pool

NEVER = -1e9  # confidence of what would follow a drafted stop token


class Block(NamedTuple):
    """drafts int32, confidence f32 [groups, block] (logits); weights f32 [groups, block, vocab]."""

    drafts: Int32[Array, "groups block"]
    confidence: Float[Array, "groups block"]
    weights: Float[Array, "groups block vocab"] | None


@shared("setup", "block", "rejection")
def draft(
    setup: Setup,
    weights: Weights,
    cache: Cache,
    pool: Pool,
    *,
    anchor: Int32[Array, " groups"],
    position: Int32[Array, " groups"],
    slot: Int32[Array, " groups"],
    active: Bool[Array, " groups"],
    params: RowParams,
    tables: Tables,
    grammar: GrammarState,
    limit: Int32[Array, " groups"],
    block: int,
    rejection: bool,
) -> Block:
    """The block after each group's `anchor` token, which stands at `position`.

    cache: with the context of everything before `position` in its draft rings. params, grammar: one
    entry a group; limit: tokens the request may have in all.
    """
    cfg = setup.cfg
    trained = cfg.dspark_block_size
    noise_ids = jnp.full((slot.shape[0], trained), cfg.dspark_noise_token_id, jnp.int32)
    rows = row_lists.rectangle(
        noise_ids.at[:, 0].set(anchor),
        start=position,
        count=jnp.where(active, trained, 0),
        slot=slot,
        pages=jnp.full((slot.shape[0], 1), -1, jnp.int32),
    )
    state = dspark.draft_block(
        setup, weights.draft, weights.embed, weights.head, rows, cache, Capture()
    )

    def one(carry: tuple[Any, ...], row: tuple[Array, ...]) -> tuple[tuple[Any, ...], Any]:
        previous, drafts, over, grammar = carry
        base, x, place = row
        logits, confidence = dspark.correct(setup, weights.draft, base, x, previous)
        predicted = position + 1 + place
        with jax.named_scope("draft_sampling"):
            allowed = grammar_mask(pool, grammar, limit - predicted)
            masked = sampling.adjust(logits, params, tables, slot, predicted, drafts, allowed)
            z = sampling.distribution(masked, params)
            purpose = noise.DRAFT if rejection else noise.SAMPLE
            token = sampling.choose(z, params, predicted, purpose)
        ends = jnp.take_along_axis(tables.stop[slot], token[:, None], axis=1)[:, 0]
        after = (token, drafts.at[:, place].set(token), over | ends, advance(pool, grammar, token))
        return after, (jnp.where(over, NEVER, confidence), z if rejection else None)

    none = jnp.full((slot.shape[0], block), -1, jnp.int32)
    rows_of_block = tuple(leaf.swapaxes(0, 1)[:block] for leaf in (state.base, state.x))
    (_, drafts, _, _), found = one_by_one(
        one,
        (anchor, none, jnp.zeros(slot.shape, jnp.bool_), grammar),
        (*rows_of_block, jnp.arange(block, dtype=jnp.int32)),
    )
    confidence, kept = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), found)
    return Block(drafts, confidence, kept)


def one_by_one(body: Callable[..., Any], carry: Any, items: Any) -> Any:
    """`lax.scan`, written out for CUDA: there a loop that holds a branch makes the host wait."""

    def run(carry: Any, items: Any, unroll: bool) -> Any:
        return jax.lax.scan(body, carry, items, unroll=unroll)

    return jax.lax.platform_dependent(
        carry,
        items,
        cuda=lambda carry, items: run(carry, items, True),
        default=lambda carry, items: run(carry, items, False),
    )


@shared()
def grammar_mask(
    pool: Pool, grammar: GrammarState, remaining: Int32[Array, " rows"]
) -> Bool[Array, "rows vocab"]:
    """Allowed tokens of each row; all of them, at no cost, when no row has a grammar."""
    vocab = pool.token_class.shape[1]

    def everything(_: Array) -> Array:
        return jnp.ones((remaining.shape[0], vocab), jnp.bool_)

    return jax.lax.cond(
        jnp.any(grammar.grammar >= 0),
        lambda left: structured.mask(pool, grammar, left),
        everything,
        remaining,
    )


@shared()
def advance(pool: Pool, grammar: GrammarState, token: Int32[Array, " rows"]) -> GrammarState:
    """Grammar states after a token each, at no cost when no row has a grammar."""
    return jax.lax.cond(
        jnp.any(grammar.grammar >= 0),
        lambda state: structured.advance(pool, state, token),
        lambda state: state,
        grammar,
    )
