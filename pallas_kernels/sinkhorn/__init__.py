"""Sinkhorn's normalisation of a small square per row, the mixing matrix of hyper-connections.

    a = softmax(logits, columns) + eps;  a = a / (sum over rows of a + eps)
    then iterations - 1 times: a = a / (sum over columns + eps), a = a / (sum over rows + eps)

(V4.1 report 2.1; inference/kernel.py hc_split_sinkhorn). The reference is a loop of small
reductions: on a GPU each is a launch of its own, some 80 a sublayer, and a decode step waits for
them (measured on an H200: docs/benchmarks.md). The kernel keeps a row's square in the registers of
one thread; it is written for Hopper and runs on later chips.
"""

from jaxtyping import Array, Float32

from pallas_kernels import Implementation, call

IMPLEMENTATIONS = (
    Implementation("hopper", f"{__name__}.hopper", ("gpu",), (9, 0)),
    Implementation("reference", f"{__name__}.reference"),
)


def normalise(
    logits: Float32[Array, "rows n n"],
    *,
    iterations: int,
    eps: float,
    implementation: str = "auto",
) -> Float32[Array, "rows n n"]:
    """Doubly normalised squares [rows, n, n]; the last normalisation is over axis 1.

    Args:
        iterations: normalisations over axis 1, at least one.
        eps: added to the softmax and to every divisor.

    Raises:
        NotImplementedError: the named implementation declines this case.
    """
    return call(
        "sinkhorn",
        "normalise",
        IMPLEMENTATIONS,
        implementation,
        (logits,),
        dict(iterations=iterations, eps=eps),
    )
