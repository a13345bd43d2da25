"""The device pool of grammars: who is loaded, where, and for how long.

The arena is handed out in chunks of cells. One compiled program loads any grammar: it writes as
many cells of a window of chunks as it is told. A grammar that no sequence uses stays until its room
is needed (least recently used goes first), so repeated requests load nothing. Sequences of one
grammar share its tables; a host-tier grammar has no tables to share and takes a row of token
classes per sequence, which its mask is written to before each step: class 1 is allowed, class 2
ends the sequence.

The manager is host state next to the pool, which is a pytree that goes through the jitted step. Its
methods take a pool and return the next one; the old one's buffers are donated.
"""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt16, UInt32

from deepinfer_jax.structured.device import HEADER, RETURN_COUNT, TRIGGER_LENGTH, Pool
from deepinfer_jax.structured.errors import GrammarError, Limits, PoolFullError
from deepinfer_jax.structured.grammar import Grammar

CHUNK = 1024
WINDOW = 16 * CHUNK


@functools.partial(jax.jit, donate_argnums=0)
def _write_cells(
    arena: Int32[Array, " cells"],
    window: Int32[Array, " window"],
    at: Int32[Array, ""],
    count: Int32[Array, ""],
) -> Int32[Array, " cells"]:
    """The first `count` cells of the window, from `at` on; the arena goes on for a window there."""
    held = jax.lax.dynamic_slice(arena, (at,), window.shape)
    told = jnp.arange(window.shape[0], dtype=jnp.int32) < count
    return jax.lax.dynamic_update_slice(arena, jnp.where(told, window, held), (at,))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _write_row(
    token_class: UInt16[Array, "grammars vocab"],
    header: Int32[Array, "grammars fields"],
    classes: UInt16[Array, " vocab"],
    fields: Int32[Array, " fields"],
    row: Int32[Array, ""],
) -> tuple[UInt16[Array, "grammars vocab"], Int32[Array, "grammars fields"]]:
    return token_class.at[row].set(classes), header.at[row].set(fields)


