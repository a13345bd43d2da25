"""Programs compiled for GPUs that are not there (needs the aot extra)."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.lab import devices, simulate
from deepinfer_jax.lab.collectives import Collective
from deepinfer_jax.layout import Layout
from deepinfer_jax.model import dispatch, parallel
from deepinfer_jax.spec import Param

pytestmark = pytest.mark.aot
TOK, K, WIDTH, EXPERTS = 64, 2, 256, 16


def build(targets, moe_dispatch, engram):
    """Routed experts and a table lookup over eight devices."""
    rules = {"rows": "x", "expert": "x", "engram_rows": "x"}
    under = Layout(
        "aot",
        (("x", len(targets)),),
        tuple((logical, (axis,)) for logical, axis in rules.items()),
        moe_dispatch=moe_dispatch,
        moe_capacity=100,
        engram=engram,
    )

    def local(x, index, weight, w, table):
        def mlp(rows, source, sizes, scale):
            return jax.lax.ragged_dot(rows[source], w, sizes) * scale[:, None].astype(rows.dtype)

        y = dispatch.routed(x, index, weight, w.shape[0], mlp, layout=under)
        return y + parallel.take(table, index[:, 0], under, "engram_rows").astype(jnp.float32)

    declared = (
        Param((TOK, WIDTH), "bfloat16", ("rows", None)),
        Param((TOK, K), "int32", ("rows", None)),
        Param((TOK, K), "float32", ("rows", None)),
        Param((EXPERTS, WIDTH, WIDTH), "bfloat16", ("expert", None, None)),
        Param((1024, WIDTH), "bfloat16", ("engram_rows", None)),
    )
    specs = parallel.specs(declared, under)
    mesh = under.mesh(targets)
    args = tuple(
        jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=under.sharding(p.axes, p.shape, mesh))
        for p in declared
    )
    return parallel.spmd(under, local, specs, specs[0]), args, under


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent))


@pytest.mark.parametrize("kind", ["h200", "b200"])
@pytest.mark.parametrize("moe_dispatch", ["alltoall", "ragged"])
def test_exchange_on_eight_gpus(kind, moe_dispatch):
    device, _ = devices.parse(kind)
    options = {"moe_dispatch": moe_dispatch, "engram": "sharded"}
    found = simulate.in_child("test_aot:build", options, devices=8, gpu=device)
    assert found.platform in ("gpu", "cuda")
    exchange = "all-to-all" if moe_dispatch == "alltoall" else "ragged-all-to-all"
    room = TOK // 8 * K
    rows = Collective(exchange, ("x",), 8 * room * WIDTH * 2, 1, "routed_experts")
    assert found.collectives.count(rows) == 2, "there and back, in bf16"
    local = (TOK // 8 * (WIDTH * 2 + K * 8)) + (2 * WIDTH + 128) * WIDTH * 2
    assert found.argument_bytes == local


def test_a_table_in_host_memory_compiles():
    """The lookup becomes host computation inside the program; see parallel.take."""
    device, _ = devices.parse("h200")
    options = {"moe_dispatch": "alltoall", "engram": "host"}
    assert simulate.in_child("test_aot:build", options, devices=8, gpu=device).collectives
