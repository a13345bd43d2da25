"""Named cases of the row product: corners that run anywhere, and the released projections at 16 to
4,096 rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.cases import Case
from pallas_kernels.grouped_gemm.shapes import weight
from pallas_kernels.row_matmul import plans

RELEASED = {
    "wq_a": (1280, 5120, "fp8"),
    "wq_b": (32768, 1280, "fp8"),
    "wkv": (512, 5120, "fp8"),
    "wo_b": (5120, 8192, "fp8"),
    "shared_up": (2304, 5120, "fp8"),
    "router": (384, 5120, "bf16"),
    "compressor": (512, 5120, "bf16"),
    "mhc": (24, 20480, "f32"),
}
"""name -> (N, K, weight) of the products of a released layer with one matrix."""
PAIRS = {"shared_13": ((2304, 2304), 5120), "wq_a_wkv": ((1280, 512), 5120)}
"""name -> (N of each, K) of released FP8 weights of the same rows."""
WO_A = (8, 1024, 4096, "fp8")
"""(groups, N, K, weight) of the released output projection's first half."""


def _inputs(
    rng: np.random.Generator, lead: tuple[int, ...], n: int, k: int, kind: str, dtype: Any
) -> tuple:
    w, scales = weight(rng, (n, k), kind)
    return rng.standard_normal((*lead, k), dtype=np.float32).astype(dtype), w, scales


def _abstract(lead: tuple[int, ...], n: int, k: int, kind: str, dtype: Any) -> tuple:
    stored = {"fp8": jnp.float8_e4m3fn, "bf16": jnp.bfloat16, "f32": jnp.float32}[kind]
    blocks = (-(-n // 32), -(-k // 32))
    return (
        jax.ShapeDtypeStruct((*lead, k), dtype),
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
    groups: int | None = None,
    parts: bool = False,
    tags: tuple[str, ...] = ("test",),
) -> Case:
    """One case; with `groups`, of as many matrices of n channels; with `parts`, not added up."""
    byte = {"fp8": 1, "bf16": 2, "f32": 4}[kind]
    exact = np.dtype(out) == np.float32 and kind != "fp8"
    lead, times = ((rows,), 1) if groups is None else ((rows, groups), groups)
    channels = times * n
    function = "partial_products" if parts else "matmul" if groups is None else "matmul_groups"
    options: tuple = (("invariant", invariant),)
    return Case(
        name=name,
        function=function,
        build=functools.partial(_inputs, lead=lead, n=channels, k=k, kind=kind, dtype=dtype),
        shapes=functools.partial(_abstract, lead, channels, k, kind, dtype),
        small=lambda _: (None, None, None),
        options=options if parts else (*options, ("out_dtype", np.dtype(out))),
        flops=2 * rows * channels * k,
        bytes=channels * k * byte
        + rows * (times * k * np.dtype(dtype).itemsize + channels * np.dtype(out).itemsize),
        tags=frozenset(tags),
        tolerance=1e-5 if exact else 5e-3,
    )


def several(
    name: str,
    rows: int,
    widths: tuple[int, ...],
    k: int,
    *,
    invariant: bool = False,
    declines: tuple[tuple[str, str], ...] = (),
    tags: tuple[str, ...] = ("test",),
) -> Case:
    """One case of FP8 weights of the same rows."""

    def shapes() -> tuple:
        found = [_abstract((rows,), n, k, "fp8", jnp.bfloat16) for n in widths]
        return found[0][0], tuple(each[1:] for each in found)

    def build(rng: np.random.Generator) -> tuple:
        x = rng.standard_normal((rows, k), dtype=np.float32).astype(ml_dtypes.bfloat16)
        return x, tuple(weight(rng, (n, k), "fp8") for n in widths)

    return Case(
        name=name,
        function="partial_products_of",
        build=build,
        shapes=shapes,
        small=lambda _: (None, None),
        options=(("invariant", invariant), ("out_dtype", np.dtype(ml_dtypes.bfloat16))),
        flops=2 * rows * sum(widths) * k,
        bytes=sum(widths) * k + 2 * rows * (k + sum(widths)),
        tags=frozenset(tags),
        tolerance=5e-3,
        declines=declines,
    )


def _released() -> list[Case]:
    cases = []
    for name, (n, k, kind) in RELEASED.items():
        out = ml_dtypes.bfloat16 if kind == "fp8" else np.float32
        for rows in (16, 256, 1024, 4096):
            cases.append(case(f"{name}_{rows}", rows, n, k, kind, out=out, tags=("aot", "bench")))
    groups, n, k, kind = WO_A
    for rows in (16, 256, 1024, 4096):
        cases.append(case(f"wo_a_{rows}", rows, n, k, kind, groups=groups, tags=("aot", "bench")))
    for name, (widths, k) in PAIRS.items():
        for rows in (16, 384, 4096):
            cases.append(several(f"{name}_{rows}", rows, widths, k, tags=("aot", "bench")))
    return cases + _cut_by_rows()


def _cut_by_rows() -> list[Case]:
    """The same where another number of parts is taken when it may depend on the rows."""
    cases = []
    for name, (n, k, kind) in RELEASED.items():
        out = ml_dtypes.bfloat16 if kind == "fp8" else np.float32
        for rows in (16, 384, 1024, 4096):
            if plans.best(kind, rows, n, k)[0] != plans.parts_of_k(kind, n, k):
                named: dict[str, Any] = dict(out=out, invariant=False, tags=("aot", "bench"))
                cases.append(case(f"{name}_{rows}_by_rows", rows, n, k, kind, **named))
    groups, n, k, kind = WO_A
    tags = ("aot", "bench")
    last = case("wo_a_16_by_rows", 16, n, k, kind, groups=groups, invariant=False, tags=tags)
    return [*cases, last]


CASES: tuple[Case, ...] = (
    case("bf16_small", 70, 64, 256, "bf16"),
    case("bf16_f32_out", 33, 128, 128, "bf16", out=np.float32),
    case("fp8_small", 20, 96, 256, "fp8"),
    case("fp8_partial_blocks", 130, 40, 80, "fp8"),
    case("f32_weight", 24, 24, 1024, "f32", out=np.float32),
    case("f32", 5, 24, 320, "f32", dtype=np.float32, out=np.float32),
    case("fp8_tile", 150, 512, 384, "fp8"),
    case("one_row", 1, 64, 128, "fp8"),
    case("router_f32_256", 256, 384, 5120, "f32", out=np.float32, tags=("aot",)),
    case("parts_16", 16, 24, 20480, "f32", out=np.float32, parts=True, tags=("aot",)),
    case("tall_tiles_16384", 16384, 512, 5120, "bf16", out=np.float32, tags=("aot", "bench")),
    case("one_part_16384", 16384, 24, 20480, "f32", parts=True, invariant=False, tags=("aot",)),
    case("groups_fp8", 33, 128, 256, "fp8", groups=3),
    several("several", 5, (64, 96), 256),
    several("several_invariant", 70, (40, 40), 128, invariant=True),
    case("groups_bf16", 5, 64, 96, "bf16", groups=2, out=np.float32),
    *_released(),
)
