"""Named cases of the indexer: small ones for every corner, and the released sizes.

Released: 32 heads of 128 channels, k = 512, MXFP4 keys in pages of 128 entries; the pool is 2,048
blocks of 8 entries. Decode scores the whole context of every slot, or (`_inside`) the entries of
its rows' pools. FLOP are those of the dot products; bytes are the stored keys, their page entries
left out (4 more a key), read once a slot, and the pools' mask.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.cases import Case

HEADS, WIDTH, TOP = 32, 128, 512
PAGE = 128


def _sight(
    rng: np.random.Generator, groups: int, rows: int, entries: int, full: bool
) -> np.ndarray:
    if full:
        return np.full((groups, rows), entries, np.int32)
    return rng.integers(0, entries + 1, (groups, rows)).astype(np.int32)


def _pages(rng: np.random.Generator, groups: int, entries: int) -> np.ndarray:
    """Where the entries of each group are stored: pages in random order."""
    pages = -(-entries // PAGE)
    order = rng.permutation(groups * pages).reshape(groups, pages, 1)
    index = (order * PAGE + np.arange(PAGE)).reshape(groups, -1)[:, :entries]
    return index.astype(np.int32)


def _chosen(
    rng: np.random.Generator, sight: np.ndarray, entries: int, candidates: tuple[int, int]
) -> np.ndarray:
    """A pool for every row: `count` blocks with visible entries, or all of them, the newest always
    among them."""
    block, count = candidates
    mask = np.zeros((*sight.shape, -(-entries // block)), np.bool_)
    for place, visible in np.ndenumerate(sight):
        blocks = -(-int(visible) // block)
        mask[place][rng.permutation(max(blocks - 1, 0))[: count - 1]] = True
        mask[place][max(blocks - 1, 0)] = blocks > 0
    return mask


def _build(
    rng: np.random.Generator,
    groups: int,
    rows: int,
    entries: int,
    heads: int,
    width: int,
    dtype: str,
    packed: bool,
    full: bool,
    candidates: tuple[int, int] | None,
) -> tuple[Any, ...]:
    q = rng.standard_normal((groups, rows, heads, width), dtype=np.float32)
    weights = rng.standard_normal((groups, rows, heads), dtype=np.float32) * heads**-0.5
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    if packed:
        stored = groups * -(-entries // PAGE) * PAGE
        values = rng.integers(0, 256, (stored, width // 2), dtype=np.uint8)
        scales = np.exp2(rng.integers(-3, 2, (stored, width // 32)), dtype=np.float32)
        scales = scales.astype(ml_dtypes.float8_e8m0fnu)
        keys: Any = (values, scales, _pages(rng, groups, entries))
    else:
        keys = rng.standard_normal((groups, entries, width), dtype=np.float32).astype(kind)
    sight = _sight(rng, groups, rows, entries, full)
    pools = () if candidates is None else (_chosen(rng, sight, entries, candidates),)
    return q.astype(kind), weights.astype(kind), keys, sight, *pools


def case(
    name: str,
    groups: int,
    rows: int,
    entries: int,
    heads: int = HEADS,
    width: int = WIDTH,
    k: int = TOP,
    pool: tuple[int, int] | None = None,
    candidates: tuple[int, int] | None = None,
    dtype: str = "bfloat16",
    packed: bool = True,
    full: bool = False,
    tags: tuple[str, ...] = ("test",),
    declines: tuple[tuple[str, str], ...] = (),
) -> Case:
    """One case: groups x rows query rows over `entries` keys a group; full: all of them visible."""
    stored = groups * -(-entries // PAGE) * PAGE

    def shapes() -> tuple[Any, ...]:
        shape, kind = jax.ShapeDtypeStruct, jnp.dtype(dtype)
        keys: Any = shape((groups, entries, width), kind)
        if packed:
            keys = (
                shape((stored, width // 2), jnp.uint8),
                shape((stored, width // 32), jnp.float8_e8m0fnu),
                shape((groups, entries), jnp.int32),
            )
        q = shape((groups, rows, heads, width), kind)
        sight = shape((groups, rows), jnp.int32)
        pools = ()
        if candidates is not None:
            pools = (shape((groups, rows, -(-entries // candidates[0])), jnp.bool_),)
        return q, shape((groups, rows, heads), kind), keys, sight, *pools

    build = functools.partial(
        _build,
        groups=groups,
        rows=rows,
        entries=entries,
        heads=heads,
        width=width,
        dtype=dtype,
        packed=packed,
        full=full,
        candidates=candidates,
    )

    def small(rng: np.random.Generator) -> tuple[Any, ...]:
        """Values stay random bytes: any of them is a key."""
        sight = _sight(rng, groups, rows, entries, full)
        pools = () if candidates is None else (_chosen(rng, sight, entries, candidates),)
        if not packed:
            return None, None, None, sight, *pools
        values = rng.integers(0, 256, (stored, width // 2), dtype=np.uint8)
        scales = rng.integers(124, 129, (stored, width // 32), dtype=np.uint8)
        keys = values, scales.view(ml_dtypes.float8_e8m0fnu), _pages(rng, groups, entries)
        return None, None, keys, sight, *pools

    key_bytes = width // 2 + width // 32 if packed else width * jnp.dtype(dtype).itemsize
    options: dict[str, Any] = {"k": k} | ({} if pool is None else {"pool": pool})
    scored, mask_bytes = entries, 0
    if candidates is not None:
        options["candidates"] = candidates
        scored = min(entries, candidates[0] * candidates[1])
        mask_bytes = groups * rows * -(-entries // candidates[0])
    read = groups * min(entries, rows * scored) * key_bytes + mask_bytes
    return Case(
        name=name,
        function="select",
        build=build,
        shapes=shapes,
        small=small,
        options=tuple(sorted(options.items())),
        flops=2 * groups * rows * scored * heads * width,
        bytes=read + 2 * groups * rows * heads * (width + 1) + 4 * k * rows,
        tags=frozenset(tags),
        tolerance=0.0 if dtype == "float32" else 2.0**-7,
        declines=declines,
    )


def _small() -> list[Case]:
    array = (("hopper", "needs stored keys"),)
    return [
        case("one_row", 2, 1, 300, k=64),
        case("several_rows", 2, 3, 500, k=100, pool=(8, 20)),
        case("fewer_than_k", 3, 1, 70, k=512),
        case("few_heads", 2, 2, 200, heads=8, k=30),
        case("odd_k", 1, 5, 333, k=13, pool=(8, 7)),
        case("inside_pool", 2, 3, 500, k=60, candidates=(8, 20)),
        case("inside_short_pool", 3, 1, 300, k=64, candidates=(8, 5)),
        case("array", 2, 3, 90, k=20, packed=False, declines=array),
        case(
            "float32",
            2,
            3,
            90,
            heads=4,
            width=32,
            k=20,
            dtype="float32",
            packed=False,
            declines=(("hopper", "needs bfloat16 queries of 128 channels"),),
        ),
    ]


def _released() -> list[Case]:
    tags = ("aot", "bench")
    full: dict[str, Any] = dict(full=True, tags=tags)
    return [
        case("decode_128x1_128k", 128, 1, 131072, **full),
        case("decode_128x1_128k_pool", 128, 1, 131072, pool=(8, 2048), **full),
        case("decode_128x6_128k", 128, 6, 131072, **full),
        case("decode_128x1_16k", 128, 1, 16384, **full),
        case("decode_1x1_1m", 1, 1, 1 << 20, pool=(8, 2048), **full),
        case("prefill_2048_16k", 1, 2048, 16384, pool=(8, 2048), **full),
        case("decode_128x1_128k_inside", 128, 1, 131072, candidates=(8, 2048), **full),
        case("prefill_2048_128k_inside", 1, 2048, 131072, candidates=(8, 2048), **full),
    ]


CASES = (*_small(), *_released())
