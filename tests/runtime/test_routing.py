"""The routing policy alone: bounded overload, nobody starves, one answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.runtime.routing import ROUTES, Load, short, turns, warm

LOADS = st.lists(
    st.builds(
        Load,
        queue=st.integers(0, 20_000),
        warm=st.integers(0, 4_000),
        given=st.integers(0, 50),
    ),
    min_size=1,
    max_size=6,
)


@given(LOADS)
def test_the_wait_for_a_warm_prefix_is_what_it_saves_at_most(loads):
    chosen = loads[warm(loads)]
    assert all(chosen.queue - chosen.warm <= load.queue - load.warm for load in loads)
    assert chosen.queue <= min(load.queue for load in loads) + chosen.warm
    assert loads[short(loads)].queue == min(load.queue for load in loads)


@given(LOADS)
def test_of_equal_replicas_it_is_the_first(loads):
    for route in ROUTES.values():
        chosen = route(loads)
        assert route(list(loads)) == chosen == loads.index(loads[chosen])
        assert route([*loads, loads[chosen]]) == chosen


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3), st.booleans()), max_size=60),
)
def test_queues_stay_together_however_popular_a_prefix_is(count, requests):
    """Any series of requests, without anything being computed: the longest queue is ahead of the
    shortest by at most a request and the warm part of one, and cold ones are shared out."""
    queue, texts = [0] * count, [set() for _ in range(count)]
    number, largest = [0] * count, 0
    for tokens, text, shares in requests:
        saved = [tokens * 3 // 4 if shares and text in known else 0 for known in texts]
        loads = [Load(*values) for values in zip(queue, saved, number, strict=True)]
        at = warm(loads)
        queue[at] += tokens
        number[at] += 1
        texts[at].add(text)
        largest = max(largest, tokens)
        assert max(queue) - min(queue) <= 2 * largest
    if sum(queue) > 2 * largest * count:
        assert min(number) > 0


def test_equal_replicas_take_turns():
    idle = [Load(0, 0, 0), Load(0, 0, 0), Load(0, 0, 0)]
    for route in ROUTES.values():
        assert route(idle) == 0
        assert route([Load(0, 0, 1), *idle[1:]]) == 1
    busy = [Load(900, 512, 9), Load(100, 0, 0)]
    assert (warm(busy), short(busy), turns(busy)) == (1, 1, 1)
    assert warm([Load(600, 512, 9), Load(100, 0, 0)]) == 0
    with pytest.raises(ValueError, match="there is no replica"):
        warm([])
