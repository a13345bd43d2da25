"""Compile a program for devices that are not there, and read what came out.

``compile_program`` lowers and compiles on the devices of the arguments' shardings and parses the
text after SPMD partitioning. ``in_child`` does that in a fresh process with as many simulated CPU
devices as asked for, or for NVIDIA GPUs ahead of time (needs the ``aot`` extra, no GPU): the number
of CPU devices and the kind of GPU are fixed once per process.

The child gets a target ``"module:function"``. It is called as function(devices, **options) and
returns (function, args, layout), or (function, args, layout, donated argument numbers).

Argument and output bytes are exact on both. Temporary bytes of the CPU backend are not those of an
accelerator (it materialises what GPUs fuse); those of a GPU compilation are.
"""

import contextlib
import dataclasses
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from deepinfer_jax.lab import aot, hlo
from deepinfer_jax.lab.collectives import Collective
from deepinfer_jax.lab.devices import Device
from deepinfer_jax.layout import Layout

PASS = "spmd-partitioning"
# The text of interest exists before code generation, which is most of the time on CPU.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """collectives of one execution; bytes per device: arguments, outputs, aliased, temporary."""

    platform: str
    collectives: list[Collective]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    seconds: float


def compile_program(
    function: Callable[..., Any],
    args: tuple,
    axes: Mapping[str, int],
    donate: Sequence[int] = (),
    quick: bool = True,
) -> Compiled:
    """Compile on the devices of the arguments' shardings. axes: mesh axes in device order."""
    start = time.perf_counter()
    lowered = jax.jit(function, donate_argnums=tuple(donate)).lower(*args)
    platform = next(
        device.platform
        for leaf in jax.tree.leaves(args)
        for device in getattr(leaf.sharding, "device_set", ())
    )
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": PASS,
            "xla_dump_hlo_as_text": True,
        }
        if quick and platform == "cpu":
            options |= QUICK
        with _without_cache():
            compiled = lowered.compile(compiler_options=options)
        texts = sorted(Path(folder).glob(f"*after_{PASS}*.txt"))
        if not texts and len(set(axes.values()) - {1}):
            raise RuntimeError(f"lab: the {platform} compiler wrote no text after {PASS}")
        found = hlo.collectives(texts[-1].read_text(), axes) if texts else []
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError(f"lab: the {platform} compiler reports no memory use")
    return Compiled(
        platform,
        found,
        int(memory.argument_size_in_bytes),
        int(memory.output_size_in_bytes),
        int(memory.alias_size_in_bytes),
        int(memory.temp_size_in_bytes),
        time.perf_counter() - start,
    )


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """A program found in the compilation cache is not compiled, so nothing would be dumped."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def in_child(
    target: str,
    options: Mapping[str, Any],
    devices: int,
    gpu: Device | None = None,
    timeout: float = 600,
) -> Compiled:
    """``compile_program`` of a target in a fresh process.

    options: keyword arguments of the target, JSON. gpu: compile for this device instead of CPU.
    Raises RuntimeError with the child's last line if it fails.
    """
    request = {"target": target, "options": dict(options), "devices": devices}
    if gpu is not None:
        request["gpu"] = dataclasses.asdict(gpu)
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer_jax.lab.simulate"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"lab: compiling {target} for {devices} devices failed: {last}")
    table = json.loads(done.stdout.splitlines()[-1])
    table["collectives"] = [
        Collective(**{**one, "axes": tuple(one["axes"])}) for one in table["collectives"]
    ]
    return Compiled(**table)


def _child(request: dict[str, Any]) -> Compiled:
    jax.config.update("jax_platforms", "cpu")
    gpu = aot.device_from(request["gpu"]) if "gpu" in request else None
    if gpu is None:
        jax.config.update("jax_num_cpu_devices", request["devices"])
        devices = jax.devices()
    else:
        devices = aot.devices(gpu, request["devices"])
    module, _, name = request["target"].partition(":")
    build = getattr(importlib.import_module(module), name)
    function, args, layout, *donate = build(devices, **request["options"])
    assert isinstance(layout, Layout)
    numbers = donate[0] if donate else ()
    if gpu is None:
        return compile_program(function, args, dict(layout.axes), numbers)
    with aot.context(gpu, devices):
        return compile_program(function, args, dict(layout.axes), numbers)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_child(json.load(sys.stdin)))))
