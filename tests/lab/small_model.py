"""A random model whose every sharded axis divides by eight, for layouts on simulated devices."""

from typing import Any

import jax
import numpy as np

from deepinfer_jax import spec
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import engram_hash, transformer

VOCAB, CLASSES = 512, 387


def config(**changes) -> ModelConfig:
    """Two halves, two KV sources, a reindex layer, one Engram layer and one draft stage."""
    return ModelConfig.from_hf(hf(**changes))


def hf(**changes) -> dict:
    """The same as a Hugging Face config."""
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 8,
        "swiglu_limit": 2.0,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 1024,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
        "n_routed_experts": 64,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "sliding_window": 16,
        "compress_ratios": [0, 2, 1, 1, 0],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 8,
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 5,
        "hc_eps": 1e-6,
        "engram_layer_ids": [0],
        "engram_num_embeddings": [660],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 101,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": CLASSES,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 3,
        "dspark_noise_token_id": 511,
        "dspark_target_layer_ids": [2, 3],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
    } | changes
    return {
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 510,
        "text_config": text,
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [32, 32],
            "expert_dtype": "fp4",
        },
    }


def weights(cfg: ModelConfig, seed: int = 0):
    """Random host weights as stored, with a token map."""
    engram_hash.hash_constants(cfg)
    drawn = spec.random(transformer.abstract(cfg), seed)
    classes = np.random.default_rng(seed).integers(0, CLASSES, VOCAB, dtype=np.int32)
    return drawn.replace(token_map=classes)


def tokens(batch: int, length: int, seed: int = 0):
    """Token ids int32 [batch, length] and ragged lengths int32 [batch]."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 500, (batch, length), dtype=np.int32)
    lengths = rng.integers(length // 2, length + 1, batch, dtype=np.int32)
    lengths[0] = length
    return ids, lengths


def pad_rows(tree, specs_like):
    """Host arrays padded with zero rows to the placed shapes."""
    return jax.tree.map(
        lambda leaf, param: np.pad(
            leaf, [(0, want - have) for want, have in zip(param.shape, leaf.shape, strict=True)]
        ),
        tree,
        specs_like,
    )


def random_state(programs) -> Any:
    """A state of eight slots and eight pages full of random bytes."""
    rng = np.random.default_rng(2)

    def drawn(leaf):
        raw = rng.integers(0, 2 if leaf.dtype == bool else 256, leaf.nbytes, dtype=np.uint8)
        return jax.device_put(raw.view(leaf.dtype).reshape(leaf.shape), leaf.sharding)

    return jax.tree.map(drawn, programs.empty(8, 8))


def paged(cache) -> set[int]:
    """The `id` of the leaves of a cache that lie in pages."""
    return {id(leaf) for leaf in jax.tree.leaves((cache.entries, cache.keys))}
