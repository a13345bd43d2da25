"""Grouping by one warpgroup: a counting sort in shared memory, and the table of row tiles.

`group`: each warp owns a quarter of the pairs, in order. It counts its pairs of every expert; sums
over experts and warps give each warp its first place in every group; then it walks its pairs again,
32 at a time: lanes of one expert find each other, and take the next places in order of lane.

`row_tiles`: a scan over the groups gives the first row and tile of each, and every line of the
table finds its group among them by bisection.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from pallas_kernels import grouping, ptx, target
from pallas_kernels.grouping import threads

THREADS = 128
PAIRS = 32768
"""Pairs that shared memory holds, and up to which one warpgroup beats a sort by the whole chip. A
block has 227 KiB of it; from compute capability 12.0 on it has 99, enough for half as many."""
GROUPS = 1024


def group(
    expert: Int32[Array, " n"], *, experts: int, per_row: int = 1
) -> tuple[Int32[Array, " n"], Int32[Array, " n"], Int32[Array, " n"], Int32[Array, " experts"]]:
    """See pallas_kernels.grouping.group."""
    pairs = expert.shape[0]
    most = PAIRS // 2 if (target().capability or (0, 0)) >= (12, 0) else PAIRS
    if not 0 < pairs <= most:
        raise NotImplementedError(f"{pairs} pairs, the kernel takes 1 to {most}")
    if experts + 2 > GROUPS:
        raise NotImplementedError(f"{experts} experts, the kernel takes {GROUPS - 2}")
    order, row, place, sizes = _group_program(pairs, experts, per_row)(expert)
    return order, row, place, sizes


def row_tiles(
    sizes: Int32[Array, " experts"], *, rows: int, height: int
) -> Int32[Array, "three lines"]:
    """See pallas_kernels.grouping.row_tiles."""
    experts = sizes.shape[0]
    if not 0 < experts <= GROUPS or rows == 0:
        raise NotImplementedError(f"{rows} rows, {experts} groups; the kernel takes 1 to {GROUPS}")
    lines = grouping.lines(experts, rows, height)
    return _table_program(experts, rows, height, lines)(sizes).reshape(3, lines)


def whole(count: int) -> int:
    """Rounded up to equal parts for the threads."""
    return -(-count // THREADS) * THREADS


@functools.lru_cache(maxsize=64)
def _group_program(pairs: int, experts: int, per_row: int):
    held = whole(experts + 2)

    def body(*refs):
        threads.group(*refs, pairs=pairs, experts=experts, per_row=per_row, held=held)

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((n,), jnp.int32) for n in (pairs, pairs, pairs, experts)],
        grid=(1,),
        grid_names=("block",),
        kernel_name=f"group_n{pairs}",
        scratch_types=[
            plgpu.SMEM((whole(pairs),), jnp.int32),
            plgpu.SMEM((4 * held,), jnp.int32),
            plgpu.SMEM((64,), jnp.int32),
        ],
        compiler_params=ptx.PARAMETERS,
    )


@functools.lru_cache(maxsize=64)
def _table_program(experts: int, rows: int, height: int, lines: int):
    held = whole(experts + 1)

    def body(*refs):
        size = dict(experts=experts, rows=rows, height=height)
        threads.row_tiles(*refs, **size, lines=lines, held=held)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((3 * lines,), jnp.int32),
        grid=(1,),
        grid_names=("block",),
        kernel_name=f"row_tiles_h{height}",
        scratch_types=[
            plgpu.SMEM((held,), jnp.int32),
            plgpu.SMEM((held,), jnp.int32),
            plgpu.SMEM((64,), jnp.int32),
        ],
        compiler_params=ptx.PARAMETERS,
    )
