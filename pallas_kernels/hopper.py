"""The product that grouped_gemm and row_matmul share on Hopper: rows times stored weights, one K
order.

    out^T[64 weight rows, N rows] += W[64, 128] x^T[128, N]      for every 128 columns, in order

Weights are the left operand of wgmma: MXFP4 and FP8 are expanded in registers (registers.py), bf16
is read from shared memory. A persistent grid walks items (row tile, weight tile, part of K). A row
tile is up to N rows of one matrix; one warpgroup copies with TMA into two rings (weights, rows),
the others multiply. Rows that belong to another matrix are multiplied with the tile and not stored.
Blocks of a cluster take neighbouring weight tiles and share the row ring.

The order of K is the same for every tile shape, so a row has the same bits however many rows there
are.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels import registers

STEP = 128
COPY_REGISTERS = 40
SHARED_BYTES = 225 * 1024
"""What a block may use, less room for barriers and alignment."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tile shape of one call.

    Attributes:
        rows: rows of a tile (N of wgmma), a multiple of 8.
        groups: computing warpgroups; each owns 64 weight rows.
        weight_stages, row_stages: depth of the two rings; 0 takes what shared memory holds.
        cluster: blocks that share the row ring.
        blocks: persistent blocks of the grid.
    """

    rows: int
    groups: int = 2
    cluster: int = 1
    weight_stages: int = 0
    row_stages: int = 0
    blocks: int = 132

    @property
    def height(self) -> int:
        """Weight rows of a block."""
        return 64 * self.groups

    @property
    def registers(self) -> int:
        """Registers of a computing thread: what the copying warpgroup gives up, shared out.

        A launch gives every thread the same count; asking for more than its sum waits for ever.
        """
        threads = self.groups + 1
        launched = 65536 // (128 * threads) // 8 * 8
        return min(232, (launched * threads - COPY_REGISTERS) // self.groups // 8 * 8)

    @property
    def row_step(self) -> int:
        """Columns of one stage of the row ring: wide tiles take half a step to fit."""
        return 64 if self.rows > 128 else STEP


@dataclasses.dataclass(frozen=True)
class Product:
    """What is multiplied.

    Attributes:
        kind: "fp4", "fp8" or "bf16" weights.
        rows, k: shape of x.
        matrix: weight rows of one matrix.
        limit: bound of SwiGLU for gate and up stacked in a matrix; None is a plain product.
        splits: parts of K, each a separate float32 result.
        out_dtype: bfloat16 or float32; SwiGLU gives bfloat16.
    """

    kind: str
    rows: int
    k: int
    matrix: int
    limit: float | None = None
    splits: int = 1
    out_dtype: DTypeLike = jnp.bfloat16

    @property
    def width(self) -> int:
        """Channels of the result."""
        return self.matrix if self.limit is None else self.matrix // 2

    @property
    def step_bytes(self) -> int:
        """Stored bytes of one row in a step."""
        return {"fp4": 64, "fp8": 128, "bf16": 256}[self.kind]


def fit(plan: Plan, product: Product) -> Plan:
    """The plan with its rings as deep as shared memory allows, at most 8 steps."""
    item = 2 if product.out_dtype == jnp.bfloat16 else 4
    weight, row = plan.height * product.step_bytes, 2 * plan.rows * STEP
    width = 32 if product.limit is not None else 64
    left = SHARED_BYTES - plan.groups * min(plan.rows, 128) * width * item
    if product.kind == "fp4":
        left -= 2 * plan.height * product.k // 32
    depth = max(1, min(8, left // (weight + row)))
    more = max(0, min(8, (left - depth * row) // weight) - depth)
    return dataclasses.replace(
        plan,
        weight_stages=plan.weight_stages or depth + min(more, 2),
        row_stages=plan.row_stages or depth * (STEP // plan.row_step),
    )


def row_tiles(
    group_sizes: Int32[Array, " experts"], rows: int, tile: int
) -> tuple[Int32[Array, "tiles 3"], Int32[Array, " one"]]:
    """([matrix or -1, first row, rows] of every tile, number of tiles); rows past the groups
    last."""
    experts = group_sizes.shape[0]
    sizes = jnp.append(group_sizes, rows - jnp.sum(group_sizes))
    most = -(-rows // tile) + min(experts + 1, rows)
    per_group = -(-sizes // tile)
    ends = jnp.cumsum(per_group)
    starts = jnp.cumsum(sizes) - sizes
    index = jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, index, side="right"), experts).astype(jnp.int32)
    inner = (index - (ends - per_group)[group]) * tile
    count = jnp.clip(sizes[group] - inner, 0, tile)
    expert = jnp.where(group < experts, group, -1)
    return jnp.stack([expert, starts[group] + inner, count], axis=1), ends[-1:]


def check(product: Product, plan: Plan, single: bool) -> None:
    """Raises NotImplementedError where the kernel cannot take the product."""
    if product.rows == 0:
        raise NotImplementedError("no rows")
    if product.k % (STEP * product.splits):
        raise NotImplementedError(f"K = {product.k} is not a multiple of {STEP * product.splits}")
    tile = plan.height if product.limit is None else plan.height // 2
    if not single and product.width % tile:
        raise NotImplementedError(f"{product.width} channels are not a multiple of {tile}")
    piece = 32 if product.limit is not None or product.out_dtype == jnp.float32 else 64
    if product.width % piece:
        raise NotImplementedError(f"{product.width} channels are not a multiple of {piece}")
    if -(-product.width // tile) % plan.cluster:
        raise NotImplementedError(
            f"{product.width} channels do not fill clusters of {plan.cluster}"
        )


def multiply(
    x: Float[Array, "rows k"],
    weights: Shaped[Array, "weight_rows stored"],
    scales: Shaped[Array, " bytes"],
    group_sizes: Int32[Array, " experts"],
    route: Float[Array, " rows"],
    product: Product,
    plan: Plan,
) -> Float[Array, "split_rows out"]:
    """x times the matrices stacked in `weights`, rows sorted by matrix.

    Args:
        x: bf16.
        weights: uint8 or bf16, the stored rows of every matrix one after the other.
        scales: the stored scale bytes, flat; ignored for bf16.
        group_sizes: rows of each matrix.
        route: float32 routing weights, used by SwiGLU.

    Returns:
        [splits * rows, out]; rows past the groups are zero.
    """
    tiles, count = row_tiles(group_sizes, product.rows, plan.rows)
    blocks = registers.order_columns(x, product.kind)
    short = max(0, plan.rows - product.rows)
    blocks = jnp.pad(blocks, ((0, 0), (0, short), (0, 0)))
    route = jnp.pad(route, (0, plan.rows))
    kernel = _kernel(product, fit(plan, product))
    if product.kind == "fp4":
        scales = scales.reshape(-1, 128)
    return kernel(blocks, weights, scales, route, tiles, count)


def _kernel(product: Product, plan: Plan):
    n, height, kind = plan.rows, plan.height, product.kind
    paired = product.limit is not None
    owned = registers.Rows(paired, height)
    tile_width = height // 2 if paired else height
    weight_tiles = -(-product.width // tile_width)
    steps, parts = product.k // STEP // product.splits, STEP // plan.row_step
    row_blocks = plan.row_step // 64
    copies = 2 if paired else 1
    copy_rows = height // copies
    pitch = product.k // 32 if kind == "fp4" else -(-product.k // 32)
    block_rows = -(-product.width // 32)
    scale_lines = copy_rows * pitch // 128 if kind == "fp4" else 1
    store_rows = min(n, 128)
    wide = product.out_dtype == jnp.float32
    clusters = plan.blocks // plan.cluster
    byte_step = product.step_bytes if kind != "bf16" else STEP
    shared = dict(collective_axes=("member",)) if plan.cluster > 1 else {}

    def walk(count, tiles, one, start):
        """Runs one(item, carry) over this block's items."""
        block, member = lax.axis_index("block"), lax.axis_index("member")
        per_tile = weight_tiles // plan.cluster * product.splits
        items = count[0] * per_tile
        mine = lax.div(items - block + clusters - 1, clusters)

        def body(i, carry):
            index = block + i * clusters
            tile = lax.div(index, per_tile)
            rest = lax.rem(index, per_tile)
            m = lax.div(rest, product.splits) * plan.cluster + member
            split = lax.rem(rest, product.splits)
            return one(i, tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], m, split, carry)

        return lax.fori_loop(0, mine, body, start)

    def kernel(x, weights, scales, route, tiles, count, result, row_smem, weight_smem, scale_smem,
               out_smem, row_full, row_empty, weight_full, weight_empty, scale_full, scale_empty):  # fmt: skip
        group = lax.axis_index("group")
        single_rows, tiled_rows = row_smem

        def copy_item(i, matrix, first, size, m, split, at):
            base = jnp.maximum(matrix, 0) * product.matrix + m * tile_width
            if kind == "fp4":
                scale_slot = lax.rem(i, 2)

                @pl.when(i >= 2)
                def _():
                    plgpu.barrier_wait(scale_empty.at[scale_slot])

                for c in range(copies):
                    line = lax.div((base + c * product.width) * pitch, 128)
                    plgpu.copy_gmem_to_smem(
                        scales.at[pl.ds(line, scale_lines)],
                        scale_smem.at[scale_slot, pl.ds(c * scale_lines, scale_lines)],
                        scale_full.at[scale_slot],
                    )

            def step(s, at):
                slot = lax.rem(at, plan.weight_stages)
                column = split * steps + s

                @pl.when(at >= plan.weight_stages)
                def _():
                    plgpu.barrier_wait(weight_empty.at[slot])

                for c in range(copies):
                    source = pl.ds(base + c * product.width, copy_rows)
                    for h in range({"fp4": 1, "fp8": 2, "bf16": 2}[kind]):
                        part = 64
                        plgpu.copy_gmem_to_smem(
                            weights.at[source, pl.ds(column * byte_step + h * part, part)],
                            weight_smem.at[slot, h, pl.ds(c * copy_rows, copy_rows)],
                            weight_full.at[slot],
                        )
                for part in range(parts):
                    at_row = at * parts + part
                    slot = lax.rem(at_row, plan.row_stages)

                    @pl.when(at_row >= plan.row_stages)
                    def _(slot=slot):
                        plgpu.barrier_wait(row_empty.at[slot])

                    plgpu.copy_gmem_to_smem(
                        x.at[
                            pl.ds((column * parts + part) * row_blocks, row_blocks), pl.ds(first, n)
                        ],
                        single_rows.at[slot],
                        row_full.at[slot],
                        **shared,
                    )
                return at + 1

            return lax.fori_loop(0, jnp.where(matrix >= 0, steps, 0), step, at)

        def left_operand(slot, half, i, matrix, m, column):
            """Weights of 64 columns (fp4: 128) of this warpgroup."""
            if kind == "bf16":
                return weight_smem.at[slot, half, pl.ds(group * 64, 64)]
            if kind == "fp4":
                scale_slot = lax.rem(i, 2)
                at = scale_slot * (copies * scale_lines * 128) + (column - 0) * 4
                return registers.expand(
                    kind, weight_smem.at[slot, 0], scale_smem, at, rows=owned, pitch=pitch
                )
            tile_block = jnp.maximum(matrix, 0) * copies * block_rows + m * (tile_width // 32)
            at = tile_block * pitch + column * 4 + half * 2
            both = (at, at + (block_rows * pitch if paired else 0))
            return registers.expand(
                kind, weight_smem.at[slot, half], scales, both, rows=owned, pitch=pitch
            )

        def compute_item(i, matrix, first, size, m, split, at):
            if kind == "fp4":
                plgpu.barrier_wait(scale_full.at[lax.rem(i, 2)])

            def accumulate(acc):
                def step(s, at):
                    slot = lax.rem(at, plan.weight_stages)
                    column = split * steps + s
                    plgpu.barrier_wait(weight_full.at[slot])
                    if kind == "fp4":
                        whole = left_operand(slot, 0, i, matrix, m, column)
                        halves = [whole[:, :64], whole[:, 64:]]
                    else:
                        halves = [left_operand(slot, h, i, matrix, m, column) for h in range(2)]
                    if kind != "bf16":
                        plgpu.barrier_arrive(weight_empty.at[slot])
                    row_slots = [lax.rem(at * parts + p, plan.row_stages) for p in range(parts)]
                    for h in range(2):
                        row_slot = row_slots[h * parts // 2]
                        if h * parts % 2 == 0:
                            plgpu.barrier_wait(row_full.at[row_slot])
                        plgpu.wgmma(acc, halves[h], tiled_rows.at[row_slot, h % row_blocks].T)
                    for p in range(parts):
                        plgpu.wgmma_wait(parts - 1 - p)
                        plgpu.barrier_arrive(row_empty.at[row_slots[p]])
                    if kind == "bf16":
                        plgpu.barrier_arrive(weight_empty.at[slot])
                    return at + 1

                at_end = lax.fori_loop(0, jnp.where(matrix >= 0, steps, 0), step, at)
                return acc[...], at_end

            acc, at = pl.run_scoped(accumulate, plgpu.ACC((64, n), jnp.float32))
            if kind == "fp4":
                plgpu.barrier_arrive(scale_empty.at[lax.rem(i, 2)])
            write(acc, first, size, m, split)
            return at

        def write(acc, first, size, m, split):
            for start in range(0, n, store_rows):
                columns = slice(start, min(start + store_rows, n))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out = out_smem.at[group]
                if paired:
                    registers.store_swiglu(
                        acc, route, out.at[0], first, columns=columns, limit=product.limit
                    )
                else:
                    shift = 0 if kind == "bf16" else registers.SHIFT
                    registers.store_plain(
                        acc, out if wide else out.at[0], columns=columns, shift=shift
                    )
                plgpu.commit_smem()
                left = jnp.clip(size - start, 0, columns.stop - start)
                at, length = 0, 1 << ((columns.stop - start).bit_length() - 1)
                while length:
                    for piece in range(2 if wide else 1):
                        channels = 32 if wide or paired else 64
                        channel = m * tile_width + group * (32 if paired else 64) + piece * 32
                        row = split * product.rows + first + start + at
                        plgpu.copy_smem_to_gmem(
                            out_smem.at[group, piece, pl.ds(at, length)],
                            result.at[pl.ds(row, length), pl.ds(channel, channels)],
                            predicate=(left & length) != 0,
                        )
                    at = at + (left & length)
                    length //= 2

        @pl.when(group == plan.groups)
        def _():
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            done = walk(count, tiles, copy_item, jnp.int32(0)) * parts
            # A block must outlive what the others of its cluster still signal to it.
            for last in range(plan.row_stages):
                stage = done - plan.row_stages + last

                @pl.when(stage >= 0)
                def _(stage=stage):
                    plgpu.barrier_wait(row_empty.at[lax.rem(stage, plan.row_stages)])

        @pl.when(group < plan.groups)
        def _():
            plgpu.set_max_registers(plan.registers, action="increase")
            walk(count, tiles, compute_item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    swizzle = plgpu.SwizzleTransform(128)
    row_shape = (plan.row_stages, row_blocks, n, 64)
    single, eight = plgpu.TilingTransform((1, 64)), plgpu.TilingTransform((8, 64))
    bf16 = kind == "bf16"
    row_empty = dict(num_arrivals=plan.groups, num_barriers=plan.row_stages)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((product.splits * product.rows, product.width), product.out_dtype),
        grid=(clusters,),
        grid_names=("block",),
        cluster=(plan.cluster,),
        cluster_names=("member",),
        num_threads=plan.groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        scratch_types=[
            plgpu.RefUnion(
                plgpu.SMEM(row_shape, jnp.bfloat16, transforms=(single, swizzle)),
                plgpu.SMEM(row_shape, jnp.bfloat16, transforms=(eight, swizzle)),
            ),
            plgpu.SMEM(
                (plan.weight_stages, 1 if kind == "fp4" else 2, height, 64),
                jnp.bfloat16 if bf16 else jnp.uint8,
                transforms=(eight, swizzle) if bf16 else (),
            ),
            plgpu.SMEM((2, copies * scale_lines, 128), jnp.uint8),
            plgpu.SMEM(
                (plan.groups, 2 if wide else 1, store_rows, 32 if wide or paired else 64),
                product.out_dtype,
                transforms=registers.PLAIN_32 if wide else registers.PAIRED_16 if paired else registers.PLAIN_16,
            ),
            plgpu.Barrier(num_arrivals=1, num_barriers=plan.row_stages),
            plgpu.Barrier(**row_empty)
            if plan.cluster == 1
            else plgpu.ClusterBarrier(collective_axes=("member",), **row_empty),
            plgpu.Barrier(num_arrivals=copies * (1 if kind == "fp4" else 2), num_barriers=plan.weight_stages),
            plgpu.Barrier(num_arrivals=plan.groups, num_barriers=plan.weight_stages),
            plgpu.Barrier(num_arrivals=copies, num_barriers=2),
            plgpu.Barrier(num_arrivals=plan.groups, num_barriers=2),
        ],
    )  # fmt: skip
