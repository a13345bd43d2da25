"""What the model's programs rely on, each as a small program with a known answer.

A check runs on the first device (collectives: on all) and returns what it saw; it raises where the
device cannot do it or does it wrongly. `needed` ones stop a run before weights load. The others
say what happens without them (`instead`). The types are exercised exactly as the model uses them:
e4m3 is converted both ways, e8m0 is only moved and read as bits, e2m1 is packed bytes read through
a table, so a native 4-bit type is never needed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.model import compile


@dataclasses.dataclass(frozen=True)
class Check:
    """name; run: devices -> detail, raising if it does not work; needed; instead: see above."""

    name: str
    run: Callable[[Sequence[Any]], str]
    needed: bool = True
    instead: str = ""


def _on(devices: Sequence[Any], f: Callable, *arrays: Any) -> Any:
    """f, compiled, of arrays on the first device, as numpy."""
    placed = [jax.device_put(array, devices[0]) for array in arrays]
    return jax.tree.map(np.asarray, jax.jit(f)(*placed))


def _same(found: Any, wanted: Any, what: str) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.dtype != wanted.dtype or not np.array_equal(found, wanted, equal_nan=True):
        raise ArithmeticError(f"{what}: got {found.ravel()[:8]}, expected {wanted.ravel()[:8]}")


def _matmul(devices: Sequence[Any]) -> str:
    a = (np.arange(64 * 64).reshape(64, 64) % 7 - 3).astype(np.float32)
    _same(_on(devices, lambda a: a @ a.T, a), a @ a.T, "float32 product of small integers")
    return "float32 product, exact"


def _bfloat16(devices: Sequence[Any]) -> str:
    a = (np.arange(64 * 64).reshape(64, 64) % 7 - 3).astype(ml_dtypes.bfloat16)
    wide = a.astype(np.float32)

    def product(a):
        return jnp.matmul(a, a.T, preferred_element_type=jnp.float32)

    _same(_on(devices, product, a), wide @ wide.T, "bfloat16 product with float32 sums")
    return "product with float32 sums, exact"


def _e4m3(devices: Sequence[Any]) -> str:
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    _same(
        _on(devices, lambda x: x.astype(jnp.float32), codes),
        codes.astype(np.float32),
        "e4m3 to float32",
    )
    numbers = np.linspace(-448, 448, 1001, dtype=np.float32)
    rounded = _on(devices, lambda x: x.astype(jnp.float8_e4m3fn), numbers)
    _same(rounded.view(np.uint8), numbers.astype(codes.dtype).view(np.uint8), "float32 to e4m3")
    return "all 256 codes read, 1001 numbers rounded"


def _e8m0(devices: Sequence[Any]) -> str:
    codes = np.arange(256, dtype=np.uint8)

    def there_and_back(bits):
        typed = jax.lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)
        return jax.lax.bitcast_convert_type(jnp.take(typed, jnp.arange(256)), jnp.uint8)

    _same(_on(devices, there_and_back, codes), codes, "e8m0 as bits")
    return "all 256 codes stored, gathered and read as bits"


def _e2m1_packed(devices: Sequence[Any]) -> str:
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([magnitudes, -magnitudes])
    packed = np.arange(256, dtype=np.uint8)

    def decode(packed, table):
        codes = jnp.stack([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1)
        return jnp.take(table, codes.astype(jnp.int32), axis=0)

    wanted = np.stack([table[packed & 15], table[packed >> 4]], axis=-1)
    _same(_on(devices, decode, packed, table), wanted, "packed e2m1 through a table")
    return "all 256 bytes decoded through a table"


def _e2m1_native(devices: Sequence[Any]) -> str:
    codes = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    found = _on(devices, lambda x: x.astype(jnp.float32), codes)
    _same(found, codes.astype(np.float32), "float4_e2m1fn to float32")
    return "read"


def _top_k(devices: Sequence[Any]) -> str:
    numbers = np.array([[1, 5, 5, -2, 5, 0, 7, 7], [2, 2, 2, 2, 2, 2, 2, 2]], np.float32)
    _, index = _on(devices, lambda x: jax.lax.top_k(x, 4), numbers)
    _same(index, np.array([[6, 7, 1, 2], [0, 1, 2, 3]], np.int32), "ties of top_k")
    order = _on(devices, lambda x: jnp.argsort(x, axis=-1, stable=True), numbers)
    _same(order, np.argsort(numbers, -1, kind="stable").astype(np.int32), "stable sort")
    return "stable; ties to the lowest index"


def _gather_scatter(devices: Sequence[Any]) -> str:
    table = np.arange(24, dtype=np.float32).reshape(8, 3)
    index = np.array([7, 0, 9, 3], np.int32)

    def move(table, index):
        rows = jnp.take(table, index, axis=0, mode="fill", fill_value=0)
        return rows, jnp.zeros((8, 3), jnp.float32).at[index].set(rows + 1, mode="drop")

    rows, written = _on(devices, move, table, index)
    inside = np.array([7, 0, 3])
    wanted = np.zeros((8, 3), np.float32)
    wanted[inside] = table[inside] + 1
    _same(rows, np.where((index < 8)[:, None], table[index % 8], 0), "gather")
    _same(written, wanted, "scatter that drops rows out of bounds")
    return "rows out of bounds dropped"


def _loops(devices: Sequence[Any]) -> str:
    def run(x):
        total, _ = jax.lax.scan(lambda c, row: (c + row, None), jnp.int32(0), x)
        return jax.lax.while_loop(lambda c: c < 1000, lambda c: c * 2, total)

    _same(_on(devices, run, np.arange(10, dtype=np.int32)), np.int32(1440), "scan and while")
    return "scan, while"


def _bits(devices: Sequence[Any]) -> str:
    """Threefry is integer arithmetic: the same bits on every device, or samples differ."""
    found = _on(devices, lambda k: jax.random.bits(jax.random.wrap_key_data(k), (4,)), _KEY)
    _same(found, _THREEFRY, "random bits of key (0, 7)")
    return "threefry, equal bits"


ALONE = "one device: none is used"
_KEY = np.array([0, 7], np.uint32)
_THREEFRY = np.array([2895194379, 4185947648, 1300703658, 1906787632], np.uint32)


def _spread(devices: Sequence[Any], f: Callable, out_specs: Any) -> tuple[np.ndarray, Any]:
    """Numbers [n, n], a row on each of the n devices, and f of them over all devices."""
    n = len(devices)
    mesh = Mesh(np.array(devices), ("x",))
    rows = np.arange(n * n, dtype=np.float32).reshape(n, n)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=out_specs, check_vma=False)
    placed = jax.device_put(rows, NamedSharding(mesh, P("x")))
    return rows, jax.tree.map(np.asarray, jax.jit(mapped)(placed))


def _collectives(devices: Sequence[Any]) -> str:
    n = len(devices)
    if n == 1:
        return ALONE

    def exchange(x):
        return (
            jax.lax.psum(x, "x"),
            jax.lax.psum_scatter(x[0], "x", tiled=True),
            jax.lax.all_gather(x, "x", axis=0, tiled=True)[None],
            jax.lax.all_to_all(x, "x", split_axis=1, concat_axis=0, tiled=True),
        )

    rows, found = _spread(devices, exchange, (P(), P("x"), P("x"), P("x")))
    total, scattered, gathered, swapped = found
    _same(total, rows.sum(0, keepdims=True), "psum")
    _same(scattered, rows.sum(0), "psum_scatter")
    _same(gathered, np.broadcast_to(rows, (n, n, n)), "all_gather")
    _same(swapped.reshape(n, n), rows.T, "all_to_all")
    return f"psum, psum_scatter, all_gather, all_to_all over {n} devices"


def _ragged(devices: Sequence[Any]) -> str:
    n = len(devices)
    if n == 1:
        return ALONE

    def exchange(x):
        one, here = jnp.ones(n, jnp.int32), jnp.arange(n, dtype=jnp.int32)
        there = jnp.full(n, jax.lax.axis_index("x"), jnp.int32)
        out = jnp.zeros(n, jnp.float32)
        return jax.lax.ragged_all_to_all(x[0], out, here, one, there, one, axis_name="x")

    rows, swapped = _spread(devices, exchange, P("x"))
    _same(swapped.reshape(n, n), rows.T, "ragged_all_to_all")
    return f"over {n} devices"


def _donation(devices: Sequence[Any]) -> str:
    array = jax.device_put(np.zeros(1024, np.float32), devices[0])
    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
    if not array.is_deleted():
        raise NotImplementedError("a donated buffer was kept")
    return "buffer reused"


def _memory_stats(devices: Sequence[Any]) -> str:
    stats = devices[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise NotImplementedError("the device does not say how much memory it has")
    return f"{stats['bytes_in_use'] / 2**30:.1f} of {stats['bytes_limit'] / 2**30:.1f} GiB in use"


def _pinned_host(devices: Sequence[Any]) -> str:
    kinds = sorted({memory.kind for memory in devices[0].addressable_memories()})
    if "pinned_host" not in kinds:
        raise NotImplementedError(f"memory kinds are {', '.join(kinds)}")
    return ", ".join(kinds)


def _compiler_options(devices: Sequence[Any]) -> str:
    wanted = compile.COMPILER_OPTIONS | compile.CPU_OPTIONS
    kept = compile.compiler_options()
    known_elsewhere = set(compile.CPU_OPTIONS) if devices[0].platform in ("gpu", "tpu") else set()
    if unknown := sorted(set(wanted) - set(kept) - known_elsewhere):
        raise NotImplementedError(f"its compiler does not know {', '.join(unknown)}")
    return ", ".join(sorted(kept))


CHECKS = (
    Check("float32", _matmul),
    Check("bfloat16", _bfloat16),
    Check(
        "float8_e4m3fn",
        _e4m3,
        instead="weights and caches hold e4m3 values; keeping them as bytes is not built",
    ),
    Check(
        "float8_e8m0fnu",
        _e8m0,
        instead="weights and caches hold e8m0 scales; keeping them as bytes is not built",
    ),
    Check("packed e2m1", _e2m1_packed),
    Check("float4_e2m1fn", _e2m1_native, False, "not used: FP4 is packed bytes and a table"),
    Check("sort, top_k", _top_k),
    Check("gather, scatter", _gather_scatter),
    Check("scan, while", _loops),
    Check("random bits", _bits),
    Check(
        "collectives",
        _collectives,
        False,
        "layouts of one device only, e.g. configs/layouts/single.toml",
    ),
    Check(
        "ragged_all_to_all", _ragged, False, "layouts with moe_dispatch = 'alltoall' or 'gather'"
    ),
    Check(
        "compiler options",
        _compiler_options,
        False,
        "rounding and order of sums are the compiler's choice: bits may differ between batch sizes",
    ),
    Check("donation", _donation, False, "the cache is copied each step: twice its memory"),
    Check("memory statistics", _memory_stats, False, "set max_slots and max_context to what fits"),
    Check("pinned_host", _pinned_host, False, "no layout with engram = 'host'"),
)
