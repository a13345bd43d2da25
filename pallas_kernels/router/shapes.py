"""Named cases of the router's choice: ties, forced rows and odd numbers, and six of the released
384 experts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case


def _inputs(rng: np.random.Generator, rows: int, experts: int, k: int, kind: str) -> tuple:
    score = np.sqrt(np.log1p(np.exp(rng.standard_normal((rows, experts), dtype=np.float32))))
    bias = 0.1 * rng.standard_normal(experts, dtype=np.float32)
    if kind == "ties":  # few different sums, negative ones and both zeros among them
        score = rng.integers(0, 3, (rows, experts)).astype(np.float32)
        bias = -rng.integers(0, 3, experts).astype(np.float32)
    if kind == "special":
        odd = np.array([np.nan, np.inf, -np.inf, -1.0, -0.0, 0.0, 1e-40], np.float32)
        score = np.where(rng.random(score.shape) < 0.3, rng.choice(odd, score.shape), score)
        bias[:] = 0
    if kind != "given":
        return score, bias, None
    routes = np.stack([rng.permutation(experts)[:k] for _ in range(rows)]).astype(np.int32)
    routes[rng.random(rows) < 0.4] = -1
    return score, bias, routes


def case(
    name: str,
    rows: int,
    experts: int = 384,
    k: int = 6,
    kind: str = "plain",
    tags: tuple[str, ...] = ("test",),
) -> Case:
    """One case."""

    def shapes() -> tuple[Any, ...]:
        routes = jax.ShapeDtypeStruct((rows, k), jnp.int32) if kind == "given" else None
        wide = jax.ShapeDtypeStruct((rows, experts), jnp.float32)
        return wide, jax.ShapeDtypeStruct((experts,), jnp.float32), routes

    return Case(
        name=name,
        function="choose",
        build=functools.partial(_inputs, rows=rows, experts=experts, k=k, kind=kind),
        shapes=shapes,
        options=(("k", k),),
        flops=rows * experts,
        bytes=4 * rows * (experts + 2 * k),
        tags=frozenset(tags),
        tolerance=0.0,
        instructions=(),
    )


CASES: tuple[Case, ...] = (
    *(case(f"released_{kind}", 9, kind=kind) for kind in ("plain", "ties", "special", "given")),
    case("one_row", 1, 32, 1),
    case("every_expert", 6, 7, 7, "ties"),
    case("odd_number", 5, 50, 3, "given"),
    case("most", 4, 1000, 16),
    *(case(f"rows_{rows}", rows, tags=("aot", "bench")) for rows in (16, 384, 1536, 65536)),
    *(case(f"rows_{n}_given", n, kind="given", tags=("aot", "bench")) for n in (16, 4096)),
    case("rows_384_ties", 384, kind="ties", tags=("aot", "bench")),
    case("rows_384_special", 384, kind="special", tags=("bench",)),
)
