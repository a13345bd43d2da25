"""One declaration per parameter.

Every mechanism declares its weights once, as the same dataclass filled with `Param` leaves. From
that declaration come abstract arrays for tracing, placements under a layout, random values for
tests and benchmarks, and the census that converters compare a checkpoint with. A `Param` holds the
shape and dtype as stored, one logical axis name a dimension (`layout.py` maps them to mesh axes)
and how to draw a random value.

`Quantized` is a pair of such leaves: values in the checkpoint's own bits and their scales. Formats
(reference inference/kernel.py):
  FP8        values float8_e4m3fn [out, in], scales float8_e8m0fnu [ceil(out/b), ceil(in/b)], block
             (b, b)
  FP4 (MX)   values uint8 [..., out, in/2] (low nibble = even column), scales float8_e8m0fnu [...,
             out, in/32], block (1, 32)
  FP8 rows   values float8_e4m3fn [rows, d], scales float8_e8m0fnu [rows, d/32], block (1, 32)
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Leaf = Any  # a weights tree's field: array, Param, ShapeDtypeStruct or Sharding
Axes = tuple[str | None, ...]

MX_GROUP = 32  # columns that share one e8m0 scale in the row-wise formats


@dataclasses.dataclass(frozen=True)
class Param:
    """Declaration of one stored array.

    dtype: numpy or ml_dtypes name. axes: one logical axis (or None) a dimension.
    init: "normal" (std = scale), "ones", "zeros", "bits" (uniform bytes), or "exponent" (e8m0 bytes
    near scale).
    """

    shape: tuple[int, ...]
    dtype: str
    axes: Axes
    init: str = "normal"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(
                f"Param: {len(self.axes)} axes for shape {self.shape}; expected one a dimension"
            )

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * jnp.dtype(self.dtype).itemsize


@flax.struct.dataclass
class Quantized:
    """Stored values with their scales; `block` = (rows, columns) that share one scale, of the
    logical matrix."""

    values: Leaf
    scales: Leaf
    block: tuple[int, int] = flax.struct.field(pytree_node=False, default=(MX_GROUP, MX_GROUP))


def plain(
    *shape: int,
    axes: Axes,
    dtype: str = "bfloat16",
    init: str = "normal",
    scale: float | None = None,
) -> Param:
    """An unquantised parameter; matrices default to a standard deviation of 1/sqrt(last
    dimension)."""
    return Param(shape, dtype, axes, init, 1.0 / math.sqrt(shape[-1]) if scale is None else scale)


def norm(size: int, axis: str | None = None) -> Param:
    """An RMS norm's weight, bfloat16 [size]."""
    return Param((size,), "bfloat16", (axis,), "ones")


def dense(
    rows: int, cols: int, axes: Axes, *, block: tuple[int, int], dtype: str
) -> "Quantized | Param":
    """A dense matrix [rows, cols]: FP8 with square blocks, or bfloat16 where the checkpoint is
    unquantised."""
    if dtype == "bf16":
        return plain(rows, cols, axes=axes)
    scale_shape = (-(-rows // block[0]), -(-cols // block[1]))
    scale = 1.0 / math.sqrt(cols)
    return Quantized(
        Param((rows, cols), "float8_e4m3fn", axes),
        Param(scale_shape, "float8_e8m0fnu", axes, "exponent", scale),
        block,
    )


def fp4(*shape: int, axes: Axes) -> Quantized:
    """MXFP4 with logical shape [..., out, in]: two values a byte along the last axis."""
    rms = 2.93  # of a uniformly drawn e2m1 code
    values = Param((*shape[:-1], shape[-1] // 2), "uint8", axes, "bits")
    scales = Param(
        (*shape[:-1], shape[-1] // MX_GROUP),
        "float8_e8m0fnu",
        axes,
        "exponent",
        1.0 / (rms * math.sqrt(shape[-1])),
    )
    return Quantized(values, scales, (1, MX_GROUP))


def fp8_stack(*shape: int, axes: Axes, block: tuple[int, int]) -> Quantized:
    """A stack of FP8 matrices [..., out, in] with one scale a block of each matrix."""
    scale_shape = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    return Quantized(
        Param(shape, "float8_e4m3fn", axes),
        Param(scale_shape, "float8_e8m0fnu", axes, "exponent", 1.0 / math.sqrt(shape[-1])),
        block,
    )


def fp8_rows(rows: int, cols: int, axes: Axes) -> Quantized:
    """A table of FP8 rows, each with its own scales."""
    return Quantized(
        Param((rows, cols), "float8_e4m3fn", axes),
        Param((rows, cols // MX_GROUP), "float8_e8m0fnu", axes, "exponent", 1.0),
        (1, MX_GROUP),
    )


def flatten(tree: Any) -> dict[str, Any]:
    """Path -> leaf, in tree order; a path reads like `layers/3/ffn/w13/values`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}


def path_name(path: tuple[Any, ...]) -> str:
    """The slash-separated name of a pytree path."""
    return "/".join(
        str(getattr(key, "name", getattr(key, "idx", getattr(key, "key", key)))) for key in path
    )


def abstract(tree: Any) -> Any:
    """The tree as `ShapeDtypeStruct`s, for tracing without weights."""
    return jax.tree.map(
        lambda param: jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype)), tree
    )


def random(tree: Any, seed: int = 0) -> Any:
    """Random host arrays of the declared shapes and dtypes; the same seed gives the same bits on
    every platform."""
    leaves, structure = jax.tree.flatten(tree)
    children = np.random.SeedSequence(seed).spawn(len(leaves))
    drawn = [
        _draw(param, np.random.default_rng(child))
        for param, child in zip(leaves, children, strict=True)
    ]
    return jax.tree.unflatten(structure, drawn)


def _draw(param: Param, generator: np.random.Generator) -> np.ndarray:
    dtype = jnp.dtype(param.dtype)
    if param.init == "ones":
        return np.ones(param.shape, dtype)
    if param.init == "zeros":
        return np.zeros(param.shape, dtype)
    if param.init == "bits":
        return generator.integers(0, 256, param.shape, dtype=np.uint8)
    if param.init == "exponent":
        centre = 127 + round(math.log2(param.scale))
        return generator.integers(centre - 1, centre + 1, param.shape, dtype=np.uint8).view(dtype)
    if param.init != "normal":
        raise ValueError(
            f"Param: init = {param.init!r}; expected normal, ones, zeros, bits or exponent"
        )
    return (
        generator.standard_normal(param.shape, dtype=np.float32) * np.float32(param.scale)
    ).astype(dtype)
