"""Kernels at the released widths, on the GPU: sampled rows against the reference in float32, and
the same bits when run twice and for every number of rows.

    python -m pytest -q -m gpu tests/pallas -n 8

(with XLA_PYTHON_CLIENT_PREALLOCATE=false, so that the processes share the device's memory).
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model.compile import COMPILER_OPTIONS
from pallas_kernels import formats, registers, target
from pallas_kernels.cases import tagged
from pallas_kernels.quantise import hopper as quantise
from pallas_kernels.row_matmul import hopper, plans
from pallas_kernels.row_matmul.shapes import CASES as PRODUCTS
from pallas_kernels.row_matmul.shapes import RELEASED, WO_A
from tests.pallas.test_index_topk import block_of, check_selection, scored
from tests.pallas.test_quantise import check_bits, special
from tests.pallas.test_router import check as check_routes
from tests.pallas.test_swiglu import check_near

pytestmark = pytest.mark.gpu

SAMPLED = 24
RELATIVE = 4e-3
"""Of bfloat16 results, Frobenius norm: the rounding of the result and of its factors."""
MOST = 2048
"""Row counts whose bits are compared."""
QUARTERS = 4
POISON = 2**30
"""Bytes of memory that are poisoned between two runs, at least one result's."""


def released(op, *functions):
    found = tagged(importlib.import_module(f"pallas_kernels.{op}.shapes").CASES, "bench")
    found = [case for case in found if not functions or case.function in functions]
    return [pytest.param(op, case, id=f"{op}-{case.name}") for case in found]


def fresh(case):
    """Arguments nobody has seen before, drawn on the device."""
    return case.on_device(int.from_bytes(np.random.default_rng().bytes(3), "little"))


def compiled(op, case, name="auto"):
    function = getattr(importlib.import_module(f"pallas_kernels.{op}"), case.function)
    call = functools.partial(function, implementation=name, **case.keywords())
    return jax.jit(call, compiler_options=COMPILER_OPTIONS)


def twice(run, args):
    """The result, after a second run into memory full of poison gave the same bits."""
    first = jax.tree.map(np.asarray, run(*args))
    held = [
        jnp.full(x.shape, -77 if x.dtype == np.int32 else jnp.nan, x.dtype)
        for x in jax.tree.leaves(first)
        if x.dtype != np.bool_
        for _ in range(max(1, POISON // max(x.nbytes, 1 << 20)))
    ]
    jax.block_until_ready(held)
    del held
    again = jax.tree.map(np.asarray, run(*args))
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.view("u1"), b.view("u1")), first, again
    )
    return first


def chosen_rows(count):
    middle = np.random.default_rng().integers(0, count, SAMPLED)
    return np.unique(np.concatenate([middle, [0, count - 1]]))


def relative(got, want):
    want = np.asarray(want, np.float64)
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def reference(op, case, *args, **changed):
    """The operation's reference in float32, its products exact."""
    function = getattr(importlib.import_module(f"pallas_kernels.{op}"), case.function)
    with jax.default_matmul_precision("highest"):
        call = functools.partial(
            function, implementation="reference", **{**case.keywords(), **changed}
        )
        # As the model's programs, which may not lose a rounding to bf16 on the way.
        return jax.jit(call, compiler_options=COMPILER_OPTIONS)(*args)


@pytest.mark.parametrize(("op", "case"), released("row_matmul", "matmul", "matmul_groups"))
def test_row_matmul(op, case):
    x, w, scales = args = fresh(case)
    got = twice(compiled(op, case), args)
    rows = chosen_rows(len(got))
    wide = x[rows].astype(jnp.float32)
    want = reference(op, case, wide, w, scales, out_dtype=np.dtype("f4"))
    error = relative(got[rows], want)
    assert error <= min(RELATIVE, case.tolerance), error


