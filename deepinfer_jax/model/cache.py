"""The state of the sequences in flight, and the only code that reads and writes it.

Per slot (one sequence): a ring of window KV rows a layer and a draft stage, the last tokens' open
compressor groups and n-gram classes. Per page (128 tokens of some sequence): the compressed KV
entries and index keys of each source layer.
Everything is addressed by absolute position, rings by position modulo their size, so a rejected
draft row needs no undo:
what lies beyond a sequence's length is masked and later overwritten. Rings are wider than what a
row looks back on by at least the widest verify block, so a block may be written before its first
row is read (V4.1 report 3.2).

A call with more rows a group than that slack (a prefill chunk) reads the old ring and the call's
own rows side by side and writes the ring's last rows afterwards. A cache with rings of size 0
serves whole sequences without history.

Updates return a new cache; the jitted programs donate the old one.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.model import context
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.spec import MX_GROUP, Leaf, Param

PAGE = 128  # tokens
NGRAM_RING = 16  # slots of a ring at least
OPEN_RING = 8


@flax.struct.dataclass
class Cache:
    """Leading axes: window, draft, open groups and classes [slots, ring]; entries and keys [pages,
    entries a page].

    window: one a layer; draft: one a stage; entries, keys, open: one a KV source (open is None at
    ratio 1).
    classes: n-gram classes of the last tokens, int32 [slots, ring], None without Engram.
    Rows are stored as `quant.py` says: an array, or (values, scales).
    """

    window: tuple[Leaf, ...]
    draft: tuple[Leaf, ...]
    entries: tuple[Leaf, ...]
    keys: tuple[Leaf, ...]
    open: tuple[Leaf, ...]
    classes: Leaf | None


def ring_size(cfg: ModelConfig) -> int:
    """Slots of a window ring: the window, a verify block, rounded up to 8 (136 for the released
    model)."""
    return cfg.replay_keep


def open_size(cfg: ModelConfig) -> int:
    """Slots of a ring of open groups (8 for the released model)."""
    return _small(cfg, lookback=1, least=OPEN_RING)


def ngram_size(cfg: ModelConfig) -> int:
    """Slots of the ring of n-gram classes (16 for the released model)."""
    return _small(cfg, lookback=cfg.engram_max_ngram_size - 1, least=NGRAM_RING)


def _small(cfg: ModelConfig, lookback: int, least: int) -> int:
    """Slots such that a rejected block has overwritten nothing that the row after its first one
    looks back on: a block and the look-back, rounded up to 8."""
    return max(least, -(-(cfg.dspark_block_size + lookback) // 8) * 8)


def abstract(
    cfg: ModelConfig, numerics: Numerics, *, slots: int, pages: int, ring: int | None = None
) -> Cache:
    """The declared arrays of a cache; `ring` 0 leaves out all history between calls."""
    ring = ring_size(cfg) if ring is None else ring
    groups, classes = (open_size(cfg), ngram_size(cfg)) if ring else (0, 0)

    def window() -> Any:
        lead, axes = (slots, ring), ("slots", None)
        if not numerics.cache_qdq:
            return _rows(lead, axes, cfg.head_dim, numerics.compute)
        return (
            _rows(lead, axes, cfg.head_dim, "float8_e4m3fn"),
            _rows(lead, axes, cfg.head_dim // MX_GROUP, "float8_e8m0fnu"),
        )

    def paged(source: int, dim: int, scale_dtype: str, group: int) -> Any:
        lead, axes = (pages, PAGE // cfg.compress_ratios[source]), ("pages", None)
        if not numerics.cache_qdq:
            return _rows(lead, axes, dim, numerics.compute)
        return _rows(lead, axes, dim // 2, "uint8"), _rows(lead, axes, dim // group, scale_dtype)

    sources = cfg.kv_source_layer_ids
    return Cache(
        window=tuple(window() for _ in range(cfg.num_hidden_layers)),
        draft=tuple(window() for _ in range(cfg.num_nextn_predict_layers)),
        entries=tuple(paged(source, cfg.head_dim, "float8_e4m3fn", 16) for source in sources),
        keys=tuple(
            paged(source, cfg.index_head_dim, "float8_e8m0fnu", MX_GROUP) for source in sources
        ),
        open=tuple(
            Param((slots, groups, 2, cfg.head_dim), "float32", ("slots", None, None, None), "zeros")
            if cfg.compress_ratios[source] > 1
            else None
            for source in sources
        ),
        classes=Param((slots, classes), "int32", ("slots", None), "zeros")
        if cfg.engram_layer_ids
        else None,
    )


def empty(
    cfg: ModelConfig, numerics: Numerics, *, slots: int, pages: int, ring: int | None = None
) -> Cache:
    """A cache of zeros."""
    declared = abstract(cfg, numerics, slots=slots, pages=pages, ring=ring)
    return jax.tree.map(lambda param: jnp.zeros(param.shape, param.dtype), declared)


def recall(
    ring: Any, new: Any, rows: Rows, position: Int32[Array, "rows n"], lookback: int
) -> tuple[Any, Int32[Array, "rows n"], Any]:
    """Rows of this call joined to a ring.

    ring: stored rows [slots, size, ...]; new: this call's rows [rows, ...]; position: what each row
    reads, at most `lookback` behind it, -1 for nothing. Returns (source [m, ...], index into it
    with -1 kept, the ring afterwards).
    """
    size = jax.tree.leaves(ring)[0].shape[1]
    slot = rows.slot[rows.group][:, None]
    new, call = context.together(rows, new), rows.everyone
    after = write_ring(ring, new, call)
    in_call = call.first[rows.group][:, None] + position - rows.start[rows.group][:, None]
    if size == 0:
        seen = (position >= 0) & (position >= rows.start[rows.group][:, None])
        return new, jnp.where(seen, in_call, -1), after
    in_ring = slot * size + jnp.maximum(position, 0) % size
    if call.width + lookback <= size:
        return _flat(after), jnp.where(position >= 0, in_ring, -1), after
    source, past, slots = join(ring, new, rows, position)
    present = position >= rows.start[rows.group][:, None]
    return source, jnp.where(present, slots + in_call, past), after


def join(
    ring: Any, new: Any, rows: Rows, position: Int32[Array, "rows n"]
) -> tuple[Any, Int32[Array, "rows n"], int]:
    """A ring and this call's rows side by side: (source, index of `position` in the ring part, rows
    before the new ones)."""
    size = jax.tree.leaves(ring)[0].shape[1]
    source = jax.tree.map(lambda old, row: jnp.concatenate([old, row]), _flat(ring), new)
    index = rows.slot[rows.group][:, None] * size + jnp.maximum(position, 0) % size
    slots = jax.tree.leaves(ring)[0].shape[0]
    return source, jnp.where(position >= 0, index, -1), slots * size


def write_ring(ring: Any, new: Any, rows: Rows) -> Any:
    """The ring with this call's valid rows written; of more rows than it has slots, the last
    ones."""
    size = jax.tree.leaves(ring)[0].shape[1]
    if size == 0:
        return ring
    new, rows = context.together(rows, new), rows.everyone
    end = (rows.start + rows.count)[rows.group]
    kept = rows.valid & (rows.position >= end - size)
    index = rows.slot[rows.group] * size + rows.position % size
    return _scatter(ring, new, jnp.where(kept, index, -1))


def write_entries(store: Any, new: Any, rows: Rows, ratio: int) -> Any:
    """Writes the entries that this call's rows from `Rows.own` on complete: entry j of a sequence
    when its row (j + 1) ratio - 1 is in."""
    new, rows = context.together(rows, new), rows.everyone
    per_page = jax.tree.leaves(store)[0].shape[1]
    complete = rows.valid & (rows.position % ratio == ratio - 1)
    complete &= rows.position >= rows.own[rows.group]
    index = entry_index(rows.pages, rows.group, rows.position[:, None] // ratio, per_page)[:, 0]
    return _scatter(store, new, jnp.where(complete, index, -1))


def entry_index(
    pages: Int32[Array, "groups pages"],
    group: Int32[Array, " rows"],
    entry: Int32[Array, "rows n"],
    per_page: int,
) -> Int32[Array, "rows n"]:
    """Place of a sequence's entries in the flattened page pool; -1 for entry -1 and for pages that
    are not there."""
    page = jnp.minimum(jnp.maximum(entry, 0) // per_page, pages.shape[1] - 1)
    held = pages[group[:, None], page]
    inside = (entry >= 0) & (held >= 0) & (entry < pages.shape[1] * per_page)
    return jnp.where(inside, held * per_page + entry % per_page, -1)


def flat_pool(store: Any) -> Any:
    """A page pool as one list of rows [pages * entries a page, ...]."""
    return _flat(store)


def pool_index(
    pages: Int32[Array, "groups pages"], per_page: int
) -> Int32[Array, "groups entries"]:
    """Place in the flattened pool of every entry that a sequence can have; -1 where it has no
    page."""
    place = pages[:, :, None] * per_page + jnp.arange(per_page, dtype=jnp.int32)[None, None, :]
    return jnp.where(pages[:, :, None] >= 0, place, -1).reshape(pages.shape[0], -1)


def _rows(lead: tuple[int, ...], axes: tuple[str | None, ...], dim: int, dtype: str) -> Param:
    return Param((*lead, dim), dtype, (*axes, None), "zeros")


def _flat(store: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), store)


def _scatter(store: Any, new: Any, index: Int32[Array, " rows"]) -> Any:
    """store[index] = new over the two leading axes flattened; an index of -1 writes nothing."""

    def leaf(
        old: Shaped[Array, " a b *rest"], row: Shaped[Array, " rows *rest"]
    ) -> Shaped[Array, " a b *rest"]:
        size = old.shape[0] * old.shape[1]
        # Out of range on purpose: a scatter index of -1 would wrap to the last row.
        place = jnp.where(index < 0, size, index)
        return old.reshape(size, *old.shape[2:]).at[place].set(row, mode="drop").reshape(old.shape)

    return jax.tree.map(leaf, store, new)
