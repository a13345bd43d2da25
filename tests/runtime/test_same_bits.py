"""What a request gives does not depend on how it is served: the matrix of equal bits.

Batch composition, slot, order and preemption through the host are exact in every mode. Bucket,
chunks, recomputation, prefill against decode and replay "mask" against "compact" are exact with
`invariant=True`, and within 5e-5 without (float32, caches not quantised).
"""

import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.runtime.engine import Shapes
from tests.runtime.runs import bits, log_softmax, logprobs, same, scarce
from tests.runtime.small_model import KEEP

TOLERANCE = 5e-5
LENGTHS = (5, 33, 12, 50, 70, 21)
SPLITS = (*range(1, 36), 40, 47, 48, 63)  # of 64 tokens, between prefill and decode
EVERY_MODE = (True, pytest.param(False, marks=pytest.mark.slow))


def _params(count, **options):
    fields = {"temperature": 0.8, "max_tokens": 12, "ignore_eos": True, "logprobs": 0, **options}
    return [dj.SamplingParams(seed=n, **fields) for n in range(count)]


@pytest.mark.parametrize("invariant", EVERY_MODE)
def test_batch_slot_and_order_are_exact_in_every_mode(llm, prompts, invariant):
    engine, work, params = llm(invariant=invariant), prompts(*LENGTHS), _params(len(LENGTHS))
    together = engine.generate(work, params)
    alone = [engine.generate([one], [p])[0] for one, p in zip(work, params, strict=True)]
    same(together, alone)
    same(together, engine.generate(work[::-1], params[::-1])[::-1])


@pytest.mark.parametrize("invariant", EVERY_MODE)
def test_preemption_through_the_host_is_exact_in_every_mode(llm, prompts, invariant):
    engine, work = llm(invariant=invariant), prompts(100, 110, 90, 120)
    params = _params(4, max_tokens=60)
    wanted = engine.generate(work, params)
    with scarce(engine, pages=5):
        found = engine.generate(work, params)
    assert sum(out.metrics.preemptions for out in found) > 0
    same(wanted, found)


@pytest.mark.parametrize("speculate", [0, None])
def test_recomputation_is_exact_with_invariant(llm, prompts, speculate):
    engine, work = llm({"speculate": speculate}, invariant=True), prompts(100, 110, 90, 120)
    params = _params(4, max_tokens=60, repetition_penalty=1.2, presence_penalty=0.3)
    wanted = engine.generate(work, params)
    before = engine._loop.scheduler.preemptions.copy()
    with scarce(engine, pages=5, host_pages=0):
        found = engine.generate(work, params)
    moved = {act: engine._loop.scheduler.preemptions[act] - before[act] for act in before}
    assert [moved[act] > 0 for act in moved] == [False, True]  # none to the host
    same(wanted, found)


@pytest.mark.slow
def test_bucket_and_chunks_are_exact_with_invariant(llm, prompts):
    """Twelve slots in two buckets and other chunks, against four slots."""
    other = {"speculate": 0, "max_slots": 12, "shapes": Shapes(prefill=((1, 16), (3, 64)))}
    work, params = prompts(*LENGTHS, *LENGTHS[::-1]), _params(12)
    wanted = llm({"speculate": 0}, invariant=True).generate(work, params)
    engine = llm(other, invariant=True)
    same(wanted, engine.generate(work, params))  # twelve groups
    same(wanted[:5], engine.generate(work[:5], params[:5]))  # eight


@pytest.mark.slow
def test_bucket_and_chunks_are_within_tolerance_without_invariant(llm, prompts):
    """The same engines, forced so that a near tie cannot part them."""
    other = {"speculate": 0, "max_slots": 12, "shapes": Shapes(prefill=((1, 16), (3, 64)))}
    work = prompts(*LENGTHS, *LENGTHS[::-1])
    params = [_forced(ids) for ids in prompts(*[12] * 12, seed=4)]
    wanted, engine = llm({"speculate": 0}).generate(work, params), llm(other)
    worst = 0.0
    for count in (12, 5):  # twelve groups, eight
        for one, two in zip(wanted, engine.generate(work[:count], params[:count]), strict=False):
            worst = max(worst, np.abs(logprobs(one) - logprobs(two)).max())
    assert 0 < worst < TOLERANCE


