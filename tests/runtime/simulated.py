"""A device without arithmetic: it runs scheduler steps and checks every byte they touch.

Pages and slots hold tags instead of keys: page position -> (request, position). A token is a pure
function of (request, index), so a request's output is known wherever it is preempted, resumed or
recomputed. The first `shared` tokens of requests with one `text` are the same. Each turn reads its
whole context back from the pages in the table it was dispatched with and fails on anything that is
not its own; draft rows accept a pseudo-random number of tokens.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from deepinfer_jax.runtime.pages import Pages
from deepinfer_jax.runtime.plans import Act, Outcome, Policy, Step
from deepinfer_jax.runtime.prefix import PrefixCache
from deepinfer_jax.runtime.prefix_types import PrefixPolicy
from deepinfer_jax.runtime.scheduler import Scheduler, State


def token(request: int, index: int) -> int:
    """The token of a request at an absolute index, prompt included."""
    return (request * 1_000_003 + index * 7919) % 50_021


@dataclasses.dataclass
class Request:
    prompt: int
    new: int
    stop: int  # tokens after which it really ends, at most new
    kind: str = ""
    alone: bool = False
    shared: int = 0
    text: int = 0


@dataclasses.dataclass
class Slot:
    request: int
    length: int  # tokens whose rows are in the pages
    last: int | None = None  # the sampled token that the next turn feeds
    own: int = 0  # positions before are in shared pages and only computed for their rings


class Device:
    """Page contents, slot states and a host store, all as tags."""

    def __init__(self, pages: Pages, policy: Policy, requests: dict[int, Request]):
        self.size, self.block, self.requests = pages.page, policy.block, requests
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}  # (page, offset) -> tag
        self.slots: dict[int, Slot] = {}
        self.host: dict[int, tuple[Slot, list[dict[int, tuple[int, int]]]]] = {}
        self.prefix: PrefixCache | None = None

    def tag(self, request: int, position: int) -> tuple[int, int]:
        asked = self.requests[request]
        return (-1 - asked.text if position < asked.shared else request), position

    def copy_pages(self, pages) -> list[np.ndarray]:
        """Tags of whole pages, [size, 2]."""
        return [np.array([self.memory[page, o] for o in range(self.size)]) for page in pages]

    def run(self, step: Step, table) -> dict[int, list[int]]:
        """Execute a step against the table it was dispatched with: tokens by request."""
        for move in step.moves:
            self._move(move)
        emitted = {}
        for item in step.work:
            state, row = self.slots[item.slot], table[item.slot]
            assert state.request == item.request, (step.number, item)
            if step.prefill:
                assert item.start == state.length and item.count <= step.shape[1]
                again = min(max(state.own - item.start, 0), item.count)
                self._write(row, state, item.start + again, item.count - again)
                state.length += item.count
                if self.prefix is not None and self.prefix.wanted(item.request, state.length):
                    rings = None
                    if self.prefix.policy.states:
                        rings = np.array(self.tag(item.request, state.length - 1))
                    self.prefix.reached(item.request, item.slot, state.length, rings)
                if item.last:
                    emitted[item.request] = [token(item.request, state.length)]
            else:
                emitted[item.request] = self._turn(step, row, state)
            if item.request in emitted:
                state.last = emitted[item.request][-1]
        assert len(step.work) <= step.shape[0] if step.shape else not step.work
        return emitted

    def _turn(self, step: Step, row, state: Slot) -> list[int]:
        assert state.last == token(state.request, state.length), "another request's last token"
        request = self.requests[state.request]
        rows = 1 + self.block
        self._write(row, state, state.length, rows, beyond=request.prompt + request.new - 1)
        for position in range(min(state.length + 1, request.prompt + request.new - 1)):
            page = row[position // self.size]
            tag = self.memory.get((int(page), position % self.size))
            assert tag == self.tag(state.request, position), (step.number, state, position, tag)
        accepted = 1 + (token(state.request, state.length) % rows)
        out = [token(state.request, state.length + 1 + i) for i in range(accepted)]
        state.length += accepted
        return out

    def _write(self, row, state: Slot, start: int, count: int, beyond: int | None = None) -> None:
        for position in range(start, start + count):
            page = int(row[position // self.size]) if position // self.size < len(row) else -1
            if beyond is None or position < beyond:
                assert page >= 0, f"{state} writes position {position} without a page"
            if page >= 0:
                self.memory[page, position % self.size] = self.tag(state.request, position)

    def _move(self, move) -> None:
        if move.act is Act.ADMIT:
            self.slots[move.slot] = Slot(move.request, 0)
            found = None if self.prefix is None else self.prefix.arrival(move.request)
            if found is not None:
                slot = self.slots[move.slot]
                slot.length, slot.own = found.start, found.shared
                if found.state is None:
                    assert found.shared - found.start == self.prefix.policy.replay
                else:
                    assert tuple(found.state) == self.tag(move.request, found.start - 1)
                for page, content in found.loads:
                    for offset, tag in enumerate(content.tolist()):
                        self.memory[page, offset] = tuple(tag)
            return
        if move.act is Act.RESTORE:
            state, saved = self.host.pop(move.request)
            assert len(saved) == len(move.pages)
            self.slots[move.slot] = state
            for page, content in zip(move.pages, saved, strict=True):
                for offset, tag in content.items():
                    self.memory[page, offset] = tag
            return
        state, saved = self.take(move.slot, move.pages)
        assert state.request == move.request
        if move.act is Act.OFFLOAD:
            self.host[move.request] = (state, saved)

    def take(self, slot: int, pages) -> tuple[Slot, list[dict[int, tuple[int, int]]]]:
        """What is in a slot and in pages; the slot is nobody's then."""
        saved = [
            {o: self.memory[page, o] for o in range(self.size) if (page, o) in self.memory}
            for page in pages
        ]
        return self.slots.pop(slot), saved


