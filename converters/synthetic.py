"""Synthetic checkpoints in the official on-disk format, at any scale, for tests and benchmarks.

`write` makes a folder like the release's: config.json, numbered shards with an index, FP8 matrices
with block scales, packed FP4 experts, Engram tables, F32 mixes, BF16 rest, and a tokenizer of the
right size. Values are drawn from the model's declarations, tensor by tensor and slice by slice, so
memory stays small; with `sparse` no value is written at all: the files have their full size, hold
zeros and take no space on disk, which is how the 510 GB of the release fit a laptop's test.

`draw_config` draws a small config with deliberately awkward sizes.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from converters import names
from converters import safetensors_io as st
from converters.recipes import raw
from converters.source import INDEX
from converters.token_map import token_map
from deepinfer_jax import shipped, spec
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import engram_hash

SLICE_BYTES = 2**24
METADATA = {"format": "pt"}


def write(
    folder: str | Path,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    shards: int = 2,
    sparse: bool = False,
) -> Path:
    """Write a checkpoint folder for a Hugging Face config dictionary; returns the folder.

    `engram_compressed_vocab_size` and `engram_num_embeddings` are set to what the synthetic
    tokenizer and the primes give.
    """
    folder = Path(folder)
    folder.mkdir(parents=True)
    fitted: dict[str, Any] = json.loads(json.dumps(config))
    _fit_engram(folder, fitted)
    (folder / "config.json").write_text(json.dumps(fitted, indent=2), encoding="utf-8")
    table = names.table(ModelConfig.from_hf(fitted))
    placed = {}
    for number, entries in enumerate(_split(list(table.by_name.values()), shards), start=1):
        file = folder / f"model-{number:05d}-of-{shards:05d}.safetensors"
        header = st.header_bytes([(e.name, e.dtype, e.shape) for e in entries], METADATA)
        if sparse:
            file.write_bytes(header)
            os.truncate(file, len(header) + sum(entry.nbytes for entry in entries))
        else:
            st.write(file, header, _values(table, entries, seed))
        placed |= {entry.name: file.name for entry in entries}
    index = {"metadata": {"total_size": table.nbytes}, "weight_map": placed}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return folder


def _split(entries: Sequence[names.Entry], count: int) -> Iterator[list[names.Entry]]:
    """Consecutive entries in `count` groups of about equal bytes, none empty."""
    total, done, group = sum(entry.nbytes for entry in entries), 0, []
    for position, entry in enumerate(entries):
        group.append(entry)
        done += entry.nbytes
        left = len(entries) - position - 1
        if count > 1 and (done * count >= total or left < count):
            yield group
            total, done, group, count = total - done, 0, [], count - 1
    yield group


def _values(table: names.Table, entries: Iterable[names.Entry], seed: int) -> Iterator[memoryview]:
    """The bytes of the tensors in order; a slice's bits depend on seed, name and rows alone."""
    for entry in entries:
        param = table.params[entry.leaf]
        stack = len(entry.index)
        row_bytes = math.prod(entry.shape[1:]) * np.dtype(param.dtype).itemsize
        for begin, end in st.row_slices(entry.shape[0], row_bytes, SLICE_BYTES):
            rows = dataclasses.replace(
                param, shape=(end - begin, *entry.shape[1:]), axes=param.axes[stack:]
            )
            drawn = spec.random(rows, _entropy(seed, entry.name, begin))
            yield raw(np.ascontiguousarray(drawn))


def _entropy(seed: int, name: str, begin: int) -> int:
    return int.from_bytes(f"{seed}/{name}/{begin}".encode())


def _fit_engram(folder: Path, config: dict[str, Any]) -> None:
    """Write a tokenizer, and make the config's Engram numbers those that belong to it."""
    text = config["text_config"]
    vocab = text["vocab_size"]
    file = folder / "tokenizer.json"
    specials = {text.get(k, config.get(k)): v for k, v in _SPECIALS.items()}
    tokenizer(vocab, {i: v for i, v in specials.items() if i is not None}).save(str(file))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false}', encoding="utf-8")
    if not text["engram_layer_ids"]:
        return
    text["engram_compressed_vocab_size"] = int(token_map(file, vocab).max()) + 1
    sizes = (text[key] for key in ("engram_vocab_size", "engram_max_ngram_size", "engram_n_heads"))
    primes = engram_hash.layer_primes(text["engram_layer_ids"], *sizes)
    text["engram_num_embeddings"] = [sum(found) for found in primes.values()]


_SPECIALS = {
    "bos_token_id": "<|begin|>",
    "eos_token_id": "<|end|>",
    "pad_token_id": "<|pad|>",
    "image_token_id": "<|image|>",
    "dspark_noise_token_id": "<|noise|>",
}


