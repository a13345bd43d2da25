"""Index scores and the top k entries of every query row (V4.1 report 2.3, inference/model.py).

    score[p, j] = sum_h relu(q[p, h] . k[j]) * w[p, h]        for j < visible[p], else -inf

in the inputs' type: for bfloat16 the dot product, its product with w and the sum over heads (which
accumulates in float32) are each rounded to bfloat16; for float32 nothing is rounded. The k highest
entries are returned in ascending order of index; equal scores go to the lowest index, -1 fills up.

Two-level selection: `pool = (block, count)` also returns the `count` blocks of `block` neighbouring
entries with the highest maximum (the block of the newest visible entry always among them), and
`candidate_blocks` restricts a later call to such a mask.

The rows of one group are scored in fixed tiles of at least 64 (row, head) pairs, so that the scores
of a row do not depend on how many rows are in the call.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.formats import Keys
from pallas_kernels.mla_attention.reference import gather, round_to

TILE = 64


def select(
    q: Float[Array, "g w h d"],
    weights: Float[Array, "g w h"],
    keys: Keys,
    visible: Int32[Array, "g w"],
    candidate_blocks: Bool[Array, "g w blocks"] | None = None,
    *,
    k: int,
    candidates: tuple[int, int] | None = None,
    pool: tuple[int, int] | None = None,
) -> Int32[Array, "g w k"] | tuple[Int32[Array, "g w k"], Bool[Array, "g w blocks"]]:
    """Top k visible entries of every row; see the package's `select`."""
    if isinstance(keys, tuple):
        values, scales, entry_index = keys
        table = jax.vmap(lambda index: gather((values, scales), index[None], q.dtype)[0])
        keys = table(entry_index)
    groups, rows, heads, _ = q.shape
    tile = -(-TILE // heads)
    tiles = -(-rows // tile)
    if not keys.shape[1]:
        nothing = jnp.full((groups, rows, k), -1, jnp.int32)
        return nothing if pool is None else (nothing, jnp.zeros((groups, rows, 0), bool))

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, tiles * tile - rows), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(groups, tiles, tile, *x.shape[2:]), 1, 0)

    def one(args: tuple[Array, ...]) -> tuple[Array, ...]:
        score = scores(args[0], args[1], keys)
        position = lax.broadcasted_iota(jnp.int32, score.shape, score.ndim - 1)
        score = jnp.where(position < args[2][..., None], score, -jnp.inf)
        mask = None if pool is None else candidate_pool(score, args[2], *pool)
        if candidates is not None and candidate_blocks is not None:
            wide = jnp.repeat(args[3], candidates[0], axis=-1)[..., : score.shape[-1]]
            score = jnp.where(wide, score, -jnp.inf)
        top = top_ascending(score, k)
        return (top,) if mask is None else (top, mask)

    given = (q, weights, visible) + (() if candidate_blocks is None else (candidate_blocks,))
    parts = lax.map(one, tuple(split(x) for x in given))
    outs = [jnp.moveaxis(x, 0, 1).reshape(groups, -1, x.shape[-1])[:, :rows] for x in parts]
    return outs[0] if pool is None else (outs[0], outs[1])


def scores(
    q: Float[Array, "g w h d"], weights: Float[Array, "g w h"], keys: Float[Array, "g t d"]
) -> Float[Array, "g w t"]:
    """Scores in float32 that hold values of q's type; zeros are all +0 so that they tie."""
    q32, k32 = q.astype(jnp.float32), keys.astype(jnp.float32)
    dot = jnp.einsum("gwhd,gtd->gwht", q32, k32, precision="highest")
    weight = weights.astype(q.dtype).astype(jnp.float32)
    part = round_to(jax.nn.relu(round_to(dot, q.dtype)) * weight[..., None], q.dtype)
    total = round_to(part.sum(2), q.dtype)
    return jnp.where(total == 0, 0.0, total)


def top_ascending(score: Float[Array, "*rows t"], k: int) -> Int32[Array, "*rows k"]:
    """The k highest entries above -inf, ascending, then -1; equal scores go to the lowest index."""
    entries = score.shape[-1]
    found = min(k, entries)
    if not found:
        return jnp.full((*score.shape[:-1], k), -1, jnp.int32)
    best, index = lax.top_k(score, found)
    index = jnp.sort(jnp.where(best > -jnp.inf, index.astype(jnp.int32), entries), axis=-1)
    index = jnp.where(index < entries, index, -1)
    pad = [(0, 0)] * (index.ndim - 1) + [(0, k - found)]
    return jnp.pad(index, pad, constant_values=-1)


def candidate_pool(
    score: Float[Array, "*rows t"], visible: Int32[Array, "*rows"], block: int, count: int
) -> Bool[Array, "*rows blocks"]:
    """Mask of the `count` best blocks by maximum score, the newest visible entry's always kept."""
    entries = score.shape[-1]
    pad = [(0, 0)] * (score.ndim - 1) + [(0, -entries % block)]
    best = jnp.pad(score, pad, constant_values=-jnp.inf)
    best = best.reshape(*score.shape[:-1], -1, block).max(-1)
    blocks = best.shape[-1]
    number = lax.broadcasted_iota(jnp.int32, best.shape, best.ndim - 1)
    newest = jnp.where(visible > 0, (visible - 1) // block, -1)
    best = jnp.where(number == newest[..., None], jnp.inf, best)
    chosen = top_ascending(best, min(count, blocks))
    chosen = jnp.where(chosen < 0, blocks, chosen)
    flat = chosen.reshape(-1, chosen.shape[-1])
    mask = jnp.zeros((flat.shape[0], blocks), bool)
    mask = mask.at[jnp.arange(flat.shape[0])[:, None], flat].set(True, mode="drop")
    return mask.reshape(best.shape)
