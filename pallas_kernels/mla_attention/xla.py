"""The reference without its loops: every row at once, for a GPU whose kernels decline the case.

A loop is a launch of several small kernels a turn, which the host has to issue one by one: at 128
rows the reference takes 16 turns a layer. The batch of a product is then the number of rows, so a
row's bits may depend on it.
"""

from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.formats import Rows
from pallas_kernels.mla_attention.reference import BLOCK, in_tiles

GATHERED = 1 << 30
"""Bytes that the gathered keys of one tile of rows may take; more rows take turns."""


def attend(
    q: Float[Array, "r h d"],
    window: Rows,
    window_index: Int32[Array, "r w"],
    selected: Rows | None,
    selected_index: Int32[Array, "r k"] | None,
    sink: Float32[Array, " h"],
    *,
    scale: float,
    invariant: bool = False,
) -> Float[Array, "r h d"]:
    """Attention of every query row over its own keys; arguments as in the package's `attend`.

    Raises:
        NotImplementedError: `invariant`, or one row's keys are too large.
    """
    if invariant:
        raise NotImplementedError("a row's bits depend on how many rows there are")
    slots = window_index.shape[1] + (0 if selected_index is None else selected_index.shape[1])
    row = (slots + BLOCK) * q.shape[2] * (q.dtype.itemsize + 4)
    if row > GATHERED:
        raise NotImplementedError(f"keys of a row take {row} bytes, a tile {GATHERED}")
    return in_tiles(
        GATHERED // row, q, window, window_index, selected, selected_index, sink,
        scale=scale, unroll=True,
    )  # fmt: skip
