"""Hyper-connections: every implementation against float64; the kernels in interpret mode and their
per-thread code emulated."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hyper_connections, target
from pallas_kernels.cases import tagged
from pallas_kernels.hyper_connections import hopper, shapes
from pallas_kernels.hyper_connections import rows as thread_rows
from tests.oracle import hyper
from tests.pallas import emulate

NAMES = [i.name for i in hyper_connections.IMPLEMENTATIONS if not i.misfit(target(), i.name)]


def mixes64(parts, mean_square, scale, base, *, n, eps, hc_eps, iterations):
    parts, mean_square, scale, base = (
        np.asarray(x, np.float64) for x in (parts, mean_square, scale, base)
    )
    cfg = {"hc_mult": n, "hc_eps": hc_eps, "hc_sinkhorn_iters": iterations}
    m = parts.sum(0) / np.sqrt(mean_square[:, None] + eps)
    return [np.stack(x) for x in zip(*(hyper.split(r, scale, base, cfg) for r in m), strict=True)]


def check_update(got, parts, streams, post, comb, pre):
    """The new streams within their rounding; what follows from them, from those that came."""
    step = 2.0**-8 if got[0].dtype == jnp.bfloat16 else 2.0**-23
    out = functools.reduce(np.add, list(parts.astype(np.float32))).astype(streams.dtype)
    streams, post, comb, pre, new, collapsed, mean_square = (
        np.asarray(x, np.float64) for x in (streams, post, comb, pre, *got)
    )
    want = post[:, :, None] * out.astype(np.float64)[:, None]
    want = want + np.einsum("rij,rid->rjd", comb, streams)
    np.testing.assert_allclose(new, want, rtol=step, atol=8e-7 * np.abs(want).max())
    np.testing.assert_allclose(mean_square, np.square(new).mean((1, 2)), rtol=1e-6)
    want = np.einsum("rj,rjd->rd", pre, new)
    np.testing.assert_allclose(collapsed, want, rtol=step, atol=8e-7 * np.abs(want).max())


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("case", tagged(shapes.CASES, "test"), ids=lambda case: case.name)
def test_against_float64(case, implementation):
    args = case.build(np.random.default_rng())
    function = getattr(hyper_connections, case.function)
    call = functools.partial(function, implementation=implementation, **case.keywords())
    got = jax.jit(call)(*map(jnp.asarray, args))
    if case.function == "update":
        check_update(got, *args)
        return
    for result, expected in zip(got, mixes64(*args, **case.keywords()), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-6)


UPDATES = [case for case in tagged(shapes.CASES, "test") if case.function == "update"]


@pytest.mark.parametrize("case", UPDATES, ids=lambda case: case.name)
def test_update_in_interpret_mode(case):
    args = case.build(np.random.default_rng(1))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = hopper.update(*map(jnp.asarray, args))
    check_update(got, *args)


def whole_rows(parts, mean_square, sums, block, held):
    """`rows.load` without its per-thread code: whole blocks of rows, 128 / held times."""
    del sums
    mine, turns = pl.ds(block * held, held), 128 // held
    found = sum(parts[i, mine, :] for i in range(parts.shape[0]))
    columns = [found[:, i] for i in range(parts.shape[2])] + [mean_square[mine]]
    return [jnp.tile(x, turns) for x in columns]


def store_rows(values, out, block, held):
    """`rows.store` likewise."""
    rows = jnp.stack(values, 1)[:held].reshape(held, *out.shape[1:])
    out[pl.ds(block * held, held)] = rows


@pytest.mark.parametrize(("iterations", "rows"), [(1, 64), (2, 64), (3, 4352)])
def test_mixes_in_interpret_mode(iterations, rows, monkeypatch):
    """4,352 rows: 128 a block."""
    case = shapes.mixes("interpreted", rows, parts=3, iterations=iterations)
    args = case.build(np.random.default_rng(iterations))
    monkeypatch.setattr(thread_rows, "load", whole_rows)
    monkeypatch.setattr(thread_rows, "store", store_rows)
    hopper._mixes_program.cache_clear()
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = hopper.mixes(*map(jnp.asarray, args), **case.keywords())
    hopper._mixes_program.cache_clear()
    for result, expected in zip(got, mixes64(*args, **case.keywords()), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("parts", "rows", "held", "n"), [(3, 37, 32, 4), (1, 130, 128, 6), (2, 40, 32, 3)]
)
def test_rows_reach_their_threads_and_memory(parts, rows, held, n, monkeypatch):
    """The code of every thread, emulated: the last block is not full."""
    from pallas_kernels import ptx

    rng, mixes = np.random.default_rng(n), 2 * n + n * n
    source = rng.standard_normal((parts, rows, mixes), dtype=np.float32)
    mean_square = rng.standard_normal(rows, dtype=np.float32)
    memory = emulate.Memory()
    refs = [memory.place(x) for x in (source, mean_square, np.zeros(held * mixes, np.float32))]
    out = memory.place(np.zeros((rows, n, n), np.float32))
    want = functools.reduce(np.add, source)
    plain = SimpleNamespace(bitcast_convert_type=lambda words, _: words)
    monkeypatch.setattr(thread_rows, "lax", plain)  # emulated words have no dtype to change
    with emulate.emulated(monkeypatch, memory, ptx, thread_rows):
        for block in range(-(-rows // held)):
            *sums, mean = thread_rows.load(*refs, ptx.c(block), held)
            row = block * held + np.arange(128) % held
            there = row < rows
            for i, column in enumerate(sums):
                found = column.registers[0].view(np.float32)
                np.testing.assert_array_equal(found[there], want[row[there], i])
                assert not found[~there].any()
            np.testing.assert_array_equal(
                mean.registers[0].view(np.float32)[there], mean_square[row[there]]
            )
            thread_rows.store(sums[2 * n :], out, ptx.c(block), held)
    np.testing.assert_array_equal(memory.read(out), want[:, 2 * n :].reshape(rows, n, n))


def test_shapes_without_a_kernel_are_declined():
    with pytest.raises(NotImplementedError, match="7 x 7 entries, a thread keeps 36"):
        parts = jnp.zeros((1, 3, 63)), jnp.zeros(3), jnp.zeros(3), jnp.zeros(63)
        hopper.mixes(*parts, n=7, eps=1e-6, hc_eps=1e-6, iterations=2)
    mixes = jnp.zeros((3, 2)), jnp.zeros((3, 2, 2)), jnp.zeros((3, 2))
    for part, streams, why in [
        (jnp.zeros((1, 3, 64)), jnp.zeros((3, 2, 64)), "64 columns are not a multiple of 128"),
        (jnp.zeros((1, 3, 128)), jnp.zeros((3, 2, 128), jnp.float16), "streams are float16"),
        (
            jnp.zeros((1, 3, 128), jnp.bfloat16),
            jnp.zeros((3, 2, 128)),
            "parts are bfloat16 beside streams of float32",
        ),
    ]:
        with pytest.raises(NotImplementedError, match=why):
            hopper.update(part, streams, *mixes)


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_an_output_in_parts_is_their_sum_rounded(dtype, implementation):
    """1 + 2^-8 + 2^-20 rounds up in bf16, 1 + 2^-8 to the even number below."""
    parts = jnp.float32([1, 2.0**-8, 2.0**-20])[:, None, None] * jnp.ones((3, 2, 128))
    mixes = jnp.ones((2, 1)), jnp.zeros((2, 1, 1)), jnp.ones((2, 1))
    call = functools.partial(hyper_connections.update, implementation=implementation)
    got, *_ = call(parts, jnp.zeros((2, 1, 128), dtype), *mixes)
    want = 1 + 2.0**-7 if dtype == jnp.bfloat16 else 1 + 2.0**-8 + 2.0**-20
    assert (got == want).all()


@pytest.mark.parametrize("implementation", NAMES)
def test_parts_are_added_in_order(implementation):
    """1e8 - 1e8 + 1 is 1 in this order and 0 in the other."""
    case = shapes.mixes("ordered", 1, 2, iterations=1)
    args = jnp.ones(1), jnp.ones(3), jnp.zeros(8)

    def first(*numbers):
        parts = jnp.zeros((3, 1, 8)).at[:, 0, 0].set(jnp.float32(numbers))
        call = functools.partial(hyper_connections.mixes, implementation=implementation)
        return float(call(parts, *args, **case.keywords())[0][0, 0])

    np.testing.assert_allclose(first(1e8, -1e8, 1), 1 / (1 + np.exp(-1)), atol=1e-6)
    np.testing.assert_allclose(first(1, -1e8, 1e8), 0.5, atol=1e-6)
