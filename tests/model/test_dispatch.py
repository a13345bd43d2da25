"""Routed experts under every dispatch: equal to one device, whatever the routing."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.layout import Layout
from deepinfer_jax.model import dispatch, parallel

TOK, K, WIDTH, INNER, EXPERTS = 32, 3, 16, 24, 16


def mlp(w13, w2):
    """One row at a time, so that the bits of a row depend on that row alone."""

    def run(x, source, sizes, weight):
        x = x[source]
        rest = x.shape[0] - sizes.sum()
        expert = jnp.repeat(
            jnp.arange(sizes.size + 1), jnp.append(sizes, rest), total_repeat_length=x.shape[0]
        )

        def one(row):
            held, x, weight = row
            gate, up = w13[held] @ x
            y = w2[held] @ (weight * jax.nn.silu(gate) * up)
            return jnp.where(held < sizes.size, y, jnp.zeros_like(y))

        return jax.lax.map(one, (expert, x, weight))

    return run


def layout(axes, rules, dispatch_kind, capacity=2.0):
    return Layout(
        name="test",
        axes=tuple(axes.items()),
        rules=tuple((k, tuple(v)) for k, v in rules.items()),
        moe_dispatch=dispatch_kind,
        moe_capacity=capacity,
    )


LAYOUTS = {
    "ep": ({"expert": 8}, {"expert": ["expert"], "rows": ["expert"]}),
    "dp_ep": ({"data": 2, "expert": 4}, {"expert": ["data", "expert"], "rows": ["data", "expert"]}),
    "ep_rows_whole": ({"expert": 8}, {"expert": ["expert"]}),
    "ep_within_data": ({"data": 2, "expert": 4}, {"expert": ["expert"], "rows": ["data"]}),
    "ep_partly": ({"data": 2, "expert": 4}, {"expert": ["data", "expert"], "rows": ["data"]}),
    "tp": ({"tensor": 4}, {"ffn": ["tensor"]}),
    "ep_tp": (
        {"expert": 4, "tensor": 2},
        {"expert": ["expert"], "rows": ["expert"], "ffn": ["tensor"]},
    ),
    "dp": ({"data": 8}, {"rows": ["data"]}),
}
ROUTES = ("uniform", "one_expert", "one_shard", "unused_slots", "none")


def inputs(route):
    rng = np.random.default_rng(ROUTES.index(route))
    index = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(TOK)]).astype(np.int32)
    if route == "one_expert":
        index[:] = np.array([5, 5, 5])
    elif route == "one_shard":
        index[:] = index % 2 + 14
    elif route == "unused_slots":
        index[rng.random(index.shape) < 0.4] = -1
    elif route == "none":
        index[:] = -1
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    weight = rng.random((TOK, K), dtype=np.float32)
    return (
        normal(TOK, WIDTH),
        index,
        weight,
        normal(EXPERTS, 2, INNER, WIDTH),
        normal(EXPERTS, WIDTH, INNER),
    )


def run(args, under, exact=False, wire=None):
    mesh = under.mesh(jax.devices()[: under.size])
    axes = [("rows", None)] * 3 + [("expert", None, "ffn", None), ("expert", None, "ffn")]
    placed = [
        jax.device_put(a, under.sharding(ax, a.shape, mesh))
        for a, ax in zip(args, axes, strict=True)
    ]
    return np.asarray(program(under, exact, wire)(*placed))


@functools.lru_cache
def program(under, exact, wire):
    def local(x, index, weight, w13, w2):
        return dispatch.routed(
            x, index, weight, w13.shape[0], mlp(w13, w2), layout=under, exact=exact, wire=wire
        )

    rows = under.spec(("rows", None), (TOK, K))
    experts = under.spec(("expert", None, "ffn"), (EXPERTS, WIDTH, INNER))
    return jax.jit(parallel.spmd(under, local, (rows, rows, rows, experts, experts), rows))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["gather", "alltoall"])
def test_equal_to_one_device(name, kind):
    under = layout(*LAYOUTS[name], kind, capacity=1.0)
    for route, exact in itertools.product(ROUTES, (False, True)):
        args = inputs(route)
        want = run(args, Layout.single())
        got = run(args, under, exact=exact)
        bits = "ffn" not in LAYOUTS[name][1] and (exact or kind == "alltoall")
        np.testing.assert_allclose(got, want, rtol=0, atol=0 if bits else 2e-5 * abs(want).max())


@pytest.mark.parametrize("capacity", [1e-9, 0.7, 3.0, 100.0])
def test_any_capacity_is_exact(capacity):
    under = layout(*LAYOUTS["ep"], "alltoall", capacity=capacity)
    for route in ("uniform", "one_expert"):
        args = inputs(route)
        np.testing.assert_array_equal(run(args, under), run(args, Layout.single()))


def test_rows_travel_encoded():
    half = (lambda x: {"half": x.astype(jnp.bfloat16)}, lambda t: t["half"].astype(jnp.float32))
    args = inputs("uniform")
    args = (args[0].astype(jnp.bfloat16).astype(np.float32), *args[1:])
    want = run(args, Layout.single())
    for kind in ("gather", "alltoall"):
        got = run(args, layout(*LAYOUTS["dp_ep"], kind), exact=True, wire=half)
        np.testing.assert_array_equal(got, want)


def test_replicas_change_no_bits():
    args = inputs("uniform")
    physical = np.array([*range(EXPERTS), 5, 5, 7, 0, 1, 2, 3, 4], np.int32)
    slots = np.full((EXPERTS, 4), -1, np.int32)
    count = np.zeros(EXPERTS, np.int32)
    for slot, expert in enumerate(physical):
        slots[expert, count[expert]] = slot
        count[expert] += 1
    table = dispatch.Placement(jnp.asarray(slots), jnp.asarray(count))
    index = dispatch.to_physical(jnp.asarray(args[1]), table, jnp.arange(TOK, dtype=jnp.int32))
    assert set(np.asarray(index).ravel()) > set(range(EXPERTS))
    np.testing.assert_array_equal(physical[np.asarray(index)], args[1])
    moved = (args[0], np.asarray(index), args[2], args[3][physical], args[4][physical])
    want = run(args, Layout.single())
    np.testing.assert_array_equal(run(moved, layout(*LAYOUTS["ep"], "alltoall")), want)
