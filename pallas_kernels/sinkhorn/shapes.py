"""Named cases of Sinkhorn's normalisation: small ones, and the released square at several row
counts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case

ITERATIONS, EPS = 20, 1e-6
"""Of the released model."""


def _inputs(rng: np.random.Generator, rows: int, n: int) -> tuple:
    return (2 * rng.standard_normal((rows, n, n), dtype=np.float32),)


def case(
    name: str,
    rows: int,
    n: int = 4,
    *,
    iterations: int = ITERATIONS,
    tags: tuple[str, ...] = ("test",),
) -> Case:
    """One case."""
    options: dict[str, Any] = {"iterations": iterations, "eps": EPS}
    return Case(
        name=name,
        function="normalise",
        build=functools.partial(_inputs, rows=rows, n=n),
        shapes=lambda: (jax.ShapeDtypeStruct((rows, n, n), jnp.float32),),
        options=tuple(sorted(options.items())),
        flops=rows * iterations * 4 * n * n,
        bytes=8 * rows * n * n,
        tags=frozenset(tags),
        tolerance=1e-5,
        instructions=(),
    )


CASES: tuple[Case, ...] = (
    case("one_row", 1),
    case("two_streams", 130, 2),
    case("one_iteration", 7, iterations=1),
    case("six_streams", 200, 6, iterations=3),
    *(case(f"rows_{rows}", rows, tags=("aot", "bench")) for rows in (16, 384, 4096, 65536)),
)
