"""The layer schedule of DeepSeek-V4.1: which layer owns, reads and reuses what.

Attention of a layer is one of four modes (V4.1 report 2.2-2.4):
  window   sliding window only (ratio 0);
  full     owns a compressor and an indexer: writes the shared compressed KV and index keys, selects
           entries itself;
  reindex  reads the KV and index keys of the nearest source below, selects entries with its own
           queries;
  reuse    reads that KV with the selection of the nearest index source below.
The decoder half starts at the first layer of ratio 1: everything above it reads one KV source,
which is what makes bounded replay of prompts possible.

These functions take any object with the fields of `ModelConfig`, so that this file imports nothing.
"""

import dataclasses
import math
from typing import Any, Literal

Mode = Literal["window", "full", "reindex", "reuse"]


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """The role of one layer.

    ratio: tokens per entry of the compressed cache this layer reads (0: none).
    kv_source, index_source: layer ids whose compressed KV and whose selection this layer reads.
    candidate_source: the layer creates the candidate pool; candidate_limited: its selection stays
    inside the pool.
    tap: the mean of its residual streams at entry feeds the drafter.
    """

    index: int
    mode: Mode
    ratio: int
    kv_source: int | None
    index_source: int | None
    half: Literal["encoder", "decoder"]
    engram: bool
    candidate_source: bool
    candidate_limited: bool
    tap: bool


def decoder_start(cfg: Any) -> int:
    """First layer with ratio 1, or the number of layers."""
    for layer in range(cfg.num_hidden_layers):
        if cfg.compress_ratios[layer] == 1:
            return layer
    return cfg.num_hidden_layers


def layer_plans(cfg: Any) -> tuple[LayerPlan, ...]:
    """Plans of the backbone layers of a validated config."""
    border = decoder_start(cfg)
    plans = []
    for layer in range(cfg.num_hidden_layers):
        ratio = cfg.compress_ratios[layer]
        kv_source = _nearest(cfg.kv_source_layer_ids, layer) if ratio else None
        index_source = _nearest(cfg.index_source_layer_ids, layer) if ratio else None
        if ratio == 0:
            mode: Mode = "window"
        elif layer in cfg.kv_source_layer_ids:
            mode = "full"
        elif layer in cfg.index_source_layer_ids:
            mode = "reindex"
        else:
            mode = "reuse"
        pool = cfg.candidate_source_layer_id
        plans.append(
            LayerPlan(
                index=layer,
                mode=mode,
                ratio=ratio,
                kv_source=kv_source,
                index_source=index_source,
                half="decoder" if layer >= border else "encoder",
                engram=layer in cfg.engram_layer_ids,
                candidate_source=layer == pool,
                candidate_limited=pool is not None
                and layer > pool
                and layer in cfg.index_source_layer_ids,
                tap=layer in cfg.dspark_target_layer_ids,
            )
        )
    return tuple(plans)


def draft_plans(cfg: Any) -> tuple[LayerPlan, ...]:
    """Plans of the DSpark stages, numbered from 0."""
    return tuple(
        LayerPlan(stage, "window", 0, None, None, "decoder", False, False, False, False)
        for stage in range(cfg.num_nextn_predict_layers)
    )


def validate(cfg: Any) -> None:
    """Raises `ValueError` naming the field, its value and what was expected."""
    _validate_sizes(cfg)
    _validate_numbers(cfg)
    _validate_storage(cfg)
    _validate_sources(cfg)
    _validate_selection(cfg)
    _validate_engram(cfg)
    _validate_draft(cfg)


def _nearest(sources: tuple[int, ...], layer: int) -> int:
    return max(source for source in sources if source <= layer)


def _expect(condition: bool, field: str, value: Any, expected: str) -> None:
    if not condition:
        raise ValueError(f"{field} = {value!r}; expected {expected}")


def _positive(cfg: Any, *names: str) -> None:
    for name in names:
        value = getattr(cfg, name)
        _expect(isinstance(value, int) and value > 0, name, value, "a positive integer")


