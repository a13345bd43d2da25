"""index_topk inside the candidate pool on Hopper: what surrounds the launches, and its memory."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.cases import tagged
from pallas_kernels.index_topk import hopper, select
from pallas_kernels.index_topk.shapes import CASES, case

INSIDE = tuple(c for c in tagged(CASES, "test") if "candidates" in c.keywords())


def traced_sizes(function, *args):
    """(bytes, bytes an element) of every array made inside a traced function."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            for leaf in eqn.outvars:
                yield leaf.aval.size * leaf.aval.dtype.itemsize, leaf.aval.dtype.itemsize
            if "core_map" in eqn.primitive.name or "kernel" in eqn.primitive.name:
                continue
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from walk(inner)

    return list(walk(jax.make_jaxpr(function)(*args).jaxpr))


@pytest.mark.parametrize(("length", "count"), [(1, 1), (31, 4), (64, 40), (96, 96), (333, 50)])
def test_places_set_are_listed_in_order(length, count):
    rng = np.random.default_rng(length)
    mask = np.zeros((9, length), bool)
    for line, most in enumerate((0, 1, 2, count, count, count, count, length, length)):
        mask[line, rng.permutation(length)[:most]] = True
    mask[5] = np.arange(length) < count
    mask[6] = np.arange(length) >= length - count
    found = np.asarray(jax.jit(lambda m: hopper._places_set(m, count))(mask))
    for line, got in zip(mask, found, strict=True):
        want = np.flatnonzero(line)[:count]
        np.testing.assert_array_equal(
            got, np.pad(want, (0, count - len(want)), constant_values=length)
        )


@pytest.mark.parametrize("case", INSIDE, ids=lambda case: case.name)
def test_selection_inside_the_pool_by_the_kernel_with_its_launches_replaced(case, monkeypatch):
    """What surrounds the launches: the list of the pools' entries and the way back."""

    def launches(q, weights, values, scales, entries, visible, k, pool):
        assert entries.shape[1] <= np.prod(case.keywords()["candidates"])
        return select(q, weights, (values, scales, entries), visible, k=k, pool=pool)

    monkeypatch.setattr(hopper, "_select", launches)
    q, weights, *rest = case.build(np.random.default_rng())
    args = (np.rint(q), np.sign(weights), *rest)  # sums are exact in any order, and there are ties
    kernel, plain = (
        jax.jit(lambda *a, run=run: run(*a, **case.keywords())) for run in (hopper.select, select)
    )
    np.testing.assert_array_equal(kernel(*args), plain(*args))


def test_selection_inside_the_pool_takes_memory_for_the_pool():
    """No array is larger than the mask or the pools' entries, however long the context is."""
    candidates, rows, sizes = (8, 2048), 4096, {}
    for entries in (1 << 17, 1 << 20):
        long = case("long", 1, rows, entries, candidates=candidates)
        mask = long.abstract()[4]
        found = traced_sizes(functools.partial(hopper.select, **long.keywords()), *long.abstract())
        bytes_, wide = (max(x for x, y in found if (y == 1) == one) for one in (True, False))
        assert bytes_ <= mask.size
        sizes[entries] = wide
    assert sizes[1 << 17] == sizes[1 << 20] <= 4 * rows * np.prod(candidates)
