"""Several processes that run one program together (`jax.distributed`).

Every process runs the same engine over the same requests and drives its own devices; the layout's
mesh spans them all. What they do must not depend on anything that one process sees and another does
not: clocks, files, which compilation ended first. Such things are decided by the first process and
told to the others (`from_first`); only the first writes results.
"""

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from deepinfer_jax.layout import Layout
from deepinfer_jax.runtime import platform


@dataclasses.dataclass(frozen=True)
class Processes:
    """coordinator: HOST:PORT of the first process, None for a single one. count, number: processes
    in all and which one this is."""

    coordinator: str | None = None
    count: int = 1
    number: int = 0

    @classmethod
    def parse(cls, coordinator: str | None, count: int | None, number: int | None) -> "Processes":
        """From the command line; raises ValueError unless all three or none are given."""
        if (coordinator, count, number) == (None, None, None):
            return cls()
        if coordinator is None or count is None or number is None:
            raise ValueError("--coordinator, --num-processes and --process-id go together")
        if not 0 <= number < count:
            raise ValueError(f"--process-id {number}: expected 0..{count - 1} (--num-processes)")
        return cls(coordinator, count, number)


def start(
    request: platform.Request, layout: Layout | None, processes: Processes, more: int = 0
) -> platform.Selected:
    """Joins the other processes and starts the devices; before anything else uses jax.

    On the CPU (`--platform cpu`) as many devices are simulated as the layout needs, and `more`.
    Raises ValueError if the layout's devices do not divide over the processes.
    """
    size = 1 if layout is None else layout.size
    if processes.count > 1 and layout is None:
        raise ValueError("--coordinator: give --layout too")
    if size % processes.count:
        raise ValueError(f"--layout: {size} devices do not divide over {processes.count} processes")
    if request.name == "cpu":
        if size + more > 1:
            jax.config.update("jax_num_cpu_devices", size // processes.count + more)
        if processes.count > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if processes.coordinator is not None:
        jax.distributed.initialize(
            processes.coordinator, num_processes=processes.count, process_id=processes.number
        )
    return platform.ready(request)


def is_first() -> bool:
    """Whether this process writes the results."""
    return jax.process_index() == 0


def from_first(make: Callable[[], Any]) -> Any:
    """What ``make`` gives the first process, on all of them; JSON (keys of objects become text)."""
    if jax.process_count() == 1:
        return make()
    text = json.dumps(make()).encode() if is_first() else b""
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(length, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(padded))
    return json.loads(told.astype(np.uint8).tobytes())


def results(path: Path) -> IO[str]:
    """The file to append results to; the other processes' lines go nowhere."""
    return path.open("a", encoding="utf-8") if is_first() else io.StringIO()
