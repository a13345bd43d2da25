"""Several decode groups behind one engine: each has all weights, its own slots, pages and steps.

`Replicas` does what a `Loop` does for `engine.LLM`: samples in, turns, tokens out. A sample goes to
one group (`routing.py`) and stays there, unless the group fails: then every sample that it had goes
on elsewhere from the tokens that were read, is computed again from them, and gets the tokens that
it would have got (noise depends on seed and position alone; bits with `Numerics.invariant`). A
result is read once and a sample is in one group, so none is lost, doubled or said twice.

One thread does all work of the host: dispatch does not wait for a device, Python would run threads
one after another anyway, and nothing needs a lock. What would wait is handed out, to one thread a
group that blocks until the group's oldest step is done; whoever is done first goes on, so a long
prefill in one group holds no other up, and a device that hangs holds up its own requests only.
"""

import concurrent.futures
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.runtime import groups, routing
from deepinfer_jax.runtime.experts import Counts
from deepinfer_jax.runtime.loop import Flight, Loop
from deepinfer_jax.runtime.prefix_types import Counts as PrefixCounts
from deepinfer_jax.runtime.requests import Sample
from deepinfer_jax.runtime.step_types import Options


@dataclasses.dataclass(frozen=True)
class ReplicaReport:
    """One replica since the engine was made.

    given: requests' samples that it got, moved ones among them; moved: samples that it gave back;
    steps: dispatched; queue: tokens it still has to compute; failure: why it serves no more, or
    None; prefix: of its prefix cache, or None.
    """

    devices: tuple[Any, ...]
    given: int
    moved: int
    steps: int
    queue: int
    failure: str | None
    prefix: PrefixCounts | None


@dataclasses.dataclass(eq=False)
class _Replica:
    number: int
    loop: Loop
    given: int = 0
    moved: int = 0
    failure: str | None = None
    stale: bool = False  # its weights are not those of the others
    queue: int | None = None  # as of this turn
    watched: Any = None
    watch: concurrent.futures.Future[Any] | None = None