@functools.partial(jax.jit, donate_argnums=0)
def _write_mask(
    token_class: UInt16[Array, "grammars vocab"],
    packed: UInt32[Array, " words"],
    eos: Int32[Array, " ends"],
    row: Int32[Array, ""],
) -> UInt16[Array, "grammars vocab"]:
    token = jnp.arange(token_class.shape[1], dtype=jnp.int32)
    bit = (packed[token // 32] >> (token % 32).astype(jnp.uint32)) & jnp.uint32(1)
    kind = 1 + (token[:, None] == eos[None, :]).any(axis=1).astype(jnp.uint16)
    return token_class.at[row].set(bit.astype(jnp.uint16) * kind)


@dataclasses.dataclass
class _Loaded:
    grammar: Grammar
    first: int  # chunk
    chunks: int
    users: int


class PoolManager:
    """Allocates the pool of one engine.

    width: columns of the logits. grammars: rows of token classes, one a grammar. cells: int32 cells
    of the arena. limits: those of the compiler; classes, edges and exits fix shapes of the step.
    sharding: pytree or one sharding for the pool's arrays (the default device unless given).
    """

    def __init__(
        self,
        width: int,
        *,
        grammars: int = 32,
        cells: int = 1 << 22,
        limits: Limits | None = None,
        sharding: Any = None,
    ):
        self.limits = limits or Limits()
        self.width, self.grammars, self.sharding = width, grammars, sharding
        self.chunks = -(-cells // CHUNK)
        self._loaded: collections.OrderedDict[int, _Loaded] = collections.OrderedDict()

    def empty(self) -> Pool:
        """A pool without grammars; its shapes never change after this."""
        pool = Pool(
            token_class=np.zeros((self.grammars, self.width), np.uint16),
            header=np.zeros((self.grammars, HEADER), np.int32),
            arena=np.zeros(self.chunks * CHUNK + WINDOW, np.int32),
            classes=min(self.limits.classes, self.width + 1),
            edges=self.limits.edges,
            exits=self.limits.exits,
        )
        return jax.device_put(pool, self.sharding)

    def acquire(self, pool: Pool, grammar: Grammar) -> tuple[Pool, int]:
        """Hold a grammar for one sequence, loading it unless it is there: the pool, its index.

        Raises `PoolFullError` while sequences hold the room it needs, `GrammarError` if it can
        never fit.
        """
        for row, loaded in self._loaded.items():
            if loaded.grammar.key == grammar.key and grammar.host is None:
                loaded.users += 1
                self._loaded.move_to_end(row)
                return pool, row
        if len(grammar.token_class) != self.width:
            raise GrammarError(
                f"grammar is for {len(grammar.token_class)} logits, the pool for {self.width}"
            )
        for what in ("classes", "edges", "exits"):
            size, most = getattr(grammar.report, what), getattr(self.limits, what)
            if size > most:
                raise GrammarError(f"grammar has {size} {what}, the pool takes {most}")
        chunks = -(-len(grammar.block.cells) // CHUNK)
        if chunks > self.chunks:
            raise GrammarError(
                f"grammar has {len(grammar.block.cells)} cells, the pool {self.chunks * CHUNK}"
            )
        row, first = self._room(chunks)
        self._loaded[row] = _Loaded(grammar, first, chunks, 1)
        return self._load(pool, row, first), row

    def release(self, row: int) -> None:
        """One sequence less uses the grammar at this index; it stays until its room is needed."""
        loaded = self._loaded[row]
        if loaded.users < 1:
            raise ValueError(f"grammar {row} of the pool has no user to release")
        loaded.users -= 1
        if loaded.users == 0 and loaded.grammar.host is not None:
            del self._loaded[row]

    def write_mask(self, pool: Pool, row: int, packed: UInt32[np.ndarray, " words"]) -> Pool:
        """Set what a host-tier sequence may sample next: bit t % 32 of word t // 32 for token t."""
        grammar = self._loaded[row].grammar
        if grammar.host is None:
            raise ValueError(f"grammar {row} of the pool has tables, its mask is not written")
        eos = np.nonzero(grammar.token_class == 2)[0].astype(np.int32)
        at = np.int32(row)
        return dataclasses.replace(pool, token_class=_write_mask(pool.token_class, packed, eos, at))

    def _load(self, pool: Pool, row: int, first: int) -> Pool:
        loaded = self._loaded[row]
        cells, arena = loaded.grammar.block.cells, pool.arena
        for begin in range(0, len(cells), WINDOW):
            part = cells[begin : begin + WINDOW]
            window = np.zeros(WINDOW, np.int32)
            window[: len(part)] = part
            at = np.int32(first * CHUNK + begin)
            arena = _write_cells(arena, window, at, np.int32(len(part)))
        fields = loaded.grammar.block.header + np.int32(first * CHUNK)
        for size in (RETURN_COUNT, TRIGGER_LENGTH):
            fields[size] = loaded.grammar.block.header[size]
        token_class, header = _write_row(
            pool.token_class, pool.header, loaded.grammar.token_class, fields, np.int32(row)
        )
        return dataclasses.replace(pool, token_class=token_class, header=header, arena=arena)

    def _room(self, chunks: int) -> tuple[int, int]:
        """An index and a first chunk, after dropping unused grammars as far as it takes."""
        while True:
            rows = [row for row in range(self.grammars) if row not in self._loaded]
            first = self._gap(chunks)
            if rows and first is not None:
                return rows[0], first
            unused = next((row for row, one in self._loaded.items() if one.users == 0), None)
            if unused is None:
                held = sum(one.users > 0 for one in self._loaded.values())
                raise PoolFullError(
                    f"grammar pool is full: {held} of {self.grammars} grammars in use, "
                    f"{chunks} free chunks of {CHUNK} cells in a row needed"
                )
            del self._loaded[unused]

    def _gap(self, chunks: int) -> int | None:
        """First chunk of the first gap that is long enough."""
        at = 0
        for one in sorted(self._loaded.values(), key=lambda one: one.first):
            if one.first - at >= chunks:
                return at
            at = one.first + one.chunks
        return at if self.chunks - at >= chunks else None
