"""DeepSeek-V4.1 from tokens to logits. Read this file first.

  embed -> n equal streams                                   hyper.py
  encoder half: layers below the first of ratio 1            block.py: attention.py + moe.py,
                                                             wrapped in mHC
     Engram at its layers, before the block                  engram.py, engram_hash.py
     KV sources write compressed entries and index keys      compressor.py, indexer.py
  decoder half: reads the last source's entries only
     taps at the target layers feed the drafter              dspark.py
  collapse -> norm -> head                                   head.py

Everything runs on a flat list of rows (rows.py) against a cache (cache.py); whole sequences,
prefill chunks, decode and verification are the same functions on different rows. `trunk` also
implements bounded replay of prompts: in the decoder half only the last rows of a prompt are needed,
because what lies behind is read from one source's compressed entries (V4.1 report 3.2). The
reference runs every row through every layer; so does `forward`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import (
    attention,
    context,
    dspark,
    engram,
    engram_hash,
    hyper,
    parallel,
    vision,
)
from deepinfer_jax.model import block as blocks
from deepinfer_jax.model import cache as caches
from deepinfer_jax.model import rows as row_lists
from deepinfer_jax.model.block import BlockWeights
from deepinfer_jax.model.cache import PAGE, Cache
from deepinfer_jax.model.capture import ROW_NAMES, Capture
from deepinfer_jax.model.head import embedded, head_logits
from deepinfer_jax.model.hyper import Hidden
from deepinfer_jax.model.indexer import Selection
from deepinfer_jax.model.norm import Prepared, normed, rms_norm
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.schedule import LayerPlan
from deepinfer_jax.spec import Leaf, Param, norm, plain


@flax.struct.dataclass
class Weights:
    """embed, head [vocab, d], norm [d], image vectors [d]; bfloat16.

    draft: DraftWeights, vision: VisionWeights; None where the checkpoint has none.
    token_map: int32 [vocab], token id -> n-gram class; made from the tokenizer, not a tensor of the
    checkpoint.
    """

    embed: Leaf
    head: Leaf
    norm: Leaf
    image_start: Leaf
    image_end: Leaf
    image_newline: Leaf
    layers: tuple[BlockWeights, ...]
    draft: Leaf
    vision: Leaf
    token_map: Leaf = None


@flax.struct.dataclass
class Trunk:
    """hidden, rows: state after the last layer and the rows it belongs to; cache; taps [rows,
    targets d] or None."""

    hidden: Hidden
    rows: Rows
    cache: Cache
    taps: Leaf


def abstract(cfg: ModelConfig) -> Weights:
    """Every tensor of the checkpoint, declared."""
    width = cfg.hidden_size

    def image_vector() -> Leaf | None:
        return plain(width, axes=("embed",)) if cfg.vision is not None else None

    return Weights(
        embed=plain(cfg.vocab_size, width, axes=("vocab", "embed"), scale=1.0),
        head=plain(cfg.vocab_size, width, axes=("vocab", "embed")),
        norm=norm(width, "embed"),
        image_start=image_vector(),
        image_end=image_vector(),
        image_newline=image_vector(),
        layers=tuple(blocks.abstract(cfg, plan, cfg.n_routed_experts) for plan in cfg.plan),
        draft=dspark.abstract(cfg),
        vision=vision.abstract(cfg),
    )


def forward(
    setup: Setup,
    weights: Weights,
    tokens: Int32[Array, "batch seq"],
    lengths: Int32[Array, " batch"],
    capture: Sequence[str] = (),
) -> tuple[Float32[Array, "batch seq vocab"], dict[str, dict[int, Array]]]:
    """Logits of whole sequences and the captured intermediates ([batch, seq, ...], those without
    an entry a row [batch, entries, ...]).

    Places at or past a sequence's length are padding: they influence nothing and their logits mean
    nothing. Under a layout sequences are spread over the shards of "slots".
    """

    length = tokens.shape[1]

    def local(weights: Weights, tokens: Array, lengths: Array) -> tuple[Array, Any]:
        recorder = Capture(capture)
        rows, cache = whole_sequences(setup, tokens, lengths, ring=0)
        out = trunk(setup, weights, rows, cache, recorder)
        x = collapse(setup, weights, out.hidden, recorder)
        logits = head_logits(setup, x, weights.norm, weights.head)
        recorder.add("logits", setup.cfg.num_hidden_layers, logits)

        def unpack(value: Array) -> Array:
            value = context.together(rows, value)
            return value.reshape(*tokens.shape, *value.shape[1:])[:, :length]

        found = {
            name: jax.tree.map(unpack, layers) if name in ROW_NAMES else layers
            for name, layers in recorder.found.items()
        }
        return unpack(logits), found

    return _over_sequences(setup, local, weights, tokens, lengths)


def draft(
    setup: Setup,
    weights: Weights,
    tokens: Int32[Array, "batch seq"],
    lengths: Int32[Array, " batch"],
) -> tuple[
    Int32[Array, "batch block"], Float32[Array, "batch block vocab"], Float32[Array, "batch block"]
]:
    """Greedy DSpark block after each sequence's own greedy next token: ids, logits, confidences
    (logits)."""
    cfg = setup.cfg

    def local(weights: Weights, tokens: Array, lengths: Array) -> tuple[Array, Array, Array]:
        recorder = Capture()
        rows, cache = whole_sequences(setup, tokens, lengths, ring=caches.ring_size(cfg))
        out = trunk(setup, weights, rows, cache, recorder)
        cache = dspark.remember(setup, weights.draft, rows, out.cache, out.taps)
        x = collapse(setup, weights, out.hidden, recorder)
        x = context.fetch(rows, x, rows.everyone.last())
        anchor = jnp.argmax(head_logits(setup, x, weights.norm, weights.head), axis=-1)
        anchor = anchor.astype(jnp.int32)
        noise = jnp.full((rows.groups, cfg.dspark_block_size), cfg.dspark_noise_token_id, jnp.int32)
        block_rows = row_lists.rectangle(
            noise.at[:, 0].set(anchor),
            start=rows.start + lengths,
            count=jnp.full_like(lengths, cfg.dspark_block_size),
            slot=rows.slot,
            pages=rows.pages,
        )
        state = dspark.draft_block(
            setup, weights.draft, weights.embed, weights.head, block_rows, cache, recorder
        )
        return dspark.draft_greedy(setup, weights.draft, state, anchor)

    return _over_sequences(setup, local, weights, tokens, lengths)


def weight_specs(setup: Setup, weights: Weights) -> Weights:
    """PartitionSpecs of a weights tree under the layout; parts it leaves out are left out."""
    declared = abstract(setup.cfg)
    parts: dict[str, Any] = {
        name: getattr(declared, name) if getattr(weights, name) is not None else None
        for name in ("draft", "vision", "image_start", "image_end", "image_newline")
    }
    if weights.token_map is not None:
        parts["token_map"] = Param(weights.token_map.shape, "int32", (None,))
    parts["layers"] = tuple(map(blocks.with_placement, declared.layers, weights.layers))
    return parallel.specs(
        parallel.placed(dataclasses.replace(declared, **parts), setup.layout), setup.layout
    )


def _over_sequences(
    setup: Setup,
    local: Callable[..., Any],
    weights: Weights,
    tokens: Int32[Array, "batch seq"],
    lengths: Int32[Array, " batch"],
) -> Any:
    """`local` over each shard's sequences; empty ones pad the batch, empty places the length."""
    parallel.check(setup.layout, setup.cfg, setup.phase)
    batch = tokens.shape[0]
    more = -batch % setup.layout.ways("slots", setup.phase)
    longer = -tokens.shape[1] % context.multiple(setup.layout, setup.phase)
    tokens, lengths = jnp.pad(tokens, ((0, more), (0, longer))), jnp.pad(lengths, (0, more))
    own = setup.layout.spec(("slots",), lengths.shape, "sequences", setup.phase)
    specs = (weight_specs(setup, weights), own, own)
    out = parallel.spmd(setup.layout, local, specs, own)(weights, tokens, lengths)
    return jax.tree.map(lambda leaf: leaf[:batch], out) if more else out


