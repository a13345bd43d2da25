"""NVIDIA devices to compile for on a machine that has none.

XLA's GPU compiler needs the public facts of a chip (``GpuTargetConfigProto``) and the plugin, ptxas
and nvcc packages of the ``aot`` extra; it needs no driver. Kernels choose their implementation by
the abstract device of the mesh in context, which ``context`` provides. One kind of chip a process:
the plugin keeps the first target it was given.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from deepinfer_jax.lab.devices import Device, Link

# (cores, L2 bytes, clock GHz) by compute capability; with memory they steer tiling, not results.
_CHIPS = {
    "9.0": (132, 52_428_800, 1.98),
    "10.0": (148, 132_644_864, 1.965),
    "10.3": (148, 132_644_864, 1.965),
}


@dataclasses.dataclass(frozen=True)
class GpuAbstractDevice(jax.sharding.AbstractDevice):
    """An abstract device that knows its compute capability."""

    compute_capability: str = "9.0"


def device_from(table: Mapping[str, Any]) -> Device:
    """A ``Device`` from the dictionary that ``dataclasses.asdict`` made of it."""
    links = {key: Link(**table[key]) for key in ("inside", "between", "host")}
    rates = tuple((name, rate) for name, rate in table["tflops"])
    return Device(**{**table, **links, "tflops": rates})


def devices(device: Device, count: int) -> list[Any]:
    """``count`` devices to compile for, filling nodes in order."""
    if device.cuda not in _CHIPS:
        known = ", ".join(_CHIPS)
        raise ValueError(
            f"device {device.name!r}: cuda = {device.cuda!r} has no compile target; known: {known}"
        )
    from jax.experimental import topologies

    node = min(device.node, count)
    if count % node:
        raise ValueError(f"{count} devices do not fill nodes of {node} {device.name}")
    topology = topologies.get_topology_desc(
        platform="cuda", topology=f"1x{count // node}x{node}", target_config=_target_config(device)
    )
    return list(topology.devices)


@contextlib.contextmanager
def context(device: Device, targets: Sequence[Any]) -> Iterator[None]:
    """Lower for these devices: kernels see the compute capability."""
    chip = GpuAbstractDevice(
        targets[0].device_kind, _CHIPS[str(device.cuda)][0], "gpu", str(device.cuda)
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=chip)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def _target_config(device: Device) -> str:
    cores, cache, clock = _CHIPS[str(device.cuda)]
    major, minor = str(device.cuda).split(".")
    minor_field = f"minor: {minor} " if minor != "0" else ""
    name = f"NVIDIA {device.name.upper()}"
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {int(device.hbm_gb_s * 1e9)} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {int(device.memory_gb * 1e9)}
  cuda_compute_capability {{
    major: {major} {minor_field}feature_extension: ACCELERATED_FEATURES
  }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {device.cuda}a"
  device_address_bits: 64 name: "{name}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