@pytest.mark.parametrize(("op", "case"), released("row_matmul", "partial_products_of"))
def test_several_weights(op, case):
    """Every result near the reference, and the bits of launches of its own with the same cut."""
    x, weights = args = fresh(case)
    got = twice(compiled(op, case), args)
    rows = chosen_rows(len(x))
    exact = reference(op, case, x[rows].astype(jnp.float32), weights, out_dtype=np.dtype("f4"))
    for parts, want in zip(got, exact, strict=True):
        total = functools.reduce(np.add, parts[:, rows].astype(np.float32))
        assert relative(total, want[0]) <= RELATIVE
    if target().capability is None or target().capability >= (10, 0):
        pytest.skip("needs a Hopper GPU")
    widths, k = [w.shape[0] for w, _ in weights], x.shape[1]
    cut = plans.best("fp8", len(x), sum(widths), k)
    for parts, (w, scales) in zip(got, weights, strict=True):
        alone = functools.partial(hopper.partial_products, out_dtype=jnp.bfloat16, cut=cut)
        check_bits(parts, jax.jit(alone)(x, w, scales))


@pytest.mark.parametrize(("op", "case"), released("grouped_gemm"))
def test_grouped_gemm(op, case):
    x, values, scales, sizes, *route = args = fresh(case)
    got = twice(compiled(op, case), args)
    rows = chosen_rows(int(sizes.sum()))
    expert = np.searchsorted(np.cumsum(sizes), rows, side="right")
    one_each = jnp.ones(len(rows), jnp.int32)
    part = (values[expert], scales[expert], one_each, *(weight[rows] for weight in route))
    error = relative(got[rows], reference(op, case, x[rows].astype(jnp.float32), *part))
    assert error <= RELATIVE, error


@pytest.mark.parametrize(("op", "case"), released("mla_attention"))
def test_mla_attention(op, case):
    q, window, near, selected, far, sink = args = fresh(case)
    got = twice(compiled(op, case), args)
    rows = chosen_rows(len(got))
    part = (q[rows].astype(jnp.float32), window, near[rows], selected, far[rows], sink)
    error = relative(got[rows], reference(op, case, *part))
    assert error <= RELATIVE, error


@pytest.mark.parametrize(("op", "case"), released("hyper_connections"))
def test_hyper_connections(op, case):
    """Every result by itself: mixes are float32, an update's streams may be bf16."""
    args = fresh(case)
    got = twice(compiled(op, case), args)
    for result, expected in zip(got, reference(op, case, *args), strict=True):
        error = relative(result, expected)
        assert error <= min(RELATIVE, case.tolerance), error
    parts, first, *rest = args
    if case.function == "update":
        rest = [each[-3:] for each in rest]
    args = (parts[:, -3:], first[-3:], *rest)
    for result, whole in zip(compiled(op, case)(*args), got, strict=True):
        np.testing.assert_array_equal(result, whole[-3:])


@pytest.mark.parametrize(("op", "case"), released("quantise", "normed"))
def test_norm_and_quantise(op, case):
    parts, weight = args = fresh(case)
    normed, rounded = twice(compiled(op, case), args)
    error = relative(normed, reference(op, case, *args)[0])
    assert error <= case.tolerance, error
    check_bits(rounded, jax.jit(formats.round_trip_activations)(jnp.asarray(normed)))
    few = compiled(op, case)(parts[:, -3:], weight)
    for result, whole in zip(few, (normed, rounded), strict=True):
        np.testing.assert_array_equal(result, whole[-3:])


