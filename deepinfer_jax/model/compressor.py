"""Compressor: one shared KV entry for every `ratio` tokens (V4.1 report 2.2; reference
inference/model.py Compressor).

Ratio 1: latent = RMSNorm(wkv x), one entry a token, no gate.
Ratio 2, in float32: u = wkv x, g = wgate x for the two tokens 2j and 2j + 1; per channel w =
softmax over the pair of g; latent_j = RMSNorm(bf16(sum_m w_m u_m)). No positional bias and no
overlap. Rows and weights are bfloat16, so their products in float32 are exact either way and need
not be widened first, as the reference does: a float32 product is many times slower on a GPU.

The entry of a group appears with its last token; until then u and g of the open token are state
(float32, in a small ring so that rejected draft rows need no undo). Here every row computes the
latent of the group it would complete; only rows that do complete one are written to the cache.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import cache as caches
from deepinfer_jax.model.linear import linear
from deepinfer_jax.model.norm import Prepared, rms_norm
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.spec import Leaf, norm, plain


@flax.struct.dataclass
class CompressorWeights:
    """wkv, wgate [c, d] (wgate None at ratio 1), norm [c]; bfloat16."""

    wkv: Leaf
    wgate: Leaf | None
    norm: Leaf


def abstract(cfg: ModelConfig, ratio: int) -> CompressorWeights:
    """The declared weights of a compressor."""
    shape = (cfg.head_dim, cfg.hidden_size)
    return CompressorWeights(
        wkv=plain(*shape, axes=("kv", "embed")),
        wgate=plain(*shape, axes=("kv", "embed")) if ratio > 1 else None,
        norm=norm(cfg.head_dim, "kv"),
    )


def compress(
    setup: Setup,
    weights: CompressorWeights,
    rows: Rows,
    x: Float[Array, "rows d"] | Prepared,
    ring: Any,
) -> tuple[Float[Array, "rows c"], Any]:
    """The latent that each row completes, un-rotated, and the ring of open groups afterwards."""
    with jax.named_scope("compressor"):
        eps = setup.cfg.rms_norm_eps
        if weights.wgate is None:
            return rms_norm(linear(setup, x, weights.wkv), weights.norm, eps), ring
        value = linear(setup, x, weights.wkv, dtype=jnp.dtype(jnp.float32))
        gate = linear(setup, x, weights.wgate, dtype=jnp.dtype(jnp.float32))
        new = jnp.stack([value, gate], axis=1)
        before = (rows.position - 1)[:, None]
        source, index, ring = caches.recall(ring, new, rows, before, lookback=1)
        earlier = source[jnp.maximum(index[:, 0], 0)]
        share = jax.nn.softmax(jnp.stack([earlier[:, 1], gate]), axis=0)
        mixed = share[0] * earlier[:, 0] + share[1] * value
        return rms_norm(mixed.astype(setup.dtype), weights.norm, eps), ring
