"""How a leaf of the weights tree is cut into files and into what a reader fetches.

A *shard* is a file: whole rows, at most `shard_bytes`, so that a row range of a source tensor fills
it. A *chunk* is what a reader fetches from a shard: one expert, and a piece of each axis that a
layout may split (up to 8 ways), so that every device reads its own slice and little else:

    w13 [384, 2, 2304, 2560] uint8    shards [5, 2, 2304, 2560]   chunks [1, 1, 288, 2560]
    w2  [384, 5120, 1152] uint8       shards [11, 5120, 1152]     chunks [1, 5120, 144]
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from deepinfer_jax import spec

CHUNK_BYTES = 2**20
SMALL_BYTES = 2**9  # a chunk is not cut below this: its place in the index costs 16 bytes
WAYS = (8, 4, 2)


Region = tuple[slice, ...]


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
