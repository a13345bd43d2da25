"""Engram hashing: which table rows a position reads (V4.1 report 2.4; reference
inference/engram.py).

Token ids are first folded into classes (same text up to case, accents and spacing). For position p
and look-back s the class is t_s = c[p - s], or the pad class once the look-back crosses the
sequence start or an image token (and for all longer look-backs). With odd 64-bit multipliers m_s of
the layer,
  r_n = t_0 m_0 xor ... xor t_{n-1} m_{n-1},   row[n, h] = r_n mod prime[n, h] + offset[n, h],   n =
                                               2 .. max_ngram_size.
Products stay below 2^63. JAX has 32-bit integers by default, so r is kept as two uint32 words and
reduced byte by byte:
exact integer arithmetic on any device. Primes are distinct over all layers; offsets are their
running sum, so the primes of a layer add up to its table's rows.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import cache as caches
from deepinfer_jax.model.cache import Cache
from deepinfer_jax.model.rows import Rows

DEAD = -1  # class of a token that no n-gram may contain (image spans)
_LIMB = 15  # bits; a class has at most 17, so class times limb fits 32


@dataclasses.dataclass(frozen=True)
class HashConstants:
    """multipliers (one a look-back), primes and offsets (one a column, n-gram size major)."""

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]


@functools.lru_cache(maxsize=16)
def hash_constants(cfg: ModelConfig) -> dict[int, HashConstants]:
    """The constants of every Engram layer, derived from the config.

    Raises `ValueError` if the primes of a layer do not add up to its table's rows.
    """
    constants = {}
    bound = (2**63 - 1) // cfg.engram_compressed_vocab_size // 2
    sizes = cfg.engram_vocab_size, cfg.engram_max_ngram_size, cfg.engram_n_heads
    primes_of = layer_primes(cfg.engram_layer_ids, *sizes)
    for layer, rows in zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, strict=True):
        primes = primes_of[layer]
        if sum(primes) != rows:
            raise ValueError(
                f"engram_num_embeddings of layer {layer} = {rows}; "
                f"expected {sum(primes)}, the sum of its primes"
            )
        if max(primes) > 1 << 24:
            raise ValueError(
                f"engram_vocab_size = {cfg.engram_vocab_size}; expected primes below 2^24"
            )
        drawn = np.random.default_rng(10007 * layer).integers(
            0, bound, size=cfg.engram_max_ngram_size, dtype=np.int64
        )
        offsets = np.concatenate([[0], np.cumsum(primes[:-1])])
        constants[layer] = HashConstants(
            tuple(int(m) * 2 + 1 for m in drawn), primes, tuple(int(o) for o in offsets)
        )
    return constants


def layer_primes(
    layers: Sequence[int], vocab_size: int, max_ngram_size: int, heads: int
) -> dict[int, tuple[int, ...]]:
    """The bucket sizes of each layer, n-gram size major; their sum is its table's rows."""
    seen: set[int] = set()
    primes_of = {}
    for layer in layers:
        primes: list[int] = []
        for _ in range(2, max_ngram_size + 1):
            candidate = vocab_size - 1
            for _ in range(heads):
                candidate += 1
                while candidate in seen or not _is_prime(candidate):
                    candidate += 1
                seen.add(candidate)
                primes.append(candidate)
        primes_of[layer] = tuple(primes)
    return primes_of


def table_rows(
    cfg: ModelConfig, token_map: Int32[Array, " vocab"], rows: Rows, cache: Cache
) -> tuple[dict[int, Int32[Array, "rows columns"]], Cache]:
    """Table rows of every Engram layer for this call's rows, and the cache with their classes
    remembered."""
    look_back = cfg.engram_max_ngram_size - 1
    classes = token_map[rows.token]
    position = rows.position[:, None] - jnp.arange(1, look_back + 1, dtype=jnp.int32)[None, :]
    source, index, ring = caches.recall(
        cache.classes, classes, rows, jnp.where(position >= 0, position, -1), lookback=look_back
    )
    earlier = jnp.where(index >= 0, source[jnp.maximum(index, 0)], DEAD)
    history = jnp.concatenate([classes[:, None], earlier], axis=1)
    pad = token_map[cfg.engram_pad_token_id]
    found = {
        layer: hash_rows(history, pad, constants)
        for layer, constants in hash_constants(cfg).items()
    }
    return found, dataclasses.replace(cache, classes=ring)


def remember(
    token_map: Int32[Array, " vocab"], rows: Rows, cache: Cache, before: Int32[Array, "groups n"]
) -> Cache:
    """The cache with the classes of the tokens just before each group, oldest first, -1 for
    none. Where a sequence goes on from its own rows they are there already."""
    back = jnp.arange(-before.shape[1], 0, dtype=jnp.int32)
    at = rows.start[:, None] + back[None, :]
    ring: Any = cache.classes
    size = ring.shape[1]
    known = (before >= 0) & (rows.count > 0)[:, None]
    place = jnp.where(known, rows.slot[:, None] * size + at % size, ring.size)
    after = ring.reshape(-1).at[place].set(token_map[before], mode="drop")
    return dataclasses.replace(cache, classes=after.reshape(ring.shape))


def hash_rows(
    history: Int32[Array, "rows ngram"], pad: Int32[Array, ""], constants: HashConstants
) -> Int32[Array, "rows columns"]:
    """history: class of the row's token and of the ones before it, DEAD where there is none."""
    blocked = jnp.cumsum((history == DEAD).astype(jnp.int32), axis=1) > 0
    term = jnp.where(blocked, pad, history).astype(jnp.uint32)
    ngrams = len(constants.multipliers) - 1
    heads = len(constants.primes) // ngrams
    high, low = _product(term[:, 0], constants.multipliers[0])
    columns = []
    for n in range(ngrams):
        more_high, more_low = _product(term[:, n + 1], constants.multipliers[n + 1])
        high, low = high ^ more_high, low ^ more_low
        for head in range(heads):
            column = n * heads + head
            rest = _remainder(high, low, constants.primes[column])
            columns.append(rest.astype(jnp.int32) + jnp.int32(constants.offsets[column]))
    return jnp.stack(columns, axis=1)


def _product(
    term: UInt32[Array, " rows"], multiplier: int
) -> tuple[UInt32[Array, " rows"], UInt32[Array, " rows"]]:
    """term * multiplier as (high, low) words; term below 2^17, product below 2^64."""
    high = low = jnp.zeros_like(term)
    for shift in range(0, 64, _LIMB):
        part = term * jnp.uint32((multiplier >> shift) & ((1 << _LIMB) - 1))
        if shift < 32:
            add = part << shift
            low = low + add
            high = high + (low < add).astype(jnp.uint32)
            if shift:
                high = high + (part >> (32 - shift))
        else:
            high = high + (part << (shift - 32))
    return high, low


def _remainder(
    high: UInt32[Array, " rows"], low: UInt32[Array, " rows"], prime: int
) -> UInt32[Array, " rows"]:
    """(high 2^32 + low) mod prime for a prime of at most 24 bits."""
    modulus = jnp.uint32(prime)
    rest = high % modulus
    for shift in (24, 16, 8, 0):
        rest = ((rest << 8) | ((low >> shift) & jnp.uint32(255))) % modulus
    return rest


def _is_prime(n: int) -> bool:
    """Trial division; the largest candidates are about 2^24."""
    if n < 4:
        return n > 1
    if n % 2 == 0:
        return False
    return all(n % divisor for divisor in range(3, int(n**0.5) + 1, 2))
