"""One shard file of a leaf: zarr3's `sharding_indexed` layout, read and written by row ranges.

A file is its chunks, then an index of (offset, size) a chunk as little-endian u64, then the index's
CRC-32C; chunks outside the leaf have no place and an index of ones, and the last chunk of an axis
is stored in full. A conversion passes through here and not through tensorstore, because a copy of
bytes should cost little more than one, in time and in memory; whatever reads zarr3 reads the files.
Layout: https://zarr-specs.readthedocs.io, "sharding-indexed".
"""

import functools
import math
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from converters import safetensors_io as st
from converters.grid import Grid

ABSENT = 2**64 - 1  # offset and size of a chunk that lies outside the leaf


class _Shard:
    """An open file with its index: u64 [chunks..., 2]."""

    def __init__(self, cut: Grid, descriptor: int):
        self._cut, self._descriptor = cut, descriptor
        self._counts = [s // c for s, c in zip(cut.shard, cut.chunk, strict=True)]
        self._index = np.full((*self._counts, 2), ABSENT, "<u8")

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _places(
        self, at: tuple[int, ...], begin: int, rows: np.ndarray
    ) -> Iterator[tuple[np.ndarray, int]]:
        """(view into `rows`, its byte offset in the file) for rows from `begin` of a matrix."""
        stack = len(at)
        tall, rest = self._cut.chunk[stack], self._cut.chunk[stack + 1 :]
        columns = [n // c for n, c in zip(rows.shape[1:], rest, strict=True)]
        row_bytes = math.prod(rest) * rows.itemsize
        done = 0
        while done < len(rows):
            number, offset = divmod(begin + done, tall)
            count = min(tall - offset, len(rows) - done)
            for column in np.ndindex(*columns):
                sides = (slice(i * c, (i + 1) * c) for i, c in zip(column, rest, strict=True))
                start = int(self._index[(*at, number, *column, 0)]) + offset * row_bytes
                yield rows[(slice(done, done + count), *sides)], start
            done += count


class ShardWriter(_Shard):
    """A new shard, filled by row ranges in any order; every row once, then `finish`.

    shape: of the shard's region (smaller than `cut.shard` at the end of an axis). Chunks lie in
    row-major order.
    """

    def __init__(self, file: Path, cut: Grid, shape: Sequence[int], itemsize: int):
        super().__init__(cut, os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
        there = [-(-n // c) for n, c in zip(shape, cut.chunk, strict=True)]
        inside, size = tuple(map(slice, there)), math.prod(cut.chunk) * itemsize
        self._end = math.prod(there) * size
        self._index[(*inside, 0)] = np.arange(0, self._end, size).reshape(there)
        self._index[(*inside, 1)] = size
        os.ftruncate(self._descriptor, self._end)

    def write(self, at: tuple[int, ...], begin: int, rows: np.ndarray) -> None:
        """Write rows [begin, begin + len(rows)) of the matrix at index `at` of the shard."""
        pending: list[memoryview] = []  # neighbours in the file go out in one call
        first = following = 0
        rows = rows.view(f"u{rows.itemsize}")  # numpy copies its own types without the GIL
        for piece, start in self._places(at, begin, rows):
            if pending and (start != following or len(pending) == 64):
                self._write(pending, first)
                pending = []
            first = start if not pending else first
            pending.append(_bytes(np.ascontiguousarray(piece)))
            following = start + piece.nbytes
        self._write(pending, first)

    def _write(self, data: list[memoryview], start: int) -> None:
        while data:
            count = os.pwritev(self._descriptor, data, start)
            start += count
            while data and count >= len(data[0]):
                count -= len(data.pop(0))
            if count:
                data[0] = data[0][count:]

    def finish(self) -> None:
        """Write the index."""
        index = self._index.tobytes()
        self._write([memoryview(index + struct.pack("<I", crc32c(index)))], self._end)


class ShardReader(_Shard):
    """A shard to read rows of; `OSError` if it is absent, cut short, or not as `cut` says."""

    def __init__(self, file: Path, cut: Grid, itemsize: int):
        super().__init__(cut, os.open(file, os.O_RDONLY))
        self._file = file
        size = os.fstat(self._descriptor).st_size
        end = os.pread(self._descriptor, self._index.nbytes + 4, size - self._index.nbytes - 4)
        index, check = end[:-4], end[-4:]
        if len(index) != self._index.nbytes or check != struct.pack("<I", crc32c(index)):
            os.close(self._descriptor)
            raise OSError(f"{file}: its index is damaged or cut off")
        self._index = np.frombuffer(index, "<u8").reshape(self._index.shape)
        sizes = set(np.unique(self._index[..., 1]).tolist()) - {ABSENT}
        if sizes != {math.prod(cut.chunk) * itemsize}:
            os.close(self._descriptor)
            raise OSError(f"{file}: chunks of {sorted(sizes)} bytes are not stored plainly")

    def fill(self, at: tuple[int, ...], begin: int, rows: np.ndarray) -> None:
        """Fill `rows` from row `begin` of the matrix at index `at` of the shard."""
        plain = rows.view(f"u{rows.itemsize}")
        for piece, start in self._places(at, begin, plain):
            whole = piece if piece.flags.c_contiguous else np.empty_like(piece, order="C")
            rest = _bytes(whole)
            while rest:
                count = os.preadv(self._descriptor, [rest], start)
                if count == 0:
                    raise OSError(f"{self._file}: ended inside a chunk")
                start, rest = start + count, rest[count:]
            st.read_ahead(self._descriptor, start, whole.nbytes)
            if whole is not piece:
                piece[...] = whole


def _bytes(data: np.ndarray) -> memoryview:
    return memoryview(data.reshape(-1).view(np.uint8))


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of a few kilobytes."""
    table, value = _crc_table(), 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


@functools.cache
def _crc_table() -> tuple[int, ...]:
    entries = []
    for entry in range(256):
        for _ in range(8):
            entry = (entry >> 1) ^ (0x82F63B78 if entry & 1 else 0)
        entries.append(entry)
    return tuple(entries)
