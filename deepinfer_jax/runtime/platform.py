"""Which device runs the model: selected before anything touches jax, probed before weights load.

Three routes: an installed package that registers itself with jax (`--platform NAME`), a plugin
library by path (`--platform NAME --pjrt-plugin PATH --plugin-option K=V`), or jax's own settings
left alone. A platform that was asked for is the only one that jax may start, so nothing falls back
to the CPU; a plugin that is missing, broken or of another version is a `PlatformError` of one page:
what failed, why, the command that fixes it.

`probe` runs each thing that the programs rely on (types, sort, gather, a collective, donation, ...)
with inputs whose answers are known, and returns the table as data. A device is known by the name it
was selected under: a plugin may report any `device.platform`, also "cpu". No environment variable
is read or set.
"""

import argparse
import dataclasses
import functools
import glob
import importlib.metadata
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax.layout import Layout
from deepinfer_jax.runtime import probes

Option = str | int | float | bool | list[int]
BUILT_IN = ("cpu", "tpu", "gpu")
TESTED = ("cpu", "cuda")


class PlatformError(ValueError):
    """A device that cannot be used; the message is a page naming cause and fix."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked for. name None: jax decides; plugin None: an installed package brings it.

    options: create options of the plugin's client, as (name, value) pairs.
    """

    name: str | None = None
    plugin: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(
        cls, name: str | None = None, plugin: str | None = None, options: Sequence[str] = ()
    ) -> "Request":
        """From the command line's texts; raises ValueError naming the option."""
        if plugin is not None and name is None:
            raise ValueError("--pjrt-plugin: give --platform NAME too, the name it is to have")
        if plugin is not None and name in BUILT_IN:
            raise ValueError(f"--platform {name}: is jax's own; give the plugin another name")
        if options and plugin is None:
            raise ValueError("--plugin-option: needs --pjrt-plugin PATH")
        if name is not None and not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
            raise ValueError(f"--platform {name}: expected one name of letters, digits and _")
        pairs = []
        for text in options:
            key, found, value = text.partition("=")
            if not key or not found:
                raise ValueError(f"--plugin-option {text}: expected NAME=VALUE")
            pairs.append((key, _value(value)))
        return cls(name, plugin, tuple(pairs))

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Request":
        """What the command line's device options ask for; raises as `parse`."""
        return cls.parse(options.platform, options.pjrt_plugin, options.plugin_option)


@dataclasses.dataclass(frozen=True)
class Profile:
    """What is known of a kind of device.

    names: platform names it goes by; nodes: device files that betray one; tested: what was run on
    it; notes: what is known beyond that; install: how jax gets to it.
    """

    title: str
    names: tuple[str, ...]
    tested: str
    install: str
    nodes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


