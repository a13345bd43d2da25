"""The grouped product on Hopper in FP8 arithmetic: MXFP4 weights and rows both as e4m3.

Rows are quantised as `act_quant` asks (32 channels a scale) and then brought to one power of two a
row, so that a scale leaves the sum. Weights become e4m3 in registers relative to the largest scale
of their row: exact within 2^-11 of it. Twice the rate of bf16 arithmetic. Beyond the reference's
rounding, values far below the largest of their row round once more, and the tensor core adds FP8
products with fewer bits than float32: stated tolerance 1e-2 of the norm against the reference with
`act_quant` (measured on an H200: 1.7e-3 to 2.1e-3, of which 1.7e-3 is the bf16 result).
"""

from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.grouped_gemm import hopper


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
    """See pallas_kernels.grouped_gemm.gate_up; needs act_quant, since it rounds its rows."""
    _needs_quantised(act_quant)
    args = (x, values, scales, group_sizes, route_weight, source)
    return hopper.gate_up(*args, limit=limit, act_quant=True, e4m3=True)


def down(
    h: Float[Array, "rows k"],
    values: Shaped[Array, "experts out stored"],
    scales: Shaped[Array, "experts sr sc"] | None,
    group_sizes: Int32[Array, " experts"],
    *,
    act_quant: bool,
) -> Float[Array, "rows out"]:
    """See pallas_kernels.grouped_gemm.down; needs act_quant, since it rounds its rows."""
    _needs_quantised(act_quant)
    return hopper.down(h, values, scales, group_sizes, act_quant=True, e4m3=True)


def _needs_quantised(act_quant: bool) -> None:
    if not act_quant:
        raise NotImplementedError("FP8 arithmetic rounds its rows; act_quant is off")
