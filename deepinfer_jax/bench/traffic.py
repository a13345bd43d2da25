"""Traffic over the engine's own scheduler and prefix cache, with a modelled clock.

A trace is requests with a time of arrival, a prompt, tokens to make and perhaps a text that several
prompts begin with. The real `Scheduler`, `Pages` and `PrefixCache` plan every step; a step takes as
long as a roofline says (`counts`, peaks of a device, `efficiency` of them), and its results are
known one step late, as in the engine. What comes out depends on the policy and not on a machine:

    seconds(step) = max(FLOP / peak, bytes / bandwidth) / efficiency

Times: first token after arrival, and between tokens of a request, at the 50th and 99th percentile.
"""

import collections
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.bench import counts
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.lab.devices import Device
from deepinfer_jax.runtime.pages import PAGE, Pages
from deepinfer_jax.runtime.plans import Act, Outcome, Policy, Step
from deepinfer_jax.runtime.prefix import PrefixCache
from deepinfer_jax.runtime.prefix_types import PrefixPolicy
from deepinfer_jax.runtime.scheduler import Scheduler

GRAIN = 256  # contexts are priced in steps of so many tokens


@dataclasses.dataclass(frozen=True)
class Request:
    """arrival: seconds. prompt: tokens, the first `shared` of them those of text number `text`."""

    arrival: float
    prompt: int
    new: int
    text: int = 0
    shared: int = 0

    def ids(self, number: int) -> np.ndarray:
        """Stand-ins for the prompt's ids: equal where the text is."""
        own = np.arange(self.prompt, dtype=np.int32) + 1_000_003 * (number + 1)
        own[: self.shared] = np.arange(self.shared, dtype=np.int32) - 500_009 * (self.text + 1)
        return own


def poisson(
    count: int,
    rate: float,
    *,
    prompt: int,
    new: int,
    texts: int = 0,
    shared: int = 0,
    seed: int = 0,
) -> list[Request]:
    """`count` requests at `rate` a second. Lengths are exponential with these means (at least 1,
    at most 4 times the mean); with `texts`, each prompt follows `shared` tokens of one of them."""
    rng = random.Random(seed)
    now, found = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        sizes = [max(1, min(round(rng.expovariate(1 / mean)), 4 * mean)) for mean in (prompt, new)]
        common = shared if texts else 0
        text = rng.randrange(texts) if texts else 0
        found.append(Request(now, sizes[0] + common, sizes[1], text, common))
    return found


@dataclasses.dataclass(frozen=True)
class Clock:
    """Modelled seconds of a step. ranks: of the expert-parallel group this device is one of."""

    cfg: ModelConfig
    device: Device
    ranks: int = 1
    efficiency: float = 0.5

    def prefill(self, sequences: int, width: int, start: int, draft: bool) -> float:
        """A rectangle of prompt chunks from position `start` on; draft: for the drafter too."""
        rows = counts.Rows(sequences, width, start)
        return self._seconds(counts.prefill(self.cfg, rows, ranks=self.ranks, draft=draft))

    def decode(self, sequences: int, width: int, start: int, draft: bool) -> float:
        """`width` rows for each of so many sequences of `start` tokens."""
        rows = counts.Rows(sequences, width, start)
        return self._seconds(counts.decode(self.cfg, rows, ranks=self.ranks, draft=draft))

    def _seconds(self, work: counts.Work) -> float:
        arithmetic = work.flops / self.device.peak("bf16")
        return max(arithmetic, work.moved / (self.device.hbm_gb_s * 1e9)) / self.efficiency


@dataclasses.dataclass
class Result:
    """Seconds are modelled. computed: prompt tokens that were; preemptions: of both sorts."""

    seconds: float
    tokens: int
    prompt_tokens: int
    computed: int
    first: list[float]
    between: list[float]
    preemptions: int

    def summary(self) -> dict[str, float]:
        """Throughput and percentiles, as one record."""
        found: dict[str, float] = {
            "tokens_s": self.tokens / self.seconds,
            "computed": self.computed / self.prompt_tokens,
            "preemptions": self.preemptions,
        }
        for name, values in (("first", self.first), ("between", self.between)):
            for percent in (50, 99):
                found[f"{name}_p{percent}_ms"] = 1e3 * float(np.percentile(values, percent))
        return found


