"""Sinkhorn's normalisation in registers: a thread a row, all iterations in one launch."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32

THREADS = 128
MOST = 36
"""Entries of a square that a thread can keep."""
LAYOUT = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


def normalise(
    logits: Float32[Array, "rows n n"], *, iterations: int, eps: float
) -> Float32[Array, "rows n n"]:
    """See pallas_kernels.sinkhorn.normalise."""
    rows, n, _ = logits.shape
    if rows == 0:
        raise NotImplementedError("no rows")
    if n * n > MOST:
        raise NotImplementedError(f"{n} x {n} entries, a thread keeps {MOST}")
    blocks = -(-rows // THREADS)
    # Entry by entry, so that neighbouring threads read neighbouring rows.
    entries = jnp.pad(logits.reshape(rows, n * n).T, ((0, 0), (0, blocks * THREADS - rows)))
    out = _program(blocks, n, iterations, eps)(entries)
    return out[:, :rows].T.reshape(logits.shape)


@functools.lru_cache(maxsize=64)
def _program(blocks: int, n: int, iterations: int, eps: float):
    """The callable for one shape: [n n, 128 blocks] -> the same."""

    def divided(a, axis, more=None):
        """An n x n list over the sums along an axis, each with `more` added."""
        lines = [a[i::n] if axis == 0 else a[n * i : n * i + n] for i in range(n)]
        sums = [functools.reduce(operator.add, line) for line in lines]
        if more is not None:
            sums = [total + more for total in sums]
        return [x / sums[i % n if axis == 0 else i // n] for i, x in enumerate(a)]

    def softmax(a):
        peaks = [functools.reduce(jnp.maximum, a[n * i : n * i + n]) for i in range(n)]
        return divided([jnp.exp(x - peaks[i // n]) for i, x in enumerate(a)], 1)

    def body(entries, out):
        mine = pl.ds(lax.axis_index("block") * THREADS, THREADS)

        def both(_, a):
            return tuple(divided(divided(a, 1, eps), 0, eps))

        a = [plgpu.load(entries.at[i, mine], layout=LAYOUT, optimized=False) for i in range(n * n)]
        a = divided([x + eps for x in softmax(a)], 0, eps)
        for i, x in enumerate(lax.fori_loop(0, iterations - 1, both, tuple(a))):
            out[i, mine] = x

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n * n, blocks * THREADS), jnp.float32),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
