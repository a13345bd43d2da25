"""The product that grouped_gemm and row_matmul share on Blackwell: tcgen05 with accumulators in
tensor memory.

    out[128 rows, C channels] += x[128, 128] W[C, 128]^T      for every 128 columns, in order

Rows are the left operand, weights the right one; one tile shape serves every number of rows, so a
row's bits never depend on it. Three warpgroups: one copies with TMA, one widens FP4 weights
(widen.py), one issues the products and stores. With e4m3 rows the product is block-scaled (mxfp8):
weights and rows keep their e8m0 scales of 32 columns, which is the released code's arithmetic
without another rounding. With bf16 rows FP4 weights become bf16. bf16 weights are multiplied as
they are; gate and up have an accumulator each.

Compiled and its machine code checked for B200 without a GPU; not run on one. `portable` replaces
what interpret mode cannot run (register code, aliased buffers, block scales) so that the schedule
itself is tested on a CPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels import formats, grouping, stores, widen
from pallas_kernels.tiles import COPY_REGISTERS, STEP, Product

plgpu: Any = mosaic_gpu  # its decorators and transforms are beyond the type checker

TILE = 128


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a product is cut.

    Attributes:
        channels: output channels of a tile and matrix; 128 for block-scaled products.
        stages: depth of the ring.
        blocks: persistent blocks of the grid.
        portable: runs in interpret mode; tiles must then start at multiples of 8 rows.
    """

    channels: int
    stages: int
    blocks: int = 148
    portable: bool = False


