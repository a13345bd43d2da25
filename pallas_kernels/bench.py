"""Times the kernels: median and spread of many runs against two ceilings measured in the same run.

    fraction of arithmetic = (FLOP of a case / time) / (a large bf16 matrix product here)
    fraction of memory     = (least bytes of a case / time) / (a large copy here, reads plus writes)

On a GPU the time is the device's own (CUPTI), summed over every kernel a call launches, its
preparation included; elsewhere the clock around a call. Inputs are drawn on the device, fresh for
every case. A case that an implementation declines is reported with the reason. The runner behind
`deepinfer-jax bench kernels`.
"""

import csv
import dataclasses
import functools
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import OPERATIONS
from pallas_kernels.cases import Case, tagged

SIDE = 8192
COPY_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this device reaches at best: TFLOP/s of a bf16 product, TB/s of a copy."""

    tflops: float
    tbs: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One timed case; times in microseconds, low and high are the 10th and 90th percentile."""

    op: str
    case: str
    implementation: str
    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    tflops: float | None = None
    tbs: float | None = None
    of_arithmetic: float | None = None
    of_memory: float | None = None
    note: str = ""

    def __str__(self) -> str:
        name = f"{self.op:17s} {self.case:28s} {self.implementation:10s}"
        if self.median_us is None:
            return f"{name} {self.note}"
        spread = f"{self.median_us:9.1f} us ({self.low_us:.1f}-{self.high_us:.1f})"
        rates = f"{self.tflops:7.1f} TFLOP/s {self.of_arithmetic:4.0%}"
        return f"{name} {spread} {rates}  {self.tbs:6.3f} TB/s {self.of_memory:4.0%} {self.note}"


def measure(f: Callable[..., Any], args: Sequence[Any], runs: int) -> list[float]:
    """Sorted seconds of `runs` runs of a compiled function, after one that is not counted."""
    if jax.default_backend() == "gpu":
        from jax.experimental.mosaic.gpu import profiler

        _, times = profiler.measure(f, iterations=runs)(*args)
        if times is not None:
            return sorted(1e-3 * t for t in (times if isinstance(times, list) else [times]))
    jax.block_until_ready(f(*args))
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        found.append(time.perf_counter() - start)
    return sorted(found)


def breakdown(f: Callable[..., Any], args: Sequence[Any]) -> list[tuple[str, float]]:
    """(kernel, seconds) of one run on a GPU, in order of launch."""
    from jax.experimental.mosaic.gpu import profiler

    _, parts = profiler.measure(f, aggregate=False)(*args)
    return [(name, 1e-3 * t) for name, t in parts or []]


def ceilings(runs: int = 10, side: int = SIDE, copy_bytes: int = COPY_BYTES) -> Ceilings:
    """A large bf16 product and a large copy on this device, random values."""
    a, b = (
        jax.random.normal(k, (side, side), jnp.bfloat16)
        for k in jax.random.split(jax.random.key(0))
    )
    seconds = statistics.median(measure(jax.jit(jnp.matmul), (a, b), runs))
    source = jax.random.bits(jax.random.key(1), (copy_bytes // 4,), jnp.uint32)
    copy = statistics.median(measure(jax.jit(lambda x: x ^ jnp.uint32(1)), (source,), runs))
    return Ceilings(2 * side**3 / seconds / 1e12, 2 * copy_bytes / copy / 1e12)


def time_case(
    op: str, case: Case, implementation: str, best: Ceilings, *, runs: int, seed: int = 0
) -> Row:
    """Times one case of one implementation."""
    package = importlib.import_module(f"pallas_kernels.{op}")
    function = functools.partial(
        getattr(package, case.function), implementation=implementation, **case.keywords()
    )
    args = case.on_device(seed)
    try:
        compiled = jax.jit(function).lower(*args).compile()
    except NotImplementedError as why:
        return Row(op, case.name, implementation, note=f"declined: {why}")
    times = measure(compiled, args, runs)
    return summarise(op, case, implementation, times, best)


def summarise(op: str, case: Case, name: str, times: Sequence[float], best: Ceilings) -> Row:
    """The row of a case from its sorted times in seconds."""
    median = statistics.median(times)
    tflops, tbs = case.flops / median / 1e12, case.bytes / median / 1e12
    low, high = times[len(times) // 10], times[-1 - len(times) // 10]
    return Row(
        op, case.name, name, 1e6 * median, 1e6 * low, 1e6 * high,
        tflops, tbs, tflops / best.tflops, tbs / best.tbs,
    )  # fmt: skip


def run(
    ops: Sequence[str] = OPERATIONS,
    *,
    implementations: Sequence[str] = ("auto",),
    only: Callable[[Case], bool] = lambda case: True,
    runs: int = 20,
    tag: str | None = None,
    best: Ceilings | None = None,
) -> Iterator[Row]:
    """Times every case with `tag`, yielding rows as they are done.

    Args:
        tag: None takes the released shapes on a GPU and the small ones elsewhere.

    Raises:
        ValueError: an operation that does not exist.
    """
    for op in ops:
        if op not in OPERATIONS:
            raise ValueError(f"ops: no operation {op!r}; expected one of {', '.join(OPERATIONS)}")
    best = best or ceilings(min(runs, 10))
    tag = tag or ("bench" if jax.default_backend() == "gpu" else "test")
    for op in ops:
        shapes = importlib.import_module(f"pallas_kernels.{op}.shapes")
        for case in tagged(shapes.CASES, tag):
            if only(case):
                for implementation in implementations:
                    yield time_case(op, case, implementation, best, runs=runs)


def write_csv(rows: Sequence[Row], path: Path | str) -> None:
    """One line a row, with a header."""
    names = [field.name for field in dataclasses.fields(Row)]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def plot_roofline(rows: Sequence[Row], best: Ceilings, path: Path | str) -> None:
    """Achieved TFLOP/s over FLOP per byte, under the two measured ceilings, as a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (the extra `plot`).
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    done = [(r.op, r.tflops, r.tbs) for r in rows if r.tflops is not None and r.tbs is not None]
    for op in dict.fromkeys(name for name, _, _ in done):
        mine = [(flops, rate) for name, flops, rate in done if name == op]
        axes.scatter([f / b for f, b in mine], [f for f, _ in mine], s=18, label=op)
    intensity = [2.0**e for e in range(-2, 15)]
    roof = [min(best.tflops, best.tbs * i) for i in intensity]
    axes.plot(intensity, roof, color="black", linewidth=1, label="measured ceilings")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
