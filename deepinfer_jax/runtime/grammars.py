"""Grammars of the requests in flight: compiled on threads, loaded into the device's pool, released.

A request with a grammar enters the scheduler when its grammar is compiled and has room in the pool;
until then others go first. A host-tier grammar gets its mask written into the pool before each step
that its request is in.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import jax
import numpy as np

from deepinfer_jax import structured
from deepinfer_jax.model.compile import jit
from deepinfer_jax.runtime import state as states
from deepinfer_jax.runtime.requests import Sample
from deepinfer_jax.structured import (
    Compiler,
    Grammar,
    GrammarError,
    GrammarState,
    HostMatcher,
    Pool,
    PoolFullError,
    PoolManager,
)

_advance = jit(structured.advance)


LARGEST = 4  # grammars of the most cells that an engine's pool has room for
ROWS = range(32, 257)  # grammars, however small, that it has room for: one a slot within these


def table_cells(vocab: int) -> int:
    """int32 cells that the tables of a grammar may have; one with more is for the host tier."""
    return 1 << 16 if vocab < 4096 else 1 << 20


class Grammars:
    """compiler: None where the checkpoint has no tokenizer. sharding: of the pool. slots: of the
    engine. pool: what the next step is given. free: where a sample without a grammar is."""

    def __init__(
        self, vocab: int, compiler: Compiler | None, sharding: jax.sharding.Sharding, slots: int
    ):
        self._compiler = compiler
        self._manager = PoolManager(
            vocab,
            grammars=min(max(slots, ROWS.start), ROWS.stop - 1),
            cells=LARGEST * table_cells(vocab),
            sharding=sharding,
        )
        self.pool: Pool = self._manager.empty()
        with jax.default_device(min(sharding.addressable_devices, key=lambda one: one.id)):
            free = structured.start(structured.FREE, levels=states.GRAMMAR_LEVELS)
        self.free = jax.device_get(free)
        self._waiting: list[tuple[Sample, Future[Grammar]]] = []
        self._held: dict[int, Grammar] = {}

    def __len__(self) -> int:
        """Samples that wait for their grammar."""
        return len(self._waiting)

    @property
    def waiting(self) -> list[Sample]:
        """Samples that wait for their grammar."""
        return [sample for sample, _ in self._waiting]

    @property
    def compiling(self) -> list[Future[Grammar]]:
        """Compilations that samples wait for and that have not ended."""
        return [future for _, future in self._waiting if not future.done()]

    def add(self, sample: Sample) -> str | None:
        """Starts compiling a sample's grammar; why it cannot, if it cannot."""
        assert sample.params.structured is not None
        if self._compiler is None:
            return "structured: this checkpoint has no tokenizer.json"
        self._waiting.append((sample, self._compiler.submit(sample.params.structured)))
        return None

    def ready(self) -> Iterator[tuple[Sample, str | None]]:
        """Samples that wait no longer: their grammar is in the pool, or the error says why not."""
        waiting, self._waiting = self._waiting, []
        for sample, future in waiting:
            if sample.finished:
                continue
            if not future.done():
                self._waiting.append((sample, future))
                continue
            try:
                grammar = future.result()
                if (error := _too_short(sample, grammar)) is not None:
                    yield sample, error
                    continue
                self.pool, sample.grammar_row = self._manager.acquire(self.pool, grammar)
                self._held[sample.number] = grammar
                if grammar.host is not None and self._compiler is not None:
                    sample.matcher = HostMatcher(grammar, self._compiler.vocabulary)
                    for token in sample.output.token_ids:  # of one that was begun elsewhere
                        sample.matcher.accept(token)
            except PoolFullError as full:
                if not self._held:
                    yield sample, str(full)
                else:
                    self._waiting.append((sample, future))  # until another one is released
            except GrammarError as error:
                yield sample, str(error)
            else:
                yield sample, None

    def wait(self) -> None:
        """Blocks until the first of the compilations that samples wait for has ended."""
        self._waiting[0][1].exception()

    def settle(self) -> None:
        """Blocks until nothing compiles."""
        for _, future in self._waiting:
            future.exception()

    def start(self, sample: Sample) -> GrammarState:
        """Where a sample is in its grammar after the output it has; free for one without."""
        grammar = self._held.get(sample.number)
        here = grammar is not None and grammar.host is None
        waits = grammar is not None and here and bool(grammar.trigger)
        state = dataclasses.replace(
            self.free,
            grammar=np.int32(sample.grammar_row),
            trigger=np.int32(0 if waits else -1),
        )
        tokens = sample.output.token_ids if here else []
        for token in tokens:
            state = _advance(self.pool, state, np.int32(token))
        return jax.device_get(state) if tokens else state

    def write_masks(self, samples: Sequence[Sample]) -> list[tuple[Sample, str]]:
        """What the host-tier samples of a step may produce in it; those whose matcher says
        nothing any more, and why: what the step gives them counts for nothing."""
        faults = []
        for sample in samples:
            if sample.matcher is None:
                continue
            try:
                packed = sample.matcher.mask()
            except GrammarError as error:
                faults.append((sample, str(error)))
                continue
            self.pool = self._manager.write_mask(self.pool, sample.grammar_row, packed)
        return faults

    def release(self, sample: Sample) -> None:
        """Lets go of a sample's grammar, if it has one."""
        if self._held.pop(sample.number, None) is not None:
            self._manager.release(sample.grammar_row)

    def warm(self) -> None:
        """Compiles what loading a grammar runs, and writing the mask of a host-tier one."""
        if self._compiler is None:
            return
        for spec in ({"regex": "a"}, {"ebnf": 'root ::= "a" root "a" | ""'}):
            try:
                grammar = self._compiler.submit(spec).result()
            except GrammarError:  # no host tier on this machine: nothing to compile for it
                continue
            self.pool, row = self._manager.acquire(self.pool, grammar)
            if grammar.host is not None:
                words = np.zeros(-(-self._manager.width // 32), np.uint32)
                self.pool = self._manager.write_mask(self.pool, row, words)
            self._manager.release(row)


def _too_short(sample: Sample, grammar: Grammar) -> str | None:
    """Why no output that the grammar accepts fits the sample; None if one does, or may."""
    room, needed = sample.limit - len(sample.prompt), grammar.report.min_tokens
    if grammar.trigger or room >= needed:
        return None
    return (
        f"structured: the shortest output takes {needed} tokens, the end-of-sequence token "
        f"included; max_tokens and the context leave room for {room}"
    )
