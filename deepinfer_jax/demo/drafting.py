"""Trains DSpark on a finished backbone: the drafter learns the backbone's own distribution.

A batch of text goes through the backbone with its stored weights. At anchors t, a few a sequence,
the block [token t+1, noise, noise, ...] goes through the stages as `dspark.draft_block` does, and
row i is compared with the backbone after the true tokens up to t+1+i:

    loss = sum_i 0.85^i ( -sum_v p_i(v) log q_i(v) ),   q_i = softmax(base_i + markov(token t+1+i))

The confidence head learns sum_v min(p_i, q_i), the chance that rejection sampling accepts.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.demo import network, optimiser
from deepinfer_jax.demo.run import (
    SETUP,
    Flat,
    Found,
    Run,
    compiled,
    hashed,
    initial,
    mark,
    prepared,
    several,
    stage,
)
from deepinfer_jax.model import attention, hyper
from deepinfer_jax.model import rows as row_lists
from deepinfer_jax.model.head import head_logits
from deepinfer_jax.model.linear import linear
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.setup import Setup

STRIDE = 8  # tokens between anchors
FADE = 0.85
MATRIX_RATE, RATE = 0.02, 3e-3
BIBLE = 0.625


def block_logits(
    setup: Setup,
    weights: Any,
    taps: Float[Array, "rows targets_d"],
    context: Rows,
    block: Int32[Array, "batch anchors k"],
    start: Int32[Array, " anchors"],
    *,
    stored: bool,
) -> tuple[Float[Array, "batch anchors k vocab"], Float[Array, "batch anchors k"]]:
    """Logits and confidences of draft blocks whose previous tokens are `block` (place 0: the
    anchor), at positions start .. start + k - 1."""
    cfg, draft = setup.cfg, weights.draft
    batch, anchors, k = block.shape
    groups = batch * anchors
    main = rms_norm(linear(setup, taps, draft.main_proj), draft.main_norm, cfg.rms_norm_eps)
    ids = jnp.full(block.shape, cfg.dspark_noise_token_id, jnp.int32)
    ids = ids.at[:, :, 0].set(block[:, :, 0]).reshape(groups, k)
    rows = row_lists.rectangle(
        ids,
        start=jnp.tile(start, batch),
        count=jnp.full((groups,), k, jnp.int32),
        slot=jnp.zeros((groups,), jnp.int32),
        pages=jnp.zeros((groups, 1), jnp.int32),
    )
    behind = jnp.arange(context.width, dtype=jnp.int32)[None, :] - start[:, None]
    seen = (behind < 0) & (behind >= -cfg.sliding_window)
    streams = hyper.expand(weights.embed[rows.token], cfg)
    pre = hyper.first_pre(rows.size, cfg)
    for layer in draft.stages:
        attend = functools.partial(
            _attend, setup, layer.attn, rows, context, main=main, seen=seen, stored=stored
        )
        streams, pre, _, _ = network.block(
            setup, layer, streams, pre, attend, cfg.dspark_num_experts_per_tok
        )
    x = hyper.hidden(streams, pre).collapsed
    base = head_logits(setup, x, draft.norm, weights.head)
    before = draft.markov_embed[block.reshape(-1)]
    logits = base + before @ draft.markov_head.T
    confidence = jnp.concatenate([x, before], axis=-1) @ draft.confidence[0]
    return logits.reshape(*block.shape, -1), confidence.reshape(block.shape)


def _attend(
    setup: Setup,
    weights: Any,
    rows: Rows,
    context: Rows,
    x: Float[Array, "rows d"],
    main: Float[Array, "context d"],
    seen: Any,
    stored: bool,
) -> tuple[Float[Array, "parts rows d"], None]:
    """Attention of block rows over the context before them and over each other, its output in
    parts."""
    k, (anchors, length) = rows.width, seen.shape
    _, query = attention.queries(setup, weights, rows, x, compressed=False)
    own = network.window_kv(setup, weights, rows, x, compressed=False, stored=stored)
    past = network.window_kv(setup, weights, context, main, compressed=False, stored=stored)
    heads, c = query.shape[1:]
    scale = jnp.float32(c**-0.5)
    past = past.reshape(context.groups, length, c)
    own = own.reshape(rows.groups, k, c)
    far = jnp.einsum("bqc,btc->bqt", query.reshape(context.groups, -1, c), past) * scale
    far = far.reshape(context.groups, anchors, k * heads, length)
    far = jnp.where(seen[None, :, None], far, network.LOW).reshape(rows.groups, k * heads, length)
    near = jnp.einsum("gqc,gkc->gqk", query.reshape(rows.groups, -1, c), own) * scale
    edge = jnp.broadcast_to(jnp.tile(weights.sink, k)[None, :, None], (*near.shape[:2], 1))
    p = jax.nn.softmax(jnp.concatenate([far, near, edge], axis=-1), axis=-1)
    out = jnp.einsum("gqk,gkc->gqc", p[..., length : length + k], own)
    taken = p[..., :length].reshape(context.groups, -1, length)
    out = out + jnp.einsum("bqt,btc->bqc", taken, past).reshape(out.shape)
    out = out.reshape(rows.size, heads, c)
    return attention.output(setup, weights, rows, out, compressed=False), None


def losses(
    cfg: ModelConfig,
    draft: Flat,
    backbone: Flat,
    classes: Array,
    batch: Int32[Array, "b s1"],
    first: Array,
) -> tuple[Array, dict[str, Array]]:
    """The loss, and what is worth a log line; first: position of the first anchor."""
    setup, k = SETUP(cfg), cfg.dspark_block_size
    tokens = batch[:, :-1]
    table_rows = hashed(cfg, classes, tokens)
    weights = prepared(cfg, {**backbone, **draft}, table_rows)
    out = network.forward(setup, weights, tokens, stored=True)
    logits, taps = jax.lax.stop_gradient((out.logits, out.taps))
    context, _ = network.rows_of(setup, tokens)
    anchors = (tokens.shape[1] - k - STRIDE) // STRIDE
    last = first + STRIDE * jnp.arange(anchors, dtype=jnp.int32)  # last processed positions
    place = last[:, None] + 1 + jnp.arange(k, dtype=jnp.int32)[None, :]
    drafted, sure = block_logits(
        setup, weights, taps, context, batch[:, place], last + 1, stored=True
    )
    target = logits[:, place]
    p = jax.nn.softmax(target, axis=-1)
    log_q = jax.nn.log_softmax(drafted, axis=-1)
    weight = jnp.asarray(FADE ** np.arange(k), jnp.float32)
    nats = -jnp.sum(p * log_q, axis=-1)
    accept = jax.lax.stop_gradient(jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1))
    unsure = jax.nn.softplus(sure) - accept * sure
    total = jnp.sum(jnp.mean(nats, axis=(0, 1)) * weight) / jnp.sum(weight) + jnp.mean(unsure)
    same = jnp.argmax(drafted, axis=-1) == jnp.argmax(target, axis=-1)
    stands = jnp.cumprod(same.astype(jnp.float32), axis=-1)
    found = {
        "loss": jnp.mean(nats),
        "greedy": 1.0 + jnp.mean(jnp.sum(stands, axis=-1)),
        "accept": jnp.mean(accept),
    }
    return total, found


@functools.partial(compiled, static_argnums=0, donate_argnums=(1, 2))
def draft_steps(
    cfg: ModelConfig,
    draft: Flat,
    state: optimiser.State,
    backbone: Flat,
    classes: Array,
    batches: Int32[Array, "steps b s1"],
    key: Array,
    share: Array,
) -> tuple[Flat, optimiser.State, Found]:
    """Several steps of the drafter; the backbone stays."""
    one = functools.partial(draft_step, cfg, backbone, classes, share)
    return several(one, draft, state, batches, key)


def draft_step(
    cfg: ModelConfig,
    backbone: Flat,
    classes: Array,
    share: Array,
    draft: Flat,
    state: optimiser.State,
    batch: Int32[Array, "b s1"],
    key: Array,
) -> tuple[Flat, optimiser.State, Found]:
    """One step, anchors from a random place on."""
    first = jax.random.randint(key, (), 0, STRIDE, jnp.int32)

    def loss(draft: Flat) -> tuple[Array, dict[str, Array]]:
        return losses(cfg, draft, backbone, classes, batch, first)

    grads, found = jax.grad(loss, has_aux=True)(draft)
    grads, _ = optimiser.clip(grads, 1.0)
    new, state = optimiser.update(
        draft, grads, state, matrix_rate=MATRIX_RATE * share, rate=RATE * share
    )
    return new, state, found


def train(run: Run, backbone: Flat, seconds: float, keep: Callable[[Flat], None]) -> Flat:
    """The drafter's weights; keep: called with those so far at every save.

    A drafter that was saved beside another backbone is begun anew.
    """

    def fresh() -> Flat:
        everything = initial(run.cfg, run.seed + 1)
        return {name: value for name, value in everything.items() if name.startswith("draft/")}

    def steps(draft: Flat, state: Any, batches: np.ndarray, key: Array, share: Array) -> Any:
        return draft_steps(run.cfg, draft, state, backbone, run.classes, batches, key, share)

    return stage(
        run, "drafter", fresh, BIBLE, steps, seconds, lambda draft: {}, keep, (mark(backbone),)
    )
