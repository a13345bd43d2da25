"""The engine's loop: plan step n + 1 and dispatch it, then read the results of step n.

The host never waits for the step it has just dispatched: newest tokens, lengths and drafts stay on
the device, and the scheduler plans without them. What is sent with a step is in `feeding.py`, what
is taken from its results in `reading.py`; `launch.py` hands it over meanwhile.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from deepinfer_jax import structured
from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.runtime import reading, speculation
from deepinfer_jax.runtime import state as states
from deepinfer_jax.runtime.experts import Counts
from deepinfer_jax.runtime.feeding import Desk, decoder_rows
from deepinfer_jax.runtime.grammars import Grammars
from deepinfer_jax.runtime.launch import Launcher, Task
from deepinfer_jax.runtime.moves import Mover
from deepinfer_jax.runtime.pages import PAGE, Pages
from deepinfer_jax.runtime.plans import Act, Outcome, Policy, Step, Turn
from deepinfer_jax.runtime.prefix import PrefixCache, ready
from deepinfer_jax.runtime.prefix_types import PrefixPolicy
from deepinfer_jax.runtime.programs import Programs, leaving
from deepinfer_jax.runtime.requests import Handed, Sample
from deepinfer_jax.runtime.sampling_params import MAX_LOGPROBS
from deepinfer_jax.runtime.scheduler import Scheduler
from deepinfer_jax.runtime.step_types import Options, Results, StepOutput

SCORE = "score"
Enter = Callable[[states.State], states.State] | None  # of a step that requests are admitted in


class Flight(NamedTuple):
    """A dispatched step, the samples of its groups, where those stand, its results to come (device
    arrays, once it is handed over), and which captures in them are the samples'."""

    step: Step
    samples: tuple[Sample, ...]
    places: list[int]
    output: Task | None
    capture: tuple[str, ...] = ()


