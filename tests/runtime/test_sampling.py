"""Sampling against the numpy oracle: order of options, exact sets, frequencies, edge rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.runtime import noise, sampling, sampling_state
from deepinfer_jax.runtime.sampling_params import SamplingParams
from tests.runtime import oracle

VOCAB = 97
STOP = (1, 5)
run = jax.jit(sampling.sample, static_argnames="top")
spread = jax.jit(sampling.distribution)
adjust = jax.jit(sampling.adjust)
install = jax.jit(sampling_state.install)
COUNTERS = (jax.jit(sampling_state.count_prompt), jax.jit(sampling_state.count_output))


def _slots(requests, vocab=VOCAB, seen=(), slots=16):
    """Row parameters and tables of one request a slot; seen: (prompt, output) of each."""
    host = sampling_state.neutral(max(slots, len(requests)))
    tables = sampling_state.empty_tables(max(slots, len(requests)), vocab)
    stop = jnp.asarray(np.isin(np.arange(vocab), STOP))
    for slot, params in enumerate(requests):
        prompt, output = seen[slot] if seen else ((), ())
        key = noise.request_key(params.seed, 0, slot, 0)
        sampling_state.write(host, slot, params, key, len(prompt))
        row = jnp.asarray(sampling_state.bias_row(params, vocab))
        tables = install(tables, jnp.int32(slot), row, stop, np.zeros_like(stop))
        for tokens, count in zip((prompt, output), COUNTERS, strict=True):
            ids = np.full(16, -1, np.int32)
            ids[: len(tokens)] = tokens
            tables = count(tables, jnp.full(16, slot, jnp.int32), jnp.asarray(ids))
    return jax.tree.map(jnp.asarray, host), tables


def _step(logits, requests, seen=(), position=None, pad=16, **options):
    """One step, padded to ``pad`` rows with every argument given: one program serves the tests."""
    (rows, vocab), count = np.shape(logits), max(pad, len(logits))
    params, tables = _slots(requests, vocab, seen)
    at = [len(p) + len(o) for p, o in seen] if seen else [0] * rows
    values = {
        "earlier": np.full((rows, 2), -1, np.int32),
        "allowed": np.ones((rows, vocab), bool),
        "forced": np.full(rows, -1, np.int32),
        "slot": np.arange(rows, dtype=np.int32),
        "position": np.asarray(at if position is None else position, np.int32),
        "logits": np.asarray(logits, np.float32),
    } | options
    values = {
        name: jnp.asarray(np.concatenate([value, np.repeat(value[-1:], count - rows, 0)]))
        for name, value in values.items()
    }
    out = run(params=params.take(values["slot"]), tables=tables, top=4, **values)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:rows], out)


def _distribution(logits, requests):
    """Probabilities of plain rows, padded to 16."""
    params, _ = _slots(requests, np.shape(logits)[-1])
    padded = np.zeros((16, np.shape(logits)[-1]), np.float32)
    padded[: len(logits)] = logits
    z = np.asarray(spread(jnp.asarray(padded), params), np.float64)[: len(logits)]
    return np.exp(z) / np.exp(z).sum(-1, keepdims=True)


def _logits(rng, rows, vocab=VOCAB, scale=2.0):
    return (rng.standard_normal((rows, vocab)) * scale).astype(np.float32)


OPTIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.8},
    {"top_k": 20, "top_p": 0.5},
    {"min_p": 0.2},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.05, "temperature": 0.9},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    {"logit_bias": {3: 5.0, 8: -4.0}, "banned_token_ids": [2, 9]},
    {"allowed_token_ids": [4, 5, 6, 40], "logit_bias": {40: 1.0}, "top_p": 0.9},
    {"min_tokens": 6, "logit_bias": {1: 9.0}},
    {"min_tokens": 2, "logit_bias": {1: 9.0}},
    {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.5, "top_k": 3},
]


@pytest.mark.parametrize("masked", [False, True])
def test_every_option_equals_the_oracle(masked):
    """One batch with all kinds of rows: processed log-probabilities of every id and the token."""
    rng = np.random.default_rng(3)
    requests = [SamplingParams(**o, logprobs=0, logprobs_mode="processed") for o in OPTIONS]
    seen = [(rng.integers(0, VOCAB, 9), rng.integers(0, 12, 4)) for _ in requests]
    logits = _logits(rng, len(requests))
    allowed = (rng.random(logits.shape) < 0.7) | ~np.bool_(masked)
    allowed[:, 40] = True
    params, tables = _slots(requests, VOCAB, seen)
    rows, at = jnp.arange(16, dtype=jnp.int32), jnp.full(16, 13, jnp.int32)
    ours = adjust(jnp.asarray(logits), params, tables, rows, at, None, jnp.asarray(allowed))
    z = np.asarray(spread(ours, params), np.float64)
    out = _step(logits, requests, seen, allowed=allowed)
    for i, request in enumerate(requests):
        want = oracle.adjusted(logits[i], request, *seen[i], STOP, allowed[i])
        np.testing.assert_allclose(ours[i], want, rtol=2e-6, atol=2e-6)
        p = oracle.probabilities(want, request)
        np.testing.assert_array_equal(z[i] > -np.inf, p > 0, err_msg=str(request))
        np.testing.assert_allclose(np.exp(z[i]) / np.exp(z[i]).sum(), p, atol=2e-6)
        token = int(out.token[i])
        assert p[token] > 0 and out.valid[i]
        np.testing.assert_allclose(out.logprob[i], np.log(p[token]), atol=5e-6)


def test_logprobs_raw_or_processed_never_mixed():
    rng = np.random.default_rng(4)
    logits = _logits(rng, 3)
    common = {"temperature": 0.5, "top_k": 6, "banned_token_ids": [3]}
    requests = [
        SamplingParams(**common, logprobs=4),
        SamplingParams(**common, logprobs=4, logprobs_mode="processed"),
        SamplingParams(temperature=0, logprobs=2, logprobs_mode="processed"),
    ]
    out = _step(logits, requests)
    raw = oracle.log_softmax(logits[0])
    best = sorted(range(VOCAB), key=lambda v: (-raw[v], v))[:4]
    assert list(out.top_ids[0]) == best
    np.testing.assert_allclose(out.top_logprobs[0], raw[best], atol=2e-6)
    np.testing.assert_allclose(out.logprob[0], raw[int(out.token[0])], atol=2e-6)
    masked = np.where(np.arange(VOCAB) == 3, -np.inf, logits[1])
    p = oracle.probabilities(masked, SamplingParams(**common))
    best = sorted(range(VOCAB), key=lambda v: (-p[v], v))[:4]
    assert list(out.top_ids[1]) == best
    np.testing.assert_allclose(out.top_logprobs[1], np.log(p[best]), atol=2e-6)
    assert out.token[2] == logits[2].argmax() and out.logprob[2] == 0.0
    assert out.top_logprobs[2, 0] == 0.0 and out.top_logprobs[2, 1] == -np.inf


def test_forced_tokens_keep_the_distribution():
    logits = _logits(np.random.default_rng(5), 2)
    requests = [SamplingParams(logprobs=0, banned_token_ids=[7])] * 2
    out = _step(logits, requests, forced=np.array([7, -1], np.int32))
    free = _step(logits, requests)
    assert out.token[0] == 7 and out.valid[0] and out.token[1] == free.token[1]
    np.testing.assert_allclose(out.logprob[0], oracle.log_softmax(logits[0])[7], atol=2e-6)


def test_draft_rows_see_counts_as_if_decoded_one_by_one():
    """Three rows of one slot in one step equal three steps in which the counts were updated."""
    request = SamplingParams(
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        temperature=0.8,
        logprobs=0,
        logprobs_mode="processed",
    )
    prompt, output, drafts = (3, 4, 9), [4, 4, 11], [9, 11]
    logits = _logits(np.random.default_rng(6), 3)
    zero, at = np.zeros(3, np.int32), np.arange(6, 9, dtype=np.int32)
    earlier = np.array([[-1, -1], [9, -1], [9, 11]], np.int32)
    together = _step(logits, [request], [(prompt, output)], at, slot=zero, earlier=earlier)
    for step in range(3):
        sofar = [*output, *drafts[:step]]
        alone = _step(logits[step : step + 1], [request], [(prompt, sofar)])
        assert alone.token[0] == together.token[step]
        assert alone.logprob[0] == together.logprob[step]
        p = oracle.probabilities(oracle.adjusted(logits[step], request, prompt, sofar), request)
        np.testing.assert_allclose(np.exp(alone.logprob[0]), p[int(alone.token[0])], rtol=1e-5)


def test_a_row_does_not_depend_on_the_others_nor_on_the_bucket():
    """Same bits alone, in a batch of rows that take every branch, and in a padded bucket."""
    rng = np.random.default_rng(7)
    logits = _logits(rng, len(OPTIONS), 300)
    requests = [SamplingParams(**o, seed=i, logprobs=3) for i, o in enumerate(OPTIONS)]
    batch = _step(logits, requests, pad=0)
    more = [SamplingParams(top_p=0.3, top_k=7, logprobs=1)] * 5
    padded = _step(np.concatenate([logits, _logits(rng, 5, 300)]), [*requests, *more], pad=24)
    for i, request in enumerate(requests):
        alone = _step(logits[i : i + 1], [request], pad=0)
        for name in ("token", "valid", "logprob", "top_ids", "top_logprobs"):
            one = getattr(alone, name)[0]
            if name[:3] == "top" and request.logprobs == 0:
                continue
            np.testing.assert_array_equal(one, getattr(batch, name)[i], err_msg=name)
            np.testing.assert_array_equal(one, getattr(padded, name)[i], err_msg=name)


def test_position_and_seed_decide_the_sample():
    logits = np.repeat(_logits(np.random.default_rng(8), 1), 16, 0)
    same = _step(logits, [SamplingParams(seed=5)] * 16, position=[3] * 16)
    assert len(set(same.token.tolist())) == 1
    moved = _step(logits, [SamplingParams(seed=5)] * 16, position=range(16))
    assert len(set(moved.token.tolist())) > 4
    assert moved.token[3] == same.token[0]


@pytest.mark.parametrize(
    "options", [{"temperature": 0.8}, {"top_p": 0.9}, {"top_k": 4}, {"top_k": 8, "top_p": 0.7}]
)
def test_chi_square_over_1e5_draws(options):
    """Frequencies over positions fit the oracle's distribution; nothing else is ever drawn."""
    vocab, draws = 24, 100_000
    row = np.random.default_rng(9).standard_normal(vocab).astype(np.float32) * 1.5
    request = SamplingParams(seed=11, **options)
    params, _ = _slots([request], vocab)
    rows = params.take(jnp.zeros(draws, jnp.int32))
    z = spread(jnp.asarray(np.repeat(row[None], 16, 0)), params)[:1]
    many = jnp.broadcast_to(z, (draws, vocab))
    tokens = jax.jit(sampling.choose)(many, rows, jnp.arange(draws, dtype=jnp.int32))
    counts = np.bincount(np.asarray(tokens), minlength=vocab)
    p = oracle.probabilities(row, request)
    assert counts[p == 0].sum() == 0
    live = p > 0
    chi = ((counts[live] - draws * p[live]) ** 2 / (draws * p[live])).sum()
    freedom = live.sum() - 1
    assert chi < freedom + 5 * np.sqrt(2 * freedom), (chi, freedom)


