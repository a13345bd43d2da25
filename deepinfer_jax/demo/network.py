"""The model for training: whole sequences, dense masks, gradients.

The mechanisms are the model's own functions (mHC, norms, rotary angles, queries, compressor, index
keys, Engram, shared expert, output projection) on float32 weights. Three parts differ in form and
not in value, because gathers are slow to differentiate: attention is dense with a mask instead of
gathered rows, every expert multiplies every row and the router's weights (0 for experts not taken)
pick, and a selection is a mask instead of a list. `tests/demo` compares the logits with
`transformer.forward`.

The indexer gets no gradient from the text: it learns to rank entries as attention does, by
cross-entropy between attention's own distribution over all visible entries and its softmax.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from deepinfer_jax.model import attention, compressor, engram, hyper, indexer, moe, quant, rope
from deepinfer_jax.model import cache as caches
from deepinfer_jax.model import rows as row_lists
from deepinfer_jax.model.head import head_logits
from deepinfer_jax.model.linear import linear
from deepinfer_jax.model.norm import Prepared, rms_norm
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.schedule import LayerPlan
from pallas_kernels import router

LOW = -1e30


@flax.struct.dataclass
class Shared:
    """What layers hand on: compressed entries and index keys [batch, t, c] of the last source, the
    selection bool [batch, seq, t], the candidate mask bool [batch, seq, t] or None."""

    entries: Any = None
    keys: Any = None
    chosen: Any = None
    pool: Any = None


@flax.struct.dataclass
class Outcome:
    """logits [batch, seq, vocab], taps [rows, targets d], loads (one [experts] a layer: rows an
    expert took), index_loss: of all indexers."""

    logits: Any
    taps: Any
    loads: Any
    index_loss: Any


def through(x: Array, stored: Array) -> Array:
    """`stored` in value, x in gradient."""
    return x + jax.lax.stop_gradient(stored - x)


def whole(x: Array) -> Array:
    """No dropout."""
    return x


def rows_of(setup: Setup, tokens: Int32[Array, "batch seq"]) -> tuple[Rows, caches.Cache]:
    """Rows of whole sequences and the empty rings that the model's functions expect."""
    batch, length = tokens.shape
    held = -(-length // caches.PAGE)
    rows = row_lists.rectangle(
        tokens,
        start=jnp.zeros((batch,), jnp.int32),
        count=jnp.full((batch,), length, jnp.int32),
        slot=jnp.arange(batch, dtype=jnp.int32),
        pages=jnp.arange(batch * held, dtype=jnp.int32).reshape(batch, held),
    )
    return rows, caches.empty(setup.cfg, setup.numerics, slots=batch, pages=1, ring=0)


def forward(
    setup: Setup,
    weights: Any,
    tokens: Int32[Array, "batch seq"],
    *,
    stored: bool,
    drop: Callable[[Array], Array] = whole,
) -> Outcome:
    """All layers. weights: the weights tree with float32 leaves; Engram tables as the rows already
    read, [rows, columns, dim]. stored: caches go through their stored formats. drop: dropout, on
    embeddings, on what the sublayers write and on the head's input."""
    cfg = setup.cfg
    rows, empty = rows_of(setup, tokens)
    streams = hyper.expand(drop(weights.embed[rows.token]), cfg)
    pre = hyper.first_pre(rows.size, cfg)
    shared, taps, loads = Shared(), [], []
    index_loss = jnp.float32(0)
    for plan, layer in zip(cfg.plan, weights.layers, strict=True):
        if plan.engram:
            memory = layer.engram.table.reshape(rows.size, -1)
            streams = engram.add_memory(setup, layer.engram, memory, streams)
        if plan.tap:
            taps.append(jnp.mean(streams, axis=1))
        attend = functools.partial(
            _attention, setup, plan, layer.attn, rows, empty, shared=shared, stored=stored
        )
        streams, pre, (shared, loss), load = block(
            setup, layer, streams, pre, attend, cfg.num_experts_per_tok, drop
        )
        index_loss += loss
        loads.append(load)
    x = drop(hyper.hidden(streams, pre).collapsed)
    logits = head_logits(setup, x, weights.norm, weights.head)
    return Outcome(
        logits.reshape(*tokens.shape, -1), jnp.concatenate(taps, axis=-1), loads, index_loss
    )


def block(
    setup: Setup,
    weights: Any,
    streams: Float[Array, "rows n d"],
    pre: Float[Array, "rows n"],
    attend: Callable[[Array], tuple[Array, Any]],
    taken: int,
    drop: Callable[[Array], Array] = whole,
) -> tuple[Array, Array, Any, Array]:
    """Attention and experts of a layer or a draft stage, each between its mHC mixes.

    pre: the mix that the sublayer before predicted; attend: of the normalised rows, its output in
    parts and anything else; taken: experts a row. Streams and pre after it, what else `attend`
    gave, and rows an expert took."""
    eps = setup.cfg.rms_norm_eps
    hidden = hyper.hidden(streams, pre)
    mix = hyper.mixes(setup, weights.hc_attn, streams, hidden.mean_square)
    parts, more = attend(rms_norm(hidden.collapsed, weights.attn_norm, eps))
    out = hyper.whole(parts, streams.dtype)
    hidden = hyper.hidden(write_back(drop(out), streams, mix), mix.pre)
    after = hyper.mixes(setup, weights.hc_ffn, hidden.streams, hidden.mean_square)
    x = rms_norm(hidden.collapsed, weights.ffn_norm, eps)
    out, load = experts(setup, weights.ffn, x, taken)
    return write_back(drop(out), hidden.streams, after), after.pre, more, load


def write_back(
    out: Float[Array, "rows d"], streams: Float[Array, "rows n d"], mix: hyper.Mixes
) -> Float[Array, "rows n d"]:
    """The streams of hyper.update, one after another (a sum over a short axis does not
    vectorise)."""
    n = streams.shape[1]
    sources = [x[:, 0] for x in jax.lax.split(streams, (1,) * n, axis=1)]
    comb = jax.lax.split(mix.comb.reshape(-1, n * n), (1,) * (n * n), axis=1)
    post = jax.lax.split(mix.post, (1,) * n, axis=1)
    new = []
    for to in range(n):
        total = post[to] * out
        for source in range(n):
            total = total + comb[source * n + to] * sources[source]
        new.append(total)
    return jnp.stack(new, axis=1)


def experts(
    setup: Setup, weights: Any, x: Float[Array, "rows d"], taken: int
) -> tuple[Float[Array, "rows d"], Float[Array, " experts"]]:
    """The MoE sublayer with all experts computed, and how many rows each expert took."""
    cfg = setup.cfg
    count, _, inner, width = weights.w13.shape
    score = jnp.sqrt(jax.nn.softplus(x @ weights.gate.T))
    _, best = jax.lax.top_k(jax.lax.stop_gradient(score) + weights.bias[None], taken)
    mask = jnp.sum(jax.nn.one_hot(best, count), axis=1)
    kept = score * mask
    share = kept / (jnp.sum(kept, axis=-1, keepdims=True) + jnp.float32(router.SUM_EPS))
    share = share * jnp.float32(cfg.routed_scaling_factor)
    both = (x @ weights.w13.reshape(-1, width).T).reshape(-1, count, 2, inner)
    limit = jnp.float32(cfg.swiglu_limit)
    hidden = jax.nn.silu(jnp.minimum(both[:, :, 0], limit)) * jnp.clip(both[:, :, 1], -limit, limit)
    hidden = (hidden * share[:, :, None]).reshape(-1, count * inner)
    down = weights.w2.transpose(0, 2, 1).reshape(-1, width)
    return hidden @ down + moe.shared_expert(setup, weights, x), jnp.sum(mask, axis=0)


def _attention(
    setup: Setup,
    plan: LayerPlan,
    weights: Any,
    rows: Rows,
    empty: caches.Cache,
    x: Float[Array, "rows d"],
    shared: Shared,
    stored: bool,
) -> tuple[Float[Array, "parts rows d"], tuple[Shared, Float[Array, ""]]]:
    cfg = setup.cfg
    compressed = plan.ratio > 0
    batch, seq = rows.groups, rows.width
    low, query = attention.queries(setup, weights, rows, x, compressed=compressed)
    kv = window_kv(setup, weights, rows, x, compressed=compressed, stored=stored)
    if plan.mode == "full":
        shared = _produce(setup, plan, weights, rows, empty, x, stored)
    score = None
    number = jnp.arange(seq // max(plan.ratio, 1), dtype=jnp.int32)
    place = jnp.arange(seq, dtype=jnp.int32)
    visible = (number[None, :] < ((place + 1) // max(plan.ratio, 1))[:, None])[None]
    if weights.indexer is not None:
        score = _scores(setup, weights.indexer, rows, x, low, shared, stored)
        shared = _select(setup, plan, score, visible, shared)
    query = query.reshape(batch, seq, *query.shape[1:])
    out, ranked = dense_attention(
        query,
        kv.reshape(batch, seq, -1),
        shared.entries if compressed else None,
        shared.chosen if compressed else None,
        weights.sink,
        window=cfg.sliding_window,
        visible=visible if score is not None else None,
    )
    loss = jnp.float32(0)
    if score is not None and ranked is not None:
        likely = jax.nn.log_softmax(jnp.where(visible, score, LOW), axis=-1)
        some = jnp.any(visible, axis=-1)
        loss = -jnp.sum(jnp.where(visible, ranked * likely, 0.0)) / (
            batch * jnp.sum(some, dtype=jnp.float32)
        )
    out = out.reshape(rows.size, *out.shape[2:])
    return attention.output(setup, weights, rows, out, compressed=compressed), (shared, loss)


def window_kv(
    setup: Setup,
    weights: Any,
    rows: Rows,
    x: Float[Array, "rows d"],
    *,
    compressed: bool,
    stored: bool,
) -> Float[Array, "rows c"]:
    """The rows' window KV, through its stored format if asked."""
    kv: Any = attention.window_rows(setup, weights, rows, x, compressed=compressed)
    if not stored:
        return kv
    near: Any = quant.load_window(quant.store_window(kv, True), kv.dtype)
    return through(kv, near)


def dense_attention(
    query: Float[Array, "b s h c"],
    kv: Float[Array, "b s c"],
    entries: Float[Array, "b t c"] | None,
    chosen: Bool[Array, "b s t"] | None,
    sink: Float[Array, " h"],
    *,
    window: int,
    visible: Bool[Array, "one s t"] | None,
) -> tuple[Float[Array, "b s h c"], Float[Array, "b s t"] | None]:
    """Window and chosen entries in one softmax with the sink; window keys in bands of two blocks.

    Also attention's own distribution over all visible entries, mean over the heads, without
    gradient, if `visible` is given.
    """
    b, s, h, c = query.shape
    blocks = -(-s // window)
    pad = blocks * window - s
    scale = jnp.float32(c**-0.5)
    q = jnp.pad(query, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(b, blocks, window * h, c)
    k = jnp.pad(kv, ((0, 0), (window, pad), (0, 0))).reshape(b, blocks + 1, window, c)
    k = jnp.concatenate([k[:, :-1], k[:, 1:]], axis=2)
    near = jnp.einsum("bnqc,bnkc->bnqk", q, k).reshape(b, blocks, window, h, 2 * window) * scale
    i, j = jnp.arange(window)[:, None], jnp.arange(2 * window)[None, :]
    inside = (j > i) & (j <= i + window)
    first = (jnp.arange(blocks) > 0)[:, None, None] | (j >= window)[None]
    near = jnp.where((inside[None] & first)[None, :, :, None], near, LOW)
    near = near.reshape(b, blocks * window, h, 2 * window)[:, :s]
    edge = jnp.broadcast_to(sink[None, None, :, None], (b, s, h, 1))
    parts, ranked = [near, edge], None
    if entries is not None and chosen is not None:
        far = jnp.einsum("bqc,btc->bqt", query.reshape(b, s * h, c), entries) * scale
        far = far.reshape(b, s, h, -1)
        if visible is not None:
            seen = jax.lax.stop_gradient(jnp.where(visible[:, :, None], far, LOW))
            ranked = jnp.mean(jax.nn.softmax(seen, axis=-1), axis=2)
        parts.append(jnp.where(chosen[:, :, None], far, LOW))
    p = jax.nn.softmax(jnp.concatenate(parts, axis=-1), axis=-1)
    pw = jnp.pad(p[..., : 2 * window], ((0, 0), (0, pad), (0, 0), (0, 0)))
    out = jnp.einsum("bnqk,bnkc->bnqc", pw.reshape(b, blocks, window * h, 2 * window), k)
    out = out.reshape(b, blocks * window, h, c)[:, :s]
    if entries is not None and chosen is not None:
        pf = p[..., 2 * window + 1 :].reshape(b, s * h, -1)
        out = out + jnp.einsum("bqt,btc->bqc", pf, entries).reshape(b, s, h, c)
    return out, ranked


def _produce(
    setup: Setup,
    plan: LayerPlan,
    weights: Any,
    rows: Rows,
    empty: caches.Cache,
    x: Float[Array, "rows d"],
    stored: bool,
) -> Shared:
    """A source's entries and index keys; keys learn from the ranking only."""
    cfg, ratio = setup.cfg, plan.ratio
    batch, count = rows.groups, rows.width // ratio
    ring = empty.open[cfg.kv_source_layer_ids.index(plan.index)]
    latent, _ = compressor.compress(setup, weights.compressor, rows, x, ring)
    latent = latent.reshape(batch, count, ratio, -1)[:, :, -1].reshape(batch * count, -1)
    start = jnp.tile(jnp.arange(count, dtype=jnp.int32) * ratio, batch)
    key = indexer.key(setup, weights.indexer, jax.lax.stop_gradient(latent), start)
    entry = rope.rotate(latent, start, rope.inverse_frequencies(cfg, compressed=True))
    if stored:
        key = through(key, quant.load_index(quant.store_index(key, True), key.dtype))
        entry = through(entry, quant.load_entry(quant.store_entry(entry, True), entry.dtype))
    return Shared(entry.reshape(batch, count, -1), key.reshape(batch, count, -1))


def _scores(
    setup: Setup,
    weights: Any,
    rows: Rows,
    x: Float[Array, "rows d"],
    low: Prepared,
    shared: Shared,
    stored: bool,
) -> Float[Array, "batch seq t"]:
    cfg = setup.cfg
    heads, dim = cfg.index_n_heads, cfg.index_head_dim
    query = linear(setup, jax.lax.stop_gradient(low), weights.wq_b).reshape(-1, heads, dim)
    query = rope.rotate(query, rows.position, rope.inverse_frequencies(cfg, compressed=True))
    if stored:
        query = through(query, quant.load_index(quant.store_index(query, True), query.dtype))
    weight = linear(setup, jax.lax.stop_gradient(x), weights.weights_proj)
    weight = weight * jnp.float32(dim**-0.5 * heads**-0.5)
    batch, seq = rows.groups, rows.width
    dots = jnp.einsum("bqd,btd->bqt", query.reshape(batch, seq * heads, dim), shared.keys)
    dots = jax.nn.relu(dots).reshape(batch, seq, heads, -1)
    return jnp.sum(dots * weight.reshape(batch, seq, heads, 1), axis=2)


def _select(
    setup: Setup,
    plan: LayerPlan,
    score: Float[Array, "batch seq t"],
    visible: Bool[Array, "one seq t"],
    shared: Shared,
) -> Shared:
    """The best entries as a mask, and the candidate pool where this layer makes it."""
    cfg = setup.cfg
    score = jax.lax.stop_gradient(score)
    score = jnp.where(visible, score, -jnp.inf)
    entries = score.shape[-1]
    pool = shared.pool
    if plan.candidate_source:
        size = cfg.candidate_block_size
        blocks = jnp.pad(score, ((0, 0), (0, 0), (0, -entries % size)), constant_values=-jnp.inf)
        best = jnp.max(blocks.reshape(*score.shape[:2], -1, size), axis=-1)
        number = jnp.arange(best.shape[-1])
        newest = jnp.arange(score.shape[1]) // size  # ratio 1: entries visible to p are 0..p
        best = jnp.where(number[None, None] == newest[None, :, None], jnp.inf, best)
        keep = best_of(best, min(cfg.candidate_topk_blocks, best.shape[-1]))
        pool = jnp.repeat(keep & (best > -jnp.inf), size, axis=-1)[..., :entries]
    elif plan.candidate_limited and pool is not None:
        score = jnp.where(pool, score, -jnp.inf)
    chosen = best_of(score, min(cfg.index_topk, entries)) & (score > -jnp.inf)
    return dataclasses.replace(shared, chosen=chosen, pool=pool)


def best_of(score: Float[Array, "... t"], k: int) -> Bool[Array, "... t"]:
    """Which scores are among the k best; of equal ones the lowest places, as `index_topk` does."""
    if k >= score.shape[-1]:
        return jnp.ones(score.shape, bool)
    border = jnp.sort(score, axis=-1)[..., -k, None]
    above, equal = score > border, score == border
    left = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= left))
