"""Decode rate of this package and of Hugging Face transformers' `deepseek_v4`, side by side.

    python docs/compare_transformers.py --transformers PYTHON [--size tiny|small] [--batch N ...]

PYTHON is an interpreter that has torch and transformers >= 5.24. Both sides run on the CPU in
float32 with random weights of equal shape and serve the same random prompts greedily, in turns, so
that whatever else the machine does meets both. transformers has no `deepseek_v41`; V4 is the
nearest it has. Matched: width, depth, heads, low ranks, experts, window, indexer, mHC, vocabulary.
Not matched: V4 compresses by 4 where V4.1 compresses by 2 or 1, and lacks Engram; transformers
keeps float32 weights, this package expands the checkpoint's FP8 and FP4 in every step. No drafting
on either side. Printed: tokens a second, median (least to most) of the runs, and their ratio.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 128, "heads": 4, "experts": 8, "inner": 64, "vocab": 512},
    "small": {"hidden": 512, "heads": 8, "experts": 16, "inner": 256, "vocab": 4096},
}
LAYERS, HEAD, ROPE, WINDOW = 10, 64, 16, 128


def shared(size: str) -> dict[str, Any]:
    """What both configurations say in the same words."""
    given = SIZES[size]
    return {
        "vocab_size": given["vocab"],
        "hidden_size": given["hidden"],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": given["heads"],
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "qk_rope_head_dim": ROPE,
        "q_lora_rank": given["hidden"] // 2,
        "o_lora_rank": given["hidden"] // 4,
        "o_groups": 2,
        "moe_intermediate_size": given["inner"],
        "n_routed_experts": given["experts"],
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "max_position_embeddings": 1024,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "sliding_window": WINDOW,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 16,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
    }


def ours(size: str, batches: list[int], load: argparse.Namespace) -> dict[int, Callable[[], None]]:
    """Batch size -> one run, this package."""
    import deepinfer_jax as dj
    from converters import synthetic
    from deepinfer_jax.runtime.engine import Shapes

    text = {
        **shared(size),
        "model_type": "deepseek_v41_text",
        "rms_norm_eps": 1e-20,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
        "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0],
        "kv_source_layer_ids": [2, 4, 6],
        "index_source_layer_ids": [2, 4, 6, 8],
        "candidate_source_layer_id": 6,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 8,
        "engram_layer_ids": [1, 4],
        "engram_num_embeddings": [0, 0],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 101,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": SIZES[size]["vocab"],
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 5,
        "dspark_noise_token_id": SIZES[size]["vocab"] - 1,
        "dspark_target_layer_ids": [7, 8, 9],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 3,
    }
    config = {
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": SIZES[size]["vocab"] - 2,
        "text_config": text,
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }
    folder = synthetic.write(Path(tempfile.mkdtemp()) / "model", config)
    numerics = dj.Numerics.preset("float32", cache_qdq=False)
    params = dj.SamplingParams(temperature=0.0, max_tokens=load.tokens, ignore_eos=True)

    def runs(batch: int) -> Callable[[], None]:
        llm = dj.LLM(
            folder,
            numerics=numerics,
            speculate=0,
            max_slots=batch,
            max_context=load.prompt + load.tokens + 1,
            shapes=Shapes(prefill=((batch, load.prompt),)),
        )
        prompts = ids(size, batch, load)
        return lambda: len(llm.generate(prompts, params, strict=True)) and None

    return {batch: runs(batch) for batch in batches}


def theirs(size: str, batches: list[int], load: argparse.Namespace) -> dict[int, Any]:
    """Batch size -> one run, transformers."""
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    kinds = ["sliding_attention"] * 2 + ["compressed_sparse_attention"] * (LAYERS - 2)
    config = DeepseekV4Config(
        **shared(size), layer_types=kinds, mlp_layer_types=["moe"] * LAYERS, eos_token_id=None
    )
    model = DeepseekV4ForCausalLM(config).to(torch.float32).eval()

    def runs(batch: int) -> Callable[[], None]:
        prompts = torch.tensor(ids(size, batch, load))

        def run() -> None:
            with torch.no_grad():
                found = model.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=load.tokens,
                    do_sample=False,
                    pad_token_id=2,
                )
            assert found.shape == (batch, load.prompt + load.tokens), found.shape

        return run

    return {batch: runs(batch) for batch in batches}


def ids(size: str, batch: int, load: argparse.Namespace) -> list[list[int]]:
    """Random prompts, the same on both sides."""
    import random

    rng = random.Random(0)
    return [
        [rng.randrange(3, SIZES[size]["vocab"] - 2) for _ in range(load.prompt)]
        for _ in range(batch)
    ]


def seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def serve(size: str, batches: list[int], load: argparse.Namespace) -> None:
    """The transformers side: a batch size a line in, seconds a line out."""
    runs = theirs(size, batches, load)
    for line in sys.stdin:
        print(json.dumps(seconds(runs[int(line)])), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--transformers", metavar="PYTHON", help="interpreter with torch")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--batch", type=int, action="append", metavar="N", help="default: 1 and 8")
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    load = parser.parse_args()
    batches = load.batch or [1, 8]
    if load.serve:
        serve(load.size, batches, load)
        return
    if load.transformers is None:
        parser.error("--transformers: give an interpreter that has torch and transformers")
    again = [arg for arg in sys.argv[1:] if arg != "--transformers" and arg != load.transformers]
    other = subprocess.Popen(
        [load.transformers, __file__, *again, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdin is not None and other.stdout is not None

    def ask(batch: int) -> float:
        other.stdin.write(f"{batch}\n")
        other.stdin.flush()
        return float(json.loads(other.stdout.readline()))

    mine = ours(load.size, batches, load)
    for batch in batches:
        seconds(mine[batch]), ask(batch)  # compiles, warms up
        pairs = [(seconds(mine[batch]), ask(batch)) for _ in range(load.runs)]
        print(f"{load.size}, batch {batch}, {load.prompt} + {load.tokens} tokens, {load.runs} runs")
        for name, place in (("deepinfer_jax", 0), ("transformers", 1)):
            rates = sorted(batch * load.tokens / pair[place] for pair in pairs)
            print(
                f"  {name:>14}: {statistics.median(rates):8.1f} tokens/s "
                f"({rates[0]:.1f} to {rates[-1]:.1f})"
            )
        ratios = sorted(b / a for a, b in pairs)
        low, middle, high = ratios[0], statistics.median(ratios), ratios[-1]
        print(f"  {'ratio':>14}: {middle:.2f} ({low:.2f} to {high:.2f})")
    other.stdin.close()
    other.wait()


if __name__ == "__main__":
    main()
