"""A random model small enough to compile many programs for: every mechanism once, five layers.

Layer 0 sees a window only, 1 is a source of ratio 2 (the encoder half, with Engram); 2 is a source
of ratio 1 with the candidate pool, 3 reuses its selection, 4 selects anew (the decoder half). The
window is 16 tokens, a draft block 3, so sequences of a few dozen tokens pass every boundary.
"""

import functools
from pathlib import Path
from typing import Any

import deepinfer_jax as dj
from deepinfer_jax.runtime.engine import Shapes

WINDOW, BLOCK, VOCAB = 16, 3, 512
CONTEXT = 512  # tokens: four pages a slot
KEEP = 24  # prompt rows of the decoder half under bounded replay
SHAPES = Shapes(prefill=((2, 32),))

TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 2.0,
    "rms_norm_eps": 1e-20,
    "max_position_embeddings": 1024,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "sliding_window": WINDOW,
    "compress_ratios": [0, 2, 1, 1, 1, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 4],
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 5,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [0],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 53,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": VOCAB,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": BLOCK,
    "dspark_noise_token_id": VOCAB - 1,
    "dspark_target_layer_ids": [3, 4],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 2,
    "dspark_num_experts_per_tok": 1,
}
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": VOCAB - 2,
    "text_config": TEXT,
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
}


def numerics(**fields: Any) -> dj.Numerics:
    """float32 without cache quantisation, where nothing rounds to steps."""
    return dj.Numerics.preset("float32", **{"cache_qdq": False, **fields})


@functools.cache
def engine(folder: Path, num: dj.Numerics, options: tuple[tuple[str, Any], ...]) -> dj.LLM:
    """One engine for each choice of numerics and options: tests share what was compiled."""
    settings = {"max_slots": 4, "max_context": CONTEXT, "shapes": SHAPES, **dict(options)}
    return dj.LLM(folder, numerics=num, **settings)
