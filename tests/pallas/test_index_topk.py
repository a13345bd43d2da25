"""index_topk: the reference against numpy, the kernels against the reference."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import target
from pallas_kernels.cases import tagged
from pallas_kernels.index_topk import IMPLEMENTATIONS, select
from pallas_kernels.index_topk.reference import scores
from pallas_kernels.index_topk.shapes import CASES, case
from pallas_kernels.mla_attention.reference import unpack
from tests.pallas import emulate


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
    other = select(q, -weights, keys, visible, mask, k=6, candidates=(block, count))
    allowed = np.repeat(want, block, -1)[..., :t]
    np.testing.assert_array_equal(other, oracle(-score, np.asarray(visible), 6, allowed))


def test_candidate_blocks_need_their_size():
    with pytest.raises(ValueError, match="candidate_blocks given without candidates"):
        select(*draw(7), jnp.ones((2, 3, 7), bool), k=2)


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        (jnp.float32, 4),
        (jnp.bfloat16, 32),
        pytest.param(jnp.float32, 32, marks=pytest.mark.slow),
        pytest.param(jnp.bfloat16, 4, marks=pytest.mark.slow),
    ],
)
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


def scored(args, block=None):
    """Scores of the reference, float64, with entries that cannot be chosen at -inf.

    block: entries a block of the mask that is the fifth argument.
    """
    q, weights, keys, visible, *pools = args
    if isinstance(keys, tuple):
        table = np.asarray(unpack(tuple(jnp.asarray(x) for x in keys[:2]), jnp.float32))
        keys = table[np.asarray(keys[2])].astype(q.dtype)
    found = jax.jit(scores)(jnp.asarray(q), jnp.asarray(weights), jnp.asarray(keys))
    found = np.array(found, np.float64)
    found[np.arange(found.shape[-1]) >= np.asarray(visible)[..., None]] = -np.inf
    for mask in pools:
        found[~np.repeat(np.asarray(mask), block, -1)[..., : found.shape[-1]]] = -np.inf
    return found


def block_of(case):
    """Entries a block of a case's mask, if it has one."""
    return case.keywords().get("candidates", ())[:1]


def check_selection(out, score, k, tolerance):
    """Well formed, and no entry left out whose score exceeds one taken by more than rounding."""
    for g, w in np.ndindex(*score.shape[:2]):
        live = np.flatnonzero(score[g, w] > -np.inf)
        taken = out[g, w][out[g, w] >= 0]
        assert len(taken) == min(k, len(live)) and (np.diff(taken) > 0).all()
        assert (out[g, w][len(taken) :] == -1).all()
        left = np.setdiff1d(live, taken)
        if len(left) and len(taken):
            gap = score[g, w, left].max() - score[g, w, taken].min()
            assert gap <= tolerance * np.abs(score[g, w, live]).max()