def _forced(ids):
    return dj.SamplingParams(
        temperature=0.0, forced_token_ids=ids, max_tokens=len(ids), logprobs=0, ignore_eos=True
    )


@pytest.mark.parametrize("speculate", [pytest.param(0, marks=pytest.mark.slow), None])
def test_prefill_and_decode_agree_at_every_split(llm, prompts, speculate):
    """prefill(n) = prefill(k) + decode(n - k), forced, with other requests in the batch."""
    engine = llm({"speculate": speculate}, invariant=True)
    (tokens,) = prompts(64, seed=3)
    whole = engine.score([tokens])[0].logprobs
    out = engine.generate([tokens[:k] for k in SPLITS], [_forced(tokens[k:]) for k in SPLITS])
    for k, found in zip(SPLITS, out, strict=True):
        assert logprobs(found).tolist() == whole[k:], k


@pytest.mark.slow
def test_prefill_and_decode_agree_within_tolerance_without_invariant(llm, prompts):
    engine = llm()
    (tokens,) = prompts(64, seed=3)
    whole = np.array(engine.score([tokens])[0].logprobs[1:], np.float64)
    wanted = log_softmax(engine.model.forward([tokens]).logits)[0]
    wanted = wanted[np.arange(63), tokens[1:]]
    assert np.abs(whole - wanted).max() < TOLERANCE
    out = engine.generate([tokens[:k] for k in SPLITS], [_forced(tokens[k:]) for k in SPLITS])
    for k, found in zip(SPLITS, out, strict=True):
        assert np.abs(logprobs(found) - wanted[k - 1 :]).max() < TOLERANCE, k


@pytest.mark.slow
def test_bounded_replay_by_mask_equals_compact(llm, prompts):
    """The oracle narrows windows, the other removes rows; prompts on every side of the border."""
    lengths = (1, KEEP - 1, KEEP, KEEP + 1, 32, 33, 57, 64, 95, 120)
    work, params, options = prompts(*lengths), _params(len(lengths)), {"speculate": 0}
    oracle = llm(options, invariant=True, replay="mask")
    engine = llm(options, invariant=True, replay="compact")
    mask = oracle.generate(work, params)
    same(mask, engine.generate(work, params))
    full = llm(options, invariant=True).generate(work, params)
    short = sum(n <= KEEP for n in lengths)
    same(full[:short], mask[:short])
    assert bits(full[-1]) != bits(mask[-1])  # another function of a long prompt

    # A request that is computed again keeps its border: that of its prompt.
    work, longer = prompts(100, 110, 90, 120), _params(4, max_tokens=60)
    with scarce(engine, pages=5, host_pages=0):
        again = engine.generate(work, longer)
    assert sum(out.metrics.preemptions for out in again) > 0
    same(oracle.generate(work, longer), again)


@pytest.mark.slow
def test_prompt_logprobs_are_served_in_full_beside_others(llm, prompts):
    options, work, params = {"speculate": 0}, prompts(70, 50, 90), _params(3)
    scored = dj.SamplingParams(
        temperature=0.8, max_tokens=12, ignore_eos=True, logprobs=0, seed=1, prompt_logprobs=2
    )
    engine = llm(options, invariant=True, replay="compact")
    wanted = engine.generate(work, params)
    mixed = engine.generate(work, [params[0], scored, params[2]])
    same([wanted[0], wanted[2]], [mixed[0], mixed[2]])
    full = llm(options, invariant=True).generate([work[1]], [scored])
    same(full, [mixed[1]])
    assert full[0].prompt_logprobs == mixed[1].prompt_logprobs
    assert bits(mixed[1]) != bits(wanted[1])
