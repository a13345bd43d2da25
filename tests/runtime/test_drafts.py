"""Speculation end to end: equal tokens and bits, what a rejected draft leaves behind, drafts.

Requests that may emit three ids only make drafts of a random drafter stand often enough that every
number of accepted drafts occurs.
"""

import jax
import numpy as np
import pytest

import deepinfer_jax as dj
from tests.runtime.runs import bits, logprobs, same
from tests.runtime.small_model import BLOCK, WINDOW

FEW = [10, 11, 12]
STYLES = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    "hot": {"temperature": 1.3, "top_p": 0.9, "frequency_penalty": 0.2, "presence_penalty": 0.1},
}


def _params(style, count, tokens, few=True):
    allowed = {"allowed_token_ids": FEW} if few else {}
    fields = {**STYLES[style], **allowed, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
    return [dj.SamplingParams(seed=n, **fields) for n in range(count)]


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_coupled_equals_no_speculation(llm, prompts, style, few):
    work, params = prompts(3, 17, 40, 26), _params(style, 4, 60, few)
    plain = llm({"speculate": 0}, invariant=True).generate(work, params)
    engine = llm(invariant=True)
    drafted = engine.generate(work, params)
    same(plain, drafted)
    same(plain[:1], engine.generate(work[:1], params[:1]))
    if few:
        assert sum(out.metrics.accepted_rows for out in drafted) > 20
        assert all(out.metrics.tokens_per_step > 1 for out in drafted)


@pytest.mark.slow
def test_fewer_drafts_and_adaptive_widths_change_nothing(llm, prompts, adaptive):
    work, params = prompts(3, 17, 40, 26), _params("hot", 4, 60)
    plain = llm({"speculate": 0}, invariant=True).generate(work, params)
    fewer = llm({"speculate": 1}, invariant=True).generate(work, params)
    same(plain, fewer)
    assert max(len(out.metrics.drafts.judged) for out in fewer) == 1
    engine = llm(adaptive, invariant=True)
    same(plain, engine.generate(work, params))
    # Rows as dear as steps of their own: none is verified beyond the bucket; for nothing: all are.
    costs = engine._loop.costs
    verified = {}
    for rate in (1.0, 1e-9):
        engine._loop.costs = {key: 1e-6 + rate * key[1] for key in costs}
        found = engine.generate(work, params)
        same(plain, found)
        steps = sum(out.metrics.decode_steps for out in found)
        verified[rate] = sum(out.metrics.verified_rows for out in found) / steps
    engine._loop.costs = costs
    assert verified[1.0] < 1 < 2 < verified[1e-9]


def _plain(tokens):
    """Without penalties, which would count ids given as a prompt in another way."""
    return dj.SamplingParams(
        temperature=1.3,
        top_p=0.9,
        allowed_token_ids=FEW,
        ignore_eos=True,
        logprobs=0,
        seed=0,
        max_tokens=tokens,
    )


def test_decoding_after_rollbacks_equals_a_fresh_prefill(llm, prompts):
    """At every cut of a speculated output: rings, open groups, n-gram look-back, pages."""
    engine, (prompt,) = llm(invariant=True), prompts(13)
    (out,) = engine.generate([prompt], _plain(50))
    ids, values = out.outputs[0].token_ids, logprobs(out)
    assert 0 < out.metrics.accepted_rows < out.metrics.verified_rows
    cuts = range(1, 47)
    found = engine.generate([prompt + ids[:cut] for cut in cuts], _plain(3))
    for cut, one in zip(cuts, found, strict=True):
        assert one.outputs[0].token_ids == ids[cut : cut + 3], cut
        assert logprobs(one).tolist() == values[cut : cut + 3].tolist(), cut


def _last_state(engine, prompt, params):
    """A request's slot state and pages at the moment its slot is given up."""
    loop, kept = engine._loop, {}
    leave = loop.scheduler._leave

    def keep(job):
        pages = np.full(loop.pages.per_slot, -1, np.int32)
        row = loop.pages.row(job.slot)
        pages[: len(row)] = row
        kept["share"] = jax.device_get(loop.programs.take(loop.state, job.slot, pages))
        leave(job)

    loop.scheduler._leave = keep
    try:
        (out,) = engine.generate([prompt], [params], strict=True)
    finally:
        del loop.scheduler._leave
    return out, kept["share"]


@pytest.mark.parametrize("tokens", [30, 33, 38])
def test_the_cache_after_rollbacks_equals_a_prefilled_one(llm, prompts, tokens):
    engine, (prompt,) = llm(invariant=True), prompts(13)
    out, (slot, paged) = _last_state(engine, prompt, _plain(tokens))
    assert out.metrics.accepted_rows < out.metrics.verified_rows
    fed = prompt + out.outputs[0].token_ids[:-1]
    _, (fresh, fresh_paged) = _last_state(engine, fed, _plain(1))
    length = len(fed)

    def agree(one, other, positions):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            place = np.array(positions) % a.shape[0]
            assert np.array_equal(a[place], b[place])

    seen = range(length - WINDOW, length)
    agree(slot.cache.window, fresh.cache.window, seen)
    agree(slot.cache.draft, fresh.cache.draft, seen)
    agree(slot.cache.open, fresh.cache.open, [length - 1])
    agree(slot.cache.classes, fresh.cache.classes, range(length - 2, length))
    for stores, others in zip(paged, fresh_paged, strict=True):
        for a, b, ratio in zip(stores, others, (2, 1), strict=True):
            flat = [leaf.reshape(-1, leaf.shape[-1])[: length // ratio] for leaf in (a, b)]
            assert np.array_equal(*flat)


def test_drafts_are_those_of_forward_at_every_length_and_after_rollbacks(llm, prompts):
    """Contexts below, at and beyond the window; a confidence depends on the drafted ids as well."""
    engine = llm(invariant=True)
    loop = engine._loop
    for prompt in prompts(1, WINDOW - 1, WINDOW, WINDOW + 1, 40):
        seen, newest, consume = {}, {}, loop._consume

        def read(number, confidence, newest=newest, **_):
            newest[number] = confidence

        def record(flight, consume=consume, seen=seen, newest=newest):
            consume(flight)
            for number, sample in loop._samples.items():
                if number in newest:
                    seen[len(sample.output.token_ids)] = newest[number]

        loop._consume, loop.confidences.read = record, read
        try:
            params = dj.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            (out,) = engine.generate([prompt], params, strict=True)
        finally:
            del loop._consume, loop.confidences.read
        ids = out.outputs[0].token_ids
        assert len(seen) > 4
        contexts = [prompt + ids[: count - 1] for count in seen]
        padded, lengths = np.zeros((12, 64), np.int64), np.ones(12, np.int64)  # of one program
        for row, context in enumerate(contexts):
            padded[row, : len(context)], lengths[row] = context, len(context)
        wanted = np.asarray(engine.model.draft(padded, lengths.tolist()).confidence)
        found = np.stack(list(seen.values()))
        assert np.abs(found - wanted[: len(contexts)]).max() < 1e-4


def test_a_budget_never_knows_the_block_it_is_for(llm, prompts, monkeypatch):
    """Requests come and go, so prefills give the host time to read a block before it is verified;
    what a budget may use is an earlier block of the same request all the same."""
    engine = llm(invariant=True)
    loop, ahead = engine._loop, {}
    decode, early, used = loop._decode, 0, 0

    def watched(groups, size, work, samples, enter):
        nonlocal early, used
        blocks, done = jax.device_get((loop.state.confidence, loop.state.done))
        for _, item, sample in work:
            if done[item.slot]:  # it ended in a step not read yet: there is no newer block
                continue
            earlier, block = ahead.setdefault(sample.number, []), blocks[item.slot].tobytes()
            early += sample.number in loop.confidences._ahead
            if (known := loop.confidences.known(sample.number)) is not None:
                assert known.tobytes() != block and known.tobytes() in earlier
                used += 1
            earlier.append(block)
        return decode(groups, size, work, samples, enter)

    monkeypatch.setattr(loop, "_decode", watched)
    lengths = (40, 3, 90, 60, 5, 33, 70, 12)
    params = [
        dj.SamplingParams(temperature=1.0, seed=n, max_tokens=6 + 5 * n, ignore_eos=True)
        for n in range(len(lengths))
    ]
    engine.generate(prompts(*lengths), params, strict=True)
    assert early > 3 and used > 20


def test_everything_after_a_stop_is_dropped(llm, prompts):
    engine, (prompt,) = llm(invariant=True), prompts(9)
    fields = {**STYLES["hot"], "allowed_token_ids": FEW, "max_tokens": 40, "seed": 0}
    (free,) = engine.generate([prompt], dj.SamplingParams(**fields))
    ids = free.outputs[0].token_ids
    for stop in set(FEW) & set(ids):
        (out,) = engine.generate([prompt], dj.SamplingParams(**fields, stop_token_ids=[stop]))
        assert out.outputs[0].token_ids == ids[: ids.index(stop) + 1]
        assert out.outputs[0].stop_reason == stop


@pytest.mark.slow
def test_rejection_keeps_greedy_tokens_and_reports(llm, prompts):
    work, params = prompts(3, 17, 40, 26), _params("greedy", 4, 60)
    plain = llm({"speculate": 0}, invariant=True).generate(work, params)
    engine = llm({"accept": "rejection"}, invariant=True)
    same(plain, engine.generate(work, params))
    hot = engine.generate(work, _params("hot", 4, 60))
    assert bits(hot[0]) == bits(engine.generate(work[:1], _params("hot", 4, 60)[:1])[0])
    metrics = hot[0].metrics
    assert metrics.accepted_rows > 0
    assert len(metrics.drafts.judged) == BLOCK
    assert metrics.verified_per_accepted >= 1
    assert 0 <= metrics.drafts.calibration_error <= 1
