"""Work of a traced program against closed forms."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from deepinfer_jax.lab import collectives, devices, kernels, program
from deepinfer_jax.lab.collectives import Collective
from pallas_kernels import row_matmul

MESH = AbstractMesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
AXES = {"data": 2, "expert": 4}


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def test_products_count_loops():
    def function(x, w):
        y, _ = lax.scan(lambda c, _: ((c @ w).astype(x.dtype), None), x, None, length=5)
        z = lax.fori_loop(0, 7, lambda _, c: (c @ w).astype(x.dtype), y)
        return z.astype(jnp.float32) @ w.astype(jnp.float32)

    work = program.measure(function, (shape(8, 16), shape(16, 16)))
    one = 2 * 8 * 16 * 16
    assert work.products == {"bf16": 12 * one, "f32": one}
    assert work.held == {"0": 8 * 16 * 2, "1": 16 * 16 * 2} == work.touched


def test_indexed_arguments_are_touched_by_what_moves():
    def function(table, small, index, update):
        found = table.reshape(50, 2, 4)[index]
        return found, small[index], table.at[index].set(update)

    args = (shape(50, 8), shape(3, 4), shape(6, dtype=jnp.int32), shape(6, 8))
    work = program.measure(function, args)
    assert work.touched["0"] == 6 * 16 + 6 * 16, "gathered and updated rows"
    assert work.touched["1"] == 3 * 8, "never more than there is"


def test_elementwise_chains_are_fused_inside_a_scope():
    def function(x):
        y = x * 2 + 1
        with jax.named_scope("other"):
            return jnp.sum(y * y, axis=0)

    work = program.measure(function, (shape(100, 50, dtype=jnp.float32),))
    stored, result = 100 * 50 * 4, 50 * 4
    assert work.traffic == stored + stored + result, "written at the border, read, reduced"
    assert work.peak == stored + result


def test_collectives_of_a_mapped_program():
    def function(x):
        x = lax.psum(x, "data")
        x = lax.all_gather(x, "expert", tiled=True)
        x = lax.psum_scatter(x, "expert", tiled=True)
        with jax.named_scope("layer_3"), jax.named_scope("swap"):
            x = lax.scan(
                lambda c, _: (lax.all_to_all(c, ("data", "expert"), 0, 0, tiled=True), None),
                x,
                None,
                length=3,
            )[0]
        x = lax.while_loop(
            lambda c: jnp.sum(c) < 3, lambda c: lax.ppermute(c, "data", [(0, 1), (1, 0)]), x
        )
        return x

    work = program.measure(
        jax.shard_map(
            function,
            mesh=MESH,
            in_specs=P(("data", "expert")),
            out_specs=P(("data", "expert")),
            check_vma=False,
        ),
        (shape(64, 8),),
    )
    local = 8 * 8 * 2
    assert work.held == {"0": local}
    assert collectives.merged(work.collectives) == collectives.merged(
        [
            Collective("all-reduce", ("data",), local),
            Collective("all-gather", ("expert",), 4 * local),
            Collective("reduce-scatter", ("expert",), 4 * local),
            Collective("all-to-all", ("data", "expert"), local, 3, "swap"),
            Collective("collective-permute", ("data",), local, 1, "", dynamic=True),
        ]
    )


def test_sent_bytes_and_time():
    device = devices.Device(
        "toy",
        memory_gb=1.0,
        hbm_gb_s=1.0,
        tflops=(("f32", 1.0),),
        node=4,
        inside=devices.Link(100.0, 0.0),
        between=devices.Link(10.0, 0.0),
        host=devices.Link(1.0, 0.0),
        source="test",
    )
    axes = {"outer": 2, "inner": 4}
    gather = Collective("all-gather", ("inner",), 8000, 2)
    assert gather.sent(axes) == 2 * 8000 * 3 / 4
    assert gather.seconds(axes, device) == pytest.approx(12000 / 100e9), "stays in a node"
    assert collectives.members_in_node(("outer",), axes, 4) == 1
    assert collectives.members_in_node(("outer", "inner"), axes, 4) == 4
    exchange = Collective("all-to-all", ("outer", "inner"), 8000)
    assert exchange.sent(axes) == 7000
    assert exchange.seconds(axes, device) == pytest.approx(4000 / 10e9), "half leaves the node"
    reduce = Collective("all-reduce", ("outer", "inner"), 8000)
    assert reduce.sent(axes) == 14000
    between = 2 * 8000 * (1 - 1 / 2) / 4
    assert reduce.seconds(axes, device) == pytest.approx(
        max(between / 10e9, (14000 - between) / 100e9)
    )
    assert Collective("collective-permute", ("outer",), 10).sent(axes) == 10


def test_kernels_cost_what_they_must():
    def function(x, w):
        return row_matmul.matmul(x, w, out_dtype=jnp.float32)

    work = program.measure(function, (shape(6, 64), shape(128, 64)))
    assert work.products == {"bf16": 2 * 6 * 64 * 128}
    assert work.touched == {"0": 6 * 64 * 2, "1": 128 * 64 * 2}
    assert work.traffic == 6 * 128 * 4
    args = (shape(6, 64), shape(128, 64), None)
    parts = jax.eval_shape(
        lambda *a: kernels.Costs()("row_matmul", "partial_products", a, {"invariant": False}), *args
    )
    assert parts.shape == (1, 6, 128) and parts.dtype == jnp.float32
    costs = kernels.Costs(used=0.5)
    sizes = shape(4, dtype=jnp.int32)
    args = (
        shape(100, 64),
        shape(4, 2, 32, 32, dtype=jnp.uint8),
        shape(4, 2, 32, 2, dtype=jnp.uint8),
        sizes,
        shape(100, dtype=jnp.float32),
    )
    out = jax.eval_shape(lambda *a: costs("grouped_gemm", "gate_up", a, {"act_quant": True}), *args)
    assert out.shape == (100, 32) and out.dtype == jnp.bfloat16
    (cost,) = costs.found
    assert cost.flop == {"fp8": 2 * 50 * 64 * 64}
    hit = 1 - (3 / 4) ** 50
    assert cost.read == pytest.approx(
        (100 * 64, 4 * 2 * 32 * 32 * hit, 4 * 2 * 32 * 2 * hit, 16, 400)
    )


def test_devices_file():
    device, count = devices.parse("h200x64")
    assert (device.name, count, device.peak("bf16"), device.node) == ("h200", 64, 989e12, 8)
    assert device.peak("int8") == device.peak("f32")
    for kind in ("h100", "h200", "b200", "gb300", "v6e", "v7x"):
        found, count = devices.parse(kind)
        assert count == 1 and len(found.source) > 40
    with pytest.raises(ValueError, match="knows h100, h200, .* not 'h300'"):
        devices.parse("h300x8")
    with pytest.raises(ValueError, match="expected KIND or KINDxCOUNT"):
        devices.parse("8 h200")


def test_devices_file_mistakes(tmp_path):
    path = tmp_path / "d.toml"
    path.write_text('[x]\nsource = "s"\nmemory_gb = 1\n')
    with pytest.raises(ValueError, match=r"d.toml \[x\]: missing or unknown field 'between'"):
        devices.parse("x", path)
