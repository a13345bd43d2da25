"""The noise: a pure function of key, position, purpose and id, and statistically clean."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.runtime import noise

IDS = jnp.arange(4096, dtype=jnp.int32)


def _keys(count, llm_seed=0):
    return jnp.asarray(np.stack([noise.request_key(None, llm_seed, i, 0) for i in range(count)]))


def _positions(count, start=0):
    return jnp.arange(start, start + count, dtype=jnp.int32)


def test_keys_are_distinct_and_repeatable():
    """A request's own seed wins; numbers, samples and LLM seeds all change the key (case 78)."""
    drawn = itertools.product((None,), (0, 1, 2**63), range(20), range(8))
    given = itertools.product((0, 1, 2**64 - 1), (0,), (0,), range(8))
    keys = [tuple(noise.request_key(*each)) for each in (*drawn, *given)]
    assert len(set(keys)) == len(keys)
    np.testing.assert_array_equal(noise.request_key(7, 0, 3, 1), noise.request_key(7, 5, 9, 1))


def test_noise_does_not_depend_on_the_batch_or_on_other_ids():
    keys, at = _keys(8), _positions(8, 100)
    whole = np.asarray(noise.gumbel(keys, at, noise.SAMPLE, IDS))
    part = jax.jit(noise.gumbel, static_argnums=2)(keys[3:5], at[3:5], noise.SAMPLE, IDS[70:90])
    np.testing.assert_array_equal(np.asarray(part), whole[3:5, 70:90])
    alone = np.asarray(noise.uniform(keys, at, noise.ACCEPT))
    assert alone[5] == noise.uniform(keys[5:6], at[5:6], noise.ACCEPT)[0]


def test_gumbel_moments_and_range():
    g = np.asarray(noise.gumbel(_keys(64), _positions(64), noise.SAMPLE, IDS), np.float64).ravel()
    assert np.isfinite(g).all()
    n = g.size
    assert abs(g.mean() - np.euler_gamma) < 4 * np.sqrt(np.pi**2 / 6 / n)
    assert abs(g.var() - np.pi**2 / 6) < 4 * np.sqrt(4.4 * (np.pi**2 / 6) ** 2 / n)
    assert g.max() > 10  # the tail is there: E[max] of 2^18 draws is 13


def test_uniform_in_each_bit_and_over_every_axis():
    """exp(-exp(-g)) is uniform along ids, positions and keys; chi-square with 64 cells each."""
    one = jnp.zeros(1, jnp.int32)
    draws = {
        "ids": noise.gumbel(_keys(1), one, 0, jnp.arange(16384, dtype=jnp.int32)),
        "positions": noise.gumbel(jnp.repeat(_keys(1), 16384, 0), _positions(16384), 0, one),
        "keys": noise.gumbel(_keys(16384), jnp.zeros(16384, jnp.int32), 0, one),
    }
    for axis, g in draws.items():
        u = np.exp(-np.exp(-np.asarray(g, np.float64).ravel()))
        cells = np.bincount((u * 64).astype(int), minlength=64)
        chi = ((cells - 256.0) ** 2 / 256.0).sum()
        assert 24 < chi < 119, (axis, chi)  # 63 degrees of freedom, 5 sigma
        serial = np.corrcoef(u[:-1], u[1:])[0, 1]
        assert abs(serial) < 5 / np.sqrt(u.size), (axis, serial)


def test_streams_are_uncorrelated():
    """Neighbouring positions, keys and purposes, and the uniform beside the Gumbel."""
    base = np.asarray(noise.gumbel(_keys(1), _positions(1), noise.SAMPLE, IDS)).ravel()
    others = {
        "position": noise.gumbel(_keys(1), _positions(1, 1), noise.SAMPLE, IDS),
        "purpose": noise.gumbel(_keys(1), _positions(1), noise.DRAFT, IDS),
        "key": noise.gumbel(_keys(2)[1:], _positions(1), noise.SAMPLE, IDS),
        "key word": noise.gumbel(_keys(1) ^ jnp.uint32(1), _positions(1), noise.SAMPLE, IDS),
    }
    for name, other in others.items():
        correlation = np.corrcoef(base, np.asarray(other).ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(base.size), name
    at, keys = _positions(4096), jnp.repeat(_keys(1), 4096, 0)
    u = np.asarray(noise.uniform(keys, at, noise.ACCEPT))
    v = np.asarray(noise.uniform(keys, at, noise.RESIDUAL))
    assert u.min() > 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(u, v)[0, 1]) < 0.08
