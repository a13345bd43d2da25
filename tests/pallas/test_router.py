"""The router's choice: every implementation against plain numpy, bit by bit."""

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


def plain(score, bias, routes, *, k):
    """(chosen, taken) by a stable sort of bit patterns in the order of the floats."""
    bits = (score + bias).view(np.int32)
    key = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)
    best = np.argsort(-key, axis=1, kind="stable")[:, :k].astype(np.int32)
    if routes is not None:
        best = np.where(routes[:, :1] < 0, best, routes)
    chosen = np.sort(best, axis=1)
    return chosen, np.take_along_axis(score, chosen, axis=1)


def same(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.int32), b.view(np.int32))


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("case", TEST, ids=lambda case: case.name)
def test_against_numpy(case, implementation):
    args = case.build(np.random.default_rng())
    call = functools.partial(router.choose, implementation=implementation, **case.keywords())
    same(jax.jit(call)(*jax.tree.map(jnp.asarray, args)), plain(*args, **case.keywords()))


@pytest.mark.parametrize("case", TEST, ids=lambda case: case.name)
def test_threads_emulated(case, monkeypatch):
    """The code of every thread, emulated, block by block."""
    score, bias, routes = case.build(np.random.default_rng())
    want = plain(score, bias, routes, **case.keywords())
    memory = emulate.Memory()
    place = memory.place
    outs = tuple(place(np.full_like(x, -77)) for x in want)
    refs = (place(score), place(bias), *outs, *(() if routes is None else (place(routes),)))
    size = dict(rows=score.shape[0], experts=score.shape[1], **case.keywords())
    with emulate.emulated(monkeypatch, memory, ptx, threads):
        for block in range(-(-len(score) // hopper.ROWS)):
            threads.choose(np.full(emulate.THREADS, block, np.uint32), *refs, **size)
    same([memory.read(out) for out in outs], want)


def test_more_than_a_warp_keeps_is_declined():
    with pytest.raises(NotImplementedError, match="6 of 1025 experts, a warp takes 16 of 1024"):
        hopper.choose(jnp.zeros((3, 1025)), jnp.zeros((1025,)), k=6)
    with pytest.raises(NotImplementedError, match="17 of 384 experts"):
        hopper.choose(jnp.zeros((3, 384)), jnp.zeros((384,)), k=17)
