"""Traffic over the engine's own scheduler and prefix cache, with a modelled clock.

A trace is requests with a time of arrival, a prompt, tokens to make and perhaps a text that several
prompts begin with. The real `Scheduler`, `Pages` and `PrefixCache` plan every step; a step takes as
long as a roofline says (`counts`, peaks of a device, `efficiency` of them), and its results are
known one step late, as in the engine. What comes out depends on the policy and not on a machine:

    seconds(step) = max(FLOP / peak, bytes / bandwidth) / efficiency

Over several replicas the policies of `routing` say where a request goes when it arrives.

Times: first token after arrival, and between tokens of a request, at the 50th and 99th percentile.
"""

import collections
import dataclasses
import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.bench import counts
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.lab.devices import Device
from deepinfer_jax.runtime.pages import PAGE, Pages
from deepinfer_jax.runtime.plans import Outcome, Policy, Step
from deepinfer_jax.runtime.prefix import PrefixCache
from deepinfer_jax.runtime.prefix_types import PrefixPolicy
from deepinfer_jax.runtime.routing import ROUTES, Load
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
    """Seconds are modelled. computed: prompt tokens that were; preemptions: of both sorts; given:
    requests that each replica got."""

    seconds: float
    tokens: int
    prompt_tokens: int
    computed: int
    first: list[float]
    between: list[float]
    preemptions: int
    given: list[int]

    def summary(self) -> dict[str, float]:
        """Throughput and percentiles, as one record."""
        found: dict[str, float] = {
            "tokens_s": self.tokens / self.seconds,
            "computed": self.computed / self.prompt_tokens,
            "preemptions": self.preemptions,
            "uneven": max(self.given) * len(self.given) / sum(self.given),
        }
        for name, values in (("first", self.first), ("between", self.between)):
            for percent in (50, 99):
                found[f"{name}_p{percent}_ms"] = 1e3 * float(np.percentile(values, percent))
        return found


