"""Values of a slice: weights and caches drawn on the device, inputs drawn by the host.

Nothing is zero that a real step reads: on zeros products run faster, and a selection would be the
first entries of every sequence. The same seed gives the same values on every platform.
"""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from deepinfer_jax import spec
from deepinfer_jax.bench import counts
from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.model import cache as caches
from deepinfer_jax.model.cache import PAGE, Cache
from deepinfer_jax.model.indexer import Selection
from deepinfer_jax.spec import Param

SMALL = 1 << 16
LARGE = 1 << 31


def materialise(tree: Any, seed: int = 0) -> Any:
    """The tree on the default device: `Param` leaves drawn there, arrays copied."""

    def leaf(path: tuple[Any, ...], one: Any) -> Any:
        if not isinstance(one, Param):
            return jax.device_put(one)
        number = zlib.crc32(spec.path_name(path).encode())
        if one.size <= SMALL:  # a program each would take longer
            return jax.device_put(spec.random(one, (seed << 32) + number))
        return _draw(one, jax.random.fold_in(jax.random.key(seed), number))

    return jax.tree_util.tree_map_with_path(leaf, tree)


@functools.partial(jax.jit, static_argnums=0)
def _draw(param: Param, key: Array) -> Array:
    """As `spec.random` draws, but on the device, where tens of gigabytes take seconds."""
    shape, dtype = param.shape, jnp.dtype(param.dtype)
    if param.size > LARGE and len(shape) > 2:  # a stack, one matrix at a time: the rest is scratch
        one = dataclasses.replace(param, shape=shape[1:], axes=param.axes[1:])
        return jax.lax.map(lambda part: _draw(one, part), jax.random.split(key, shape[0]))
    if param.init in ("ones", "zeros"):
        return jnp.full(shape, 1 if param.init == "ones" else 0, dtype)
    if param.init == "bits":
        return jax.random.bits(key, shape, jnp.uint8)
    if param.init == "exponent":
        centre = 127 + round(float(np.log2(param.scale)))
        code = jnp.uint8(centre - 1) + (jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(1))
        return jax.lax.bitcast_convert_type(code, dtype)
    return (jax.random.normal(key, shape, jnp.float32) * jnp.float32(param.scale)).astype(dtype)


def cache(cfg: ModelConfig, numerics: Numerics, slots: int, held: int) -> Cache:
    """Declared caches full of drawn rows: what is stored as zeros when empty."""
    declared = caches.abstract(cfg, numerics, slots=slots, pages=slots * held)
    kinds = {"uint8": "bits", "float8_e8m0fnu": "exponent", "int32": "zeros"}

    def full(param: Param) -> Param:
        return dataclasses.replace(param, init=kinds.get(param.dtype, "normal"))

    return jax.tree.map(full, declared)


def tokens(cfg: ModelConfig, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(3, min(cfg.vocab_size, cfg.image_token_id), shape).astype(np.int32)


def pages(rng: np.random.Generator, sequences: int, held: int) -> np.ndarray:
    """Pages in no order, as after a while of serving."""
    return rng.permutation(sequences * held).reshape(sequences, held).astype(np.int32)


def routes(
    cfg: ModelConfig, rng: np.random.Generator, lead: tuple[int, ...], experts: int
) -> np.ndarray:
    shape = (*lead, cfg.num_experts_per_tok)
    return np.sort(rng.integers(0, experts, shape, dtype=np.int32), axis=-1)


def selection(
    cfg: ModelConfig, rng: np.random.Generator, rows: counts.Rows, ratio: int, held: int
) -> Selection:
    """What layers before the slice would have selected: drawn among the visible entries."""
    seen = (np.array(rows.positions) + 1) // ratio
    drawn = rng.random((rows.count, cfg.index_topk)) * np.tile(seen, rows.sequences)[:, None]
    entries = np.sort(drawn.astype(np.int32), axis=-1)
    entries[np.tile(seen == 0, rows.sequences)] = -1
    wide = -(-(held * PAGE // ratio) // max(cfg.candidate_block_size, 1))
    blocks = np.zeros((rows.sequences, rows.width, wide), np.bool_)
    for group in blocks.reshape(-1, wide):
        group[rng.permutation(wide)[: cfg.candidate_topk_blocks]] = True
    return Selection(entries, blocks if cfg.candidate_source_layer_id is not None else None)
