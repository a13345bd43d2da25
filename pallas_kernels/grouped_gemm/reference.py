"""The grouped product as a masked dense loop: every expert multiplies every row, a row keeps its
own expert's result.

    y = sum_e [expert(r) == e] * (x[r] @ W[e]^T)

Plain and slow (E times the work), and the oracle of the fast versions. One expert's weights are
dequantised at a time. Products are float32; exact values of the stored formats are multiplied, so
only the order of the sum can differ.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from pallas_kernels import formats


def row_experts(group_sizes: Int32[Array, " experts"], rows: int) -> Int32[Array, " rows"]:
    """Expert of each row; rows past the last group get the number of experts."""
    ends = jnp.cumsum(group_sizes)
    return jnp.searchsorted(ends, jnp.arange(rows, dtype=jnp.int32), side="right").astype(jnp.int32)


def swiglu(
    gate: Float[Array, "rows inner"],
    up: Float[Array, "rows inner"],
    route_weight: Float[Array, " rows"],
    limit: float,
) -> Float[Array, "rows inner"]:
    """route_weight * (silu(min(gate, limit)) * clamp(up)) in float32."""
    gate = jnp.minimum(gate.astype(jnp.float32), limit)
    up = jnp.clip(up.astype(jnp.float32), -limit, limit)
    return jax.nn.silu(gate) * up * route_weight[:, None]


def _masked_product(
    x: Float[Array, "rows k"],
    values: Shaped[Array, "experts out stored"],
    scales: Shaped[Array, "experts sr sc"] | None,
    experts: Int32[Array, " rows"],
) -> Float[Array, "rows out"]:
    def one(out: Array, item: tuple) -> tuple[Array, None]:
        index, value, scale = item
        weight = formats.dequantise(value, scale)
        product = jnp.dot(x.astype(jnp.float32), weight.T, precision=jax.lax.Precision.HIGHEST)
        return jnp.where((experts == index)[:, None], product, out), None

    empty = jnp.zeros((x.shape[0], values.shape[-2]), jnp.float32)
    index = jnp.arange(values.shape[0], dtype=jnp.int32)
    product = jax.lax.scan(one, empty, (index, values, scales))[0]
    return formats.rounded(product, x.dtype)


def _clean(
    x: Float[Array, "rows k"], experts: Int32[Array, " rows"], count: int
) -> tuple[Float[Array, "rows k"], Bool[Array, " rows"]]:
    real = experts < count
    return jnp.where(real[:, None], x, jnp.zeros((), x.dtype)), real


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
) -> Float[Array, "rows inner"]:
    """See pallas_kernels.grouped_gemm.gate_up."""
    x = x if source is None else x[source]
    experts = row_experts(group_sizes, x.shape[0])
    x, real = _clean(x, experts, values.shape[0])
    x = formats.round_trip_activations(x) if act_quant else x
    gate, up = (
        _masked_product(x, values[:, i], None if scales is None else scales[:, i], experts)
        for i in (0, 1)
    )
    weight = jnp.where(real, route_weight, 0.0)
    return swiglu(gate, up, weight, limit).astype(x.dtype)


def down(
    h: Float[Array, "rows k"],
    values: Shaped[Array, "experts out stored"],
    scales: Shaped[Array, "experts sr sc"] | None,
    group_sizes: Int32[Array, " experts"],
    *,
    act_quant: bool,
) -> Float[Array, "rows out"]:
    """See pallas_kernels.grouped_gemm.down."""
    experts = row_experts(group_sizes, h.shape[0])
    h, _ = _clean(h, experts, values.shape[0])
    h = formats.round_trip_activations(h) if act_quant else h
    return _masked_product(h, values, scales, experts)
