"""The devices of one engine: a group, on which its layout's mesh is made.

Nothing in an engine asks jax for "the" device: weights are put on the group's devices, and all else
follows where they are. So several engines of one process work at once, each on its own group.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax.layout import Layout


def checked(devices: Sequence[Any], layout: Layout) -> tuple[Any, ...]:
    """The devices asked for, in the mesh's order.

    Raises ValueError for another number than the layout's, for one named twice, and for one that
    this process does not drive or that is not of jax's default platform.
    """
    for device in devices:
        if not isinstance(device, jax.Device):
            raise ValueError(f"devices: {device!r}; expected jax devices, as of jax.devices()")
        if devices.count(device) > 1:
            raise ValueError(f"devices: {device} is there twice")
        if device.client is not jax.devices()[0].client:
            raise ValueError(
                f"devices: {device} is of platform {device.platform!r}; programs are compiled for "
                f"jax's default one, {jax.default_backend()!r}"
            )
        if device.process_index != device.client.process_index():
            raise ValueError(
                f"devices: {device} belongs to process {device.process_index}; expected devices of "
                f"this one, {device.client.process_index()}"
            )
    if len(devices) != layout.size:
        raise ValueError(
            f"devices: {len(devices)} given; layout {layout.name!r} needs {layout.size}"
        )
    return tuple(devices)


def divided(
    devices: Sequence[Any] | None, layout: Layout, replicas: int
) -> list[tuple[Any, ...] | None]:
    """The devices of each replica (None: those that an engine of one group takes by itself).

    Devices may serve several replicas if they are named again. Raises ValueError as `checked`, for
    a number of replicas below 1, and for several processes.
    """
    if isinstance(replicas, bool) or replicas < 1:
        raise ValueError(f"replicas = {replicas!r}; expected a positive integer")
    if replicas == 1:
        return [None if devices is None else checked(devices, layout)]
    if jax.process_count() > 1:
        raise ValueError(f"replicas = {replicas}: of one process only")
    size = layout.size
    found = jax.devices() if devices is None else devices
    if len(found) < replicas * size or (devices is not None and len(found) != replicas * size):
        raise ValueError(
            f"replicas = {replicas}: layout {layout.name!r} needs {replicas} times {size} devices; "
            f"there are {len(found)}"
        )
    parts = [found[at * size : (at + 1) * size] for at in range(replicas)]
    return [checked(part, layout) for part in parts]


def whole(like: jax.Array) -> jax.sharding.Sharding:
    """Whole on every device that an array lies on."""
    if isinstance(like.sharding, NamedSharding):
        return NamedSharding(like.sharding.mesh, PartitionSpec())
    return like.sharding


def of(like: jax.Array) -> tuple[Any, ...]:
    """The devices that an array lies on, in the mesh's order."""
    if isinstance(like.sharding, NamedSharding) and isinstance(like.sharding.mesh, Mesh):
        return tuple(like.sharding.mesh.devices.flat)
    return tuple(like.sharding.device_set)


def moved(tree: Any, layout: Layout, devices: Sequence[Any]) -> Any:
    """A copy of placed arrays on another group, cut alike; straight from device to device."""
    mesh = layout.mesh(devices)

    def place(leaf: jax.Array) -> jax.Array:
        home = leaf.sharding
        if isinstance(home, NamedSharding):
            there = NamedSharding(mesh, home.spec, memory_kind=home.memory_kind)
            return jax.device_put(leaf, there)
        return jax.device_put(leaf, jax.sharding.SingleDeviceSharding(devices[0]))

    return jax.tree.map(place, tree)
