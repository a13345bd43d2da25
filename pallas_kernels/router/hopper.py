"""The router's choice, a warp a row: k rounds of a maximum over the warp, scores in registers."""

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


def choose(
    score: Float32[Array, "rows experts"],
    bias: Float32[Array, " experts"],
    routes: Int32[Array, "rows k"] | None = None,
    *,
    k: int,
) -> tuple[Int32[Array, "rows k"], Float32[Array, "rows k"]]:
    """See pallas_kernels.router.choose."""
    rows, experts = score.shape
    if rows == 0:
        raise NotImplementedError("no rows")
    if experts > EXPERTS or not 0 < k <= MOST:
        raise NotImplementedError(f"{k} of {experts} experts, a warp takes {MOST} of {EXPERTS}")
    given = () if routes is None else (routes.reshape(-1),)
    program = _program(rows, experts, k, routes is not None)
    chosen, taken = program(score.reshape(-1), bias, *given)
    return chosen.reshape(rows, k), taken.reshape(rows, k)


@functools.lru_cache(maxsize=64)
def _program(rows: int, experts: int, k: int, given: bool):
    """The callable for one shape, everything flat."""

    def body(score, bias, *rest):
        *routes, chosen, taken = rest
        size = dict(rows=rows, experts=experts, k=k)
        threads.choose(lax.axis_index("block"), score, bias, chosen, taken, *routes, **size)

    out = [jax.ShapeDtypeStruct((rows * k,), dtype) for dtype in (jnp.int32, jnp.float32)]
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(-(-rows // ROWS),),
        grid_names=("block",),
        kernel_name=f"router_{k}of{experts}{'_given' if given else ''}",
        compiler_params=ptx.PARAMETERS,
    )
