"""Expert load balancing: objective, optimum on small cases, tables, replay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.runtime import eplb


def bursty(steps=64, experts=16, seed=0):
    """Four experts of steady load and four that are hot together in every fourth step: equal means,
    but two of the latter on one shard make that step slow."""
    trace = np.random.default_rng(seed).poisson(10, (steps, experts))
    trace[:, :4] += 100
    trace[::4, 4:8] += 400
    return trace


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda shards: st.tuples(st.just(shards), st.integers(1, 8), st.integers(0, 4))
    ),
    st.integers(0, 2**32 - 1),
    st.sampled_from(sorted(eplb.POLICIES)),
)
def test_assignment_is_complete(sizes, seed, policy):
    shards, experts, spare = sizes
    spare += -(experts + spare) % shards
    trace = np.random.default_rng(seed).integers(0, 50, (5, experts))
    found = eplb.balance(trace, shards, spare, policy)
    assert len(found.physical) == experts + spare and found.replicas().min() >= 1
    np.testing.assert_allclose(found.loads(trace).sum(axis=1), trace.sum(axis=1))
    slots, count = found.tables(width=spare + 1)
    for expert in range(experts):
        assert (found.physical[slots[expert]] == expert).all()
        assert len(set(slots[expert, : count[expert]])) == count[expert]
    assert found.cost(trace) >= trace.sum() / shards - 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_near_the_optimum_and_not_above_the_baseline(seed):
    rng = np.random.default_rng(seed)
    trace = rng.poisson(rng.gamma(0.5, 20, 6), (8, 6))
    least = eplb.best(trace, shards=2, spare=2).cost(trace)
    ours = eplb.balance(trace, 2, 2).cost(trace)
    assert least <= ours <= 1.12 * least


def test_bursts_are_seen_where_means_hide_them():
    trace = bursty()
    costs = {name: eplb.balance(trace, 4, 4, name).cost(trace) for name in eplb.POLICIES}
    assert costs["sum_of_max"] < 0.7 * costs["mean"] < costs["none"]


def test_replicate_is_the_greedy_step():
    trace = np.random.default_rng(0).poisson(np.random.default_rng(1).gamma(0.5, 20, (20, 6)))
    count = np.ones(6, int)
    for spare in range(1, 5):
        costs = [
            (trace / (count + np.eye(6, dtype=int)[expert])).max(axis=1).sum()
            for expert in range(6)
        ]
        count = eplb.replicate(trace, spare)
        assert (trace / count).max(axis=1).sum() == pytest.approx(min(costs))


def test_even_traffic_stays_even():
    found = eplb.balance(np.full((3, 16), 7), 4)
    np.testing.assert_array_equal(found.loads(np.full((3, 16), 7)), 28)
    np.testing.assert_array_equal(eplb.identity(16, 4).physical, np.arange(16))


def test_silent_experts_and_empty_traces():
    found = eplb.balance(np.zeros((2, 8)), 4, 4)
    assert found.cost(np.zeros((2, 8))) == 0 and found.replicas().min() == 1
    one = np.zeros((2, 8))
    one[:, 3] = 100
    assert eplb.balance(one, 4, 8).cost(one) < 67, (
        "nine replicas on four shards: three at least on one"
    )


def test_replay_orders_policies():
    trace = np.tile(bursty(40), (4, 1))
    report = eplb.replay(trace, shards=4, spare=4, interval=40, window=40)
    assert report["sum_of_max"]["cost"] < report["mean"]["cost"] < report["none"]["cost"]
    assert report["none"]["moved"] == 0 < report["sum_of_max"]["moved"]
    assert report["none"]["imbalance"] == report["none"]["cost"] / report["none"]["ideal"]


def test_mistakes():
    with pytest.raises(ValueError, match="384 experts . 3 spare slots .* 64 shards; use 64 spare"):
        eplb.balance(np.ones((1, 384)), 64, 3)
    with pytest.raises(ValueError, match="policy 'lp'; expected one of none, mean, sum_of_max"):
        eplb.balance(np.ones((1, 8)), 2, policy="lp")
    with pytest.raises(ValueError, match="trace must be counts"):
        eplb.balance(-np.ones((1, 8)), 2)
    with pytest.raises(ValueError, match="width 1 < 2 replicas"):
        eplb.balance(np.ones((1, 2)), 1, 1).tables(width=1)
