"""Grouped product on Hopper: tiles of pallas_kernels/hopper.py, weights as stored, SwiGLU fused.

MXFP4 and FP8 weights are expanded in registers; gate and up of a channel sit in one thread, which
applies the clamped SwiGLU and the routing weight before anything is stored. bf16 weights are
multiplied as one plain product of both halves, SwiGLU after it. Tile shapes change with the rows an
expert gets; the order of K does not.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels import formats, hopper
from pallas_kernels.grouped_gemm.reference import swiglu
from pallas_kernels.hopper import Plan, Product

KINDS = {"uint8": "fp4", "float8_e4m3fn": "fp8", "bfloat16": "bf16"}


def plan(rows: int, experts: int, tiles: int) -> Plan:
    """Tile shape for `rows` rows over `experts` matrices; `tiles` weight tiles of 64 rows a
    matrix."""
    mean = rows / experts
    if mean <= 24 and tiles % 4 == 0:
        return Plan(16 if mean <= 4 else 32, groups=4)
    if mean <= 96:
        return Plan(128)
    return Plan(256, cluster=2 if tiles % 4 == 0 else 1)


def _multiply(
    x: Float[Array, "rows k"],
    values: Shaped[Array, "experts *out stored"],
    scales: Shaped[Array, "experts ..."] | None,
    group_sizes: Int32[Array, " experts"],
    route: Float[Array, " rows"],
    limit: float | None,
    shape: Plan | None,
) -> Float[Array, "rows out"]:
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"rows are {x.dtype}, the kernel takes bfloat16")
    kind = KINDS.get(values.dtype.name)
    if kind is None:
        raise NotImplementedError(f"weights are {values.dtype}, the kernel takes fp4, fp8 or bf16")
    matrix = values[0].size // values.shape[-1]
    product = Product(kind, *x.shape, matrix, limit)
    shape = shape or plan(x.shape[0], values.shape[0], matrix // 64)
    if kind == "bf16" and shape.rows == 256:
        shape = dataclasses.replace(shape, rows=128, cluster=1)
    hopper.check(product, shape, single=False)
    if kind == "fp8" and product.width % 32:
        raise NotImplementedError(f"{product.width} channels do not fill blocks of 32")
    flat = jnp.zeros((128,), jnp.uint8)
    if scales is not None:
        flat = formats.scale_bytes(scales).reshape(-1)
    if kind == "fp8":
        values = values.view(jnp.uint8)
    weights = values.reshape(-1, values.shape[-1])
    return hopper.multiply(x, weights, flat, group_sizes, route, product, shape)


def gate_up(
    x: Float[Array, "rows k"],
    values: Shaped[Array, "experts two inner stored"],
    scales: Shaped[Array, "experts two sr sc"] | None,
    group_sizes: Int32[Array, " experts"],
    route_weight: Float[Array, " rows"],
    *,
    limit: float,
    act_quant: bool,
    shape: Plan | None = None,
) -> Float[Array, "rows inner"]:
    """See pallas_kernels.grouped_gemm.gate_up; `shape` overrides the tile shape."""
    real = jnp.arange(x.shape[0]) < jnp.sum(group_sizes)
    route = jnp.where(real, route_weight, 0.0)
    x = formats.round_trip_activations(x) if act_quant else x
    if values.dtype == jnp.bfloat16:
        both = _multiply(x, values, scales, group_sizes, route, None, shape)
        gate, up = jnp.split(both, 2, axis=1)
        return swiglu(gate, up, route, limit).astype(x.dtype)
    return _multiply(x, values, scales, group_sizes, route, limit, shape)


def down(
    h: Float[Array, "rows k"],
    values: Shaped[Array, "experts out stored"],
    scales: Shaped[Array, "experts sr sc"] | None,
    group_sizes: Int32[Array, " experts"],
    *,
    act_quant: bool,
    shape: Plan | None = None,
) -> Float[Array, "rows out"]:
    """See pallas_kernels.grouped_gemm.down; `shape` overrides the tile shape."""
    h = formats.round_trip_activations(h) if act_quant else h
    route = jnp.zeros((h.shape[0],), jnp.float32)
    return _multiply(h, values, scales, group_sizes, route, None, shape)
