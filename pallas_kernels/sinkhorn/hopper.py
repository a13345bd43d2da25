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

    def lines(a, axis):
        """Divides by the sums over `axis` of an n x n list, in its order."""
        step, start = (n, 1) if axis == 0 else (1, n)
        sums = [
            functools.reduce(operator.add, [a[i * start + j * step] for j in range(n)]) + eps
            for i in range(n)
        ]
        return [x / sums[(i % n) if axis == 0 else (i // n)] for i, x in enumerate(a)]

    def softmax(a):
        peaks = [functools.reduce(jnp.maximum, a[n * i : n * i + n]) for i in range(n)]
        powers = [jnp.exp(x - peaks[i // n]) for i, x in enumerate(a)]
        sums = [functools.reduce(operator.add, powers[n * i : n * i + n]) for i in range(n)]
        return [x / sums[i // n] for i, x in enumerate(powers)]

    def body(entries, out):
        mine = pl.ds(lax.axis_index("block") * THREADS, THREADS)

        def both(_, a):
            return tuple(lines(lines(a, 1), 0))

        a = [plgpu.load(entries.at[i, mine], layout=LAYOUT, optimized=False) for i in range(n * n)]
        a = lines([x + eps for x in softmax(a)], 0)
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
