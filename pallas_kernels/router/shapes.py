"""Named cases of the router: ties, forced rows and odd numbers, and six of the released 384
experts, whose product comes in ten parts at few rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case

SCALE = 2.5


def _inputs(
    rng: np.random.Generator, count: int, rows: int, experts: int, k: int, kind: str
) -> tuple:
    parts = 2 * rng.standard_normal((count, rows, experts), dtype=np.float32)
    bias = 0.1 * rng.standard_normal(experts, dtype=np.float32)
    if kind == "ties":  # few different sums, and large ones of both signs
        parts = rng.integers(-9, 9, parts.shape).astype(np.float32)
        bias[:] = 0
    if kind == "special":
        odd = np.array([np.nan, np.inf, -np.inf, -100.0, -0.0, 0.0, 1e-40], np.float32)
        parts[0] = np.where(rng.random(parts[0].shape) < 0.3, rng.choice(odd, parts[0].shape), 1)
        parts[1:] = 0
        bias[:] = 0
    if kind != "given":
        return parts, bias, None
    routes = np.stack([rng.permutation(experts)[:k] for _ in range(rows)]).astype(np.int32)
    routes[rng.random(rows) < 0.4] = -1
    return parts, bias, routes


def case(
    name: str,
    rows: int,
    experts: int = 384,
    k: int = 6,
    kind: str = "plain",
    count: int = 1,
    tags: tuple[str, ...] = ("test",),
) -> Case:
    """One case."""

    def shapes() -> tuple[Any, ...]:
        routes = jax.ShapeDtypeStruct((rows, k), jnp.int32) if kind == "given" else None
        wide = jax.ShapeDtypeStruct((count, rows, experts), jnp.float32)
        return wide, jax.ShapeDtypeStruct((experts,), jnp.float32), routes

    return Case(
        name=name,
        function="route",
        build=functools.partial(_inputs, count=count, rows=rows, experts=experts, k=k, kind=kind),
        shapes=shapes,
        options=(("k", k), ("scale", SCALE)),
        flops=rows * experts,
        bytes=4 * rows * (count * experts + 2 * k),
        tags=frozenset(tags),
        tolerance=1e-6,
        instructions=(),
    )


GPU = ("aot", "bench")
PARTS = {16: 10, 384: 8, 1536: 4, 65536: 1}
"""Rows of the released router -> parts of its product on an H200."""

CASES: tuple[Case, ...] = (
    *(case(f"released_{kind}", 9, kind=kind) for kind in ("plain", "ties", "special", "given")),
    *(case(f"parts_{kind}", 9, kind=kind, count=4) for kind in ("plain", "ties", "given")),
    case("one_row", 1, 32, 1),
    case("every_expert", 6, 7, 7, "ties"),
    case("odd_number", 5, 50, 3, "given", count=3),
    case("most", 4, 1000, 16),
    case("many_parts", 4, 384, 6, count=50),
    *(case(f"rows_{n}", n, count=count, tags=GPU) for n, count in PARTS.items()),
    *(case(f"rows_{n}_given", n, kind="given", count=10, tags=GPU) for n in (16, 4096)),
    case("rows_16_many", 16, 1024, 16, count=10, tags=GPU),
    case("rows_384_ties", 384, kind="ties", tags=GPU),
    case("rows_384_special", 384, kind="special", tags=("bench",)),
)
