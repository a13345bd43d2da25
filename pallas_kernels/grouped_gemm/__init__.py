"""Expert products: rows sorted by expert times that expert's weights, as stored in the checkpoint.

    gate_up:  h[r] = w[r] * (silu(min(g, limit)) * clamp(u, -limit, limit)),  g, u = x[r] @
        W13[expert(r)]^T
    down:     y[r] = h[r] @ W2[expert(r)]^T

g and u are rounded to x's dtype before the float32 activation, h and y to x's dtype at the end.
With `act_quant` the input of each product first goes through e4m3 with a scale for 32 channels.
Weights are MXFP4 (uint8, two codes a byte, one e8m0 scale for 32 columns), e4m3 with 32 x 32 block
scales, or bf16 / f32 without scales (V4.1 report 2.5, inference/model.py Expert). Rows past
sum(group_sizes) give zeros, whatever they hold; a row's result does not depend on the other rows.

`hopper_fp8` multiplies in FP8 and is taken by name only: it keeps one scale a row of x, so the
smallest values of a row round once more than the released code has them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels import Implementation, call, formats

IMPLEMENTATIONS = (
    Implementation("hopper", f"{__name__}.hopper", ("gpu",), (9, 0), (10, 0)),
    Implementation("hopper_fp8", f"{__name__}.hopper_fp8", ("gpu",), (9, 0), (10, 0), ("gpu",)),
    Implementation("blackwell", f"{__name__}.blackwell", ("gpu",), (10, 0), (11, 0)),
    Implementation("xla", f"{__name__}.xla"),
    Implementation("reference", f"{__name__}.reference"),
)


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
    implementation: str = "auto",
) -> Float[Array, "rows inner"]:
    """Gate and up projection, clamped SwiGLU and routing weight.

    Args:
        x: bf16 or f32 rows sorted by expert; with `source`, in any order.
        values: gate (index 0) and up (index 1): uint8 [E, 2, I, K/2], e4m3 [E, 2, I, K] or bf16 /
            f32 [E, 2, I, K].
        scales: e8m0 (or its bytes) [E, 2, I, K/32] for MXFP4, [E, 2, ceil(I/32), ceil(K/32)] for
            e4m3, else None.
        group_sizes: rows of each expert, in order; the sum may be below the number of rows.
        route_weight: f32, multiplied in float32 before the result is rounded.
        source: row r of the product is x[source[r]], indices in range: a kernel that quantises its
            rows gathers them in the same pass. None where x is sorted already.
        limit: bound of the activation's inputs (10 in the released model).
        act_quant: round x through e4m3 first.

    Returns:
        h in x's dtype; no rows give an empty result.

    Raises:
        ValueError: scales of another shape than the weight needs.
        NotImplementedError: the named implementation declines this case.
    """
    formats.check_scales(values, scales)
    if route_weight.shape[0] == 0:  # no implementation has to know
        return jnp.zeros((0, values.shape[2]), x.dtype)
    args = (x, values, scales, group_sizes, route_weight, source)
    return call(
        "grouped_gemm",
        "gate_up",
        IMPLEMENTATIONS,
        implementation,
        args,
        dict(limit=limit, act_quant=act_quant),
    )


def down(
    h: Float[Array, "rows k"],
    values: Shaped[Array, "experts out stored"],
    scales: Shaped[Array, "experts sr sc"] | None,
    group_sizes: Int32[Array, " experts"],
    *,
    act_quant: bool,
    implementation: str = "auto",
) -> Float[Array, "rows out"]:
    """Down projection: h [rows, I] -> y [rows, D] in h's dtype; weights [E, D, I] stored as for
    gate_up.

    Raises:
        ValueError: scales of another shape than the weight needs.
        NotImplementedError: the named implementation declines this case.
    """
    formats.check_scales(values, scales)
    if h.shape[0] == 0:
        return jnp.zeros((0, values.shape[1]), h.dtype)
    args = (h, values, scales, group_sizes)
    return call(
        "grouped_gemm", "down", IMPLEMENTATIONS, implementation, args, dict(act_quant=act_quant)
    )
