"""The router, a warp a row: scores in registers, k rounds of a maximum over the warp."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels import ptx
from pallas_kernels.router import threads

ROWS = 4
"""Rows of a block, one a warp."""
EXPERTS, MOST = 1024, 16
"""Scores that a warp keeps, and experts of a row that it puts in order."""


def route(
    parts: Float32[Array, "parts rows experts"],
    bias: Float32[Array, " experts"],
    routes: Int32[Array, "rows k"] | None = None,
    *,
    k: int,
    scale: float,
) -> tuple[Int32[Array, "rows k"], Float32[Array, "rows k"]]:
    """See pallas_kernels.router.route."""
    count, rows, experts = parts.shape
    if rows == 0:
        raise NotImplementedError("no rows")
    if experts > EXPERTS or not 0 < k <= MOST:
        raise NotImplementedError(f"{k} of {experts} experts, a warp takes {MOST} of {EXPERTS}")
    if parts.size >= 1 << 31:
        raise NotImplementedError(f"{parts.size} logits in parts, the kernel numbers 2^31")
    given = () if routes is None else (routes.reshape(-1),)
    program = _program(count, rows, experts, k, scale, routes is not None)
    chosen, weight = program(parts.reshape(-1), bias, *given)
    return chosen.reshape(rows, k), weight.reshape(rows, k)


@functools.lru_cache(maxsize=64)
def _program(count: int, rows: int, experts: int, k: int, scale: float, given: bool):
    """The callable for one shape, everything flat."""

    def body(parts, bias, *rest):
        *routes, chosen, weight = rest
        size = dict(count=count, rows=rows, experts=experts, k=k, scale=scale)
        threads.route(lax.axis_index("block"), parts, bias, chosen, weight, *routes, **size)

    out = [jax.ShapeDtypeStruct((rows * k,), dtype) for dtype in (jnp.int32, jnp.float32)]
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(-(-rows // ROWS),),
        grid_names=("block",),
        kernel_name=f"router_{k}of{experts}{'_given' if given else ''}",
        compiler_params=ptx.PARAMETERS,
    )