@pytest.mark.parametrize(("op", "case"), released("quantise", "round_trip"))
def test_quantise(op, case):
    (x,) = fresh(case)
    x *= jnp.exp2(jnp.arange(len(x)) % 48 - 24).astype(x.dtype)[:, None]
    want = reference(op, case, x)
    check_bits(twice(compiled(op, case), (x,)), want)
    if target().capability is None:
        pytest.skip("needs an NVIDIA GPU")
    source = jax.random.randint(jax.random.key(len(x)), (len(x) // 2 + 1,), 0, len(x))
    gathered = jax.jit(functools.partial(quantise.round_trip, kind="fp4"))(x, source)
    order = registers.order_columns(want[source], "fp4")
    check_bits(gathered, order.reshape(gathered.shape))


@pytest.mark.parametrize(("op", "case"), released("quantise", "swiglu"))
def test_swiglu(op, case):
    """Near the reference, and a row's bits whatever rows are with it."""
    gate, up = args = fresh(case)
    got = twice(compiled(op, case), args)
    check_near(got, np.asarray(reference(op, case, gate, up)))
    check_bits(compiled(op, case)(gate[:, -3:], up[:, -3:]), got[-3:])


def test_quantise_at_values_of_every_size():
    (op, case), x = released("quantise", "round_trip")[0].values, special(256)
    check_bits(compiled(op, case)(x), reference(op, case, jnp.asarray(x)))


@pytest.mark.parametrize(("op", "case"), released("grouping"))
def test_grouping(op, case):
    args = fresh(case)
    got = twice(compiled(op, case), args)
    jax.tree.map(np.testing.assert_array_equal, got, reference(op, case, *args))


@pytest.mark.parametrize(("op", "case"), released("router"))
def test_router(op, case):
    args = fresh(case)
    got = twice(compiled(op, case), args)
    check_routes(got, *jax.tree.map(np.asarray, args), **case.keywords())
    parts, *rest = args
    routes = rest[1] if rest[1] is None else rest[1][-3:]
    for result, whole in zip(compiled(op, case)(parts[:, -3:], rest[0], routes), got, strict=True):
        np.testing.assert_array_equal(result, whole[-3:])


@pytest.mark.parametrize(("op", "case"), released("index_topk"))
def test_index_topk(op, case):
    q, weights, (values, scales, entries), visible, *pools = args = fresh(case)
    got = twice(compiled(op, case), args)
    got = got[0] if "pool" in case.keywords() else got
    groups = np.unique([0, len(got) // 2, len(got) - 1])
    rows = np.unique([0, got.shape[1] // 2, got.shape[1] - 1])
    some = np.ix_(groups, rows)
    entry = entries[groups]  # of a table that holds these keys only
    keys = (
        values[entry.ravel()],
        scales[entry.ravel()],
        np.arange(entry.size).reshape(entry.shape),
    )
    part = (q[some], weights[some], keys, visible[some], *(mask[some] for mask in pools))
    score = scored(part, *block_of(case))
    check_selection(got[some], score, case.keywords()["k"], case.tolerance)


def counts_of(name):
    """Row counts on both sides of every change of the tile, whole and short last tiles, and some
    drawn ones: between them every tile that a count from 1 to 2,048 takes."""
    groups, n, k, kind = WO_A if name == "wo_a" else (1, *RELEASED[name])
    splits = 1 if groups > 1 else plans.parts_of_k(kind, n, k)
    cuts = [plans.best(kind, rows, n, k, splits, groups) for rows in range(1, MOST + 1)]
    found = {1, 2, 3, 6, MOST}
    for rows in range(1, MOST):
        if cuts[rows - 1] != cuts[rows]:
            found |= {rows, rows + 1}
    return sorted(found | set(np.random.default_rng().integers(1, MOST, 24).tolist()))


@pytest.mark.parametrize("part", range(QUARTERS))  # a count is compiled for itself: seconds each
@pytest.mark.parametrize("name", [*RELEASED, "wo_a"])
def test_row_bits_at_released_widths(name, part):
    (case,) = (case for case in PRODUCTS if case.name == f"{name}_4096")
    if target().capability is None:
        pytest.skip("needs an NVIDIA GPU")
    x, w, scales = fresh(case)
    run = compiled("row_matmul", case)
    whole = np.asarray(run(x[:MOST], w, scales))
    for count in counts_of(name)[part::QUARTERS]:
        for first in {0, MOST - count}:
            got = np.asarray(run(x[first : first + count], w, scales))
            same = got.view("u1") == whole[first : first + count].view("u1")
            wrong = np.flatnonzero(~same.reshape(count, -1).all(1))
            assert not wrong.size, f"{count} rows from {first}: rows {wrong}"
