"""Reports and layouts for people: rich trees and tables, and a plot.

``tree`` shows where every parameter goes; ``table`` puts reports side by side; ``difference`` lists
what changed between two layouts; ``plot`` draws memory and modelled time (needs the plot extra).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.tree import Tree

from deepinfer_jax.lab.report import LayoutReport
from deepinfer_jax.layout import PHASES, Layout

Declared = Mapping[str, Any]  # path -> Param: shape, dtype, axes, nbytes


def size(count: int | float) -> str:
    """Bytes with a unit, three digits: 1.23 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def local_bytes(layout: Layout, path: str, param: Any) -> tuple[tuple[int, ...], int]:
    """Shape and bytes of one device's part of a parameter."""
    spec = layout.spec(param.axes, param.shape, path)
    shape = list(param.shape)
    for i, names in enumerate(spec):
        for name in (names,) if isinstance(names, str) else names or ():
            shape[i] //= layout.axis_size(name)
    return tuple(shape), math.prod(shape) * (param.nbytes // max(1, math.prod(param.shape)))


def tree(layout: Layout, declared: Declared, fold: int = 3) -> Tree:
    """Parameters: logical axes -> PartitionSpec -> local shape -> bytes on one device.

    Layers whose parameters are placed alike are folded into one branch; ``fold`` is the depth of
    branches that are opened.
    """
    axes = " x ".join(f"{axis}={count}" for axis, count in layout.axes) or "one device"
    root = Tree(f"[bold]{layout.name}[/bold]  {axes}, moe_dispatch={layout.moe_dispatch}")
    nested: dict[str, Any] = {}
    for path, param in declared.items():
        *parents, leaf = path.split("/")
        branch = nested
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = (path, param)
    total = _grow(root, layout, nested, fold)
    root.add(f"[bold]total on one device: {size(total)}[/bold]")
    return root


def _grow(node: Tree, layout: Layout, nested: Mapping[str, Any], depth: int) -> int:
    total, alike = 0, {}
    for name, value in nested.items():
        if isinstance(value, tuple):
            path, param = value
            shape, count = local_bytes(layout, path, param)
            spec = layout.spec(param.axes, param.shape, path)
            logical = ", ".join(str(axis or "-") for axis in param.axes)
            node.add(
                f"{name}  [dim]({logical})[/dim] {tuple(spec)} -> {param.dtype}{list(shape)} "
                f"{size(count)}"
            )
            total += count
            continue
        branch = Tree("")
        count = _grow(branch, layout, value, depth - 1)
        total += count
        key = _placed(layout, value) if name.isdigit() else name
        before = alike.get(key)
        if before is not None:
            before[1].append(name)
            continue
        if depth <= 0:
            branch.children.clear()
        node.add(branch)
        alike[key] = (branch, [name], count)
    for branch, names, count in alike.values():
        shown = names[0] if len(names) == 1 else f"{', '.join(names)} (each)"
        branch.label = f"[bold]{shown}[/bold]  {size(count)}"
    return total


def _placed(layout: Layout, value: Any) -> Any:
    """What branches that are placed alike have in common: everything but their paths."""
    if isinstance(value, tuple):
        path, param = value
        spec = layout.spec(param.axes, param.shape, path)
        return param.axes, param.shape, param.dtype, param.nbytes, tuple(spec)
    return tuple((name, _placed(layout, inner)) for name, inner in value.items())


def table(reports: Sequence[LayoutReport]) -> Table:
    """One row a layout: bytes per device, bytes sent per mesh axis, modelled time, what binds."""
    groups = list(dict.fromkeys(name for report in reports for name in report.bytes))
    out = Table(title="per device and step; time is a model, not a measurement")
    for name in ("layout", "devices", *groups, "activations", "total", "fits"):
        out.add_column(name, justify="left" if name in ("layout", "devices") else "right")
    for name in (
        "sent per axis",
        "compute",
        "memory",
        "network",
        "host",
        "step ms",
        "bound",
        "tokens/s",
    ):
        out.add_column(name, justify="left" if name in ("sent per axis", "bound") else "right")
    for report in reports:
        sent = [
            f"{axis}: {kind} {size(count)}"
            for axis, kinds in report.sent.items()
            for kind, count in sorted(kinds.items(), key=lambda item: -item[1])
            if count >= 2**20
        ]
        speed = report.tokens_per_second
        out.add_row(
            report.layout,
            f"{report.device}x{report.devices}",
            *(size(report.bytes.get(name, 0)) for name in groups),
            size(report.activations),
            size(report.total_bytes),
            "yes" if report.fits else "[bold red]no[/bold red]",
            "\n".join(sent) or "-",
            f"{report.ms['compute']:.2f}",
            f"{report.ms['memory']:.2f}",
            f"{report.network_ms:.2f}",
            f"{report.ms['host']:.2f}",
            f"{report.step_ms:.2f}",
            report.bound,
            "-" if speed is None else f"{speed:,.0f}",
        )
    return out


def difference(first: Layout, second: Layout, declared: Declared) -> Table:
    """Choices, rules (with those of a phase, where one has its own) and placements that differ."""
    out = Table(title=f"{first.name} -> {second.name}")
    for name in ("what", first.name, second.name):
        out.add_column(name)
    fields = ("axes", "moe_dispatch", "moe_capacity", "spare_experts", "engram", "prefill_order")
    for field in fields:
        pair = getattr(first, field), getattr(second, field)
        if pair[0] != pair[1]:
            out.add_row(field, *map(str, pair))
    rules = [dict(layout.rules) for layout in (first, second)]
    for phase in (None, *PHASES):
        over = [
            dict(dict(layout.phases).get(phase, ()) if phase else ()) for layout in (first, second)
        ]
        named = (*rules[0], *rules[1]) if phase is None else (*over[0], *over[1])
        for logical in dict.fromkeys(named):
            pair = [
                str(list((rule | mine).get(logical, ())))
                for rule, mine in zip(rules, over, strict=True)
            ]
            if pair[0] != pair[1]:
                out.add_row(f"rule {logical}{f' of {phase}' if phase else ''}", *pair)
    seen: set[tuple[str, ...]] = set()
    for path, param in declared.items():
        cells = []
        for layout in (first, second):
            shape, count = local_bytes(layout, path, param)
            spec = tuple(layout.spec(param.axes, param.shape, path))
            cells.append(f"{spec} {list(shape)} {size(count)}")
        short = "/".join("*" if part.isdigit() else part for part in path.split("/"))
        if cells[0] != cells[1] and (short, *cells) not in seen:
            seen.add((short, *cells))
            out.add_row(short, *cells)
    return out


def plot(reports: Sequence[LayoutReport], path: str | Path) -> None:
    """Memory per device by group and modelled time by resource, one bar a layout, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 1.3 * len(reports), 7), layout="constrained")
    FigureCanvasAgg(figure)
    memory, time = figure.subplots(2, 1)
    names = [report.layout for report in reports]
    groups = list(dict.fromkeys(name for report in reports for name in report.bytes))
    bottom = [0.0] * len(reports)
    for group in (*groups, "activations"):
        heights = [
            (report.activations if group == "activations" else report.bytes.get(group, 0)) / 1e9
            for report in reports
        ]
        memory.bar(names, heights, bottom=bottom, label=group)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for i, report in enumerate(reports):
        memory.hlines(report.capacity / 1e9, i - 0.45, i + 0.45, colors="black")
    memory.set_ylabel("GB per device (line: capacity)")
    memory.legend(fontsize="small")
    width = 0.2
    for i, part in enumerate(("compute", "memory", "network", "host")):
        values = [report.network_ms if part == "network" else report.ms[part] for report in reports]
        time.bar([j + (i - 1.5) * width for j in range(len(reports))], values, width, label=part)
    time.set_xticks(range(len(reports)), names)
    time.set_ylabel("modelled ms a step")
    time.legend(fontsize="small")
    for axes in (memory, time):
        axes.tick_params(axis="x", rotation=30)
    figure.savefig(path, dpi=150)
