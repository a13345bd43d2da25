"""Parallel layouts: a mesh and a table of logical-to-mesh rules, read from a short TOML file.

Every parameter and activation names its dimensions with logical axes (``AXES`` below). A layout
maps each logical axis to zero, one or several mesh axes; the PartitionSpec of a tensor follows:

    expert -> [data, expert]:   spec(("expert", None, "ffn", None), [384, 2, 2304, 2560])
                                = P(("data", "expert"))

``[rules]`` place parameters and activations alike; ``[prefill]`` and ``[decode]`` override ``rows``
alone: both phases share one copy of the weights and one cache. A rule written as ``[]`` says
"replicated on purpose"; an absent rule says nothing, and a large tensor that ends up replicated by
silence is reported by ``warnings``. Nothing is dropped quietly: an unknown axis, two rules that put
one mesh axis twice into a tensor, or a size that does not divide is an error naming the layout, the
tensor and both sides.

A Layout is data, not devices: it is hashable and goes to ``jax.jit`` as a static argument. Traced
functions use its abstract mesh (``model.parallel.spmd``); the devices come from the arguments.
"""

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AXES = {
    "rows": "tokens in flight, one row per (sequence, position)",
    "slots": "sequences in the decode batch",
    "pages": "pages of the compressed cache",
    "stream": "mHC residual streams",
    "embed": "model width",
    "vocab": "rows of the embedding and the head",
    "q_rank": "rank of the query down projection",
    "heads": "query heads (weights: heads x head_dim rows)",
    "kv": "channels of the one shared KV latent",
    "o_group": "output groups (weights: groups x o_rank rows)",
    "index_heads": "heads of the indexer",
    "expert": "routed experts",
    "ffn": "width of an expert",
    "engram_rows": "rows of the Engram tables",
}
PHASES = ("prefill", "decode")
PER_PHASE = ("rows",)  # all other axes are of weights or of the cache
DISPATCH = ("gather", "alltoall", "ragged")
ENGRAM = ("sharded", "replicated", "host")
ORDERS = ("natural", "zigzag")

Axis = str | None
Rules = tuple[tuple[str, tuple[str, ...]], ...]


def _spare(where: str, count: Any) -> None:
    if type(count) is not int or count < 0:
        raise ValueError(f"{where}, spare_experts: must be an integer >= 0, not {count!r}")


