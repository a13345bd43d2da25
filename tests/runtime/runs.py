"""What the engine tests share: bits of results, and engines made short of room."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

import deepinfer_jax as dj
from deepinfer_jax.runtime.outputs import RequestOutput

Bits = list[tuple[list[int], list[tuple[int, str]]]]


def bits(out: RequestOutput) -> Bits:
    """Ids and log-probabilities of every sample, the latter to the last bit."""
    assert out.error is None, out.error
    found = []
    for sample in out.outputs:
        entries = [pair for entry in sample.logprobs or [] for pair in entry.items()]
        found.append((sample.token_ids, [(token, value.hex()) for token, value in entries]))
    return found


def same(
    one: Sequence[RequestOutput], other: Sequence[RequestOutput], ids_only: bool = False
) -> None:
    """Fails at the first difference, naming request and token."""
    assert len(one) == len(other)
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        for (ids, values), (ids_b, values_b) in zip(bits(a), bits(b), strict=True):
            assert ids == ids_b, f"request {number}: ids differ from {_first(ids, ids_b)} on"
            if not ids_only and values != values_b:
                at = _first(values, values_b)
                raise AssertionError(
                    f"request {number}: log-probability {at} of {len(values)}: "
                    f"{_value(values, at)} and {_value(values_b, at)}"
                )


def same_rows(one: np.ndarray, other: np.ndarray, what: str) -> None:
    """Fails naming the first rows of two float32 arrays whose bits differ."""
    assert one.dtype == other.dtype == np.float32 and one.shape == other.shape, what
    rows = np.flatnonzero((one.view(np.int32) != other.view(np.int32)).any(-1))
    assert not rows.size, f"{what}: rows {rows[:5]} differ, {rows.size} in all"


def logprobs(out: RequestOutput) -> np.ndarray:
    """Log-probability of each id of the only sample."""
    assert out.error is None, out.error
    (sample,) = out.outputs
    pairs = zip(sample.token_ids, sample.logprobs or [], strict=True)
    return np.array([entry[token] for token, entry in pairs], np.float64)


class Measured(NamedTuple):
    """Largest difference of log-probabilities, and how many greedy tokens come before another."""

    worst: float
    alike: list[int]


def measured(
    exact: dj.LLM, other: dj.LLM, work: list[list[int]], *, replay: int, ends: Sequence[int]
) -> Measured:
    """Of an engine that rebuilds rings against an exact one: log-probabilities of the exact one's
    greedy tokens. ends: tokens of each prompt in known pages when all have been seen."""
    greedy = dj.SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, ignore_eos=True)
    cold = exact.generate(work, greedy, strict=True)
    tokens = [out.outputs[0].token_ids for out in cold]
    forced = [dataclasses.replace(greedy, forced_token_ids=ids) for ids in tokens]
    other.generate(work, forced, strict=True)
    warm = other.generate(work, forced, strict=True)
    assert [out.metrics.cached_tokens for out in warm] == [end - replay for end in ends]
    pairs = zip(cold, warm, strict=True)
    worst = max(float(np.abs(logprobs(a) - logprobs(b)).max()) for a, b in pairs)
    free = [out.outputs[0].token_ids for out in other.generate(work, greedy, strict=True)]
    alike = [_first(ids, found) for ids, found in zip(tokens, free, strict=True)]
    print(f"replay of {replay}: largest difference {worst:.1e}, tokens alike {alike} of 24")
    return Measured(worst, alike)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@contextlib.contextmanager
def scarce(llm: dj.LLM, *, pages: int, host_pages: int = 4096) -> Iterator[None]:
    """The engine with so few pages, and room for so many on the host; nothing compiles anew."""
    pool, scheduler = llm._loop.pages, llm._loop.scheduler
    (free,) = pool._free
    hidden, pool._free = free[:-pages], [free[-pages:]]
    policy = scheduler.policy
    scheduler.policy = dataclasses.replace(policy, host_pages=host_pages)
    try:
        yield
    finally:
        scheduler.policy = policy
        pool._free = [hidden + pool._free[0]]


def _first(one: Sequence, other: Sequence) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _value(values: Sequence[tuple[int, str]], at: int) -> float:
    return float.fromhex(values[at][1]) if at < len(values) else float("nan")
