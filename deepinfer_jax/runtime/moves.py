"""Requests enter and leave slots: what a step does to the state before its own work.

Moves are carried out in the order given. Requests that are admitted one after another enter
together, up to `ADMITS_A_CALL` in one program; the pages and rings of a cached prefix are written
after that. Who has no slot while his state is elsewhere, on the host or in another loop, waits
here.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from deepinfer_jax.runtime import sampling_state
from deepinfer_jax.runtime import state as states
from deepinfer_jax.runtime.grammars import Grammars
from deepinfer_jax.runtime.plans import Act, Move
from deepinfer_jax.runtime.prefix import PrefixCache
from deepinfer_jax.runtime.prefix_types import Arrival
from deepinfer_jax.runtime.programs import ADMITS_A_CALL, Programs, leaving
from deepinfer_jax.runtime.requests import Handed, Sample
from deepinfer_jax.runtime.state import State

Entry = tuple[Sample, int, Arrival | None]  # its slot, and what it starts from


class Mover:
    """Moves of one loop. per_slot: pages of a slot. handed: by number, samples that another loop
    began and that are not in a slot yet."""

    def __init__(
        self,
        programs: Programs,
        grammars: Grammars,
        prefix: PrefixCache | None,
        per_slot: int,
    ):
        self._programs, self._grammars, self._prefix = programs, grammars, prefix
        self._per_slot = per_slot
        self.handed: dict[int, Handed] = {}
        self._saved: dict[int, Any] = {}  # of the preempted: a share, or a place in a grammar

    def carry_out(self, state: State, moves: Sequence[tuple[Move, Sample]]) -> State:
        """The state after a step's moves, each with its sample; `state` is donated."""
        for admitted, run in itertools.groupby(moves, lambda pair: pair[0].act is Act.ADMIT):
            if admitted:
                state = self.entering(list(run))(state)
            else:
                for move, sample in run:
                    state = self._move(state, move, sample)
        return state

    def take(self, state: State, slot: int, held: Sequence[int]) -> Any:
        """A slot's share of the state; held: its pages."""
        return self._programs.take(state, slot, self._row(held))

    def forget(self, number: int) -> None:
        """A sample has ended, or gone elsewhere."""
        self._saved.pop(number, None)
        self.handed.pop(number, None)

    def rows(self, entering: Sequence[Entry], count: int) -> tuple[Any, ...]:
        """What `state.admit` is given in a program for `count` requests."""
        vocab = self._programs.setup.cfg.vocab_size
        slots, limit = np.full(count, -1, np.int32), np.zeros(count, np.int32)
        params = sampling_state.neutral(count)
        bias = np.zeros((count, vocab), np.float32)
        stop, seen = np.zeros((2, count, vocab), np.bool_)
        grammars = [self._grammars.free] * count
        for place, (sample, slot, found) in enumerate(entering):
            slots[place], limit[place] = slot, sample.limit
            sampling_state.write(params, place, sample.params, sample.key, len(sample.prompt))
            if sampling_state.shaped(sample.params):
                bias[place] = sampling_state.bias_row(sample.params, vocab)
            stop[place, list(sample.stops)] = True
            if found is not None:
                seen[place, sample.prompt[: found.start]] = True
            begin = self._saved.pop(sample.number, None)
            begin = self._grammars.start(sample) if begin is None else jax.device_get(begin)
            grammars[place] = begin
        grammar = jax.tree.map(lambda *rows: np.stack(rows), *grammars)
        return slots, params, limit, bias, stop, seen, grammar

    def entering(self, run: Sequence[tuple[Move, Sample]]) -> Callable[[State], State]:
        """Admissions: the samples know at once what they start from, and what is returned changes
        the state, in any thread; it donates it."""
        entries: list[Entry] = []
        for move, sample in run:
            found = None if self._prefix is None else self._prefix.arrival(sample.number)
            entries.append((sample, move.slot, found))
            _scheduled(sample)
            sample.begin = sample.own = 0
            if found is not None:
                if found.state is None:
                    sample.begin, sample.own = found.start, found.shared
                sample.metrics.cached_tokens += found.start
        calls = []
        for part in itertools.batched(entries, ADMITS_A_CALL):
            calls.append(self.rows(part, 1 if len(part) == 1 else ADMITS_A_CALL))
        loads = [load for *_, found in entries if found is not None for load in found.loads]

        def change(state: State) -> State:
            for rows in calls:
                state = self._programs.admit(state, *rows)
            state = self._programs.put_pages(state, loads)
            for _, slot, found in entries:
                if found is not None and found.state is not None:
                    state = self._programs.put_rings(state, slot, found.state)
            return state

        return change

    def _move(self, state: State, move: Move, sample: Sample) -> State:
        number = sample.number
        if move.act is Act.RESTORE:
            _scheduled(sample)
            handed = self.handed.pop(number, None)
            if handed is None:
                saved = jax.device_get(self._saved.pop(number))
            else:
                saved = states.moved(handed.saved, sample.grammar_row, sample.limit)
            return self._programs.put(state, move.slot, self._row(move.pages), saved)
        if move.act is Act.OFFLOAD:
            self._saved[number] = leaving(self.take(state, move.slot, move.pages))
        else:
            # All but where it is in its grammar is computed again from its tokens.
            self._saved[number] = self._programs.grammar(state, move.slot)
        sample.metrics.preemptions += 1
        return state

    def _row(self, held: Sequence[int]) -> np.ndarray:
        pages = np.full(self._per_slot, -1, np.int32)
        pages[: len(held)] = held
        return pages


def _scheduled(sample: Sample) -> None:
    if sample.metrics.first_scheduled is None:
        sample.metrics.first_scheduled = time.monotonic()
