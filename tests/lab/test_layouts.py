"""Every layout file on eight simulated devices: placement as declared, results of one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from deepinfer_jax import shipped, spec
from deepinfer_jax.config import Numerics
from deepinfer_jax.layout import Layout
from deepinfer_jax.model import parallel, transformer
from deepinfer_jax.model.compile import jit
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.runtime import checkpoint
from tests.lab import small_model

# Sizes for eight devices, and whether a row's sums run in the order of one device.
SIZES = {
    "dp": ({"data": 8}, True),
    "ep": ({"expert": 8}, True),
    "dp_ep": ({"data": 2, "expert": 4}, True),
    "ep64_decode_host_engram": ({"expert": 8}, True),
    "tp": ({"tensor": 8}, False),
    "tp_ep": ({"data": 2, "tensor": 4}, False),
    "cp_ep_prefill": ({"data": 2, "context": 4}, True),
}
FAST = ("cp_ep_prefill",)  # tp_ep is in test_engine_layouts.py
NUMERICS = Numerics.preset("float32", cache_qdq=False)
TOLERANCE = 5e-5
BATCH, LENGTH = 8, 64


def each(names):
    return [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow, id=name)
        for name in names
    ]


@functools.cache
def model():
    cfg = small_model.config()
    return cfg, small_model.weights(cfg)


def read(name: str) -> Layout:
    under = Layout.from_toml(shipped.find("layouts", name), SIZES[name][0])
    # XLA:CPU has no ragged exchange; the rounds are the same.
    return dataclasses.replace(
        under, moe_dispatch="alltoall" if under.moe_dispatch == "ragged" else under.moe_dispatch
    )


def placed(under: Layout):
    cfg, weights = model()
    declared = parallel.placed(transformer.abstract(cfg), under)
    padded = weights.replace(
        layers=tuple(map(small_model.pad_rows, weights.layers, declared.layers))
    )
    mesh = under.mesh()
    shardings = jax.tree.map(
        lambda param: under.sharding(param.axes, param.shape, mesh),
        declared.replace(token_map=spec.Param((small_model.VOCAB,), "int32", (None,))),
    )
    return jax.tree.map(jax.device_put, padded, shardings), shardings


@functools.cache
def outcome(name: str, what: str, batch: int = BATCH):
    """Forward logits or drafts; on one device sequences go through in batches of ``batch``."""
    under = Layout.single() if name == "single" else read(name)
    setup = Setup(model()[0], under, numerics=NUMERICS)
    held, _ = placed(under)
    ids, lengths = small_model.tokens(BATCH, LENGTH)
    run = jit(functools.partial(getattr(transformer, what), setup))
    parts = [
        jax.tree.map(np.asarray, run(held, ids[at : at + batch], lengths[at : at + batch]))
        for at in range(0, BATCH, batch)
    ]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def valid():
    _, lengths = small_model.tokens(BATCH, LENGTH)
    return np.arange(LENGTH)[None, :] < lengths[:, None]


def test_every_layout_file_is_here():
    files = {path.stem for path in (shipped.configs() / "layouts").glob("*.toml")}
    assert files == {"single", *SIZES} and len(files) >= 8


@pytest.mark.parametrize("name", SIZES)
def test_placement_is_as_declared(name):
    under = read(name)
    held, shardings = placed(under)
    bytes_on = dict.fromkeys(jax.devices(), 0)
    ideal = 0.0
    declared = spec.flatten(transformer.abstract(model()[0]))
    actual = spec.flatten(held)
    for path, sharding in spec.flatten(shardings).items():
        leaf = actual[path]
        assert leaf.sharding.spec == sharding.spec and leaf.sharding == sharding, path
        for shard in leaf.addressable_shards:
            bytes_on[shard.device] += shard.data.nbytes
        if path in declared:
            ways = np.prod([under.ways(axis) for axis in declared[path].axes if axis])
            ideal += declared[path].nbytes / ways
        else:
            ideal += leaf.nbytes
    assert max(bytes_on.values()) <= 1.05 * ideal
    tables = held.layers[0].engram.table
    kind = "pinned_host" if under.engram == "host" else "device"
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tables)} == {kind}


@pytest.mark.parametrize("name", each(SIZES))
def test_forward_equals_one_device(name):
    got, _ = outcome(name, "forward")
    want, _ = outcome("single", "forward")
    np.testing.assert_allclose(got[valid()], want[valid()], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(got[valid()].argmax(-1), want[valid()].argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp", "ep", "dp_ep", "ep64_decode_host_engram"])
def test_bits_are_those_of_the_sequence_alone(name):
    """Each shard computes one sequence, with the sums one device makes for that sequence."""
    got, _ = outcome(name, "forward")
    want, _ = outcome("single", "forward", batch=1)
    np.testing.assert_array_equal(got[valid()], want[valid()])


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_drafts_equal_one_device(name):
    ids, logits, confidence = outcome(name, "draft")
    want = outcome("single", "draft")
    np.testing.assert_array_equal(ids, want[0])
    np.testing.assert_allclose(logits, want[1], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(confidence, want[2], rtol=0, atol=TOLERANCE)


def test_spare_slots_hold_the_first_experts_again():
    cfg, weights = model()
    under = dataclasses.replace(read("ep"), spare_experts=72)
    path, stored = "layers/1/ffn/w2/values", weights.layers[1].ffn.w2.values
    declared = spec.flatten(parallel.placed(transformer.abstract(cfg), under))
    param, asked = declared[path], []
    assert (stored.shape[0], param.shape[0]) == (64, 136)
    assert declared["draft/stages/0/ffn/w2/values"].shape[0] == 8, "the drafter's stay"

    class Reader:
        def read(self, name, region):
            asked.append((region[0].start, region[0].stop))
            return stored[region]

    sharding = under.sharding(param.axes, param.shape, under.mesh())
    array = np.asarray(checkpoint.place(Reader(), path, param, sharding, stored.shape))
    np.testing.assert_array_equal(array, stored[np.arange(136) % 64])
    assert (51, 64) in asked and (0, 4) in asked, "a shard across the end reads two runs"


def test_a_table_that_does_not_divide_gets_zero_rows():
    cfg, weights = model()
    under = read("ep")
    path, stored = "layers/0/engram/table/values", weights.layers[0].engram.table.values
    param = spec.flatten(parallel.placed(transformer.abstract(cfg), under))[path]
    assert stored.shape[0] == 660 and param.shape[0] == 664

    class Reader:
        def read(self, name, region):
            assert name == path and region[0].stop <= 660
            return stored[region]

    sharding = under.sharding(param.axes, param.shape, under.mesh())
    array = np.asarray(checkpoint.place(Reader(), path, param, sharding, stored.shape))
    np.testing.assert_array_equal(array[:660].view(np.uint8), stored.view(np.uint8))
    assert not array[660:].view(np.uint8).any()