class _Group:
    """One replica on the modelled clock: its scheduler, pages, prefix cache and device."""

    def __init__(self, run: "_Run", pages: Pages, prefix: PrefixPolicy | None, seed: int):
        self.run, self.policy, self.rng = run, run.policy, random.Random(seed)
        self.prefix = None
        if prefix is not None:
            nothing = np.zeros(1, np.int8)  # the content of a page does not matter here
            copies = lambda pages: [nothing for _ in pages]  # noqa: E731
            self.prefix = PrefixCache(prefix, b"", copies, (nothing, nothing))
            self.prefix.use(pages)
        self.scheduler = Scheduler(run.policy, pages, self.prefix)
        self.free = 0.0  # when the device is
        self.given = self.computed = 0
        self.flight: tuple[Step, dict[int, int], float] | None = None
        self.read: tuple[Step, dict[int, int], float] | None = None  # waited for by the host

    def load(self, keys: list[bytes]) -> Load:
        """What a request of a prompt with these pages sees."""
        warm = 0 if self.prefix is None else self.prefix.expected(keys)
        return Load(self.scheduler.backlog, warm, self.given)

    def add(self, number: int, request: Request, ids: list[int]) -> None:
        self.given += 1
        self.scheduler.add(number, request.prompt, request.new)
        if self.prefix is not None:
            self.prefix.know(number, ids, request.prompt - 1)

    def wake(self, now: float) -> float | None:
        """Reads what is done, sends what can be planned; when the host is to look again."""
        if self.read is not None:
            self._commit(now, *self.read[:2])
            self.read = None
        while True:
            if self.prefix is not None:
                self.prefix.settle()
            step, before = self.scheduler.plan(), self.flight
            self.flight = None
            if step is not None:
                self.flight = (step, self._carry_out(now, step), self.free)
            if before is not None:  # its results are read while the next one runs
                self.read = before
                return before[2]
            if step is None:
                return None

    def _carry_out(self, now: float, step: Step) -> dict[int, int]:
        """Keeps the device busy for the step's time; tokens by request."""
        work: Any = step.work
        if step.prefill:
            self.computed += sum(chunk.count for chunk in work)
            sequences, width = step.shape
            start = max(chunk.start for chunk in work)
            self._take(now, self.run.clock.prefill, sequences, width, start)
            for chunk in work:
                end = chunk.start + chunk.count
                if self.prefix is not None and self.prefix.wanted(chunk.request, end):
                    self.prefix.reached(chunk.request, chunk.slot, end, np.zeros(1, np.int8))
            return {chunk.request: 1 for chunk in work if chunk.last}
        if work:
            made, trace = self.run.made, self.run.trace
            requests = [turn.request for turn in work]
            longest = max(trace[number].prompt + made[number] for number in requests)
            rows = 1 + self.policy.block
            self._take(now, self.run.clock.decode, len(requests), rows, longest)
            return {number: 1 + self._accepted() for number in requests}
        return {}

    def _take(
        self, now: float, price: Callable[..., float], sequences: int, width: int, start: int
    ) -> None:
        """Adds a step to the device's time; contexts are priced in grains."""
        key, prices = (price.__name__, sequences, width, start // GRAIN), self.run.prices
        if key not in prices:
            grain = start // GRAIN * GRAIN
            prices[key] = price(sequences, width, grain, draft=self.policy.block > 0)
        self.free = max(self.free, now) + prices[key]

    def _accepted(self) -> int:
        for place, share in enumerate(self.run.acceptance[: self.policy.block]):
            if self.rng.random() >= share:
                return place
        return min(self.policy.block, len(self.run.acceptance))

    def _commit(self, now: float, step: Step, tokens: dict[int, int]) -> None:
        outcomes = {}
        for number, count in tokens.items():
            count = self.run.taken(now, number, count)
            if count > 0:
                ended = self.run.made[number] >= self.run.trace[number].new
                outcomes[number] = Outcome(count, ended)
                if ended and self.prefix is not None:
                    self.prefix.forget(number)
        self.scheduler.commit(step, outcomes)


class _Run:
    """One trace through one policy, over replicas that share nothing but the arrivals."""

    def __init__(
        self,
        trace: Sequence[Request],
        policy: Policy,
        pools: Sequence[Pages],
        clock: Clock,
        prefix: PrefixPolicy | None,
        acceptance: Sequence[float],
        seed: int,
        route: str,
    ):
        self.trace, self.policy, self.clock = trace, policy, clock
        self.acceptance, self.route = acceptance, ROUTES[route]
        self.prices: dict[tuple[Any, ...], float] = {}
        self.made = collections.Counter[int]()
        self.last: dict[int, float] = {}
        self.first: list[float] = []
        self.between: list[float] = []
        self.groups = [_Group(self, pages, prefix, seed + at) for at, pages in enumerate(pools)]

    def run(self) -> Result:
        """Events in order of time: an arrival (before anything else then), or a replica's turn."""
        order = sorted(range(len(self.trace)), key=lambda number: self.trace[number].arrival)
        events = [(self.trace[number].arrival, -1, number) for number in order]
        idle, now = set(range(len(self.groups))), 0.0
        while events:
            now, at, number = heapq.heappop(events)
            if at < 0:
                request = self.trace[number]
                ids = request.ids(number).tolist()
                first = self.groups[0].prefix
                keys = [] if first is None else first.keys(ids)
                at = self.route([group.load(keys) for group in self.groups])
                self.groups[at].add(number, request, ids)
                if at in idle:
                    idle.remove(at)
                    heapq.heappush(events, (now, at, 0))
                continue
            again = self.groups[at].wake(now)
            if again is None:
                idle.add(at)
            else:
                heapq.heappush(events, (again, at, 0))
        preempted = sum(sum(group.scheduler.preemptions.values()) for group in self.groups)
        return Result(
            now,
            sum(self.made.values()),
            sum(request.prompt for request in self.trace),
            sum(group.computed for group in self.groups),
            self.first,
            self.between,
            preempted,
            [group.given for group in self.groups],
        )

    def taken(self, now: float, number: int, count: int) -> int:
        """Counts and times a request's new tokens: how many of them it wanted."""
        request = self.trace[number]
        count = min(count, request.new - self.made[number])
        if count <= 0:
            return 0
        if number not in self.last:
            self.first.append(now - request.arrival)
        else:
            self.between += [(now - self.last[number]) / count] * count
        self.last[number] = now
        self.made[number] += count
        return count


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
    replicas: int = 1,
    route: str = "warm",
) -> Result:
    """Runs a trace to its end. acceptance: shares of drafts that stand, by place of the block;
    context: most tokens of a request; policy, pages, clock: of each replica; route: of
    `routing.ROUTES`. Raises ValueError for a request that can never be served."""
    per_slot = -(-context // PAGE)
    pools = [Pages(pages, policy.slots, per_slot) for _ in range(replicas)]
    return _Run(trace, policy, pools, clock, prefix, acceptance, seed, route).run()


def compare(
    trace: Sequence[Request],
    text: str,
    clock: Clock,
    *,
    slots: int,
    pages: int | None = None,
    acceptance: Sequence[float] = (),
    replicas: int = 1,
) -> Result:
    """A trace under a policy written "P:D" or "P:D:prefix": prefill and decode steps in a row, and
    after one more colon how requests are spread over replicas (default: warm).

    Chunks are 512 or 2,048 tokens, drafts as many as `acceptance` has shares. pages: None gives
    every slot the longest request. Raises ValueError for another text.
    """
    first, second, *rest = [*text.split(":"), ""]
    route = next((name for name in rest if name in ROUTES), "warm")
    known = (["prefix", route, ""], ["prefix", ""], [route, ""], [""])
    if not (first.isdigit() and second.isdigit() and rest in known):
        raise ValueError(
            f"policy {text!r}: expected P:D or P:D:prefix, then perhaps one of "
            f"{', '.join(f':{name}' for name in ROUTES)}; such as 4:4"
        )
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
        prefix=PrefixPolicy() if "prefix" in rest else None,
        acceptance=acceptance,
        replicas=replicas,
        route=route,
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
