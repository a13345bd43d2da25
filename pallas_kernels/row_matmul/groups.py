"""What an implementation without a kernel of its own makes of its `matmul`: products of a row's
groups, each with a matrix of its own, and the product as one part of K, with one weight or several
weights."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels import formats


def one_by_one(
    matmul: Callable[..., Array],
    x: Float[Array, "rows groups k"],
    w: Shaped[Array, "stacked k"],
    scales: Shaped[Array, "nb kb"] | None,
    *,
    out_dtype: DTypeLike,
    invariant: bool,
) -> Float[Array, "rows groups n"]:
    """`matmul` for each group; stored weights are widened first (exact in bfloat16)."""
    _, groups, k = x.shape
    weight = formats.dequantise(w, scales).astype(x.dtype).reshape(groups, -1, k)
    parts = [
        matmul(x[:, group], weight[group], out_dtype=out_dtype, invariant=invariant)
        for group in range(groups)
    ]
    return jnp.stack(parts, axis=1)


def one_part(
    matmul: Callable[..., Array],
    x: Float[Array, "rows k"],
    w: Shaped[Array, "n k"],
    scales: Shaped[Array, "nb kb"] | None = None,
    *,
    out_dtype: DTypeLike,
    invariant: bool,
) -> Float[Array, "parts rows n"]:
    """`matmul` as the only part."""
    return matmul(x, w, scales, out_dtype=out_dtype, invariant=invariant)[None]


def one_part_each(
    matmul: Callable[..., Array],
    x: Float[Array, "rows k"],
    weights: tuple[tuple[Array, Array | None], ...],
    *,
    out_dtype: DTypeLike,
    invariant: bool,
) -> list[Float[Array, "parts rows _"]]:
    """`one_part` with each of the weights."""
    return [
        one_part(matmul, x, *weight, out_dtype=out_dtype, invariant=invariant) for weight in weights
    ]
