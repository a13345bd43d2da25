"""Hyper-connections on Hopper.

`mixes`: a thread a row, the row's square stays in its registers through all iterations. `update`: a
block a row, one pass: of a chunk of columns a thread has VECTOR bytes of every stream; it reads the
next chunk before it computes on this one, and sums the squares of what it wrote. Chunks and threads
are added in one order for every call.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from pallas_kernels.hyper_connections import rows as thread_rows

THREADS = thread_rows.THREADS
MOST = 36
"""Entries of a square that a thread can keep."""
SPREAD = 4224
"""Up to as many rows a block has few, so that they spread over a chip's 132 multiprocessors."""
VECTOR = 16
"""Bytes of one access."""
PARTS = 4
"""Most parts of a sublayer's output that a thread reads ahead; more are added up before."""


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
) -> tuple[Float32[Array, "rows n"], Float32[Array, "rows n"], Float32[Array, "rows n n"]]:
    """See pallas_kernels.hyper_connections.mixes."""
    count, rows, _ = parts.shape
    _check(rows, n)
    if 4 * parts.size >= 1 << 31:
        raise NotImplementedError(f"parts have {4 * parts.size} bytes, the kernel addresses 2^31")
    run = _mixes_program(count, rows, n, eps, hc_eps, iterations)
    return run(parts, mean_square, scale, base)


def update(
    parts: Float[Array, "parts rows d"],
    streams: Float[Array, "rows n d"],
    post: Float32[Array, "rows n"],
    comb: Float32[Array, "rows n n"],
    pre: Float32[Array, "rows n"],
) -> tuple[Float[Array, "rows n d"], Float[Array, "rows d"], Float32[Array, " rows"]]:
    """See pallas_kernels.hyper_connections.update."""
    rows, n, width = streams.shape
    _check(rows, n)
    if streams.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"streams are {streams.dtype}, expected bf16 or f32")
    if parts.dtype not in (streams.dtype, jnp.float32):
        raise NotImplementedError(f"parts are {parts.dtype} beside streams of {streams.dtype}")
    if width % THREADS:
        raise NotImplementedError(f"{width} columns are not a multiple of {THREADS}")
    if parts.shape[0] > PARTS:
        parts = functools.reduce(operator.add, list(parts)).astype(streams.dtype)[None]
    run = _update_program(parts.shape[0], rows, n, width, streams.dtype)
    return run(parts, streams, post, comb, pre)


def _check(rows: int, n: int) -> None:
    if rows == 0:
        raise NotImplementedError("no rows")
    if n * n > MOST:
        raise NotImplementedError(f"{n} x {n} entries, a thread keeps {MOST}")


def sinkhorn(a: list[Array], n: int, iterations: int, eps: float) -> list[Array]:
    """Doubly normalised squares: entry i n + j of `a` and of the result is that of row i, column
    j, of a square a thread."""

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

    def both(_, a):
        return tuple(divided(divided(a, 1, eps), 0, eps))

    a = divided([x + eps for x in softmax(a)], 0, eps)
    return list(lax.fori_loop(0, iterations - 1, both, tuple(a)))


@functools.lru_cache(maxsize=64)
def _mixes_program(count: int, rows: int, n: int, eps: float, hc_eps: float, iterations: int):
    """The callable for one shape."""
    held = 32 if rows <= SPREAD else THREADS
    mixes = 2 * n + n * n

    def body(parts, mean_square, scale, base, pre, post, comb, sums):
        block = lax.axis_index("block")
        *found, mean = thread_rows.load(parts, mean_square, sums, block, held)
        inverse = lax.rsqrt(mean + eps)
        kinds = [scale[0]] * n + [scale[1]] * n + [scale[2]] * (n * n)
        logits = [(x * inverse) * kinds[i] + base[i] for i, x in enumerate(found)]
        before = [jax.nn.sigmoid(x) + hc_eps for x in logits[:n]]
        after = [2.0 * jax.nn.sigmoid(x) for x in logits[n : 2 * n]]
        square = sinkhorn(logits[2 * n :], n, iterations, hc_eps)
        for values, out in ((before, pre), (after, post), (square, comb)):
            thread_rows.store(values, out, block, held)

    shapes = ((rows, n), (rows, n), (rows, n, n))
    return plgpu.kernel(
        body,
        kernel_name="mhc_mixes",
        out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
        grid=(-(-rows // held),),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((held * mixes,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


@functools.lru_cache(maxsize=64)
def _update_program(count: int, rows: int, n: int, width: int, dtype: jnp.dtype):
    """The callable for one shape; count: parts of the sublayer's output."""
    vector = math.gcd(width // THREADS, VECTOR // dtype.itemsize)
    chunk = vector * THREADS
    layout = plgpu.Layout.WG_STRIDED((chunk,), vec_size=vector)

    def body(parts, streams, post, comb, pre, new, collapsed, mean_square):
        row = lax.axis_index("row")

        def read(number):
            columns = pl.ds(number * chunk, chunk)
            sources = [parts.at[i, row, columns] for i in range(count)]
            sources += [streams.at[row, i, columns] for i in range(n)]
            return tuple(plgpu.load(x, layout=layout, optimized=False) for x in sources)

        before = [pre[row, j] for j in range(n)]
        after = [post[row, j] for j in range(n)]
        square = [[comb[row, i, j] for j in range(n)] for i in range(n)]

        def combine(number, held, total):
            columns = pl.ds(number * chunk, chunk)
            added = functools.reduce(operator.add, held[:count]).astype(dtype).astype(jnp.float32)
            wide = [x.astype(jnp.float32) for x in held[count:]]
            summed = None
            for j in range(n):
                kept = functools.reduce(operator.add, (square[i][j] * wide[i] for i in range(n)))
                rounded = (after[j] * added + kept).astype(dtype)
                new[row, j, columns] = rounded
                back = rounded.astype(jnp.float32)
                total = total + back * back
                summed = before[j] * back if summed is None else summed + before[j] * back
            assert summed is not None
            collapsed[row, columns] = summed.astype(dtype)
            return total

        chunks = width // chunk
        total = plgpu.layout_cast(jnp.zeros((chunk,), jnp.float32), layout)

        def step(number, carry):
            held, total = carry
            coming = read(number + 1)
            return coming, combine(number, held, total)

        held, total = lax.fori_loop(0, chunks - 1, step, (read(0), total))
        total = combine(chunks - 1, held, total)
        mean_square[row] = jnp.sum(total) * (1.0 / (n * width))

    return plgpu.kernel(
        body,
        kernel_name="mhc_update",
        out_type=(
            jax.ShapeDtypeStruct((rows, n, width), dtype),
            jax.ShapeDtypeStruct((rows, width), dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Nothing that is written is read again.
            unsafe_no_auto_barriers=True,
        ),
    )