def _choice(where: str, value: str, allowed: Sequence[str]) -> str:
    if value in allowed:
        return value
    close = difflib.get_close_matches(str(value), allowed, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"{where}: unknown {value!r}{hint}; expected one of {', '.join(allowed)}")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh axes with sizes, rules, phase overrides and the placement choices that are not axes.

    axes: (name, size) in device order; neighbours of the last axis are neighbouring devices.
    rules: (logical axis, mesh axes). phases: (phase, rules) that override those of `PER_PHASE`.
    moe_dispatch: how rows reach expert shards; moe_capacity: pairs one exchange carries between
    two shards, in units of an equal split (more pairs take more rounds, none is dropped).
    spare_experts: slots beyond one for each expert of a layer, for replicas of busy ones (EPLB).
    engram: where the tables live. prefill_order: "zigzag" gives each context shard an early and a
    late piece of the prompt (equal causal work).
    """

    name: str = "single"
    axes: tuple[tuple[str, int], ...] = ()
    rules: Rules = ()
    phases: tuple[tuple[str, Rules], ...] = ()
    moe_dispatch: str = "gather"
    moe_capacity: int | float = 2
    spare_experts: int = 0
    engram: str = "sharded"
    prefill_order: str = "natural"

    def __post_init__(self):
        where = f"layout {self.name!r}"
        _choice(f"{where}, moe_dispatch", self.moe_dispatch, DISPATCH)
        _choice(f"{where}, engram", self.engram, ENGRAM)
        _choice(f"{where}, prefill_order", self.prefill_order, ORDERS)
        if type(self.moe_capacity) not in (int, float) or not 0 < self.moe_capacity < math.inf:
            raise ValueError(
                f"{where}, moe_capacity: must be positive and finite, not {self.moe_capacity!r}"
            )
        _spare(where, self.spare_experts)
        for axis, size in self.axes:
            if type(size) is not int or size < 1:
                raise ValueError(
                    f"{where}, [mesh] {axis}: size must be an integer >= 1, not {size!r}"
                )
        names = tuple(name for name, _ in self.axes)
        for phase, _ in self.phases:
            _choice(f"{where}, phases", phase, PHASES)
        for table, rules in (("rules", self.rules), *self.phases):
            for logical, mesh_axes in rules:
                _choice(f"{where}, [{table}]", logical, tuple(AXES))
                if table != "rules" and logical not in PER_PHASE:
                    raise ValueError(
                        f"{where}, [{table}] {logical}: only {', '.join(PER_PHASE)} may differ "
                        "between the phases, which share weights and cache; expected it in [rules]"
                    )
                for axis in mesh_axes:
                    _choice(f"{where}, [{table}] {logical}", axis, names)
                if len(set(mesh_axes)) != len(mesh_axes):
                    raise ValueError(f"{where}, [{table}] {logical}: repeats an axis: {mesh_axes}")
        if len(set(names)) != len(names):
            raise ValueError(f"{where}, [mesh]: an axis is declared twice: {names}")
        if self.engram == "replicated" and self.mesh_axes("engram_rows"):
            raise ValueError(
                f"{where}: engram = 'replicated' contradicts the rule "
                f"engram_rows -> {self.mesh_axes('engram_rows')}"
            )

    @staticmethod
    def single() -> "Layout":
        """The layout of one device: no mesh, every constraint is the identity."""
        return Layout()

    @staticmethod
    def from_toml(path: str | Path, axes: Mapping[str, int] | None = None) -> "Layout":
        """Read a layout file; ``axes`` overrides sizes of mesh axes the file declares."""
        path = Path(path)
        with path.open("rb") as file:
            try:
                table = tomllib.load(file)
            except tomllib.TOMLDecodeError as error:
                raise ValueError(f"{path}: not valid TOML: {error}") from None
        choices = ("moe_dispatch", "moe_capacity", "spare_experts", "engram", "prefill_order")
        known = ("description", *choices, "mesh", "rules", *PHASES)
        for key in table:
            _choice(f"{path}", key, known)
        for key in ("mesh", "rules", *PHASES):
            if not isinstance(table.get(key, {}), dict):
                raise ValueError(f"{path}: {key} must be a table, got {table[key]!r}")
        sizes = dict(table.get("mesh", {}))
        for axis, size in (axes or {}).items():
            _choice(f"{path}, axis override", axis, tuple(sizes))
            sizes[axis] = size
        _spare(f"{path}", table.get("spare_experts", 0))
        return Layout(
            name=path.stem,
            axes=tuple(sizes.items()),
            rules=_read_rules(f"{path}, [rules]", table.get("rules", {})),
            phases=tuple(
                (phase, _read_rules(f"{path}, [{phase}]", table[phase]))
                for phase in PHASES
                if phase in table
            ),
            **{key: table[key] for key in choices if key in table},
        )

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(size for _, size in self.axes)

    def axis_size(self, mesh_axis: str) -> int:
        """Size of one mesh axis."""
        sizes = dict(self.axes)
        return sizes[_choice(f"layout {self.name!r}, mesh axis", mesh_axis, tuple(sizes))]

    def mesh_axes(self, logical: str, phase: str | None = None) -> tuple[str, ...]:
        """Mesh axes of size > 1 that shard a logical axis (in a phase, if one is named)."""
        _choice(f"layout {self.name!r}, logical axis", logical, tuple(AXES))
        rules = dict(self.rules)
        if phase is not None:
            _choice(f"layout {self.name!r}, phase", phase, PHASES)
            rules |= dict(dict(self.phases).get(phase, ()))
        sizes = dict(self.axes)
        return tuple(axis for axis in rules.get(logical, ()) if sizes[axis] > 1)

    def ways(self, logical: str, phase: str | None = None) -> int:
        """Number of shards of a logical axis; callers pad rows and slots to a multiple of it."""
        return math.prod(self.axis_size(axis) for axis in self.mesh_axes(logical, phase))

    def spec(
        self,
        axes: Sequence[Axis],
        shape: Sequence[int],
        name: str = "tensor",
        phase: str | None = None,
    ) -> PartitionSpec:
        """PartitionSpec of a tensor with these logical axes.

        Raises ValueError naming layout, tensor, axis and sizes for an unknown axis, a rank that
        differs, two dimensions on one mesh axis, and a size that the shards do not divide.
        """
        where = f"layout {self.name!r}, {name}"
        if len(axes) != len(shape):
            raise ValueError(f"{where}: {len(axes)} axes {tuple(axes)} for shape {tuple(shape)}")
        used: dict[str, str] = {}
        entries: list[str | tuple[str, ...] | None] = []
        for logical, length in zip(axes, shape, strict=True):
            if logical is None:
                entries.append(None)
                continue
            _choice(f"{where}, logical axis", logical, tuple(AXES))
            mesh_axes = self.mesh_axes(logical, phase)
            for axis in mesh_axes:
                if axis in used:
                    raise ValueError(
                        f"{where}: {used[axis]!r} and {logical!r} are both mapped to mesh axis "
                        f"{axis!r} (axes {tuple(axes)}, shape {tuple(shape)})"
                    )
                used[axis] = logical
            ways = math.prod(self.axis_size(axis) for axis in mesh_axes)
            if length % ways:
                sizes = " x ".join(f"{axis}={self.axis_size(axis)}" for axis in mesh_axes)
                raise ValueError(
                    f"{where}: axis {logical!r} of size {length} does not divide over {sizes} "
                    f"(axes {tuple(axes)}, shape {tuple(shape)})"
                )
            entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The mesh without devices, for use inside traced functions and shard_map."""
        names, sizes = zip(*self.axes, strict=True) if self.axes else ((), ())
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh over ``devices`` (default: the first ``size`` of ``jax.devices()``)."""
        found = list(jax.devices() if devices is None else devices)
        if len(found) < self.size or (devices is not None and len(found) != self.size):
            sizes = ", ".join(f"{axis}={size}" for axis, size in self.axes)
            raise ValueError(
                f"layout {self.name!r} needs {self.size} devices ({sizes}), found {len(found)}; "
                "override a size with --axis NAME=SIZE"
            )
        grid = np.array(found[: self.size]).reshape([size for _, size in self.axes])
        return Mesh(grid, [axis for axis, _ in self.axes], axis_types=(AxisType.Auto,) * grid.ndim)

    def sharding(
        self,
        axes: Sequence[Axis],
        shape: Sequence[int],
        mesh: Mesh | AbstractMesh,
        name: str = "tensor",
        phase: str | None = None,
    ) -> NamedSharding:
        """NamedSharding of a tensor; with ``engram = "host"`` tables lie in pinned host memory."""
        spec = self.spec(axes, shape, name, phase)
        if self.engram == "host" and "engram_rows" in axes:
            return NamedSharding(mesh, spec, memory_kind="pinned_host")
        return NamedSharding(mesh, spec)

    def warnings(
        self, tensors: Mapping[str, tuple[Sequence[Axis], Sequence[int], int]], large: int = 1 << 26
    ) -> list[str]:
        """What is legal but probably not meant, for tensors given as name -> (axes, shape, bytes).

        A tensor of at least ``large`` bytes that no rule shards although none of its axes is listed
        with an empty rule.
        """
        found = []
        ruled = {logical for logical, _ in self.rules}
        if self.engram == "replicated":
            ruled.add("engram_rows")
        for name, (axes, shape, nbytes) in tensors.items():
            spec = self.spec(axes, shape, name)
            named = [axis for axis in axes if axis is not None]
            silent = not any(axis in ruled for axis in named)
            if self.size > 1 and nbytes >= large and not any(spec) and silent:
                found.append(
                    f"{name}: {nbytes / 2**20:.0f} MiB replicated on {self.size} devices, no rule "
                    f"for any of its axes {tuple(named)}; write `axis = []` if that is meant"
                )
        return found


def _read_rules(where: str, table: Mapping[str, object]) -> Rules:
    rules = []
    for logical, value in table.items():
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{where} {logical}: expected an axis name or a list, got {value!r}")
        rules.append((logical, tuple(names)))
    return tuple(rules)
