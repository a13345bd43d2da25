"""Activations through e4m3 and back, before every product with FP8 or FP4 weights.

    s = pow2ceil(max(amax, 1e-4) / 448) of 32 consecutive channels of a row
    y = e4m3(clamp(x / s, +-448)) * s                    (V4.1 inference/kernel.py act_quant)

y is exact in bfloat16. Every implementation gives the same bits: the only operations over several
channels are maxima. The reference is the plain formula, which XLA runs on a GPU as two or three
launches; the kernel is one.

`normed` is the RMS norm before it too, which leaves the row both ways:
  x = sum of the parts,   n = w x / sqrt(mean(x^2) + eps),   y = round_trip(n)
Its kernel adds the squares in another order than the reference.
"""

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import Implementation, call

IMPLEMENTATIONS = (
    Implementation("hopper", f"{__name__}.hopper", ("gpu",), (9, 0)),
    Implementation("reference", f"{__name__}.reference"),
)


def round_trip(
    x: Float[Array, "rows k"], *, implementation: str = "auto"
) -> Float[Array, "rows k"]:
    """x as e4m3 values times the scale of their 32 channels, in x's dtype.

    Args:
        x: bf16 or f32; the last group of a row may have fewer channels.

    Raises:
        NotImplementedError: the named implementation declines this case.
    """
    return call("quantise", "round_trip", IMPLEMENTATIONS, implementation, (x,), {})


def swiglu(
    gate: Float[Array, "parts rows n"],
    up: Float[Array, "parts rows n"],
    *,
    limit: float,
    dtype: DTypeLike,
    act_quant: bool,
    implementation: str = "auto",
) -> Float[Array, "rows n"]:
    """silu(min(gate, limit)) * clamp(up, +-limit) in float32, in `dtype`, rounded for a product.

    Args:
        gate, up: products as row_matmul.partial_products gives them, added in order and brought to
            `dtype` before anything else.
        limit: positive.
        dtype: bf16 or f32.
        act_quant: whether the result goes through `round_trip`.

    Implementations differ by their exponential: where the rounding to bf16 or to e4m3 is close to a
    tie, one may take the other neighbour.

    Raises:
        NotImplementedError: the named implementation declines this case.
    """
    options = dict(limit=limit, dtype=dtype, act_quant=act_quant)
    return call("quantise", "swiglu", IMPLEMENTATIONS, implementation, (gate, up), options)


def normed(
    parts: Float[Array, "parts rows k"],
    weight: Float[Array, " k"],
    *,
    eps: float,
    dtype: DTypeLike,
    implementation: str = "auto",
) -> tuple[Float[Array, "rows k"], Float[Array, "rows k"]]:
    """Rows after their RMS norm, and the round trip of those, both in `dtype`.

    Args:
        parts: f32 or `dtype`; added in order and rounded to `dtype` before the norm (rows as they
            are: one part).
        weight: of the norm, multiplied in float32.
        eps: added to the mean square.
        dtype: bf16 or f32.

    Raises:
        NotImplementedError: the named implementation declines this case.
    """
    options = dict(eps=eps, dtype=dtype)
    return call("quantise", "normed", IMPLEMENTATIONS, implementation, (parts, weight), options)
