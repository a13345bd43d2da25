"""Named cases of sparse attention: small ones for every corner, and the released sizes.

Released: 64 heads, 512 channels, a window of 128 rows and 512 selected rows a query row. Decode
reads a ring of window rows (e4m3) for every slot and selects from pages of its compressed rows
(e2m1); the query rows of a slot are neighbours. Prefill has a banded window over bfloat16 rows and
selects from 16,384 of them. FLOP count the slots, 4 a head, slot and channel; bytes count every
stored row that some query row uses once, queries and results.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.cases import Case

SCALE = 512**-0.5
FORMATS = ("bfloat16", "float32", "e4m3", "e2m1")
ROW_BYTES = {"bfloat16": 2.0, "float32": 4.0, "e4m3": 1 + 1 / 32, "e2m1": 0.5 + 1 / 16}


def stored(rng: np.random.Generator, rows: int, width: int, kind: str) -> Any:
    """Random rows in a stored format, entries around 1."""
    if kind == "e2m1":
        values = rng.integers(0, 256, (rows, width // 2), dtype=np.uint8)
        scales = rng.uniform(0.05, 0.5, (rows, width // 16)).astype(ml_dtypes.float8_e4m3fn)
        return values, scales
    raw = rng.standard_normal((rows, width), dtype=np.float32)
    if kind == "e4m3":
        scales = np.exp2(rng.integers(-2, 2, (rows, width // 32)), dtype=np.float32)
        return raw.astype(ml_dtypes.float8_e4m3fn), scales.astype(ml_dtypes.float8_e8m0fnu)
    return raw.astype(ml_dtypes.bfloat16) if kind == "bfloat16" else raw


def _stored_shapes(rows: int, width: int, kind: str) -> Any:
    shape = jax.ShapeDtypeStruct
    if kind == "e2m1":
        values = shape((rows, width // 2), jnp.uint8)
        return values, shape((rows, width // 16), jnp.float8_e4m3fn)
    if kind == "e4m3":
        values = shape((rows, width), jnp.float8_e4m3fn)
        return values, shape((rows, width // 32), jnp.float8_e8m0fnu)
    return shape((rows, width), jnp.dtype(kind))


def indices(
    rng: np.random.Generator,
    slots: int,
    per_slot: int,
    window: int,
    chosen: int,
    context: int,
    masked: float,
    shared: bool,
    banded: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Window and selected indices of slots x per_slot query rows; a share `masked` of them is -1.

    Every slot owns window + per_slot - 1 window rows and `context` selectable ones; with `banded`
    all rows are one sequence. With `shared` the rows of a slot select the same rows.
    """
    rows = slots * per_slot
    slot, row = np.arange(rows) // per_slot, np.arange(rows) % per_slot
    first = np.arange(rows) if banded else slot * (window + per_slot - 1) + row
    near = first[:, None] + np.arange(window)
    draws = slots if shared else rows
    far = np.sort(rng.integers(0, context, (draws, chosen)), axis=-1)
    far = (far[slot] if shared else far) + (0 if banded else slot[:, None] * context)
    for index in (near, far):
        index[rng.random(index.shape) < masked] = -1
    if masked and rows > 1:
        near[1], far[1] = -1, -1
    return near.astype(np.int32), far.astype(np.int32)


