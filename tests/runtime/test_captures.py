"""Research hooks: what a request recorded, and routes that replace the router's."""

import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.runtime import experts
from tests.runtime.runs import bits, same, scarce
from tests.runtime.small_model import KEEP

LAYERS, EXPERTS = 5, 2
NAMES = ("routes", "index_topk", "logits")


def _params(count, **options):
    fields = {
        "temperature": 0.9,
        "allowed_token_ids": [10, 11, 12],
        "max_tokens": 14,
        "ignore_eos": True,
        "logprobs": 0,
        **options,
    }
    return [dj.SamplingParams(seed=n, **fields) for n in range(count)]


def _recorded(out, name):
    """layer -> rows of every position that was fed: the prompt's, then the output's."""
    prompt, sample = out.prompt_captured[name], out.outputs[0].captured[name]
    return {layer: np.concatenate([prompt[layer], sample[layer][1:]]) for layer in sorted(prompt)}


def _routes(out):
    rows = _recorded(out, "routes")
    return np.stack([rows[layer] for layer in range(LAYERS)], axis=1)


def test_captures_are_those_of_forward_and_change_nothing(llm, prompts):
    engine, work, params = llm(invariant=True), prompts(40, 7, 19), _params(3)
    plain = engine.generate(work, params)
    found = engine.generate(work, params, capture=NAMES)
    same(plain, found)
    assert all(not out.prompt_captured and not out.outputs[0].captured for out in plain)
    for tokens, out in zip(work, found, strict=True):
        ids = out.outputs[0].token_ids
        fed = tokens + ids[:-1]
        padded = fed + [0] * (64 - len(fed))
        wanted = engine.model.forward([padded], [len(fed)], capture=NAMES).captured
        for name in NAMES:
            rows = _recorded(out, name)
            assert sorted(rows) == sorted(wanted[name])
            for layer, values in rows.items():
                assert np.array_equal(values, wanted[name][layer][0][: len(fed)]), (name, layer)
                # The row that an id was sampled from fed the token before it.
                captured = out.outputs[0].captured[name][layer]
                assert len(captured) == len(ids)
                assert np.array_equal(captured[0], out.prompt_captured[name][layer][-1])


@pytest.mark.slow
def test_replayed_routes_give_equal_bits(llm, prompts):
    engine, work, params = llm(invariant=True), prompts(40, 7, 19), _params(3)
    found = engine.generate(work, params, capture=("routes",))
    replay = [_params(n + 1, forced_routes=_routes(out))[n] for n, out in enumerate(found)]
    same(found, engine.generate(work, [replay[0], params[1], replay[2]]))
    # Other routes are really taken, up to the last of them; -1 leaves it to the router.
    changed = (_routes(found[0]) + 1) % 4
    (moved,) = engine.generate(work[:1], _params(1, forced_routes=changed), capture=("routes",))
    assert np.array_equal(_routes(moved), np.sort(changed, -1))
    assert bits(moved) != bits(found[0])
    free = _params(1, forced_routes=np.full_like(changed, -1))
    same(found[:1], engine.generate(work[:1], free))


def test_preempted_requests_record_every_row_once(llm, prompts):
    engine, work, params = llm(invariant=True), prompts(100, 110, 90, 120), _params(4)
    params = _params(4, max_tokens=60)
    wanted = engine.generate(work, params, capture=NAMES)
    for host_pages in (4096, 0):
        with scarce(engine, pages=5, host_pages=host_pages):
            found = engine.generate(work, params, capture=NAMES)
        assert sum(out.metrics.preemptions for out in found) > 0
        same(wanted, found)
        for a, b in zip(wanted, found, strict=True):
            for name in NAMES:
                one, other = _recorded(a, name), _recorded(b, name)
                for layer, rows in one.items():
                    where = host_pages, name, layer
                    assert rows.shape == other[layer].shape, where
                    differ = np.flatnonzero((rows != other[layer]).reshape(len(rows), -1).any(1))
                    assert not differ.size, (where, differ)


@pytest.mark.slow
def test_bounded_replay_records_what_it_computed(llm, prompts):
    engine, lengths = llm({"speculate": 0}, invariant=True, replay="compact"), (70, 20, 32)
    outs = engine.generate(prompts(*lengths), _params(3), capture=("routes",))
    for length, out in zip(lengths, outs, strict=True):
        rows = {layer: len(values) for layer, values in out.prompt_captured["routes"].items()}
        kept = min(KEEP, length)
        assert rows == {0: length, 1: length, 2: kept, 3: kept, 4: kept}
        assert {len(v) for v in out.outputs[0].captured["routes"].values()} == {14}


def test_samples_of_one_prompt_record_the_prompt_once(llm, prompts):
    (out,) = llm(invariant=True).generate(prompts(9), _params(1, n=2), capture=NAMES)
    assert len(out.prompt_captured["routes"][0]) == 9
    assert [len(sample.captured["routes"][0]) for sample in out.outputs] == [14, 14]


def test_a_capture_concerns_its_own_requests(llm, prompts):
    """Refused beside an open stream, which records nothing; not left behind by one that failed."""
    engine, work, params = llm(invariant=True), prompts(7, 9), _params(2)
    with experts.recorded(engine):
        stream = engine.stream(work, params)
        next(stream)
        with pytest.raises(ValueError, match="capture: requests are in flight"):
            engine.generate(work[:1], params[:1], capture=("index_topk",))
        engine.generate(work[:1], params[:1])
    for out in stream:  # its last steps were sent while experts were recorded
        assert not out.outputs[0].captured and not out.prompt_captured
        assert out.outputs[0].finish_reason in (None, "length")
    with pytest.raises(ValueError, match="prompt 0: prompt: empty"):
        engine.generate([[], work[0]], _params(2), capture=("routes",), strict=True)
    assert engine._loop.capture == ()
    recorded = engine.generate(work, params, capture=("routes",), strict=True)
    for frame in engine.prefilled(work, params):
        assert frame
    same(recorded, engine.generate(work, params, strict=True))


def test_what_cannot_be_recorded_or_forced_is_refused(llm, prompts):
    engine = llm(invariant=True)
    for name in ("route", "compressed_kv"):
        with pytest.raises(ValueError, match=f"capture: unknown name '{name}'"):
            engine.generate(prompts(3), capture=(name,))
    wrong = {
        "expected [tokens, 5, 2]": np.zeros((3, 4, 2), int),
        "expected 0..3": np.full((3, LAYERS, EXPERTS), [0, 9]),
        "twice": np.zeros((3, LAYERS, EXPERTS), int),
    }
    params = [dj.SamplingParams(forced_routes=routes, max_tokens=2) for routes in wrong.values()]
    for out, message in zip(engine.generate(prompts(3, 3, 3), params), wrong, strict=True):
        assert message in (out.error or ""), out.error
