"""Weights onto devices, from an official safetensors folder or a converted folder.

Both give the same bits. Each leaf is read straight into its shards: for every device the slice it
holds, once for devices that hold the same one, so the host never has a second copy of a tensor and
a converted folder is read only where this process's devices need it (`converters.store` cuts its
chunks for that). Accounting is strict both ways: what the config declares must be there with its
shape and dtype, and nothing else may be.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from converters import converted, store
from converters import safetensors_io as st
from converters.check import Checked, examine
from converters.grid import Region
from converters.source import CheckpointError, resolve
from converters.token_map import token_map
from deepinfer_jax import spec
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.layout import Layout
from deepinfer_jax.model import parallel, transformer
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.runtime import groups

EDGE = 1 << 20  # bytes of a file's beginning and end that tell it from others


class Checkpoint(NamedTuple):
    """weights: `transformer.Weights` of jax arrays. token_map: int32 [vocab] on the host, None
    without Engram. tokenizer: path of `tokenizer.json`, which may not exist."""

    cfg: ModelConfig
    weights: transformer.Weights
    token_map: np.ndarray | None
    tokenizer: Path


@runtime_checkable
class Reader(Protocol):
    """Gives regions of leaves as they are stored."""

    def read(self, path: str, region: Region) -> np.ndarray: ...


class Official:
    """Regions of stacked leaves, put together from the tensors of an official folder."""

    def __init__(self, checked: Checked):
        self._checked, self._reader = checked, st.Reader()

    def read(self, path: str, region: Region) -> np.ndarray:
        """Reads whole rows: a tensor is stored by rows, so a column slice costs its rows."""
        table = self._checked.table
        param, entries = table.params[path], table.by_leaf[path]
        stack = len(entries[0].index)
        out = np.empty([axis.stop - axis.start for axis in region], param.dtype)
        by_index = {entry.index: entry for entry in entries}
        rows = region[stack]
        buffer = np.empty((rows.stop - rows.start, *param.shape[stack + 1 :]), param.dtype)
        for at in np.ndindex(out.shape[:stack]):
            entry = by_index[tuple(axis.start + i for axis, i in zip(region, at, strict=False))]
            recipe = self._checked.recipes[entry.name]
            recipe.fill(self._reader, rows.start, rows.stop, buffer)
            out[at] = buffer[(slice(None), *region[stack + 1 :])]
        return out


def read(
    path: str | Path,
    layout: Layout | None = None,
    devices: Sequence[Any] | None = None,
    *,
    partial: bool = False,
) -> Checkpoint:
    """Read a checkpoint onto the devices of a layout (one device without one).

    path: official or converted folder, or a Hub id. devices: as many as the layout has (default:
    jax's first). partial: accept a converted slice (`--only`); leaves it lacks are None. Raises
    `CheckpointError` with one line a finding before any weight is read.
    """
    path = resolve(path)
    converted.refuse_unfinished(path)
    if converted.is_converted(path):
        found = converted.open_converted(path)
        if found.is_slice and not partial:
            raise CheckpointError(
                [f"{path}: a slice of {', '.join(found.manifest['options']['only'])}, not a model"]
            )
        cfg, present, reader, classes = found.cfg, found.table.params, found, found.token_map()
    else:
        checked = examine(path)
        cfg, present, reader = checked.cfg, checked.table.params, Official(checked)
        classes = _token_map(path, cfg)
    mesh = None if layout is None else layout.mesh(devices)
    one = jax.sharding.SingleDeviceSharding((devices or jax.devices())[0])

    def sharding(key: tuple[Any, ...], param: spec.Param) -> jax.sharding.Sharding:
        if layout is None or mesh is None:
            return one
        return layout.sharding(param.axes, param.shape, mesh, spec.path_name(key))

    def leaf(
        key: tuple[Any, ...], param: spec.Param, placed: jax.sharding.Sharding
    ) -> jax.Array | None:
        name = spec.path_name(key)
        return place(reader, name, param, placed, present[name].shape) if name in present else None

    declared = parallel.placed(transformer.abstract(cfg), layout or Layout.single())
    # All shardings first: a layout that does not fit is an error before anything is read.
    shardings = jax.tree_util.tree_map_with_path(sharding, declared)
    weights = jax.tree_util.tree_map_with_path(leaf, declared, shardings)
    return Checkpoint(cfg, weights, classes, path / "tokenizer.json")


def identity(path: str | Path, setup: Setup, drafts: bool) -> bytes:
    """What cached rows of a prompt depend on besides its ids: the weights and how they are used.

    A converted folder is known by its manifest, an official one by the names, sizes and times of
    its files. drafts: whether the drafter's rows are there too.
    """
    path = resolve(path)
    if converted.is_converted(path):
        weights: Any = (path / converted.MANIFEST).read_bytes()
    else:
        found = [(file.name, file.stat()) for file in sorted(path.glob("*.safetensors"))]
        weights = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]
    used = (setup.cfg, setup.numerics, setup.kernels, setup.layout, drafts)
    return hashlib.sha256(repr((weights, used)).encode()).digest()


def fingerprint(path: str | Path) -> str:
    """Which weights a folder holds, wherever it lies: of a converted folder its manifest, of an
    official one names, sizes and both ends of its files."""
    path, found = resolve(path), hashlib.blake2b(digest_size=16)
    if converted.is_converted(path):
        found.update((path / converted.MANIFEST).read_bytes())
        return found.hexdigest()
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        found.update(repr((file.name, size)).encode())
        with file.open("rb") as data:
            found.update(data.read(EDGE))
            data.seek(max(size - EDGE, 0))
            found.update(data.read(EDGE))
    return found.hexdigest()


def place(
    reader: Reader,
    name: str,
    param: spec.Param,
    sharding: jax.sharding.Sharding,
    stored: tuple[int, ...] | None = None,
) -> jax.Array:
    """One leaf, slice by slice: read, put on its devices, forget.

    stored: its shape in the checkpoint; of what `parallel.placed` added past it, Engram rows are
    zero and expert slots hold the first experts again.
    """
    stored = param.shape if stored is None else stored
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(param.shape).items():
        region = store.as_region(index or (), param.shape)
        holders.setdefault(tuple((axis.start, axis.stop) for axis in region), []).append(device)
    shards = []
    for bounds, devices in holders.items():
        data = _read(reader, name, bounds, stored, again=param.axes[:1] == ("expert",))
        for device in devices:
            one = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(data, one))
    jax.block_until_ready(shards)
    return jax.make_array_from_single_device_arrays(param.shape, sharding, shards)


def replicated(array: np.ndarray, like: jax.Array) -> jax.Array:
    """A host array on every device that another array lies on."""
    return jax.make_array_from_callback(array.shape, groups.whole(like), lambda _: array)


def _read(
    reader: Reader,
    name: str,
    bounds: tuple[tuple[int, int], ...],
    stored: tuple[int, ...],
    again: bool,
) -> np.ndarray:
    """A region that may end past the stored rows: zeros there, or the stored ones ``again``."""
    start, stop = bounds[0] if bounds else (0, 0)
    last = min(stop, stored[0]) if bounds else 0
    if last == stop:
        return reader.read(name, tuple(slice(*bound) for bound in bounds))
    rest = tuple(slice(*bound) for bound in bounds[1:])
    if again:
        ends = [bound for bound in range(0, stop, stored[0]) if start < bound] + [stop]
        begins = [start, *ends[:-1]]
        runs = [
            slice(begin % stored[0], begin % stored[0] + end - begin)
            for begin, end in zip(begins, ends, strict=True)
        ]
        return np.concatenate([reader.read(name, (run, *rest)) for run in runs])
    there = reader.read(name, (slice(min(start, last), last), *rest))
    more = [(0, stop - start - there.shape[0])] + [(0, 0)] * (there.ndim - 1)
    return np.pad(there, more)


def _token_map(path: Path, cfg: ModelConfig) -> np.ndarray | None:
    if not cfg.engram_layer_ids:
        return None
    return token_map(path / "tokenizer.json", cfg.vocab_size, cfg.engram_compressed_vocab_size)
