"""Acceptance by ratio against exact enumeration; acceptance by equality; what ends a request."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.runtime import noise, sampling_state, verify

VOCAB, BLOCK, DRAWS = 5, 2, 40_000
INF = np.inf


def _params(count, temperature=1.0):
    host = sampling_state.neutral(count)
    host.temperature[:] = temperature
    host.key[:, 0] = np.arange(count, dtype=np.uint32)
    host.key[:, 1] = 12345
    return host


@functools.cache
def _run():
    """Drafts from q [block, v], then verifies against p [width, v]; p_1 by the first token."""

    def one(q, p, after, params, position):
        groups, ids = params.temperature.shape[0], jnp.arange(VOCAB, dtype=jnp.int32)
        drafts = []
        for place in range(BLOCK):
            gumbel = noise.gumbel(params.key, position[:, place], noise.DRAFT, ids)
            drafts.append(jnp.argmax(q[place][None] + gumbel, axis=-1).astype(jnp.int32))
        drafts = jnp.stack(drafts, axis=1)
        rows = jnp.broadcast_to(p[None], (groups, *p.shape)).at[:, 1].set(after[drafts[:, 0]])
        return drafts, verify.rejection(
            rows,
            jnp.broadcast_to(q[None], (groups, *q.shape)),
            params,
            position,
            jnp.ones((groups, 1 + BLOCK), jnp.bool_),
            jnp.zeros((groups, VOCAB), jnp.bool_),
            drafts,
            jnp.full((groups,), 1 + BLOCK, jnp.int32),
        )

    return jax.jit(one)


def _distance(ids, wanted):
    found = np.bincount(ids, minlength=VOCAB) / max(len(ids), 1)
    return 0.5 * np.abs(found - wanted).sum()


def _bound(count):
    """Total variation that a fair sample of so many stays below in all but 1 of 1e5 cases."""
    return 0.5 * np.sqrt(VOCAB / count) + np.sqrt(np.log(1e5) / (2 * count))


def _softmax(z):
    weight = np.exp(z - np.max(z))
    return weight / weight.sum()


P = np.array([0.0, -0.5, -1.0, -3.0, -2.0], np.float32)
HOLES = np.array([-INF, 0.0, -INF, -1.0, -0.3], np.float32)
CASES = {
    "plain": (np.array([-1.0, 0.0, -0.2, -1.0, -4.0], np.float32), P),
    "equal to the target": (P, P),
    "one-hot": (np.array([-INF, -INF, 0.0, -INF, -INF], np.float32), P),
    "one-hot on a hole": (np.array([0.0, -INF, -INF, -INF, -INF], np.float32), HOLES),
    "disjoint": (
        np.array([0.0, -INF, -0.1, -INF, -INF], np.float32),
        np.array([-INF, 0.0, -INF, -2.0, -0.5], np.float32),
    ),
    "target with holes": (np.array([0.0, -0.1, -0.2, -0.3, -0.4], np.float32), HOLES),
    "all zero": (np.full(VOCAB, -INF, np.float32), HOLES),
    "NaN": (np.full(VOCAB, np.nan, np.float32), HOLES),
    "one NaN": (np.array([0.0, np.nan, 0.0, 0.0, 0.0], np.float32), HOLES),
    "target one-hot": (P, np.array([-INF, -INF, -INF, 0.0, -INF], np.float32)),
}


@pytest.mark.parametrize("name", CASES)
def test_rejection_equals_exact_enumeration(name):
    q, p = CASES[name]
    after = np.stack([np.roll(p, shift) for shift in range(VOCAB)])
    last = np.array([-1.0, 0.0, -INF, -0.5, -1.5], np.float32)
    position = np.broadcast_to(np.arange(7, 8 + BLOCK, dtype=np.int32), (DRAWS, 1 + BLOCK))
    both, rows = np.stack([q, np.roll(q, 1)]), np.stack([p, p, last])
    drafts, found = jax.device_get(_run()(both, rows, after, _params(DRAWS), position))
    wanted, first, two = _softmax(p), found.tokens[:, 0], found.count >= 2
    assert wanted[first].min() > 0, "a token of target probability 0"
    assert _distance(first, wanted) < _bound(DRAWS)
    assert np.array_equal(drafts[two, 0], first[two])
    for token in range(VOCAB):  # the second token, given the first, where the first draft stood
        seconds = found.tokens[two & (first == token), 1]
        if len(seconds) > 500:
            assert _distance(seconds, _softmax(after[token])) < _bound(len(seconds))
    thirds = found.tokens[found.count == 3, 2]
    if len(thirds) > 500:
        assert _distance(thirds, _softmax(last)) < _bound(len(thirds))
    if name == "equal to the target":
        assert two.all()
    if name in ("disjoint", "all zero", "NaN", "one NaN", "one-hot on a hole"):
        assert not two.any()
    assert np.array_equal(found.judged, np.minimum(found.count, BLOCK))
    assert np.array_equal(found.stood, found.count - 1)


def test_rejection_at_temperature_0_takes_the_argmax():
    """Greedy log-weights are one-hot, so acceptance is equality and the residual is the target."""
    p = np.full((1 + BLOCK, VOCAB), -INF, np.float32)
    p[[0, 1, 2], [3, 1, 4]] = 0.0
    q = np.full((BLOCK, VOCAB), -INF, np.float32)
    q[[0, 1], [3, 2]] = 0.0
    after = np.broadcast_to(p[1], (VOCAB, VOCAB))
    position = np.arange(3, dtype=np.int32)[None]
    _, found = jax.device_get(_run()(q, p, after, _params(1, 0.0), position))
    assert found.tokens[0, :2].tolist() == [3, 1] and found.count[0] == 2


def _coupled(sampled, drafts, rows, valid=None, stop=None):
    shape = np.shape(sampled)
    valid = np.ones(shape, bool) if valid is None else valid
    stop = np.zeros(shape, bool) if stop is None else stop
    given = [jnp.asarray(x, jnp.int32) for x in (sampled, drafts, rows)]
    flags = [jnp.asarray(x, jnp.bool_) for x in (valid, stop)]
    return jax.device_get(verify.coupled(given[0], *flags, *given[1:]))


def test_coupled_keeps_the_matching_prefix():
    drafts = [[5, 6], [5, 9], [9, 6], [5, 6], [5, 6]]
    found = _coupled([[5, 6, 7]] * 5, drafts, [3, 3, 3, 2, 0])
    assert found.count.tolist() == [3, 2, 1, 2, 0]
    assert found.judged.tolist() == [2, 2, 1, 1, 0]
    assert found.stood.tolist() == [2, 1, 0, 1, 0]
    assert not found.failed.any() and not found.stopped.any()


def test_nothing_stands_after_a_stop():
    stop = [[True, False, False], [False, True, False], [False, False, True], [False, True, False]]
    found = _coupled([[5, 6, 7]] * 4, [[5, 6], [5, 6], [5, 6], [9, 6]], [3] * 4, stop=stop)
    assert found.count.tolist() == [1, 2, 3, 1]
    assert found.stopped.tolist() == [True, True, True, False]
    assert found.judged.tolist() == [1, 2, 2, 1]
    assert found.stood.tolist() == [1, 2, 2, 0]


def test_an_invalid_row_ends_the_request_unless_it_had_ended():
    valid = [[True, False, True], [False, True, True], [True, False, True]]
    stop = [[False] * 3, [False] * 3, [True, False, False]]
    found = _coupled([[5, 6, 7]] * 3, [[5, 6]] * 3, [3] * 3, valid=valid, stop=stop)
    assert found.count.tolist() == [1, 0, 1]
    assert found.failed.tolist() == [True, True, False]
    assert found.stopped.tolist() == [False, False, True]


def test_rows_go_to_the_likeliest_drafts():
    logits = jnp.asarray([[4.0, 2.0, 1.0], [0.0, 9.0, 9.0], [3.0, -9.0, 9.0]], jnp.float32)
    room = jnp.asarray([3, 3, 3], jnp.int32)
    grants = [
        verify.widths(logits, room, jnp.int32(budget)).tolist() for budget in (0, 1, 2, 3, 99)
    ]
    assert grants == [[0, 0, 0], [1, 0, 0], [1, 0, 1], [2, 0, 1], [3, 3, 3]]
    limited = verify.widths(logits, jnp.asarray([1, 0, 3], jnp.int32), jnp.int32(99))
    assert limited.tolist() == [1, 0, 3]
