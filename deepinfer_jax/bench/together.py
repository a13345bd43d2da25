"""Compiles the points of a sweep side by side, in processes of their own, before any is measured.

Most of compiling a step is one thread's work and takes minutes at released width, so that a sweep
spends its time compiling on one core. Each process puts its program into jax's compilation cache on
disk and is gone when the first point runs: nothing else is on the device or the host then. On a GPU
they need XLA_PYTHON_CLIENT_PREALLOCATE=false, or the first one takes most of its memory.
"""

import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax

from deepinfer_jax.bench import measure
from deepinfer_jax.bench.sweeps import Point
from deepinfer_jax.runtime import platform, warmup


def compile_points(
    points: Sequence[Point], jobs: int, request: platform.Request, folder: Path | None
) -> None:
    """Compiles every point, at most `jobs` at a time, into a folder (None: the default one) that
    this process then reads from; it must not use a device yet. What does not compile is told, and
    tried again by whoever runs the point."""
    warmup.keep_programs(folder)
    spawn = multiprocessing.get_context("spawn")
    # A process a point: one that was compiled leaves memory behind, here and on the device.
    with ProcessPoolExecutor(jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        work = [pool.submit(_compile, point, request, folder) for point in points]
        for point, one in zip(points, work, strict=True):
            if error := one.result():
                print(f"{point.name}: did not compile: {error}", file=sys.stderr)


def _compile(point: Point, request: platform.Request, folder: Path | None) -> str | None:
    """None, or what went wrong: jax's errors do not travel between processes."""
    warmup.keep_programs(folder)
    platform.ready(request)
    try:
        measure.compile_only(point.slice())
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        return " ".join(str(error).split())[:300]
    return None
