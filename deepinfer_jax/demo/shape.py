"""The demo's shape: DeepSeek-V4.1 with every mechanism and as few layers as hold them.

    layer  half     ratio  attention                                     also
    0      encoder  0      window
    1      encoder  2      full: compressor, indexer, keys of 1          Engram
    2      encoder  2      reuse of 1                                    Engram
    3      decoder  1      full: the decoder's one source, candidates    tap
    4      decoder  1      reindex inside the candidate pool             tap
    5      decoder  1      reuse of 4                                    tap
    draft 0, 1, 2          window over the taps' context

`hf_config` is the checkpoint's config.json; the Engram numbers follow from the tokenizer.
"""

from typing import Any

from deepinfer_jax.demo import corpus
from deepinfer_jax.model import engram_hash

VOCAB = 4096


def hf_config(classes: int) -> dict[str, Any]:
    """The Hugging Face config dictionary; classes: n-gram classes of the tokenizer."""
    text: dict[str, Any] = {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 128,
        "o_lora_rank": 32,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 64,
        "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0, 0],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 4],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 16,
        "candidate_block_size": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 2],
        "engram_num_embeddings": [0, 0],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 5000,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": corpus.PAD,
        "engram_compressed_vocab_size": classes,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": corpus.SYSTEM,
        "dspark_target_layer_ids": [3, 4, 5],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }
    sizes = (text[f"engram_{name}"] for name in ("vocab_size", "max_ngram_size", "n_heads"))
    primes = engram_hash.layer_primes(text["engram_layer_ids"], *sizes)
    text["engram_num_embeddings"] = [sum(found) for found in primes.values()]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": corpus.BOS,
        "eos_token_id": corpus.EOS,
        "pad_token_id": corpus.PAD,
        "image_token_id": corpus.IMAGE,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {
            "model_type": "deepseek_v41_vision",
            "num_hidden_layers": 0,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "patch_size": 14,
            "rope_theta": 10000.0,
            "downsample_ratio": 3,
            "max_image_tokens": 1024,
            "min_pixels": 295936,
            "max_wh_ratio": None,
        },
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }
