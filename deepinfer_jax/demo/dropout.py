"""Dropout for training: a share of the numbers, or of whole vectors, is 0 and the rest scaled up.

    y = x m / (1 - rate),   m ~ Bernoulli(1 - rate)

1 million tokens of the Bible are read dozens of times; without it the Engram rows and then the
layers learn the text by heart.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass
class Dropout:
    """Lives for one traced step; each call draws with another key. memory: rate of Engram rows;
    rate: of everything else."""

    key: Array
    rate: float
    memory: float
    calls: int = 0

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Single numbers."""
        return self._drop(x, self.rate, x.shape)

    def rows(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Whole vectors of the last axis."""
        return self._drop(x, self.memory, (*x.shape[:-1], 1))

    def _drop(self, x: Array, rate: float, shape: tuple[int, ...]) -> Array:
        self.calls += 1
        kept = jax.random.bernoulli(jax.random.fold_in(self.key, self.calls), 1 - rate, shape)
        return jnp.where(kept, x * jnp.float32(1 / (1 - rate)), jnp.float32(0))
