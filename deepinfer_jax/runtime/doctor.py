"""What is here and what is missing: versions, devices, memory, the probe, the kernels chosen.

    deepinfer-jax doctor [--json] [--platform NAME [--pjrt-plugin PATH [--plugin-option K=V]]]

The device is started and probed in a process of its own, because a plugin that lacks a call may end
the process instead of raising; the report then names the check that it was in. Each thing missing
comes with the command that fixes it; the exit code is 1 if one of them is needed.
"""

import dataclasses
import importlib
import importlib.metadata
import multiprocessing
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer_jax.runtime import platform

PATIENCE_S = 600.0
JAX_RANGE = ("0.11.2", "0.12")
NEEDED = (
    "jax",
    "flax",
    "orbax-checkpoint",
    "numpy",
    "jaxtyping",
    "interegular",
    "tokenizers",
    "rich",
)
"""The distribution's own dependencies."""
OPTIONAL = {
    "llguidance": ("grammar", "large grammars"),
    "huggingface_hub": ("hub", "models by Hub id"),
    "matplotlib": ("plot", "plots of benchmarks and layouts"),
    "deepseek-recipe": ("chat", "the released chat template"),
}
"""Package -> (extra that brings it, what for)."""


@dataclasses.dataclass(frozen=True)
class Missing:
    """what is missing; needed: or only useful; fix: the command or the change that helps."""

    what: str
    needed: bool
    fix: str


@dataclasses.dataclass(frozen=True)
class Report:
    """versions: package -> version (None: not installed). device: what `_examine` found: name,
    route, reported, version, profile, devices, probe, kernels; empty if it did not start."""

    versions: Mapping[str, str | None]
    device: Mapping[str, Any]
    missing: tuple[Missing, ...]

    @property
    def works(self) -> bool:
        """Whether nothing needed is missing."""
        return not any(one.needed for one in self.missing)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        missing = [dataclasses.asdict(one) for one in self.missing]
        device, versions = dict(self.device), dict(self.versions)
        return {"works": self.works, "versions": versions, **device, "missing": missing}

    def text(self) -> str:
        """For people."""
        lines = ["versions"]
        lines += [
            f"  {name:18s} {found or 'not installed'}" for name, found in self.versions.items()
        ]
        if device := self.device:
            lines += ["device", f"  {device['name']} ({device['route']}): {device['version']}"]
            if device["reported"] != device["name"]:
                lines += [f"  its devices call themselves {device['reported']}"]
            lines += [f"  {line}" for line in device["profile"]]
            for (kind, memory), count in Counter(
                (one["kind"], one["memory_gib"]) for one in device["devices"]
            ).items():
                room = "memory not told" if memory is None else f"{memory:.0f} GiB each"
                lines += [f"  {count} x {kind}, {room}"]
            lines += ["probe"]
            for one in device["probe"]:
                mark = "ok" if one["works"] else "LACKING" if one["needed"] else "none"
                lines += [f"  {one['name']:18s} {mark:8s} {one['detail']}"]
                if not one["works"] and one["instead"]:
                    lines += [f"  {'':27s} -> {one['instead']}"]
            lines += ["kernels for the released shapes"]
            for one in device["kernels"]:
                chosen = f"{one['op']}.{one['function']}: {one['chosen'] or 'none'}"
                lines += [f"  {chosen} ({one['cases']} shapes)"]
                lines += [f"    not {name}: {why}" for name, why in one["declined"]]
        for needed, title in ((True, "missing"), (False, "optional, not here")):
            some = [one for one in self.missing if one.needed == needed]
            lines += [title] if some else []
            for one in some:
                first, *rest = one.what.splitlines()
                lines += [f"  {first}", *(f"  {line}" for line in rest), f"    fix: {one.fix}"]
        return "\n".join([*lines, "works" if self.works else "does not work: see missing"])


def examine(request: platform.Request, patience_s: float = PATIENCE_S) -> Report:
    """The whole report; never raises for a device that does not work."""
    versions = {name: _version(name) for name in ("python", *NEEDED, "jaxlib", *OPTIONAL)}
    versions |= _plugins()
    device, missing = _apart(request, patience_s)
    return Report(versions, device, (*missing, *_packages(versions)))


def _version(name: str) -> str | None:
    if name == "python":
        return sys.version.split()[0]
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plugins() -> dict[str, str]:
    """Installed packages that register a device with jax."""
    found = importlib.metadata.entry_points(group="jax_plugins")
    return {one.dist.name: one.dist.version for one in found if one.dist is not None}


