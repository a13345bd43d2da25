"""Tile shapes and tile lists of the products that grouped_gemm and row_matmul run on a GPU.

A product multiplies rows, sorted by matrix, with the matrices' stored weights. It is cut into
items: (row tile of one matrix, weight tile, part of K). `Product` says what is multiplied, `Plan`
how it is cut; neither changes the order in which a row's K is summed, except `splits`, which
depends on the weight alone. `best_rows` picks the height of a tile; the row tiles of ragged groups
are listed on the device (pallas_kernels/grouping).
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike

STEP = 128
COPY_REGISTERS = 40
STORE_ROWS = 128
"""Rows that pass through shared memory at once on their way out."""
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
        unroll: steps in one turn of the loop.
        blocks: persistent blocks of the grid.
    """

    rows: int
    groups: int = 2
    cluster: int = 1
    weight_stages: int = 0
    row_stages: int = 0
    unroll: int = 2
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


@dataclasses.dataclass(frozen=True)
class Product:
    """What is multiplied.

    Attributes:
        kind: "fp4", "fp8", "bf16" or "f32" weights.
        rows, k: shape of x.
        matrix: weight rows of one matrix.
        limit: bound of SwiGLU for gate and up stacked in a matrix; None is a plain product.
        splits: parts of K, each a separate float32 result.
        out_dtype: bfloat16 or float32; SwiGLU gives bfloat16.
        e4m3: rows are e4m3 with one scale each, and FP4 weights become e4m3 too.
    """

    kind: str
    rows: int
    k: int
    matrix: int
    limit: float | None = None
    splits: int = 1
    out_dtype: DTypeLike = jnp.bfloat16
    e4m3: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a step."""
        return STEP if self.e4m3 else 2 * STEP

    @property
    def width(self) -> int:
        """Channels of the result."""
        return self.matrix if self.limit is None else self.matrix // 2

    @property
    def step_bytes(self) -> int:
        """Stored bytes of one row in a step."""
        return {"fp4": 64, "fp8": 128, "bf16": 256, "f32": 512}[self.kind]


OVERHEAD = 48
"""What expanding a weight tile costs beside its products, in rows (measured on an H200)."""


def best_rows(
    tiles_of: Callable[[int], float], *, most: int = 256, step: int = 8, blocks: int = 132
) -> int:
    """Rows of a tile for the least time: rounds of the grid times the time of one item.

    Args:
        tiles_of: rows of a tile -> items (row tile, weight tile, part of K) of the whole product.
    """

    def time(rows: int) -> float:
        items = tiles_of(rows) / blocks
        rounds = float(math.ceil(items)) if items < 8 else items
        return rounds * (rows + OVERHEAD)

    return min(range(step, most + 1, step), key=time)


def expected_tiles(mean: float, rows: int) -> float:
    """Expected tiles of a group whose size is Poisson with this mean."""
    total, count = 0.0, 0
    while True:
        edge = count * rows
        if mean < 64:
            below = sum(
                math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(edge + 1)
            )
        else:
            below = 0.5 * (1 + math.erf((edge + 0.5 - mean) / math.sqrt(2 * mean)))
        total, count = total + 1 - below, count + 1
        if 1 - below < 1e-6:
            return total


def parts(plan: Plan, product: Product) -> int:
    """Stages of the row ring in a step: wide tiles take half a step to fit."""
    return 2 if plan.rows > 128 and not product.e4m3 else 1


def room(plan: Plan, product: Product) -> int:
    """Bytes of shared memory that are left for the rings."""
    item = 2 if product.out_dtype == jnp.bfloat16 else 4
    width = 32 if product.limit is not None else 64
    left = SHARED_BYTES - plan.groups * min(plan.rows, STORE_ROWS) * width * item
    return left - 2 * plan.height * product.k // 32 if product.kind == "fp4" else left


RING = 2
"""Least steps that the rings hold: a slot is freed while the step after it is under way."""


def deep_enough(plan: Plan, product: Product) -> bool:
    """Whether shared memory holds its rings; with shorter ones the kernel would wait for ever."""
    step = plan.height * product.step_bytes + plan.rows * product.row_bytes
    return RING * step <= room(plan, product)


def fit(plan: Plan, product: Product) -> Plan:
    """The plan with its rings as deep as shared memory allows, at most 8 steps."""
    weight, row = plan.height * product.step_bytes, plan.rows * product.row_bytes
    left = room(plan, product)
    depth = min(8, left // (weight + row))
    more = max(0, min(8, (left - depth * row) // weight) - depth)
    return dataclasses.replace(
        plan,
        weight_stages=plan.weight_stages or depth + min(more, 2),
        row_stages=plan.row_stages or depth * parts(plan, product),
    )


def check(product: Product, plan: Plan, single: bool) -> None:
    """Raises NotImplementedError where the kernel cannot take the product."""
    if product.rows == 0:
        raise NotImplementedError("no rows")
    if product.k % (STEP * product.splits):
        raise NotImplementedError(f"K = {product.k} is not a multiple of {STEP * product.splits}")
    tile = plan.height if product.limit is None else plan.height // 2
    if not single and product.width % tile:
        raise NotImplementedError(f"{product.width} channels are not a multiple of {tile}")
    piece = 16 // jnp.dtype(product.out_dtype).itemsize
    if product.width % piece:
        raise NotImplementedError(f"{product.width} channels are not a multiple of {piece}")
    if -(-product.width // tile) % plan.cluster:
        raise NotImplementedError(
            f"{product.width} channels do not fill clusters of {plan.cluster}"
        )
    if not deep_enough(plan, product):
        raise NotImplementedError(
            f"{RING} steps of {plan.rows} rows do not fit the {room(plan, product)} bytes of "
            f"shared memory that K = {product.k} leaves"
        )
