"""The compiled programs of one engine, by shape.

Every jitted function an engine runs is made here once; a program compiles when its shape is first
used or in `warm_up`. Static choices: the setup, the options of a step, the bucket. The state is
donated, so a step works in place. `shards.py` says how they lie on the devices of a layout.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from deepinfer_jax.model.compile import Program, jit
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.runtime import groups, shards
from deepinfer_jax.runtime.packing import pack
from deepinfer_jax.runtime.state import State
from deepinfer_jax.runtime.step_types import DecodeInput, Options, PrefillInput, Results
from deepinfer_jax.structured import GrammarState, Pool

Shapes = tuple[tuple[int, int], ...]

_prefill = jit(shards.prefill_chunk, static_argnums=(0, 1, 2, 3, 4), donate_argnums=6)
_decode = jit(shards.decode_step, static_argnums=(0, 1, 2, 3), donate_argnums=5)
_admit = jit(shards.admit, static_argnums=0, donate_argnums=1)
_put = jit(shards.put, static_argnums=0, donate_argnums=1)
_take = jit(shards.take, static_argnums=0)
_grammar = jit(shards.grammar_of, static_argnums=0)
_take_rings = jit(shards.take_rings, static_argnums=0)
_put_rings = jit(shards.put_rings, static_argnums=0, donate_argnums=1)
_take_pages = jit(shards.take_pages, static_argnums=0)
_put_pages = jit(shards.put_pages, static_argnums=0, donate_argnums=1)

PAGES_A_CALL = 8  # of a copy between device and host
ADMITS_A_CALL = 8  # requests that enter together; one alone has a program of its own


@dataclasses.dataclass
class Programs:
    """setup, weights and the static options of an engine's steps, bound to the programs. begun:
    (rows, options) of the decode steps that `ahead` began to compile."""

    setup: Setup
    weights: Weights
    options: Options
    begun: set[tuple[int, Options]] = dataclasses.field(default_factory=set)

    @property
    def shards(self) -> int:
        """Shards that slots and pages are divided over."""
        return self.setup.layout.ways("slots")

    def divided(self, count: int) -> int:
        """The least count from this one on that divides over the shards."""
        return -(-count // self.shards) * self.shards

    def rectangles(self, shapes: Shapes) -> Shapes:
        """Prefill shapes (sequences, width) with equally many sequences for each shard. Raises
        ValueError for a layout that the programs cannot follow."""
        shards.check(self.setup.layout, self.setup.cfg, tuple(width for _, width in shapes))
        return tuple(dict.fromkeys((self.divided(count), width) for count, width in shapes))

    @property
    def everywhere(self) -> bool:
        """Whether the results of a step must be whole on every device: other processes have some
        of them."""
        return not self.weights.norm.sharding.is_fully_addressable

    @property
    def whole(self) -> jax.sharding.Sharding:
        """Whole on every device of the group."""
        return groups.whole(self.weights.norm)

    @property
    def device(self) -> Any:
        """The first device of the group."""
        return groups.of(self.weights.norm)[0]

    def empty(self, slots: int, pages: int) -> State:
        """The state of free slots, placed so that what a program returns is again one that it was
        compiled for."""
        return shards.empty(self.setup, self.options, self.weights.norm, slots=slots, pages=pages)

    def place(self, held: Any) -> Any:
        """Host arrays with a leading axis of slots, where the state's are."""
        return jax.device_put(held, shards.home(self.setup.layout, self.weights.norm))

    def spread(self, held: Any) -> Any:
        """Arrays whole on every device of the group, wherever they are; over several processes
        each gives a program its own copy."""
        return held if self.everywhere else jax.device_put(held, self.whole)

    def prefill(
        self,
        tail: int,
        score: bool,
        options: Options,
        held: State,
        pool: Pool,
        given: PrefillInput,
    ) -> tuple[State, Results]:
        """See `prefill.prefill_chunk`; `held` is donated."""
        return _prefill(*self._of_prefill(tail, score, options), held, pool, pack(given))

    def begin_prefill(
        self,
        tail: int,
        score: bool,
        options: Options,
        held: State,
        pool: Pool,
        given: PrefillInput,
    ) -> None:
        """Compiles `prefill` in another thread; arguments as there, none is donated."""
        self._begin(_prefill, *self._of_prefill(tail, score, options), held, pool, pack(given))

    def decode(
        self, size: int, options: Options, held: State, pool: Pool, given: DecodeInput
    ) -> tuple[State, Results]:
        """See `step.decode_step`; `held` is donated."""
        return _decode(*self._of_decode(size, options), held, pool, pack(given))

    def begin_decode(
        self, size: int, options: Options, held: State, pool: Pool, given: DecodeInput
    ) -> None:
        """Compiles `decode` in another thread; arguments as there, none is donated."""
        self._begin(_decode, *self._of_decode(size, options), held, pool, pack(given))

    def _of_prefill(self, tail: int, score: bool, options: Options) -> tuple[Any, ...]:
        setup = self.setup._replace(phase="prefill")
        return setup, options, tail, score, self.everywhere, self.weights

    def _of_decode(self, size: int, options: Options) -> tuple[Any, ...]:
        setup = self.setup._replace(phase="decode")
        return setup, options, size, self.everywhere, self.weights

    def _begin(self, program: Program, *arguments: Any) -> None:
        if not self.everywhere:  # several processes have to compile in one order
            program.ahead(*arguments)

    def admit(self, held: State, *rows: Any) -> State:
        """See `state.admit`, of `rows` all but the state; `held` is donated."""
        return _admit(self.setup.layout, held, *rows)

    def take(self, held: State, slot: int, pages: Any) -> Any:
        """See `state.take`."""
        return _take(self.setup.layout, held, np.int32(slot), pages)

    def put(self, held: State, slot: int, pages: Any, saved: Any) -> State:
        """See `state.put`; `held` is donated. saved: on the host, or on any devices."""
        return _put(self.setup.layout, held, np.int32(slot), pages, self.spread(saved))

    def grammar(self, held: State, slot: int) -> GrammarState:
        """Where a slot is in its grammar; the copy to the host starts at once."""
        return leaving(_grammar(self.setup.layout, held, np.int32(slot)))

    def take_rings(self, held: State, slot: int) -> Any:
        """See `state.take_rings`; the copy to the host starts at once."""
        return leaving(_take_rings(self.setup.layout, held, np.int32(slot)))

    def put_rings(self, held: State, slot: int, rings: Any) -> State:
        """See `state.put_rings`; `held` is donated."""
        return _put_rings(self.setup.layout, held, np.int32(slot), self.spread(rings))

    def take_pages(self, held: State, pages: Sequence[int]) -> list[Any]:
        """The content of each page; the copies to the host start at once."""
        found = []
        for part in itertools.batched(pages, PAGES_A_CALL):
            found += leaving(_take_pages(self.setup.layout, held, _padded(part)))[: len(part)]
        return found

    def put_pages(self, held: State, loads: Sequence[tuple[int, Any]]) -> State:
        """Pages with the content they get; `held` is donated."""
        for part in itertools.batched(loads, PAGES_A_CALL):
            contents = jax.device_get([content for _, content in part])
            contents += contents[:1] * (PAGES_A_CALL - len(part))
            stacked = jax.tree.map(lambda *rows: np.stack(rows), *contents)
            places = _padded([page for page, _ in part])
            held = _put_pages(self.setup.layout, held, places, self.spread(stacked))
        return held


def _padded(pages: Sequence[int]) -> np.ndarray:
    padded = np.full(PAGES_A_CALL, -1, np.int32)
    padded[: len(pages)] = pages
    return padded


def leaving(saved: Any) -> Any:
    """The same arrays, whose copies to the host start at once."""
    jax.tree.map(lambda leaf: leaf.copy_to_host_async(), saved)
    return saved


@functools.cache
def compiled_programs() -> tuple[Any, ...]:
    """The jitted functions, for tests that count compilations."""
    moves = (_take_rings, _put_rings, _take_pages, _put_pages)
    return (_prefill, _decode, _admit, _put, _take, _grammar, *moves)
