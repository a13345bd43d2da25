"""Rows in order of their expert, and the tiles a grouped product cuts them into.

    group:      place[i] = pairs of lower experts + pairs of the same expert before i
                order[place[i]] = i,  row = order // per_row
    row_tiles:  every group of rows cut into tiles of up to `height` rows, one after the other

All integers, so every implementation gives the same. XLA makes some fourteen small kernels of it (a
sort, a histogram and a scatter among them), and a decode step waits for their number (measured on
an H200: docs/benchmarks.md); the kernel is one launch each, for the pairs of a decode step. It is
written for Hopper and runs on later chips.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from pallas_kernels import Implementation, call

IMPLEMENTATIONS = (
    Implementation("hopper", f"{__name__}.hopper", ("gpu",), (9, 0)),
    Implementation("reference", f"{__name__}.reference"),
)


def group(
    expert: Int32[Array, " n"], *, experts: int, per_row: int = 1, implementation: str = "auto"
) -> tuple[Int32[Array, " n"], Int32[Array, " n"], Int32[Array, " n"], Int32[Array, " experts"]]:
    """(order, row, place, sizes) of pairs by their expert, stable: a counting sort.

    Args:
        expert: 0..experts; pairs of `experts` belong to none and come last.
        per_row: pairs of a row, one after the other.

    Returns:
        order: the pair at each place; row: that pair's row; place: the place of each pair; sizes:
        pairs of each expert.

    Raises:
        NotImplementedError: the named implementation declines this case.
        ValueError: more pairs and experts than 32 bits number.
    """
    options = dict(experts=experts, per_row=per_row)
    return call("grouping", "group", IMPLEMENTATIONS, implementation, (expert,), options)


def row_tiles(
    sizes: Int32[Array, " experts"], *, rows: int, height: int, implementation: str = "auto"
) -> Int32[Array, "three lines"]:
    """[matrix or -1; first row; rows] of every tile, then zeros; rows past the groups come last.

    Args:
        sizes: rows of each group, of `rows` in all or fewer.
        height: most rows of a tile.

    Returns:
        As many lines as there can be tiles, and a last one [number of tiles; rows in groups; 0].

    Raises:
        NotImplementedError: the named implementation declines this case.
    """
    options = dict(rows=rows, height=height)
    return call("grouping", "row_tiles", IMPLEMENTATIONS, implementation, (sizes,), options)


def lines(experts: int, rows: int, height: int) -> int:
    """Lines of the table of `row_tiles`."""
    return -(-rows // height) + min(experts + 1, rows) + 1


def equal_groups(groups: int, rows: int, height: int) -> Int32[Array, "three lines"]:
    """The table of `row_tiles` for groups of `rows` rows each, as a constant without spare
    lines."""
    first = np.arange(0, rows, height)
    each = np.stack([0 * first, first, np.minimum(rows - first, height)], axis=1)
    table = np.concatenate([each + [group, group * rows, 0] for group in range(groups)])
    return jnp.asarray(np.append(table, [[len(table), groups * rows, 0]], axis=0).T, jnp.int32)
