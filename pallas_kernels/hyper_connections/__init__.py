"""Manifold-constrained hyper-connections: what a sublayer does to the n streams X of a row.

`mixes` turns the projection of X into the three mixes, `update` applies them (V4.1 report 2.1;
inference/kernel.py hc_split_sinkhorn); all in float32:
  m    = (sum of the projection's parts) * rsqrt(mean(X^2) + eps)
  pre  = sigmoid(m_pre * scale_0 + base) + hc_eps,   post = 2 sigmoid(m_post * scale_1 + base)
  comb = Sinkhorn(m_comb * scale_2 + base):
         a = softmax(logits, columns) + hc_eps;  a = a / (sum over rows of a + hc_eps)
         then iterations - 1 times: a = a / (sum over columns + hc_eps), the same over rows
  X'_j = post_j * out + sum_i comb_ij X_i,   collapsed = sum_j pre_j X'_j
XLA makes some 20 small launches a layer of them, and 80 a sublayer of Sinkhorn's loop, and a decode
step waits for each. A kernel is one launch; they are written for Hopper and run on later chips.
"""

from jaxtyping import Array, Float, Float32

from pallas_kernels import Implementation, call

IMPLEMENTATIONS = (
    Implementation("hopper", f"{__name__}.hopper", ("gpu",), (9, 0)),
    Implementation("reference", f"{__name__}.reference"),
)


def mixes(
    parts: Float32[Array, "parts rows mix"],
    mean_square: Float32[Array, " rows"],
    scale: Float32[Array, " 3"],
    base: Float32[Array, " mix"],
    *,
    n: int,
    eps: float,
    hc_eps: float,
    iterations: int,
    implementation: str = "auto",
) -> tuple[Float32[Array, "rows n"], Float32[Array, "rows n"], Float32[Array, "rows n n"]]:
    """pre, post [rows, n] and comb [rows, n, n] (source, destination).

    Args:
        parts: partial products of the projection, mix = 2 n + n^2; added in order.
        mean_square: mean over the n d values of a row of their squares.
        eps: added to the mean square.
        hc_eps: added to pre, to the softmax and to every divisor of Sinkhorn's normalisation.
        iterations: normalisations over the sources, at least one; the last one ends it.

    Raises:
        NotImplementedError: the named implementation declines this case.
    """
    return call(
        "hyper_connections",
        "mixes",
        IMPLEMENTATIONS,
        implementation,
        (parts, mean_square, scale, base),
        dict(n=n, eps=eps, hc_eps=hc_eps, iterations=iterations),
    )


def update(
    parts: Float[Array, "parts rows d"],
    streams: Float[Array, "rows n d"],
    post: Float32[Array, "rows n"],
    comb: Float32[Array, "rows n n"],
    pre: Float32[Array, "rows n"],
    *,
    implementation: str = "auto",
) -> tuple[Float[Array, "rows n d"], Float[Array, "rows d"], Float32[Array, " rows"]]:
    """The streams after a sublayer, and what the next one needs of them.

    Args:
        parts: of the sublayer's output: float32, or the dtype of `streams`; added in order and
            rounded to the latter.
        comb: (source, destination).
        pre: the mix that the next sublayer collapses the streams with.

    Returns:
        The new streams, rounded to the dtype of `streams`; the collapsed rows in that dtype; the
        mean of the squares of a row's new streams, as rounded.

    Raises:
        NotImplementedError: the named implementation declines this case.
    """
    return call(
        "hyper_connections",
        "update",
        IMPLEMENTATIONS,
        implementation,
        (parts, streams, post, comb, pre),
        {},
    )
