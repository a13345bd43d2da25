"""Which drafted tokens stand, and what is emitted instead of the first that does not.

A decode step feeds a slot's newest token and w drafts d_1 .. d_w; row j predicts the token after
d_j as if d_1 .. d_j had been decoded one by one (penalties, grammar, stop ids included).
  coupled    row j samples t_j with the noise of its position, as it would without drafts; d_{j+1}
             stands exactly when it equals t_j. Emitted: t_0 .. t_m for the m leading matches. The
             drafter used the same noise, so good drafts match; whatever it drafts, the tokens are
             those of decoding one at a time.
  rejection  d_{j+1} stands with probability min(1, p_j(d) / q_j(d)); at the first that falls, the
             token is drawn from relu(p_j - q_j); if all stand, from p_w (Leviathan et al. 2023).
Everything after a stop token is dropped; a row without a valid distribution ends the request there.

Rolling back is keeping a smaller length: caches are addressed by position (model/cache.py).
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from deepinfer_jax.runtime import noise
from deepinfer_jax.runtime.sampling_state import RowParams
from deepinfer_jax.spec import Leaf


@flax.struct.dataclass
class Verified:
    """tokens int32 [groups, width]: what each place emits; count int32 [groups]: places that stand;
    failed, stopped bool [groups]: the last one is not valid (and not counted), or ends the request.
    judged, stood int32 [groups]: drafts whose fate says something about the drafter (all before
    them stood and nothing had ended), and those of them that stood.
    """

    tokens: Leaf
    count: Leaf
    failed: Leaf
    stopped: Leaf
    judged: Leaf
    stood: Leaf


def widths(
    confidence: Float[Array, "groups block"],
    room: Int32[Array, " groups"],
    budget: Int32[Array, ""],
) -> Int32[Array, " groups"]:
    """Draft rows granted to each group, `budget` in all, where they are likeliest to stand.

    confidence: logits of each draft standing given the ones before it; room: most rows of a group.
    The survival products of all drafts are ranked, ties by group and place; they fall along a
    group, so what is granted is a prefix (DeepInfer's confidence-scheduled verification).
    """
    survival = jnp.cumprod(jax.nn.sigmoid(confidence), axis=1)
    place = jnp.arange(confidence.shape[1], dtype=jnp.int32)[None, :]
    score = jnp.where(place < room[:, None], survival, -1.0).reshape(-1)
    order = jnp.argsort(-score, stable=True)
    rank = jnp.zeros(score.shape, jnp.int32).at[order].set(jnp.arange(score.size, dtype=jnp.int32))
    granted = (rank < budget) & (score >= 0)
    return jnp.sum(granted.reshape(confidence.shape), axis=1, dtype=jnp.int32)


def coupled(
    sampled: Int32[Array, "groups width"],
    valid: Bool[Array, "groups width"],
    stop: Bool[Array, "groups width"],
    drafts: Int32[Array, "groups block"],
    rows: Int32[Array, " groups"],
) -> Verified:
    """Acceptance by equality. sampled, valid, stop: per place, token, its validity, whether it ends
    the request; rows: places that were computed (0: a group without work)."""
    match = sampled[:, : drafts.shape[1]] == drafts
    return _close(sampled, match, valid, stop, rows)


def rejection(
    weights: Float[Array, "groups width vocab"],
    draft_weights: Float[Array, "groups block vocab"],
    params: RowParams,
    position: Int32[Array, "groups width"],
    valid: Bool[Array, "groups width"],
    stop: Bool[Array, "groups vocab"],
    drafts: Int32[Array, "groups block"],
    rows: Int32[Array, " groups"],
) -> Verified:
    """Acceptance by probability ratio.

    weights, draft_weights: log-weights of target and drafter (maximum 0, -inf: cannot be emitted;
    a drafter's row that is not a distribution, all zero or NaN, counts as disjoint). position: of
    the token that each place predicts. A token of target probability 0 is never emitted.
    """
    groups, width, vocab = weights.shape
    block = drafts.shape[1]
    p = jax.nn.softmax(jnp.where(jnp.isnan(weights), -jnp.inf, weights), axis=-1)
    p = jnp.where(jnp.isfinite(p), p, 0.0)
    q = jax.nn.softmax(draft_weights, axis=-1)
    q = jnp.where(jnp.isfinite(q).all(-1, keepdims=True), q, 0.0)
    of_draft = jnp.take_along_axis(p[:, :block], drafts[:, :, None], axis=-1)[..., 0]
    by_draft = jnp.take_along_axis(q, drafts[:, :, None], axis=-1)[..., 0]
    flat_params = jax.tree.map(lambda leaf: jnp.repeat(leaf, width, axis=0), params)
    flat_position = position.reshape(-1)
    u = noise.uniform(flat_params.key, flat_position, noise.ACCEPT).reshape(groups, width)
    match = (by_draft > 0) & (u[:, :block] * by_draft < of_draft)

    residual = jnp.maximum(p[:, :block] - q, 0.0)
    some = residual.sum(-1, keepdims=True) > 0
    residual = jnp.where(some, residual, p[:, :block])
    drawn = jnp.concatenate([residual, p[:, block:]], axis=1)
    # The last place that was computed has no draft to judge: it draws from the target itself.
    fresh = jnp.arange(width, dtype=jnp.int32)[None, :] == rows[:, None] - 1
    drawn = jnp.where(fresh[..., None], p, drawn).reshape(groups * width, vocab)
    ids = jnp.arange(vocab, dtype=jnp.int32)
    gumbel = noise.gumbel(flat_params.key, flat_position, noise.RESIDUAL, ids)
    hot = flat_params.temperature[:, None] > 0
    tokens = jnp.argmax(jnp.log(drawn) + jnp.where(hot, gumbel, 0.0), axis=-1).astype(jnp.int32)
    tokens = tokens.reshape(groups, width)
    place = jnp.arange(block, dtype=jnp.int32)[None, :]
    stands = match & (place < rows[:, None] - 1)
    tokens = tokens.at[:, :block].set(jnp.where(stands, drafts, tokens[:, :block]))
    ends = jnp.take_along_axis(stop, tokens, axis=1)
    return _close(tokens, match, valid, ends, rows)


def _close(
    tokens: Int32[Array, "groups width"],
    match: Bool[Array, "groups block"],
    valid: Bool[Array, "groups width"],
    stop: Bool[Array, "groups width"],
    rows: Int32[Array, " groups"],
) -> Verified:
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    drafted = place[:, : match.shape[1]] < rows[:, None] - 1
    stands = jnp.cumprod((match & drafted).astype(jnp.int32), axis=1)
    stood = jnp.sum(stands, axis=1, dtype=jnp.int32)
    count = jnp.where(rows > 0, 1 + stood, 0)
    broken, ends = _first(~valid), _first(stop)
    failed = broken < count
    count = jnp.minimum(count, broken)
    stopped = ends < count
    judged = jnp.minimum(jnp.minimum(stood + 1, jnp.maximum(rows - 1, 0)), broken)
    judged = jnp.where(stopped, jnp.minimum(judged, ends + 1), judged)
    return Verified(
        tokens,
        jnp.minimum(count, ends + 1),
        failed & ~stopped,
        stopped,
        judged,
        jnp.minimum(stood, judged),
    )


def _first(flags: Bool[Array, "groups width"]) -> Int32[Array, " groups"]:
    """Place of the first true one, or the width."""
    width = flags.shape[1]
    found = jnp.argmax(flags, axis=1).astype(jnp.int32)
    return jnp.where(flags.any(axis=1), found, width)
