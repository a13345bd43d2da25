"""Engram: a gated n-gram memory added to the residual streams before a layer (V4.1 report 2.4;
reference Engram).

The rows found by `engram_hash` are read from a table of FP8 rows and concatenated to e. One
projection gives a key for
each stream and one shared value:
  key_n, value = split(wkv e)
  dot_n = sum_d(h_n q_n k_n key_n) * rsqrt(mean h_n^2 + eps) * rsqrt(mean key_n^2 + eps) / sqrt(d)
  gate_n = sigmoid(sign(dot_n) sqrt(max(|dot_n|, 1e-6))),     X_n += gate_n value
Gates of image tokens are 0. No convolution, no output norm.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import parallel
from deepinfer_jax.model.linear import linear
from deepinfer_jax.model.norm import inverse_rms
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.spec import Leaf, Quantized, dense, fp8_rows, plain
from pallas_kernels import formats

DOT_FLOOR = 1e-6


@flax.struct.dataclass
class EngramWeights:
    """table FP8 rows [R, dim]; wkv [(n + 1) d, columns dim] FP8; q_weight, k_weight [n, d]
    bfloat16."""

    table: Leaf
    wkv: Leaf
    q_weight: Leaf
    k_weight: Leaf


def abstract(cfg: ModelConfig, layer: int) -> EngramWeights:
    """The declared weights of one Engram layer."""
    rows = cfg.engram_num_embeddings[cfg.engram_layer_ids.index(layer)]
    columns = (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads
    width, streams = cfg.hidden_size, cfg.hc_mult
    return EngramWeights(
        table=fp8_rows(rows, cfg.engram_head_dim, ("engram_rows", None)),
        wkv=dense(
            (streams + 1) * width,
            columns * cfg.engram_head_dim,
            ("embed", None),
            block=cfg.weight_block_size,
            dtype=cfg.dense_dtype,
        ),
        q_weight=plain(streams, width, axes=(None, None), scale=1.0),
        k_weight=plain(streams, width, axes=(None, None), scale=1.0),
    )


def engram(
    setup: Setup,
    weights: EngramWeights,
    table_rows: Int32[Array, "rows columns"],
    streams: Float[Array, "rows n d"],
) -> Float[Array, "rows n d"]:
    """The streams with the memory's value added."""
    with jax.named_scope("engram"):
        return add_memory(setup, weights, read_table(setup, weights.table, table_rows), streams)


def add_memory(
    setup: Setup,
    weights: EngramWeights,
    memory: Float[Array, "rows width"],
    streams: Float[Array, "rows n d"],
) -> Float[Array, "rows n d"]:
    """`engram` with the rows of the table already read."""
    with jax.named_scope("engram_gate"):
        cfg = setup.cfg
        projected = linear(setup, memory, weights.wkv)
        split = cfg.hc_mult * cfg.hidden_size
        key = projected[:, :split].reshape(-1, cfg.hc_mult, cfg.hidden_size).astype(jnp.float32)
        value = projected[:, split:].astype(jnp.float32)
        wide = streams.astype(jnp.float32)
        weight = weights.q_weight.astype(jnp.float32) * weights.k_weight.astype(jnp.float32)
        scale = inverse_rms(streams, cfg.rms_norm_eps) * inverse_rms(key, cfg.rms_norm_eps)
        dot = jnp.sum(wide * weight[None] * key, axis=-1, keepdims=True) * scale
        dot = dot * jnp.float32(cfg.hidden_size**-0.5)
        root = jnp.sqrt(jnp.maximum(jnp.abs(dot), jnp.float32(DOT_FLOOR)))
        gate = jax.nn.sigmoid(jnp.copysign(root, dot))
        return (wide + gate * value[:, None, :]).astype(streams.dtype)


def read_table(
    setup: Setup, table: Quantized, table_rows: Int32[Array, "rows columns"]
) -> Float[Array, "rows width"]:
    """The addressed rows, decoded and concatenated in column order."""
    found = parallel.take(table, table_rows, setup.layout, "engram_rows", setup.phase)
    spread = jnp.repeat(formats.scale_bytes(found.scales), formats.GROUP, axis=-1)
    memory = formats.apply_e8m0(found.values.astype(jnp.float32), spread)
    return memory.reshape(table_rows.shape[0], -1).astype(setup.dtype)
