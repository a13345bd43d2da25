"""Collectives read from compiled programs: spellings, loops, types, and the trace as the oracle."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.lab import collectives, hlo, program, simulate
from deepinfer_jax.lab.collectives import Collective

AXES = {"data": 2, "expert": 4}
HEAD = "HloModule m\n\nENTRY %main (p: bf16[8]) -> bf16[8] {\n  %p = bf16[8]{0} parameter(0)\n"


def mesh():
    return jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("expert",)),
        ("replica_groups={}", ("data", "expert")),
        ("replica_groups=[2,4]<=[8]", ("expert",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
        ("replica_groups=[1,8]<=[8]", ("data", "expert")),
        ("replica_groups=mesh['data'=2,'expert'=4] {'expert'}", ("expert",)),
        ("replica_groups=mesh['data'=2,'expert'=4] {'data','expert'}", ("data", "expert")),
    ],
)
def test_spellings_of_groups(groups, axes):
    line = f"  ROOT %r = bf16[8]{{0}} all-reduce(%p), channel_id=1, {groups}, to_apply=%add\n}}\n"
    assert hlo.collectives(HEAD + line, AXES) == [Collective("all-reduce", axes, 16)]


def test_groups_that_are_no_axes():
    line = "  ROOT %r = bf16[8]{0} all-reduce(%p), replica_groups={{0,5},{1,4},{2,6},{3,7}}\n}\n"
    with pytest.raises(ValueError, match="r: its groups are no set of the mesh axes"):
        hlo.collectives(HEAD + line, AXES)
    with pytest.raises(ValueError, match="replica groups are not understood"):
        hlo.collectives(HEAD + line.replace("{{0,5},{1,4},{2,6},{3,7}}", "<new>"), AXES)


def body(x):
    x = lax.psum(x, ("data", "expert"))
    x = lax.all_gather(x, "expert", tiled=True)
    x = lax.psum_scatter(x, "expert", tiled=True)
    with jax.named_scope("swap"):
        x = lax.scan(
            lambda c, _: (lax.all_to_all(c, ("data", "expert"), 0, 0, tiled=True), None),
            x,
            None,
            length=3,
        )[0]
    x = lax.while_loop(
        lambda c: jnp.sum(c).astype(jnp.float32) < 3,
        lambda c: lax.ppermute(c, "data", [(0, 1), (1, 0)]),
        x,
    )
    return lax.cond(jnp.sum(x) > 0, lambda x: lax.psum(x, "expert"), lambda x: x, x)


def test_compiled_equals_traced():
    spec = P(("data", "expert"))
    function = jax.shard_map(body, mesh=mesh(), in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((64, 8), jnp.bfloat16, sharding=NamedSharding(mesh(), spec))
    found = simulate.compile_program(function, (x,), AXES)
    traced = program.measure(function, (x,)).collectives
    assert collectives.merged(found.collectives) == collectives.merged(traced)
    assert found.argument_bytes == 64 * 8 * 2 // 8


def test_what_the_compiler_inserts():
    """A contraction over a sharded axis, left to the partitioner, in bf16."""
    m = mesh()
    a = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16, sharding=NamedSharding(m, P("data", "expert")))
    b = jax.ShapeDtypeStruct((32, 16), jnp.bfloat16, sharding=NamedSharding(m, P("expert")))

    def function(a, b):
        return lax.with_sharding_constraint(a @ b, NamedSharding(m, P("data")))

    found = simulate.compile_program(function, (a, b), AXES)
    (one,) = found.collectives
    assert (one.kind, one.axes, one.bytes) == ("all-reduce", ("expert",), 32 * 16 * 2)
    assert program.measure(function, (a, b)).collectives == []


def build(devices, rows):
    """Target of the child process below: a sum over more devices than this process has."""
    from deepinfer_jax.layout import Layout

    under = Layout("child", (("data", 16),), (("rows", ("data",)),))
    m = under.mesh(devices)
    spec = under.spec(("rows",), (rows,))
    function = jax.shard_map(
        functools.partial(lax.psum, axis_name="data"), mesh=m, in_specs=spec, out_specs=P()
    )
    return (
        function,
        (jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=NamedSharding(m, spec)),),
        under,
    )


def test_in_a_child_with_its_own_devices(monkeypatch):
    import pathlib

    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent))
    found = simulate.in_child("test_hlo:build", {"rows": 32}, devices=16)
    assert found.collectives == [Collective("all-reduce", ("data",), 8, 1, "")]
    with pytest.raises(
        RuntimeError, match="compiling test_hlo:build for 16 devices failed: .*does not divide"
    ):
        simulate.in_child("test_hlo:build", {"rows": 33}, devices=16)
