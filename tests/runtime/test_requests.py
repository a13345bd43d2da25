"""What a request may ask for, end to end: stops, log-probabilities, penalties, seeds, streams."""

import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.runtime import admission
from tests.runtime import oracle
from tests.runtime.runs import log_softmax, logprobs, same
from tests.runtime.small_model import CONTEXT, VOCAB

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def _one(engine, prompt, **options):
    (out,) = engine.generate([prompt], dj.SamplingParams(**options), strict=True)
    return out


def _logits(engine, prompt, ids):
    """Of `forward`, at the row before each id; padded so that few programs are compiled."""
    tokens = prompt + ids
    padded = tokens + [0] * (-len(tokens) % 64)
    logits = engine.model.forward([padded], [len(tokens)]).logits
    return np.asarray(logits)[0][len(prompt) - 1 : len(tokens) - 1]


def test_logprobs_are_those_of_forward(llm, prompts):
    engine, (prompt,) = llm(invariant=True), prompts(19)
    sample = _one(engine, prompt, **GREEDY, max_tokens=9, logprobs=5).outputs[0]
    wanted = log_softmax(_logits(engine, prompt, sample.token_ids))
    assert sample.token_ids == wanted.argmax(-1).tolist()
    for entry, token, row in zip(sample.logprobs, sample.token_ids, wanted, strict=True):
        best = np.argsort(-row, kind="stable")[:5].tolist()
        assert list(entry) == list(dict.fromkeys([token, *best]))
        assert all(abs(value - row[other]) < 5e-5 for other, value in entry.items())


def test_processed_logprobs_are_of_what_was_sampled_from(llm, prompts):
    engine, (prompt,) = llm(invariant=True), prompts(11)
    params = dj.SamplingParams(
        temperature=0.7,
        top_k=30,
        top_p=0.8,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={7: 2.0, 9: -3.0},
        banned_token_ids=[11, 12],
        max_tokens=20,
        ignore_eos=True,
        seed=4,
        logprobs=3,
        logprobs_mode="processed",
    )
    (out,) = engine.generate([prompt], params, strict=True)
    ids = out.outputs[0].token_ids
    for step, row in enumerate(_logits(engine, prompt, ids)):
        adjusted = oracle.adjusted(row, params, prompt, ids[:step])
        chances = oracle.probabilities(adjusted, params)
        assert chances[ids[step]] > 0
        entry = out.outputs[0].logprobs[step]
        assert entry[ids[step]] == pytest.approx(np.log(chances[ids[step]]), abs=1e-4)
        assert {11, 12}.isdisjoint(t for t, value in entry.items() if value > -np.inf)


def test_score_equals_forward_and_prompt_logprobs(llm, prompts):
    engine, work = llm(invariant=True), prompts(45, 1, 33)
    marks = engine.score(work)
    ask = dj.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    listed = engine.generate(work, ask, strict=True)
    for tokens, mark, out in zip(work, marks, listed, strict=True):
        wanted = log_softmax(_logits(engine, tokens[:1], tokens[1:]))
        assert mark.logprobs[0] is None and out.prompt_logprobs[0] is None
        assert len(mark.logprobs) == len(out.prompt_logprobs) == len(tokens)
        for row, token, value, entry in zip(
            wanted, tokens[1:], mark.logprobs[1:], out.prompt_logprobs[1:], strict=True
        ):
            assert abs(value - row[token]) < 5e-5 and entry[token] == value
            best = np.argsort(-row, kind="stable")[:2].tolist()
            assert list(entry) == list(dict.fromkeys([token, *best]))


def test_stop_ids_strings_and_lengths(llm, prompts):
    engine, (prompt,) = llm(invariant=True), prompts(14)
    free = _one(engine, prompt, **GREEDY, max_tokens=16, logprobs=0).outputs[0]
    ids, whole = free.token_ids, free.text
    assert (free.finish_reason, len(ids)) == ("length", 16)
    assert whole == engine.tokenizer.decode(ids)
    place = next(i for i in range(3, 16) if ids[i] not in ids[:i])
    stop = {"max_tokens": 16, "logprobs": 0, "stop_token_ids": [ids[place]]}
    sample = _one(engine, prompt, **GREEDY, **stop).outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", ids[place])
    assert sample.token_ids == ids[: place + 1] and len(sample.logprobs) == place + 1
    held = _one(engine, prompt, **GREEDY, **stop, min_tokens=place + 2).outputs[0].token_ids
    assert len(held) >= place + 2
    assert held[:place] == ids[:place] and held[place] != ids[place]
    pairs = range(3, len(whole) - 1)
    cut = next(i for i in pairs if whole.index(whole[i : i + 2]) == i)
    ended = _one(engine, prompt, **GREEDY, max_tokens=16, logprobs=0, stop=[whole[cut : cut + 2]])
    sample = ended.outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", whole[cut : cut + 2])
    assert sample.text == whole[:cut]
    assert len(sample.token_ids) == len(sample.logprobs) <= 16
    assert sample.token_ids == ids[: len(sample.token_ids)]


