"""Indexer on Hopper (Pallas Mosaic GPU): scores of stored keys and their top k, in two launches.

Scores never reach memory. A warpgroup takes one chunk of the context for a few query rows of one
group, expands its keys in registers, 64 at a time, as the left operand of the tensor cores (the
order of the 128 channels in a product is free, so the queries are permuted to the order in which
the nibbles fall out of a word), and keeps bfloat16 scores in shared memory. The chunk's best k
with their indices (`pick.py`) go to memory: k of 8,192. The second launch merges the chunks'
lists, which are in order of index, in the same way; longer contexts merge more than once.

With `pool` the first launch also writes the maximum of every block of 8 entries, and a third one
turns the best of them into the mask. With `candidate_blocks` the entries of the blocks of a row are
listed first and the row is scored as a group of its own: lists, scores and merges are as long as
the pool, however long the context is.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.index_topk import keys as stored
from pallas_kernels.index_topk import lists
from pallas_kernels.index_topk.reference import Keys

TILE = 64
WIDTH = 128
POOL_BLOCK = 8
LISTS = 16384  # entries of a merge by one warpgroup
CHUNKS = {1: (4, 8192), 2: (4, 4096), 3: (3, 4096), 4: (3, 2048)}  # rows -> groups, chunk


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
    """Top k visible entries of every row; arguments as in the package's `select`.

    Raises:
        NotImplementedError: not bfloat16, keys that are not stored, or sizes without a kernel.
    """
    if not isinstance(keys, tuple):
        raise NotImplementedError("stored keys, got an array")
    groups, rows, heads, width = q.shape
    if q.dtype != jnp.bfloat16 or weights.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"queries and weights in bfloat16, got {q.dtype}, {weights.dtype}"
        )
    if width != WIDTH or heads % 8 or heads > 64:
        raise NotImplementedError(f"{WIDTH} channels and 8 to 64 heads, got {width} and {heads}")
    values, scales, entries = keys
    if values.dtype != jnp.uint8 or scales.dtype != jnp.float8_e8m0fnu:
        raise NotImplementedError(f"e2m1 keys with e8m0 scales, got {values.dtype}, {scales.dtype}")
    if pool is not None and pool[0] != POOL_BLOCK:
        raise NotImplementedError(f"a pool of blocks of {POOL_BLOCK}, got {pool[0]}")
    if k > 1024 or not entries.shape[1] or not rows:
        raise NotImplementedError(f"k at most 1024 and some entries, got {k}, {entries.shape}")
    if candidate_blocks is not None:
        if candidates is None or pool is not None:
            raise NotImplementedError("candidate_blocks with candidates and without pool")
        position, count = _candidates(candidate_blocks, visible, candidates, entries.shape[1])
        alone = (groups * rows, 1)
        place = jnp.maximum(position, 0).reshape(groups, -1)
        listed = jnp.take_along_axis(entries, place, axis=1).reshape(position.shape)
        args = (q.reshape(*alone, heads, width), weights.reshape(*alone, heads))
        found = select(*args, (values, scales, listed), count.reshape(alone), k=k)[:, 0]
        picked = jnp.take_along_axis(position, jnp.maximum(found, 0), axis=1)
        return jnp.where(found < 0, -1, picked).reshape(groups, rows, k)
    return _select(q, weights, values, scales, entries, visible, k, pool)


def _candidates(
    mask: Array, visible: Array, candidates: tuple[int, int], entries: int
) -> tuple[Array, Array]:
    """Entries of the chosen blocks of every row, ascending, and how many of them are visible."""
    block, count = candidates
    lines, blocks = mask.shape[0] * mask.shape[1], mask.shape[2]
    chosen = _places_set(mask.reshape(lines, blocks), min(count, blocks))
    inside = lax.broadcasted_iota(jnp.int32, (*chosen.shape, block), 2)
    position = (chosen[..., None] * block + inside).reshape(lines, -1)
    live = position < jnp.minimum(visible.reshape(-1, 1), entries)
    return jnp.where(live, position, -1), live.sum(-1, dtype=jnp.int32)


def _places_set(mask: Array, count: int) -> Array:
    """int32 [lines, count]: the first places set in every line, ascending, then the line's length.

    Nothing wider than a bit a place is made of the mask: it is packed into words, and the n-th
    place is looked up in the running count of the words, then by halving in its word.
    """
    lines, length = mask.shape
    bits = jnp.pad(mask, ((0, 0), (0, -length % 32))).reshape(lines, -1, 4, 8).astype(jnp.uint8)
    bits = lax.shift_left(bits, lax.broadcasted_iota(jnp.uint8, bits.shape, 3))
    packed = lax.reduce(bits, jnp.uint8(0), lax.bitwise_or, (3,))
    words = lax.bitcast_convert_type(packed, jnp.uint32)
    ends = jnp.cumsum(lax.population_count(words).astype(jnp.int32), axis=-1)
    number = lax.broadcasted_iota(jnp.int32, (lines, count), 1)
    most = words.shape[1]
    first = lax.broadcasted_iota(jnp.int32, (lines, count), 0) * most

    def pick(table: Array, word: Array) -> Array:
        return jnp.take(table.reshape(-1), first + jnp.clip(word, 0, most - 1), mode="clip")

    word = jnp.zeros_like(number)
    for step in reversed(range(most.bit_length())):
        further = word + 2**step
        passed = (further <= most) & (pick(ends, further - 1) <= number)
        word = jnp.where(passed, further, word)
    rest = number - jnp.where(word > 0, pick(ends, word - 1), 0)
    bits, place = pick(words, word), 32 * word
    for half in (16, 8, 4, 2, 1):
        low = lax.population_count(bits & jnp.uint32(2**half - 1)).astype(jnp.int32)
        above = rest >= low
        place, rest = place + jnp.where(above, half, 0), rest - jnp.where(above, low, 0)
        bits = jnp.where(above, bits >> jnp.uint32(half), bits)
    return jnp.where(number < ends[:, -1:], place, length)


def _select(q, weights, values, scales, entries, visible, k, pool):
    groups, rows, heads, _ = q.shape
    most = 4 if heads <= 32 else 2
    # expanding a tile of keys costs about as much as three or four rows of 32 heads
    together = min(range(1, most + 1), key=lambda n: -(-rows // n) * (336 + 3 * heads * n))
    parts = -(-rows // together)
    pad = parts * together - rows
    if pad:
        q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
        weights = jnp.pad(weights, ((0, 0), (0, pad), (0, 0)))
        visible = jnp.pad(visible, ((0, 0), (0, pad)))
    total = entries.shape[1]
    whole = -(-total // (2 * TILE)) * 2 * TILE
    entries = jnp.pad(entries, ((0, 0), (0, whole - total)), constant_values=-1)
    q = stored.permute_queries(q).reshape(groups, parts, together * heads, WIDTH)
    weights = weights.reshape(groups, parts, together * heads)
    visible = jnp.minimum(visible, total)
    workers, chunk = CHUNKS[together]
    chunks = -(-whole // chunk)
    keep = _places(k)
    score = _score_program(
        groups, parts, together, heads, whole, chunk, workers, k, pool is not None, _processors()
    )
    best, index, *block_best = score(
        q, weights, visible.reshape(groups, parts, together), values, scales, entries
    )
    lines = groups * parts * together
    best, index = best.reshape(lines, chunks * keep), index.reshape(lines, chunks * keep)
    index = _merge(best, index, k)
    index = index.reshape(groups, parts * together, k)[:, :rows]
    if pool is None:
        return index
    blocks = -(-total // POOL_BLOCK)
    mask = _mask(block_best[0].reshape(lines, whole // POOL_BLOCK), min(pool[1], blocks))
    mask = mask.reshape(groups, parts * together, -1)[:, :rows, :blocks]
    return index, mask


def _merge(best: Array, index: Array, k: int) -> Array:
    """The indices of the k best of every line of lists in order, ascending, then -1."""
    lines, keep = best.shape[0], _places(k)
    fill = -best.shape[1] % keep
    best = jnp.pad(best, ((0, 0), (0, fill)), constant_values=-jnp.inf)
    index = jnp.pad(index, ((0, 0), (0, fill)), constant_values=-1)
    while best.shape[1] > keep:
        count = best.shape[1] // keep
        together = min(count, max(2, LISTS // keep))
        fold = -(-count // together)
        fill = (fold * together - count) * keep
        best = jnp.pad(best, ((0, 0), (0, fill)), constant_values=-jnp.inf)
        index = jnp.pad(index, ((0, 0), (0, fill)), constant_values=-1)
        split = (lines * fold, together * keep)
        best, index = _merge_program(*split, k)(best.reshape(split), index.reshape(split))
        best, index = best.reshape(lines, fold * keep), index.reshape(lines, fold * keep)
    return index[:, :k]


def _mask(maxima: Array, k: int) -> Array:
    """Whether each block of a line is among its k best."""
    lines, blocks = maxima.shape
    if blocks <= LISTS:
        return _mask_program(lines, blocks, k)(maxima).astype(bool)
    number = jnp.broadcast_to(jnp.arange(blocks, dtype=jnp.int32), maxima.shape)
    chosen = _merge(maxima, number, k)
    chosen = jnp.where(chosen < 0, blocks, chosen)
    line = jnp.broadcast_to(jnp.arange(lines)[:, None], chosen.shape)
    return jnp.zeros(maxima.shape, bool).at[line, chosen].set(True, mode="drop")


def _places(k: int) -> int:
    """Places of a list of k: a multiple of eight, so that lists stay aligned."""
    return -(-k // 8) * 8


def _processors() -> int:
    device = jax.sharding.get_abstract_mesh().abstract_device
    count = getattr(device, "num_cores", None) or getattr(jax.devices()[0], "core_count", None)
    return int(count or 132)


def _parameters() -> plgpu.CompilerParams:
    return plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
    )


@functools.lru_cache(maxsize=64)
def _score_program(
    groups: int,
    parts: int,
    together: int,
    heads: int,
    entries: int,
    chunk: int,
    workers: int,
    k: int,
    pooled: bool,
    processors: int,
):
    """First launch: (q, weights, visible, values, scales, entries) -> best, index of each chunk."""
    chunks, keep = -(-entries // chunk), _places(k)
    columns = together * heads
    overlap = columns <= 96  # beyond that, two tiles of dot products do not fit in registers
    items = groups * parts * chunks
    grid = min(processors, items)

    def body(q, weights, visible, values, scales, entry, best, index, *rest):
        block_best, (q_tile, score, scratch, ring, q_full) = rest[:-5], rest[-5:]
        group = lax.axis_index("wg")
        worker = lax.axis_index("cta") + group * grid
        count = lax.div(items - worker + (grid * workers - 1), grid * workers)

        def item(turn, _):
            number = worker + turn * (grid * workers)
            place, piece = lax.rem(number, chunks), lax.div(number, chunks)
            part, line = lax.rem(piece, parts), lax.div(piece, parts)
            mine = q_tile.at[group]
            plgpu.copy_gmem_to_smem(q.at[line, part], mine, q_full.at[group])
            weight = stored.load_weights(weights.at[line, part], columns)
            sight = stored.load_visible(visible.at[line, part], together)
            start = place * chunk
            list_ = entry.at[line]
            tiles = stored.tiles(sight, together, start, min(chunk, entries) // TILE)
            end = start + tiles * TILE
            kept = ring.at[group]
            soon = stored.DEPTH + 2  # list entries are loaded two tiles before they are needed
            numbers = [stored.load_entries(list_, start + t * TILE, end) for t in range(soon)]
            for t in range(stored.DEPTH):
                stored.start_keys(numbers[t], values, scales, kept, jnp.int32(t))
            plgpu.barrier_wait(q_full.at[group])

            def tile(t, carry):
                ahead, after, dots = carry

                def product(acc):
                    raw = stored.take_keys(kept, t)
                    for half in range(2):
                        left = stored.expand(raw, half)
                        plgpu.wgmma(acc, left, mine.at[:, pl.ds(64 * half, 64)].T)
                    stored.start_keys(ahead, values, scales, kept, t)
                    later = stored.load_entries(list_, start + (t + soon) * TILE, end)
                    if overlap:
                        rate(dots, t - 1)  # while the tensor cores work
                    return acc[...], later

                acc = plgpu.ACC((TILE, columns), jnp.float32)
                new, later = pl.run_scoped(product, acc)
                if overlap:
                    return after, later, new
                rate(new, t)
                return after, later, dots

            maxima = [x.at[line, part] for x in block_best]

            def rate(dots, t):
                place = (start + t * TILE, t * TILE, score.at[group])
                stored.score(dots, weight, sight, *place, maxima, heads)

            none = jnp.zeros((TILE, columns if overlap else 8), jnp.float32)
            none = plgpu.layout_cast(none, plgpu.Layout.WGMMA)

            def pair(n, carry):  # two tiles a turn, so that what is carried need not be copied
                return tile(2 * n + 1, tile(2 * n, carry))

            carry = (*numbers[-2:], none)
            if columns <= 64:
                *_, dots = lax.fori_loop(0, lax.div(tiles, 2), pair, carry)
            else:
                *_, dots = lax.fori_loop(0, tiles, tile, carry)
            stored.finish_copies()
            if overlap:
                rate(dots, tiles - 1)
            out = (best.at[line, part], index.at[line, part])
            mine = (score.at[group], scratch.at[group])
            lists.finish(*mine, tiles, start, place, k, keep, out, maxima)
            return ()

        lax.fori_loop(0, count, item, ())

    shape = (groups, parts, together)
    outs = [
        jax.ShapeDtypeStruct((*shape, chunks * keep), jnp.bfloat16),
        jax.ShapeDtypeStruct((*shape, chunks * keep), jnp.int32),
    ]
    if pooled:
        outs.append(jax.ShapeDtypeStruct((*shape, entries // POOL_BLOCK), jnp.bfloat16))
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        body,
        kernel_name="index_scores",
        out_type=outs,
        grid=(grid,),
        grid_names=("cta",),
        num_threads=workers,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((workers, columns, WIDTH), jnp.bfloat16, transforms=transforms),
            plgpu.SMEM((workers, together, chunk), jnp.bfloat16),
            plgpu.SMEM((workers, 64), jnp.int32),
            plgpu.SMEM((workers, stored.DEPTH * stored.TILE_BYTES), jnp.uint8),
            plgpu.Barrier(num_barriers=workers),
        ],
        compiler_params=_parameters(),
    )


@functools.lru_cache(maxsize=64)
def _merge_program(lines: int, size: int, k: int):
    """Merges lists of scores and indices, each line `size` long, into the k best in order."""
    keep = _places(k)

    def body(best, index, best_out, index_out, scratch, places):
        line = lax.axis_index("line")
        refs = (best.at[line], index.at[line], best_out.at[line], index_out.at[line])
        lists.merge(*refs, scratch, places, size, k, keep)

    return plgpu.kernel(
        body,
        kernel_name="index_merge",
        out_type=[
            jax.ShapeDtypeStruct((lines, keep), jnp.bfloat16),
            jax.ShapeDtypeStruct((lines, keep), jnp.int32),
        ],
        grid=(lines,),
        grid_names=("line",),
        scratch_types=[plgpu.SMEM((64,), jnp.int32), plgpu.SMEM((keep,), jnp.int32)],
        compiler_params=_parameters(),
    )


@functools.lru_cache(maxsize=64)
def _mask_program(lines: int, blocks: int, k: int):
    """Mask, one byte a block, of the k best of each line of block maxima."""

    def body(maxima, mask, scratch):
        line = lax.axis_index("line")
        lists.mask(maxima.at[line], mask.at[line], scratch, blocks, k)

    return plgpu.kernel(
        body,
        kernel_name="index_pool",
        out_type=jax.ShapeDtypeStruct((lines, blocks), jnp.uint8),
        grid=(lines,),
        grid_names=("line",),
        scratch_types=[plgpu.SMEM((64,), jnp.int32)],
        compiler_params=_parameters(),
    )
