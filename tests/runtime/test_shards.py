"""Slots and pages over several shards: the scheduler keeps every request where its pages are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.runtime.pages import Pages
from deepinfer_jax.runtime.plans import Policy
from tests.runtime.simulated import Engine, Request, token

PAGE = 8


def test_a_slot_takes_pages_of_its_own_shard():
    pages = Pages(12, 4, 4, PAGE, shards=2)
    assert [pages.shard(slot) for slot in range(4)] == [0, 0, 1, 1]
    assert pages.grow(1, 3 * PAGE) and pages.grow(2, 4 * PAGE) and pages.grow(0, 2 * PAGE)
    assert pages.row(1) == [0, 1, 2] and pages.row(2) == [6, 7, 8, 9] and pages.row(0) == [3, 4]
    assert (pages.room(0), pages.room(3), pages.free) == (1, 2, 3)
    assert not pages.grow(0, 4 * PAGE), "the other shard's pages are out of reach"
    assert pages.row(0) == [3, 4] and pages.free == 3
    pages.clear(2)
    assert (pages.room(0), pages.room(3)) == (1, 6)
    with pytest.raises(ValueError, match="13 pages, 4 slots do not divide by 2"):
        Pages(13, 4, 4, PAGE, shards=2)


def test_places_of_a_step_are_cut_like_the_slots():
    pages = Pages(16, 8, 4, PAGE, shards=4)
    assert pages.needs([0, 5, 4]) == 8 and pages.needs([0, 2, 4, 6]) == 4 and pages.needs([]) == 0
    assert pages.places([5, 0, 4, 7], 8) == [4, 0, 5, 6]
    one = Pages(16, 8, 4, PAGE)
    assert one.needs([0, 5, 4]) == 3 and one.places([5, 0, 4], 8) == [0, 1, 2]


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.builds(
            lambda prompt, new, part: Request(prompt, new, max(1, round(new * part))),
            prompt=st.integers(1, 40),
            new=st.integers(1, 24),
            part=st.floats(0, 1),
        ),
        min_size=1,
        max_size=12,
    ),
    shards=st.sampled_from([2, 3]),
    slots=st.integers(1, 2),
    total=st.integers(8, 14),
    host=st.sampled_from([0, 3, 50]),
    late=st.integers(0, 2),
)
def test_any_traffic(requests, shards, slots, total, host, late):
    """Outputs and pages are as they must be; no step works on more than a shard's share."""
    rows = shards * slots
    policy = Policy(
        rows, (rows,), ((shards, 4), (shards * slots, 4), (shards, 16)), host_pages=host
    )
    pages = Pages(shards * total, rows, 8, PAGE, shards=shards)
    engine = Engine(policy, pages, late)
    for number, request in enumerate(requests):
        engine.add(number, request)
    engine.run()
    for number, request in enumerate(requests):
        wanted = [token(number, request.prompt + i) for i in range(request.stop)]
        assert engine.outputs[number] == wanted, number
    for step in engine.steps:
        used = [item.slot for item in step.work]
        height = step.shape[0]
        assert pages.needs(used) <= height
        places = pages.places(used, height)
        assert len(set(places)) == len(used)
        there = [place * shards // height for place in places]
        assert there == [pages.shard(slot) for slot in used]
    assert pages.free == pages.total and np.all(pages.table == -1)


def test_requests_enter_the_emptiest_shard():
    policy = Policy(4, (4,), ((4, 16),))
    engine = Engine(policy, Pages(32, 4, 8, PAGE, shards=2), 0)
    for number in range(3):
        engine.add(number, Request(5, 3, 3))
    engine.step()
    assert [item.slot for item in engine.steps[0].work] == [0, 2, 1]
