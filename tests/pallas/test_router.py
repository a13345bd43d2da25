"""The router: every implementation, and the kernel's emulated threads, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ptx, router, target
from pallas_kernels.cases import tagged
from pallas_kernels.router import hopper, shapes, threads
from tests.pallas import emulate

NAMES = [i.name for i in router.IMPLEMENTATIONS if not i.misfit(target(), i.name)]
TEST = tagged(shapes.CASES, "test")


def check(got, parts, bias, routes, *, k, scale, tolerance=1e-6):
    """Ids against a stable sort of the scores in float64, weights against those ids' scores.

    An id may be another one only where the biased scores differ by less than the tolerance and
    their logits and biases are not the same: those are ties, which the lowest id wins.
    """
    chosen, weight = map(np.asarray, got)
    logits = functools.reduce(np.add, parts)  # float32, in order
    with np.errstate(invalid="ignore", over="ignore"):
        score = np.sqrt(np.logaddexp(logits.astype(np.float64), 0))
    rank = np.where(np.isnan(score), np.inf, score + bias)
    rank = np.where(np.isnan(score) | np.isposinf(score), 1e9 + np.isnan(score), rank)
    best = np.argsort(-rank, axis=1, kind="stable")[:, :k]
    if routes is not None:
        own = routes[:, :1] < 0
        assert (own | (chosen == np.sort(routes, axis=1))).all()
        best = np.where(own, best, routes)
    best = np.sort(best, axis=1)
    assert (np.diff(chosen, axis=1) > 0).all()
    for row in np.flatnonzero((chosen != best).any(axis=1)):
        more, less = np.setdiff1d(chosen[row], best[row]), np.setdiff1d(best[row], chosen[row])
        assert rank[row, less].max() - rank[row, more].min() < tolerance
        same = logits[row, more][:, None] == logits[row, less][None]
        assert not (same & (bias[more][:, None] == bias[less][None])).any()
    taken = np.take_along_axis(score, chosen.astype(np.int64), axis=1)
    with np.errstate(invalid="ignore"):
        want = taken / (taken.sum(axis=1, keepdims=True) + router.SUM_EPS) * scale
    np.testing.assert_allclose(weight, want, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("case", TEST, ids=lambda case: case.name)
def test_against_float64(case, implementation):
    args = case.build(np.random.default_rng())
    call = functools.partial(router.route, implementation=implementation, **case.keywords())
    check(jax.jit(call)(*jax.tree.map(jnp.asarray, args)), *args, **case.keywords())


def emulated(monkeypatch, parts, bias, routes, *, k, scale):
    """What the code of every thread writes, block by block."""
    count, rows, experts = parts.shape
    memory = emulate.Memory()
    place = memory.place
    outs = [place(np.full((rows, k), -77, dtype)) for dtype in (np.int32, np.float32)]
    refs = (place(parts), place(bias), *outs, *(() if routes is None else (place(routes),)))
    size = dict(count=count, rows=rows, experts=experts, k=k, scale=scale)
    with emulate.emulated(monkeypatch, memory, ptx, threads):
        for block in range(-(-rows // hopper.ROWS)):
            threads.route(np.full(emulate.THREADS, block, np.uint32), *refs, **size)
    return [memory.read(out) for out in outs]


@pytest.mark.parametrize("case", TEST, ids=lambda case: case.name)
def test_threads_emulated(case, monkeypatch):
    args = case.build(np.random.default_rng())
    check(emulated(monkeypatch, *args, **case.keywords()), *args, **case.keywords())


def test_scores_of_every_size(monkeypatch):
    """Two experts, so that a weight shows the ratio of their scores: logits -80 to 80."""
    logits = np.linspace(-80, 80, 321, dtype=np.float32)
    parts = np.stack([logits, 0 * logits], axis=1)[None]
    args = parts, np.zeros(2, np.float32), None
    _, weight = emulated(monkeypatch, *args, k=2, scale=1.0)
    score = np.sqrt(np.logaddexp(logits.astype(np.float64), 0))
    want = score / (score + np.sqrt(np.log(2)))
    bound = 2.0**-21 + np.maximum(-logits, 0) * 2.0**-24
    assert (np.abs(weight[:, 0] / want - 1) < bound).all()


@pytest.mark.parametrize("kind", ["reference", "threads"])
def test_parts_are_added_in_order(kind, monkeypatch):
    """1e8 - 1e8 + 1 is 1 in this order and 0 in the other."""

    def share(*numbers):
        parts = np.zeros((3, 1, 2), np.float32)
        parts[:, 0, 0] = numbers
        args = parts, np.zeros(2, np.float32), None
        if kind == "threads":
            return emulated(monkeypatch, *args, k=2, scale=1.0)[1][0, 0]
        args = jax.tree.map(jnp.asarray, args)
        return router.route(*args, k=2, scale=1.0, implementation="reference")[1][0, 0]

    one, zero = np.sqrt(np.log1p(np.exp(1.0))), np.sqrt(np.log(2.0))
    np.testing.assert_allclose(share(1e8, -1e8, 1), one / (one + zero), atol=1e-6)
    np.testing.assert_allclose(share(1, -1e8, 1e8), 0.5, atol=1e-6)


def test_more_than_a_warp_keeps_is_declined():
    with pytest.raises(NotImplementedError, match="6 of 1025 experts, a warp takes 16 of 1024"):
        hopper.route(jnp.zeros((1, 3, 1025)), jnp.zeros((1025,)), k=6, scale=1.0)
    with pytest.raises(NotImplementedError, match="17 of 384 experts"):
        hopper.route(jnp.zeros((1, 3, 384)), jnp.zeros((384,)), k=17, scale=1.0)


def test_more_logits_than_a_word_numbers_are_declined():
    parts = jax.ShapeDtypeStruct((8, 2**20, 384), jnp.float32)
    bias = jax.ShapeDtypeStruct((384,), jnp.float32)
    with pytest.raises(NotImplementedError, match="3221225472 logits in parts"):
        jax.eval_shape(functools.partial(hopper.route, k=6, scale=1.0), parts, bias)