def _edge_rows():
    inf, nan, base, third = np.inf, np.nan, np.linspace(-1, 1, 8), np.arange(8) == 2
    return {
        "one hot": (np.where(np.arange(8) == 5, 80, 0.0), 5),
        "holes": (np.where(third, 1.0, -inf), 2),
        "nan": (np.where(third, nan, base), None),
        "all nan": (np.full(8, nan), None),
        "plus inf": (np.where(third, inf, base), None),
        "all -inf": (np.full(8, -inf), None),
        "huge": (base * 3e38, 7),
        "all equal": (np.zeros(8), 0),
        "small": (base * 1e-36, 7),
    }


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"top_p": 0.01}, {"top_k": 1}, {"temperature": 1e-30}, {"min_p": 1.0}],
)
def test_edge_rows(options):
    """NaN, infinities, one-hot, empty rows (cases 68, 118): a valid token has probability > 0."""
    rows, request = _edge_rows(), SamplingParams(**options, seed=1)
    logits = np.stack([row for row, _ in rows.values()]).astype(np.float32)
    out = _step(logits, [request] * len(rows))
    for i, (name, (_, want)) in enumerate(rows.items()):
        assert out.valid[i] == (want is not None), name
        if want is not None:
            token = int(out.token[i])
            assert oracle.probabilities(logits[i], request)[token] > 0, name
            if name in ("one hot", "holes", "huge") or request.greedy:
                assert token == want, name


