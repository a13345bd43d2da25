"""Grouped product on Hopper: tiles of pallas_kernels/hopper.py, weights as stored, SwiGLU fused.

MXFP4 and FP8 weights are expanded in registers; gate and up of a channel sit in one thread, which
applies the clamped SwiGLU and the routing weight before anything is stored. bf16 weights are
multiplied as one plain product of both halves, SwiGLU after it. Tile shapes change with the rows an
expert gets; the order of K does not.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels import formats, hopper, tiles
from pallas_kernels.grouped_gemm.reference import swiglu
from pallas_kernels.quantise import hopper as quantise
from pallas_kernels.tiles import Plan, Product

FEW = 24
"""Mean rows of an expert up to which reading weights is the bound: then blocks are taller."""
SPILL_FREE = 16
"""Tiles of FP8 arithmetic come in multiples of this: at 216 rows the kernel would spill."""
KINDS = {"uint8": "fp4", "float8_e4m3fn": "fp8", "bfloat16": "bf16"}


@functools.cache
def plan(rows: int, experts: int, weight_tiles: int, step: int = 8) -> Plan:
    """Tile shape for `rows` rows spread evenly over `experts` matrices of `weight_tiles` times 64
    rows; tiles are multiples of `step`."""
    mean = rows / experts
    groups = 2
    if mean <= FEW:
        groups = 3 if weight_tiles % 3 == 0 else 4 if weight_tiles % 4 == 0 else 2
    items = experts * weight_tiles / groups
    tile = tiles.best_rows(lambda n: items * tiles.expected_tiles(mean, n), step=step)
    return Plan(tile if groups == 2 else min(tile, 64), groups)


def _multiply(
    x: Float[Array, "tok k"],
    values: Shaped[Array, "experts *out stored"],
    scales: Shaped[Array, "experts ..."] | None,
    group_sizes: Int32[Array, " experts"],
    route: Float[Array, " rows"] | None,
    source: Int32[Array, " rows"] | None = None,
    *,
    limit: float | None,
    act_quant: bool,
    shape: Plan | None,
    e4m3: bool = False,
) -> Float[Array, "rows out"]:
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"rows are {x.dtype}, the kernel takes bfloat16")
    kind = KINDS.get(values.dtype.name)
    if kind is None or (e4m3 and kind != "fp4"):
        raise NotImplementedError(f"no kernel for {values.dtype} weights")
    matrix = values[0].size // values.shape[-1]
    rows, k = x.shape[0] if source is None else source.shape[0], x.shape[1]
    product = Product(kind, rows, k, matrix, limit, e4m3=e4m3)
    shape = shape or plan(rows, values.shape[0], matrix // 64, SPILL_FREE if e4m3 else 8)
    tiles.check(product, shape, single=False)
    if kind == "fp8" and product.width % 32:
        raise NotImplementedError(f"{product.width} channels do not fill blocks of 32")
    flat, row_scale = jnp.zeros((128,), jnp.uint8), None
    if scales is not None:
        flat = formats.scale_bytes(scales).reshape(-1)
    if kind == "fp8":
        values = values.view(jnp.uint8)
    ordered = act_quant and not e4m3
    if ordered:
        x = quantise.round_trip(x, source, kind=kind)
    elif source is not None:
        x = x[source]
    if e4m3:
        x, row_scale = formats.one_scale_a_row(x)
    weights = values.reshape(-1, values.shape[-1])
    args = (x, weights, flat, group_sizes, route, product, shape, row_scale)
    return hopper.multiply(*args, ordered=ordered)


def gate_up(
    x: Float[Array, "tok k"],
    values: Shaped[Array, "experts two inner stored"],
    scales: Shaped[Array, "experts two sr sc"] | None,
    group_sizes: Int32[Array, " experts"],
    route_weight: Float[Array, " rows"],
    source: Int32[Array, " rows"] | None = None,
    *,
    limit: float,
    act_quant: bool,
    shape: Plan | None = None,
    e4m3: bool = False,
) -> Float[Array, "rows inner"]:
    """See pallas_kernels.grouped_gemm.gate_up; `shape` overrides the tile shape, `e4m3` multiplies
    in FP8 (hopper_fp8.py)."""
    options: dict[str, Any] = dict(act_quant=act_quant, shape=shape)
    if values.dtype == jnp.bfloat16:
        both = _multiply(x, values, scales, group_sizes, None, source, limit=None, **options)
        gate, up = jnp.split(both, 2, axis=1)
        real = jnp.arange(route_weight.shape[0]) < jnp.sum(group_sizes)
        route = jnp.where(real, route_weight, 0.0)
        return swiglu(gate, up, route, limit).astype(x.dtype)
    args = (x, values, scales, group_sizes, route_weight, source)
    return _multiply(*args, limit=limit, e4m3=e4m3, **options)


def down(
    h: Float[Array, "rows k"],
    values: Shaped[Array, "experts out stored"],
    scales: Shaped[Array, "experts sr sc"] | None,
    group_sizes: Int32[Array, " experts"],
    *,
    act_quant: bool,
    shape: Plan | None = None,
    e4m3: bool = False,
) -> Float[Array, "rows out"]:
    """See pallas_kernels.grouped_gemm.down; `shape` and `e4m3` as for gate_up."""
    options: dict[str, Any] = dict(act_quant=act_quant, shape=shape, e4m3=e4m3)
    return _multiply(h, values, scales, group_sizes, None, limit=None, **options)