def test_end_of_sequence_ends_unless_ignored_or_too_early(llm, prompts):
    engine, (prompt,) = llm(invariant=True), prompts(9)
    options = {"temperature": 0.0, "max_tokens": 8, "logit_bias": {1: 1000.0}}
    ended = _one(engine, prompt, **options).outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([1], "stop", None)
    assert ended.text == ""
    assert _one(engine, prompt, **options, ignore_eos=True).outputs[0].token_ids == [1] * 8
    late = _one(engine, prompt, **options, min_tokens=5).outputs[0].token_ids
    assert len(late) == 6 and late.index(1) == 5


def test_only_allowed_ids_appear(llm, prompts):
    params = dj.SamplingParams(
        temperature=1.5, allowed_token_ids=[5, 6, 7], max_tokens=20, ignore_eos=True, seed=2
    )
    for out in llm(invariant=True).generate(prompts(3, 20), params, strict=True):
        assert set(out.outputs[0].token_ids) <= {5, 6, 7}


def test_forced_ids_come_first_and_are_scored(llm, prompts):
    engine, (prompt,), forced = llm(invariant=True), prompts(12), [7, 300, 44, 9, 10]
    out = _one(engine, prompt, **GREEDY, forced_token_ids=forced, max_tokens=8, logprobs=0)
    ids = out.outputs[0].token_ids
    assert ids[:5] == forced and len(ids) == 8
    wanted = log_softmax(_logits(engine, prompt, ids))[np.arange(8), ids]
    assert np.abs(logprobs(out) - wanted).max() < 5e-5


