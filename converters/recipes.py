"""Where the bytes of a declared tensor come from: one recipe a tensor, read by row ranges.

A recipe fills rows [begin, end) of the tensor as the tree stores it, so that a table of any size
passes through in slices. For the release every recipe is `Copy`: the same bytes. Other dialects
need a few exact conversions (a scale kept as a float power of two is its exponent byte; FP8 and FP4
times a power of two is a bfloat16), and two that round: float32 or float16 where the release has
bfloat16. `build` picks them by the dtype declared and the dtype found.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from converters import safetensors_io as st
from converters.census import Found
from converters.dialects import PACKED, WIDE, Stored
from converters.names import Entry, Table
from converters.source import CheckpointError
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.spec import MX_GROUP

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@runtime_checkable
class Recipe(Protocol):
    """Gives rows of one tensor."""

    def fill(self, reader: st.Reader, begin: int, end: int, out: np.ndarray) -> None:
        """Fill `out` [end - begin, ...], contiguous, with rows [begin, end)."""
        ...


@dataclasses.dataclass(frozen=True)
class Copy:
    """The tensor's own bytes."""

    stored: Stored

    def fill(self, reader: st.Reader, begin: int, end: int, out: np.ndarray) -> None:
        start = self.stored.offset + begin * self.stored.row_bytes
        reader.read_into(self.stored.tensor, raw(out), start)


@dataclasses.dataclass(frozen=True)
class Exponents:
    """Scales kept as floats; each must be a power of two, and becomes its e8m0 byte."""

    stored: Stored

    def fill(self, reader: st.Reader, begin: int, end: int, out: np.ndarray) -> None:
        values = load(reader, self.stored, begin, end).astype(np.float32)
        mantissa, exponent = np.frexp(values)
        codes = exponent.astype(np.int64) - 1 + 127
        bad = (mantissa != 0.5) | (codes < 0) | (codes > 254)
        if bad.any():
            raise CheckpointError(
                [
                    f"{self.stored.tensor.name}: scale {values[bad][0]!r} is not a power of two "
                    "between 2^-127 and 2^127; truncating it would be wrong"
                ]
            )
        raw(out)[:] = raw(codes.astype(np.uint8))


@dataclasses.dataclass(frozen=True)
class Cast:
    """Floats of another width: widened exactly to float32, or rounded to the nearest bfloat16."""

    stored: Stored
    dtype: str

    def fill(self, reader: st.Reader, begin: int, end: int, out: np.ndarray) -> None:
        out[...] = load(reader, self.stored, begin, end).astype(out.dtype)


@dataclasses.dataclass(frozen=True)
class Dequantise:
    """A quantised matrix as bfloat16, exactly: e4m3 or packed e2m1 times powers of two."""

    stored: Stored
    scales: Recipe
    block: tuple[int, int]

    def fill(self, reader: st.Reader, begin: int, end: int, out: np.ndarray) -> None:
        tall, wide = self.block
        first, last = begin // tall, -(-end // tall)
        scales = np.empty((last - first, -(-out.shape[1] // wide)), "float8_e8m0fnu")
        self.scales.fill(reader, first, last, scales)
        values = load(reader, self.stored, begin, end)
        if self.stored.dtype in PACKED:
            codes = values.view(np.uint8)
            values = E2M1[np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)]
        spread = np.repeat(scales.astype(np.float32), wide, axis=1)[:, : out.shape[1]]
        rows = np.arange(begin, end) // tall - first
        out[...] = (values.astype(np.float32) * spread[rows]).astype(out.dtype)


def rounds(recipe: Recipe) -> bool:
    """Whether a recipe may lose bits of what is stored."""
    return isinstance(recipe, Cast) and recipe.dtype == "BF16" and recipe.stored.dtype != "BF16"


def raw(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, writable."""
    return memoryview(array.reshape(-1).view(np.uint8))


def load(reader: st.Reader, stored: Stored, begin: int, end: int) -> np.ndarray:
    """Rows of a tensor in the dtype it is stored in."""
    data = np.empty((end - begin) * stored.row_bytes, np.uint8)
    reader.read_into(stored.tensor, memoryview(data), stored.offset + begin * stored.row_bytes)
    return st.as_array(data, stored.dtype, (end - begin, *stored.shape[1:]))


def build(
    cfg: ModelConfig, table: Table, stored: Mapping[str, Stored]
) -> tuple[dict[str, Recipe], dict[str, Found], list[str]]:
    """A recipe for each declared tensor that is there; what the census sees; and problems.

    What can be converted looks to the census as declared, and a scale that a dequantised matrix
    uses up is not shown to it; everything else it sees as it is.
    """
    found: dict[str, Recipe] = {}
    seen = {name: Found(have.dtype, have.shape) for name, have in stored.items()}
    problems = []
    for name, entry in table.by_name.items():
        have = stored.get(name)
        if have is None:
            continue
        if entry.dtype == "BF16" and have.dtype in ("F8_E4M3", *PACKED):
            scale = stored.get(name.removesuffix(".weight") + ".scale")
            if scale is None:
                problems.append(f"{have.tensor.name}: {have.dtype} without a scale")
                continue
            packed = have.dtype in PACKED
            block = (1, MX_GROUP) if packed else cfg.weight_block_size
            wanted = tuple(-(-n // b) for n, b in zip(entry.shape, block, strict=True))
            if scale.shape != wanted:
                problems.append(
                    f"{scale.tensor.name}: shape {list(scale.shape)}, expected {list(wanted)} for "
                    f"blocks of {list(block)}"
                )
            seen.pop(name.removesuffix(".weight") + ".scale", None)
            found[name] = Dequantise(have, _scales(scale), block)
            rows, columns = _bytes_shape(have)
            seen[name] = Found(entry.dtype, (rows, columns * (2 if packed else 1)))
        elif recipe := _direct(entry, have):
            found[name] = recipe
            seen[name] = Found(entry.dtype, _bytes_shape(have))
    return found, seen, problems


def _direct(entry: Entry, have: Stored) -> Recipe | None:
    """The recipe of a tensor that needs no other one, if its dtype can become the declared one."""
    if entry.dtype == have.dtype or (entry.dtype == "I8" and have.dtype in PACKED):
        return Copy(have)
    if entry.dtype == "F8_E8M0" and have.dtype in ("U8", *WIDE):
        return _scales(have)
    if entry.dtype in ("BF16", "F32") and have.dtype in WIDE:
        return Cast(have, entry.dtype)
    return None


def _scales(have: Stored) -> Recipe:
    return Exponents(have) if have.dtype in WIDE else Copy(have)


def _bytes_shape(have: Stored) -> tuple[int, ...]:
    """Shape as I8 counts it: F4 counts values, I8 and U8 count bytes of two values."""
    return (*have.shape[:-1], have.shape[-1] // 2) if have.dtype == "F4" else have.shape
