"""Decode throughput of an engine, and where its time goes.

For each batch size an engine of as many slots serves the same requests `runs` times, after one warm
run, in groups of that size:

    tokens/s      generated tokens over the wall time of the whole engine: median, least, most
    device        sum over the steps that the run dispatched of the median time of such a step, run
                  back to back with every slot in use and nothing else to do
    engine/device wall time over that sum: what planning, reading and text cost beyond the device

Then the largest batch again with `Numerics.invariant` turned over. Random prompts, greedy: the
figures depend on shapes, not on what is said.
"""

import collections
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.config import Numerics
from deepinfer_jax.runtime import warmup
from deepinfer_jax.runtime.engine import LLM, Shapes
from deepinfer_jax.runtime.outputs import DraftCounts
from deepinfer_jax.runtime.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Load:
    """requests served a run, each `prompt` random ids and `tokens` generated ones."""

    requests: int
    prompt: int = 32
    tokens: int = 128
    runs: int = 3


@dataclasses.dataclass
class Row:
    """One batch size; seconds: wall time of each run; device: of the same steps, if measured."""

    name: str
    batch: int
    generated: int
    seconds: list[float]
    steps: int
    device: float | None
    drafts: DraftCounts
    tokens_per_step: float

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each run, ascending."""
        return sorted(self.generated / seconds for seconds in self.seconds)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def text(self) -> str:
        """One line for a reader."""
        wall = statistics.median(self.seconds)
        parts = [
            f"{self.name:>10} batch {self.batch:>3}: {self.rate:8.1f} tokens/s "
            f"({self.rates[0]:.1f} to {self.rates[-1]:.1f})",
            f"{self.steps} steps of {wall / self.steps * 1e3:.2f} ms",
        ]
        if self.device is not None:
            parts.append(f"device {self.device:.3f} s, engine/device {wall / self.device:.3f}")
        if self.drafts.judged:
            rates = " ".join(f"{r:.2f}" for r in self.drafts.acceptance if r is not None)
            parts.append(f"{self.tokens_per_step:.2f} tokens a step, drafts accepted {rates}")
        return ", ".join(parts)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {**dataclasses.asdict(self), "rate": self.rate, "acceptance": self.drafts.acceptance}


def decode(
    model: Callable[[Numerics], Any],
    load: Load,
    *,
    batches: Sequence[int],
    numerics: Numerics,
    breakdown: bool,
    **options: Any,
) -> Iterator[Row]:
    """A row for each batch size, then the largest again with `invariant` turned over.

    model: what `LLM` is to serve with these numerics. options: further arguments of `LLM`.
    breakdown: time the device's steps too.
    """
    turned = dataclasses.replace(numerics, invariant=not numerics.invariant)
    served = [(numerics, batch) for batch in sorted(batches)] + [(turned, max(batches))]
    for num, batch in served:
        llm = LLM(
            model(num),
            numerics=num,
            max_slots=batch,
            max_context=load.prompt + load.tokens + 1,
            shapes=Shapes(prefill=((min(8, batch), load.prompt),)),
            **options,
        )
        yield _serve(llm, "invariant" if num.invariant else "plain", batch, load, breakdown)


def _serve(llm: LLM, name: str, batch: int, load: Load, breakdown: bool) -> Row:
    loop = llm._loops[0]
    rng = np.random.default_rng(0)
    most = min(llm.model.cfg.vocab_size, llm.model.cfg.image_token_id)
    prompts = rng.integers(3, most, (load.requests, load.prompt)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=load.tokens, ignore_eos=True)
    groups = [prompts[i : i + batch] for i in range(0, load.requests, batch)]
    llm.generate(groups[0], params, strict=True)  # compiles
    seconds, outs = [], []
    before = loop.dispatched.copy()
    for _ in range(load.runs):
        begin = time.perf_counter()
        outs = [out for group in groups for out in llm.generate(group, params, strict=True)]
        seconds.append(time.perf_counter() - begin)
    steps = loop.dispatched - before
    drafts, turns, extra = DraftCounts(), 0, 0
    for out in outs:
        drafts.add(out.metrics.drafts)
        turns += out.metrics.decode_steps
        extra += out.metrics.accepted_rows
    return Row(
        name,
        batch,
        sum(out.metrics.generated_tokens for out in outs),
        seconds,
        steps.total() // load.runs,
        _device_seconds(llm, steps) / load.runs if breakdown else None,
        drafts,
        1 + extra / max(turns, 1),
    )


def _device_seconds(llm: LLM, steps: collections.Counter[tuple[str, int, int]]) -> float:
    loop = llm._loops[0]
    times = {"decode": warmup.measure(loop), "prefill": warmup.measure_prefill(loop)}
    return sum(count * times[kind][a, b] for (kind, a, b), count in steps.items())


def summary(rows: Sequence[Row]) -> list[str]:
    """Ratios between the rows: large batch against small, invariant against plain."""
    lines = []
    small, large = rows[0], rows[-2]
    if large.batch > small.batch:
        lines.append(f"batch {large.batch} / batch {small.batch}: {large.rate / small.rate:.1f}x")
    by_name = {row.name: row for row in rows[-2:]}
    cost = by_name["plain"].rate / by_name["invariant"].rate
    lines.append(f"invariant=True: {cost:.2f}x the time at batch {large.batch}")
    return lines


def report(rows: Iterator[Row], as_json: bool) -> int:
    """Prints each row when it is known, then the ratios; the exit code."""
    found = []
    for row in rows:
        found.append(row)
        print(json.dumps(row.plain()) if as_json else row.text(), flush=True)
    if not as_json:
        print("\n".join(summary(found)))
    return 0
