"""Named cases of the activations' way through e4m3: small ones, and the released widths (the
model's, an expert's, the query's low rank, the attention output's) at several row counts."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.cases import Case

DTYPES = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}


def _inputs(rng: np.random.Generator, rows: int, k: int, dtype: str) -> tuple:
    """Groups of very different sizes, as activations have them."""
    x = rng.standard_normal((rows, k), dtype=np.float32)
    return ((x * np.exp2(rng.integers(-24, 24, (rows, 1)))).astype(DTYPES[dtype]),)


def case(
    name: str, rows: int, k: int, dtype: str = "bf16", *, tags: tuple[str, ...] = ("test",)
) -> Case:
    """One case."""
    return Case(
        name=name,
        function="round_trip",
        build=functools.partial(_inputs, rows=rows, k=k, dtype=dtype),
        shapes=lambda: (jax.ShapeDtypeStruct((rows, k), jnp.dtype(DTYPES[dtype])),),
        small=lambda _: (None,),
        bytes=2 * rows * k * np.dtype(DTYPES[dtype]).itemsize,
        tags=frozenset(tags),
        tolerance=0.0,
        instructions=(),
        registers=64,
    )


CASES: tuple[Case, ...] = (
    case("one_row", 1, 128),
    case("odd_rows", 37, 384),
    case("part_of_a_group", 5, 80),
    case("f32", 6, 128, "f32"),
    *(
        case(f"rows_{rows}_{k}", rows, k, tags=("aot", "bench"))
        for rows in (16, 384, 1536, 16384)
        for k in (1280, 2304, 5120, 8192)
    ),
)
