"""Device idle time, read from a profile that `jax.profiler` wrote.

Every operation in a profile (`*.xplane.pb`) names the module it belongs to and, on most devices,
the run of it. Over the span from the first operation to the last one,

    idle      share of the span in which no operation and no copy runs on the device
    between   the part of it that lies between two runs: the last operation before the gap and the
              first one after it belong to different runs. None where the profile has no runs; then
              `idle`, which also has the gaps inside a run, bounds it from above

`ranking` says what the device's time went to, by kernel. Kernels of one name but for the number
that the compiler gave them are one line; our own are named after their operation and shape.
"""

import dataclasses
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Op(NamedTuple):
    """start, end in ns; module: "" where the profile has none; run: (module, run) or None; name: of
    the kernel or copy."""

    start: float
    end: float
    module: str
    run: tuple[str, int] | None
    name: str = ""


class Share(NamedTuple):
    """A kernel's launches and seconds in one turn, and its share of all kernels' time."""

    kernel: str
    launches: float
    seconds: float
    share: float


@dataclasses.dataclass(frozen=True)
class Idle:
    """span, busy in seconds; idle, between: shares of the span; runs: of the module looked at."""

    span: float
    busy: float
    idle: float
    between: float | None
    runs: int | None


def recorded(folder: str | Path) -> Any:
    """A context in which jax writes a profile without Python's calls, which would slow the host
    down and leave the device idle."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return jax.profiler.trace(str(folder), profiler_options=options)


def busiest(ops: Iterable[Op]) -> str | None:
    """The module that the device spent most time in; None if no operation is named."""
    spent: dict[str, float] = {}
    for op in ops:
        if op.module:
            spent[op.module] = spent.get(op.module, 0.0) + op.end - op.start
    return max(spent, key=lambda name: spent[name], default=None)


def read(folder: str | Path) -> list[Op]:
    """Operations of the newest profile under a folder. Raises FileNotFoundError, ValueError."""
    files = sorted(Path(folder).glob("**/*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"{folder}: no profile (*.xplane.pb)")
    with warnings.catch_warnings():  # jaxlib's type of event statistics has no __module__
        warnings.simplefilter("ignore", DeprecationWarning)
        found = list(_ops(jax.profiler.ProfileData.from_file(str(files[-1]))))
    if not found:
        raise ValueError(f"{files[-1]}: no operation of a compiled module in it")
    return found


def measure(ops: Iterable[Op], module: str | None = None) -> Idle:
    """Idle time over all operations; module: only from its first to its last one, e.g. "jit_turn".

    Raises ValueError if nothing of the module ran.
    """
    ordered = sorted(ops)
    mine = [op for op in ordered if module in (None, op.module)]
    if not mine:
        known = sorted({op.module for op in ordered})
        raise ValueError(f"profile: nothing of module {module!r} ran; there are {', '.join(known)}")
    first, last = mine[0].start, max(op.end for op in mine)
    inside = [op for op in ordered if op.end > first and op.start < last]
    named = [op for op in mine if op.run is not None]
    empty = between = 0.0
    end, run = first, mine[0].run
    for op in inside:
        if op.start > end:
            empty += op.start - end
            between += (op.start - end) * (op.run != run)
        if op.end > end:
            end, run = op.end, op.run
    span = last - first
    known = bool(named) and all(op.run is not None for op in inside)
    return Idle(
        span / 1e9,
        (span - empty) / 1e9,
        empty / span if span else 0.0,
        (between / span if span else 0.0) if known else None,
        len({op.run for op in named}) if known else None,
    )


def ranking(ops: Iterable[Op], turns: int, most: int = 20) -> list[Share]:
    """The kernels that took longest over `turns` equal turns, longest first; the last entry,
    "others", is all the rest. Kernels that ran side by side each count in full."""
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for op in ops:
        spent[re.sub(r"(?:[._]\d+)+$", "", op.name) or "unnamed"].append(op.end - op.start)
    total = sum(map(sum, spent.values()))
    longest = sorted(spent, key=lambda kernel: sum(spent[kernel]), reverse=True)
    lines = [(kernel, spent[kernel]) for kernel in longest[:most]]
    if rest := [time for kernel in longest[most:] for time in spent[kernel]]:
        lines.append(("others", rest))
    return [
        Share(kernel, len(times) / turns, sum(times) / turns / 1e9, sum(times) / total)
        for kernel, times in lines
    ]


def _ops(profile: Any) -> Iterator[Op]:
    """Of a GPU's streams everything is work, named or not (nodes of a graph need not be); of the
    host's threads only what belongs to a compiled module. Of several devices, the first."""
    planes = list(profile.planes)
    devices = sorted(plane.name for plane in planes if plane.name.startswith("/device:"))
    for plane in planes:
        device = plane.name in devices
        if device and plane.name != devices[0]:
            continue
        for line in plane.lines:
            if device and line.name in _SUMMARIES:
                continue
            for event in line.events:
                stats = dict(event.stats)
                module, run = stats.get("hlo_module"), stats.get("run_id")
                if (module is None and not device) or event.duration_ns <= 0:
                    continue
                name = str(module or "")
                end = event.start_ns + event.duration_ns
                place = None if run is None else (name, int(run))
                yield Op(event.start_ns, end, name, place, str(event.name))


_SUMMARIES: Sequence[str] = ("XLA Modules", "XLA Ops", "Steps", "Framework Ops", "Source code")
"""Lines of a device plane that repeat its streams."""
