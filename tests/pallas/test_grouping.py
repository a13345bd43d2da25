"""Grouping of pairs by expert and tables of row tiles: every implementation against plain numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Target, grouping, ptx, target
from pallas_kernels.cases import tagged
from pallas_kernels.grouping import hopper, shapes, threads
from tests.pallas import emulate

NAMES = [i.name for i in grouping.IMPLEMENTATIONS if not i.misfit(target(), i.name)]


def grouped(expert, *, experts, per_row):
    order = np.argsort(expert, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return order, order // per_row, place, np.bincount(expert, minlength=experts + 1)[:experts]


def tiled(sizes, *, rows, height):
    """One tile after the other."""
    table, first = [], 0
    for matrix, size in [*enumerate(sizes), (-1, rows - sizes.sum())]:
        for inner in range(0, size, height):
            table.append([matrix, first + inner, min(height, size - inner)])
        first += size
    lines = grouping.lines(len(sizes), rows, height)
    out = np.zeros((3, lines), np.int32)
    out[:, : len(table)] = np.array(table, np.int32).T
    out[:, -1] = len(table), sizes.sum(), 0
    return out


PLAIN = {"group": grouped, "row_tiles": tiled}
TEST = tagged(shapes.CASES, "test")


def same(got, want):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, got), want)


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("case", TEST, ids=lambda case: case.name)
def test_against_numpy(case, implementation):
    (numbers,) = case.build(np.random.default_rng())
    function = getattr(grouping, case.function)
    call = functools.partial(function, implementation=implementation, **case.keywords())
    same(jax.jit(call)(jnp.asarray(numbers)), PLAIN[case.function](numbers, **case.keywords()))


@pytest.mark.parametrize("case", TEST, ids=lambda case: case.name)
def test_threads_emulated(case, monkeypatch):
    """The code of every thread, emulated."""
    (numbers,) = case.build(np.random.default_rng())
    want = PLAIN[case.function](numbers, **case.keywords())
    memory = emulate.Memory()
    source, *outs = (
        memory.place(x) for x in (numbers, *jax.tree.map(np.int32, jax.tree.leaves(want)))
    )
    for out in outs:
        memory.read(out)[:] = -77
    empty = functools.partial(np.full, fill_value=-77, dtype=np.int32)
    scratch = memory.place(empty(64))
    with emulate.emulated(monkeypatch, memory, ptx, threads):
        if case.function == "group":
            held = hopper.whole(case.keywords()["experts"] + 2)
            shared = memory.place(empty(hopper.whole(numbers.size))), memory.place(empty(4 * held))
            size = dict(pairs=numbers.size, held=held)
            function = threads.group
        else:
            held = hopper.whole(numbers.size + 1)
            shared = memory.place(empty(held)), memory.place(empty(held))
            lines = grouping.lines(numbers.size, **case.keywords())
            size = dict(experts=numbers.size, lines=lines, held=held)
            function = threads.row_tiles
        function(source, *outs, *shared, scratch, **size, **case.keywords())
    got = tuple(memory.read(out) for out in outs)
    same(got, want if case.function == "group" else (want,))


def test_equal_groups_are_the_table_of_equal_sizes():
    got = grouping.equal_groups(3, 20, 8)
    same(
        got, np.concatenate([tiled(np.full(3, 20), rows=60, height=8)[:, :9], [[9], [60], [0]]], 1)
    )


def test_what_shared_memory_does_not_hold_is_declined():
    with pytest.raises(NotImplementedError, match="32769 pairs, the kernel takes 1 to 32768"):
        hopper.group(jnp.zeros((32769,), jnp.int32), experts=4)
    with pytest.raises(NotImplementedError, match="1023 experts, the kernel takes 1022"):
        hopper.group(jnp.zeros((9,), jnp.int32), experts=1023)
    with pytest.raises(NotImplementedError, match="0 rows, 4 groups"):
        hopper.row_tiles(jnp.zeros((4,), jnp.int32), rows=0, height=8)


def test_a_chip_with_less_shared_memory_takes_fewer_pairs(monkeypatch):
    monkeypatch.setattr(hopper, "target", lambda: Target("gpu", (12, 0)))
    with pytest.raises(NotImplementedError, match="16385 pairs, the kernel takes 1 to 16384"):
        hopper.group(jnp.zeros((16385,), jnp.int32), experts=4)
    assert 4 * (16384 + 4 * hopper.whole(hopper.GROUPS) + 64) < 99 * 1024


def test_more_pairs_than_a_key_numbers_are_refused():
    with pytest.raises(
        ValueError, match="9 pairs of 268435456 experts; expected as many as 32 bits"
    ):
        grouping.group(jnp.zeros((9,), jnp.int32), experts=2**28, implementation="reference")
