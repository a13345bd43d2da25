"""Leaves of a converted checkpoint: zarr3 arrays in one orbax checkpoint folder, by tensorstore.

A leaf is cut twice. A *shard* is a file: whole rows, at most `shard_bytes`, so that a conversion
streams one shard at a time and a row range of the source fills it. A *chunk* is what a reader
fetches from a shard: one expert, and a piece of each axis that a layout may split (up to 8 ways),
so that every device reads its own slice and little else. Nothing is compressed: FP8 and FP4 bits
do not shrink, and a byte here is a byte of the source.

All shards are written, zeros too, and reading a missing one is an error, never zeros. The folder
also has orbax's tree metadata: `orbax.checkpoint.StandardCheckpointer().restore` reads it.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from deepinfer_jax import spec

CHUNK_BYTES = 2**20
SMALL_BYTES = 2**15  # a chunk is not cut below this
WAYS = (8, 4, 2)

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
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
        "recheck_cached_data": False,
    }


def context(threads: int) -> ts.Context:
    """Tensorstore resources: no cache, and no fsync a file, because the converter does its own."""
    limit = {"limit": threads}
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": limit,
            "file_io_concurrency": limit,
            "file_io_sync": False,
        }
    )


def wait(future: Any) -> Any:
    """Result of a tensorstore future; its failures as one-line `OSError`s."""
    try:
        return future.result()
    except (ValueError, RuntimeError) as error:  # the kinds tensorstore has for a failed operation
        reason = str(error).splitlines()[0]
        raise OSError(re.sub(r" \[\w+='.*", "", reason)) from error


def create(folder: Path, path: str, param: spec.Param, cut: Grid, threads: ts.Context) -> Any:
    """Create a leaf (or open the equal one that an interrupted run left) for writing."""
    shard = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": cut.chunk,
            "codecs": _SCALAR_CODECS,
            "index_codecs": [*_SCALAR_CODECS, {"name": "crc32c"}],
        },
    }
    metadata = {
        "shape": param.shape,
        "data_type": np.dtype(param.dtype).name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": cut.shard}},
        "codecs": [shard],
    }
    wanted = _spec(folder, path) | {"metadata": metadata}
    return wait(ts.open(wanted, create=True, open=True, write=True, context=threads))


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