class Engine:
    """The loop around a scheduler: results are committed ``late`` steps after their dispatch."""

    def __init__(
        self, policy: Policy, pages: Pages, late: int = 1, prefix: PrefixPolicy | None = None
    ):
        self.requests: dict[int, Request] = {}
        self.pages, self.late = pages, late
        self.device = Device(pages, policy, self.requests)
        if prefix is not None:
            like: Any = [jax.ShapeDtypeStruct(shape, np.int64) for shape in ((pages.page, 2), (2,))]
            self.device.prefix = PrefixCache(prefix, b"", self.device.copy_pages, tuple(like))
            self.device.prefix.use(pages)
        self.scheduler = Scheduler(policy, pages, self.device.prefix)
        self.outputs: dict[int, list[int]] = {}
        self.waiting: list[tuple[Step, dict[int, list[int]]]] = []
        self.steps: list[Step] = []
        self.could: list[tuple[bool, bool]] = []  # per step: was there prefill work, decode work
        choose = self.scheduler._prefill_now

        def noted(lead: bool, turns: bool) -> bool:
            self.could.append((lead, turns))  # when requests of the host have taken their room
            return choose(lead, turns)

        self.scheduler._prefill_now = noted
        self.ready: list[int] = []  # requests that are to go on elsewhere

    def add(self, number: int, request: Request) -> None:
        self.requests[number] = request
        self.outputs[number] = []
        new = dataclasses.asdict(request)
        self.scheduler.add(number, new["prompt"], new["new"], new["kind"], new["alone"])
        if self.device.prefix is not None:
            tags = [self.device.tag(number, position) for position in range(request.prompt)]
            ids = [token(*tag) for tag in tags]
            self.device.prefix.know(number, ids, request.prompt - 1)

    def abort(self, number: int) -> None:
        self.scheduler.abort(number)
        self._gone(number)

    def _gone(self, number: int) -> None:
        self.device.host.pop(number, None)
        if self.device.prefix is not None:
            self.device.prefix.forget(number)

    def step(self) -> bool:
        """Plan, dispatch, commit what is due. False when nothing is left to do."""
        scheduler = self.scheduler
        if self.device.prefix is not None:
            self.device.prefix.settle()
        step = scheduler.plan()
        if step is not None:
            self.steps.append(step)
            pending = {item.request for other, _ in self.waiting for item in other.work}
            for item in step.work:
                assert step.prefill or not (
                    self.requests[item.request].alone and item.request in pending
                )
            assert len({item.slot for item in step.work}) == len(step.work)
            self.waiting.append((step, self.device.run(step, self.pages.snapshot())))
        else:
            self.could.pop()
            idle = self.waiting or self.ready or not len(scheduler)
            assert idle, "nothing to do and nothing to wait for"
        if self.waiting and (step is None or len(self.waiting) > self.late):
            self._commit(*self.waiting.pop(0))
        return bool(len(scheduler) or self.waiting)

    def _commit(self, step: Step, emitted: dict[int, list[int]]) -> None:
        outcomes, ended = {}, []
        for number, tokens in emitted.items():
            request, output = self.requests[number], self.outputs[number]
            fresh = tokens[: request.stop - len(output)]
            output += fresh
            outcomes[number] = Outcome(len(fresh), len(output) >= request.stop)
            if outcomes[number].finished:
                ended.append(number)
        self.scheduler.commit(step, outcomes)
        for number in ended:
            self._gone(number)
        if not self.scheduler.policy.decodes:
            there = [number for number in outcomes if number in self.scheduler._jobs]
            self.ready += there

    def run(self, limit: int = 100_000) -> None:
        """Step until everything has ended; fails if that takes more than ``limit`` steps."""
        while self.step():
            limit -= 1
            assert limit > 0, "requests do not end"


class Pair:
    """Prompts on one engine, tokens on another, as `handover.Split` moves requests between them."""

    def __init__(self, prompts: Engine, decode: Engine):
        self.prompts, self.decode, self.moved = prompts, decode, 0

    def add(self, number: int, request: Request) -> None:
        self.prompts.add(number, request)

    def abort(self, number: int) -> None:
        for engine in (self.prompts, self.decode):
            engine.abort(number)

    def step(self) -> bool:
        """A step of both; requests whose prompt is done move while there are slots for them."""
        one, other = self.prompts, self.decode
        more = one.step()
        one.ready = [number for number in one.ready if number in one.scheduler._jobs]
        while one.ready and len(other.scheduler._lines[State.HOST]) < other.scheduler.idle:
            number = one.ready.pop(0)
            request, done = one.requests[number], one.outputs[number]
            saved = one.device.take(*one.scheduler.give(number))
            one._gone(number)
            other.requests[number], other.outputs[number] = request, done
            other.device.host[number] = saved
            other.scheduler.resume(
                number,
                request.prompt + len(done),
                request.new - len(done),
                len(saved[1]),
                request.kind,
                request.alone,
            )
            self.moved += 1
        rest = len(one.scheduler) or one.waiting
        return bool(other.step() or more or rest)
