"""Named cases of the row product: corners that run anywhere, and the released projections at 64 to
4,096 rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.cases import Case
from pallas_kernels.grouped_gemm.shapes import weight

RELEASED = {
    "wq_a": (1280, 5120, "fp8"),
    "wq_b": (32768, 1280, "fp8"),
    "wkv": (512, 5120, "fp8"),
    "wo_a": (1024, 4096, "bf16"),
    "wo_b": (5120, 8192, "fp8"),
    "shared_up": (2304, 5120, "fp8"),
    "router": (384, 5120, "bf16"),
    "mhc": (24, 20480, "f32"),
}
"""name -> (N, K, weight) of the products of a released layer."""


def _inputs(rng: np.random.Generator, rows: int, n: int, k: int, kind: str, dtype: Any) -> tuple:
    w, scales = weight(rng, (n, k), kind)
    return rng.standard_normal((rows, k), dtype=np.float32).astype(dtype), w, scales


def _abstract(rows: int, n: int, k: int, kind: str, dtype: Any) -> tuple:
    stored = {"fp8": jnp.float8_e4m3fn, "bf16": jnp.bfloat16, "f32": jnp.float32}[kind]
    blocks = (-(-n // 32), -(-k // 32))
    return (
        jax.ShapeDtypeStruct((rows, k), dtype),
        jax.ShapeDtypeStruct((n, k), stored),
        jax.ShapeDtypeStruct(blocks, jnp.float8_e8m0fnu) if kind == "fp8" else None,
    )


def case(
    name: str,
    rows: int,
    n: int,
    k: int,
    kind: str,
    *,
    dtype: Any = ml_dtypes.bfloat16,
    out: Any = ml_dtypes.bfloat16,
    invariant: bool = True,
    tags: tuple[str, ...] = ("test",),
) -> Case:
    """One case."""
    byte = {"fp8": 1, "bf16": 2, "f32": 4}[kind]
    exact = np.dtype(out) == np.float32 and kind != "fp8"
    return Case(
        name=name,
        function="matmul",
        build=functools.partial(_inputs, rows=rows, n=n, k=k, kind=kind, dtype=dtype),
        shapes=functools.partial(_abstract, rows, n, k, kind, dtype),
        small=lambda _: (None, None, None),
        options=(("invariant", invariant), ("out_dtype", np.dtype(out))),
        flops=2 * rows * n * k,
        bytes=n * k * byte + rows * (k * np.dtype(dtype).itemsize + n * np.dtype(out).itemsize),
        tags=frozenset(tags),
        tolerance=1e-5 if exact else 5e-3,
    )


def _released() -> list[Case]:
    cases = []
    for name, (n, k, kind) in RELEASED.items():
        out = np.float32 if name in ("router", "mhc") else ml_dtypes.bfloat16
        for rows in (16, 256, 1024, 4096):
            cases.append(case(f"{name}_{rows}", rows, n, k, kind, out=out, tags=("aot", "bench")))
    return cases


CASES: tuple[Case, ...] = (
    case("bf16_small", 70, 64, 256, "bf16"),
    case("bf16_f32_out", 33, 128, 128, "bf16", out=np.float32),
    case("fp8_small", 20, 96, 256, "fp8"),
    case("fp8_partial_blocks", 130, 40, 80, "fp8"),
    case("f32_weight", 24, 24, 1024, "f32", out=np.float32),
    case("f32", 5, 24, 320, "f32", dtype=np.float32, out=np.float32),
    case("fp8_tile", 150, 512, 384, "fp8"),
    case("one_row", 1, 64, 128, "fp8"),
    *_released(),
)