def test_seeds(llm, prompts):
    engine, work = llm(invariant=True), prompts(6, 6, seed=2)
    hot = {"temperature": 1.0, "max_tokens": 10, "ignore_eos": True}
    seeded = engine.generate(work, dj.SamplingParams(**hot, n=3, seed=7), strict=True)
    same(seeded, engine.generate(work, dj.SamplingParams(**hot, n=3, seed=7), strict=True))
    ids = [tuple(sample.token_ids) for sample in seeded[0].outputs]
    assert len(set(ids)) == 3
    single = _one(engine, work[0], **hot, seed=7)
    assert tuple(single.outputs[0].token_ids) == ids[0]  # sample 0 does not depend on n
    unseeded = [_one(engine, work[0], **hot).outputs[0].token_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_bad_requests_end_alone_in_order(llm, prompts):
    engine, (good,) = llm(invariant=True), prompts(8)
    work = [good, [], [3, VOCAB], good, [5] * CONTEXT, [3, VOCAB - 2], [-1], [True]]
    params = dj.SamplingParams(**GREEDY, max_tokens=4, logprobs=0)
    outs = engine.generate(work, params)
    long = f"{CONTEXT} tokens"
    wrong = [None, "empty", f"id {VOCAB}", None, long, "image", "id -1", "True"]
    for out, word in zip(outs, wrong, strict=True):
        assert (out.error is None) == (word is None)
        assert word is None or word in out.error
        assert out.outputs[0].finish_reason == ("length" if word is None else "error")
    same(outs[:1], outs[3:4])
    with pytest.raises(ValueError, match="prompt 1: prompt: empty"):
        engine.generate(work, params, strict=True)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": float("nan")},
        {"temprature": 1.0},
        {"min_tokens": 9, "max_tokens": 3},
        {"n": 0},
    ],
)
def test_contradictions_are_refused_where_they_are_made(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        dj.SamplingParams(**options)


def test_ids_outside_the_vocabulary_are_errors_of_that_request(llm, prompts):
    params = [
        dj.SamplingParams(**GREEDY, max_tokens=2),
        dj.SamplingParams(**GREEDY, max_tokens=2, banned_token_ids=[VOCAB + 5]),
        dj.SamplingParams(**GREEDY, max_tokens=2, logit_bias={VOCAB: 1.0}),
    ]
    outs = llm(invariant=True).generate(prompts(4, 4, 4), params)
    assert [out.error is None for out in outs] == [True, False, False]
    assert "banned_token_ids" in outs[1].error and "logit_bias" in outs[2].error


def test_a_stream_grows_to_what_generate_gives(llm, prompts):
    engine, work, params = (
        llm(invariant=True),
        prompts(6, 40, 9),
        dj.SamplingParams(**GREEDY, max_tokens=10),
    )
    wanted = engine.generate(work, params, strict=True)
    texts, finished = {}, []
    for out in engine.stream(work, params):
        key, sample = tuple(out.prompt_token_ids), out.outputs[0]
        assert sample.text.startswith(texts.get(key, ""))
        texts[key] = sample.text
        if out.finished:
            finished.append(key)
    assert sorted(finished) == sorted(map(tuple, work))
    assert texts == {tuple(out.prompt_token_ids): out.outputs[0].text for out in wanted}


def test_a_stream_that_is_closed_aborts_its_requests(llm, prompts):
    engine = llm(invariant=True)
    stream = engine.stream(prompts(6, 8), dj.SamplingParams(**GREEDY, max_tokens=200))
    first = next(stream)
    stream.close()
    assert first.outputs[0].finish_reason == "abort"
    assert len(engine._loop) == 0 and engine._loop.pages.used == 0
    assert _one(engine, prompts(6)[0], **GREEDY, max_tokens=3).error is None


@pytest.mark.parametrize("where", ["_consume", "_dispatch", "_decode"])
def test_an_interrupt_leaves_a_working_engine(llm, prompts, monkeypatch, where):
    """Ctrl-C in the middle of a turn, after a donated state may have been lost."""
    engine, work, params = llm(invariant=True), prompts(6, 8), dj.SamplingParams(**GREEDY)
    wanted = engine.generate(work, dj.SamplingParams(**GREEDY, max_tokens=9, logprobs=0))
    inner, calls = getattr(engine._loop, where), []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 4:
            inner(*given)
            raise KeyboardInterrupt
        return inner(*given)

    monkeypatch.setattr(engine._loop, where, interrupted)
    seen = {}
    with pytest.raises(KeyboardInterrupt):
        for out in engine.stream(work, params):
            seen[tuple(out.prompt_token_ids)] = out
    monkeypatch.undo()
    assert all(out.outputs[0].finish_reason == "abort" for out in seen.values())
    assert len(engine._loop) == 0 and engine._loop.pages.used == 0
    same(wanted, engine.generate(work, dj.SamplingParams(**GREEDY, max_tokens=9, logprobs=0)))


def test_one_set_of_parameters_each(llm, prompts):
    engine, work = llm(invariant=True), prompts(5, 5)
    params = [dj.SamplingParams(**GREEDY, max_tokens=n) for n in (2, 5)]
    outs = engine.generate(work, params, strict=True)
    assert [len(out.outputs[0].token_ids) for out in outs] == [2, 5]
    with pytest.raises(ValueError, match="3 for 2 prompts"):
        engine.generate(work, [*params, params[0]])


@pytest.mark.parametrize("wrong", [b"Once", bytearray(b"a"), memoryview(b"a"), {"a": 1}, 5, None])
def test_what_is_no_prompt_is_refused(wrong):
    with pytest.raises(ValueError, match="^prompts: .* expected text, token ids, or a list"):
        admission.paired(wrong, None)
    with pytest.raises(ValueError, match=r"^prompts\[1\]: .* expected text or token ids"):
        admission.paired(["a", wrong], None)
    with pytest.raises(ValueError, match="^prompt: .* expected text or token ids"):
        admission.token_ids(wrong, None)


@pytest.mark.parametrize("wrong", [{"temperature": 0}, "temperature", [{"temperature": 0}], 0.5])
def test_what_are_no_parameters_is_refused(wrong):
    with pytest.raises(ValueError, match="^sampling_params: .* expected SamplingParams"):
        admission.paired("x", wrong)


def test_speculation_options(folder):
    with pytest.raises(ValueError, match="speculate = 4; .* trained for 3"):
        dj.LLM(folder, speculate=4, max_context=64)
    for wrong in (-1, True, "often"):
        with pytest.raises(ValueError, match=f"speculate = {wrong!r}"):
            dj.LLM(folder, speculate=wrong, max_context=64)
    with pytest.raises(ValueError, match="accept"):
        dj.LLM(folder, accept="always")