def test_ties_go_to_the_lowest_id():
    logits = np.zeros((4, 50), np.float32)
    logits[:, 30:40] = 1.0
    logits[1, 7] = -0.0
    kinds = ({"top_k": 3}, {"top_k": 12}, {"top_p": 0.2}, {"temperature": 0})
    p = _distribution(logits, [SamplingParams(**kind) for kind in kinds])
    assert list(np.flatnonzero(p[0])) == [30, 31, 32]
    assert list(np.flatnonzero(p[1])) == [0, 1, *range(30, 40)]
    nucleus = int(np.ceil(0.2 * (10 * np.e + 40) / np.e))
    assert list(np.flatnonzero(p[2])) == list(range(30, 30 + nucleus))
    assert list(np.flatnonzero(p[3])) == [30]


def test_nothing_left_is_not_valid():
    """A mask that leaves only a held-back stop id: flagged, and the neighbour is sampled."""
    logits = _logits(np.random.default_rng(1), 2)
    allowed = np.ones((2, VOCAB), bool)
    allowed[0] = np.arange(VOCAB) == STOP[0]
    out = _step(logits, [SamplingParams(min_tokens=3), SamplingParams()], allowed=allowed)
    assert not out.valid[0] and out.valid[1]


def test_padding_rows_count_nothing():
    """Slot or token -1 must not wrap into the last slot or id (case 49)."""
    tables = sampling_state.empty_tables(3, 10)
    ids, slots = jnp.asarray([-1, 4, 4], jnp.int32), jnp.asarray([0, -1, 1], jnp.int32)
    tables = sampling_state.count_output(tables, slots, ids)
    tables = sampling_state.count_prompt(tables, slots, ids)
    assert int(tables.output.sum()) == 1 and int(tables.output[1, 4]) == 1
    assert int(tables.prompt.sum()) == 1 and bool(tables.prompt[1, 4])


