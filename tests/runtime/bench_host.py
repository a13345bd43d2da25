"""What a step costs the host alone: CPU time of the engine's thread, the model's programs left out.

    python tests/runtime/bench_host.py [--slots 128] [--speculate 0] [--tokens 128] [--rounds 5]

The embedded demo's engine with all of its host work, admission programs included; in place of
prefill and decode stand ready-made results, whose making is not counted. Prints a line of JSON:
milliseconds a decode step with every slot in use, microseconds a token, and microseconds a request
with one token to make (its entry, admission and share of a prefill of eight); median of the rounds.
Measured by hand, not in CI.
"""

import argparse
import json
import statistics
import time
from typing import Any

import jax
import numpy as np

import deepinfer_jax as dj
from deepinfer_jax.runtime.engine import Shapes
from deepinfer_jax.runtime.packing import pack
from deepinfer_jax.runtime.step_types import Results, StepOutput

PROMPT = 32


class Canned:
    """Stands in for `Programs.prefill` and `Programs.decode`, in the thread that hands steps over.
    steps: decode steps."""

    def __init__(self, block: int, vocab: int):
        self.block, self.vocab, self.rng = block, vocab, np.random.default_rng(0)
        self.steps = 0

    def prefill(self, *given: Any) -> tuple[Any, Results]:
        return given[-3], self._output(len(given[-1].slot), 0)

    def decode(self, *given: Any) -> tuple[Any, Results]:
        self.steps += 1
        return given[-3], self._output(len(given[-1].slot), self.block)

    def _output(self, groups: int, verified: int) -> Results:
        """Any number of the drafts verified stands."""
        rng = self.rng
        stood = rng.integers(0, verified + 1, groups, np.int32)
        confidence = rng.normal(size=(groups, self.block)).astype(np.float32)
        output = StepOutput(
            tokens=rng.integers(3, self.vocab // 2, (groups, 1 + verified), np.int32),
            count=1 + stood,
            failed=np.zeros(groups, np.bool_),
            logprob=np.zeros((groups, 1 + verified), np.float32),
            top_ids=np.zeros((groups, 1 + verified, 0), np.int32),
            top_logprobs=np.zeros((groups, 1 + verified, 0), np.float32),
            verified=np.full(groups, verified, np.int32),
            judged=np.minimum(stood + 1, verified).astype(np.int32),
            stood=stood,
            confidence=confidence,
            ahead=confidence,
            prompt=None,
            captured={},
        )
        return jax.block_until_ready(jax.device_put(Results(pack(output), {})))


def main() -> None:
    parser = argparse.ArgumentParser(description="the host's cost of a step")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--speculate", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    engine = dj.LLM(
        max_slots=args.slots,
        max_context=PROMPT + args.tokens,
        speculate=args.speculate,
        shapes=Shapes(prefill=((8, PROMPT),)),
    )
    vocab = engine.model.cfg.vocab_size
    canned = Canned(args.speculate, vocab)
    engine._loop.programs.prefill, engine._loop.programs.decode = canned.prefill, canned.decode
    prompts = canned.rng.integers(vocab // 4, vocab // 2, (args.slots, PROMPT)).tolist()

    def run(tokens: int) -> tuple[float, int]:
        """Seconds and decode steps."""
        canned.steps, begin = 0, time.thread_time()
        params = dj.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        engine.generate(prompts, params, strict=True)
        return time.thread_time() - begin, canned.steps

    short = 8
    for tokens in (1, short):  # what compiles, compiles here
        run(tokens)
    rounds = []
    for _ in range(args.rounds):
        (enter, _), (few, begun), (many, steps) = run(1), run(short), run(args.tokens)
        step = (many - few) / (steps - begun)
        token = (many - few) / (args.slots * (args.tokens - short))
        rounds.append((step * 1e3, token * 1e6, enter / args.slots * 1e6))
    names = ("ms_a_step", "us_a_token", "us_a_request")
    medians = [round(statistics.median(column), 2) for column in zip(*rounds, strict=True)]
    print(json.dumps(dict(zip(names, medians, strict=True))))


if __name__ == "__main__":
    main()