def scale_tiles(scales: Shaped[Array, "rows groups"]) -> Shaped[Array, "tiles steps 32 16"]:
    """e8m0 bytes of whole tiles of 128 rows in the order the block-scaled product reads."""
    rows, groups = scales.shape
    tiles = scales.reshape(rows // 128, 4, 32, groups // 4, 4).transpose(0, 3, 2, 1, 4)
    return tiles.reshape(rows // 128, groups // 4, 32, 16)


def multiply(
    x: Float[Array, "rows k"],
    weights: Shaped[Array, "weight_rows stored"],
    scales: Shaped[Array, " bytes"],
    group_sizes: Int32[Array, " experts"] | None,
    route: Float[Array, " rows"] | None,
    product: Product,
    plan: Plan,
) -> Float[Array, "rows out"]:
    """x times the matrices stacked in `weights`, rows sorted by matrix.

    Args:
        x: bf16; quantised here for an e4m3 product.
        weights, scales: as stored, scales as bytes.
        group_sizes: rows of each matrix; None for a single matrix.
        route: float32 routing weights of SwiGLU, else None; taken as zero past the groups.
    """
    if product.rows == 0:
        raise NotImplementedError("no rows")
    if product.k % STEP:
        raise NotImplementedError(f"K = {product.k} is not a multiple of {STEP}")
    if product.width % plan.channels:
        raise NotImplementedError(f"{product.width} channels are not a multiple of {plan.channels}")
    if group_sizes is None:
        tiles = grouping.equal_groups(1, product.rows, TILE)
    else:
        tiles = grouping.row_tiles(group_sizes, rows=product.rows, height=TILE)
    padded = jnp.pad(x, ((0, TILE), (0, 0)))
    row_scales = jnp.zeros((1, 1, 32, 16), jnp.float8_e8m0fnu)
    weight_scales = scales
    if product.e4m3:
        padded, scale = formats.quantise_activations(padded)
        exponent = (lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.uint8)
        rows = jnp.minimum(tiles[1, :-1, None] + jnp.arange(TILE)[None, :], product.rows + TILE - 1)
        row_scales = scale_tiles(exponent[rows.reshape(-1)])
        row_scales = lax.bitcast_convert_type(row_scales, jnp.float8_e8m0fnu)
        weight_scales = scale_tiles(scales.reshape(-1, product.k // 32))
        weight_scales = lax.bitcast_convert_type(weight_scales, jnp.float8_e8m0fnu)
    elif product.kind == "fp4":
        padded = widen.order_columns(padded)
        weight_scales = scales.reshape(-1, 128)
    if not product.e4m3:
        padded = padded.reshape(-1, product.k // 64, 64)
    if route is None:
        route = jnp.zeros((2 * TILE,))
    else:
        real = jnp.arange(product.rows + TILE) < tiles[1, -1]
        route = jnp.where(real, jnp.pad(route, (0, TILE)), 0.0)
    args = (padded, weights, weight_scales, row_scales, route, tiles)
    return _kernel(product, plan)(*args)


@functools.lru_cache(maxsize=64)
def _kernel(product: Product, plan: Plan):
    # One callable a shape, so that layers of one shape are traced and lowered once.
    kind, scaled, limit = product.kind, product.e4m3, product.limit
    paired = limit is not None
    c, members = plan.channels, 2 if paired else 1
    steps, weight_tiles = product.k // STEP, product.width // c
    halves = 1 if scaled else 2  # 128 bytes of a row: 128 columns of e4m3, 64 of bf16
    line, dtype = (128, jnp.float8_e4m3fn) if scaled else (64, jnp.bfloat16)
    pitch = product.k // 32
    scale_lines = c * pitch // 128 if kind == "fp4" and not scaled else 1
    expand = widen.widen_plainly if plan.portable else widen.widen
    out_item = jnp.dtype(product.out_dtype).itemsize
    out_line = 32 if paired else 128 // out_item
    out_transforms = (
        plgpu.TilingTransform((8, out_line)),
        plgpu.SwizzleTransform(out_line * out_item),
    )

    def share(tiles):
        """Items of this block."""
        items = tiles[0, tiles.shape[1] - 1] * weight_tiles - lax.axis_index("block")
        return lax.div(items + plan.blocks - 1, plan.blocks)

    def walk(tiles, one, start):
        """Runs one(item, carry) over this block's items."""
        block = lax.axis_index("block")

        def body(i, carry):
            index = block + i * plan.blocks
            tile = lax.div(index, weight_tiles)
            m = lax.rem(index, weight_tiles)
            return one(i, tile, tiles[0, tile], tiles[1, tile], tiles[2, tile], m, carry)

        return lax.fori_loop(0, share(tiles), body, start)

    def kernel(x, weights, weight_scales, row_scales, route, tiles, result, *scratch):
        (rows_union, codes, wide, item_scales, step_scales, out, acc, scale_tmem,
         full, wide_full, empty, acc_full, scale_full, scale_empty) = scratch  # fmt: skip
        single_rows, tiled_rows = rows_union if not plan.portable else (rows_union, rows_union)
        group = lax.axis_index("group")

        def copy_item(i, tile, matrix, first, size, m, at):
            base = jnp.maximum(matrix, 0) * product.matrix + m * c
            if kind == "fp4" and not scaled:
                slot = lax.rem(i, 2)
                pl.when(i >= 2)(lambda: plgpu.barrier_wait(scale_empty.at[slot]))
                for member in range(members):
                    at_line = lax.div((base + member * product.width) * pitch, 128)
                    plgpu.copy_gmem_to_smem(
                        weight_scales.at[pl.ds(at_line, scale_lines)],
                        item_scales.at[slot, pl.ds(member * scale_lines, scale_lines)],
                        scale_full.at[slot],
                    )

            def step(s, at):
                slot = lax.rem(at, plan.stages)
                pl.when(at >= plan.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                for member in range(members):
                    source = pl.ds(base + member * product.width, c)
                    if kind == "fp4":
                        plgpu.copy_gmem_to_smem(
                            weights.at[source, pl.ds(s * 64, 64)],
                            codes.at[slot, member],
                            full.at[slot],
                        )
                    else:
                        for h in range(2):
                            plgpu.copy_gmem_to_smem(
                                weights.at[source, pl.ds(s * STEP + h * 64, 64)],
                                wide.at[slot, member, h],
                                full.at[slot],
                            )
                    if scaled:
                        tile_at = lax.div(base + member * product.width, 128)
                        plgpu.copy_gmem_to_smem(
                            weight_scales.at[pl.ds(tile_at, 1), pl.ds(s, 1)],
                            step_scales.at[slot, 1 + member],
                            full.at[slot],
                        )
                if scaled:
                    plgpu.copy_gmem_to_smem(
                        row_scales.at[pl.ds(tile, 1), pl.ds(s, 1)],
                        step_scales.at[slot, 0],
                        full.at[slot],
                    )
                    plgpu.copy_gmem_to_smem(
                        x.at[pl.ds(first, TILE), pl.ds(s * STEP, STEP)],
                        single_rows.at[slot, 0],
                        full.at[slot],
                    )
                else:
                    for h in range(2):
                        plgpu.copy_gmem_to_smem(
                            x.at[pl.ds(first, TILE), s * 2 + h],
                            single_rows.at[slot, h],
                            full.at[slot],
                        )
                return at + 1

            return lax.fori_loop(0, jnp.where(matrix >= 0, steps, 0), step, at)

        def widen_item(i, tile, matrix, first, size, m, at):
            if not scaled:
                plgpu.barrier_wait(scale_full.at[lax.rem(i, 2)])

            def step(s, at):
                slot = lax.rem(at, plan.stages)
                plgpu.barrier_wait(full.at[slot])
                for member in range(members):
                    start = member * scale_lines * 128 + s * 4
                    scales = item_scales.at[lax.rem(i, 2)]
                    target = wide.at[slot, member, 0] if scaled else wide.at[slot, member]
                    expand(codes.at[slot, member], scales, target, start, pitch=pitch)
                plgpu.commit_smem()
                plgpu.barrier_arrive(wide_full.at[slot])
                return at + 1

            at = lax.fori_loop(0, jnp.where(matrix >= 0, steps, 0), step, at)
            if not scaled:
                plgpu.barrier_arrive(scale_empty.at[lax.rem(i, 2)])
            return at

        def multiply_item(i, tile, matrix, first, size, m, at):
            def step(s, at):
                slot = lax.rem(at, plan.stages)
                plgpu.barrier_wait(full.at[slot])
                if kind == "fp4":
                    plgpu.barrier_wait(wide_full.at[slot])
                factors = [{}] * members
                if scaled:
                    for part in range(1 + members):
                        plgpu.async_copy_scales_to_tmem(
                            step_scales.at[slot, part], scale_tmem[part]
                        )
                    factors = [
                        dict(a_scale=scale_tmem[0], b_scale=scale_tmem[1 + member])
                        for member in range(members)
                    ]
                for member in range(members):
                    for h in range(halves):
                        plgpu.tcgen05_mma(
                            acc[member],
                            tiled_rows.at[slot, h],
                            wide.at[slot, member, h].T,
                            accumulate=(s > 0) | (h > 0),
                            **factors[member],
                        )
                plgpu.tcgen05_commit_arrive(empty.at[slot])
                return at + 1

            at = lax.fori_loop(0, jnp.where(matrix >= 0, steps, 0), step, at)
            plgpu.tcgen05_commit_arrive(acc_full)
            plgpu.barrier_wait(acc_full)
            write(matrix, first, size, m)
            return at

        def write(matrix, first, size, m):
            shift = 2.0**32 if kind == "fp4" and not scaled else 1.0
            for start in range(0, c, out_line):
                columns = pl.ds(start, out_line)
                shape = (TILE, out_line)
                real = lax.broadcast_in_dim(matrix >= 0, shape, ())
                zero = jnp.zeros(shape, jnp.float32)
                values = [
                    lax.select(real, plgpu.async_load_tmem(a.at[:, columns]), zero) * shift
                    for a in acc
                ]
                value = values[0]
                if limit is not None:
                    gate, up = (v.astype(jnp.bfloat16).astype(jnp.float32) for v in values)
                    gate = jnp.minimum(gate, limit)
                    up = jnp.maximum(jnp.minimum(up, limit), -limit)
                    weight = plgpu.load(
                        route.at[pl.ds(first, TILE)],
                        layout=plgpu.Layout.TCGEN05.reduce(1),
                        optimized=False,
                    )
                    weight = lax.broadcast_in_dim(weight, gate.shape, (0,))
                    value = gate / (1.0 + jnp.exp(-gate)) * up * weight
                out[...] = value.astype(product.out_dtype)
                plgpu.wait_load_tmem()
                channel = m * c + start
                if plan.portable:
                    _store_ladder(out, result, first, size, channel, out_line)
                else:
                    stores.copy_rows(
                        out, result, first, size, channel,
                        width=product.width, transforms=out_transforms,
                    )  # fmt: skip

        @pl.when(group == 0)
        def _():
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            done = walk(tiles, copy_item, jnp.int32(0))
            for last in range(plan.stages):
                stage = done - plan.stages + last

                @pl.when(stage >= 0)
                def _(stage=stage):
                    plgpu.barrier_wait(empty.at[lax.rem(stage, plan.stages)])

            for last in range(2 if kind == "fp4" and not scaled else 0):
                item = share(tiles) - 2 + last

                @pl.when(item >= 0)
                def _(item=item):
                    plgpu.barrier_wait(scale_empty.at[lax.rem(item, 2)])

        @pl.when(group == 1)
        def _():
            if kind == "fp4":
                walk(tiles, widen_item, jnp.int32(0))

        @pl.when(group == 2)
        def _():
            plgpu.set_max_registers(232, action="increase")
            walk(tiles, multiply_item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    swizzle = plgpu.SwizzleTransform(128)
    single, eight = plgpu.TilingTransform((1, line)), plgpu.TilingTransform((8, line))
    row_shape = (plan.stages, halves, TILE, line)
    tiled = plgpu.SMEM(row_shape, dtype, transforms=(eight, swizzle))
    rows = tiled
    if not plan.portable:
        rows = plgpu.RefUnion(plgpu.SMEM(row_shape, dtype, transforms=(single, swizzle)), tiled)
    e8m0 = jnp.float8_e8m0fnu
    parts = 1 + members
    scale_tmem = tuple(
        plgpu.TMEM((128, 4), e8m0, layout=plgpu.TMEMLayout.SCALES_LAYOUT)
        for _ in range(parts if scaled else 0)
    )
    copies = members * (1 if kind == "fp4" else 2) + (1 + parts if scaled else 2)
    per_stage = plan.stages
    return plgpu.kernel(
        kernel,
        kernel_name=f"product_{kind}_{product.width}x{product.k}",
        out_type=jax.ShapeDtypeStruct((product.rows, product.width), product.out_dtype),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        scratch_types=[
            rows,
            plgpu.SMEM((plan.stages if kind == "fp4" else 1, members, c, 64), jnp.uint8),
            plgpu.SMEM((plan.stages, members, halves, c, line), dtype, transforms=(eight, swizzle)),
            plgpu.SMEM((2, members * scale_lines, 128), jnp.uint8),
            plgpu.SMEM((plan.stages if scaled else 1, parts, 1, 1, 32, 16), e8m0),
            plgpu.SMEM((TILE, out_line), product.out_dtype, transforms=out_transforms),
            tuple(plgpu.TMEM((TILE, c), jnp.float32) for _ in range(members)),
            scale_tmem,
            plgpu.Barrier(num_arrivals=copies, num_barriers=per_stage),
            plgpu.Barrier(num_arrivals=1, num_barriers=per_stage),
            plgpu.Barrier(num_arrivals=1, num_barriers=per_stage, orders_tensor_core=True),
            plgpu.Barrier(num_arrivals=1, orders_tensor_core=True),
            plgpu.Barrier(num_arrivals=members, num_barriers=2),
            plgpu.Barrier(num_arrivals=1, num_barriers=2),
        ],
    )


def _store_ladder(out, result, first: Array, size: Array, channel: Array, width: int) -> None:
    """Stores the first `size` staged rows in pieces of powers of two."""
    plgpu.commit_smem()
    length, at = TILE, 0
    while length:

        @pl.when((size & length) != 0)
        def _(at=at, length=length):
            plgpu.copy_smem_to_gmem(
                out.at[pl.ds(at, length)],
                result.at[pl.ds(first + at, length), pl.ds(channel, width)],
            )

        at = at + (size & length)
        length //= 2
    plgpu.wait_smem_to_gmem(0)
