"""What the GPU kernels share before a launch: which cases they serve, and the operands of one.

Index lists are padded with empty slots to whole blocks of 64, queries with zero heads to 64;
sources without slots or rows are left out.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mla_attention import gather
from pallas_kernels.mla_attention.reference import Rows

HEADS = 64
BLOCK, WIDTH = gather.BLOCK, gather.WIDTH
QUARTERS, UNITS = gather.QUARTERS, gather.UNITS
QUARTER = WIDTH // QUARTERS
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Launch:
    """Operands and static sizes of one launch.

    Attributes:
        q: [r, 64, 512].
        sink: [64].
        operands: the parts of each source, then its index [r, 64 blocks].
        kinds: format of each source, a key of gather.UNITS.
        blocks: blocks of each source.
        processors: SMs of the device.
    """

    q: Array
    sink: Array
    operands: tuple[Array, ...]
    kinds: tuple[str, ...]
    blocks: tuple[int, ...]
    processors: int


def prepare(
    q: Array,
    window: Rows,
    window_index: Array,
    selected: Rows | None,
    selected_index: Array | None,
    sink: Array,
) -> Launch | None:
    """The launch for a case, None if there is nothing to attend to.

    Raises:
        NotImplementedError: q is not bfloat16 [r, <= 64 heads, 512], or a row format has no gather.
    """
    rows, heads, width = q.shape
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"queries in bfloat16, got {q.dtype}")
    if width != WIDTH:
        raise NotImplementedError(f"{WIDTH} channels, got {width}")
    if heads > HEADS:
        raise NotImplementedError(f"at most {HEADS} heads, got {heads}")
    sources = [(window, window_index)]
    if selected is not None and selected_index is not None:
        sources.append((selected, selected_index))
    sources = [(rows_, index) for rows_, index in sources if index.shape[1] and _length(rows_)]
    kinds = tuple(_kind(rows_) for rows_, _ in sources)
    if not rows or not sources:
        return None
    sources = [(rows_, _whole_blocks(index)) for rows_, index in sources]
    return Launch(
        q=jnp.pad(q, ((0, 0), (0, HEADS - heads), (0, 0))) if heads < HEADS else q,
        sink=jnp.pad(sink, (0, HEADS - heads)) if heads < HEADS else sink,
        operands=tuple(jax.tree.leaves(sources)),
        kinds=kinds,
        blocks=tuple(index.shape[1] // BLOCK for _, index in sources),
        processors=processors(),
    )


def processors() -> int:
    """SMs of the device that is lowered for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    count = getattr(device, "num_cores", None) or getattr(jax.devices()[0], "core_count", None)
    return int(count or 132)


def split(refs: tuple, kinds: tuple[str, ...]) -> tuple[list, list]:
    """([(parts, index) of each source], the remaining references) of a kernel's references."""
    sources, rest = [], list(refs)
    for kind in kinds:
        parts = 1 if kind == "bfloat16" else 2
        sources.append((rest[:parts], rest[parts]))
        rest = rest[parts + 1 :]
    return sources, rest


def load(kind: str, index, parts, unit: int):
    """Loads a unit of stored rows (gather.py)."""
    read = gather.load_e2m1 if kind == "e2m1" else gather.load_e4m3
    return read(index, *parts, unit=unit)


def store(kind: str, raw, tile, unit: int):
    """Expands a unit of stored rows into a block of keys (gather.py)."""
    write = gather.store_e2m1 if kind == "e2m1" else gather.store_e4m3
    write(raw, tile, unit)


def _length(rows: Rows) -> int:
    return (rows[0] if isinstance(rows, tuple) else rows).shape[0]


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
