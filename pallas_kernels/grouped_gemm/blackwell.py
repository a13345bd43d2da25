"""Grouped product on Blackwell (pallas_kernels/blackwell.py): FP4 weights block-scaled or as bf16.

With `act_quant` rows are e4m3 with a scale of 32 channels and FP4 weights become e4m3 in registers,
exactly: the mxfp8 product of the tensor cores is the released arithmetic. Without it both are bf16.
bf16 weights run as they are.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels import blackwell, formats
from pallas_kernels.blackwell import Plan
from pallas_kernels.tiles import Product

KINDS = {"uint8": "fp4", "bfloat16": "bf16"}


def _multiply(
    x: Float[Array, "rows k"],
    values: Shaped[Array, "experts *out stored"],
    scales: Shaped[Array, "experts ..."] | None,
    group_sizes: Int32[Array, " experts"],
    route: Float[Array, " rows"] | None,
    limit: float | None,
    act_quant: bool,
    shape: Plan | None,
) -> Float[Array, "rows out"]:
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"rows are {x.dtype}, the kernel takes bfloat16")
    kind = KINDS.get(values.dtype.name)
    if kind is None:
        raise NotImplementedError(f"no kernel for {values.dtype} weights")
    scaled = kind == "fp4" and act_quant
    if act_quant and not scaled:
        x = formats.round_trip_activations(x)
    (rows, k), matrix = x.shape, values[0].size // values.shape[-1]
    product = Product(kind, rows, k, matrix, limit, e4m3=scaled)
    shape = shape or (Plan(128, 3) if scaled else Plan(64, 2))
    flat = jnp.zeros((128,), jnp.uint8)
    if scales is not None:
        flat = formats.scale_bytes(scales).reshape(-1)
    weights = values.reshape(-1, values.shape[-1])
    return blackwell.multiply(x, weights, flat, group_sizes, route, product, shape)


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
) -> Float[Array, "rows inner"]:
    """See pallas_kernels.grouped_gemm.gate_up; `shape` overrides the tile shape."""
    x = x if source is None else x[source]
    return _multiply(x, values, scales, group_sizes, route_weight, limit, act_quant, shape)


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
    return _multiply(h, values, scales, group_sizes, None, None, act_quant, shape)