def _packages(versions: Mapping[str, str | None]) -> list[Missing]:
    missing = [
        Missing(f"package {name}", True, "pip install -U deepinfer-jax")
        for name in (*NEEDED, "jaxlib")
        if versions[name] is None
    ]
    jax = versions["jax"]
    low, high = JAX_RANGE
    if jax is not None and not _numbers(low) <= _numbers(jax) < _numbers(high):
        fix = f"pip install 'jax>={low},<{high}'"
        missing.append(Missing(f"jax {jax}; expected >={low},<{high}", True, fix))
    for name, found in versions.items():
        if name.startswith("jax-cuda") and found != versions["jaxlib"]:
            what = f"{name} {found} does not belong to jaxlib {versions['jaxlib']}"
            missing.append(Missing(what, True, f"pip install -U 'jax[cuda13]=={jax}'"))
    for name, (extra, purpose) in OPTIONAL.items():
        if versions[name] is None:
            fix = f"pip install 'deepinfer-jax[{extra}]'"
            missing.append(Missing(f"{name}: {purpose}", False, fix))
    return missing


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def _apart(request: platform.Request, patience_s: float) -> tuple[dict[str, Any], list[Missing]]:
    """`_examine` in a process of its own, and what went wrong."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(request, theirs))
    process.start()
    theirs.close()
    stage = "start"
    try:
        while ours.poll(patience_s):
            kind, value = ours.recv()
            if kind == "device":
                return value, _lacking(value)
            if kind == "failed":
                return {}, [Missing(value, True, "as the lines above say")]
            stage = value
        process.kill()
        end = f"gave no answer for {patience_s:.0f} s"
    except EOFError:
        process.join()
        end = f"ended the process with code {process.exitcode}"
    finally:
        ours.close()
        process.join()
    what = f"platform {request.name or 'of jax'!r}: {end} during {stage!r}"
    fix = "another release of the plugin; `--platform cpu` runs on this machine's CPU"
    return {}, [Missing(what, True, fix)]


def _lacking(device: Mapping[str, Any]) -> list[Missing]:
    missing = [
        Missing(
            f"{one['name']} on {device['name']}: {one['detail']}",
            True,
            "a plugin release that has it, or another device",
        )
        for one in device["probe"]
        if one["needed"] and not one["works"]
    ]
    for notice in device["notices"]:
        what, _, fix = notice.partition(": ")
        missing.append(Missing(what, True, fix))
    return missing


def _child(request: platform.Request, pipe: Any) -> None:
    """Sends ("stage", name) before each check, then ("device", report) or ("failed", page)."""
    try:
        pipe.send(("device", _examine(request, lambda name: pipe.send(("stage", name)))))
    except Exception as error:  # the parent reports it
        text = str(error)
        if not isinstance(error, platform.PlatformError):
            text = f"{type(error).__name__}: {text}"
        pipe.send(("failed", text))
    finally:
        pipe.close()


def _examine(request: platform.Request, stage: Any) -> dict[str, Any]:
    selected = platform.select(request)
    known = selected.profile
    devices = []
    for one in selected.devices:
        stage(f"memory of {one}")
        stats = one.memory_stats() or {}
        limit = stats.get("bytes_limit")
        memory = None if limit is None else limit / 2**30
        devices.append({"id": one.id, "kind": one.device_kind, "memory_gib": memory})
    findings = platform.probe(selected.devices, stage)
    stage("choice of kernels")
    return {
        "name": selected.name,
        "route": selected.route,
        "reported": selected.reported,
        "version": selected.version,
        "profile": [] if known is None else [f"{known.title}: {known.tested}", *known.notes],
        "notices": list(selected.notices),
        "devices": devices,
        "probe": [dataclasses.asdict(one) for one in findings],
        "kernels": kernels(),
    }


def kernels() -> list[dict[str, Any]]:
    """What each operation would use for its released shapes, equal choices together."""
    import pallas_kernels

    counted: Counter[tuple] = Counter()
    for op in pallas_kernels.OPERATIONS:
        for case in _released(op):
            try:
                choice = pallas_kernels.choose(
                    op, case.function, *case.abstract(), **case.keywords()
                )
            except NotImplementedError as error:
                counted[(op, case.function, None, (("all", str(error)),))] += 1
                continue
            counted[(op, case.function, choice.chosen, choice.declined)] += 1
    fields = ("op", "function", "chosen", "declined")
    return [dict(zip(fields, key, strict=True), cases=count) for key, count in counted.items()]


def _released(op: str) -> Sequence[Any]:
    from pallas_kernels.cases import tagged

    return tagged(importlib.import_module(f"pallas_kernels.{op}.shapes").CASES, "bench")