@pytest.mark.parametrize("case", tagged(CASES, "test"), ids=lambda case: case.name)
def test_reference_on_every_small_shape(case):
    args = case.build(np.random.default_rng())
    run = jax.jit(lambda *a: select(*a, implementation="reference", **case.keywords()))
    out = run(*args)
    out = out[0] if "pool" in case.keywords() else out
    score = scored(args, *block_of(case))
    check_selection(np.asarray(out), score, case.keywords()["k"], case.tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("case", tagged(CASES, "test"), ids=lambda case: case.name)
@pytest.mark.parametrize("kind", [i for i in IMPLEMENTATIONS if i.name != "reference"], ids=str)
def test_kernels_on_every_small_shape(case, kind):
    if kind.misfit(target()):
        pytest.skip(kind.misfit(target()))
    args = case.build(np.random.default_rng())
    run = jax.jit(lambda *a: select(*a, implementation=kind.name, **case.keywords()))
    if kind.name in dict(case.declines):
        with pytest.raises(NotImplementedError):
            run(*args)
        return
    out, again = run(*args), run(*args)
    jax.tree.map(np.testing.assert_array_equal, out, again)
    score = scored(args, *block_of(case))
    if "pool" in case.keywords():
        block, count = case.keywords()["pool"]
        want = pool_oracle(score, np.asarray(args[3]), block, count)
        assert (np.asarray(out[1]) != want).sum() <= 4
        out = out[0]
    check_selection(np.asarray(out), score, case.keywords()["k"], case.tolerance)


def fragment(words, columns):
    """[64, columns] out of the registers of a left operand of the tensor cores."""
    out, thread = np.zeros((64, columns), np.float32), np.arange(emulate.THREADS)
    row, lane = 16 * (thread // 32) + thread % 32 // 4, thread % 4
    for number, word in enumerate(words):
        low, high = emulate.halves(word)
        where = row + 8 * (number % 2), 8 * (number // 2) + 2 * lane
        out[where[0], where[1]], out[where[0], where[1] + 1] = low, high
    return out


def accumulator(dots):
    """The registers of a product [64, columns], pairs of neighbouring columns."""
    thread = np.arange(emulate.THREADS)
    row, lane = 16 * (thread // 32) + thread % 32 // 4, thread % 4
    pairs = [
        tuple(dots[row + 8 * i, 8 * j + 2 * lane + n] for n in range(2))
        for j in range(dots.shape[1] // 8)
        for i in range(2)
    ]
    return SimpleNamespace(registers=SimpleNamespace(flat=pairs))


def test_chunk_of_the_kernel_equals_the_reference(monkeypatch):
    """The code of every thread, emulated: keys, scores, block maxima and the list of a chunk."""
    from pallas_kernels import ptx
    from pallas_kernels.index_topk import keys as code
    from pallas_kernels.index_topk import lists, pick

    rng, chunk, k, (rows, heads) = np.random.default_rng(0), 1024, 37, (2, 16)
    q, weights, (values, scales, entry), _ = case("emulated", 1, rows, 300, heads=heads).build(rng)
    visible = np.array([[170, 300]], np.int32)
    memory = emulate.Memory()
    entry_ref = memory.place(np.pad(entry[0], (0, 84), constant_values=-1))
    stored = memory.place(values), memory.place(scales)
    head_weights, sight_ref = memory.place(weights[0].reshape(-1)), memory.place(visible[0])
    ring = memory.place(np.zeros(code.DEPTH * code.TILE_BYTES, np.uint8))
    score = memory.place(np.zeros((rows, chunk), ml_dtypes.bfloat16))
    scratch = memory.place(np.zeros(64, np.int32))
    maxima = memory.place(np.zeros((rows, 48), ml_dtypes.bfloat16))
    best = memory.place(np.zeros((rows, 40), ml_dtypes.bfloat16))
    index = memory.place(np.zeros((rows, 40), np.int32))
    queries = np.asarray(code.permute_queries(jnp.asarray(q[0])), np.float32).reshape(-1, 128)
    with emulate.emulated(monkeypatch, memory, ptx, code, lists, pick):
        weight = code.load_weights(head_weights, rows * heads)
        sight = code.load_visible(sight_ref, rows)
        zero = ptx.c(0)
        count = code.tiles(sight, rows, zero, chunk // 64)
        assert int(count[0]) == 6
        for tile in range(6):
            start, end = ptx.c(64 * tile), ptx.c(64 * 6)
            entries = code.load_entries(entry_ref, start, end)
            code.start_keys(entries, *stored, ring, ptx.c(tile))
            raw = code.take_keys(ring, ptx.c(tile))
            halves = [fragment(code.expand(raw, half).registers.flat, 64) for half in range(2)]
            dots = accumulator(np.concatenate(halves, 1) @ queries.T)
            code.score(dots, weight, sight, start, start, score, [maxima], heads)
        lists.finish(score, scratch, count, zero, zero, k, 40, (best, index), [maxima])
    want = scored((q, weights, (values, scales, entry), visible))
    np.testing.assert_array_equal(memory.read(index)[:, :k], oracle(want, visible, k)[0])
    assert (memory.read(index)[:, k:] == -1).all()
    blocks = (
        np.pad(want[0], ((0, 0), (0, 84)), constant_values=-np.inf).reshape(rows, 48, 8).max(-1)
    )
    blocks[np.arange(rows), (visible[0] - 1) // 8] = np.inf
    np.testing.assert_array_equal(memory.read(maxima).astype(np.float64), blocks)


@pytest.mark.parametrize("size", [1000, 2048, 3080])
def test_merge_and_mask_pick_like_a_stable_sort(size, monkeypatch):
    from pallas_kernels import ptx
    from pallas_kernels.index_topk import keys as code
    from pallas_kernels.index_topk import lists, pick

    rng, k = np.random.default_rng(size), 100
    best = rng.integers(-30, 30, size).astype(ml_dtypes.bfloat16)
    best[rng.random(size) < 0.3] = -np.inf
    index = 3 * np.arange(size, dtype=np.int32)
    memory = emulate.Memory()
    refs = [memory.place(x) for x in (best, index)]
    outs = [memory.place(np.zeros(104, x.dtype)) for x in (best, index)]
    scratch, places = (memory.place(np.zeros(n, np.int32)) for n in (64, 104))
    chosen = memory.place(np.zeros(size, np.uint8))
    with emulate.emulated(monkeypatch, memory, ptx, code, lists, pick):
        lists.merge(*refs, *outs, scratch, places, size, k, 104)
        lists.mask(refs[0], chosen, scratch, size, k)
    order = np.sort(np.argsort(-best.astype(np.float64), kind="stable")[:k])
    np.testing.assert_array_equal(memory.read(outs[1])[:k], index[order])
    assert (memory.read(outs[1])[k:] == -1).all()
    np.testing.assert_array_equal(memory.read(outs[0])[:k], best[order])
    np.testing.assert_array_equal(np.flatnonzero(memory.read(chosen)), order)
