"""DSpark: the block drafter (V4.1 report 2.6; reference DSparkBlock, DSparkMarkovHead,
forward_spec).

Context: main_x = RMSNorm(main_proj concat(taps)), where a tap is the mean over the streams at the
entry of a target layer. Each stage keeps its own window ring of kv_norm(wkv main_x), rotated
without YaRN, for every token the target has processed. Draft, with t the last such token and a the
token sampled after it: the rows [a, noise, noise, ...] at positions t + 1 .. t + block go through
the stages; each row attends to the last window of context and to all rows of the block (not
causal). Row i predicts position t + 2 + i:
  logits_i = head(norm(x_i)) + markov_head(markov_embed[previous token]),   confidence_i = proj [x_i
                                                                            ; embed]
where x_i is the collapsed, un-normalised state; the previous token is a for row 0, then the drafted
ones.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import attention, hyper, parallel
from deepinfer_jax.model import block as blocks
from deepinfer_jax.model import cache as caches
from deepinfer_jax.model.block import BlockWeights
from deepinfer_jax.model.cache import Cache
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.head import embedded, head_logits
from deepinfer_jax.model.linear import linear, linear_normed
from deepinfer_jax.model.norm import Prepared
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.spec import Leaf, dense, norm, plain


@flax.struct.dataclass
class DraftWeights:
    """main_proj [d, targets d] FP8, main_norm [d], stages, norm [d], markov_embed and markov_head
    [vocab, rank], confidence [1, d + rank]; bfloat16 unless said."""

    main_proj: Leaf
    main_norm: Leaf
    stages: tuple[BlockWeights, ...]
    norm: Leaf
    markov_embed: Leaf
    markov_head: Leaf
    confidence: Leaf


@flax.struct.dataclass
class DraftBlock:
    """State of the block rows after the stages: base logits f32 [groups, block, vocab], x [groups,
    block, d]."""

    base: Leaf
    x: Leaf


def abstract(cfg: ModelConfig) -> DraftWeights | None:
    """The declared weights, or None for a checkpoint without a drafter."""
    if not cfg.has_draft:
        return None
    width, rank = cfg.hidden_size, cfg.dspark_markov_rank
    return DraftWeights(
        main_proj=dense(
            width,
            len(cfg.dspark_target_layer_ids) * width,
            ("embed", None),
            block=cfg.weight_block_size,
            dtype=cfg.dense_dtype,
        ),
        main_norm=norm(width, "embed"),
        stages=tuple(
            blocks.abstract(cfg, plan, cfg.dspark_n_routed_experts) for plan in cfg.draft_plan
        ),
        norm=norm(width, "embed"),
        markov_embed=plain(cfg.vocab_size, rank, axes=("vocab", None)),
        markov_head=plain(cfg.vocab_size, rank, axes=("vocab", None)),
        confidence=plain(1, width + rank, axes=(None, None)),
    )


def remember(
    setup: Setup,
    weights: DraftWeights,
    rows: Rows,
    cache: Cache,
    taps: Float[Array, "rows targets_d"],
) -> Cache:
    """Writes the context of the processed rows into the draft rings; rows that are not valid write
    nothing."""
    with jax.named_scope("dspark_context"):
        main = linear_normed(setup, taps, weights.main_proj, weights.main_norm)
        rings = tuple(
            caches.write_ring(
                ring, attention.window_rows(setup, stage.attn, rows, main, compressed=False), rows
            )
            for ring, stage in zip(cache.draft, weights.stages, strict=True)
        )
        return dataclasses.replace(cache, draft=rings)


def draft_block(
    setup: Setup,
    weights: DraftWeights,
    embed: Float[Array, "vocab d"],
    head: Float[Array, "vocab d"],
    rows: Rows,
    cache: Cache,
    capture: Capture,
) -> DraftBlock:
    """Runs the stages on a rectangle of block rows: place 0 holds the anchor token, the others the
    noise token."""
    with jax.named_scope("dspark"):
        cfg = setup.cfg
        hidden = hyper.first(embedded(setup, embed, rows.token), cfg)
        for plan, stage in zip(cfg.draft_plan, weights.stages, strict=True):
            ring = cache.draft[plan.index]
            hidden, _ = blocks.block(
                setup,
                stage,
                hidden,
                rows.valid,
                lambda x, stage=stage, ring=ring: (_attend(setup, stage, rows, ring, x), None),
                layer=cfg.num_hidden_layers + plan.index,
                experts_per_token=cfg.dspark_num_experts_per_tok,
                capture=capture,
            )
        x = hidden.collapsed
        base = head_logits(setup, x, weights.norm, head)
        return DraftBlock(
            base.reshape(rows.groups, rows.width, -1), x.reshape(rows.groups, rows.width, -1)
        )


def correct(
    setup: Setup,
    weights: DraftWeights,
    base: Float32[Array, "groups vocab"],
    x: Float[Array, "groups d"],
    previous: Int32[Array, " groups"],
) -> tuple[Float32[Array, "groups vocab"], Float32[Array, " groups"]]:
    """Logits of one draft row given the token before it, and the row's confidence (a logit)."""
    with jax.named_scope("dspark_markov"):
        # Not widened: products of bfloat16 numbers are exact in the sum's float32.
        before = parallel.take(weights.markov_embed, previous, setup.layout, "vocab", setup.phase)
        before = before.astype(x.dtype)
        bias = parallel.columns(
            lambda rows: linear(setup, rows, weights.markov_head, dtype=jnp.dtype(jnp.float32)),
            before,
            setup.layout,
            "vocab",
            setup.phase,
        )
        features = jnp.concatenate([x, before], axis=-1)
        confidence = linear(setup, features, weights.confidence, dtype=jnp.dtype(jnp.float32))
        return base + bias, confidence[:, 0]


