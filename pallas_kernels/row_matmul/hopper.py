"""The row product on Hopper: one K order for every number of rows (pallas_kernels/hopper.py).

    out[r] = sum over parts of K, in order, of (x[r, part] @ W[:, part]^T)

Weights run as stored. A float32 weight (the mHC projection) becomes three bf16 terms in registers
(terms.py) that are accumulated together, the smallest first, so with bf16 rows every product is
exact and only the float32 accumulation rounds: about 1e-6 of a result. How K is cut into parts
depends on the weight and the number of rows, with `invariant` on the weight alone (plans.py); parts
are added in order, the height and the rows of a tile change no bits.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels import formats, hopper, tiles
from pallas_kernels.row_matmul import plans
from pallas_kernels.tiles import Plan, Product

CHANNELS = 8
"""Channels come in multiples of this; fewer are padded."""
KINDS = {"float8_e4m3fn": "fp8", "bfloat16": "bf16", "float32": "f32"}


def check(x: Array, w: Array, out_dtype: DTypeLike) -> None:
    """Raises NotImplementedError for types that the kernels of this operation do not take."""
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"rows are {x.dtype}, the kernel takes bfloat16")
    if jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"out_dtype is {jnp.dtype(out_dtype)}, expected bf16 or f32")
    if w.dtype.name not in KINDS:
        raise NotImplementedError(f"weights are {w.dtype}, the kernel takes e4m3, bf16 or f32")


def _check(x: Array, w: Array, out_dtype: DTypeLike) -> None:
    check(x, w, out_dtype)
    rows, k = x.shape[0], x.shape[-1]
    if rows == 0 or k % tiles.STEP:
        raise NotImplementedError(f"{rows} rows, K = {k}: expected rows and a multiple of 128")


def _stored(w: Array, scales: Array | None) -> tuple[str, Array, Array]:
    """(kind of weight, its numbers, its scale bytes)."""
    kind = KINDS[w.dtype.name]
    if kind != "fp8":
        return kind, w, jnp.zeros((128,), jnp.uint8)
    assert scales is not None  # formats.check_scales
    return kind, w.view(jnp.uint8), formats.scale_bytes(scales).reshape(-1)


def matmul(
    x: Float[Array, "rows k"],
    w: Shaped[Array, "n k"],
    scales: Shaped[Array, "nb kb"] | None = None,
    *,
    out_dtype: DTypeLike,
    invariant: bool = False,
    cut: tuple[int, Plan] | None = None,
) -> Float[Array, "rows n"]:
    """See pallas_kernels.row_matmul.matmul; `cut` overrides the parts of K and the tile shape."""
    _check(x, w, out_dtype)
    return _in_order(_parts(x, w, scales, out_dtype, invariant, cut)).astype(out_dtype)


def partial_products(
    x: Float[Array, "rows k"],
    w: Shaped[Array, "n k"],
    scales: Shaped[Array, "nb kb"] | None = None,
    *,
    out_dtype: DTypeLike = "float32",
    invariant: bool = False,
    cut: tuple[int, Plan] | None = None,
) -> Float[Array, "parts rows n"]:
    """See pallas_kernels.row_matmul.partial_products; `cut` as for `matmul`."""
    _check(x, w, out_dtype)
    return _parts(x, w, scales, out_dtype, invariant, cut)


def partial_products_of(
    x: Float[Array, "rows k"],
    weights: tuple[tuple[Array, Array | None], ...],
    *,
    out_dtype: DTypeLike = "float32",
    invariant: bool = False,
) -> list[Float[Array, "parts rows _"]]:
    """See pallas_kernels.row_matmul.partial_products_of: one launch for weights of one kind whose K
    is cut into as many parts, else one each."""
    rows, k = x.shape
    for w, _ in weights:
        _check(x, w, out_dtype)
    kinds, stored, flat = zip(*(_stored(w, scales) for w, scales in weights), strict=True)
    widths, kind = [w.shape[0] for w in stored], kinds[0]
    fixed = {plans.parts_of_k(kind, width, k) for width in widths} if invariant else {None}
    if len({*kinds}) > 1 or len(fixed) > 1 or any(width % CHANNELS for width in widths):
        return [
            partial_products(x, *weight, out_dtype=out_dtype, invariant=invariant)
            for weight in weights
        ]
    splits, shape = plans.best(kind, rows, sum(widths), k, fixed.pop())
    kept = out_dtype if splits == 1 else jnp.float32
    product = Product(kind, rows, k, widths[0], splits=splits, out_dtype=kept)
    tiles.check(product, shape, single=True)
    found = hopper.multiply_by_several(x, stored, flat, product, shape)
    return [out.reshape(splits, rows, -1) for out in found]


def _in_order(parts: Float[Array, "parts ..."]) -> Float[Array, "..."]:
    """The sum over the first axis, one after the other: a chain of adds is one fused launch."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _parts(
    x: Float[Array, "rows k"],
    w: Shaped[Array, "n k"],
    scales: Shaped[Array, "nb kb"] | None,
    out_dtype: DTypeLike,
    invariant: bool,
    cut: tuple[int, Plan] | None,
) -> Float[Array, "parts rows n"]:
    """The product of every part of K: one of `out_dtype`, or several in float32."""
    rows, k = x.shape
    kind, w, flat = _stored(w, scales)
    channels = w.shape[0]
    missing = -channels % CHANNELS
    if missing and kind == "fp8":
        raise NotImplementedError(f"{channels} channels are not a multiple of {CHANNELS}")
    fixed = plans.parts_of_k(kind, channels, k) if invariant else None
    splits, shape = cut or plans.best(kind, rows, channels, k, fixed)
    out_dtype = out_dtype if splits == 1 else jnp.float32
    product = Product(kind, rows, k, channels + missing, splits=splits, out_dtype=out_dtype)
    tiles.check(product, shape, single=True)
    if missing:
        w = jnp.pad(w, ((0, missing), (0, 0)))
    out = hopper.multiply(x, w, flat, None, None, product, shape)
    return out.reshape(splits, rows, -1)[..., :channels]


def matmul_groups(
    x: Float[Array, "rows groups k"],
    w: Shaped[Array, "stacked k"],
    scales: Shaped[Array, "nb kb"] | None = None,
    *,
    out_dtype: DTypeLike,
    invariant: bool = False,
    cut: tuple[int, Plan] | None = None,
) -> Float[Array, "rows groups n"]:
    """See pallas_kernels.row_matmul.matmul_groups: every group in one launch, with `invariant` K in
    one part; `cut` as for `matmul`."""
    _check(x, w, out_dtype)
    rows, groups, k = x.shape
    kind, w, flat = _stored(w, scales)
    channels = w.shape[0] // groups
    if kind == "f32" or channels % 128:
        raise NotImplementedError(f"groups of {channels} {w.dtype} channels, expected 128 a tile")
    splits, shape = cut or plans.best(kind, rows, channels, k, 1 if invariant else None, groups)
    kept = out_dtype if splits == 1 else jnp.float32
    product = Product(kind, groups * rows, k, channels, splits=splits, out_dtype=kept)
    tiles.check(product, shape, single=groups == 1)
    sorted_rows = x.transpose(1, 0, 2).reshape(groups * rows, k)
    out = hopper.multiply(sorted_rows, w, flat, None, None, product, shape, groups=groups)
    out = _in_order(out.reshape(splits, groups, rows, channels)).astype(out_dtype)
    return out.transpose(1, 0, 2)
