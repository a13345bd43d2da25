"""Leaves of a converted checkpoint: sharded zarr3 arrays in one orbax checkpoint folder.

A leaf is cut twice. A *shard* is a file: whole rows, at most `shard_bytes`, so that a conversion
streams one shard at a time and a row range of the source fills it. A *chunk* is what a reader
fetches from a shard: one expert, and a piece of each axis that a layout may split (up to 8 ways),
so that every device reads its own slice and little else. Nothing is compressed: FP8 and FP4 bits
do not shrink, and a byte here is a byte of the source.

Shards are written here (a copy of bytes should cost little more than one) and read by tensorstore.
A shard file is its chunks, then an index of (offset, size) a chunk, then the index's CRC-32C; see
https://zarr-specs.readthedocs.io, "sharding-indexed". All shards are written, zeros too, and
reading a missing one is an error, never zeros. The folder also has orbax's tree metadata:
`orbax.checkpoint.StandardCheckpointer().restore` reads it.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from deepinfer_jax import spec

CHUNK_BYTES = 2**20
SMALL_BYTES = 2**15  # a chunk is not cut below this
WAYS = (8, 4, 2)

ABSENT = 2**64 - 1  # offset and size of a chunk that lies outside the leaf

Region = tuple[slice, ...]
_SCALAR_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}]


@dataclasses.dataclass(frozen=True)
class Grid:
    """How a leaf is cut; both shapes have the leaf's rank, chunk divides shard."""

    shape: tuple[int, ...]
    shard: tuple[int, ...]
    chunk: tuple[int, ...]

    def shards(self) -> Iterator[tuple[str, Region]]:
        """(file relative to the leaf's folder, region of the leaf), in row-major order."""
        counts = [-(-n // s) for n, s in zip(self.shape, self.shard, strict=True)]
        for at in itertools.product(*map(range, counts)):
            region = tuple(
                slice(i * s, min(n, (i + 1) * s))
                for i, s, n in zip(at, self.shard, self.shape, strict=True)
            )
            yield "/".join(["c", *map(str, at)]), region


def grid(param: spec.Param, stack: int, shard_bytes: int) -> Grid:
    """Cut a leaf whose first `stack` axes number whole tensors (the routed experts)."""
    shape, item = param.shape, np.dtype(param.dtype).itemsize
    chunk = [1] * stack + list(shape[stack:])

    def size() -> int:
        return math.prod(chunk) * item

    for axis in range(stack, len(shape)):
        if param.axes[axis] is not None:
            fits = (w for w in WAYS if shape[axis] % w == 0 and size() // w >= SMALL_BYTES)
            chunk[axis] //= next(fits, 1)
    row_bytes = math.prod(shape[stack + 1 :]) * item
    chunk_row_bytes = math.prod(chunk[stack + 1 :]) * item
    most = max(1, min(CHUNK_BYTES // chunk_row_bytes, shard_bytes // row_bytes))
    chunk[stack] = _divisor(chunk[stack], most)
    shard = [-(-n // c) * c for n, c in zip(shape, chunk, strict=True)]
    fit = max(1, shard_bytes // (chunk[stack] * row_bytes)) * chunk[stack]
    shard[stack] = min(shard[stack], fit)
    room = shard_bytes // (shard[stack] * row_bytes) if shard[stack] >= shape[stack] else 1
    for axis in reversed(range(stack)):
        shard[axis] = min(shape[axis], max(1, room))
        room //= shape[axis]
    return Grid(shape, tuple(shard), tuple(chunk))


def _divisor(count: int, most: int) -> int:
    """The largest divisor of `count` up to `most`, or `most` if that is less than half of it."""
    if count <= most:
        return count
    best = next(d for d in range(most, 0, -1) if count % d == 0)
    return best if 2 * best >= most else most


def folder_name(path: str) -> str:
    """Orbax's folder of a leaf: `layers/3/attn/wq_a/values` -> `layers.3.attn.wq_a.values`."""
    return path.replace("/", ".")


def _spec(folder: Path, path: str) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder / folder_name(path)}/"},
        "fill_missing_data_reads": False,
        "recheck_cached_data": False,
    }


def context(threads: int) -> ts.Context:
    """Tensorstore resources for reading: no cache, this many threads."""
    limit = {"limit": threads}
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": limit,
            "file_io_concurrency": limit,
        }
    )


def wait(future: Any) -> Any:
    """Result of a tensorstore future; its failures as one-line `OSError`s."""
    try:
        return future.result()
    except (ValueError, RuntimeError) as error:  # the kinds tensorstore has for a failed operation
        reason = str(error).splitlines()[0]
        raise OSError(re.sub(r" \[\w+='.*", "", reason)) from error


def create(folder: Path, path: str, param: spec.Param, cut: Grid) -> None:
    """Describe a leaf (`zarr.json`), and make the folders of its shards."""
    shard = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": cut.chunk,
            "codecs": _SCALAR_CODECS,
            "index_codecs": [*_SCALAR_CODECS, {"name": "crc32c"}],
        },
    }
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": param.shape,
        "data_type": np.dtype(param.dtype).name,
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": cut.shard}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [shard],
    }
    leaf = folder / folder_name(path)
    for parent in {(leaf / file).parent for file, _ in cut.shards()}:
        parent.mkdir(parents=True, exist_ok=True)
    (leaf / "zarr.json").write_text(json.dumps(metadata), encoding="utf-8")


class ShardWriter:
    """One shard file, filled by row ranges in any order; every row once, then `finish`.

    shape: of the shard's region (smaller than `cut.shard` at the end of an axis). Chunks lie in
    row-major order, a last chunk of rows in full length, its rest zeros.
    """

    def __init__(self, file: Path, cut: Grid, shape: Sequence[int], itemsize: int):
        self._cut = cut
        counts = [s // c for s, c in zip(cut.shard, cut.chunk, strict=True)]
        there = [-(-n // c) for n, c in zip(shape, cut.chunk, strict=True)]
        self._index = np.full((*counts, 2), ABSENT, "<u8")
        size = math.prod(cut.chunk) * itemsize
        inside = tuple(map(slice, there))
        total = math.prod(there) * size
        self._index[(*inside, 0)] = np.arange(0, total, size).reshape(there)
        self._index[(*inside, 1)] = size
        self._end = total
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.ftruncate(self._descriptor, total)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def rows(self, at: tuple[int, ...], begin: int, rows: np.ndarray) -> None:
        """Write rows [begin, begin + len(rows)) of the matrix at index `at` of the shard."""
        stack = len(at)
        tall, rest = self._cut.chunk[stack], self._cut.chunk[stack + 1 :]
        rows = rows.view(f"u{rows.itemsize}")  # numpy copies its own types without the GIL
        columns = [n // c for n, c in zip(rows.shape[1:], rest, strict=True)]
        row_bytes = math.prod(rest) * rows.itemsize
        # Chunks of whole rows follow each other in the file: one write for all that these touch.
        split = math.prod(columns) > 1
        done = 0
        while done < len(rows):
            number, offset = divmod(begin + done, tall)
            count = min(tall - offset, len(rows) - done) if split else len(rows)
            for column in np.ndindex(*columns):
                sides = (slice(i * c, (i + 1) * c) for i, c in zip(column, rest, strict=True))
                piece = rows[(slice(done, done + count), *sides)]
                start = int(self._index[(*at, number, *column, 0)]) + offset * row_bytes
                self._write(np.ascontiguousarray(piece), start)
            done += count

    def _write(self, data: np.ndarray, start: int) -> None:
        rest = memoryview(data.reshape(-1).view(np.uint8))
        while rest:
            count = os.pwrite(self._descriptor, rest, start)
            start, rest = start + count, rest[count:]

    def finish(self) -> None:
        """Write the index."""
        index = self._index.tobytes()
        end = np.frombuffer(index + struct.pack("<I", crc32c(index)), np.uint8)
        self._write(end, self._end)


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


def open_leaf(folder: Path, path: str, param: spec.Param, threads: ts.Context) -> Any:
    """Open a leaf for reading; `OSError` if it is absent or of another shape or dtype."""
    leaf = wait(ts.open(_spec(folder, path), open=True, read=True, context=threads))
    if leaf.shape != param.shape or leaf.dtype.numpy_dtype != np.dtype(param.dtype):
        raise OSError(
            f"{folder / folder_name(path)}: {leaf.dtype.name}{list(leaf.shape)}; the config "
            f"declares {np.dtype(param.dtype).name}{list(param.shape)}"
        )
    return leaf


def write_metadata(folder: Path, params: Mapping[str, spec.Param]) -> None:
    """Orbax's description of the tree: which leaves there are, and that they are zarr3 arrays."""
    tree = {}
    for path, param in params.items():
        keys = path.split("/")
        tree[str(tuple(keys))] = {
            "key_metadata": [{"key": k, "key_type": 1 if k.isdigit() else 2} for k in keys],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": param.shape,
            },
        }
    described = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (folder / "_METADATA").write_text(json.dumps(described), encoding="utf-8")


def as_region(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """A device's index (slices with open ends, missing axes whole) with its bounds filled in."""
    whole = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(slice(*part.indices(n)) for part, n in zip(whole, shape, strict=True))