def whole_sequences(
    setup: Setup, tokens: Int32[Array, "batch seq"], lengths: Int32[Array, " batch"], *, ring: int
) -> tuple[Rows, Cache]:
    """Rows of sequences from position 0 and a fresh cache for them, one slot and enough pages
    each."""
    batch, length = tokens.shape
    held = -(-length // PAGE)
    cache = caches.empty(setup.cfg, setup.numerics, slots=batch, pages=batch * held, ring=ring)
    rows = row_lists.rectangle(
        tokens,
        start=jnp.zeros((batch,), jnp.int32),
        count=lengths,
        slot=jnp.arange(batch, dtype=jnp.int32),
        pages=jnp.arange(batch * held, dtype=jnp.int32).reshape(batch, held),
    )
    return context.split(rows, setup.layout, setup.phase), cache


def trunk(
    setup: Setup,
    weights: Weights,
    rows: Rows,
    cache: Cache,
    capture: Capture,
    *,
    keep: int | None = None,
    routes: Int32[Array, "rows layers k"] | None = None,
) -> Trunk:
    """All layers. With `keep`, rows below `rows.floor` end after the last KV source's entries are
    written.

    keep: 0, no row of this call goes further; else at most `keep` rows a group do (rows must be a
    rectangle). routes: experts that replace a router's choice, -1 where it decides (moe.py).
    """
    cfg = setup.cfg
    hidden = hyper.first(embedded(setup, weights.embed, rows.token), cfg)
    table_rows: dict[int, Int32[Array, "rows columns"]] = {}
    if cfg.engram_layer_ids:
        table_rows, cache = engram_hash.table_rows(cfg, weights.token_map, rows, cache)
    taps: list[Float[Array, "rows d"]] = []
    selection: Selection | None = None
    border = cfg.decoder_start
    for plan, layer in zip(cfg.plan, weights.layers, strict=True):
        removed = keep is not None and plan.index >= border
        if keep is not None and plan.index == border:
            cache = _produce_only(setup, plan, layer, hidden, rows, cache, capture)
            if keep == 0:
                break
            kept, source = row_lists.suffix(rows.everyone, keep)
            if routes is not None:
                routes = context.fetch(rows, routes, source)
            rows, hidden = kept, context.fetch(rows, hidden, source)
        with jax.named_scope(f"layer_{plan.index}"):
            capture.add("streams", plan.index, hidden.streams)
            if plan.engram:
                capture.add("engram_rows", plan.index, table_rows[plan.index])
                streams = engram.engram(setup, layer.engram, table_rows[plan.index], hidden.streams)
                hidden = hyper.hidden(streams, hidden.pre)
                capture.add("after_engram", plan.index, streams)
            if plan.tap:
                taps.append(
                    jnp.mean(hidden.streams.astype(jnp.float32), axis=1).astype(setup.dtype)
                )
                capture.add("taps", plan.index, taps[-1])
            hidden, (cache, selection) = _layer(
                setup,
                plan,
                layer,
                hidden,
                rows,
                cache,
                selection,
                capture,
                produced=removed,
                routes=None if routes is None else routes[:, plan.index],
            )
    capture.add("streams", cfg.num_hidden_layers, hidden.streams)
    return Trunk(hidden, rows, cache, jnp.concatenate(taps, axis=-1) if taps else None)


def collapse(
    setup: Setup, weights: Weights, hidden: Hidden, capture: Capture
) -> Float[Array, "rows d"]:
    """The head's input before its norm: streams collapsed with the last sublayer's pre."""
    x = hidden.collapsed
    capture.add("collapsed", setup.cfg.num_hidden_layers, x)
    if capture.wants("normed"):
        rows = rms_norm(x, weights.norm, setup.cfg.rms_norm_eps)
        capture.add("normed", setup.cfg.num_hidden_layers, rows)
    return x


def _layer(
    setup: Setup,
    plan: LayerPlan,
    layer: BlockWeights,
    hidden: Hidden,
    rows: Rows,
    cache: Cache,
    selection: Selection | None,
    capture: Capture,
    *,
    produced: bool,
    routes: Int32[Array, "rows k"] | None = None,
) -> tuple[Hidden, tuple[Cache, Selection | None]]:
    """One backbone block; `produced`: a source's entries are already written."""

    def attend(x: Prepared) -> tuple[Array, tuple[Cache, Selection | None]]:
        out, after, chosen = attention.attention(
            setup, plan, layer.attn, rows, cache, x, selection, capture, produced=produced
        )
        return out, (after, chosen)

    return blocks.block(
        setup,
        layer,
        hidden,
        rows.valid,
        attend,
        layer=plan.index,
        experts_per_token=setup.cfg.num_experts_per_tok,
        capture=capture,
        routes=routes,
    )


def _produce_only(
    setup: Setup,
    plan: LayerPlan,
    layer: BlockWeights,
    hidden: Hidden,
    rows: Rows,
    cache: Cache,
    capture: Capture,
) -> Cache:
    """The border layer's compressed entries and index keys for every row, and nothing else of
    it."""
    x = normed(setup, hidden.collapsed, layer.attn_norm)
    return attention.produce(setup, plan, layer.attn, rows, cache, x, capture)
