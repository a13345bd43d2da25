"""The router's choice: the k experts of each row with the largest biased scores, ascending by id.

    best = top k of score + bias (ties to the lowest id; NaN above every number)
    chosen = the ids of best, ascending;  taken = score[chosen], without the bias

Exact: nothing but score + bias is rounded, so every implementation gives the same bits. XLA sorts
all scores of a row with their ids, then the ids, then gathers; the kernel is one launch, a warp a
row. It is written for Hopper and runs on later chips.
"""

from jaxtyping import Array, Float32, Int32

from pallas_kernels import Implementation, call

IMPLEMENTATIONS = (
    Implementation("hopper", f"{__name__}.hopper", ("gpu",), (9, 0)),
    Implementation("reference", f"{__name__}.reference"),
)


def choose(
    score: Float32[Array, "rows experts"],
    bias: Float32[Array, " experts"],
    routes: Int32[Array, "rows k"] | None = None,
    *,
    k: int,
    implementation: str = "auto",
) -> tuple[Int32[Array, "rows k"], Float32[Array, "rows k"]]:
    """(chosen, taken), both [rows, k]; k at most the number of experts.

    Args:
        routes: ids in range that replace the choice of their row, in any order; a row that begins
            with -1 is chosen here.

    Raises:
        NotImplementedError: the named implementation declines this case.
    """
    args = (score, bias, routes)
    return call("router", "choose", IMPLEMENTATIONS, implementation, args, dict(k=k))
