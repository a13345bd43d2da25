"""``deepinfer-jax layout show | compare | diff`` without the argument parser.

The model comes in from outside: ``declared`` maps parameter paths to ``Param`` as they lie under a
layout, ``build`` makes the program of a layout (see ``Case``). Functions return an exit code: 0, or
1 where a compared layout does not fit.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from deepinfer_jax import shipped
from deepinfer_jax.lab import devices as kinds
from deepinfer_jax.lab import report as reports
from deepinfer_jax.lab import simulate, views
from deepinfer_jax.lab.report import LayoutReport
from deepinfer_jax.layout import Layout

LARGE = 1 << 26


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to price. function, args: see ``report.price``. group: argument path -> memory row.
    tokens: produced by all devices in a step. used: share of expert rows in use."""

    function: Callable[..., Any]
    args: tuple
    group: Callable[[str], str]
    tokens: float | None = None
    used: float = 1.0


def read(names: Sequence[str], axes: Mapping[str, int] | None = None) -> list[Layout]:
    """Layouts by file or shipped name; ``axes`` overrides sizes in those that declare the axis.

    Raises ValueError for an override that no layout declares.
    """
    axes = dict(axes or {})
    found, used = [], set()
    for name in names:
        path = shipped.find("layouts", name)
        declared = {axis for axis, _ in Layout.from_toml(path).axes}
        mine = {axis: size for axis, size in axes.items() if axis in declared}
        used |= set(mine)
        found.append(Layout.from_toml(path, mine))
    if wrong := set(axes) - used:
        raise ValueError(f"--axis {sorted(wrong)[0]}: no layout of {', '.join(names)} declares it")
    return found


def show(
    layout: Layout,
    declared: Callable[[Layout], Mapping[str, Any]],
    console: Console,
    depth: int = 3,
) -> int:
    """Print the tree of parameters and the layout's warnings."""
    params = declared(layout)
    console.print(views.tree(layout, params, depth))
    for line in _warnings(layout, params):
        console.print(f"[yellow]warning:[/yellow] {line}")
    return 0


def compare(
    layouts: Sequence[Layout],
    build: Callable[[Layout], Case],
    declared: Callable[[Layout], Mapping[str, Any]],
    device: str,
    console: Console,
    *,
    json_to: str | Path | None = None,
    png_to: str | Path | None = None,
    compiled: Callable[[Layout], simulate.Compiled] | None = None,
) -> int:
    """Price layouts for devices such as ``"h200x64"`` and print them side by side.

    A layout of another size than the devices is an error that names both. compiled: takes
    collectives, and for GPUs the peak of intermediate results, from a compiled program instead of
    the trace. json_to: a folder that gets one file a
    layout; png_to: a plot.
    """
    kind, count = kinds.parse(device)
    found: list[LayoutReport] = []
    for layout in layouts:
        if layout.size != count:
            sizes = ", ".join(f"{axis}={size}" for axis, size in layout.axes) or "no mesh"
            raise ValueError(
                f"layout {layout.name!r} has {layout.size} devices ({sizes}), --devices asks for "
                f"{count}; override with --axis NAME=SIZE"
            )
        case = build(layout)
        program = compiled(layout) if compiled else None
        priced = reports.price(
            case.function,
            case.args,
            layout,
            kind,
            group=case.group,
            tokens=case.tokens,
            used=case.used,
            collectives=program.collectives if program else None,
            # The CPU backend's temporaries are not those of an accelerator.
            activations=program.temporary_bytes if program and program.platform != "cpu" else None,
        )
        if program:
            console.print(
                f"{layout.name}: compiled for {layout.size} {program.platform} devices in "
                f"{program.seconds:.0f} s, {views.size(program.argument_bytes)} of arguments and "
                f"{views.size(program.temporary_bytes)} of temporaries each"
            )
        found.append(dataclasses.replace(priced, warnings=_warnings(layout, declared(layout))))
    console.print(views.table(found))
    for one in found:
        for line in one.warnings:
            console.print(f"[yellow]{one.layout}:[/yellow] {line}")
    if json_to is not None:
        Path(json_to).mkdir(parents=True, exist_ok=True)
        for one in found:
            one.save(Path(json_to) / f"{one.layout}.json")
    if png_to is not None:
        views.plot(found, png_to)
    return 0 if all(one.fits for one in found) else 1


def diff(
    first: Layout,
    second: Layout,
    declared: Callable[[Layout], Mapping[str, Any]],
    console: Console,
) -> int:
    """Print rules and parameter placements that differ."""
    # One set of parameters for both, padded for the one that cuts Engram rows finer.
    finer = max((first, second), key=lambda layout: layout.ways("engram_rows"))
    console.print(views.difference(first, second, declared(finer)))
    return 0


def _warnings(layout: Layout, params: Mapping[str, Any]) -> list[str]:
    return layout.warnings(
        {path: (param.axes, param.shape, param.nbytes) for path, param in params.items()}, LARGE
    )