def case(
    name: str,
    slots: int,
    per_slot: int = 1,
    window: int = 128,
    chosen: int = 512,
    context: int = 8192,
    heads: int = 64,
    width: int = 512,
    kinds: tuple[str, str] = ("e4m3", "e2m1"),
    dtype: str = "bfloat16",
    masked: float = 0.0,
    shared: bool = False,
    banded: bool = False,
    tags: tuple[str, ...] = ("test",),
    declines: tuple[tuple[str, str], ...] = (),
) -> Case:
    """One case; the sizes are those of `indices`."""
    rows = slots * per_slot
    near_rows = rows + window - 1 if banded else slots * (window + per_slot - 1)
    far_rows = context if banded else slots * context
    draw = functools.partial(
        indices,
        slots=slots,
        per_slot=per_slot,
        window=window,
        chosen=chosen,
        context=context,
        masked=masked,
        shared=shared,
        banded=banded,
    )

    def build(rng: np.random.Generator) -> tuple[Any, ...]:
        near, far = draw(rng)
        q = rng.standard_normal((rows, heads, width), dtype=np.float32)
        rows_near = stored(rng, near_rows, width, kinds[0])
        rows_far = stored(rng, far_rows, width, kinds[1]) if chosen else None
        sink = rng.standard_normal(heads, dtype=np.float32)
        q = q.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else q
        return q, rows_near, near, rows_far, far if chosen else None, sink

    def shapes() -> tuple[Any, ...]:
        shape = jax.ShapeDtypeStruct
        return (
            shape((rows, heads, width), jnp.dtype(dtype)),
            _stored_shapes(near_rows, width, kinds[0]),
            shape((rows, window), jnp.int32),
            _stored_shapes(far_rows, width, kinds[1]) if chosen else None,
            shape((rows, chosen), jnp.int32) if chosen else None,
            shape((heads,), jnp.float32),
        )

    def small(rng: np.random.Generator) -> tuple[Any, ...]:
        near, far = draw(rng)
        return None, None, near, None, far if chosen else None, None

    used = min(far_rows, (slots if shared else rows) * chosen)
    read = width * (near_rows * ROW_BYTES[kinds[0]] + used * ROW_BYTES[kinds[1]])
    return Case(
        name=name,
        function="attend",
        build=build,
        shapes=shapes,
        small=small,
        options=(("scale", SCALE),),
        flops=4 * rows * heads * (window + chosen) * width,
        bytes=round(read) + rows * (window + chosen) * 4 + 4 * rows * heads * width,
        tags=frozenset(tags),
        tolerance=1e-5 if dtype == "float32" else 5e-3,
        declines=declines,
    )


_PLAIN = ("bfloat16", "bfloat16")
_WHY = "needs bfloat16 queries of 512 channels"
_GPU_ONLY = (("hopper", _WHY), ("blackwell", _WHY))


def _small() -> list[Case]:
    tiny: dict[str, Any] = dict(context=300, masked=0.1)
    return [
        case("one_row", 1, window=64, chosen=64, **tiny),
        case("packed", 2, 3, **tiny),
        case("packed_shared", 2, 3, window=64, chosen=128, shared=True, **tiny),
        case("plain", 3, 1, kinds=_PLAIN, **tiny),
        case("plain_banded", 9, window=64, chosen=64, kinds=_PLAIN, banded=True, **tiny),
        case("odd_widths", 5, window=100, chosen=70, **tiny),
        case("few_heads", 2, 2, window=64, chosen=64, heads=8, **tiny),
        case("window_only", 4, chosen=0, **tiny),
        case("mixed", 3, kinds=("bfloat16", "e2m1"), window=64, chosen=64, **tiny),
        case("fp8_both", 3, kinds=("e4m3", "e4m3"), window=64, chosen=64, **tiny),
        case(
            "float32",
            3,
            2,
            window=16,
            chosen=40,
            heads=4,
            width=64,
            kinds=("float32", "e2m1"),
            dtype="float32",
            declines=_GPU_ONLY,
            **tiny,
        ),
    ]


def _released() -> list[Case]:
    tags = ("aot", "bench")
    cases = [
        case(f"decode_{slots}x{per_slot}", slots, per_slot, tags=tags)
        for slots in (128, 256)
        for per_slot in (1, 2, 6)
    ]
    cases.append(case("decode_128x6_shared", 128, 6, shared=True, tags=("bench",)))
    for rows in (4096, 8192):
        prefill: dict[str, Any] = dict(context=16384, banded=True, tags=tags)
        cases.append(case(f"prefill_{rows}", rows, kinds=_PLAIN, **prefill))
        cases.append(case(f"prefill_{rows}_packed", rows, **prefill))
    return cases


CASES = (*_small(), *_released())
