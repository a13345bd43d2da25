"""Which requests the next step works on: plain Python, no arrays, no clock, no randomness.

    step = scheduler.plan()             # while the device still runs the step before
    ... dispatch step.moves and step.work, read the results of the step before ...
    scheduler.commit(earlier, {request: Outcome(tokens, finished)})

A step is a prefill (a rectangle of prompt chunks) or a decode (every running request once). Results
are committed late, so lengths on the device run ahead of those known here; a plan reserves pages
for the longest a request can have become and skips one that must have ended by then.

Waiting is bounded on both sides: after ``prefill_burst`` prefill steps in a row a decode step comes
first if any request is running, and after ``decode_burst`` decode steps a prefill. The request
longest unserved leads a prefill; others with chunks of its width join it. Requests enter in order
of arrival, save that one may join a leader of its width; while the first in line lacks room, nobody
enters. Chunk boundaries depend on the request alone.

When pages run out the youngest request gives way: its pages and slot state move to the host while
``host_pages`` last, and come back whole; else it is computed again from its tokens. The oldest
never gives way, so somebody always advances.
"""

import bisect
import collections
import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any

from deepinfer_jax.runtime.plans import Act, Chunk, Move, Outcome, Policy, Step, Turn


class State(enum.Enum):
    WAITING = "waiting"  # no slot; starts from its tokens
    PREFILL = "prefill"  # in a slot, prompt not yet done
    RUNNING = "running"  # in a slot, decoding
    HOST = "host"  # no slot; its state is on the host
    DRAINING = "draining"  # evicted; tokens of a step in flight are still to come


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """A request as the scheduler sees it. pages: what it holds when it has all its tokens; most,
    least: tokens that steps in flight may still add."""

    request: int
    arrival: int
    tokens: int
    limit: int
    pages: int
    kind: str
    alone: bool
    served: int
    state: State = State.WAITING
    slot: int = -1
    target: int = 0
    prefilled: int = 0
    in_flight: int = 0
    most: int = 0
    least: int = 0
    saved: int = 0


