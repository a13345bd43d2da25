"""Devices to price a layout for: peaks and links, read from ``configs/devices.toml``.

``h200x64`` means 64 devices of kind ``h200``. A device has three links: inside a node of ``node``
devices, between nodes, and to host memory; bandwidths are one direction of one device. The file
names the source of its numbers; units are GB/s and TFLOP/s, powers of ten, dense rates.
"""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from deepinfer_jax import shipped


@dataclasses.dataclass(frozen=True)
class Link:
    """gb_s: one direction of one device. latency_us: least time of one collective."""

    gb_s: float
    latency_us: float


@dataclasses.dataclass(frozen=True)
class Device:
    """Peaks of one device; tflops by operand type ("fp8", "bf16", "f32")."""

    name: str
    memory_gb: float
    hbm_gb_s: float
    tflops: tuple[tuple[str, float], ...]
    node: int
    inside: Link
    between: Link
    host: Link
    source: str
    cuda: str | None = None

    def peak(self, dtype: str) -> float:
        """FLOP/s for products of operands of this type; unknown types count as f32."""
        rates = dict(self.tflops)
        return rates.get(dtype, rates["f32"]) * 1e12


def parse(text: str, path: str | Path | None = None) -> tuple[Device, int]:
    """``"h200x64"`` -> (the device, 64); a kind alone means one."""
    match = re.fullmatch(r"(\w+?)(?:x(\d+))?", text)
    if match is None:
        raise ValueError(f"devices {text!r}: expected KIND or KINDxCOUNT, such as h200x64")
    file = Path(path) if path else shipped.configs() / "devices.toml"
    with file.open("rb") as handle:
        table = tomllib.load(handle)
    name = match[1]
    if name not in table:
        raise ValueError(f"devices {text!r}: {file} knows {', '.join(table)}, not {name!r}")
    count = int(match[2] or 1)
    if count < 1:
        raise ValueError(f"devices {text!r}: expected at least one device")
    return _device(f"{file} [{name}]", name, table[name]), count


def _link(table: Mapping) -> Link:
    return Link(**{key: float(value) for key, value in table.items()})


def _device(where: str, name: str, table: Mapping) -> Device:
    fields = {field.name for field in dataclasses.fields(Device)} - {"name"}
    if wrong := set(table) ^ (fields - {"cuda"} | set(table) & {"cuda"}):
        raise ValueError(f"{where}: missing or unknown field {sorted(wrong)[0]!r}")
    if missing := {"fp8", "bf16", "f32"} - set(table["tflops"]):
        raise ValueError(f"{where}: tflops lacks {sorted(missing)[0]!r}")
    return Device(
        name,
        **{
            **table,
            **{key: float(table[key]) for key in ("memory_gb", "hbm_gb_s")},
            "tflops": tuple((kind, float(rate)) for kind, rate in sorted(table["tflops"].items())),
            **{key: _link(table[key]) for key in ("inside", "between", "host")},
        },
    )
