"""Latent attention over a sliding window and selected compressed entries (V4.1 report 2.2;
reference Attention).

q  = wq_b qr, qr = RMSNorm(wq_a x); kv = RMSNorm(wkv x), one vector for all heads that is both key
   and value.
The last channels of q and kv are rotated at their own position, kv goes through the window format,
and
  o_h = sum_t P_t kv_t / (sum_t P_t + exp(sink_h - max)),   P = exp(scale q_h . kv_t - max)
runs over the last `sliding_window` positions and the entries that the layer's index source selected
(no de-duplication). o is rotated back at the query's position, so values are relative, and
projected in two low-rank steps:
each group of heads through its own part of wo_a, then all of them through wo_b.

A source layer (`full`) first writes its compressed entries and index keys; that part alone is
`produce`, which bounded replay runs for prompt rows that go no further.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import cache as caches
from deepinfer_jax.model import compressor, indexer, quant, rope
from deepinfer_jax.model.cache import Cache
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.compile import shared
from deepinfer_jax.model.indexer import Selection
from deepinfer_jax.model.linear import linear, linear_normed, linear_parts, linear_total
from deepinfer_jax.model.norm import Prepared, rms_norm
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.schedule import LayerPlan
from deepinfer_jax.spec import Leaf, Quantized, dense, norm, plain
from pallas_kernels import mla_attention, row_matmul


@flax.struct.dataclass
class AttentionWeights:
    """wq_a [q_rank, d], wq_b [heads c, q_rank], wkv [c, d], wo_a [groups o_rank, heads/groups c],
    wo_b [d, groups o_rank].

    Dense matrices FP8; q_norm [q_rank], kv_norm [c] bfloat16; sink [heads] float32.
    compressor, indexer: CompressorWeights, IndexerWeights, or None by the layer's mode.
    """

    wq_a: Leaf
    q_norm: Leaf
    wq_b: Leaf
    wkv: Leaf
    kv_norm: Leaf
    wo_a: Leaf
    wo_b: Leaf
    sink: Leaf
    compressor: Leaf
    indexer: Leaf


def abstract(cfg: ModelConfig, plan: LayerPlan) -> AttentionWeights:
    """The declared weights of one layer."""

    def matrix(rows: int, cols: int, *axes: str | None) -> Leaf:
        return dense(rows, cols, axes, block=cfg.weight_block_size, dtype=cfg.dense_dtype)

    width, rank = cfg.hidden_size, cfg.q_lora_rank
    heads, grouped = cfg.num_attention_heads * cfg.head_dim, cfg.o_groups * cfg.o_lora_rank
    return AttentionWeights(
        wq_a=matrix(rank, width, "q_rank", "embed"),
        q_norm=norm(rank, "q_rank"),
        wq_b=matrix(heads, rank, "heads", "q_rank"),
        wkv=matrix(cfg.head_dim, width, "kv", "embed"),
        kv_norm=norm(cfg.head_dim, "kv"),
        wo_a=matrix(grouped, heads // cfg.o_groups, "o_group", None),
        wo_b=matrix(width, grouped, "embed", "o_group"),
        sink=plain(cfg.num_attention_heads, axes=("heads",), dtype="float32", scale=1.0),
        compressor=compressor.abstract(cfg, plan.ratio) if plan.mode == "full" else None,
        indexer=indexer.abstract(cfg, plan.mode == "full")
        if plan.mode in ("full", "reindex")
        else None,
    )


def attention(
    setup: Setup,
    plan: LayerPlan,
    weights: AttentionWeights,
    rows: Rows,
    cache: Cache,
    x: Prepared,
    selection: Selection | None,
    capture: Capture,
    *,
    produced: bool = False,
) -> tuple[Float[Array, "parts rows d"], Cache, Selection | None]:
    """One attention sublayer on normed rows x; `produced`: the compressed entries are already in
    the cache."""
    with jax.named_scope("attention"):
        latent_query, query = queries(setup, weights, rows, x, compressed=plan.ratio > 0)
        window = window_rows(setup, weights, rows, x, compressed=plan.ratio > 0)
        if plan.mode == "full" and not produced:
            cache = produce(setup, plan, weights, rows, cache, x, capture)
        if weights.indexer is not None:
            selection = indexer.select(
                setup, plan, weights.indexer, rows, cache, x, latent_query, selection, capture
            )
        ring = cache.window[plan.index]
        seen = setup.cfg.sliding_window
        if jax.tree.leaves(ring)[0].shape[1] == 0:
            seen = min(seen, rows.everyone.width)
        position = window_positions(rows, seen, floor=plan.half == "decoder")
        source, index, ring = caches.recall(
            ring, window, rows, position, lookback=setup.cfg.sliding_window - 1
        )
        cache = dataclasses.replace(cache, window=_replaced(cache.window, plan.index, ring))
        selected = selected_index = None
        if plan.ratio > 0 and selection is not None:
            store = cache.entries[setup.cfg.kv_source_layer_ids.index(plan.kv_source)]
            selected = caches.flat_pool(store)
            selected_index = caches.entry_index(
                rows.pages, rows.group, selection.entries, jax.tree.leaves(store)[0].shape[1]
            )
        out = core(setup, weights, query, source, index, selected, selected_index)
        return output(setup, weights, rows, out, compressed=plan.ratio > 0), cache, selection


@shared("setup", "compressed")
def queries(
    setup: Setup,
    weights: AttentionWeights,
    rows: Rows,
    x: Float[Array, "rows d"] | Prepared,
    *,
    compressed: bool,
) -> tuple[Prepared, Float[Array, "rows heads c"]]:
    """The normed low-rank query (the indexer reads it too) and the rotated heads."""
    cfg = setup.cfg
    low = linear_normed(setup, x, weights.wq_a, weights.q_norm)
    heads = linear(setup, low, weights.wq_b).reshape(rows.position.shape[0], -1, cfg.head_dim)
    return low, rope.rotate(heads, rows.position, rope.inverse_frequencies(cfg, compressed))


@shared("setup", "compressed")
def window_rows(
    setup: Setup,
    weights: AttentionWeights,
    rows: Rows,
    x: Float[Array, "rows d"] | Prepared,
    *,
    compressed: bool,
) -> quant.Stored:
    """The rows' own window KV, as stored."""
    cfg = setup.cfg
    kv = rms_norm(linear(setup, x, weights.wkv), weights.kv_norm, cfg.rms_norm_eps)
    kv = rope.rotate(kv, rows.position, rope.inverse_frequencies(cfg, compressed))
    return quant.store_window(kv, setup.numerics.cache_qdq)