PROFILES = (
    Profile("CPU", ("cpu",), "every test runs on it", "part of jax"),
    Profile(
        "NVIDIA GPU",
        ("cuda", "gpu"),
        "one H200: kernels and benchmarks",
        "pip install 'deepinfer-jax[cuda]'",
        nodes=("/dev/nvidia[0-9]*",),
    ),
    Profile(
        "Ascend NPU",
        ("ascend", "npu"),
        "untested on hardware: only this route, with a second CPU plugin under the name npu",
        "give the vendor's PJRT plugin with --platform ascend --pjrt-plugin PATH",
        nodes=("/dev/davinci[0-9]*",),
        notes=(
            "no PJRT plugin for Ascend was found on PyPI or elsewhere in public (2026-11)",
            "the programs need no callback, no FFI target and no linear algebra library call",
            "every Mosaic GPU kernel declines; reference and xla implementations are plain XLA",
            "whether a plugin has e4m3 and e8m0 is what the probe answers",
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class Selected:
    """A started platform.

    name: what jax knows the backend as; route: how it was found; reported: what its devices say
    their platform is; version: the plugin's own words; notices: lines the user should see.
    """

    name: str
    route: str
    reported: str
    version: str
    devices: tuple[Any, ...]
    profile: Profile | None
    notices: tuple[str, ...] = ()


def profile(name: str) -> Profile | None:
    """What is known of a platform name, or None."""
    return next((known for known in PROFILES if name in known.names), None)


def select(request: Request) -> Selected:
    """Starts jax on the platform asked for and on no other; raises PlatformError."""
    import jax
    from jax._src import xla_bridge  # where jax's plugin guide has register_plugin
    from jax.extend import backend

    if request.name is None:
        route = "jax's own settings"
    elif xla_bridge.backends_are_initialized():
        route = "already started"
        if jax.devices()[0].client is not backend.backends().get(_concrete(request.name)):
            raise PlatformError(
                f"platform {request.name!r}: jax has already started on {jax.default_backend()!r}; "
                "select the platform before anything else uses jax"
            )
    else:
        jax.config.update("jax_platforms", request.name)
        route = "by name"
        if request.plugin is not None:
            path = Path(request.plugin).expanduser().absolute()
            route = str(path)
            if not path.is_file():
                raise PlatformError(_page(request, "no such file"))
            try:
                xla_bridge.register_plugin(
                    request.name, library_path=str(path), options=dict(request.options)
                )
            except Exception as error:
                raise PlatformError(_page(request, str(error))) from error
    try:
        devices = tuple(jax.devices())
        started = backend.backends()
    except Exception as error:
        raise PlatformError(_page(request, str(error))) from error
    client = devices[0].client
    name = next(key for key, value in started.items() if value is client)
    return Selected(
        name,
        route,
        devices[0].platform,
        " ".join(client.platform_version.split()),
        devices,
        profile(name),
        _notices(name) if request.name is None and not jax.config.jax_platforms else (),
    )


def ready(request: Request, devices: tuple[Any, ...] | None = None) -> Selected:
    """`select`, and for devices that this project does not test (default: all), `probe`: call it
    before weights load. Raises PlatformError if a device lacks what the programs need."""
    selected = select(request)
    if selected.name not in TESTED or request.plugin is not None:
        require(selected, _probed(devices or _own(selected.devices)))
    return selected


def prepared(layout: Layout | None, devices: tuple[Any, ...] | None = None) -> Layout | None:
    """A layout as its devices (default: the first) can run it; called before weights load.

    A device that this project does not test is probed, once a process (`ready`). What the layout
    itself asks for is tried on any device: collectives and host memory it cannot do without are a
    PlatformError; a ragged exchange becomes the rounds of `alltoall`, with a warning (equal bits).
    """
    selected = ready(Request(), devices)
    if layout is None:
        return None
    devices = devices or _own(selected.devices[: layout.size])
    needs = {"collectives": layout.size > 1, "pinned_host": layout.engram == "host"}
    lacking = [one for name, asked in needs.items() if asked for one in _without(devices, name)]
    require(selected, [dataclasses.replace(one, needed=True) for one in lacking])
    if layout.moe_dispatch != "ragged" or not layout.mesh_axes("expert"):
        return layout
    if not (missing := _without(devices, "ragged_all_to_all")):
        return layout
    warnings.warn(
        f"layout {layout.name!r}: moe_dispatch 'ragged' becomes 'alltoall': platform "
        f"{selected.name!r} has no ragged_all_to_all ({missing[0].detail})",
        stacklevel=3,
    )
    return dataclasses.replace(layout, moe_dispatch="alltoall")


def _own(devices: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those of this process: a check reads its results back, which it cannot from another's."""
    return tuple(one for one in devices if one.process_index == one.client.process_index())


def _without(devices: tuple[Any, ...], name: str) -> list["Finding"]:
    return [one for one in _probed(devices, (name,)) if not one.works]


@functools.cache
def _probed(
    devices: tuple[Any, ...], names: tuple[str, ...] | None = None
) -> tuple["Finding", ...]:
    """`probe`, each check once a process."""
    return probe(devices, names=names)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the probe. detail: what was seen, or the error; instead: what happens without."""

    name: str
    needed: bool
    works: bool
    detail: str
    instead: str

    @property
    def lacking(self) -> bool:
        return self.needed and not self.works


def probe(
    devices: Sequence[Any],
    before: Callable[[str], None] = lambda name: None,
    names: Collection[str] | None = None,
) -> tuple["Finding", ...]:
    """Runs every check (or those named) on the first device, collectives on all; a `Finding` each.

    before: called with each check's name first, so that a plugin that ends the process leaves it.
    """
    found = []
    for check in probes.CHECKS:
        if names is not None and check.name not in names:
            continue
        before(check.name)
        try:
            detail, works = check.run(devices), True
        except Exception as error:  # whatever a plugin raises is the finding
            text = " ".join(str(error).split())
            detail, works = f"{type(error).__name__}: {text[:300]}", False
        found.append(Finding(check.name, check.needed, works, detail, check.instead))
    return tuple(found)


def require(selected: Selected, findings: Sequence[Finding]) -> None:
    """Raises PlatformError naming what the device lacks, if the programs cannot do without."""
    lacking = [finding for finding in findings if finding.lacking]
    if not lacking:
        return
    lines = [f"platform {selected.name!r}: the device lacks what the model's programs need"]
    lines += [f"  {finding.name}: {finding.detail}" for finding in lacking]
    lines += [f"    {finding.instead}" for finding in lacking if finding.instead]
    lines += [
        f"  plugin: {selected.route}; {selected.version}",
        "  fix: a plugin release that has these; `deepinfer-jax doctor` with the same options "
        "prints the whole table",
        _on_cpu(),
    ]
    raise PlatformError("\n".join(lines))


_FIXES = (
    ("no such file", "give the path of the plugin's shared library"),
    (
        "Mismatched PJRT",
        "install the plugin release made for jax {jax}, or the jax it was for",
    ),
    ("GetPjrtApi not found", "this library is no PJRT plugin: give the one exporting GetPjrtApi"),
    ("Failed to open", "`file PATH` and `ldd PATH` say what is wrong or missing"),
    ("Unexpected option name", "leave that --plugin-option out; the plugin's manual has the names"),
    (
        "not in the list of known",
        "install the package that registers it (entry point group jax_plugins), or give its "
        "library with --pjrt-plugin PATH",
    ),
    ("provides no devices", "check the driver: the plugin was loaded and found no device"),
)


def _page(request: Request, reason: str) -> str:
    """The page for a platform that did not start."""
    jax = importlib.metadata.version("jax")
    reason = " ".join(reason.partition(" (set JAX_PLATFORMS")[0].split())
    fix = next((fix for part, fix in _FIXES if part in reason), "see the plugin's own messages")
    known = profile(request.name) if request.name else None
    packages = [
        f"{entry.name} ({entry.dist.name} {entry.dist.version})" if entry.dist else entry.name
        for entry in importlib.metadata.entry_points(group="jax_plugins")
    ]
    lines = [
        f"platform {request.name or 'of jax'!r}: could not be started",
        f"  plugin: {request.plugin or 'by entry point; installed: ' + str(packages or 'none')}",
        f"  options: {dict(request.options) or 'none'}",
        f"  jax {jax}, jaxlib {importlib.metadata.version('jaxlib')}",
        f"  reason: {reason}",
        f"  fix: {fix.format(jax=jax)}",
    ]
    if known is not None:
        lines += [f"  {known.title}: {known.tested}; {known.install}"]
    return "\n".join([*lines, _on_cpu()])


def _on_cpu() -> str:
    return (
        "  to run on this machine's CPU instead: --platform cpu, or JAX_PLATFORMS=cpu and none of "
        "--platform, --pjrt-plugin"
    )


def _notices(name: str) -> tuple[str, ...]:
    """Said where jax chose the CPU itself although another device is here."""
    if name != "cpu":
        return ()
    return tuple(
        f"running on the CPU, although {nodes[0]} is here ({known.title}): {known.install}; "
        "--platform cpu if that is meant"
        for known in PROFILES
        for pattern in known.nodes
        if (nodes := sorted(glob.glob(pattern)))
    )


def _concrete(name: str) -> str:
    from jax._src import xla_bridge

    return xla_bridge.canonicalize_platform(name)


def _value(text: str) -> Option:
    """A plugin option's value: true, false, integer, number, list of integers or text."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"-?\d+(,-?\d+)+", text):
        return [int(part) for part in text.split(",")]
    if re.fullmatch(r"-?\d*\.\d+(e-?\d+)?", text):
        return float(np.float64(text))
    return text
