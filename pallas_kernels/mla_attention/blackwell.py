"""Sparse MLA attention on Blackwell (tcgen05, accumulators in TMEM): the equation of reference.py.

One block of threads an SM, persistent over the query rows. 64 heads are one tile; keys come in
pairs of 64-row blocks, because one product scores 128 keys. Four warpgroups:

    gather    stored rows -> shared memory: bfloat16 rows by TMA gather, four an instruction (row -1
              is out of bounds and gives zeros), packed rows through registers (gather.py)
    multiply  S = Q K^T into TMEM; O[:, quarter] += P K[:, quarter] into TMEM
    score     S -> running maximum a block, P = exp2(S - m) in bfloat16, alpha and at the end 1 / l
    value     O = alpha O before every block, and the result at the end of a row

A block's slot of keys and its P are free when its product is done, which `done` tells all groups.
A row is computed by one block of threads in slot order, so its bits never depend on the batch.
Compiled ahead of time for B200 and checked in interpret mode (with `by_row`: rows copied one by
one, as that mode has no TMA gather); not run on a device.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.mla_attention import gather, launch
from pallas_kernels.mla_attention.launch import (
    BLOCK,
    COLUMN,
    HEADS,
    LOG2E,
    QUARTER,
    QUARTERS,
    ROW,
    UNITS,
    WIDTH,
)
from pallas_kernels.mla_attention.reference import FIRST_MAX, Rows

PAIR = 2 * BLOCK
REGISTERS = {"value": 120, "score": 160, "multiply": 104}  # gather keeps its 128


def attend(
    q: Float[Array, "r h d"],
    window: Rows,
    window_index: Int32[Array, "r w"],
    selected: Rows | None,
    selected_index: Int32[Array, "r k"] | None,
    sink: Float32[Array, " h"],
    *,
    scale: float,
    invariant: bool = False,
) -> Float[Array, "r h d"]:
    """Attention of every query row over its own keys; arguments as in the package's `attend`.

    Raises:
        NotImplementedError: q is not bfloat16 [r, <= 64 heads, 512], or a row format has no gather.
    """
    del invariant  # always
    case = launch.prepare(q, window, window_index, selected, selected_index, sink)
    if case is None:
        return jnp.zeros_like(q)
    run = program(q.shape[0], case.kinds, case.blocks, scale, case.processors)
    return run(case.q, case.sink, *case.operands)[:, : q.shape[1]]


@functools.lru_cache(maxsize=64)
def program(
    rows: int,
    kinds: tuple[str, ...],
    blocks: tuple[int, ...],
    scale: float,
    processors: int,
    by_row: bool = False,
):
    """The callable for one shape: (q, sink, *sources) -> out."""
    grid, total = min(processors, rows), sum(blocks)
    pairs = -(-total // 2)
    starts = [sum(blocks[:i]) for i in range(len(blocks))]

    def body(q, sink, *refs):
        sources, rest = launch.split(refs, kinds)
        out, q_tile, k_tile, p_tile, o_tile, factor, s_acc, *rest = rest
        o_acc, barriers = rest[:QUARTERS], rest[QUARTERS:]
        q_full, k_full, s_full, s_empty, p_full, n_full, ready, done = barriers
        group, first = lax.axis_index("wg"), lax.axis_index("cta")
        turns = lax.div(rows - first + (grid - 1), grid)

        def place(number):
            turn = lax.div(number, 2 * pairs)
            return first + turn * grid, number - turn * 2 * pairs

        def slot_numbers(row, block, layout):
            """The row numbers of a block of the row's list; -1 past its end."""

            def read(source, start):
                where = pl.ds((block - start) * BLOCK, BLOCK)
                return plgpu.load(source[1].at[row, where], layout=layout, optimized=False)

            found = [functools.partial(read, *x) for x in zip(sources, starts, strict=True)]
            last = len(found) - 1
            if last:
                return lax.cond(block < starts[1], found[0], found[1])
            return found[0]()

        def finish(any_):
            """Waits for the last products, so that no barrier is left in the middle of a phase."""

            @pl.when(any_)
            def _():
                for half in range(2):
                    plgpu.barrier_wait(done.at[half])

        def _value():
            plgpu.set_max_registers(REGISTERS["value"], action="decrease")

            def rescale(factors):
                for acc in o_acc:
                    scaled = plgpu.async_load_tmem(acc)
                    plgpu.wait_load_tmem()
                    factors_here = lax.broadcast_in_dim(factors, scaled.shape, [0])
                    yield acc, scaled * factors_here

            def turn(i, _):
                def block(n, _):
                    half = lax.rem(n, 2)
                    plgpu.barrier_wait(p_full.at[half])

                    @pl.when(n > 0)
                    def _():
                        plgpu.barrier_wait(done.at[1 - half])
                        decay = plgpu.load(factor.at[half], layout=ROW)
                        for acc, scaled in rescale(decay):
                            plgpu.async_store_tmem(acc, scaled)
                        plgpu.commit_tmem()

                    plgpu.barrier_arrive(ready)
                    return ()

                lax.fori_loop(0, 2 * pairs, block, ())
                plgpu.barrier_wait(done.at[1])
                plgpu.barrier_wait(n_full)
                inverse = plgpu.load(factor.at[2 + lax.rem(i, 2)], layout=ROW)
                for quarter, (_, scaled) in enumerate(rescale(inverse)):
                    for part in range(2):
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        piece = scaled[:, 64 * part : 64 * part + 64]
                        o_tile[part] = piece.astype(jnp.bfloat16)
                        plgpu.commit_smem()
                        columns = pl.ds(quarter * QUARTER + 64 * part, 64)
                        target = out.at[first + i * grid, :, columns]
                        plgpu.copy_smem_to_gmem(o_tile.at[part], target)
                return ()

            lax.fori_loop(0, turns, turn, ())
            plgpu.wait_smem_to_gmem(0)

        def _score():
            plgpu.set_max_registers(REGISTERS["score"], action="increase")
            bias = plgpu.load(sink, layout=ROW, optimized=False) * LOG2E

            def turn(i, step):
                row = first + i * grid
                plgpu.copy_gmem_to_smem(q.at[row], q_tile, q_full)

                def pair(n, carry):
                    step, peak, mass = carry
                    hidden = []
                    for half in range(2):
                        block = jnp.minimum(2 * n + half, total - 1)
                        numbers = slot_numbers(row, block, COLUMN)
                        seen = (numbers >= 0) & (2 * n + half < total)
                        hidden.append(jnp.where(seen, 0.0, -jnp.inf))
                    plgpu.barrier_wait(s_full)
                    scores = plgpu.async_load_tmem(s_acc)
                    plgpu.wait_load_tmem()
                    plgpu.barrier_arrive(s_empty)
                    for half in range(2):
                        score = scores[:, half * BLOCK : (half + 1) * BLOCK] * (scale * LOG2E)
                        score = score + lax.broadcast_in_dim(hidden[half], score.shape, [1])
                        new = jnp.maximum(peak, score.max(axis=1))
                        prob = jnp.exp2(score - lax.broadcast_in_dim(new, score.shape, [0]))
                        decay = jnp.exp2(peak - new)
                        mass, peak = mass * decay + prob.sum(axis=1), new

                        @pl.when(step > 0)
                        def _(half=half):
                            plgpu.barrier_wait(done.at[half])

                        factor[half] = decay
                        p_tile[half] = prob.astype(jnp.bfloat16)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(p_full.at[half])
                    return step + 1, peak, mass

                peak = plgpu.layout_cast(jnp.full((HEADS,), FIRST_MAX, jnp.float32), ROW)
                mass = plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), ROW)
                step, peak, mass = lax.fori_loop(0, pairs, pair, (step, peak, mass))
                mass = mass + jnp.exp2(bias - peak)
                factor[2 + lax.rem(i, 2)] = jnp.where(mass > 0, 1.0 / mass, 0.0)
                plgpu.commit_smem()
                plgpu.barrier_arrive(n_full)
                return step

            step = lax.fori_loop(0, turns, turn, jnp.int32(0))
            finish(step > 0)

        def _gather():
            def block(number, _):
                row, n = place(number)
                half = lax.rem(number, 2)

                @pl.when(number >= 2)
                def _():
                    plgpu.barrier_wait(done.at[half])

                tile = k_tile.at[pl.ds(half * BLOCK, BLOCK)]
                n = jnp.minimum(n, total - 1)  # an odd list ends with its last block again

                def fill(kind, source, start):
                    where = pl.ds((n - start) * BLOCK, BLOCK)
                    numbers = source[1].at[row, where]
                    if kind != "bfloat16":
                        expand(kind, source[0], numbers, tile)
                        gather.publish()
                        plgpu.barrier_arrive(k_full.at[half])
                    elif by_row:
                        copy_rows(source[0][0], numbers, tile, half)
                    else:
                        layout = plgpu.Layout.TMA_INDICES
                        ids = plgpu.load(numbers, layout=layout, optimized=False)
                        ids = ids.astype(jnp.uint32)
                        plgpu.copy_gmem_to_smem(source[0][0].at[ids], tile, k_full.at[half])

                fills = [
                    functools.partial(fill, *x) for x in zip(kinds, sources, starts, strict=True)
                ]
                if len(fills) == 1:
                    fills[0]()
                else:
                    pl.when(n < starts[1])(fills[0])
                    pl.when(n >= starts[1])(fills[1])
                return ()

            def expand(kind, parts, numbers, tile):
                index = gather.load_index(numbers)
                raw = [launch.load(kind, index, parts, unit) for unit in range(2)]
                for unit in range(UNITS[kind]):
                    launch.store(kind, raw[unit % 2], tile, unit)
                    if unit + 2 < UNITS[kind]:
                        raw[unit % 2] = launch.load(kind, index, parts, unit + 2)

            def copy_rows(source, numbers, tile, half):
                for slot in range(BLOCK):
                    one = pl.ds(jnp.maximum(numbers[slot], 0), 1)
                    plgpu.copy_gmem_to_smem(
                        source.at[one], tile.at[pl.ds(slot, 1)], k_full.at[half]
                    )

            lax.fori_loop(0, turns * 2 * pairs, block, ())
            finish(turns > 0)

        def _multiply():
            plgpu.set_max_registers(REGISTERS["multiply"], action="decrease")

            def turn(i, step):
                plgpu.barrier_wait(q_full)

                def pair(n, step):
                    for half in range(2):
                        plgpu.barrier_wait(k_full.at[half])

                    @pl.when(step > 0)
                    def _():
                        plgpu.barrier_wait(s_empty)

                    plgpu.tcgen05_mma(s_acc, q_tile, k_tile.T, s_full, accumulate=False)
                    for half in range(2):
                        plgpu.barrier_wait(ready)
                        keys = k_tile.at[pl.ds(half * BLOCK, BLOCK)]
                        for quarter, acc in enumerate(o_acc):
                            value = keys.at[:, pl.ds(quarter * QUARTER, QUARTER)]
                            more = (n > 0) | (half > 0)
                            plgpu.tcgen05_mma(acc, p_tile.at[half], value, accumulate=more)
                        plgpu.tcgen05_commit_arrive(done.at[half])
                    return step + 1

                return lax.fori_loop(0, pairs, pair, step)

            step = lax.fori_loop(0, turns, turn, jnp.int32(0))

            @pl.when(step > 0)
            def _():
                plgpu.barrier_wait(s_empty)  # the last one, which nothing else waits for

        lax.switch(group, (_value, _score, _gather, _multiply))

    tile = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=gather.TRANSFORMS)
    arrivals = BLOCK if by_row else 1
    tensor = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    return plgpu.kernel(
        body,
        kernel_name="mla_attention",
        out_type=jax.ShapeDtypeStruct((rows, HEADS, WIDTH), jnp.bfloat16),
        grid=(grid,),
        grid_names=("cta",),
        num_threads=4,
        thread_name="wg",
        scratch_types=[
            tile((HEADS, WIDTH)),
            tile((PAIR, WIDTH)),
            tile((2, HEADS, BLOCK)),
            tile((2, HEADS, 64)),
            plgpu.SMEM((4, HEADS), jnp.float32),
            plgpu.TMEM((HEADS, PAIR), jnp.float32),
            *[plgpu.TMEM((HEADS, QUARTER), jnp.float32)] * QUARTERS,
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=2, num_arrivals=arrivals),
            tensor(),
            tensor(),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(),
            tensor(),
            tensor(num_barriers=2),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
