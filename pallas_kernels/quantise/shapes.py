"""Named cases of the activations' way through e4m3: small ones, and the released widths (the
model's, an expert's, the query's low rank, the attention output's) at several row counts; SwiGLU of
the shared expert with as many parts of K as its two products in one launch have; the norm before it
at the model's width and at the query's, whose product comes in parts."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.cases import Case

EPS = 1e-20
"""Of the released model."""
QUERIES = ((16, 10, "f32"), (384, 10, "f32"), (1536, 2, "f32"), (16384, 1, "bf16"))
"""Row counts of the released query, and in how many parts of what dtype its product comes."""
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


SWIGLU_TOLERANCE = 1e-3
"""Relative error of swiglu (Frobenius norm) against another exponential: at most one value in some
ten thousand is rounded to the neighbour, 1 / 16 to 1 / 8 away."""


def _products(rng: np.random.Generator, parts: int, rows: int, n: int, dtype: str) -> tuple:
    """Gate and up around the bound of SwiGLU and far below it."""
    shape = (2, parts, rows, n)
    x = rng.standard_normal(shape, dtype=np.float32) * np.exp2(rng.integers(-8, 4, (rows, 1)))
    return tuple((x / np.sqrt(parts)).astype(DTYPES[dtype]))


def swiglu(
    name: str,
    parts: int,
    rows: int,
    n: int,
    dtype: str = "f32",
    *,
    out: str = "bf16",
    act_quant: bool = True,
    tags: tuple[str, ...] = ("test",),
) -> Case:
    """One case of SwiGLU with `parts` of K in `dtype`."""
    shape = jax.ShapeDtypeStruct((parts, rows, n), jnp.dtype(DTYPES[dtype]))
    item = np.dtype(DTYPES[dtype]).itemsize
    return Case(
        name=name,
        function="swiglu",
        build=functools.partial(_products, parts=parts, rows=rows, n=n, dtype=dtype),
        shapes=lambda: (shape, shape),
        small=lambda _: (None, None),
        options=(("act_quant", act_quant), ("dtype", np.dtype(DTYPES[out])), ("limit", 10.0)),
        bytes=rows * n * (2 * parts * item + np.dtype(DTYPES[out]).itemsize),
        tags=frozenset(tags),
        tolerance=SWIGLU_TOLERANCE,
        instructions=(),
        registers=64 if parts == 1 else 255,
    )


def _normed_shapes(parts: int, rows: int, k: int, dtype: str, part: str) -> tuple:
    shapes = ((parts, rows, k), DTYPES[part]), ((k,), DTYPES[dtype])
    return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(kind)) for shape, kind in shapes)


def _normed_inputs(rng: np.random.Generator, args: tuple) -> tuple:
    return tuple(
        rng.standard_normal(x.shape, dtype=np.float32).astype(x.dtype)
        for x in _normed_shapes(*args)
    )


def normed(
    name: str,
    parts: int,
    rows: int,
    k: int,
    dtype: str = "bf16",
    part: str = "f32",
    *,
    tags: tuple[str, ...] = ("test",),
) -> Case:
    """One case of `normed`; part: dtype of the parts."""
    args = parts, rows, k, dtype, part
    size, out = (np.dtype(DTYPES[x]).itemsize for x in (part, dtype))
    return Case(
        name=name,
        function="normed",
        build=functools.partial(_normed_inputs, args=args),
        shapes=functools.partial(_normed_shapes, *args),
        small=lambda _: (None, None),
        options=(("dtype", jnp.dtype(DTYPES[dtype])), ("eps", EPS)),
        bytes=rows * k * (parts * size + 2 * out) + k * out,
        tags=frozenset(tags),
        tolerance=2e-3,
        instructions=(),
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
    swiglu("swiglu_one_row", 1, 1, 32, "bf16"),
    swiglu("swiglu_parts", 3, 37, 160),
    swiglu("swiglu_f32", 1, 5, 64, out="f32"),
    swiglu("swiglu_plain", 2, 5, 40, act_quant=False),
    swiglu("swiglu_most_parts", 10, 16, 2304, tags=("aot",)),
    *(
        swiglu(f"swiglu_{rows}_{parts}", parts, rows, 2304, dtype, tags=("aot", "bench"))
        for rows, parts, dtype in (
            (16, 5, "f32"),
            (384, 1, "bf16"),
            (16384, 1, "bf16"),
        )
    ),
    normed("normed_one", 1, 1, 128),
    normed("normed_parts", 3, 5, 384),
    normed("normed_bf16", 1, 7, 256, part="bf16"),
    normed("normed_f32", 2, 3, 80, "f32"),
    normed("normed_8192", 1, 16, 8192, part="bf16", tags=("aot",)),
    normed("normed_8192_parts", 10, 16, 8192, tags=("aot",)),
    *(
        normed(f"normed_{rows}_5120", 1, rows, 5120, part="bf16", tags=("aot", "bench"))
        for rows in (16, 384, 1536, 16384)
    ),
    *(
        normed(f"normed_{rows}_1280", parts, rows, 1280, part=part, tags=("aot", "bench"))
        for rows, parts, part in QUERIES
    ),
)