def draft_greedy(
    setup: Setup, weights: DraftWeights, block: DraftBlock, anchor: Int32[Array, " groups"]
) -> tuple[
    Int32[Array, "groups block"],
    Float32[Array, "groups block vocab"],
    Float32[Array, "groups block"],
]:
    """Token ids, logits and confidences of a block drafted by argmax."""
    previous, ids, logits, confidences = anchor, [], [], []
    for place in range(block.base.shape[1]):
        row, confidence = correct(setup, weights, block.base[:, place], block.x[:, place], previous)
        previous = jnp.argmax(row, axis=-1).astype(jnp.int32)
        ids.append(previous)
        logits.append(row)
        confidences.append(confidence)
    return jnp.stack(ids, 1), jnp.stack(logits, 1), jnp.stack(confidences, 1)


def _attend(
    setup: Setup, stage: BlockWeights, rows: Rows, ring: Leaf, x: Prepared
) -> Float[Array, "parts rows d"]:
    """Attention of block rows over the context ring and over each other, its output in parts."""
    cfg = setup.cfg
    _, query = attention.queries(setup, stage.attn, rows, x, compressed=False)
    own = attention.window_rows(setup, stage.attn, rows, x, compressed=False)
    context = (rows.start - 1)[rows.group]
    oldest = jnp.maximum(context - cfg.sliding_window + 1, 0)
    position = oldest[:, None] + jnp.arange(cfg.sliding_window, dtype=jnp.int32)[None, :]
    position = jnp.where((position <= context[:, None]) & rows.valid[:, None], position, -1)
    source, past, count = caches.join(ring, own, rows, position)
    place = jnp.arange(rows.width, dtype=jnp.int32)[None, :]
    inside = (place < rows.count[rows.group][:, None]) & rows.valid[:, None]
    beside = jnp.where(inside, count + rows.first[rows.group][:, None] + place, -1)
    index = jnp.concatenate([past, beside], axis=1)
    out = attention.core(setup, stage.attn, query, source, index, None, None)
    return attention.output(setup, stage.attn, rows, out, compressed=False)
