"""Window and compressed sparse attention, query by query (V4.1 report 2.2, 2.3).

Everything is a plain loop over the tokens of one sequence: rotary angles, the compressor's groups,
index scores with the candidate pool, softmax with a sink over an explicit list of keys, and the
grouped low-rank output.
"""

import math
from typing import NamedTuple

import numpy as np

from tests.oracle import formats
from tests.oracle.checkpoint import Checkpoint
from tests.oracle.rules import Rules, best, gap, norm


def frequencies(cfg: dict, compressed: bool) -> np.ndarray:
    """float32 radians a token of each rotated pair, every step rounded as in the released code."""
    single = np.float32
    r = cfg["qk_rope_head_dim"]
    theta = cfg["compress_rope_theta"] if compressed else cfg["rope_theta"]
    exponent = np.arange(0, r, 2, dtype=single) / single(r)
    plain = single(1) / (float(theta) ** exponent.astype(np.float64)).astype(single)
    if not compressed:
        return plain
    yarn = cfg["rope_scaling"]

    def dimension(turns: float) -> float:
        length = yarn["original_max_position_embeddings"]
        return r * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(yarn["beta_fast"])), 0)
    high = min(math.ceil(dimension(yarn["beta_slow"])), r - 1)
    ramp = (np.arange(r // 2, dtype=single) - single(low)) / single(max(high - low, 0.001))
    smooth = single(1) - np.clip(ramp, 0, 1)
    return plain / single(yarn["factor"]) * (single(1) - smooth) + plain * smooth


def rotate(x: np.ndarray, position, inverse_frequency: np.ndarray, sign: int = 1) -> np.ndarray:
    """x [s, ..., d]: neighbouring pairs of the last channels turned by position * frequency.

    In float32, one rounding an operation, as the released code does: a bfloat16 that is rounded
    from it falls the other way often enough to show after a few tokens.
    """
    turned = x.copy()
    start = x.shape[-1] - 2 * len(inverse_frequency)
    angle = np.asarray(position, np.float32)[:, None] * inverse_frequency[None, :]
    angle = angle.astype(np.float64).reshape(len(x), *[1] * (x.ndim - 2), angle.shape[1])
    cos, sin = np.cos(angle).astype(np.float32), (sign * np.sin(angle)).astype(np.float32)
    even, odd = (x[..., start + place :: 2].astype(np.float32) for place in (0, 1))
    turned[..., start::2] = even * cos - odd * sin
    turned[..., start + 1 :: 2] = even * sin + odd * cos
    return turned


def window_kv(rules: Rules, store: Checkpoint, prefix: str, x, position, speed) -> np.ndarray:
    """Window rows of x as a cache hands them back."""
    kv = rules.product(x, store[f"{prefix}.wkv"])
    kv = norm(rules, kv, store[f"{prefix}.kv_norm"], store.config["rms_norm_eps"])
    return rules.stored(rules.out(rotate(kv, position, speed)), formats.fp8_groups)


class Entries(NamedTuple):
    """Compressed KV [t, c] and index keys [t, dim] of one source layer."""

    kv: np.ndarray
    keys: np.ndarray


def compress(rules: Rules, store: Checkpoint, prefix: str, x: np.ndarray, ratio: int) -> Entries:
    """Entries of the complete groups of normed rows x."""
    cfg = store.config
    eps, speed = cfg["rms_norm_eps"], frequencies(cfg, True)
    value = x @ store[f"{prefix}.compressor.wkv"].T
    if ratio == 1:
        latent = rules.out(value)
    else:
        gate = x @ store[f"{prefix}.compressor.wgate"].T
        latent = []
        for first in range(0, len(x) - ratio + 1, ratio):
            share = np.exp(gate[first : first + ratio])
            share = share / share.sum(axis=0)
            latent.append((share * value[first : first + ratio]).sum(axis=0))
        latent = rules.out(np.array(latent).reshape(-1, value.shape[1]))
    latent = norm(rules, latent, store[f"{prefix}.compressor.norm"], eps)
    start = np.arange(len(latent)) * ratio
    key = rules.out(latent @ store[f"{prefix}.indexer.wk"].T)
    key = norm(rules, key, store[f"{prefix}.indexer.k_norm"], eps)
    key = rules.stored(rules.out(rotate(key, start, speed)), formats.fp4_groups)
    kv = rules.stored(rules.out(rotate(latent, start, speed)), formats.fp4_entries)
    return Entries(kv, key)


class Selected(NamedTuple):
    """chosen: ascending entry numbers of each query; pool: candidate entries (bool [s, t]) or None;
    margin: smallest gap between the last chosen and the first rejected score."""

    chosen: list[np.ndarray]
    pool: np.ndarray | None
    margin: float


def select(rules: Rules, store: Checkpoint, layer: int, ratio: int, x, low, keys, pool) -> Selected:
    """Entries of every query of an index layer; `pool` limits them, or None."""
    cfg, prefix = store.config, f"layers.{layer}.attn.indexer"
    heads, dim = cfg["index_n_heads"], cfg["index_head_dim"]
    query = rules.product(low, store[f"{prefix}.wq_b"]).reshape(len(x), heads, dim)
    query = rules.out(rotate(query, range(len(x)), frequencies(cfg, True)))
    query = rules.stored(query, formats.fp4_groups)
    weight = rules.out(x @ store[f"{prefix}.weights_proj"].T)
    weight = rules.out(weight * dim**-0.5 * heads**-0.5)
    makes_pool = layer == cfg.get("candidate_source_layer_id")
    mask = np.zeros((len(x), len(keys)), bool)
    chosen, margin = [], np.inf
    for p in range(len(x)):
        dot = np.maximum(rules.out(query[p] @ keys.T), 0)
        score = rules.out(rules.out(dot * weight[p][:, None]).sum(axis=0))
        visible = (p + 1) // ratio
        score[visible:] = -np.inf
        if makes_pool:
            size = cfg["candidate_block_size"]
            blocks = np.pad(score, (0, -len(score) % size), constant_values=-np.inf)
            blocks = blocks.reshape(-1, size).max(axis=1)
            if visible:
                blocks[(visible - 1) // size] = np.inf
            kept = best(blocks, cfg["candidate_topk_blocks"])
            margin = min(margin, gap(blocks, kept))
            mask[p] = np.isin(np.arange(len(score)) // size, kept)
        if pool is not None:
            score[~pool[p]] = -np.inf
        chosen.append(best(score, cfg["index_topk"]))
        margin = min(margin, gap(score, chosen[-1]))
    return Selected(chosen, mask if makes_pool else pool, margin)


def softmax_attention(rules: Rules, q, keys, sink, scale: float) -> np.ndarray:
    """q [h, c] over keys [t, c] that are also the values; a missing key is a row of NaN.

    bfloat16: probabilities are rounded relative to the running maximum of blocks of 64 slots.
    """
    present = ~np.isnan(keys[:, 0])
    values = np.where(present[:, None], keys, 0)
    score = np.where(present[None, :], scale * (q @ values.T), -np.inf)
    top = np.full(len(q), -1e30)
    total, out = np.zeros(len(q)), np.zeros_like(q)
    for first in range(0, max(len(keys), 1), 64):
        part = score[:, first : first + 64]
        above = np.maximum(top, part.max(axis=1, initial=-1e30))
        fade, p = np.exp(top - above), np.exp(part - above[:, None])
        total = total * fade + p.sum(axis=1)
        out = out * fade[:, None] + rules.out(p) @ values[first : first + 64]
        top = above
    if not present.any():
        return out
    return rules.out(out / (total + np.exp(sink - top))[:, None])


def output(rules: Rules, store: Checkpoint, prefix: str, out, position, speed) -> np.ndarray:
    """out [s, h, c] turned back at the query's position, then wo_a group by group and wo_b."""
    cfg = store.config
    out = rules.out(rotate(out, position, speed, sign=-1))
    groups, rank = cfg["o_groups"], cfg["o_lora_rank"]
    wo_a = store[f"{prefix}.wo_a"]
    parts = []
    for g, heads in enumerate(np.split(out, groups, axis=1)):
        flat = heads.reshape(len(out), -1)
        parts.append(rules.out(flat @ wo_a[g * rank : (g + 1) * rank].T))
    return rules.product(np.concatenate(parts, axis=1), store[f"{prefix}.wo_b"])


def queries(rules: Rules, store: Checkpoint, prefix: str, x, position, speed) -> tuple:
    """The normed low-rank query and the rotated heads [s, h, c]."""
    cfg = store.config
    low = rules.product(x, store[f"{prefix}.wq_a"])
    low = norm(rules, low, store[f"{prefix}.q_norm"], cfg["rms_norm_eps"])
    q = rules.product(low, store[f"{prefix}.wq_b"])
    q = q.reshape(len(x), cfg["num_attention_heads"], cfg["head_dim"])
    return low, rules.out(rotate(q, position, speed))
