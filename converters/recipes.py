"""Where the bytes of a declared tensor come from: one recipe a tensor, read by row ranges.

A recipe fills rows [begin, end) of the tensor as the tree stores it, so that a table of any size
passes through in slices. For the official dialect every recipe is `Copy`: the same bytes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from converters import safetensors_io as st
from converters.names import Table


@runtime_checkable
class Recipe(Protocol):
    """Gives rows of one tensor."""

    def fill(self, reader: st.Reader, begin: int, end: int, out: np.ndarray) -> None:
        """Fill `out` [end - begin, ...], contiguous, with rows [begin, end)."""
        ...


@dataclasses.dataclass(frozen=True)
class Copy:
    """The tensor's own bytes."""

    tensor: st.Tensor

    def fill(self, reader: st.Reader, begin: int, end: int, out: np.ndarray) -> None:
        reader.read_into(self.tensor, raw(out), begin * self.tensor.row_bytes)


def raw(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, writable."""
    return memoryview(array.reshape(-1).view(np.uint8))


def official(table: Table, tensors: Mapping[str, st.Tensor]) -> dict[str, Recipe]:
    """Every declared tensor copied from the source tensor of its name."""
    return {name: Copy(tensors[name]) for name in table.by_name}
