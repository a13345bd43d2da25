"""Times a slice on the default device and writes down everything the figure depends on.

    seconds        of a turn: turns are dispatched in bursts, a burst's wall time over its turns is
                   one sample; median, 10th and 90th percentile, least and most of the samples
    dispatch       the part of it after which the host had handed over a burst's last turn; where it
                   is nearly `seconds`, the host or a full queue holds the device up
    of_arithmetic  needed FLOP / seconds / (a large bf16 product, same process)
    of_memory      needed bytes / seconds / (a large copy, reads plus writes, same process)
    of_floor       the larger of the two least times over the measured one

A turn's output is checked: finite, and as many rows as were asked for. `trace` counts without
running: for devices that the slice does not fit.
"""

import datetime
import importlib.metadata
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels
from deepinfer_jax import spec
from deepinfer_jax.bench import drawn, idle
from deepinfer_jax.bench.slices import Slice
from deepinfer_jax.lab import program
from deepinfer_jax.lab.kernels import Costs
from deepinfer_jax.model.compile import jit
from deepinfer_jax.runtime import packing
from pallas_kernels import bench

FP8_FROM = (8, 9)
MODULE = "jit_turn"


def environment() -> dict[str, Any]:
    """Where and with what: one entry of every record."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": len(jax.devices()),
        "memory": stats.get("bytes_limit"),
        "clocks": "as found, not read",
        "cpu_count": os.cpu_count(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "compiler": jax.devices()[0].client.platform_version,
    }


def ceilings(side: int, copy_bytes: int) -> dict[str, Any]:
    """FLOP/s of a bf16 product, bytes/s of a copy and, where the device multiplies e4m3, FLOP/s of
    such a product; fp8 is None elsewhere."""
    best = bench.ceilings(side=side, copy_bytes=copy_bytes)
    found = {"bf16": best.tflops * 1e12, "copy": best.tbs * 1e12, "side": side, "fp8": None}
    capability = pallas_kernels.target().capability
    if capability is not None and capability >= FP8_FROM:
        numbers = jax.random.normal(jax.random.key(2), (2, side, side), jnp.float32)
        a, b = numbers.astype(jnp.float8_e4m3fn)

        def product(a: jax.Array, b: jax.Array) -> jax.Array:
            dims = (((1,), (1,)), ((), ()))
            return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.bfloat16)

        seconds = statistics.median(bench.measure(jax.jit(product), (a, b), 10))
        found["fp8"] = 2 * side**3 / seconds
    return found


class Timing(NamedTuple):
    """repeats: bursts that are timed, of `burst` turns each; side: of the ceiling's matrices;
    profile: folder for a profile of one more burst."""

    repeats: int = 7
    burst: int = 10
    side: int = bench.SIDE
    profile: str | None = None

    def ceilings(self) -> dict[str, Any]:
        """Those of this process."""
        return ceilings(self.side, min(self.side**2 * 16, bench.COPY_BYTES))


class Prepared(NamedTuple):
    """A slice that was compiled: call(weights, carry, given) -> (carry, output), the carry donated;
    seconds: that compiling took."""

    one: Slice
    call: Callable[..., Any]
    choices: Sequence[pallas_kernels.Choice]
    seconds: float


def prepare(one: Slice) -> Prepared:
    """Compiles what `run` calls; nothing is drawn yet."""

    def turn(weights: Any, carry: Any, given: Any) -> Any:
        return one.turn(weights, carry, given)

    shapes = map(spec.abstract, (one.weights, one.carry, one.given))
    begin = time.perf_counter()
    # What a turn sets anew is an argument all the same: its memory is given back as the result's.
    program = jit(turn, donate_argnums=1, keep_unused=True)
    with pallas_kernels.record() as choices:
        call = program.lower(*shapes).compile()
    return Prepared(one, call, choices, time.perf_counter() - begin)


def run(ready: Prepared, best: dict[str, Any], timing: Timing) -> dict[str, Any]:
    """Record of a slice that was run.

    Raises ArithmeticError if a turn gives no valid result or computes other rows than asked for.
    """
    one, call, burst = ready.one, ready.call, timing.burst
    weights, carry, given = map(drawn.materialise, (one.weights, one.carry, one.given))
    carry, out = call(weights, carry, given)
    _check(one, out)

    def several(carry: Any) -> tuple[Any, float, float]:
        begin = time.perf_counter()
        for _ in range(burst):
            carry, _ = call(weights, carry, given)
        handed = time.perf_counter() - begin
        jax.block_until_ready(carry)
        return carry, (time.perf_counter() - begin) / burst, handed / burst

    carry, *_ = several(carry)
    samples, handed = [], []
    for _ in range(timing.repeats):
        carry, whole, part = several(carry)
        samples.append(whole)
        handed.append(part)
    stats = jax.devices()[0].memory_stats() or {}
    found = {
        "seconds": _spread(samples),
        "dispatch": _spread(handed),
        "compile_seconds": ready.seconds,
        "repeats": timing.repeats,
        "burst": burst,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "kernels": chosen(ready.choices),
        "ceilings": best,
        "reached": reached(one, statistics.median(samples), best),
    }
    if timing.profile is not None:
        with idle.recorded(timing.profile):
            several(carry)
        ops = idle.read(timing.profile)
        found["idle"] = idle.measure(ops, MODULE).__dict__
        found["ranking"] = [share._asdict() for share in idle.ranking(ops, burst)]
    return _record(one) | found


def trace(one: Slice) -> dict[str, Any]:
    """Record of a slice that was only traced: counts, and bytes held and needed at the peak."""
    args = tuple(spec.abstract(tree) for tree in (one.weights, one.carry, one.given))
    work = program.measure(one.turn, args, Costs())
    held = sum(work.held.values())
    counted = {"flop": sum(work.products.values()), "held_bytes": held, "peak_bytes": work.peak}
    return _record(one) | {"seconds": None, "traced": counted}


def reached(one: Slice, seconds: float, best: dict[str, Any]) -> dict[str, Any]:
    """Rates and shares of the ceilings, by what the rows need."""
    flop, moved = one.needed.flops, one.needed.moved
    least = {"arithmetic": flop / best["bf16"], "memory": moved / best["copy"]}
    bound = max(least, key=lambda name: least[name])
    return {
        "flop_s": flop / seconds,
        "bytes_s": moved / seconds,
        "of_arithmetic": least["arithmetic"] / seconds,
        "of_memory": least["memory"] / seconds,
        "of_fp8": flop / seconds / best["fp8"] if best["fp8"] else None,
        "bound": bound,
        "of_floor": least[bound] / seconds,
        "rows_s": one.rows.count / seconds,
    }


def chosen(choices: Sequence[pallas_kernels.Choice]) -> list[dict[str, Any]]:
    """Each operation's implementation, why not the ones before it, and for how many calls."""
    counted = Counter((one.op, one.function, one.chosen, one.declined) for one in choices)
    fields = ("op", "function", "chosen", "declined")
    return [dict(zip(fields, key, strict=True), calls=n) for key, n in counted.items()]