class _Run:
    """One trace through one policy."""

    def __init__(
        self,
        trace: Sequence[Request],
        policy: Policy,
        pages: Pages,
        clock: Clock,
        prefix: PrefixPolicy | None,
        acceptance: Sequence[float],
        seed: int,
    ):
        self.trace, self.policy, self.pages, self.clock = trace, policy, pages, clock
        self.acceptance, self.rng = acceptance, random.Random(seed)
        self.prefix = None
        if prefix is not None:
            nothing = np.zeros(1, np.int8)  # the content of a page does not matter here
            copies = lambda pages: [nothing for _ in pages]  # noqa: E731
            self.prefix = PrefixCache(prefix, b"", copies, (nothing, nothing))
            self.prefix.use(pages)
        self.scheduler = Scheduler(policy, pages, self.prefix)
        self.now = self.free = 0.0  # what the host has read up to; when the device is free
        self.computed = 0
        self.prices: dict[tuple[Any, ...], float] = {}
        self.made = collections.Counter[int]()
        self.last: dict[int, float] = {}
        self.first: list[float] = []
        self.between: list[float] = []

    def run(self) -> Result:
        arriving = collections.deque(sorted(enumerate(self.trace), key=lambda one: one[1].arrival))
        flight: tuple[Step, dict[int, int], float] | None = None
        while arriving or len(self.scheduler) or flight:
            while arriving and arriving[0][1].arrival <= self.now:
                self._add(*arriving.popleft())
            if self.prefix is not None:
                self.prefix.settle()
            step, before = self.scheduler.plan(), flight
            flight = None if step is None else (step, self._carry_out(step), self.free)
            if before is not None:
                self.now = before[2]  # its results are read while the next one runs
                self._commit(*before[:2])
            elif step is None and arriving:
                self.now = arriving[0][1].arrival
        preempted = self.scheduler.preemptions
        return Result(
            self.now,
            sum(self.made.values()),
            sum(request.prompt for request in self.trace),
            self.computed,
            self.first,
            self.between,
            preempted[Act.OFFLOAD] + preempted[Act.EVICT],
        )

    def _add(self, number: int, request: Request) -> None:
        self.scheduler.add(number, request.prompt, request.new)
        if self.prefix is not None:
            self.prefix.know(number, request.ids(number).tolist(), request.prompt - 1)

    def _carry_out(self, step: Any) -> dict[int, int]:
        """Keeps the device busy for the step's time; tokens by request."""
        if step.prefill:
            self.computed += sum(chunk.count for chunk in step.work)
            sequences, width = step.shape
            start = max(chunk.start for chunk in step.work)
            self._take(self.clock.prefill, sequences, width, start)
            for chunk in step.work:
                end = chunk.start + chunk.count
                if self.prefix is not None and self.prefix.wanted(chunk.request, end):
                    self.prefix.reached(chunk.request, chunk.slot, end, np.zeros(1, np.int8))
            return {chunk.request: 1 for chunk in step.work if chunk.last}
        if step.work:
            requests = [turn.request for turn in step.work]
            longest = max(self.trace[number].prompt + self.made[number] for number in requests)
            self._take(self.clock.decode, len(requests), 1 + self.policy.block, longest)
            return {number: 1 + self._accepted() for number in requests}
        return {}

    def _take(self, price: Callable[..., float], sequences: int, width: int, start: int) -> None:
        """Adds a step to the device's time; contexts are priced in grains."""
        key = (price.__name__, sequences, width, start // GRAIN)
        if key not in self.prices:
            grain = start // GRAIN * GRAIN
            self.prices[key] = price(sequences, width, grain, draft=self.policy.block > 0)
        self.free = max(self.free, self.now) + self.prices[key]

    def _accepted(self) -> int:
        for place, share in enumerate(self.acceptance[: self.policy.block]):
            if self.rng.random() >= share:
                return place
        return min(self.policy.block, len(self.acceptance))

    def _commit(self, step: Step, tokens: dict[int, int]) -> None:
        outcomes = {}
        for number, count in tokens.items():
            request = self.trace[number]
            count = min(count, request.new - self.made[number])
            if count <= 0:
                continue
            if number not in self.last:
                self.first.append(self.now - request.arrival)
            else:
                self.between += [(self.now - self.last[number]) / count] * count
            self.last[number] = self.now
            self.made[number] += count
            ended = self.made[number] >= request.new
            outcomes[number] = Outcome(count, ended)
            if ended and self.prefix is not None:
                self.prefix.forget(number)
        self.scheduler.commit(step, outcomes)


def simulate(
    trace: Sequence[Request],
    policy: Policy,
    clock: Clock,
    *,
    pages: int,
    context: int,
    prefix: PrefixPolicy | None = None,
    acceptance: Sequence[float] = (),
    seed: int = 0,
) -> Result:
    """Runs a trace to its end. acceptance: shares of drafts that stand, by place of the block;
    context: most tokens of a request. Raises ValueError for a request that can never be served."""
    pool = Pages(pages, policy.slots, -(-context // PAGE))
    return _Run(trace, policy, pool, clock, prefix, acceptance, seed).run()


def compare(
    trace: Sequence[Request],
    text: str,
    clock: Clock,
    *,
    slots: int,
    pages: int | None = None,
    acceptance: Sequence[float] = (),
) -> Result:
    """A trace under a policy written "P:D" or "P:D:prefix": prefill and decode steps in a row.

    Chunks are 512 or 2,048 tokens, drafts as many as `acceptance` has shares. pages: None gives
    every slot the longest request. Raises ValueError for another text.
    """
    first, _, rest = text.partition(":")
    second, _, cached = rest.partition(":")
    if not (first.isdigit() and second.isdigit() and cached in ("", "prefix")):
        raise ValueError(f"policy {text!r}: expected P:D or P:D:prefix, such as 4:4")
    policy = Policy(
        slots,
        (slots * (1 + len(acceptance)),),
        ((4, 512), (1, 2048)),
        block=len(acceptance),
        prefill_burst=int(first),
        decode_burst=int(second),
        host_pages=1 << 20,
    )
    context = max(request.prompt + request.new for request in trace)
    return simulate(
        trace,
        policy,
        clock,
        pages=pages or slots * -(-context // PAGE),
        context=context,
        prefix=PrefixPolicy() if cached else None,
        acceptance=acceptance,
    )


def draw(results: dict[str, Result], png: str) -> None:
    """Distributions of the two times, a curve for each policy (the extra `plot`)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(14, 5))
    titles: Any = (("first token after arrival", "first"), ("between tokens", "between"))
    for panel, (title, name) in zip(axes, titles, strict=True):
        for label, result in results.items():
            values = np.sort(np.array(getattr(result, name))) * 1e3
            panel.plot(values, np.arange(1, len(values) + 1) / len(values), label=label)
        panel.set(xscale="log", xlabel="ms (modelled)", ylabel="share of them", title=title)
        panel.grid(True, which="both", linewidth=0.3)
        panel.legend(fontsize=8)
    figure.savefig(png, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