class Loop:
    """Samples in, tokens out; see `engine.LLM` for the public face.

    policy: shapes and fairness. context: most tokens of a request. adaptive: drafts are verified as
    far as `costs` (seconds of a decode step by (groups, rows)) say that it pays, else all of them.
    counts: gets the experts that each step's tokens went to. dispatched: steps so far, by kind,
    groups and rows (of a prefill: sequences and width). ready: samples whose prompt is done, for
    `give`, where the policy does not decode.
    """

    def __init__(
        self,
        programs: Programs,
        policy: Policy,
        *,
        context: int,
        pages: int,
        compiler: structured.Compiler | None = None,
        adaptive: bool = False,
        prefix: PrefixPolicy | None = None,
        identity: bytes = b"",
    ):
        self.programs, self.policy, self.context = programs, policy, context
        self.options = programs.options
        self.calibration = speculation.Calibration(self.options.block)
        self.adaptive = adaptive and self.options.block > 0
        self.costs: dict[tuple[int, int], float] = {}
        self.capture: tuple[str, ...] = ()
        self.counts: Counts | None = None
        self.dispatched: collections.Counter[tuple[str, int, int]] = collections.Counter()
        self._launcher = Launcher(inline=programs.everywhere)
        self._total, self._compiler = pages, compiler
        self._samples: dict[int, Sample] = {}
        self._prefix_policy = prefix
        self.swap(programs.weights, identity)

    def __len__(self) -> int:
        """Samples that have not ended."""
        return len(self._samples)

    @property
    def oldest(self) -> Flight | None:
        """The oldest step that was sent and not read."""
        return self._flights[0] if self._flights else None

    @property
    def state(self) -> Any:
        """The state after the newest step, None between `give_back` and `reset`."""
        return self._launcher.state

    @state.setter
    def state(self, state: Any) -> None:
        self._launcher.state = state

    def reset(self) -> None:
        """Ends every sample and forgets all work, wherever a turn was broken off."""
        cfg = self.programs.setup.cfg
        for sample in self._samples.values():
            if not sample.finished:
                sample.end("abort")
        shards = self.programs.shards
        per_slot = -(-self.context // PAGE)
        self.pages = Pages(self._total, self.policy.slots, per_slot, shards=shards)
        self.state = None  # let go of it first: two need not fit
        self.state = self.empty_state()
        if self._prefix_policy is not None:
            if self.prefix is None:
                self.prefix = PrefixCache(
                    self._prefix_policy,
                    self._identity,
                    lambda pages: self.programs.take_pages(self.state, pages),
                    states.cached_like(self.state),
                    wait=self.programs.everywhere,  # what has arrived is not the same everywhere
                )
            self.prefix.use(self.pages)
        self.scheduler = Scheduler(self.policy, self.pages, self.prefix)
        self.desk = Desk(cfg, self.pages.per_slot)
        self.grammars = Grammars(
            cfg.vocab_size, self._compiler, self.programs.whole, self.policy.slots
        )
        self.mover = Mover(self.programs, self.grammars, self.prefix, per_slot)
        self._samples = {}
        self.ready: collections.deque[Sample] = collections.deque()
        self.confidences = speculation.Confidences()
        self._flights: collections.deque[Flight] = collections.deque()

    def swap(self, weights: Weights, identity: bytes) -> None:
        """Goes on with other weights of the same shapes and places, from an empty state.

        identity: of cached prompts, which are those of one set of weights.
        """
        self.renew(weights, identity)
        self.reset()

    def renew(self, weights: Weights, identity: bytes) -> None:
        """Takes other weights before a `reset`, which it needs."""
        self.programs.weights = weights
        self._identity, self.prefix = identity, None

    def empty_state(self) -> states.State:
        """The state of free slots."""
        return self.programs.empty(self.policy.slots, self.pages.total)

    def add(self, sample: Sample) -> None:
        """Enters a sample; one that cannot be served ends at once with its error."""
        self._samples[sample.number] = sample
        if sample.params.structured is None:
            self._enqueue(sample)
        elif (error := self.grammars.add(sample)) is not None:
            self._drop(sample, error)

    def abort(self, sample: Sample) -> None:
        """Ends a sample wherever it is."""
        if sample.number in self._samples:
            self.scheduler.abort(sample.number)
            sample.end("abort")
            self._forget(sample)

    def give(self, sample: Sample) -> Handed:
        """Lets go of a sample of `ready`; its state is copied before anybody writes over it."""
        slot, held = self.scheduler.give(sample.number)
        saved = self.mover.take(self.state, slot, held)
        ahead = self.confidences.ahead(sample.number)
        self._let_go(sample)
        return Handed(sample, saved, len(held), ahead)

    def receive(self, handed: Handed) -> None:
        """Goes on with a sample that another loop has begun."""
        number = handed.sample.number
        self.mover.handed[number] = handed
        if handed.ahead is not None:
            self.confidences.read(number, handed.ahead, verified=False)
        self.add(handed.sample)

    @property
    def accepts(self) -> bool:
        """Whether a slot is free for one more sample to be received."""
        return len(self.mover.handed) < self.scheduler.idle

    def turn(self, wait: bool = True) -> bool:
        """One round: dispatch what can be planned, then read the step before it; whether either.

        wait: else at most two steps are in flight, and what is not there yet is read later.
        """
        if self.programs.everywhere:  # which grammar compiles first is not the same everywhere
            self.grammars.settle()
        if len(self.grammars):
            self._launcher.settle()  # a grammar goes where steps read theirs
        for sample, error in self.grammars.ready():
            self._enqueue(sample) if error is None else self._drop(sample, error)
        if self.prefix is not None:
            self.prefix.settle()
        step = self.scheduler.plan() if wait or len(self._flights) < 2 else None
        if step is not None:
            self._flights.append(self._dispatch(step))
        if self._flights and (len(self._flights) > 1 or step is None):
            if wait or _arrived(self._flights[0]):
                self._consume(self._flights.popleft())
                return True
        elif step is None and wait and len(self.grammars):
            self.grammars.wait()  # nothing else to do
        return step is not None

    def drain(self) -> None:
        """Reads every step in flight."""
        while self._flights:
            self._consume(self._flights.popleft())

    def give_back(self) -> list[Sample]:
        """Every sample that has not ended, to go on elsewhere; nothing is left before `reset`."""
        samples, self._samples = list(self._samples.values()), {}
        self._flights.clear()
        self.state = None
        for sample in samples:
            self.mover.forget(sample.number)
            if sample.finished:  # in the step whose reading was broken off
                sample.close()
        return [sample for sample in samples if not sample.finished]

    def buckets(self) -> dict[int, tuple[int, ...]]:
        """Compiled decode shapes: groups -> row counts."""
        block = self.options.block
        drafts = {0, (block + 1) // 2, block} if self.adaptive else {block}
        few = -(-min(8, self.policy.slots) // self.programs.shards) * self.programs.shards
        heights = {few, self.policy.slots}
        return {n: tuple(n * (1 + k) for k in sorted(drafts)) for n in sorted(heights)}

    def _enqueue(self, sample: Sample) -> None:
        kind = SCORE if sample.params.prompt_logprobs is not None else ""
        handed, there = self.mover.handed.get(sample.number), len(sample.tokens)
        work = (there, sample.limit - there)  # of one that was begun elsewhere, also its output
        alone = sample.matcher is not None
        try:
            if handed is None:
                self.scheduler.add(sample.number, *work, kind, alone)
            else:
                self.scheduler.resume(sample.number, *work, handed.pages, kind, alone)
        except ValueError as error:
            self._drop(sample, str(error))
            return
        setup, computed = self.programs.setup, kind or self.capture or sample.routes is not None
        if self.prefix is not None and handed is None and not computed:
            # Of the decoder half, bounded replay computes the last rows anew in any case.
            keep = 1 if setup.numerics.replay == "full" else setup.cfg.replay_keep
            self.prefix.know(sample.number, sample.prompt, len(sample.prompt) - keep)

    def _dispatch(self, step: Step) -> Flight:
        moves = [(move, self._samples[move.request]) for move in step.moves]
        samples = tuple(self._samples[item.request] for item in step.work)
        enter = None
        if samples and moves and all(move.act is Act.ADMIT for move in step.moves):
            enter = self.mover.entering(moves)
        elif moves:
            self.state = self.mover.carry_out(self.state, moves)
        if not samples:
            return Flight(step, (), [], None)
        if any(sample.matcher is not None for sample in samples):
            self._launcher.settle()  # masks go where the step before reads its own
        faults = self.grammars.write_masks(samples)
        slots = [item.slot for item in step.work]
        groups, size = step.shape if step.prefill else self._bucket(samples, slots)
        places = self.pages.places(slots, groups)
        work: Any = tuple(zip(places, step.work, samples, strict=True))
        run = self._prefill if step.prefill else self._decode
        output = run(groups, size, work, samples, enter)
        for sample, error in faults:  # they are in the step, which was planned with them
            self.scheduler.abort(sample.number)
            self._drop(sample, error)
        return Flight(step, samples, places, output, self.capture)

    def options_for(self, samples: tuple[Sample, ...], score: bool) -> Options:
        """Static choices of a step: alternatives are reported if anybody asks for some."""
        most = max(sample.params.logprobs or 0 for sample in samples)
        top = min(MAX_LOGPROBS, self.programs.setup.cfg.vocab_size) if most or score else 0
        routes = () if self.counts is None or "routes" in self.capture else ("routes",)
        return self.options._replace(top=top, capture=self.capture + routes)

    def _launch(self, enter: Enter, program: Any, *arguments: Any, given: Any) -> Task:
        pool = self.grammars.pool

        def run(state: Any) -> tuple[Any, Results]:
            entered = state if enter is None else enter(state)
            state, output = program(*arguments, entered, pool, given)
            return state, leaving(output)

        return self._launcher.launch(run)

    def _prefill(self, groups: int, width: int, work: Any, samples: Any, enter: Enter) -> Task:
        setup = self.programs.setup
        score = any(sample.params.prompt_logprobs is not None for sample in samples)
        tail = width
        if setup.numerics.replay == "compact" and not score:
            tail = decoder_rows(setup.cfg, width, work)
        given = self.desk.prefill(groups, width, work, self.pages)
        self.dispatched["prefill", groups, width] += 1
        options = self.options_for(samples, score)
        output = self._launch(enter, self.programs.prefill, tail, score, options, given=given)
        if self.prefix is not None:
            for _, chunk, _ in work:
                end = chunk.start + chunk.count
                if self.prefix.wanted(chunk.request, end):
                    rings = None
                    if self.prefix.policy.states:
                        rings = self.programs.take_rings(self.state, chunk.slot)
                    self.prefix.reached(chunk.request, chunk.slot, end, rings)
        return output

    def _decode(self, groups: int, size: int, work: Any, samples: Any, enter: Enter) -> Task:
        given = self.desk.decode(
            groups, size, self.options.block, work, self.pages, self.calibration.temperature
        )
        options = self.options_for(samples, score=False)
        self.dispatched["decode", groups, size] += 1
        if self.options.block:
            for sample in samples:
                self.confidences.sent(sample.number)
        return self._launch(enter, self.programs.decode, size, options, given=given)

    def _bucket(self, samples: tuple[Sample, ...], slots: list[int]) -> tuple[int, int]:
        """(groups, rows) of a decode step: the rows that promise most tokens a second."""
        shapes, needed = self.buckets(), self.pages.needs(slots)
        groups = min(n for n in shapes if n >= needed)
        if not self.adaptive:
            return groups, shapes[groups][-1]
        unread = self.calibration.expected()
        known = [self.confidences.known(sample.number) for sample in samples]
        stacked = np.stack([unread if one is None else one for one in known])
        chances = speculation.survival(stacked, self.calibration.temperature)
        seconds = {rows: self.costs[groups, rows] for rows in shapes[groups]}
        return groups, speculation.best_rows(chances, len(samples), seconds)

    def _consume(self, flight: Flight) -> None:
        outcomes: dict[int, Outcome] = {}
        if flight.output is not None:
            found = reading.on_host(flight.output.result())
            groups = list(zip(flight.places, flight.step.work, flight.samples, strict=True))
            if self.counts is not None and "routes" in found.captured:
                reading.count_experts(self.programs.setup, groups, found, self.counts)
            if len(found.captured) > len(flight.capture):
                kept = {name: found.captured[name] for name in flight.capture}
                found = dataclasses.replace(found, captured=kept)
            groups = [group for group in groups if group[2].number in self._samples]
            reading.read_extras(self.programs.setup, groups, found, self.calibration)
            sampled = [group for group in groups if isinstance(group[1], Turn) or group[1].last]
            if self.options.block:
                self._read_confidences(sampled, found)
            for place, _, sample in sampled:
                outcomes[sample.number] = reading.read_tokens(sample, found, place)
        self.scheduler.commit(flight.step, outcomes)
        for number, outcome in outcomes.items():
            if outcome.finished:
                self._forget(self._samples[number])
            elif not self.policy.decodes:
                self.ready.append(self._samples[number])

    def _read_confidences(self, groups: list[reading.Group], found: StepOutput) -> None:
        sent = {sample.number for flight in self._flights for sample in flight.samples}
        for place, _, sample in groups:
            number = sample.number
            self.confidences.read(number, found.ahead[place], verified=number in sent)

    def _drop(self, sample: Sample, message: str) -> None:
        sample.fail(message)
        self._forget(sample)

    def _forget(self, sample: Sample) -> None:
        self._let_go(sample)
        sample.close()

    def _let_go(self, sample: Sample) -> None:
        del self._samples[sample.number]
        self.mover.forget(sample.number)
        self.confidences.forget(sample.number)
        if self.prefix is not None:
            self.prefix.forget(sample.number)
        self.grammars.release(sample)


def _arrived(flight: Flight) -> bool:
    """Whether a step's results are there."""
    return flight.output is None or (flight.output.done() and ready(flight.output.result()))
