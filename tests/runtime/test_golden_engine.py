"""The golden checkpoint through the engine: greedy tokens and drafts of others, every split."""

import functools

import jax
import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.runtime.engine import Shapes
from tests.golden import values

NAMES = ("len1", "len7", "len40", "len129", "len200", "len300", "text", "eos_mid", "repeat")
SLOW = (("kvq_on", None), ("kvq_off", 0), ("kvq_on", 0))


@functools.lru_cache(maxsize=2)
def _engine(numerics, **options):
    given = {"max_slots": 8, "shapes": Shapes(prefill=((4, 128),)), **options}
    return dj.LLM(values.TINY, numerics=numerics, max_context=384, **given)


def _prompts():
    golden = values.independent()
    return [golden[f"ids.{name}"].astype(int).tolist() for name in NAMES]


@pytest.mark.parametrize(
    ("kind", "speculate"),
    [
        pytest.param("kvq_off", None, marks=pytest.mark.long),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_greedy_tokens_and_drafts(kind, speculate, monkeypatch):
    """Tokens of every sequence; with drafting also ids and confidences of the block after each
    prompt (contexts below, at and beyond the window of 128), and at each step after len40, where
    rejected drafts have been overwritten."""
    golden = values.independent()
    numerics = dj.Numerics.preset("float32", cache_qdq=kind == "kvq_on")
    llm = _engine(numerics, speculate=speculate)
    prompts, seen, loop = _prompts(), {}, llm._loop
    dispatch = loop._dispatch

    def watched(step):
        flight = dispatch(step)
        state = jax.device_get([loop.state.length, loop.state.drafts, loop.state.confidence])
        for item, sample in zip(step.work, flight.samples, strict=True):
            length, drafts, confidence = (leaf[item.slot] for leaf in state)
            place = int(length) - len(sample.prompt)
            seen.setdefault((tuple(sample.prompt), place), (drafts, confidence))
        return flight

    monkeypatch.setattr(loop, "_dispatch", watched)
    wanted = [golden[f"{kind}.greedy.{name}"].astype(int).tolist() for name in NAMES]
    params = [
        dj.SamplingParams(temperature=0.0, max_tokens=len(ids), ignore_eos=True) for ids in wanted
    ]
    outs = llm.generate(prompts, params, strict=True)
    found = [out.outputs[0].token_ids for out in outs]
    assert dict(zip(NAMES, found, strict=True)) == dict(zip(NAMES, wanted, strict=True))
    if speculate == 0:
        return
    pairs = []
    for name, prompt in zip(NAMES, prompts, strict=True):
        ids, confidence = (golden[f"{kind}.dspark.{part}.{name}"] for part in ("ids", "confidence"))
        pairs.append((seen[tuple(prompt), 0], ids, confidence))
    steps = [golden[f"{kind}.dspark_steps.{part}.len40"] for part in ("ids", "confidence")]
    prompt, rows = tuple(prompts[NAMES.index("len40")]), 0
    for place, (ids, confidence) in enumerate(zip(*steps, strict=True)):
        if (prompt, place) in seen:  # a step whose drafts stood skips places
            pairs.append((seen[prompt, place], ids, confidence))
            rows += 1
    assert rows >= 3
    worst = 0.0
    for (drafts, confidence), ids, expected in pairs:
        assert drafts.tolist() == ids[1:].tolist()
        worst = max(worst, float(np.abs(confidence - expected).max()))
    # With cache quantisation a value near a rounding step can move one bin.
    assert worst < (5e-2 if kind == "kvq_on" else 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("invariant", [True, False])
def test_prefill_and_decode_agree_for_every_k(invariant):
    """prefill(300) = prefill(k) + decode(300 - k) for k in 1..299, in a batch of eight different
    k: log-probabilities of the five likeliest and of the given ids, to the last bit with
    invariant=True and within 5e-5 without."""
    numerics = dj.Numerics.preset("float32", cache_qdq=False, invariant=invariant)
    llm = _engine(numerics, speculate=0)
    tokens = values.independent()["ids.len300"].astype(int).tolist()
    ask = dj.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=5)
    (whole,) = llm.generate([tokens], ask, strict=True)
    params = [
        dj.SamplingParams(
            temperature=0.0,
            forced_token_ids=tokens[k:],
            max_tokens=len(tokens) - k,
            logprobs=5,
            ignore_eos=True,
        )
        for k in range(1, len(tokens))
    ]
    outs = llm.generate([tokens[:k] for k in range(1, len(tokens))], params, strict=True)
    worst = 0.0
    for k, out in enumerate(outs, start=1):
        for entry, expected in zip(out.outputs[0].logprobs, whole.prompt_logprobs[k:], strict=True):
            if invariant:
                assert entry == expected, k
            else:
                both = entry.keys() & expected.keys()  # near ties may change places
                assert len(both) >= 4
                worst = max(worst, *(abs(entry[token] - expected[token]) for token in both))
    print(f"largest difference {worst:.1e}")
    assert worst < 5e-5
