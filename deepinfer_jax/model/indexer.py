"""Two-level indexer: which compressed entries a token attends to (V4.1 report 2.3; reference
Indexer).

Keys (source layers): k_j = RMSNorm(wk latent_j) from the un-rotated, un-quantised latent, rotated
at the position of the group's first token, stored as MXFP4. Queries (every index layer): iq = wq_b
qr, rotated, through MXFP4; head weights w = weights_proj x * dim^-1/2 * heads^-1/2. score = sum_h
relu(iq_h . k_j) w_h over entries j < (p + 1) // ratio; the index_topk best are selected, ascending,
ties to the lowest entry.

The candidate source also keeps a pool of the best blocks (the newest block always in it); later
index layers select inside that pool only.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import cache as caches
from deepinfer_jax.model import parallel, quant, rope
from deepinfer_jax.model.cache import Cache
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.linear import linear
from deepinfer_jax.model.norm import Prepared, rms_norm
from deepinfer_jax.model.rows import Rows, from_rectangle, occupied, to_rectangle
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.schedule import LayerPlan
from deepinfer_jax.spec import Leaf, dense, norm, plain
from pallas_kernels import index_topk


@flax.struct.dataclass
class IndexerWeights:
    """wq_b [heads dim, q_rank], weights_proj [heads, d]; key owners also wk [dim, c] and k_norm
    [dim]."""

    wq_b: Leaf
    weights_proj: Leaf
    wk: Leaf
    k_norm: Leaf


@flax.struct.dataclass
class Selection:
    """What later layers reuse: entries int32 [rows, k] (-1 absent), blocks bool [groups, width,
    blocks] or None."""

    entries: Leaf
    blocks: Leaf


def abstract(cfg: ModelConfig, owns_keys: bool) -> IndexerWeights:
    """The declared weights of an indexer."""
    heads, dim = cfg.index_n_heads, cfg.index_head_dim
    return IndexerWeights(
        wq_b=dense(
            heads * dim,
            cfg.q_lora_rank,
            ("index_heads", "q_rank"),
            block=cfg.weight_block_size,
            dtype=cfg.dense_dtype,
        ),
        weights_proj=plain(heads, cfg.hidden_size, axes=("index_heads", "embed")),
        wk=plain(dim, cfg.head_dim, axes=(None, "kv")) if owns_keys else None,
        k_norm=norm(dim) if owns_keys else None,
    )


def key(
    setup: Setup,
    weights: IndexerWeights,
    latent: Float[Array, "rows c"],
    position: Int32[Array, " rows"],
) -> Float[Array, "rows dim"]:
    """Rotated index keys of latents whose groups start at `position`."""
    with jax.named_scope("index_key"):
        raw = rms_norm(linear(setup, latent, weights.wk), weights.k_norm, setup.cfg.rms_norm_eps)
        return rope.rotate(raw, position, rope.inverse_frequencies(setup.cfg, compressed=True))


def select(
    setup: Setup,
    plan: LayerPlan,
    weights: IndexerWeights,
    rows: Rows,
    cache: Cache,
    x: Prepared,
    latent_query: Prepared,
    before: Selection | None,
    capture: Capture,
) -> Selection:
    """The entries that each row attends to, chosen with this layer's own queries."""
    with jax.named_scope("indexer"):
        cfg = setup.cfg
        heads, dim = cfg.index_n_heads, cfg.index_head_dim
        query, head_weight = (
            parallel.columns(
                lambda rows, weight=weight: linear(setup, rows, weight),
                inputs,
                setup.layout,
                "index_heads",
                setup.phase,
            )
            for inputs, weight in ((latent_query, weights.wq_b), (x, weights.weights_proj))
        )
        query = query.reshape(-1, heads, dim)
        query = rope.rotate(query, rows.position, rope.inverse_frequencies(cfg, compressed=True))
        query = quant.load_index(quant.store_index(query, setup.numerics.cache_qdq), setup.dtype)
        # The factor itself is not rounded (it is a power of two at the released sizes only).
        scaled = head_weight.astype(jnp.float32) * jnp.float32(dim**-0.5 * heads**-0.5)
        head_weight = scaled.astype(head_weight.dtype)
        visible = jnp.where(
            occupied(rows), (to_rectangle(rows, rows.position) + 1) // plan.ratio, 0
        )
        pool = (cfg.candidate_block_size, cfg.candidate_topk_blocks)
        limit = before.blocks if plan.candidate_limited and before is not None else None
        stored, place = _keys(setup, plan, rows, cache)
        picked = index_topk.select(
            to_rectangle(rows, query),
            to_rectangle(rows, head_weight),
            (*stored, place) if isinstance(stored, tuple) else stored,
            visible,
            limit,
            k=cfg.index_topk,
            candidates=pool if limit is not None else None,
            pool=pool if plan.candidate_source else None,
            implementation=setup.kernels["index_topk"],
        )
        chosen, blocks = picked if isinstance(picked, tuple) else (picked, limit)
        selection = Selection(from_rectangle(rows, chosen), blocks)
        capture.add("index_topk", plan.index, selection.entries)
        if isinstance(picked, tuple) and capture.wants("candidates"):
            capture.add("candidates", plan.index, from_rectangle(rows, picked[1]))
        return selection


def _keys(
    setup: Setup, plan: LayerPlan, rows: Rows, cache: Cache
) -> tuple[quant.Stored, Int32[Array, "groups t"]]:
    """Stored index keys of the layer's source: (values, scales) of the whole pool, or gathered
    [groups, T, dim]."""
    source = setup.cfg.kv_source_layer_ids.index(plan.kv_source)
    store = cache.keys[source]
    per_page = jax.tree.leaves(store)[0].shape[1]
    place = caches.pool_index(rows.pages, per_page)
    flat = caches.flat_pool(store)
    if isinstance(flat, tuple):
        return flat, place
    return flat[jnp.maximum(place, 0)], place
