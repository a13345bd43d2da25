"""Named cases of the grouped product: small ones for every corner, and the released widths.

Released: 384 experts, 5120 -> 2 x 2304 (gate and up) and 2304 -> 5120, six experts a token; 6 local
    experts is one rank's share of 64-way expert parallelism. Bytes count weights of experts that
    have rows, in their stored format.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.cases import Case

LIMIT = 10.0
FORMATS = ("fp4", "fp8", "bf16")


def group_sizes(rng: np.random.Generator, experts: int, rows: int, spread: str) -> np.ndarray:
    """int32 group sizes that sum to `rows` (or less, for "short"): how the rows fall on the
    experts."""
    if spread == "even":
        sizes = np.full(experts, rows // experts)
        sizes[: rows - sizes.sum()] += 1
    elif spread == "huge":
        sizes = np.zeros(experts, np.int64)
        sizes[int(rng.integers(experts))] = rows
    elif spread == "sparse":
        sizes = rng.multinomial(rows, rng.dirichlet(np.full(experts, 0.1)))
    elif spread == "none":
        sizes = np.zeros(experts, np.int64)
    else:
        sizes = rng.multinomial(
            rows - rows // 4 if spread == "short" else rows, np.full(experts, 1 / experts)
        )
    return sizes.astype(np.int32)


def weight(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> tuple[Any, Any]:
    """Random stored weight [..., out, k] of the kind: (values, scales), entries around 1 /
    sqrt(k)."""
    *lead, out, k = shape
    center = 127 - round(math.log2(math.sqrt(k)))
    if kind == "fp4":
        values = rng.integers(0, 256, (*lead, out, k // 2), dtype=np.uint8)
        scales = rng.integers(center - 3, center, (*lead, out, k // 32), dtype=np.uint8)
        return values, scales.view(ml_dtypes.float8_e8m0fnu)
    raw = rng.standard_normal(shape, dtype=np.float32)
    if kind == "fp8":
        scales = rng.integers(
            center - 1, center + 1, (*lead, -(-out // 32), -(-k // 32)), dtype=np.uint8
        )
        return raw.astype(ml_dtypes.float8_e4m3fn), scales.view(ml_dtypes.float8_e8m0fnu)
    dtype = ml_dtypes.bfloat16 if kind == "bf16" else np.float32
    return (raw / math.sqrt(k)).astype(dtype), None


def _inputs(
    rng: np.random.Generator,
    function: str,
    experts: int,
    k: int,
    out: int,
    rows: int,
    kind: str,
    spread: str,
    dtype: Any,
) -> tuple:
    sizes = group_sizes(rng, experts, rows, spread)
    x = rng.standard_normal((rows, k), dtype=np.float32)
    x[int(sizes.sum()) :] = np.nan
    lead = (experts, 2) if function == "gate_up" else (experts,)
    values, scales = weight(rng, (*lead, out, k), kind)
    common = (x.astype(dtype), values, scales, sizes)
    return (*common, rng.random(rows, dtype=np.float32)) if function == "gate_up" else common


def _sizes(rng: np.random.Generator, function: str, experts: int, rows: int, spread: str) -> tuple:
    sizes = group_sizes(rng, experts, rows, spread)
    return (None, None, None, sizes, None) if function == "gate_up" else (None, None, None, sizes)


def _abstract(
    function: str, experts: int, k: int, out: int, rows: int, kind: str, dtype: Any
) -> tuple:
    lead = (experts, 2) if function == "gate_up" else (experts,)
    stored = {
        "fp4": (k // 2, jnp.uint8),
        "fp8": (k, jnp.float8_e4m3fn),
        "bf16": (k, jnp.bfloat16),
        "f32": (k, jnp.float32),
    }[kind]
    scale = {"fp4": (out, k // 32), "fp8": (-(-out // 32), -(-k // 32))}.get(kind)
    args = [
        jax.ShapeDtypeStruct((rows, k), dtype),
        jax.ShapeDtypeStruct((*lead, out, stored[0]), stored[1]),
        None if scale is None else jax.ShapeDtypeStruct((*lead, *scale), jnp.float8_e8m0fnu),
        jax.ShapeDtypeStruct((experts,), jnp.int32),
    ]
    return (
        (*args, jax.ShapeDtypeStruct((rows,), jnp.float32))
        if function == "gate_up"
        else tuple(args)
    )


def case(
    name: str,
    function: str,
    experts: int,
    k: int,
    out: int,
    rows: int,
    kind: str = "fp4",
    spread: str = "random",
    dtype: Any = ml_dtypes.bfloat16,
    act_quant: bool = False,
    tags: tuple[str, ...] = ("test",),
) -> Case:
    """One case; `out` is I for gate_up and D for down."""
    width = out * (2 if function == "gate_up" else 1)
    byte = {"fp4": 0.5 + 1 / 32, "fp8": 1 + 1 / 1024, "bf16": 2, "f32": 4}[kind]
    touched = (
        experts * (1 - (1 - 1 / experts) ** rows)
        if spread in ("random", "short")
        else min(experts, rows)
    )
    item = np.dtype(dtype).itemsize
    options = {"act_quant": act_quant} | ({"limit": LIMIT} if function == "gate_up" else {})
    return Case(
        name=name,
        function=function,
        build=functools.partial(
            _inputs,
            function=function,
            experts=experts,
            k=k,
            out=out,
            rows=rows,
            kind=kind,
            spread=spread,
            dtype=dtype,
        ),
        shapes=functools.partial(_abstract, function, experts, k, out, rows, kind, dtype),
        small=functools.partial(
            _sizes, function=function, experts=experts, rows=rows, spread=spread
        ),
        options=tuple(sorted(options.items())),
        flops=2 * rows * k * width,
        bytes=round(touched * width * k * byte) + rows * (k + out) * item,
        tags=frozenset(tags),
        tolerance=1e-5 if np.dtype(dtype) == np.float32 else 1e-2,
    )


def _small() -> list[Case]:
    cases = [
        case(f"{function}_{kind}_{spread}", function, 4, 64, 64, 24, kind, spread)
        for function in ("gate_up", "down")
        for kind in FORMATS
        for spread in ("random", "huge", "sparse", "short", "none")
    ]
    cases += [
        case("gate_up_partial_blocks", "gate_up", 3, 80, 48, 19, "fp8"),
        case("down_partial_blocks", "down", 3, 48, 80, 19, "fp8"),
        case("gate_up_one_row", "gate_up", 4, 64, 32, 1),
        case("gate_up_f32", "gate_up", 4, 64, 32, 40, "f32", dtype=np.float32),
        case("gate_up_fp4_f32", "gate_up", 4, 64, 32, 40, "fp4", dtype=np.float32),
        case("gate_up_act_quant", "gate_up", 4, 128, 64, 40, act_quant=True),
        case("down_act_quant_fp8", "down", 4, 64, 128, 40, "fp8", act_quant=True),
        # Wide enough for every kernel.
        case("gate_up_tile", "gate_up", 3, 512, 384, 200, spread="short"),
        case("down_tile", "down", 3, 384, 512, 200, spread="sparse"),
        case("gate_up_tile_act_quant", "gate_up", 3, 512, 384, 200, act_quant=True),
        case("gate_up_tile_fp8", "gate_up", 2, 256, 384, 150, "fp8"),
        case("down_tile_bf16", "down", 2, 384, 256, 150, "bf16", "huge"),
    ]
    return cases


def _released() -> list[Case]:
    cases = []
    for tokens in (64, 1024, 4096, 65536):
        for quant in (False, True):
            tag = "_act_quant" if quant else ""
            for function, k, out in (("gate_up", 5120, 2304), ("down", 2304, 5120)):
                cases.append(
                    case(
                        f"{function}_{tokens}{tag}",
                        function,
                        384,
                        k,
                        out,
                        6 * tokens,
                        act_quant=quant,
                        tags=("aot", "bench"),
                    )
                )
    for kind in ("fp4", "fp8"):
        cases.append(
            case(
                f"gate_up_ep64_{kind}", "gate_up", 6, 5120, 2304, 1536, kind, tags=("aot", "bench")
            )
        )
        cases.append(
            case(f"down_ep64_{kind}", "down", 6, 2304, 5120, 1536, kind, tags=("aot", "bench"))
        )
    return cases


CASES: tuple[Case, ...] = (*_small(), *_released())