class Scheduler:
    """Continuous batching over ``policy.slots`` slots and one pool of pages."""

    def __init__(self, policy: Policy, pages: Any, prefix: Any = None):
        # A pages.Pages and a prefix.PrefixCache or None, neither of which is imported here.
        self.policy, self.pages, self.prefix = policy, pages, prefix
        self.host_used = 0
        self.preemptions = {Act.OFFLOAD: 0, Act.EVICT: 0}
        self._jobs: dict[int, Job] = {}
        self._lines: dict[State, list[Job]] = {State.WAITING: [], State.HOST: []}  # by arrival
        self._slots: dict[int, Job] = {}  # PREFILL and RUNNING
        self._free = list(range(policy.slots - 1, -1, -1))
        self._arrivals = self._number = self._committed = 0
        self._run, self._was_prefill = 0, True
        self._moves: list[Move] = []

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._jobs)

    @property
    def in_flight(self) -> int:
        """Steps planned and not committed."""
        return self._number - self._committed

    @property
    def idle(self) -> int:
        """Slots that nobody is in."""
        return len(self._free)

    @property
    def backlog(self) -> int:
        """Most tokens that are still to be computed: of prompts, and those to be made."""
        total = 0
        for job in self._jobs.values():
            fresh = job.state in (State.WAITING, State.DRAINING)
            total += job.limit - job.tokens
            total += job.tokens if fresh else job.target - job.prefilled
        return total

    def state(self, request: int) -> State:
        """Where a request that has not ended is."""
        return self._jobs[request].state

    def add(self, request: int, prompt: int, new: int, kind: str = "", alone: bool = False) -> None:
        """Enter a request of ``prompt`` tokens that wants at most ``new`` more.

        kind: only chunks of equal kind share a prefill step. alone: the request needs its last
        result before its next turn (a mask made on the host). Raises ValueError if it can never
        be served.
        """
        self._queue(self._new(request, prompt, new, kind, alone))

    def resume(
        self, request: int, tokens: int, new: int, pages: int, kind: str = "", alone: bool = False
    ) -> None:
        """Enter a request that was begun elsewhere and has ``tokens``, the newest of them sampled;
        its state and its ``pages`` come in as those of one that was preempted to the host."""
        job = self._new(request, tokens, new, kind, alone)
        job.saved = pages
        self.host_used += pages + self.policy.state_pages
        self._queue(job, State.HOST)

    def give(self, request: int) -> tuple[int, tuple[int, ...]]:
        """Forget a request that is done with its prompt and goes on elsewhere: the slot and the
        pages that it had. They may be given to others at once, but not before its state is read."""
        job = self._jobs[request]
        had = job.slot, tuple(self.pages.row(job.slot))
        self._end(job)
        return had

    def _new(self, request: int, tokens: int, new: int, kind: str, alone: bool) -> Job:
        if request in self._jobs:
            raise ValueError(f"request {request} is here already")
        if tokens < 1 or new < 1:
            raise ValueError(f"a request needs a prompt and tokens to make: {tokens}, {new}")
        room = min(self.pages.per_slot, self.pages.total // self.pages.shards)
        if (needed := self.pages.needed(tokens + new - 1)) > room:
            raise ValueError(
                f"{tokens} prompt tokens and {new} new ones need {needed} pages of "
                f"{self.pages.page} tokens, there are {room}"
            )
        job = Job(request, self._arrivals, tokens, tokens + new, needed, kind, alone, self._number)
        self._arrivals += 1
        self._jobs[request] = job
        return job

    def abort(self, request: int) -> bool:
        """Forget a request at once, wherever it is; False if it has ended. In-flight results of it
        are ignored when they are committed."""
        job = self._jobs.get(request)
        if job is not None:
            self._end(job)
        return job is not None

    def plan(self, draft_rows: int | None = None) -> Step | None:
        """The next step, or None if nothing can be done before a commit.

        draft_rows: draft rows granted to this decode step, all requests together (default: every
        one its full block); it only chooses the bucket.
        """
        self._moves = []
        self._restore()
        lead, turns = self._lead(), self._turns()
        prefill = self._prefill_now(bool(lead), bool(turns))
        work: tuple[Chunk, ...] | tuple[Turn, ...] = ()
        shape: tuple[int, ...] = ()
        if prefill and lead:
            work, shape = self._prefill(lead)
        elif turns:
            work, shape = self._decode(turns, draft_rows)
        if not work and not self._moves:
            return None
        self._run = self._run + 1 if prefill == self._was_prefill else 1
        self._was_prefill = prefill
        self._number += 1
        return Step(self._number, tuple(self._moves), work, shape)

    def _prefill_now(self, lead: bool, turns: bool) -> bool:
        """Which kind the next step is, by what there is to do: in turns, a burst of each."""
        burst = self.policy.prefill_burst if self._was_prefill else self.policy.decode_burst
        return self._was_prefill == (self._run < burst) if lead and turns else lead

    def commit(self, step: Step, outcomes: Mapping[int, Outcome]) -> None:
        """Take the results of a step, in the order of planning.

        outcomes: one for each request that got a token (every turn, every last chunk) and has not
        ended; others may be given and are ignored.
        """
        if step.number != self._committed + 1:
            raise ValueError(f"step {step.number} committed after step {self._committed}")
        self._committed = step.number
        for item in step.work:
            job = self._jobs.get(item.request)
            if job is None:
                continue
            job.in_flight -= 1
            if isinstance(item, Turn) or item.last:
                job.most -= 1 + (self.policy.block if isinstance(item, Turn) else 0)
                job.least -= 1
                outcome = outcomes[item.request]
                job.tokens += outcome.tokens
                if outcome.finished or job.tokens >= job.limit:
                    self._end(job)
                    continue
            if job.state is State.DRAINING and not job.in_flight:
                self._queue(job)

    def _queue(self, job: Job, state: State = State.WAITING) -> None:
        job.state = state
        bisect.insort(self._lines[state], job, key=lambda other: other.arrival)

    def _unqueue(self, job: Job) -> None:
        line = self._lines[job.state]
        del line[bisect.bisect_left(line, job.arrival, key=lambda other: other.arrival)]
        if job.state is State.HOST:
            self.host_used -= job.saved + self.policy.state_pages

    def _room(self, pages: int, request: int | None = None) -> int | None:
        """The slot that a request with so many pages may enter, None without room: its shard has
        them and a page for each request there that may still grow; the emptiest such shard, of
        those the one where most of a waiting request's prefix lies."""
        if not self._free:
            return None
        shard, held, decodes = self.pages.shard, self.pages.held, self.policy.decodes
        inside, grow = ([0] * self.pages.shards for _ in range(2))
        for slot, job in self._slots.items():
            one = shard(slot)
            inside[one] += 1
            grow[one] += decodes and held(slot) < job.pages
        lowest = {shard(slot): slot for slot in self._free}  # they are in falling order
        fits = [slot for one, slot in lowest.items() if pages <= self.pages.room(slot) - grow[one]]
        least = min((inside[shard(slot)] for slot in fits), default=0)
        fits = [slot for slot in fits if inside[shard(slot)] == least]
        warm: collections.Counter[int] = collections.Counter()
        if self.prefix and request is not None and self.pages.shards > 1:
            warm.update({one: self.prefix.local(request, one) for one in set(map(shard, fits))})
        return min(fits, key=lambda slot: (-warm[shard(slot)], slot), default=None)

    def _enter(self, job: Job, act: Act, tokens: int, slot: int) -> None:
        self._unqueue(job)
        job.slot = slot
        self._free.remove(slot)
        self._slots[slot] = job
        if self.prefix and act is Act.ADMIT:
            job.prefilled = self.prefix.attach(job.request, slot)
        if not self.pages.grow(job.slot, tokens):
            raise RuntimeError(f"slot {job.slot}: pages promised to request {job.request} are gone")
        self._moves.append(Move(act, job.request, job.slot, tuple(self.pages.row(job.slot))))

    def _leave(self, job: Job) -> None:
        if self.prefix:
            self.prefix.left(job.request)
        self.pages.clear(job.slot)
        del self._slots[job.slot]
        bisect.insort(self._free, job.slot, key=lambda slot: -slot)
        job.slot = -1

    def _end(self, job: Job) -> None:
        del self._jobs[job.request]
        if job.slot >= 0:
            self._leave(job)
        elif job.state is not State.DRAINING:
            self._unqueue(job)

    def _restore(self) -> None:
        """Bring requests back from the host, oldest first, while their next turn has room."""
        for job in tuple(self._lines[State.HOST]):
            wanted = max(job.saved, self.pages.needed(self._reach(job)))
            if (slot := self._room(wanted)) is None:
                return
            self._enter(job, Act.RESTORE, job.saved * self.pages.page, slot)
            job.state = State.PREFILL if job.prefilled < job.target else State.RUNNING

    def _preempt(self, job: Job) -> None:
        """Take the slot and the pages of a request, keeping its state on the host if it fits."""
        held = self.pages.held(job.slot)
        fits = self.host_used + held + self.policy.state_pages <= self.policy.host_pages
        keep = fits and job.tokens + job.least < job.limit  # else its last token is on its way
        act = Act.OFFLOAD if keep else Act.EVICT
        self._moves.append(Move(act, job.request, job.slot, tuple(self.pages.row(job.slot))))
        self.preemptions[act] += 1
        self._leave(job)
        if keep:
            job.saved = held
            self.host_used += held + self.policy.state_pages
            self._queue(job, State.HOST)
        elif job.in_flight:
            job.state = State.DRAINING
        else:
            self._queue(job)

    def _reach(self, job: Job) -> int:
        """Tokens that a request can have the rows of after its next turn."""
        return min(job.tokens + job.most + self.policy.block, job.limit - 1)

    def _turns(self) -> list[Job]:
        """Running requests that can take a turn, oldest first."""
        if not self.policy.decodes:
            return []
        free = [
            job
            for job in self._slots.values()
            if job.state is State.RUNNING
            and job.tokens + job.least < job.limit  # else it must have ended by then
            and not (job.alone and job.in_flight)
        ]
        return sorted(free, key=lambda job: job.arrival)

    def _decode(
        self, turns: list[Job], draft_rows: int | None
    ) -> tuple[tuple[Turn, ...], tuple[int, ...]]:
        block, granted = self.policy.block, list[Turn]()
        for job in turns:
            if job.state is not State.RUNNING:
                continue  # gave way to an older one
            while job.slot >= 0 and not self.pages.grow(job.slot, self._reach(job)):
                shard = self.pages.shard(job.slot)
                near = (o for o in self._slots.values() if self.pages.shard(o.slot) == shard)
                self._preempt(max(near, key=lambda other: other.arrival))
            if job.slot >= 0:
                granted.append(Turn(job.request, job.slot))
                job.in_flight += 1
                job.most += 1 + block
                job.least += 1
        drafts = len(granted) * block if draft_rows is None else draft_rows
        rows = [rows for rows in self.policy.decode_rows if rows >= len(granted) + drafts]
        work = tuple(sorted(granted, key=lambda turn: turn.slot))
        return work, (min(rows, default=max(self.policy.decode_rows)),)

    def _lead(self) -> Job | None:
        """The request that the next prefill is for: the one longest unserved."""
        jobs = [job for job in self._slots.values() if job.state is State.PREFILL]
        first = next(self._ready(), None)
        if first and self._room(self.pages.needed(first.tokens)) is not None:
            jobs.append(first)
        return min(jobs, key=lambda job: (job.served, job.arrival), default=None)

    def _ready(self) -> Iterator[Job]:
        """Waiting requests that nobody in a slot is computing a prefix for, oldest first."""
        for job in self._lines[State.WAITING][: 4 * self.policy.slots]:
            if not (self.prefix and self.prefix.waits(job.request)):
                yield job

    def _shape(self, job: Job) -> tuple[str, int]:
        left = job.target - job.prefilled
        if job.state is State.WAITING:
            left = job.tokens - (self.prefix.found(job.request) if self.prefix else 0)
        return job.kind, self.policy.width(left)

    def _prefill(self, lead: Job) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
        shape = self._shape(lead)
        heights = self.policy.sequences(shape[1])
        inside = [job for job in self._slots.values() if job.state is State.PREFILL]
        inside.sort(key=lambda job: (job.served, job.arrival))
        group: list[Job] = []

        def height(*slots: int) -> int:
            return self.pages.needs([job.slot for job in group] + list(slots))

        for job in dict.fromkeys([lead, *inside, *self._ready()]):
            if self._shape(job) != shape:
                continue
            if self.prefix and job.state is State.WAITING and self.prefix.waits(job.request):
                continue  # one that has just entered computes its prefix
            if job.state is State.WAITING:
                slot = self._room(self.pages.needed(job.tokens), job.request)
                if slot is None or height(slot) > heights[-1]:
                    break
                job.target, job.prefilled = job.tokens, 0
                self._enter(job, Act.ADMIT, job.target, slot)
                job.state = State.PREFILL
            elif height(job.slot) > heights[-1]:
                continue
            group.append(job)
        work = tuple(self._chunk(job, shape[1]) for job in group)
        return work, (next(count for count in heights if count >= height()), shape[1])

    def _chunk(self, job: Job, width: int) -> Chunk:
        start = job.prefilled
        count = min(width, job.target - start)
        if self.prefix:
            count = self.prefix.stop(job.request, start, start + count) - start
        last = start + count == job.target
        job.prefilled, job.served = start + count, self._number + 1
        job.in_flight += 1
        if last:
            job.state = State.RUNNING
            job.most += 1
            job.least += 1
        return Chunk(job.request, job.slot, start, count, last)