def window_positions(rows: Rows, window: int, *, floor: bool) -> Int32[Array, "rows window"]:
    """Positions a row's window covers, oldest first, -1 after the row's own; `floor` applies the
    replay border of the decoder half, none looks before `Rows.begin`. A whole sequence shorter than
    the window has that many slots only, as in the reference: slots are attended in blocks, so their
    number shows in bfloat16 rounding.
    """
    least = (jnp.maximum(rows.floor, rows.begin) if floor else rows.begin)[rows.group]
    oldest = jnp.maximum(jnp.maximum(rows.position - window + 1, 0), least)
    position = oldest[:, None] + jnp.arange(window, dtype=jnp.int32)[None, :]
    seen = (position <= rows.position[:, None]) & rows.valid[:, None]
    return jnp.where(seen, position, -1)


def produce(
    setup: Setup,
    plan: LayerPlan,
    weights: AttentionWeights,
    rows: Rows,
    cache: Cache,
    x: Prepared,
    capture: Capture,
) -> Cache:
    """Writes the compressed entries and index keys that the rows complete."""
    with jax.named_scope("compressed_kv"):
        cfg, numerics = setup.cfg, setup.numerics
        source = cfg.kv_source_layer_ids.index(plan.index)
        latent, ring = compressor.compress(setup, weights.compressor, rows, x, cache.open[source])
        start = rows.position // plan.ratio * plan.ratio
        key = indexer.key(setup, weights.indexer, latent, start)
        entry = rope.rotate(latent, start, rope.inverse_frequencies(cfg, compressed=True))
        entries = caches.write_entries(
            cache.entries[source], quant.store_entry(entry, numerics.cache_qdq), rows, plan.ratio
        )
        keys = caches.write_entries(
            cache.keys[source], quant.store_index(key, numerics.cache_qdq), rows, plan.ratio
        )
        for name, store, load in (
            ("compressed_kv", entries, quant.load_entry),
            ("index_keys", keys, quant.load_index),
        ):
            if capture.wants(name):
                place = caches.pool_index(rows.pages, jax.tree.leaves(store)[0].shape[1])
                pool = load(caches.flat_pool(store), setup.dtype)
                capture.add(name, plan.index, pool[jnp.maximum(place, 0)])
        return dataclasses.replace(
            cache,
            entries=_replaced(cache.entries, source, entries),
            keys=_replaced(cache.keys, source, keys),
            open=_replaced(cache.open, source, ring),
        )


@shared("setup")
def core(
    setup: Setup,
    weights: AttentionWeights,
    query: Float[Array, "rows heads c"],
    window: quant.Stored,
    window_index: Int32[Array, "rows w"],
    selected: quant.Stored | None,
    selected_index: Int32[Array, "rows k"] | None,
) -> Float[Array, "rows heads c"]:
    """Softmax attention of each row over its own keys, with the sink in the denominator."""
    with jax.named_scope("sparse_attention"):
        return mla_attention.attend(
            query,
            window,
            window_index,
            selected,
            selected_index,
            weights.sink,
            scale=setup.cfg.head_dim**-0.5,
            invariant=setup.numerics.invariant,
            implementation=setup.kernels["mla_attention"],
        )


@shared("setup", "compressed")
def output(
    setup: Setup,
    weights: AttentionWeights,
    rows: Rows,
    out: Float[Array, "rows heads c"],
    *,
    compressed: bool,
) -> Float[Array, "parts rows d"]:
    """Rotates back at the query's position and projects group by group; wo_a takes its input
    unquantised. The result is in parts, for `hyper.update` to add."""
    with jax.named_scope("attention_output"):
        cfg, numerics = setup.cfg, setup.numerics
        out = rope.rotate(
            out, rows.position, rope.inverse_frequencies(cfg, compressed), inverse=True
        )
        wide = cfg.num_attention_heads // cfg.o_groups * cfg.head_dim
        grouped = out.reshape(out.shape[0], -1, wide)
        quantized = isinstance(weights.wo_a, Quantized)
        low = row_matmul.matmul_groups(
            grouped,
            weights.wo_a.values if quantized else weights.wo_a.astype(out.dtype),
            weights.wo_a.scales if quantized else None,
            out_dtype=out.dtype,
            invariant=numerics.invariant,
            implementation=setup.kernels["row_matmul"],
        )
        low = low.reshape(out.shape[0], -1)
        if setup.layout.mesh_axes("o_group"):
            return linear_total(setup, low, weights.wo_b, "o_group")[None]
        (parts,) = linear_parts(setup, low, (weights.wo_b,))
        return parts


def _replaced(items: tuple, index: int, value: object) -> tuple:
    return (*items[:index], value, *items[index + 1 :])
