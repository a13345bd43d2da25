"""The product that grouped_gemm and row_matmul share on Hopper: rows times stored weights, one K
order.

    out^T[64 weight rows, N rows] += W[64, 128] x^T[128, N]      for every 128 columns, in order

Weights are the left operand of wgmma: MXFP4 and FP8 are expanded in registers (registers.py),
float32 is split there into three bf16 terms (terms.py: three products a half step, the smallest
first), bf16 is read from shared memory. A persistent grid walks items (row tile, weight tile, part
of K). A row tile is up to N rows of one matrix; one warpgroup copies with TMA into two rings
(weights, rows), the others multiply. Rows that belong to another matrix are multiplied with the
tile and not stored. Blocks of a cluster take neighbouring weight tiles and share the row ring.
Several weights may multiply the same rows in one launch: then the weight tiles of one follow those
of the other, and each has a result of its own.

The order of K is the same for every tile shape, so a row has the same bits however many rows there
are.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels import grouping, registers, stores
from pallas_kernels import terms as float32
from pallas_kernels.several import Several
from pallas_kernels.tiles import (
    COPY_REGISTERS,
    STEP,
    STORE_ROWS,
    Plan,
    Product,
    fit,
    parts,
)

plgpu: Any = mosaic_gpu  # its decorators and transforms are beyond the type checker


def multiply(
    x: Float[Array, "rows k"],
    weights: Shaped[Array, "weight_rows stored"],
    scales: Shaped[Array, " bytes"],
    group_sizes: Int32[Array, " experts"] | None,
    route: Float[Array, " rows"] | None,
    product: Product,
    plan: Plan,
    row_scale: Float[Array, " rows"] | None = None,
    *,
    groups: int = 1,
    ordered: bool = False,
) -> Float[Array, "split_rows out"]:
    """x times the matrices stacked in `weights`, rows sorted by matrix.

    Args:
        x: bf16, or e4m3 with `row_scale`.
        weights: uint8, bf16 or f32, the stored rows of every matrix one after the other.
        scales: the stored scale bytes, flat; ignored for bf16 and f32.
        group_sizes: rows of each matrix; None for `groups` matrices with as many rows each.
        route: float32 routing weights of SwiGLU, else None; taken as zero past the groups.
        row_scale: float32 power of two of every e4m3 row.
        ordered: the columns of x are already in the order of K of these weights.

    Returns:
        [splits * rows, out]; rows past the groups are zero.
    """
    if group_sizes is None:
        tiles = grouping.equal_groups(groups, product.rows // groups, plan.rows)
    else:
        tiles = grouping.row_tiles(group_sizes, rows=product.rows, height=plan.rows)
    if ordered:
        blocks = x.reshape(product.rows, product.k // 64, 64)
    else:
        blocks = registers.order_columns(x, product.kind, e4m3=product.e4m3)
    short = max(0, plan.rows - product.rows)
    blocks = jnp.pad(blocks, ((0, short), (0, 0), (0, 0)))
    pad = (0, plan.rows)
    if route is None:
        route = jnp.zeros((32,))
    else:
        real = jnp.arange(product.rows + plan.rows) < tiles[1, -1]
        route = jnp.where(real, jnp.pad(route, pad), 0.0)
    row_scale = jnp.zeros((32,)) if row_scale is None else jnp.pad(row_scale, pad)
    kernel = _kernel(product, fit(plan, product), (product.width,))
    if product.kind == "fp4":
        scales = scales.reshape(-1, 128)
    return kernel(blocks, (weights,), (scales,), route, row_scale, tiles)[0]


def multiply_by_several(
    x: Float[Array, "rows k"],
    weights: tuple[Array, ...],
    scales: tuple[Array, ...],
    product: Product,
    plan: Plan,
) -> tuple[Array, ...]:
    """x times each of the weights as `multiply` does it, in one launch: the same bits.

    Args:
        x: bf16.
        weights: FP8, bf16 or f32 matrices [out, K] of one kind; `scales` as there, one for each.
        product: of x and the first weight.

    Returns:
        [splits * rows, out] of every weight.
    """
    tiles, unused = grouping.equal_groups(1, product.rows, plan.rows), jnp.zeros((32,))
    blocks = registers.order_columns(x, product.kind)
    blocks = jnp.pad(blocks, ((0, max(0, plan.rows - product.rows)), (0, 0), (0, 0)))
    kernel = _kernel(product, fit(plan, product), tuple(w.shape[0] for w in weights))
    return kernel(blocks, weights, scales, unused, unused, tiles)


@functools.lru_cache(maxsize=64)
def _kernel(product: Product, plan: Plan, widths: tuple[int, ...]):
    # One callable a shape, so that layers of one shape are traced and lowered once.
    n, height, kind = plan.rows, plan.height, product.kind
    paired = product.limit is not None
    owned = registers.Rows(paired, height)
    tile_width = height // 2 if paired else height
    several = Several(widths, tile_width)
    steps, stages = product.k // STEP // product.splits, parts(plan, product)
    row_blocks = 2 // stages
    copies, halves = 2 if paired else 1, 1 if kind == "fp4" else 2
    copy_rows = height // copies
    pitch = product.k // 32 if kind == "fp4" else -(-product.k // 32)
    block_rows = [-(-width // 32) for width in widths]
    scale_lines = copy_rows * pitch // 128 if kind == "fp4" else 1
    products = float32.TERMS if kind == "f32" else 1
    wide = product.out_dtype == jnp.float32
    store_rows = min(n, STORE_ROWS // 2 if wide else STORE_ROWS)
    clusters = plan.blocks // plan.cluster
    stored = STEP // 2 if kind == "fp4" else STEP  # elements of a stored row in a step
    shared = dict(collective_axes=("member",)) if plan.cluster > 1 else {}

    def walk(tiles, one, start):
        """Runs one(item, carry) over this block's items."""
        block, member = lax.axis_index("block"), lax.axis_index("member")
        per_tile = several.tiles // plan.cluster * product.splits
        items = tiles[0, tiles.shape[1] - 1] * per_tile
        mine = lax.div(items - block + clusters - 1, clusters)

        def body(i, carry):
            index = block + i * clusters
            tile = lax.div(index, per_tile)
            rest = lax.rem(index, per_tile)
            m = lax.div(rest, product.splits) * plan.cluster + member
            split = lax.rem(rest, product.splits)
            return one(i, tiles[0, tile], tiles[1, tile], tiles[2, tile], m, split, carry)

        return lax.fori_loop(0, mine, body, start)

    def kernel(x, weights, scales, route, row_scale, tiles, *rest):
        results, scratch = rest[: len(widths)], rest[len(widths) :]
        row_smem, weight_smem, scale_smem, out_smem, *barriers = scratch
        row_full, row_empty, weight_full, weight_empty, scale_full, scale_empty = barriers
        group = lax.axis_index("group")
        single_rows, tiled_rows = row_smem

        def copy_item(i, matrix, first, size, m, split, at):
            which, m = several.place(m)
            base = jnp.maximum(matrix, 0) * product.matrix + m * tile_width
            if kind == "fp4":
                scale_slot = lax.rem(i, 2)

                @pl.when(i >= 2)
                def _():
                    plgpu.barrier_wait(scale_empty.at[scale_slot])

                for c in range(copies):
                    line = lax.div((base + c * product.width) * pitch, 128)
                    plgpu.copy_gmem_to_smem(
                        scales[0].at[pl.ds(line, scale_lines)],
                        scale_smem.at[scale_slot, pl.ds(c * scale_lines, scale_lines)],
                        scale_full.at[scale_slot],
                    )

            def step(s, at):
                slot = lax.rem(at, plan.weight_stages)
                column = split * steps + s

                @pl.when(at >= plan.weight_stages)
                def _():
                    plgpu.barrier_wait(weight_empty.at[slot])

                def copy(number, slot=slot):
                    for c in range(copies):
                        source = pl.ds(base + c * product.width, copy_rows)
                        for h in range(halves):
                            plgpu.copy_gmem_to_smem(
                                weights[number].at[source, pl.ds(column * stored + h * 64, 64)],
                                weight_smem.at[slot, h, pl.ds(c * copy_rows, copy_rows)],
                                weight_full.at[slot],
                            )

                several.run(which, copy)
                for part in range(stages):
                    at_row = at * stages + part
                    slot = lax.rem(at_row, plan.row_stages)

                    @pl.when(at_row >= plan.row_stages)
                    def _(slot=slot):
                        plgpu.barrier_wait(row_empty.at[slot])

                    for b in range(row_blocks):
                        plgpu.copy_gmem_to_smem(
                            x.at[pl.ds(first, n), (column * stages + part) * row_blocks + b],
                            single_rows.at[slot, b],
                            row_full.at[slot],
                            **shared,
                        )
                return at + 1

            return lax.fori_loop(0, jnp.where(matrix >= 0, steps, 0), step, at)

        def compute_item(i, matrix, first, size, m, split, at):
            which, m = several.place(m)
            scale_at = lax.rem(i, 2) * (copies * scale_lines * 128)
            lookup: dict[str, Any] = dict(rows=owned, pitch=pitch)
            largest = None
            if kind == "fp4":
                plgpu.barrier_wait(scale_full.at[lax.rem(i, 2)])
            if product.e4m3:
                largest = registers.row_exponents(scale_smem, scale_at, **lookup)

            def left_operands(slot, half, column, packed):
                """Weights of the products of half a step in their order, and whether the slot is
                free again."""
                if kind == "fp4":
                    words, tables = packed
                    left = registers.expand_fp4(words, tables, half, e4m3=product.e4m3)
                    return (left,), half == 0
                codes = weight_smem.at[slot, half]
                if kind == "bf16":
                    return (codes.at[pl.ds(group * 64, 64)],), False
                if kind == "f32":
                    return float32.split(codes, rows=owned)[::-1], half == 1
                block = jnp.maximum(matrix, 0) * copies * block_rows[0] + m * (tile_width // 32)
                start = block * pitch + column * 4 + 2 * half
                starts = (start, start + (block_rows[0] * pitch if paired else 0))
                # Rows that a last tile is short of must not look up scales past the end.
                last = None
                if any(width % tile_width for width in widths):
                    last = several.value(which, block_rows) - 1 - m * (tile_width // 32)
                left = registers.expand_fp8(codes, scales, starts, last, which, **lookup)
                return (left,), half == 1

            def accumulate(acc):
                def release(at, half, when):
                    """Frees what the products of step `at` up to this one have read.

                    Predicates and early waits rather than branches: a branch between two products
                    in flight makes the compiler wait for the first.
                    """
                    at = at + plan.row_stages * plan.weight_stages  # no negative remainders
                    if half or stages == 2:
                        row_slot = lax.rem(at * stages + half * stages // 2, plan.row_stages)
                        plgpu.barrier_arrive(row_empty.at[row_slot], predicate=when)
                    if kind == "bf16" and half:
                        slot = lax.rem(at, plan.weight_stages)
                        plgpu.barrier_arrive(weight_empty.at[slot], predicate=when)

                def step(s, at):
                    slot = lax.rem(at, plan.weight_stages)
                    column = split * steps + s
                    plgpu.barrier_wait(weight_full.at[slot])
                    packed = None
                    if kind == "fp4":
                        start = scale_at + column * 4
                        packed = registers.load_fp4(
                            weight_smem.at[slot, 0], scale_smem, start, largest, **lookup
                        )
                    row_slots = [lax.rem(at * stages + p, plan.row_stages) for p in range(stages)]
                    for half in range(2):
                        # Half a step stays in flight while the next left operands are expanded.
                        plgpu.wgmma_wait(products)
                        release(at - 1, half, s > 0)
                        lefts, free = left_operands(slot, half, column, packed)
                        if free:
                            plgpu.barrier_arrive(weight_empty.at[slot])
                        if half == 0:
                            for row_slot in row_slots:
                                plgpu.barrier_wait(row_full.at[row_slot])
                        right = tiled_rows.at[row_slots[half * stages // 2], half % row_blocks]
                        for left in lefts:
                            plgpu.wgmma(acc, left, right.T)
                    return at + 1

                def turn(t, at):
                    for c in range(plan.unroll):
                        at = step(t * plan.unroll + c, at)
                    return at

                todo = jnp.where(matrix >= 0, steps, 0)
                turns = lax.div(todo, plan.unroll)
                end = lax.fori_loop(0, turns, turn, at)
                if steps % plan.unroll:
                    end = lax.fori_loop(turns * plan.unroll, todo, step, end)
                value = acc[...]
                for half in range(2):
                    release(end - 1, half, matrix >= 0)
                return value, end

            acc, at = pl.run_scoped(accumulate, plgpu.ACC((64, n), jnp.float32))
            if kind == "fp4":
                plgpu.barrier_arrive(scale_empty.at[lax.rem(i, 2)])
            if largest is not None:
                acc = stores.rescale(acc, largest, row_scale, first)
            write(acc, first, size, which, m, split)
            return at

        def write(acc, first, size, which, m, split):
            for start in range(0, n, store_rows):
                columns = slice(start, min(start + store_rows, n))
                out = out_smem.at[group]
                shift = registers.SHIFT if kind in ("fp4", "fp8") and not product.e4m3 else 0
                if product.limit is not None:
                    stores.store_swiglu(
                        acc, route, out.at[0], first,
                        columns=columns, limit=product.limit, shift=shift,
                    )  # fmt: skip
                else:
                    target = out if wide else out.at[0]
                    stores.store_plain(acc, target, columns=columns, shift=shift)
                left = jnp.minimum(size - start, columns.stop - start)
                row = split * product.rows + first + start

                def copy(number, out=out, row=row, left=left):
                    for piece in range(2 if wide else 1):
                        channel = m * tile_width + group * (32 if paired else 64) + piece * 32
                        target, width = results[number], widths[number]
                        stores.copy_rows(out.at[piece], target, row, left, channel, width=width)

                several.run(which, copy)

        @pl.when(group == plan.groups)
        def _():
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            done = walk(tiles, copy_item, jnp.int32(0)) * stages
            # A block must outlive what the others of its cluster still signal to it.
            for last in range(plan.row_stages):
                stage = done - plan.row_stages + last

                @pl.when(stage >= 0)
                def _(stage=stage):
                    plgpu.barrier_wait(row_empty.at[lax.rem(stage, plan.row_stages)])

        @pl.when(group < plan.groups)
        def _():
            plgpu.set_max_registers(plan.registers, action="increase")
            walk(tiles, compute_item, jnp.int32(0))

    swizzle = plgpu.SwizzleTransform(64 if product.e4m3 else 128)
    row_dtype = jnp.float8_e4m3fn if product.e4m3 else jnp.bfloat16
    row_shape = (plan.row_stages, row_blocks, n, 64)
    single, eight = plgpu.TilingTransform((1, 64)), plgpu.TilingTransform((8, 64))
    weight_shape = (plan.weight_stages, halves, height, 64)
    weight_dtype = {"bf16": jnp.bfloat16, "f32": jnp.float32}.get(kind, jnp.uint8)
    line = 32 if wide or paired else 64
    out_shape = (plan.groups, 2 if wide else 1, store_rows, line)
    staged = stores.PLAIN_32 if wide else stores.PAIRED_16 if paired else stores.PLAIN_16
    row_empty = dict(num_arrivals=plan.groups, num_barriers=plan.row_stages)
    if plan.cluster > 1:
        row_empty_barrier = plgpu.ClusterBarrier(collective_axes=("member",), **row_empty)
    else:
        row_empty_barrier = plgpu.Barrier(**row_empty)
    lines = product.splits * product.rows
    out_type = tuple(jax.ShapeDtypeStruct((lines, n), product.out_dtype) for n in widths)
    return plgpu.kernel(
        kernel,
        kernel_name=f"product_{kind}_{'_'.join(map(str, widths))}x{product.k}",
        out_type=out_type,
        grid=(clusters,),
        grid_names=("block",),
        cluster=(plan.cluster,),
        cluster_names=("member",),
        num_threads=plan.groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        scratch_types=[
            plgpu.RefUnion(
                plgpu.SMEM(row_shape, row_dtype, transforms=(single, swizzle)),
                plgpu.SMEM(row_shape, row_dtype, transforms=(eight, swizzle)),
            ),
            plgpu.SMEM(weight_shape, weight_dtype, transforms=registers.CODES[kind]),
            plgpu.SMEM((2, copies * scale_lines, 128), jnp.uint8),
            plgpu.SMEM(out_shape, product.out_dtype, transforms=staged),
            plgpu.Barrier(num_arrivals=row_blocks, num_barriers=plan.row_stages),
            row_empty_barrier,
            plgpu.Barrier(num_arrivals=copies * halves, num_barriers=plan.weight_stages),
            plgpu.Barrier(num_arrivals=plan.groups, num_barriers=plan.weight_stages),
            plgpu.Barrier(num_arrivals=copies, num_barriers=2),
            plgpu.Barrier(num_arrivals=plan.groups, num_barriers=2),
        ],
    )
