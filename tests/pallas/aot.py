"""Compiles every kernel at every case tagged "aot" for a GPU that is not there, and reads the
machine code.

    python tests/pallas/aot.py H200|B200 FOLDER [OPERATION ...]

One line of JSON per (operation, case, implementation): instructions found, registers, spilled
bytes, or why it was declined. The chip is described to XLA by a target config (public chip facts),
the lowering by an abstract device. One chip a
process: the compiler plugin keeps the first target it sees. FOLDER receives PTX and machine code of
    the case at hand.
"""

import collections
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPCODES = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)

# name: compute capability, multiprocessors, memory bytes, bytes/s, L2 bytes, GHz
CHIPS = {
    "H200": ((9, 0), 132, 151_397_597_184, 4_800_000_000_000, 52_428_800, 1.98),
    "B200": ((10, 0), 148, 191_514_411_008, 7_672_320_000_000, 132_644_864, 1.965),
}


def tool(name: str) -> str | None:
    """ptxas or nvdisasm of the `aot` extra, else the one on PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        found = Path(folder) / "cu13" / "bin" / name
        if found.exists():
            return str(found)
    return shutil.which(name)


def missing() -> str | None:
    """What of the `aot` extra is not installed, or None."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "jax-cuda13-plugin is not installed (the extra `aot`)"
    for name in ("ptxas", "nvdisasm"):
        if tool(name) is None:
            return f"{name} is not installed (the extra `aot`)"
    return None


def target_config(chip: str) -> str:
    """The fields of GpuTargetConfigProto that the compiler reads, as text."""
    (major, minor), cores, memory, rate, cache, clock = CHIPS[chip]
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32
      shared_memory_per_block: 49152 shared_memory_per_core: 233472
      shared_memory_per_block_optin: 232448
      threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      memory_bandwidth: {rate} l2_cache_size: {cache} clock_rate_ghz: {clock}
      device_memory_size: {memory}
      cuda_compute_capability {{
        major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      device_vendor: "NVIDIA Corporation"
      platform_version: "Compute Capability {major}.{minor}a"
      device_address_bits: 64 name: "NVIDIA {chip}"
      driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
      dnn_version: "9.10.0" }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
    device_description_str: "NVIDIA {chip}"
    """


def machine_code(ptx: Path, capability: tuple[int, int]) -> dict:
    """Registers, spilled bytes and opcode counts of one PTX file."""
    arch, cubin = "sm_{}{}a".format(*capability), ptx.with_suffix(".cubin")
    ptxas = [tool("ptxas"), f"-arch={arch}", "-v", str(ptx), "-o", str(cubin)]
    told = subprocess.run(ptxas, capture_output=True, text=True, check=True).stderr
    listing = [tool("nvdisasm"), "-c", str(cubin)]
    code = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", told)), default=0),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", told))),
        "serialised": "wgmma.mma_async instructions are serialized" in told,
        "opcodes": dict(collections.Counter(OPCODES.findall(code))),
    }


def compile_all(chip: str, folder: Path, operations: list[str]) -> None:
    """Prints the lines of every case."""
    import jax
    from jax.experimental import topologies

    from pallas_kernels import Target
    from pallas_kernels.cases import tagged

    @dataclasses.dataclass(frozen=True)
    class Device(jax.sharding.AbstractDevice):
        compute_capability: str = ""

    capability, cores = CHIPS[chip][:2]
    device = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=target_config(chip)
    ).devices[0]
    dotted = ".".join(map(str, capability))
    abstract = Device(f"NVIDIA {chip}", cores, "gpu", dotted)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract)
    place = jax.sharding.SingleDeviceSharding(device)

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    for op in operations:
        if importlib.util.find_spec(f"pallas_kernels.{op}.shapes") is None:
            continue
        package = importlib.import_module(f"pallas_kernels.{op}")
        cases = tagged(importlib.import_module(f"pallas_kernels.{op}.shapes").CASES, "aot")
        for implementation in package.IMPLEMENTATIONS:
            name = implementation.name
            if implementation.capability is None or implementation.misfit(
                Target("gpu", capability), name
            ):
                continue
            for case in cases:
                for old in folder.iterdir():
                    old.unlink()
                line = {"op": op, "case": case.name, "implementation": name}
                function = functools.partial(
                    getattr(package, case.function), implementation=name, **case.keywords()
                )
                args = jax.tree.map(placed, case.abstract())
                try:
                    with jax.sharding.use_abstract_mesh(mesh):
                        lowered = jax.jit(function).lower(*args)
                    lowered.compile()
                except NotImplementedError as why:
                    line["declined"] = str(why)
                else:
                    found = [machine_code(p, capability) for p in sorted(folder.glob("*.ptx"))]
                    line["kernels"] = found
                print(json.dumps(line), flush=True)


def main() -> None:
    """The command line of the module docstring."""
    chip, folder, *operations = sys.argv[1:]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder
    os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
    os.environ["PATH"] = f"{Path(tool('ptxas') or '').parent}{os.pathsep}{os.environ['PATH']}"
    Path(folder).mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT))
    from pallas_kernels import OPERATIONS

    compile_all(chip, Path(folder), operations or list(OPERATIONS))


if __name__ == "__main__":
    main()
