"""Named cases of hyper-connections: small ones, and the released widths at several row counts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.cases import Case

ITERATIONS, HC_EPS, EPS = 20, 1e-6, 1e-20
"""Of the released model."""
STREAMS, WIDTH = 4, 5120
"""Of the released model."""
PARTS = {16: 40, 384: 40, 1536: 10, 16384: 1}
"""Row counts of the released cases, and in how many parts their projection comes on an H200 (40 for
every count where a row's bits may not depend on it)."""


def _mixes_shapes(parts: int, rows: int, n: int) -> tuple:
    mixes = 2 * n + n * n
    shapes = ((parts, rows, mixes), (rows,), (3,), (mixes,))
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def _mixes_inputs(rng: np.random.Generator, parts: int, rows: int, n: int) -> tuple:
    drawn = [rng.standard_normal(x.shape, dtype=np.float32) for x in _mixes_shapes(parts, rows, n)]
    drawn[0] /= np.float32(parts**0.5)
    drawn[1] = np.exp(drawn[1] / 2)  # a mean of squares
    return tuple(drawn)


def mixes(
    name: str,
    rows: int,
    n: int = STREAMS,
    *,
    parts: int = 4,
    iterations: int = ITERATIONS,
    tags: tuple[str, ...] = ("test",),
) -> Case:
    """One case of `mixes`."""
    options: dict[str, Any] = {"n": n, "eps": EPS, "hc_eps": HC_EPS, "iterations": iterations}
    return Case(
        name=name,
        function="mixes",
        build=functools.partial(_mixes_inputs, parts=parts, rows=rows, n=n),
        shapes=functools.partial(_mixes_shapes, parts, rows, n),
        options=tuple(sorted(options.items())),
        flops=rows * iterations * 4 * n * n,
        bytes=4 * rows * ((parts + 1) * (2 * n + n * n) + 1),
        tags=frozenset(tags),
        tolerance=1e-5,
        instructions=(),
    )


def _update_shapes(parts: int, rows: int, n: int, width: int, dtype: Any) -> tuple:
    return (
        jax.ShapeDtypeStruct((parts, rows, width), dtype if parts == 1 else jnp.float32),
        jax.ShapeDtypeStruct((rows, n, width), dtype),
        jax.ShapeDtypeStruct((rows, n), jnp.float32),
        jax.ShapeDtypeStruct((rows, n, n), jnp.float32),
        jax.ShapeDtypeStruct((rows, n), jnp.float32),
    )


def _update_inputs(rng: np.random.Generator, *shape: Any) -> tuple:
    return tuple(
        rng.standard_normal(x.shape, dtype=np.float32).astype(x.dtype)
        for x in _update_shapes(*shape)
    )


def update(
    name: str,
    rows: int,
    n: int = STREAMS,
    width: int = WIDTH,
    *,
    parts: int = 1,
    dtype: Any = ml_dtypes.bfloat16,
    tags: tuple[str, ...] = ("test",),
) -> Case:
    """One case of `update`; several parts are float32, one is of the streams' type."""
    size, shape = np.dtype(dtype).itemsize, (parts, rows, n, width, dtype)
    return Case(
        name=name,
        function="update",
        build=lambda rng: _update_inputs(rng, *shape),
        shapes=functools.partial(_update_shapes, *shape),
        small=lambda _: (None,) * 5,
        flops=rows * width * 2 * n * (n + 3),
        bytes=rows * (width * size * (2 * n + 1) + 4 * (2 * n + n * n + 1))
        + rows * width * (size if parts == 1 else 4 * parts),
        tags=frozenset(tags),
        tolerance=1e-6 if size == 4 else 2e-3,
        instructions=(),
    )


CASES: tuple[Case, ...] = (
    mixes("one_row", 1),
    mixes("one_part", 33, parts=1),
    mixes("two_streams", 130, 2),
    mixes("three_streams", 5, 3),
    mixes("one_iteration", 7, iterations=1),
    mixes("six_streams", 200, 6, iterations=3),
    update("update_small", 5, 4, 256),
    update("update_one_row", 1, 4, 1024),
    update("update_two_streams", 3, 2, 384),
    update("update_f32", 6, 4, 640, dtype=np.float32),
    update("update_parts", 5, 4, 256, parts=3),
    update("update_many_parts", 2, 2, 384, parts=6),
    update("update_parts_f32", 4, 4, 640, parts=2, dtype=np.float32),
    *(mixes(f"mixes_{rows}", rows, parts=n, tags=("aot", "bench")) for rows, n in PARTS.items()),
    mixes("mixes_16384_invariant", 16384, parts=40, tags=("aot", "bench")),
    *(
        update(f"update_{rows}", rows, parts=4 if rows == 16 else 1, tags=("aot", "bench"))
        for rows in PARTS
    ),
)