def _record(one: Slice) -> dict[str, Any]:
    numerics = one.setup.numerics
    rows = {"sequences": one.rows.sequences, "width": one.rows.width, "start": one.rows.start}
    return {
        **one.conditions,
        "phase": one.setup.phase,
        "rows": rows,
        "layout": one.setup.layout.name,
        "kernels_asked": dict(one.setup.kernels),
        "numerics": dict(numerics.__dict__),
        "needed": {"flop": dict(one.needed.flop), "bytes": dict(one.needed.bytes)},
        "executed_flop": one.executed.flops,
    }


def _check(one: Slice, out: Any) -> None:
    if one.conditions["slice"] == "layers":
        if not bool(jnp.isfinite(out.streams).all()):
            raise ArithmeticError("layer slice: a stream is not finite")
        return
    out = packing.unpack(out)
    if bool(out.failed.any()):
        raise ArithmeticError("rank slice: a row has no valid distribution")
    fed = int(out.verified.sum())
    if one.setup.phase == "decode" and fed != one.rows.count - one.rows.sequences:
        asked = one.rows.count - one.rows.sequences
        raise ArithmeticError(f"rank slice: {fed} draft rows were fed, asked for {asked}")


def _spread(samples: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(samples)
    tenth = len(ordered) // 10
    return {
        "median": statistics.median(ordered),
        "p10": ordered[tenth],
        "p90": ordered[-1 - tenth],
        "least": ordered[0],
        "most": ordered[-1],
        "samples": list(samples),
    }
