"""Dense product of rows with a stored weight: out[r] = x[r] @ W^T, accumulated in float32.

W is [N, K] in bf16 or f32, or e4m3 with one e8m0 scale for a 32 x 32 block. With `invariant=True`
the bits of a row do not depend on how many rows are multiplied: XLA picks another algorithm, and
another summation order, for another row count, so the invariant product runs with one order for
every count (V4.1 report 3.4 asks the same of its kernels).
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels import Implementation, call, formats

IMPLEMENTATIONS = (
    Implementation("hopper", f"{__name__}.hopper", ("gpu",), (9, 0), (10, 0)),
    Implementation("blackwell", f"{__name__}.blackwell", ("gpu",), (10, 0), (11, 0)),
    Implementation("xla", f"{__name__}.xla", by_name=("cpu",)),
    Implementation("reference", f"{__name__}.reference"),
)


def matmul(
    x: Float[Array, "rows k"],
    w: Shaped[Array, "n k"],
    scales: Shaped[Array, "nb kb"] | None = None,
    *,
    out_dtype: DTypeLike,
    invariant: bool = False,
    implementation: str = "auto",
) -> Float[Array, "rows n"]:
    """x [rows, K] times w [N, K] transposed.

    Args:
        x: bf16 or f32.
        w: bf16, f32 or e4m3.
        scales: e8m0 (or its bytes) [ceil(N/32), ceil(K/32)] with e4m3 weights, else None.
        out_dtype: dtype of the result; the sum is float32.
        invariant: one summation order for every number of rows.

    Raises:
        ValueError: scales of another shape than the weight needs.
        NotImplementedError: the named implementation declines this case.
    """
    formats.check_scales(w, scales)
    return call(
        "row_matmul",
        "matmul",
        IMPLEMENTATIONS,
        implementation,
        (x, w, scales),
        dict(out_dtype=jnp.dtype(out_dtype), invariant=invariant),
    )


def partial_products(
    x: Float[Array, "rows k"],
    w: Shaped[Array, "n k"],
    scales: Shaped[Array, "nb kb"] | None = None,
    *,
    out_dtype: DTypeLike = "float32",
    invariant: bool = False,
    implementation: str = "auto",
) -> Float[Array, "parts rows n"]:
    """`matmul` before its sum: products of parts of K, for a kernel that adds them itself.

    The product is ((part 0 + part 1) + part 2) + ...; how many parts there are is the
    implementation's choice. Several are float32, a single one is of `out_dtype`. Arguments are
    those of `matmul`: with `invariant` neither the number of parts nor the bits of a row depend on
    how many rows there are.

    Raises:
        ValueError: scales of another shape than the weight needs.
        NotImplementedError: the named implementation declines this case.
    """
    formats.check_scales(w, scales)
    return call(
        "row_matmul",
        "partial_products",
        IMPLEMENTATIONS,
        implementation,
        (x, w, scales),
        dict(out_dtype=jnp.dtype(out_dtype), invariant=invariant),
    )


def partial_products_of(
    x: Float[Array, "rows k"],
    weights: tuple[tuple[Shaped[Array, "_ k"], Shaped[Array, "_ _"] | None], ...],
    *,
    out_dtype: DTypeLike = "float32",
    invariant: bool = False,
    implementation: str = "auto",
) -> list[Float[Array, "parts rows _"]]:
    """`partial_products` with each of several weights of the same rows, where there is a kernel for
    it in one launch.

    Args:
        weights: (w, scales or None) of each; the rest as for `partial_products`.

    Raises:
        ValueError: scales of another shape than a weight needs.
        NotImplementedError: the named implementation declines this case.
    """
    for w, scales in weights:
        formats.check_scales(w, scales)
    return call(
        "row_matmul",
        "partial_products_of",
        IMPLEMENTATIONS,
        implementation,
        (x, weights),
        dict(out_dtype=jnp.dtype(out_dtype), invariant=invariant),
    )


def matmul_groups(
    x: Float[Array, "rows groups k"],
    w: Shaped[Array, "stacked k"],
    scales: Shaped[Array, "nb kb"] | None = None,
    *,
    out_dtype: DTypeLike,
    invariant: bool = False,
    implementation: str = "auto",
) -> Float[Array, "rows groups n"]:
    """Each group of a row times its own matrix: y[r, g] = x[r, g] @ w[g n : (g + 1) n]^T.

    Args:
        w: bf16, f32 or e4m3 [groups n, K], the matrices one after the other; `scales` and the rest
            as for `matmul`.

    Raises:
        ValueError: scales of another shape than the weight needs.
        NotImplementedError: the named implementation declines this case.
    """
    formats.check_scales(w, scales)
    return call(
        "row_matmul",
        "matmul_groups",
        IMPLEMENTATIONS,
        implementation,
        (x, w, scales),
        dict(out_dtype=jnp.dtype(out_dtype), invariant=invariant),
    )
