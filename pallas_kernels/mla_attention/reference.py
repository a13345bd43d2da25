"""Sparse attention over one shared key-value head, window rows then selected rows (report 2.3).

Every query row has its own key list: `window_index` into the window rows, then `selected_index`
into the compressed rows; -1 is an empty slot. The slots are read in that order, in blocks of 64,
with an online softmax whose running maximum starts at -1e30:

    m' = max(m, max_t s_t)     p_t = exp(s_t - m')     a = exp(m - m')
    l' = a l + sum_t p_t       o' = a o + sum_t bf16(p_t) k_t        out = o / (l + exp(sink - m))

with s = scale * q.k in float32 and K = V. The sink is a learned logit a head without a value vector
and is not part of the maximum. A row with every slot empty gives 0. Packed rows are expanded on the
way in, so a stored row and its dequantised form give the same bits.

Rows run in tiles of 8 (the batch dimension of both products) and blocks of 64 slots, whatever their
number, so the bits of a row do not depend on which rows, or how many, are in the call.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.formats import Rows, apply_e8m0, decode_e2m1

BLOCK = 64
ROW_TILE = 8
FIRST_MAX = -1e30


def unpack(rows: tuple[Array, Array], dtype: DTypeLike) -> Float[Array, "... d"]:
    """Expand stored rows (values, scales) to `dtype`; exact in bfloat16 and float32.

    values uint8 [..., d/2] are e2m1 codes, low nibble first, otherwise float8_e4m3fn [..., d];
    scales [..., groups] (e8m0 or e4m3) each cover d/groups neighbouring channels. Source: V4.1
    report 2.3.
    """
    values, scales = rows
    if values.dtype == jnp.uint8:
        values = decode_e2m1(values)
    groups = values.reshape(*scales.shape, -1).astype(jnp.float32)
    spread = jnp.broadcast_to(scales[..., None], groups.shape)
    if scales.dtype == jnp.float8_e8m0fnu:
        plain = apply_e8m0(groups, spread)
    else:
        plain = groups * spread.astype(jnp.float32)
    return plain.reshape(values.shape).astype(dtype)


def gather(rows: Rows, index: Int32[Array, "r k"], dtype: DTypeLike) -> Float[Array, "r k d"]:
    """Rows at `index`, in `dtype`; an empty slot (-1) is a zero row and nothing is read for it."""
    valid = index >= 0
    safe = jnp.where(valid, index, 0)
    if isinstance(rows, tuple):
        taken = unpack((rows[0][safe], rows[1][safe]), dtype)
    else:
        taken = rows[safe].astype(dtype)
    return jnp.where(valid[..., None], taken, jnp.zeros((), dtype))


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
    """Attention of every query row over its own keys; arguments as in the package's `attend`."""
    del invariant  # always
    return in_tiles(
        ROW_TILE, q, window, window_index, selected, selected_index, sink, scale=scale, unroll=1
    )


def in_tiles(
    tile_rows: int,
    q: Float[Array, "r h d"],
    window: Rows,
    window_index: Int32[Array, "r w"],
    selected: Rows | None,
    selected_index: Int32[Array, "r k"] | None,
    sink: Float32[Array, " h"],
    *,
    scale: float,
    unroll: int | bool,
) -> Float[Array, "r h d"]:
    """`attend` in tiles of `tile_rows` rows, one after the other; unroll: blocks of slots in a turn
    of their loop, True for all."""
    if (
        selected is None
        or selected_index is None
        or 0
        in (
            selected_index.shape[1],
            _length(selected),
        )
    ):
        selected = selected_index = None

    def chunk(args: tuple[Array, Array, Array | None]) -> Array:
        return _attend_rows(args[0], window, args[1], selected, args[2], sink, scale, unroll)

    rows = q.shape[0]
    operands = (q, window_index, selected_index)
    if 0 < rows <= tile_rows and unroll is True:
        return chunk(operands)
    tiles = -(-rows // tile_rows)
    pad = tiles * tile_rows - rows

    def tile(x: Array) -> Array:
        x = jnp.pad(x, ((0, pad), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(tiles, tile_rows, *x.shape[1:])

    out = lax.map(chunk, jax.tree.map(tile, operands))
    return out.reshape(-1, *q.shape[1:])[:rows]


def round_to(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """float32 rounded to the values of `dtype`; a pair of casts may be left out by the compiler."""
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant)


def _length(rows: Rows) -> int:
    return (rows[0] if isinstance(rows, tuple) else rows).shape[0]


def _attend_rows(
    q: Array,
    window: Rows,
    window_index: Array,
    selected: Rows | None,
    selected_index: Array | None,
    sink: Array,
    scale: float,
    unroll: int | bool,
) -> Array:
    index, keys = window_index, gather(window, window_index, q.dtype)
    if selected is not None and selected_index is not None:
        index = jnp.concatenate([index, selected_index], axis=1)
        keys = jnp.concatenate([keys, gather(selected, selected_index, q.dtype)], axis=1)
    rows, slots = index.shape
    pad = -slots % BLOCK
    index = jnp.pad(index, ((0, 0), (0, pad)), constant_values=-1)
    keys = jnp.pad(keys, ((0, 0), (0, pad), (0, 0)))
    index = jnp.moveaxis(index.reshape(rows, -1, BLOCK), 1, 0)
    keys = jnp.moveaxis(keys.reshape(rows, -1, BLOCK, keys.shape[-1]), 1, 0)
    q32 = q.astype(jnp.float32)

    def block(carry: tuple[Array, ...], xs: tuple[Array, Array]) -> tuple[tuple[Array, ...], None]:
        peak, total, out = carry
        valid, key = (xs[0] >= 0)[:, None], xs[1].astype(jnp.float32)
        score = scale * jnp.einsum("rhd,rkd->rhk", q32, key, precision="highest")
        score = jnp.where(valid, score, -jnp.inf)
        peak_new = jnp.maximum(peak, score.max(-1))
        prob = jnp.exp(score - peak_new[..., None])
        decay = jnp.exp(peak - peak_new)
        rounded = round_to(prob, q.dtype)
        value = jnp.einsum("rhk,rkd->rhd", rounded, key, precision="highest")
        return (peak_new, total * decay + prob.sum(-1), out * decay[..., None] + value), None

    heads = q.shape[:2]
    start = (
        jnp.full(heads, FIRST_MAX, jnp.float32),
        jnp.zeros(heads, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    (peak, total, out), _ = lax.scan(block, start, (index, keys), unroll=unroll)
    total = (total + jnp.exp(sink[None] - peak))[..., None]
    return jnp.where(total > 0, out / total, 0.0).astype(q.dtype)