def _validate_sizes(cfg: Any) -> None:
    _positive(
        cfg,
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "q_lora_rank",
        "o_lora_rank",
        "o_groups",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "sliding_window",
        "hc_mult",
        "hc_sinkhorn_iters",
        "max_position_embeddings",
    )
    drafts = cfg.num_nextn_predict_layers
    _expect(drafts >= 0, "num_nextn_predict_layers", drafts, "0 or more draft stages")
    _expect(
        cfg.hidden_size % 32 == 0,
        "hidden_size",
        cfg.hidden_size,
        "a multiple of 32 (quantisation groups)",
    )
    _expect(
        cfg.head_dim % 32 == 0,
        "head_dim",
        cfg.head_dim,
        "a multiple of 32 (cache quantisation groups)",
    )
    _expect(
        cfg.moe_intermediate_size % 32 == 0,
        "moe_intermediate_size",
        cfg.moe_intermediate_size,
        "a multiple of 32 (quantisation groups)",
    )
    rope = cfg.qk_rope_head_dim
    _expect(
        0 < rope <= cfg.head_dim and rope % 2 == 0,
        "qk_rope_head_dim",
        rope,
        f"even, 2..{cfg.head_dim}",
    )
    _expect(
        cfg.num_attention_heads % cfg.o_groups == 0,
        "o_groups",
        cfg.o_groups,
        f"a divisor of num_attention_heads = {cfg.num_attention_heads}",
    )
    _expect(
        cfg.num_experts_per_tok <= cfg.n_routed_experts,
        "num_experts_per_tok",
        cfg.num_experts_per_tok,
        f"at most n_routed_experts = {cfg.n_routed_experts}",
    )


def _validate_numbers(cfg: Any) -> None:
    for name in ("routed_scaling_factor", "swiglu_limit", "rms_norm_eps", "hc_eps"):
        value = getattr(cfg, name)
        _expect(0 < value < math.inf, name, value, "a positive, finite number")
    for name in ("rope_theta", "compress_rope_theta"):
        value = getattr(cfg, name)
        _expect(1 < value < math.inf, name, value, "a finite number above 1")
    for field in dataclasses.fields(cfg.rope_scaling):
        value = getattr(cfg.rope_scaling, field.name)
        _expect(0 < value < math.inf, f"rope_scaling.{field.name}", value, "a positive number")


def _validate_storage(cfg: Any) -> None:
    block = cfg.weight_block_size
    if "fp8" in (cfg.dense_dtype, cfg.expert_dtype):
        _expect(
            block == (32, 32),
            "weight_block_size",
            list(block),
            "[32, 32], the blocks that FP8 matrices are computed in",
        )


def _validate_sources(cfg: Any) -> None:
    layers, drafts = cfg.num_hidden_layers, cfg.num_nextn_predict_layers
    ratios = cfg.compress_ratios
    _expect(
        len(ratios) == layers + drafts,
        "compress_ratios",
        f"{len(ratios)} entries",
        f"{layers} layers + {drafts} draft layers = {layers + drafts} entries",
    )
    _expect(set(ratios) <= {0, 1, 2}, "compress_ratios", sorted(set(ratios)), "only 0, 1 and 2")
    _expect(not any(ratios[layers:]), "compress_ratios", ratios[layers:], "0 for every draft layer")
    for name in (
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "engram_layer_ids",
        "dspark_target_layer_ids",
    ):
        ids = getattr(cfg, name)
        _expect(list(ids) == sorted(set(ids)), name, ids, "increasing layer ids")
        _expect(
            all(0 <= i < layers for i in ids),
            name,
            ids,
            f"layer ids below num_hidden_layers = {layers}",
        )
    border = decoder_start(cfg)
    for source in cfg.kv_source_layer_ids:
        _expect(
            source in cfg.index_source_layer_ids,
            "kv_source_layer_ids",
            source,
            "a layer that is in index_source_layer_ids too (it owns the index keys)",
        )
        _expect(
            source <= border,
            "kv_source_layer_ids",
            source,
            f"no source above layer {border}, the one that all of the decoder half reads",
        )
    for layer in range(layers):
        if ratios[layer] == 0:
            role = layer in cfg.index_source_layer_ids
            _expect(
                not role, "index_source_layer_ids", layer, "layers with a compress ratio of 1 or 2"
            )
            continue
        below = [source for source in cfg.kv_source_layer_ids if source <= layer]
        _expect(
            bool(below),
            "kv_source_layer_ids",
            cfg.kv_source_layer_ids,
            f"a source at or below layer {layer}",
        )
        _expect(
            ratios[below[-1]] == ratios[layer],
            f"compress_ratios[{layer}]",
            ratios[layer],
            f"{ratios[below[-1]]}, the ratio of its KV source, layer {below[-1]}",
        )


