"""Sparse MLA attention on Hopper (Pallas Mosaic GPU): the equation of `reference.py`, row by row.

One block of threads an SM, persistent over the query rows; 64 heads are one tile of the tensor
cores. Four warpgroups work on blocks of 64 keys, connected by rings of two slots:

    gather   stored rows -> bfloat16 tile in shared memory (gather.py)
    score    S = Q K^T, running maximum, P = exp2(S - m) -> bfloat16 tile, alpha and at the end 1/l
    value x2 O[:, half] = alpha O[:, half] + P K[:, half], 256 channels each, held in registers

A row is computed by one block of threads in slot order, so its bits never depend on the batch; it
is exact to `reference.py` but for the order of float32 sums and the exponential.
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

HALF = WIDTH // 2
SLOTS = 2
ORDER = (0, 2, 1, 3)  # quarters, in the order in which the two value groups release them
DEPTH = 2  # units loaded ahead
REGISTERS = {"value": 160, "score": 88, "gather": 104}


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
    run = _program(q.shape[0], case.kinds, case.blocks, scale, case.processors)
    return run(case.q, case.sink, *case.operands)[:, : q.shape[1]]


@functools.lru_cache(maxsize=64)
def _program(
    rows: int, kinds: tuple[str, ...], blocks: tuple[int, ...], scale: float, processors: int
):
    """The compiled-once callable for one shape: (q, sink, *sources) -> out."""
    grid, total = min(processors, rows), sum(blocks)

    def body(q, sink, *refs):
        sources, rest = launch.split(refs, kinds)
        out, q_tile, k_tile, p_tile, o_tile, mask, factor, *barriers = rest
        q_full, k_full, k_empty, p_full, p_empty = barriers
        group, first = lax.axis_index("wg"), lax.axis_index("cta")
        turns = lax.div(rows - first + (grid - 1), grid)

        @pl.when(group < 2)
        def _value():
            plgpu.set_max_registers(REGISTERS["value"], action="increase")

            def rescale(message, acc):
                slot = lax.rem(message, SLOTS)
                plgpu.barrier_wait(p_full.at[slot])
                decay = plgpu.load(factor.at[slot], layout=ROW)
                return [x * lax.broadcast_in_dim(decay, x.shape, [0]) for x in acc]

            def turn(i, carry):
                step, message = carry

                def block(_, carry):
                    step, message, acc = carry
                    slot, where = lax.rem(step, SLOTS), lax.rem(message, SLOTS)
                    acc = rescale(message, acc)

                    def product(refs):
                        quarters = [2 * group, 2 * group + 1]
                        for quarter, ref in zip(quarters, refs, strict=True):
                            value = k_tile.at[slot, :, pl.ds(quarter * QUARTER, QUARTER)]
                            plgpu.wgmma(ref, p_tile.at[where], value)
                        for pending, quarter in zip((1, 0), quarters, strict=True):
                            plgpu.wgmma_wait(pending)
                            plgpu.barrier_arrive(k_empty.at[slot * QUARTERS + quarter])

                    acc = pl.run_state(product)([plgpu.ACC.init(x) for x in acc])
                    plgpu.barrier_arrive(p_empty.at[where])
                    return step + 1, message + 1, acc

                acc = jnp.zeros((HEADS, QUARTER), jnp.float32)
                acc = [plgpu.layout_cast(acc, plgpu.Layout.WGMMA)] * 2
                step, message, acc = lax.fori_loop(0, total, block, (step, message, acc))
                acc = rescale(message, acc)
                plgpu.barrier_arrive(p_empty.at[lax.rem(message, SLOTS)])
                for part in range(HALF // 64):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    piece = acc[part // 2][:, 64 * (part % 2) : 64 * (part % 2) + 64].astype(
                        jnp.bfloat16
                    )
                    o_tile[group] = piece
                    plgpu.commit_smem()
                    columns = pl.ds(group * HALF + 64 * part, 64)
                    plgpu.copy_smem_to_gmem(o_tile.at[group], out.at[first + i * grid, :, columns])
                return step, message + 1

            lax.fori_loop(0, turns, turn, (jnp.int32(0), jnp.int32(0)))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == 3)
        def _gather():
            plgpu.set_max_registers(REGISTERS["gather"], action="decrease")

            ring = (k_tile, mask, k_full, k_empty)
            where = functools.partial(_place, first, grid, rows, total)
            stream = _Stream(kinds, sources, blocks, where)
            here = stream.index(0)
            carry = (here, *[stream.load(here, 0, step) for step in range(DEPTH)])
            lax.fori_loop(0, turns * total, functools.partial(stream.fill, ring), carry)

        @pl.when(group == 2)
        def _score():
            plgpu.set_max_registers(REGISTERS["score"], action="decrease")
            plgpu.copy_gmem_to_smem(q.at[first], q_tile, q_full)
            bias = plgpu.load(sink, layout=ROW, optimized=False) * LOG2E

            def turn(i, carry):
                step, message = carry
                plgpu.barrier_wait(q_full)

                def block(b, carry):
                    step, message, peak, mass = carry
                    slot = lax.rem(step, SLOTS)

                    def product(acc):
                        def quarter(n, _):
                            n = 2 * lax.rem(n, 2) + lax.div(n, 2)  # ORDER
                            plgpu.barrier_wait(k_full.at[slot * QUARTERS + n])
                            columns = pl.ds(n * QUARTER, QUARTER)
                            plgpu.wgmma(acc, q_tile.at[:, columns], k_tile.at[slot, :, columns].T)
                            return ()

                        lax.fori_loop(0, QUARTERS, quarter, ())
                        hidden = plgpu.load(mask.at[slot], layout=COLUMN)
                        return acc[...], hidden

                    acc = plgpu.ACC((HEADS, BLOCK), jnp.float32)
                    score, hidden = pl.run_scoped(product, acc)

                    @pl.when((b == total - 1) & (i + 1 < turns))
                    def _():
                        plgpu.copy_gmem_to_smem(q.at[first + (i + 1) * grid], q_tile, q_full)

                    hidden = lax.broadcast_in_dim(hidden, score.shape, [1])
                    score = score * (scale * LOG2E) + hidden
                    new = jnp.maximum(peak, score.max(axis=1))
                    prob = jnp.exp2(score - lax.broadcast_in_dim(new, score.shape, [0]))
                    decay = jnp.exp2(peak - new)
                    mass = mass * decay + prob.sum(axis=1)
                    put(message, decay, prob)
                    return step + 1, message + 1, new, mass

                def put(message, decay, prob=None):
                    slot = lax.rem(message, SLOTS)

                    @pl.when(message >= SLOTS)
                    def _():
                        plgpu.barrier_wait(p_empty.at[slot])

                    factor[slot] = decay
                    if prob is not None:
                        p_tile[slot] = prob.astype(jnp.bfloat16)
                    gather.publish()
                    plgpu.barrier_arrive(p_full.at[slot])

                peak = plgpu.layout_cast(jnp.full((HEADS,), FIRST_MAX, jnp.float32), ROW)
                mass = plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), ROW)
                carry = (step, message, peak, mass)
                step, message, peak, mass = lax.fori_loop(0, total, block, carry)
                mass = mass + jnp.exp2(bias - peak)
                inverse = jnp.where(mass > 0, 1.0 / mass, 0.0)
                put(message, inverse)
                return step, message + 1

            lax.fori_loop(0, turns, turn, (jnp.int32(0), jnp.int32(0)))

    tile = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=gather.TRANSFORMS)
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
            tile((SLOTS, BLOCK, WIDTH)),
            tile((SLOTS, HEADS, BLOCK)),
            tile((2, HEADS, 64)),
            plgpu.SMEM((SLOTS, BLOCK), jnp.float32),
            plgpu.SMEM((SLOTS, HEADS), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=SLOTS * QUARTERS),
            plgpu.Barrier(num_barriers=SLOTS * QUARTERS),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS, num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )


def _place(first, grid: int, rows: int, total: int, number):
    """(query row, block of its list) of a numbered block in the stream of one processor."""
    turn = lax.div(number, total)
    return jnp.minimum(first + turn * grid, rows - 1), number - turn * total


class _Stream:
    """The blocks of keys of all query rows of one processor, loaded ahead in registers."""

    def __init__(self, kinds, sources, blocks, where):
        self.kinds, self.sources, self.where = kinds, sources, where
        self.starts = [sum(blocks[:i]) for i in range(len(blocks))]

    def _choose(self, block, branches):
        """Calls the branch of the source that a block lies in."""
        if len(branches) == 1:
            return branches[0]()
        return lax.cond(block < self.starts[1], branches[0], branches[1])

    def index(self, number):
        """Loads the row numbers of a block."""
        row, block = self.where(jnp.int32(number))

        def load(source, start):
            slots = pl.ds((block - start) * BLOCK, BLOCK)
            return gather.load_index(source[1].at[row, slots])

        pairs = zip(self.sources, self.starts, strict=True)
        return self._choose(block, [functools.partial(load, *pair) for pair in pairs])

    def load(self, index, number, step: int):
        """Loads one of the first DEPTH units of a block."""
        _, block = self.where(jnp.int32(number))

        def load(kind, source):
            if not UNITS[kind]:
                return gather.nothing()
            each = UNITS[kind] // QUARTERS
            unit = ORDER[step // each] * each + step % each
            return launch.load(kind, index, source[0], unit)

        pairs = zip(self.kinds, self.sources, strict=True)
        return self._choose(block, [functools.partial(load, *pair) for pair in pairs])

    def fill(self, ring, number, carry):
        """Fills the ring's next slot with a block and its mask, and loads the start of the next."""
        k_tile, mask, k_full, k_empty = ring
        here, *loaded = carry
        slot = lax.rem(number, SLOTS)
        after = self.index(number + 1)
        tile = k_tile.at[slot]

        def free(quarter):
            @pl.when(number >= SLOTS)
            def _():
                plgpu.barrier_wait(k_empty.at[slot * QUARTERS + quarter])

        def full(quarter):
            gather.publish()
            plgpu.barrier_arrive(k_full.at[slot * QUARTERS + quarter])

        def copy(source):
            for quarter in ORDER:
                free(quarter)
                if quarter == ORDER[0]:
                    gather.write_mask(here, mask.at[slot])
                gather.copy_bfloat16(here, source[0][0], tile, quarter)
            for pending, quarter in zip((3, 2, 1, 0), ORDER, strict=True):
                gather.finish_copies(pending)
                full(quarter)
            return [self.load(after, number + 1, step) for step in range(DEPTH)]

        def expand(kind, source):
            kept, each = list(loaded), UNITS[kind] // QUARTERS
            for step in range(UNITS[kind]):
                quarter, last = ORDER[step // each], step % each == each - 1
                if step % each == 0:
                    free(quarter)
                if step == 0:
                    gather.write_mask(here, mask.at[slot])
                launch.store(kind, kept[step % DEPTH], tile, quarter * each + step % each)
                ahead = step + DEPTH
                if ahead < UNITS[kind]:
                    unit = ORDER[ahead // each] * each + ahead % each
                    kept[step % DEPTH] = launch.load(kind, here, source[0], unit)
                else:
                    kept[step % DEPTH] = self.load(after, number + 1, ahead - UNITS[kind])
                if last:
                    full(quarter)
            return kept

        def store(kind, source):
            return expand(kind, source) if UNITS[kind] else copy(source)

        _, block = self.where(number)
        pairs = zip(self.kinds, self.sources, strict=True)
        loaded = self._choose(block, [functools.partial(store, *pair) for pair in pairs])
        return after, *loaded
