"""Measures a finished demo: `python -m deepinfer_jax.demo.report --work DIR [--model DIR]`.

Prints JSON: held-out loss of the trainer's network, of the engine (`LLM.score`) and of a trigram
model on the same tokens; tokens a decode step with the drafter, and whether they are the tokens
without it; what `replay="compact"` changes; samples. --work: the training folder (its streams).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax import demo
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.demo import corpus, stored
from deepinfer_jax.demo.run import LENGTH, Flat, Run, declared
from deepinfer_jax.demo.trigram import Trigram
from deepinfer_jax.runtime import checkpoint
from deepinfer_jax.runtime.engine import Shapes
from deepinfer_jax.spec import Quantized, path_name

WINDOWS = 24  # of each kind
CONTEXTS = (512, 1024, 1536, 2048)  # tokens of prompts under bounded replay
REPLAYED = 64  # tokens after each whose loss is compared


def weights(model: Path, cfg: ModelConfig) -> Flat:
    """The backbone of a checkpoint as the trainer holds it; rounding it again changes nothing."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        checkpoint.read(model).weights, is_leaf=lambda leaf: isinstance(leaf, Quantized)
    )
    found = {path_name(path): leaf for path, leaf in leaves}
    return {
        name: stored.numbers(found[name]) for name in declared(cfg) if not name.startswith("draft/")
    }


def trainer_and_trigram(run: Run, params: Flat) -> dict[str, Any]:
    """Held-out nats a token by kind."""
    everything = np.concatenate([run.train[kind] for kind in run.train])
    model = Trigram(everything, run.cfg.vocab_size)
    return {
        "trainer": run.validate(params, most=WINDOWS),
        "trigram": {
            kind: model.nats(ids[: WINDOWS * (LENGTH + 1)]) for kind, ids in run.held_out.items()
        },
    }


def engine_loss(llm: Any, held_out: dict[str, np.ndarray]) -> dict[str, float]:
    """Mean nats of the same windows through the engine."""
    found = {}
    for kind, ids in held_out.items():
        cut = corpus.windows(ids, LENGTH + 1)[:WINDOWS]
        scores = llm.score([row.tolist() for row in cut])
        found[kind] = -float(np.mean([value for one in scores for value in one.logprobs[1:]]))
    return found


def speculation(
    with_drafts: Any, without: Any, held_out: dict[str, np.ndarray], params: Any
) -> dict[str, Any]:
    """Tokens a step on continuations of held-out text, greedy, and equality with plain decoding."""
    found = {}
    for kind, ids in held_out.items():
        prompts = [row.tolist() for row in corpus.windows(ids, 65)[:16]]
        fast = with_drafts.generate(prompts, params)
        slow = without.generate(prompts, params)
        pairs = [
            (a.outputs[0].token_ids, b.outputs[0].token_ids)
            for a, b in zip(fast, slow, strict=True)
        ]
        made = sum(out.metrics.generated_tokens for out in fast)
        found[kind] = {
            "tokens_per_step": made / sum(out.metrics.decode_steps for out in fast),
            "equal": sum(a == b for a, b in pairs) / len(pairs),
        }
    return found


def replay(full: Any, compact: Any, ids: np.ndarray, params: Any) -> dict[int, dict[str, float]]:
    """Nats of the tokens after prompts of several lengths, whole prompt and bounded replay."""
    found = {}
    for context in CONTEXTS:
        rows = corpus.windows(ids, context + REPLAYED)[:6]
        nats = {}
        for name, llm in (("full", full), ("compact", compact)):
            total = []
            for row in rows:
                forced = params(row[context:].tolist())
                out = llm.generate([row[:context].tolist()], forced)[0].outputs[0]
                pairs = zip(out.logprobs, out.token_ids, strict=True)
                total += [one[token] for one, token in pairs]
            nats[name] = -float(np.mean(total))
        nats["perplexity_change"] = float(np.exp(nats["compact"] - nats["full"]) - 1)
        found[context] = nats
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    import deepinfer_jax as dj

    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=demo.checkpoint())
    options = parser.parse_args(arguments)
    run = Run(options.work)
    found: dict[str, Any] = trainer_and_trigram(run, weights(options.model, run.cfg))
    print(json.dumps(found), flush=True)

    shapes = Shapes(prefill=((1, 512),))  # one, so that little is compiled
    size = {"max_slots": 8, "max_context": max(CONTEXTS) + REPLAYED, "shapes": shapes}
    exact = dj.Numerics.preset("reference", invariant=True)  # drafting then changes no token
    llm = dj.LLM(options.model, numerics=exact, **size)
    found["engine"] = engine_loss(llm, run.held_out)
    print(json.dumps(found["engine"]), flush=True)
    greedy = dj.SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)
    plain = dj.LLM(options.model, speculate=0, numerics=exact, **size)
    found["speculation"] = speculation(llm, plain, run.held_out, greedy)
    print(json.dumps(found["speculation"]), flush=True)
    sampled = dj.SamplingParams(
        temperature=0.9, top_p=0.95, max_tokens=400, seed=1, ignore_eos=True
    )
    outs = llm.generate(["In the beginning", "Once upon a time"], sampled)
    found["samples"] = [out.outputs[0].text for out in outs]
    print(json.dumps(found["samples"], ensure_ascii=False), flush=True)

    def forced(ids: list[int]) -> Any:
        return dj.SamplingParams(
            max_tokens=len(ids), forced_token_ids=ids, logprobs=0, temperature=0.0, ignore_eos=True
        )

    bounded = dj.LLM(
        options.model,
        speculate=0,
        numerics=dj.Numerics.preset("reference", invariant=True, replay="compact"),
        **size,
    )
    found["replay"] = {
        kind: replay(plain, bounded, ids, forced) for kind, ids in run.held_out.items()
    }
    print(json.dumps(found, ensure_ascii=False, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
