"""Many questions after one long text, with and without the prefix cache, in one process.

    python tests/runtime/bench_prefix.py [--model DIR] [--questions 200] [--text 2000] [--rounds 3]

Prints a line of JSON: prompt tokens computed / all, seconds of each round, ratio of the medians.
Every round with the cache begins with an empty one. Measured by hand, not in CI.
"""

import argparse
import json
import statistics
import time

import numpy as np

import deepinfer_jax as dj
from deepinfer_jax import demo


def main() -> None:
    parser = argparse.ArgumentParser(description="prefix cache against none")
    parser.add_argument("--model", help="checkpoint (default: the embedded demo)")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--text", type=int, default=2000, help="tokens in common")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    engines = {
        name: dj.LLM(
            args.model,
            numerics="float32",
            max_slots=args.slots,
            max_context=args.text + 128,
            prefix_cache=name == "cache",
        )
        for name in ("none", "cache")
    }
    rng = np.random.default_rng(0)
    vocab = engines["none"].model.cfg.vocab_size

    def ids(count: int) -> list[int]:
        return rng.integers(vocab // 4, vocab // 2, count).tolist()

    text = ids(args.text)
    work = [text + ids(int(count)) for count in rng.integers(20, 100, args.questions)]
    params = dj.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    found = 0
    for engine in engines.values():
        engine.warm_up(logprobs=False, scores=False)
    for _ in range(args.rounds):
        for name, engine in engines.items():
            engine.swap_weights(args.model or demo.checkpoint())  # forgets what is cached
            start = time.perf_counter()
            outs = engine.generate(work, params, strict=True)
            seconds[name].append(round(time.perf_counter() - start, 2))
            found = sum(out.metrics.cached_tokens for out in outs)
    total = sum(map(len, work))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        json.dumps(
            {
                "prompt_tokens": total,
                "computed": round(1 - found / total, 4),
                "seconds": seconds,
                "ratio": round(medians["none"] / medians["cache"], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
