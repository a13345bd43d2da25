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
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.mla_attention import gather
from pallas_kernels.mla_attention.reference import FIRST_MAX, Rows

HEADS = 64
BLOCK = gather.BLOCK
WIDTH = gather.WIDTH
HALF = WIDTH // 2
PART = 128
SLOTS = 2
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
LOG2E = math.log2(math.e)
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
    rows_per_slot: int = 1,
) -> Float[Array, "r h d"]:
    """Attention of every query row over its own keys; arguments as in the package's `attend`.

    Raises:
        NotImplementedError: q is not bfloat16 [r, <= 64 heads, 512], or a row format has no gather.
    """
    del rows_per_slot  # rows of a slot meet in the L2 cache, because neighbours run together
    rows, heads, width = q.shape
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"queries in bfloat16, got {q.dtype}")
    if width != WIDTH:
        raise NotImplementedError(f"{WIDTH} channels, got {width}")
    if heads > HEADS:
        raise NotImplementedError(f"at most {HEADS} heads, got {heads}")
    if selected is None or selected_index is None or selected_index.shape[1] == 0:
        sources = [(window, window_index)]
    elif _first(selected).shape[0] == 0:
        sources = [(window, window_index)]
    else:
        sources = [(window, window_index), (selected, selected_index)]
    sources = [(rows_, _whole_blocks(index)) for rows_, index in sources if index.shape[1]]
    kinds = tuple(_kind(rows_) for rows_, _ in sources)
    if rows == 0 or not sources:
        return jnp.zeros_like(q)
    padded = q if heads == HEADS else jnp.pad(q, ((0, 0), (0, HEADS - heads), (0, 0)))
    sink = sink if heads == HEADS else jnp.pad(sink, (0, HEADS - heads))
    blocks = tuple(index.shape[1] // BLOCK for _, index in sources)
    flat = jax.tree.leaves(sources)
    out = _program(rows, kinds, blocks, scale, min(_processors(), rows))(padded, sink, *flat)
    return out if heads == HEADS else out[:, :heads]


def _first(rows: Rows) -> Array:
    return rows[0] if isinstance(rows, tuple) else rows


def _kind(rows: Rows) -> str:
    if not isinstance(rows, tuple):
        if rows.dtype != jnp.bfloat16:
            raise NotImplementedError(f"plain rows in bfloat16, got {rows.dtype}")
        return "bfloat16"
    values, scales = rows
    if values.dtype == jnp.uint8 and scales.dtype == jnp.float8_e4m3fn:
        return "e2m1"
    if values.dtype == jnp.float8_e4m3fn and scales.dtype == jnp.float8_e8m0fnu:
        return "e4m3"
    raise NotImplementedError(f"rows stored as {values.dtype} with {scales.dtype} scales")


def _whole_blocks(index: Array) -> Array:
    pad = -index.shape[1] % BLOCK
    return jnp.pad(index, ((0, 0), (0, pad)), constant_values=-1) if pad else index


def _processors() -> int:
    device = jax.sharding.get_abstract_mesh().abstract_device
    count = getattr(device, "num_cores", None) or getattr(jax.devices()[0], "core_count", None)
    return int(count or 132)


@functools.lru_cache(maxsize=64)
def _program(rows: int, kinds: tuple[str, ...], blocks: tuple[int, ...], scale: float, grid: int):
    """The compiled-once callable for one shape: (q, sink, *sources) -> out."""
    total = sum(blocks)
    counts = [3 if kind != "bfloat16" else 2 for kind in kinds]

    def body(q, sink, *refs):
        sources, rest = [], list(refs)
        for count in counts:
            sources.append((rest[: count - 1], rest[count - 1]))
            rest = rest[count:]
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
                        for part, ref in enumerate(refs):
                            columns = pl.ds(group * HALF + part * PART, PART)
                            value = k_tile.at[slot, :, columns]
                            plgpu.wgmma(ref, p_tile.at[where], value)

                    acc = pl.run_state(product)([plgpu.ACC.init(x) for x in acc])
                    plgpu.barrier_arrive(p_empty.at[where])
                    plgpu.barrier_arrive(k_empty.at[slot])
                    return step + 1, message + 1, acc

                acc = jnp.zeros((HEADS, PART), jnp.float32)
                acc = [plgpu.layout_cast(acc, plgpu.Layout.WGMMA)] * (HALF // PART)
                step, message, acc = lax.fori_loop(0, total, block, (step, message, acc))
                acc = rescale(message, acc)
                plgpu.barrier_arrive(p_empty.at[lax.rem(message, SLOTS)])
                for part in range(HALF // 64):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    piece = acc[part // 2][:, 64 * (part % 2) : 64 * (part % 2) + 64].astype(jnp.bfloat16)
                    o_tile[group] = piece
                    plgpu.commit_smem()
                    columns = pl.ds(group * HALF + 64 * part, 64)
                    plgpu.copy_smem_to_gmem(
                        o_tile.at[group], out.at[first + i * grid, :, columns]
                    )
                return step, message + 1

            lax.fori_loop(0, turns, turn, (jnp.int32(0), jnp.int32(0)))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == 3)
        def _gather():
            plgpu.set_max_registers(REGISTERS["gather"], action="decrease")

            def turn(i, step):
                row = first + i * grid
                for kind, (parts, index), count in zip(kinds, sources, blocks, strict=True):
                    one = functools.partial(_gather_block, kind, parts, index, row)
                    ring = (k_tile, mask, k_full, k_empty)
                    step = lax.fori_loop(0, count, functools.partial(one, ring), step)
                return step

            lax.fori_loop(0, turns, turn, jnp.int32(0))

        @pl.when(group == 2)
        def _score():
            plgpu.set_max_registers(REGISTERS["score"], action="decrease")
            bias = plgpu.load(sink, layout=ROW, optimized=False) * LOG2E

            def turn(i, carry):
                step, message = carry
                plgpu.copy_gmem_to_smem(q.at[first + i * grid], q_tile, q_full)
                plgpu.barrier_wait(q_full)

                def block(_, carry):
                    step, message, peak, mass = carry
                    slot = lax.rem(step, SLOTS)
                    plgpu.barrier_wait(k_full.at[slot])

                    def product(acc):
                        plgpu.wgmma(acc, q_tile, k_tile.at[slot].T)
                        return acc[...]

                    score = pl.run_scoped(product, plgpu.ACC((HEADS, BLOCK), jnp.float32))
                    hidden = plgpu.load(mask.at[slot], layout=COLUMN)
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
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS, num_arrivals=2),
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


def _gather_block(kind, parts, index, row, ring, block, step):
    """Fills the ring's next slot with one block of keys and its mask."""
    k_tile, mask, k_full, k_empty = ring
    slot = lax.rem(step, SLOTS)
    found = gather.load_index(index.at[row, pl.ds(block * BLOCK, BLOCK)])
    loaded = None
    if kind == "e2m1":
        loaded = gather.load_e2m1(found, *parts)
    elif kind == "e4m3":
        loaded = gather.load_e4m3(found, *parts, half=0)

    @pl.when(step >= SLOTS)
    def _():
        plgpu.barrier_wait(k_empty.at[slot])

    gather.write_mask(found, mask.at[slot])
    if kind == "bfloat16":
        gather.copy_bfloat16(found, parts[0], k_tile.at[slot])
        gather.finish_copies()
    elif kind == "e2m1":
        gather.store_e2m1(*loaded, k_tile.at[slot])
    else:
        second = gather.load_e4m3(found, *parts, half=1)
        gather.store_e4m3(*loaded, k_tile.at[slot], half=0)
        gather.store_e4m3(*second, k_tile.at[slot], half=1)
    gather.publish()
    plgpu.barrier_arrive(k_full.at[slot])
    return step + 1
