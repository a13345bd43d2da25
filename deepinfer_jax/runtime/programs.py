"""The compiled programs of one engine, by shape.

Every jitted function an engine runs is made here once; a program compiles when its shape is first
used or in `warm_up`. Static choices: the setup, the options of a step, the bucket. The state is
donated, so a step works in place.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from deepinfer_jax.model.compile import jit
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.runtime import prefill, state, step
from deepinfer_jax.runtime.state import State
from deepinfer_jax.runtime.step_types import DecodeInput, Options, PrefillInput, StepOutput
from deepinfer_jax.structured import GrammarState, Pool

_prefill = jit(prefill.prefill_chunk, static_argnums=(0, 1, 2, 3), donate_argnums=5)
_decode = jit(step.decode_step, static_argnums=(0, 1, 2), donate_argnums=4)
_admit = jit(state.admit, donate_argnums=0)
_put = jit(state.put, donate_argnums=0)
_take = jit(state.take)
_grammar = jit(state.grammar_of)


@dataclasses.dataclass
class Programs:
    """setup, weights and the static options of an engine's steps, bound to the programs."""

    setup: Setup
    weights: Weights
    options: Options

    def place(self, held: Any) -> Any:
        """A tree of arrays where the weights are, whole on every device.

        Placed like this before its first step, the state a program returns is again one that it
        was compiled for.
        """
        home = self.weights.norm.sharding
        if isinstance(home, jax.sharding.NamedSharding):
            home = jax.sharding.NamedSharding(home.mesh, jax.sharding.PartitionSpec())
        return jax.device_put(held, home)

    def prefill(
        self,
        tail: int,
        score: bool,
        options: Options,
        held: State,
        pool: Pool,
        given: PrefillInput,
    ) -> tuple[State, StepOutput]:
        """See `prefill.prefill_chunk`; `held` is donated."""
        setup = self.setup._replace(phase="prefill")
        return _prefill(setup, options, tail, score, self.weights, held, pool, given)

    def decode(
        self, size: int, options: Options, held: State, pool: Pool, given: DecodeInput
    ) -> tuple[State, StepOutput]:
        """See `step.decode_step`; `held` is donated."""
        setup = self.setup._replace(phase="decode")
        return _decode(setup, options, size, self.weights, held, pool, given)

    def admit(self, held: State, slot: int, bias: Any, stop: Any, grammar: Any) -> State:
        """See `state.admit`; `held` is donated."""
        return _admit(held, np.int32(slot), bias, stop, grammar)

    def take(self, held: State, slot: int, pages: Any) -> Any:
        """See `state.take`; copies to the host start at once."""
        return _leaving(_take(held, np.int32(slot), pages))

    def put(self, held: State, slot: int, pages: Any, saved: Any) -> State:
        """See `state.put`; `held` is donated."""
        return _put(held, np.int32(slot), pages, saved)

    def grammar(self, held: State, slot: int) -> GrammarState:
        """Where a slot is in its grammar; the copy to the host starts at once."""
        return _leaving(_grammar(held, np.int32(slot)))


def _leaving(saved: Any) -> Any:
    jax.tree.map(lambda leaf: leaf.copy_to_host_async(), saved)
    return saved


@functools.cache
def compiled_programs() -> tuple[Any, ...]:
    """The jitted functions, for tests that count compilations."""
    return (_prefill, _decode, _admit, _put, _take, _grammar)
