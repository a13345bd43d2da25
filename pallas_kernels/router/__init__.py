"""The router: the k experts of each row with the largest biased scores, ascending by id, and their
weights (V4.1 report 2.5).

    score  = sqrt(softplus(part 0 + part 1 + ...)), the parts of the logits added in order
    best   = top k of score + bias (ties to the lowest id; NaN above every number)
    chosen = the ids of best, ascending
    weight = score[chosen] / (sum over chosen, in order, + 1e-20) * scale

XLA computes all scores of a row and writes them, sorts them with their ids, then sorts the ids,
then gathers; the kernel is one launch, a warp a row. Its scores are within 1e-6 of their value
(threads.py), so only experts that are closer than that at the boundary can change places. It is
written for Hopper and runs on later chips.
"""

from jaxtyping import Array, Float32, Int32

from pallas_kernels import Implementation, call

IMPLEMENTATIONS = (
    Implementation("hopper", f"{__name__}.hopper", ("gpu",), (9, 0)),
    Implementation("reference", f"{__name__}.reference"),
)
SUM_EPS = 1e-20
"""Added to the sum of a row's scores; a constant of its own, not the norm's epsilon."""


def route(
    parts: Float32[Array, "parts rows experts"],
    bias: Float32[Array, " experts"],
    routes: Int32[Array, "rows k"] | None = None,
    *,
    k: int,
    scale: float,
    implementation: str = "auto",
) -> tuple[Int32[Array, "rows k"], Float32[Array, "rows k"]]:
    """(chosen, weight), both [rows, k]; k at most the number of experts.

    Args:
        parts: of the logits, as `row_matmul.partial_products` gives them.
        routes: ids in range that replace the choice of their row, in any order; a row that begins
            with -1 is chosen here. Weights come from the scores in either case.
        scale: factor of the weights.

    Raises:
        NotImplementedError: the named implementation declines this case.
    """
    args = (parts, bias, routes)
    options = dict(k=k, scale=scale)
    return call("router", "route", IMPLEMENTATIONS, implementation, args, options)
