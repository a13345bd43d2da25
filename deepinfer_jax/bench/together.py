"""A sweep whose points compile side by side, each in a process of its own, and then run in turn.

Most of compiling a step is one thread's work and takes minutes at released width, so that a sweep
spends its time compiling on one core. Here up to `jobs` points compile at a time; when all of them
have, one after the other runs while the rest wait: nothing else is on the device or the host then.
On a GPU they need XLA_PYTHON_CLIENT_PREALLOCATE=false, or the first one takes most of its memory.
"""

import itertools
import multiprocessing
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from deepinfer_jax.bench import measure, sweeps
from deepinfer_jax.bench.sweeps import Point
from deepinfer_jax.runtime import platform


def measured(
    points: Iterable[Point], jobs: int, request: platform.Request, timing: measure.Timing
) -> Iterator[tuple[Point, dict[str, Any]]]:
    """As `sweeps.measured`. A process that ends early costs its own point alone, which says so."""
    for some in itertools.batched(points, jobs):
        yield from _together(some, request, timing)


def _together(
    points: tuple[Point, ...], request: platform.Request, timing: measure.Timing
) -> Iterator[tuple[Point, dict[str, Any]]]:
    spawn = multiprocessing.get_context("spawn")
    ends, workers = [], []
    for point in points:
        mine, other = spawn.Pipe()
        worker = spawn.Process(target=_work, args=(other, point, request, timing), daemon=True)
        worker.start()
        other.close()  # else the connection would outlive the worker
        ends.append(mine)
        workers.append(worker)
    try:
        ended = [_received(end) for end in ends]
        for point, found, end, worker in zip(points, ended, ends, workers, strict=True):
            if found is None:  # it has compiled
                end.send(None)
                found = _received(end)
            yield point, found
            worker.join()
    finally:
        for worker in workers:
            worker.terminate()


def _received(end: Connection) -> Any:
    try:
        return end.recv()
    except EOFError:
        return {"seconds": None, "error": "its process ended early, which says why on stderr"}


def _work(end: Connection, point: Point, request: platform.Request, timing: measure.Timing) -> None:
    """Sends None when it has compiled, waits for its turn, sends what it measured."""
    platform.ready(request)

    def run(point: Point) -> dict[str, Any]:
        ready = measure.prepare(point.slice())
        end.send(None)
        end.recv()
        return measure.run(ready, timing.ceilings(), timing)

    ((_, found),) = sweeps.measured([point], run)
    end.send(found)
