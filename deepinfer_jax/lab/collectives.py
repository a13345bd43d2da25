"""What crosses devices: one record for every collective of a program, and what it costs on a link.

``bytes`` is the whole payload on one device: the operand of an all-reduce, reduce-scatter,
all-to-all or permute, the result of an all-gather. A device sends over a group of n

    all-reduce 2 (n-1)/n,  all-gather, reduce-scatter, all-to-all (n-1)/n,  permute 1

times that. Where a group spans nodes with m of its members in each, an all-to-all sends 1 - m/n of
its payload between nodes; gathers and reductions send each block between nodes once and share it
inside, so every device carries 1/m of the inter-node part. Both parts run at the same time.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from deepinfer_jax.lab.devices import Device

SHARE = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 1.0,
    "ragged-all-to-all": 1.0,
    "collective-permute": 1.0,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """kind: a key of SHARE. axes: mesh axes it runs over. times: executions a step.

    dynamic: inside a loop whose trips depend on data; then ``times`` counts one trip.
    scope: the named scopes of the program around it, layers left out.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    times: int = 1
    scope: str = ""
    dynamic: bool = False

    def sent(self, sizes: Mapping[str, int]) -> float:
        """Bytes one device sends in all executions."""
        n = math.prod(sizes[axis] for axis in self.axes)
        if self.kind == "collective-permute":
            return float(self.bytes * self.times)
        return SHARE[self.kind] * (n - 1) / n * self.bytes * self.times

    def seconds(self, axes: Mapping[str, int], device: Device) -> float:
        """Time of all executions by themselves. axes: every mesh axis and size, in device order."""
        n = math.prod(axes[axis] for axis in self.axes)
        if n == 1:
            return 0.0
        m = members_in_node(self.axes, axes, device.node)
        sent, nodes = self.sent(axes), n / m
        if nodes == 1:
            return sent / (device.inside.gb_s * 1e9) + self.times * device.inside.latency_us * 1e-6
        if self.kind in ("all-to-all", "ragged-all-to-all", "collective-permute"):
            between = sent * (1 - m / n) / ((n - 1) / n)
        else:
            between = sent * (1 - 1 / nodes) / ((n - 1) / n) / m
        slower = max(
            between / (device.between.gb_s * 1e9), (sent - between) / (device.inside.gb_s * 1e9)
        )
        return slower + self.times * device.between.latency_us * 1e-6


def members_in_node(group: Iterable[str], axes: Mapping[str, int], node: int) -> int:
    """Members of a collective's group in the first node; devices fill nodes in mesh order."""
    members = [0]
    stride = math.prod(axes.values())
    for axis, size in axes.items():
        stride //= size
        if axis in group:
            members = [start + i * stride for start in members for i in range(size)]
    return sum(1 for member in members if member < node)


def merged(found: Iterable[Collective]) -> list[Collective]:
    """Equal collectives added up, largest payload first."""
    table: dict[tuple, Collective] = {}
    for one in found:
        key = (one.kind, one.axes, one.bytes, one.scope, one.dynamic)
        before = table.get(key)
        table[key] = dataclasses.replace(one, times=one.times + (before.times if before else 0))
    return sorted(table.values(), key=lambda one: (-one.bytes * one.times, one.scope, one.kind))
