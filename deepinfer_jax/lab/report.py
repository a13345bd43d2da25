"""One layout priced: bytes and work per device, collectives per mesh axis, modelled time.

The time of a step is taken as the largest of

    compute   sum over operand types of FLOP / peak
    memory    (bytes of arguments touched + traffic of intermediate results) / HBM bandwidth
    network   sum over collectives of bytes sent / link bandwidth + latency
    host      bytes of arguments in host memory that are touched / link bandwidth

as if they overlapped completely; ``serial`` is their sum. It is a model that ranks layouts and says
what binds, not a measurement; docs compare it with one.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from deepinfer_jax.lab import collectives as net
from deepinfer_jax.lab import program
from deepinfer_jax.lab.collectives import Collective
from deepinfer_jax.lab.devices import Device
from deepinfer_jax.lab.kernels import Costs
from deepinfer_jax.layout import Layout
from deepinfer_jax.spec import path_name

VERSION = 1


@dataclasses.dataclass(frozen=True)
class LayoutReport:
    """Everything is per device and step. bytes: held by group of arguments. activations: peak of
    intermediate results. sent: bytes by mesh axes and kind. ms: "compute", "memory", "host" and
    "network AXES".
    """

    layout: str
    device: str
    devices: int
    axes: dict[str, int]
    bytes: dict[str, int]
    activations: int
    capacity: int
    host_bytes: int
    flop: dict[str, float]
    touched: dict[str, float]
    traffic: float
    collectives: list[Collective]
    sent: dict[str, dict[str, float]]
    ms: dict[str, float]
    tokens: float | None = None
    source: str = "trace"
    warnings: list[str] = dataclasses.field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values()) + self.activations

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.capacity

    @property
    def network_ms(self) -> float:
        return sum((value for key, value in self.ms.items() if key.startswith("network")), 0.0)

    @property
    def bound(self) -> str:
        """The resource whose time is the step's time."""
        parts = self._parts()
        return max(parts, key=lambda key: parts[key])

    def _parts(self) -> dict[str, float]:
        parts = {key: self.ms[key] for key in ("compute", "memory", "host")}
        return parts | {"network": self.network_ms}

    @property
    def step_ms(self) -> float:
        """Everything overlapped."""
        return max(self._parts().values())

    @property
    def serial_ms(self) -> float:
        """Nothing overlapped."""
        return sum(self._parts().values())

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all devices together, if the caller said how many a step gives."""
        return None if self.tokens is None else self.tokens / (self.step_ms / 1e3)

    def to_json(self) -> str:
        """The fields and what follows from them, as JSON."""
        table = dataclasses.asdict(self) | {
            "version": VERSION,
            "total_bytes": self.total_bytes,
            "fits": self.fits,
            "bound": self.bound,
            "step_ms": self.step_ms,
            "serial_ms": self.serial_ms,
            "tokens_per_second": self.tokens_per_second,
        }
        return json.dumps(table, indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "LayoutReport":
        """Inverse of ``to_json``; raises ValueError for another version."""
        table = json.loads(text)
        if table.get("version") != VERSION:
            raise ValueError(f"layout report: version {table.get('version')!r}; expected {VERSION}")
        names = {field.name for field in dataclasses.fields(LayoutReport)}
        values = {key: value for key, value in table.items() if key in names}
        values["collectives"] = [
            Collective(**{**one, "axes": tuple(one["axes"])}) for one in values["collectives"]
        ]
        return LayoutReport(**values)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")


def price(
    function: Callable[..., Any],
    args: tuple,
    layout: Layout,
    device: Device,
    *,
    group: Callable[[str], str] = lambda path: path.split("/")[0],
    tokens: float | None = None,
    used: float = 1.0,
    collectives: list[Collective] | None = None,
    activations: int | None = None,
) -> LayoutReport:
    """Price one program under a layout.

    function, args: as for ``jax.jit(function).lower(*args)``; leaves are ShapeDtypeStruct, with a
    sharding where an argument is sharded outside shard_map. group: argument path -> row of the
    memory table. tokens: what a step produces on all devices. used: see ``kernels.Costs``.
    collectives, activations: from a compiled program instead of from the trace.
    """
    work = program.measure(function, args, Costs(used))
    axes = dict(layout.axes)
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(args)}
    held, host = _held(work, leaves, group)
    touched: dict[str, float] = {}
    from_host = 0.0
    for path, size in work.touched.items():
        if _on_host(leaves[path]):
            from_host += size
        else:
            touched[group(path)] = touched.get(group(path), 0.0) + size
    found = net.merged(work.collectives if collectives is None else collectives)
    ms = {
        "compute": 1e3 * sum(flop / device.peak(kind) for kind, flop in work.products.items()),
        "memory": (sum(touched.values()) + work.traffic) / (device.hbm_gb_s * 1e9) * 1e3,
        "host": from_host / (device.host.gb_s * 1e9) * 1e3,
    }
    sent: dict[str, dict[str, float]] = {}
    for one in found:
        name = "*".join(one.axes)
        kinds = sent.setdefault(name, {})
        kinds[one.kind] = kinds.get(one.kind, 0.0) + one.sent(axes)
        key = f"network {name}"
        ms[key] = ms.get(key, 0.0) + 1e3 * one.seconds(axes, device)
    return LayoutReport(
        layout=layout.name,
        device=device.name,
        devices=layout.size,
        axes=axes,
        bytes=held,
        activations=work.peak if activations is None else activations,
        capacity=int(device.memory_gb * 1e9),
        host_bytes=host,
        flop=dict(work.products),
        touched=touched,
        traffic=work.traffic,
        collectives=found,
        sent=sent,
        ms=ms,
        tokens=tokens,
        source="trace" if collectives is None else "compiled",
    )


def _held(
    work: program.Work, leaves: Mapping[str, Any], group: Callable[[str], str]
) -> tuple[dict[str, int], int]:
    held: dict[str, int] = {}
    host = 0
    for path, size in work.held.items():
        sharding = getattr(leaves[path], "sharding", None)
        if sharding is not None:
            shape = sharding.shard_shape(leaves[path].shape)
            size = leaves[path].dtype.itemsize
            for length in shape:
                size *= length
        if _on_host(leaves[path]):
            host += size
        else:
            held[group(path)] = held.get(group(path), 0) + size
    return held, host


def _on_host(leaf: Any) -> bool:
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == "pinned_host"