def test_vocabulary_bound():
    with pytest.raises(ValueError, match="vocab 262144"):
        sampling_state.empty_tables(1, 2**18)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 17, 50, 500]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
    levels=st.sampled_from([3, 1000]),
)
def test_sets_equal_the_oracle(seed, temperature, top_k, top_p, min_p, levels):
    """Kept sets over a wide range of options; few levels: many ties. A set may differ only where
    the oracle's own cut lies within float32 of the boundary."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal((1, 50)) * levels).astype(np.float32) * 2 / levels
    request = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    p = _distribution(logits, [request])[0]
    for nudge in (0, -1e-6, 1e-6):
        near = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=min(max(top_p + (nudge if top_p < 1 else 0), 1e-12), 1.0),
            min_p=max(min_p - nudge, 0.0) if min_p else 0.0,
        )
        want = oracle.probabilities(logits[0], near)
        if ((want > 0) == (p > 0)).all():
            np.testing.assert_allclose(p, want, atol=3e-6)
            return
    raise AssertionError((np.flatnonzero(p), np.flatnonzero(want)))


def test_log_normaliser_is_exact_on_long_tails():
    """129,280 ids, mass from a flat row and from a peak with a tail far below it."""
    rng = np.random.default_rng(2)
    flat = rng.standard_normal(129_280)
    peaked = np.where(np.arange(129_280) == 77, 20.0, flat)
    logits = np.stack([flat, peaked]).astype(np.float32)
    ours = np.asarray(jax.jit(sampling.log_normaliser)(jnp.asarray(logits)))
    for row, value in zip(logits.astype(np.float64), ours, strict=True):
        assert abs(np.log(np.exp(row - row.max()).sum()) + row.max() - value) < 2e-6


def test_likeliest_of_a_long_row_with_ties():
    """Only blocks with the largest maxima are sorted: the same ids as a stable sort of the row."""
    rng = np.random.default_rng(10)
    rows = np.round(rng.standard_normal((3, 5003)) * 4).astype(np.float32)
    rows[1, 40:] = -np.inf
    best, ids = jax.jit(sampling.likeliest, static_argnums=1)(jnp.asarray(rows), 9)
    order = np.argsort(-rows, axis=-1, kind="stable")[:, :9]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(best, np.take_along_axis(rows, order, -1))


def test_every_option_traces_on_eight_devices():
    """Rows spread over 8 devices, then over 2 with the vocabulary over 4 (cases 79, 85)."""
    requests = [SamplingParams(**option, seed=i) for i, option in enumerate(OPTIONS)]
    logits = _logits(np.random.default_rng(12), 16, 96)
    alone = _step(logits, requests)
    params, tables = _slots(requests, 96)
    slot, at = jnp.arange(16, dtype=jnp.int32), jnp.zeros(16, jnp.int32)
    for shape, spec in (((8, 1), ("a", None)), ((2, 4), ("a", "b"))):
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), ("a", "b"))
        put = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, jax.P(*spec)))
        rest = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, jax.P("a")))
        out = run(
            put(jnp.asarray(logits)),
            jax.tree.map(rest, params),
            jax.tree.map(put, tables),
            rest(slot),
            rest(at),
        )
        np.testing.assert_array_equal(out.token, alone.token)
