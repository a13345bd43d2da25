"""The row product on Hopper: one K order for every number of rows (pallas_kernels/hopper.py).

    out[r] = sum over parts of K, in order, of (x[r, part] @ W[:, part]^T)

bf16 and FP8-block weights run as stored. float32 weights (the mHC projection) are three bf16 terms
whose sum is exact, so with bf16 rows every product is exact and only the float32 accumulation
rounds. How K is split depends on the weight's shape alone, never on the rows; parts are added in
order.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels import formats, hopper, tiles
from pallas_kernels.tiles import STEP, Plan, Product

TERMS = 3
CHANNELS = 8
"""Channels come in multiples of this; fewer are padded."""


def plan(rows: int, channels: int, splits: int) -> Plan:
    """Tile shape for this many rows."""
    items, most = -(-channels // 128) * splits, 256 if splits == 1 else 128
    most = min(most, -(-rows // 8) * 8)
    return Plan(tiles.best_rows(lambda n: items * -(-rows // n), most=most))


def parts_of_k(channels: int, k: int) -> int:
    """Parts of K, so that narrow products fill the chip; a function of the weight alone."""
    tiles, steps = -(-channels // 128), k // STEP
    wanted = 16 if tiles == 1 else 4 if tiles <= 4 else 2 if tiles <= 12 else 1
    while wanted > 1 and (steps % wanted or steps // wanted < 4):
        wanted //= 2
    return wanted


def terms(w: Float[Array, "n k"]) -> Float[Array, "terms n k"]:
    """float32 as three bf16 terms: their sum is w for every w that is zero or above 2^-102."""
    rest, found = w, []
    for _ in range(TERMS):
        # Explicit rounding: a plain cast there and back may be optimised away.
        found.append(lax.reduce_precision(rest, 8, 7))
        rest = rest - found[-1]
    return jnp.stack(found).astype(jnp.bfloat16)


def check(x: Array, w: Array, out_dtype: DTypeLike) -> None:
    """Raises NotImplementedError for types that the kernels of this operation do not take."""
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"rows are {x.dtype}, the kernel takes bfloat16")
    if jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"out_dtype is {jnp.dtype(out_dtype)}, expected bf16 or f32")
    if w.dtype not in (jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"weights are {w.dtype}, the kernel takes e4m3, bf16 or f32")


def _stored(w: Array, scales: Array | None) -> tuple[str, Array, Array]:
    """(kind of weight, its numbers, its scale bytes)."""
    if w.dtype != jnp.float8_e4m3fn:
        return "bf16", w, jnp.zeros((128,), jnp.uint8)
    assert scales is not None  # formats.check_scales
    return "fp8", w.view(jnp.uint8), formats.scale_bytes(scales).reshape(-1)


def matmul(
    x: Float[Array, "rows k"],
    w: Shaped[Array, "n k"],
    scales: Shaped[Array, "nb kb"] | None = None,
    *,
    out_dtype: DTypeLike,
    invariant: bool = False,
    shape: Plan | None = None,
) -> Float[Array, "rows n"]:
    """See pallas_kernels.row_matmul.matmul; `shape` overrides the tile shape."""
    del invariant  # always
    check(x, w, out_dtype)
    return _in_order(_parts(x, w, scales, out_dtype, shape)).astype(out_dtype)


def partial_products(
    x: Float[Array, "rows k"],
    w: Shaped[Array, "n k"],
    scales: Shaped[Array, "nb kb"] | None = None,
    *,
    invariant: bool = False,
    shape: Plan | None = None,
) -> Float[Array, "parts rows n"]:
    """See pallas_kernels.row_matmul.partial_products; `shape` overrides the tile shape."""
    del invariant  # always
    check(x, w, jnp.float32)
    return _parts(x, w, scales, jnp.float32, shape)


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
    shape: Plan | None,
) -> Float[Array, "parts rows n"]:
    """The product of every part of K: one of `out_dtype`, or several in float32."""
    rows, k = x.shape
    kind, w, flat = _stored(w, scales)
    channels = w.shape[0]
    if kind == "fp8" and channels % CHANNELS:
        raise NotImplementedError(f"{channels} channels are not a multiple of {CHANNELS}")
    stacked = terms(w) if w.dtype == jnp.float32 else w[None]
    if channels % CHANNELS:
        stacked = jnp.pad(stacked, ((0, 0), (0, -channels % CHANNELS), (0, 0)))
    count, padded, _ = stacked.shape
    splits = parts_of_k(count * padded, k)
    direct = splits * count == 1 and padded == channels
    product = Product(
        kind, rows, k, count * padded, splits=splits, out_dtype=out_dtype if direct else jnp.float32
    )
    shape = shape or plan(rows, product.width, splits)
    tiles.check(product, shape, single=True)
    if kind == "fp8" and channels % shape.height:
        # A last weight tile that is not full still looks up the scales of its missing rows.
        flat = jnp.pad(flat, (0, shape.height // 32 * -(-k // 32)))
    out = hopper.multiply(x, stacked.reshape(-1, k), flat, None, None, product, shape)
    if direct:
        return out[None]
    out = out.reshape(splits, rows, count, padded)[..., :channels]
    # Terms of a part from the smallest on.
    return _in_order(jnp.moveaxis(out, 2, 0)[::-1])


def matmul_groups(
    x: Float[Array, "rows groups k"],
    w: Shaped[Array, "stacked k"],
    scales: Shaped[Array, "nb kb"] | None = None,
    *,
    out_dtype: DTypeLike,
    invariant: bool = False,
    shape: Plan | None = None,
) -> Float[Array, "rows groups n"]:
    """See pallas_kernels.row_matmul.matmul_groups: every group in one launch, K in one part."""
    del invariant  # always
    check(x, w, out_dtype)
    rows, groups, k = x.shape
    kind, w, flat = _stored(w, scales)
    channels = w.shape[0] // groups
    if w.dtype == jnp.float32 or channels % 128:
        raise NotImplementedError(f"groups of {channels} {w.dtype} channels, expected 128 a tile")
    product = Product(kind, groups * rows, k, channels, out_dtype=out_dtype)
    shape = shape or plan(rows, groups * channels, 1)
    tiles.check(product, shape, single=False)
    sorted_rows = x.transpose(1, 0, 2).reshape(groups * rows, k)
    out = hopper.multiply(sorted_rows, w, flat, None, None, product, shape, groups=groups)
    return out.reshape(groups, rows, channels).transpose(1, 0, 2)
