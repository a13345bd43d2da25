"""Collectives and products of a compiled program, read from XLA's text.

Collectives are read after SPMD partitioning: that pass's dump has the true types (the CPU backend
later widens bf16 collectives to f32). A while loop's trips come from its condition, ``counter <
constant``; any other condition depends on data.
Groups of devices appear as lists ``{{0,4},{1,5}}``, as iotas ``[4,16]<=[16,4]T(1,0)`` and as mesh
axes ``mesh['data'=2,'expert'=4] {'expert'}``; all are turned into the axes of the caller's mesh.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from deepinfer_jax.lab.collectives import SHARE, Collective

_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$"
)
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_WORDS = r"while|body|cond|branch_\d+_fun|closed_call|eval_jaxpr|shard_map|layer_\d+|\w*\(.*?\)"
_SCOPE_NOISE = re.compile(rf"^(?:{_WORDS})$")


@dataclasses.dataclass
class _Computation:
    lines: list[re.Match] = dataclasses.field(default_factory=list)
    root: str = ""


def collectives(text: str, axes: Mapping[str, int]) -> list[Collective]:
    """Every collective the entry computation executes. axes: mesh axes and sizes, device order.

    Raises ValueError for a group of devices that is no set of mesh axes.
    """
    computations, entry = _split(text)
    return list(_walk(computations, entry, axes, 1, False))


def products(text: str) -> float:
    """FLOP of every dot the entry computation executes, 2 m n k each.

    Raises ValueError for a loop with dots whose trips depend on data, and for a product handed to a
    library (a custom call), whose shapes are not read.
    """
    computations, entry = _split(text)
    return _products(computations, entry)


def _products(computations: dict[str, _Computation], name: str) -> float:
    found, types = 0.0, {line["name"]: line["type"] for line in computations[name].lines}
    for match in computations[name].lines:
        op, rest = match["op"], match["rest"]
        if op == "dot":
            operand = re.search(r"%([\w.\-]+)", rest)
            axes = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", rest)
            if operand is None or axes is None:
                raise ValueError(f"{match['name']}: a dot that is not understood: {rest[:120]}")
            shape = _dimensions(types[operand[1]])
            depth = math.prod(shape[int(axis)] for axis in axes[1].split(","))
            found += 2.0 * depth * math.prod(_dimensions(match["type"]))
        elif op == "while":
            inside = _products(computations, _attribute(rest, "body"))
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest)
            trips = int(known[1]) if known else _trips(computations, _attribute(rest, "condition"))
            if inside and trips is None:
                raise ValueError(f"{match['name']}: a loop with products, its trips are not known")
            found += inside * (trips or 1)
        elif op == "conditional":
            found += max(_products(computations, one) for one in _branches(rest))
        elif op in ("call", "fusion", "map"):
            key = "calls" if op == "fusion" else "to_apply"
            found += _products(computations, _attribute(rest, key))
        elif op == "custom-call" and re.search(r'target="[^"]*(gemm|matmul|conv)', rest):
            raise ValueError(f"{match['name']}: a product in a library: {rest[:120]}")
    return found


def _branches(rest: str) -> list[str]:
    if branches := re.search(r"branch_computations=\{(.*?)\}", rest):
        return [branch.strip().lstrip("%") for branch in branches[1].split(",")]
    return [_attribute(rest, "true_computation"), _attribute(rest, "false_computation")]


def _dimensions(text: str) -> list[int]:
    shape = _SHAPE.search(text)
    return [int(dim) for dim in shape[2].split(",") if dim] if shape else []


def _split(text: str) -> tuple[dict[str, _Computation], str]:
    found: dict[str, _Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            head = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
            if head is None:
                continue
            current = found.setdefault(head[2], _Computation())
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.lines.append(match)
            if line.lstrip().startswith("ROOT"):
                current.root = line
    if not entry:
        raise ValueError("HLO text has no ENTRY computation")
    return found, entry


def _walk(
    computations: dict[str, _Computation],
    name: str,
    axes: Mapping[str, int],
    times: int,
    dynamic: bool,
) -> Iterator[Collective]:
    for match in computations[name].lines:
        op, rest = match["op"], match["rest"]
        if op == "while":
            trips = _trips(computations, _attribute(rest, "condition"))
            body = _attribute(rest, "body")
            yield from _walk(computations, body, axes, times * (trips or 1), dynamic or not trips)
        elif op == "conditional":
            options = [
                list(_walk(computations, one, axes, times, dynamic)) for one in _branches(rest)
            ]
            yield from max(options, key=lambda found: sum(one.bytes * one.times for one in found))
        elif op == "call":
            yield from _walk(computations, _attribute(rest, "to_apply"), axes, times, dynamic)
        elif (kind := op.removesuffix("-start")) in SHARE:
            yield _collective(kind, match, axes, times, dynamic)


def _collective(
    kind: str, match: re.Match, axes: Mapping[str, int], times: int, dynamic: bool
) -> Collective:
    rest = match["rest"]
    group = _group_axes(kind, rest, axes, match["name"])
    size = _type_bytes(match["type"])
    if kind == "reduce-scatter":
        size *= math.prod(axes[axis] for axis in group)
    op_name = re.search(r'op_name="([^"]*)"', rest)
    parts = op_name[1].split("/")[:-1] if op_name else []
    scope = "/".join(part for part in parts if not _SCOPE_NOISE.match(part))
    return Collective(kind, group, size, times, scope, dynamic)


def _trips(computations: dict[str, _Computation], name: str) -> int | None:
    """Trips of ``counter < constant``, counting from zero by one; None for another condition."""
    condition = computations[name]
    compare = re.search(r"compare\(([^,]+), ([^)]+)\), direction=LT", condition.root)
    if compare is None:
        return None
    bound = compare[2].split()[-1].lstrip("%")
    for match in condition.lines:
        if match["name"] == bound and match["op"] == "constant":
            value = match["rest"].split(")")[0]
            whole = re.fullmatch(r"[su]\d+\[\]", match["type"]) and re.fullmatch(r"\d+", value)
            return int(value) if whole else None
    return None


def _attribute(rest: str, key: str) -> str:
    match = re.search(rf"{key}=%?([\w.\-]+)", rest)
    if match is None:
        raise ValueError(f"HLO instruction has no {key}: {rest[:120]}")
    return match[1]


def _type_bytes(text: str) -> int:
    total = 0
    for dtype, dims in _SHAPE.findall(text):
        count = math.prod(int(dim) for dim in dims.split(",") if dim)
        total += count * _itemsize(dtype)
    return total


def _itemsize(name: str) -> int:
    if name == "pred" or name.startswith(("f8", "s4", "u4", "f4")):
        return 1
    width = {"bf16": np.dtype(ml_dtypes.bfloat16).itemsize}.get(name)
    return width or int(re.sub(r"\D", "", name)) // 8


def _group_axes(kind: str, rest: str, axes: Mapping[str, int], name: str) -> tuple[str, ...]:
    """Mesh axes along which the groups of a collective run."""
    if mesh := re.search(r"replica_groups=mesh\[.*?\] \{([^}]*)\}", rest):
        return tuple(axis for axis in axes if f"'{axis}'" in mesh[1])
    grid = np.arange(math.prod(axes.values())).reshape(list(axes.values()))
    if kind == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", rest.split("source_target_pairs=")[1])
        places = {int(grid[index]): index for index in np.ndindex(grid.shape)}
        moved = {
            axis
            for source, target in pairs
            for position, axis in enumerate(axes)
            if places[int(source)][position] != places[int(target)][position]
        }
        return tuple(axis for axis in axes if axis in moved)
    groups = {frozenset(map(int, group)) for group in _groups(rest, grid.size, name)}
    for count in range(len(axes) + 1):
        for chosen in itertools.combinations(range(len(axes)), count):
            moved = np.moveaxis(grid, chosen, range(grid.ndim - count, grid.ndim))
            rows = moved.reshape(-1, math.prod(grid.shape[axis] for axis in chosen))
            if {frozenset(map(int, row)) for row in rows} == groups:
                return tuple(list(axes)[axis] for axis in chosen if grid.shape[axis] > 1)
    raise ValueError(f"{name}: its groups are no set of the mesh axes {dict(axes)}: {rest[:160]}")


def _groups(rest: str, devices: int, name: str) -> list[list[int]]:
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", rest):
        return [
            [int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])
        ]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota:
        shape, base = ([int(i) for i in iota[i].split(",")] for i in (1, 2))
        ids = np.arange(math.prod(base)).reshape(base)
        if iota[3]:
            ids = ids.transpose([int(i) for i in iota[3].split(",")])
        return ids.reshape(shape).tolist()
    if "replica_groups={}" in rest:
        return [list(range(devices))]
    raise ValueError(f"{name}: replica groups are not understood: {rest[:160]}")