class Replicas:
    """The `Loop` of several groups. loops: one each, alike but for their devices; route: see
    `routing.py`."""

    def __init__(self, loops: Sequence[Loop], route: routing.Route = routing.warm):
        self._all = [_Replica(number, loop) for number, loop in enumerate(loops)]
        self._route = route
        self._last = ""
        self._watchers = concurrent.futures.ThreadPoolExecutor(len(loops), "replica")

    @property
    def groups(self) -> list[Loop]:
        """The loops of the replicas that serve."""
        return [one.loop for one in self._live()]

    @property
    def options(self) -> Options:
        return self._all[0].loop.options

    @property
    def context(self) -> int:
        return self._all[0].loop.context

    @property
    def capture(self) -> tuple[str, ...]:
        return self._all[0].loop.capture

    @capture.setter
    def capture(self, names: tuple[str, ...]) -> None:
        for one in self._all:
            one.loop.capture = names

    @property
    def counts(self) -> Counts | None:
        return self._all[0].loop.counts

    @counts.setter
    def counts(self, counts: Counts | None) -> None:
        for one in self._all:
            one.loop.counts = counts

    def __len__(self) -> int:
        """Samples that have not ended."""
        return sum(map(len, self.groups))

    def report(self) -> list[ReplicaReport]:
        """What each replica did and has to do."""
        return [
            ReplicaReport(
                groups.of(one.loop.programs.weights.norm),
                one.given,
                one.moved,
                one.loop.dispatched.total(),
                0 if one.failure is not None else _queue(one.loop),
                one.failure,
                None if one.loop.prefix is None else one.loop.prefix.counts,
            )
            for one in self._all
        ]

    def add(self, sample: Sample) -> None:
        """Enters a sample in the replica that the policy names; without any it ends in an error."""
        live = list(self._live())
        if not live:
            sample.fail(f"no replica is left: {self._last}")
            return
        first = live[0].loop.prefix
        keys = [] if first is None else first.keys(sample.prompt)
        loads = []
        for one in live:
            found = 0 if one.loop.prefix is None else one.loop.prefix.expected(keys)
            one.queue = _queue(one.loop) if one.queue is None else one.queue
            loads.append(routing.Load(one.queue, found, one.given))
        chosen = live[self._route(loads)]
        chosen.given += 1
        chosen.queue = loads[live.index(chosen)].queue + sample.limit
        chosen.loop.add(sample)

    def abort(self, sample: Sample) -> None:
        """Ends a sample wherever it is."""
        for one in self._live():
            one.loop.abort(sample)
            one.queue = None

    def turn(self) -> None:
        """Each replica's next step and what it can read without waiting; if no replica has either,
        waits until one has."""
        for one in self._live():
            one.queue = None
        step = lambda one: one.loop.turn(wait=False)  # noqa: E731
        if any([self._guarded(one, step) for one in self._live()]) or not len(self):
            return
        going = [self._watch(one, one.loop.oldest) for one in self._live() if one.loop.oldest]
        going += [future for loop in self.groups for future in loop.grammars.compiling]
        concurrent.futures.wait(going, return_when=concurrent.futures.FIRST_COMPLETED)

    def drain(self) -> None:
        """Reads every step in flight."""
        for one in self._live():
            self._guarded(one, lambda one: one.loop.drain())

    def reset(self) -> None:
        """Ends every sample and forgets all work."""
        for loop in self.groups:
            loop.reset()

    def swap(self, weights: Weights, identity: bytes) -> None:
        """Goes on with other weights, copied to each group, also for when it is restarted."""
        for one in self._all:
            layout = one.loop.programs.setup.layout
            there = groups.of(one.loop.programs.weights.norm)
            if one.failure is None:
                one.loop.swap(groups.moved(weights, layout, there), identity)
                continue
            try:
                one.loop.renew(groups.moved(weights, layout, there), identity)
                one.stale = False
            except Exception:  # devices that are gone must not keep the others from going on
                one.stale = True

    def stop(self, number: int, reason: str) -> None:
        """Takes a replica out of service; its samples go on in the others. Raises ValueError for
        one that there is not."""
        one = self._named(number)
        if one.failure is None:
            self._failed(one, reason)

    def restart(self, number: int) -> None:
        """Puts a replica back into service, empty. Raises ValueError for one that there is not, and
        for one whose devices could not take the weights of the last `swap`."""
        one = self._named(number)
        if one.stale:
            raise ValueError(f"replica {number}: its weights are those before the last swap")
        if one.failure is not None:
            one.loop.reset()
            one.failure = one.queue = None

    def _named(self, number: int) -> _Replica:
        if not 0 <= number < len(self._all):
            raise ValueError(f"replica {number}; expected 0..{len(self._all) - 1}")
        return self._all[number]

    def _live(self) -> Iterator[_Replica]:
        return (one for one in self._all if one.failure is None)

    def _guarded(self, one: _Replica, work: Any) -> Any:
        """The replica's own part; whatever it raises is the end of this replica, not of others."""
        try:
            return work(one)
        except Exception as error:
            text = " ".join(str(error).split())
            self._failed(one, f"{type(error).__name__}: {text[:300]}")
            return True

    def _watch(self, one: _Replica, oldest: Flight) -> concurrent.futures.Future[Any]:
        """Done when the replica's oldest step is; what that step raises is raised to its reader."""
        if one.watch is None or one.watched is not oldest:
            one.watched = oldest
            one.watch = self._watchers.submit(_done, oldest)
        return one.watch

    def _failed(self, one: _Replica, reason: str) -> None:
        one.failure = reason
        one.watched = one.watch = None
        self._last = f"replica {one.number} ended with {reason}"
        samples = one.loop.give_back()
        one.moved += len(samples)
        for sample in samples:
            sample.move()
            self.add(sample)


def _queue(loop: Loop) -> int:
    """Most tokens that are still to be computed, of requests that wait for a grammar too."""
    return loop.scheduler.backlog + sum(one.limit for one in loop.grammars.waiting)


def _done(flight: Flight) -> None:
    """Waits until a step is done; raises what went wrong in it."""
    if flight.output is not None:
        jax.block_until_ready(flight.output.result())
