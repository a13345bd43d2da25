"""index_topk: the reference against numpy, the kernels against the reference."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.index_topk import select
from pallas_kernels.index_topk.reference import scores
from pallas_kernels.mla_attention.reference import unpack


def draw(seed, g=2, w=3, h=4, d=32, t=50, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(g, w, h, d)), dtype)
    weights = jnp.asarray(rng.normal(size=(g, w, h)), dtype)
    keys = jnp.asarray(rng.normal(size=(g, t, d)), dtype)
    visible = jnp.asarray(rng.integers(0, t + 1, (g, w)), jnp.int32)
    return q, weights, keys, visible


def exact(q, weights, keys):
    """Scores with small integers: no rounding anywhere in float32."""
    dot = np.einsum("gwhd,gtd->gwht", np.float64(q), np.float64(keys))
    return (np.maximum(dot, 0) * np.float64(weights)[..., None]).sum(2)


def oracle(score, visible, k, allowed=None):
    """Stable sort by falling score, then ascending, then -1."""
    out = np.full((*score.shape[:2], k), -1, np.int32)
    for g, w in np.ndindex(*score.shape[:2]):
        live = np.arange(score.shape[-1]) < visible[g, w]
        if allowed is not None:
            live &= allowed[g, w]
        order = [i for i in np.argsort(-score[g, w], kind="stable") if live[i]][:k]
        out[g, w, : len(order)] = np.sort(order)
    return out


def pool_oracle(score, visible, block, count):
    g, w, t = score.shape
    blocks = -(-t // block)
    mask = np.zeros((g, w, blocks), bool)
    for i, j in np.ndindex(g, w):
        best = np.full(blocks, -np.inf)
        for b in range(blocks):
            live = score[i, j, b * block : min((b + 1) * block, visible[i, j])]
            best[b] = live.max() if live.size else -np.inf
        if visible[i, j]:
            best[(visible[i, j] - 1) // block] = np.inf
        for b in np.argsort(-best, kind="stable")[:count]:
            mask[i, j, b] = best[b] > -np.inf
    return mask


def integers(seed, **shape):
    """A case whose scores are small integers with many ties."""
    q, weights, keys, visible = draw(seed, **shape)
    return tuple(jnp.round(x) for x in (q, weights, keys)) + (visible,)


@pytest.mark.parametrize(
    ("shape", "k"),
    [
        ({}, 8),
        (dict(t=50), 50),
        (dict(t=5), 9),
        (dict(g=1, w=1, h=1, d=32, t=1), 1),
        (dict(w=67, h=3, t=33), 7),
        (dict(g=3, w=1, h=32, t=129), 16),
    ],
)
def test_selects_like_a_stable_sort(shape, k):
    q, weights, keys, visible = integers(0, **shape)
    out = select(q, weights, keys, visible, k=k)
    assert out.dtype == jnp.int32
    np.testing.assert_array_equal(out, oracle(exact(q, weights, keys), np.asarray(visible), k))


def test_ties_go_to_the_lowest_index_and_zeros_tie():
    q = jnp.ones((1, 1, 1, 32))
    keys = jnp.ones((1, 9, 32)).at[0, ::2].set(-1.0)  # every second score is relu(-32) * -1 = -0
    out = select(q, -jnp.ones((1, 1, 1)), keys, jnp.full((1, 1), 9, jnp.int32), k=3)
    np.testing.assert_array_equal(out[0, 0], [0, 2, 4])
    same = jnp.ones((1, 9, 32))
    out = select(q, jnp.ones((1, 1, 1)), same, jnp.full((1, 1), 7, jnp.int32), k=4)
    np.testing.assert_array_equal(out[0, 0], [0, 1, 2, 3])


def test_bfloat16_rounds_the_dot_the_products_and_the_sum():
    q, weights, keys, visible = draw(1, h=8, t=64, dtype=jnp.bfloat16)
    b16 = ml_dtypes.bfloat16
    dot = np.einsum("gwhd,gtd->gwht", np.float64(q), np.float64(keys)).astype(np.float32)
    part = np.maximum(dot.astype(b16), b16(0)) * np.asarray(weights)[..., None]
    score = part.astype(np.float32).sum(2).astype(b16).astype(np.float64)
    got = np.asarray(jax.jit(scores)(q, weights, keys), np.float64)
    # a float32 sum in another order may fall on the other side of a rounding boundary
    assert (got != score).mean() < 0.01
    assert (got == score.astype(b16).astype(np.float64)).mean() > 0.99
    out = np.asarray(jax.jit(lambda *a: select(*a, k=10))(q, weights, keys, visible))
    assert (out != oracle(got, np.asarray(visible), 10)).sum() == 0
    assert len(np.unique(score)) < score.size  # so there are ties, and they are settled alike


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_paged_keys_equal_dequantised_keys(dtype):
    rng = np.random.default_rng(2)
    q, weights, _, visible = draw(3, d=64, dtype=dtype)
    values = jnp.asarray(rng.integers(0, 256, (200, 32)), jnp.uint8)
    scales = np.exp2(rng.integers(-3, 3, (200, 2))).astype(ml_dtypes.float8_e8m0fnu)
    table = np.asarray(unpack((values, jnp.asarray(scales)), dtype))
    entry = rng.permutation(200)[:100].reshape(2, 50).astype(np.int32)
    keys = jnp.asarray(table[entry])
    plain = select(q, weights, keys, visible, k=9, pool=(8, 3))
    hidden = np.arange(50)[None] >= np.asarray(visible).max(1)[:, None]
    entry = jnp.asarray(np.where(hidden, -1, entry))
    stored = (values, jnp.asarray(scales), entry)
    for one, two in zip(select(q, weights, stored, visible, k=9, pool=(8, 3)), plain, strict=True):
        np.testing.assert_array_equal(one, two)


def test_entries_that_are_not_visible_may_be_poison():
    q, weights, keys, visible = integers(4)
    hidden = np.arange(50)[None] >= np.asarray(visible).max(1)[:, None]
    bad = jnp.where(hidden[..., None], jnp.nan, keys)
    np.testing.assert_array_equal(
        select(q, weights, bad, visible, k=8), select(q, weights, keys, visible, k=8)
    )
    nothing = select(q, weights, jnp.full_like(keys, jnp.nan), jnp.zeros_like(visible), k=8)
    assert (np.asarray(nothing) == -1).all()


def test_no_entries():
    q, weights, keys, visible = draw(5)
    out, mask = select(q, weights, keys[:, :0], jnp.zeros_like(visible), k=4, pool=(8, 2))
    assert (np.asarray(out) == -1).all() and mask.shape == (2, 3, 0)


@pytest.mark.parametrize(("t", "block", "count"), [(50, 8, 3), (64, 8, 8), (65, 8, 20), (9, 4, 1)])
def test_candidate_pool(t, block, count):
    q, weights, keys, visible = integers(6, t=t)
    visible = visible.at[0, 0].set(0).at[0, 1].set(1).at[1, 0].set(t)
    score = exact(q, weights, keys)
    out, mask = select(q, weights, keys, visible, k=6, pool=(block, count))
    np.testing.assert_array_equal(out, oracle(score, np.asarray(visible), 6))
    want = pool_oracle(score, np.asarray(visible), block, count)
    np.testing.assert_array_equal(mask, want)
    other = select(q, -weights, keys, visible, k=6, block=block, candidate_blocks=mask)
    allowed = np.repeat(want, block, -1)[..., :t]
    np.testing.assert_array_equal(other, oracle(-score, np.asarray(visible), 6, allowed))


def test_candidate_blocks_needs_block():
    q, weights, keys, visible = draw(7)
    with pytest.raises(ValueError, match="candidate_blocks given without block"):
        select(q, weights, keys, visible, k=2, candidate_blocks=jnp.ones((2, 3, 7), bool))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("heads", [4, 32])
def test_a_row_does_not_depend_on_the_other_rows(dtype, heads):
    q, weights, keys, visible = draw(8, g=4, w=40, h=heads, d=128, t=300, dtype=dtype)

    @jax.jit
    def run(q, weights, keys, visible):
        return select(q, weights, keys, visible, k=20, pool=(8, 5)), scores(q, weights, keys)

    whole, _ = run(q, weights, keys, visible)
    for g, w, count in ((0, 0, 1), (1, 3, 6), (2, 5, 17), (3, 39, 1)):
        part = slice(w, w + count)
        one = slice(g, g + 1)
        got, _ = run(q[one, part], weights[one, part], keys[one], visible[one, part])
        for a, b in zip(got, whole, strict=True):
            np.testing.assert_array_equal(a, b[one, part])


def test_unknown_implementation():
    with pytest.raises(ValueError, match="no implementation 'fast'; expected auto"):
        select(*draw(9), k=2, implementation="fast")
