"""Weights that multiply the same rows in one launch: the tiles of one follow those of the other.

A kernel's references cannot be chosen by a value, so what differs between weights is a branch that
a whole warpgroup takes, or a choice among addresses.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32


@dataclasses.dataclass(frozen=True)
class Several:
    """widths: channels of each weight; tile: channels of a tile."""

    widths: tuple[int, ...]
    tile: int

    @property
    def ends(self) -> list[int]:
        """Tiles up to the end of each weight; the last of a weight may be short of channels."""
        return list(itertools.accumulate(-(-width // self.tile) for width in self.widths))

    @property
    def tiles(self) -> int:
        """Tiles of all of them."""
        return self.ends[-1]

    def place(self, m: Int32[Array, ""]) -> tuple[Int32[Array, ""] | int, Int32[Array, ""]]:
        """(number of the weight, its tile) of tile m of them all."""
        which, first = 0, 0
        for number, end in enumerate(self.ends[:-1], 1):
            which, first = jnp.where(m >= end, number, which), jnp.where(m >= end, end, first)
        return which, m - first

    def value(self, which: Int32[Array, ""] | int, values: Sequence[int]) -> Int32[Array, ""] | int:
        """The value of the weight with this number."""
        found = values[0]
        for number, value in enumerate(values[1:], 1):
            found = jnp.where(which == number, value, found)
        return found

    def run(self, which: Int32[Array, ""] | int, do: Callable[[int], None]) -> None:
        """do(number) of the weight with this number."""
        if len(self.widths) == 1:
            do(0)
            return
        for number in range(len(self.widths)):
            pl.when(which == number)(functools.partial(do, number))