def _validate_selection(cfg: Any) -> None:
    if any(cfg.compress_ratios):
        _positive(cfg, "index_n_heads", "index_head_dim", "index_topk")
        dim = cfg.index_head_dim
        _expect(dim % 32 == 0, "index_head_dim", dim, "a multiple of 32 (quantisation groups)")
        _expect(
            dim >= cfg.qk_rope_head_dim,
            "index_head_dim",
            dim,
            f"at least {cfg.qk_rope_head_dim} (rotary part)",
        )
    pool = cfg.candidate_source_layer_id
    if pool is not None:
        _positive(cfg, "candidate_topk_blocks", "candidate_block_size")
        _expect(
            pool in cfg.kv_source_layer_ids and cfg.compress_ratios[pool] == 1,
            "candidate_source_layer_id",
            pool,
            "a KV source of ratio 1",
        )


def _validate_engram(cfg: Any) -> None:
    _expect(
        len(cfg.engram_num_embeddings) == len(cfg.engram_layer_ids),
        "engram_num_embeddings",
        cfg.engram_num_embeddings,
        f"one entry for each of engram_layer_ids = {cfg.engram_layer_ids}",
    )
    if cfg.engram_layer_ids:
        _positive(
            cfg,
            "engram_vocab_size",
            "engram_n_heads",
            "engram_head_dim",
            "engram_compressed_vocab_size",
        )
        _expect(
            cfg.engram_head_dim % 32 == 0,
            "engram_head_dim",
            cfg.engram_head_dim,
            "a multiple of 32",
        )
        _expect(
            cfg.engram_max_ngram_size >= 2,
            "engram_max_ngram_size",
            cfg.engram_max_ngram_size,
            "at least 2",
        )
        _expect(
            cfg.engram_compressed_vocab_size <= 1 << 17,
            "engram_compressed_vocab_size",
            cfg.engram_compressed_vocab_size,
            "at most 131072 (exact hashing)",
        )
        _expect(
            0 <= cfg.engram_pad_token_id < cfg.vocab_size,
            "engram_pad_token_id",
            cfg.engram_pad_token_id,
            f"a token id below {cfg.vocab_size}",
        )
        _expect(
            cfg.engram_layer_ids[-1] < decoder_start(cfg),
            "engram_layer_ids",
            cfg.engram_layer_ids,
            f"layers of the encoder half, below {decoder_start(cfg)}",
        )


def _validate_draft(cfg: Any) -> None:
    _expect(cfg.dspark_block_size >= 0, "dspark_block_size", cfg.dspark_block_size, "0 or more")
    if cfg.num_nextn_predict_layers:
        _positive(
            cfg,
            "dspark_block_size",
            "dspark_markov_rank",
            "dspark_n_routed_experts",
            "dspark_num_experts_per_tok",
        )
        taps, border = cfg.dspark_target_layer_ids, decoder_start(cfg)
        _expect(bool(taps), "dspark_target_layer_ids", (), "at least one layer")
        if border < cfg.num_hidden_layers:
            _expect(
                taps[0] >= border,
                "dspark_target_layer_ids",
                taps,
                f"layers of the decoder half, from {border} on",
            )
        _expect(
            0 <= cfg.dspark_noise_token_id < cfg.vocab_size,
            "dspark_noise_token_id",
            cfg.dspark_noise_token_id,
            f"a token id below {cfg.vocab_size}",
        )
        _expect(
            cfg.dspark_num_experts_per_tok <= cfg.dspark_n_routed_experts,
            "dspark_num_experts_per_tok",
            cfg.dspark_num_experts_per_tok,
            f"at most dspark_n_routed_experts = {cfg.dspark_n_routed_experts}",
        )
