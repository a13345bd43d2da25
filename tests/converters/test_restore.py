"""Restoring onto 1, 2, 4 and 8 devices reads the bytes of their slices, and each once."""

import math
import time

import jax
import numpy as np
import pytest
import tensorstore as ts

from converters import store
from converters.grid import SMALL_BYTES, Region, grid
from converters.shards import ShardWriter
from deepinfer_jax import spec
from deepinfer_jax.layout import Layout
from deepinfer_jax.runtime import checkpoint as checkpoints

LEAVES = {
    "w13": (spec.Param((8, 2, 128, 2048), "uint8", ("expert", None, "ffn", None)), 2),
    "w2": (spec.Param((8, 1024, 512), "uint8", ("expert", None, "ffn")), 1),
    "w2_scales": (spec.Param((8, 1024, 256), "float8_e8m0fnu", ("expert", None, "ffn")), 1),
    "table": (spec.Param((80_000, 64), "float8_e4m3fn", ("engram_rows", None)), 0),
    "wq_b": (spec.Param((4096, 640), "float8_e4m3fn", ("heads", "q_rank")), 0),
    "head": (spec.Param((8192, 160), "bfloat16", ("vocab", "embed")), 0),
    "small_w2": (spec.Param((8, 96, 64), "uint8", ("expert", None, "ffn")), 1),
    "small_scales": (spec.Param((8, 2, 96, 8), "float8_e8m0fnu", ("expert", None, "ffn", None)), 2),
    "small_wq": (spec.Param((320, 128), "float8_e4m3fn", ("heads", "q_rank")), 0),
    "norm": (spec.Param((640,), "float32", (None,)), 0),
}


class Folder:
    """Leaves of one store, by name."""

    def __init__(self, path):
        self.leaves = {
            n: store.open_leaf(path, n, p, store.context(4)) for n, (p, _) in LEAVES.items()
        }

    def read(self, path: str, region: Region) -> np.ndarray:
        return self.leaves[path][region].read().result()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    for name, (param, stack) in LEAVES.items():
        cut = grid(param, stack, 2**20)
        store.create(path, name, param, cut)
        for file, region in cut.shards():
            data = values(name)[region]
            with ShardWriter(path / name / file, cut, data.shape, data.itemsize) as writer:
                for at in np.ndindex(*data.shape[:stack]):
                    for begin in range(0, data.shape[stack], 300):
                        writer.write(at, begin, data[at][begin : begin + 300])
                writer.finish()
    return Folder(path)


def values(name: str) -> np.ndarray:
    param = LEAVES[name][0]
    size = math.prod(param.shape) * np.dtype(param.dtype).itemsize
    data = np.random.default_rng(len(name)).integers(0, 120, size, np.uint8)
    return data.view(param.dtype).reshape(param.shape)


def bytes_read() -> int:
    """Bytes read so far; tensorstore may count a read a moment after it hands the data over."""
    counts = []
    while len(counts) < 2 or counts[-1] != counts[-2]:
        time.sleep(0.02)
        name = "/tensorstore/kvstore/file/bytes_read"
        (metric,) = ts.experimental_collect_matching_metrics(name)
        counts.append(metric["values"][0]["value"])
    return counts[-1]


RULES = {
    "expert": {"expert": "x", "engram_rows": "x", "vocab": "x", "heads": "x"},
    "inside": {"ffn": "x", "engram_rows": "x", "embed": "x", "q_rank": "x"},
}


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("rules", RULES)
def test_each_device_reads_its_slice(folder, devices, rules):
    table = tuple((logical, (axis,)) for logical, axis in RULES[rules].items())
    layout = Layout("test", (("x", devices),), table)
    mesh = layout.mesh(jax.devices()[:devices])
    for name, (param, stack) in LEAVES.items():
        sharding = layout.sharding(param.axes, param.shape, mesh, name)
        indices = sharding.addressable_devices_indices_map(param.shape)
        slices = {store.as_region(index, param.shape) for index in map(hashable, indices.values())}
        cost = {}
        for region in slices:
            before = bytes_read()
            data = folder.read(name, region)
            cost[region] = (bytes_read() - before, data.nbytes)
        # A shard's index is 16 bytes a chunk; rows that 8 does not divide share a chunk at the cut,
        # and so do the slices of a matrix too small to cut.
        matrices = math.prod(param.shape[:stack])
        small = param.nbytes // matrices < 8 * SMALL_BYTES
        more = 4096 + (matrices * SMALL_BYTES if small else 0)
        for read, wanted in cost.values():
            assert wanted <= read <= 1.05 * wanted + more, (name, devices, read, wanted)
        before = bytes_read()
        array = checkpoints.place(folder, name, param, sharding)
        together = bytes_read() - before  # an index that several reads share may be read once
        assert sum(wanted for _, wanted in cost.values()) <= together
        assert together <= sum(read for read, _ in cost.values())
        assert np.asarray(array).tobytes() == values(name).tobytes()
        for shard in array.addressable_shards:
            assert shard.data.shape == sharding.shard_shape(param.shape)


def hashable(index):
    return tuple(index)


def test_a_whole_checkpoint_on_a_layout(converted, checkpoint):
    """Sharded like the layout says, bit-equal to one device, from either kind of folder."""
    one = spec.flatten(checkpoints.read(converted).weights)
    layout = Layout("test", (("x", 4),), (("vocab", ("x",)),))
    for path in (converted, checkpoint):
        many = spec.flatten(checkpoints.read(path, layout, jax.devices()[4:]).weights)
        assert all(np.asarray(one[n]).tobytes() == np.asarray(many[n]).tobytes() for n in one)
        assert many["embed"].sharding.spec == jax.sharding.PartitionSpec("x")
        assert many["norm"].sharding.spec == jax.sharding.PartitionSpec()
        assert many["layers/0/attn/sink"].sharding.device_set == set(jax.devices()[4:])


def test_a_layout_that_does_not_divide_is_named_before_reading(converted):
    layout = Layout("test", (("x", 7),), (("heads", ("x",)),))
    with pytest.raises(ValueError, match="layout 'test', layers/0/attn/wq_b.*'heads'.*x=7"):
        checkpoints.read(converted, layout)