def tokenizer(vocab: int, specials: Mapping[int, str]) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of exactly `vocab` ids: specials where asked, then bytes, then pairs.

    Every text round-trips; upper and lower case letters share an Engram class, as in the release.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if vocab < len(alphabet) + len(specials):
        raise ValueError(f"vocab_size = {vocab}; expected at least {len(alphabet) + len(specials)}")
    longer = ("".join(some) for n in (2, 3) for some in itertools.product(alphabet, repeat=n))
    plain = itertools.chain(alphabet, longer)
    by_id = {i: specials[i] if i in specials else next(plain) for i in range(vocab)}
    ids = {text: i for i, text in by_id.items()}
    merges = [(t[0], t[1]) for t in ids if len(t) == 2]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    added = [tokenizers.AddedToken(specials[i], special=True) for i in sorted(specials)]
    made.add_special_tokens(added)
    return made


def draw_config(seed: int, vision: bool = False) -> dict[str, Any]:
    """A small config of awkward sizes: three head groups, partial FP8 blocks, odd counts.

    The schedule is drawn too: one or two window layers, one or two sources of ratio 2, a decoder
    half with a candidate pool, two or three draft stages. Give it to `write`.
    """
    rng = np.random.default_rng(seed)

    def pick(*choices: int) -> int:
        return int(rng.choice(choices))

    window, segments, reuse = pick(1, 2), pick(1, 2), pick(0, 1, 2)
    sources = [window + i * (1 + reuse) for i in range(segments)]
    border = window + segments * (1 + reuse)
    reindex = border + 1 + pick(0, 1)
    depth, drafts = reindex + 1 + pick(0, 1), pick(2, 3)
    ratios = [0] * window + [2] * (border - window) + [1] * (depth - border) + [0] * drafts
    engram = sorted({pick(*range(border)), pick(*range(border))})
    head_dim, index_dim = pick(32, 64, 96), pick(32, 64)
    experts, draft_experts = pick(3, 5, 9), pick(2, 3, 4)
    groups, vocab = 3, pick(421, 512, 640)
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": vocab,
        "hidden_size": pick(96, 160, 192),
        "num_hidden_layers": depth,
        "num_attention_heads": groups * pick(1, 2),
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "qk_rope_head_dim": min(pick(6, 10, 14, 22, 32), head_dim, index_dim),
        "q_lora_rank": pick(48, 64, 80),
        "o_lora_rank": pick(16, 24, 32),
        "o_groups": groups,
        "moe_intermediate_size": pick(32, 96),
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": pick(1, 2, 3),
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "swiglu_limit": 2.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
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
        "sliding_window": pick(24, 40),
        "compress_ratios": ratios,
        "kv_source_layer_ids": [*sources, border],
        "index_source_layer_ids": [*sources, border, reindex],
        "index_n_heads": pick(3, 8),
        "index_head_dim": index_dim,
        "index_topk": pick(8, 16),
        "candidate_source_layer_id": border,
        "candidate_topk_blocks": pick(3, 4),
        "candidate_block_size": pick(4, 8),
        "hc_mult": pick(2, 4),
        "hc_sinkhorn_iters": pick(5, 20),
        "hc_eps": 1e-6,
        "engram_layer_ids": engram,
        "engram_num_embeddings": [0] * len(engram),
        "engram_max_ngram_size": pick(2, 3, 4),
        "engram_vocab_size": pick(53, 101),
        "engram_n_heads": pick(1, 2, 3),
        "engram_head_dim": pick(32, 64),
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": vocab,
        "num_nextn_predict_layers": drafts,
        "dspark_block_size": pick(4, 5),
        "dspark_noise_token_id": vocab - 3,
        "dspark_target_layer_ids": list(range(depth - pick(1, 2), depth)),
        "dspark_markov_rank": pick(16, 24),
        "dspark_n_routed_experts": draft_experts,
        "dspark_num_experts_per_tok": pick(1, 2),
    }
    tower = {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 2 if vision else 0,
        "hidden_size": 48,
        "num_attention_heads": 3,
        "intermediate_size": 80,
        "patch_size": 14,
        "rope_theta": 10000.0,
        "downsample_ratio": 3,
        "max_image_tokens": 64,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 3,
        "eos_token_id": 5,
        "pad_token_id": 2,
        "image_token_id": vocab - 2,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": tower,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: `python -m converters.synthetic DST [--config NAME | --draw SEED]`."""
    parser = argparse.ArgumentParser(prog="python -m converters.synthetic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("destination", type=Path, help="folder to create")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--config", default="v41-tiny", help="config.json, or a shipped name")
    kind.add_argument("--draw", type=int, metavar="SEED", help="draw a small config instead")
    parser.add_argument("--seed", type=int, default=0, help="of the values")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--sparse", action="store_true", help="full size, no values, no disk space")
    options = parser.parse_args(arguments)
    if options.draw is not None:
        config = draw_config(options.draw, vision=True)
    else:
        config = json.loads(shipped.find("models", options.config).read_text(encoding="utf-8"))
    values = {"seed": options.seed, "shards": options.shards, "sparse": options.sparse}
    print(write(options.destination, config, **values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
