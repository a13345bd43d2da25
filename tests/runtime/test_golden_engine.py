"""The golden checkpoint through the engine: greedy tokens and drafts of others, every split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.model import dspark
from deepinfer_jax.model import rows as row_lists
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.compile import jit
from deepinfer_jax.runtime.engine import Shapes
from tests.golden import values
from tests.runtime.runs import same_rows

NAMES = ("len1", "len7", "len40", "len129", "len200", "len300", "text", "eos_mid", "repeat")
SLOW = (("kvq_on", None), ("kvq_off", 0), ("kvq_on", 0))


@functools.lru_cache(maxsize=2)
def _engine(numerics, **options):
    given = {"max_slots": 8, "shapes": Shapes(prefill=((4, 128),)), **options}
    return dj.LLM(values.TINY, numerics=numerics, max_context=384, **given)


@functools.cache
def _drafter(setup):
    """Logits of the greedy block after every slot's newest token, from an engine's own cache."""

    def run(weights, state):
        slots, block = state.length.shape[0], setup.cfg.dspark_block_size
        noise = jnp.full((slots, block), setup.cfg.dspark_noise_token_id, jnp.int32)
        rows = row_lists.rectangle(
            noise.at[:, 0].set(state.last),
            start=state.length,
            count=jnp.full((slots,), block, jnp.int32),
            slot=jnp.arange(slots, dtype=jnp.int32),
            pages=jnp.full((slots, 1), -1, jnp.int32),
        )
        found = dspark.draft_block(
            setup, weights.draft, weights.embed, weights.head, rows, state.cache, Capture()
        )
        return dspark.draft_greedy(setup, weights.draft, found, state.last)[1]

    return jit(run)


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
    """Tokens of every sequence; with drafting also ids, logits and confidences of the block after
    each prompt (contexts below, at and beyond the window of 128), and ids and confidences at each
    step after len40, where rejected drafts have been overwritten."""
    golden = values.independent()
    numerics = dj.Numerics.preset("float32", cache_qdq=kind == "kvq_on")
    llm = _engine(numerics, speculate=speculate)
    prompts, seen, loop = _prompts(), {}, llm._loop
    dispatch = loop._dispatch

    def watched(step):
        flight = dispatch(step)
        state = [loop.state.length, loop.state.drafts, loop.state.confidence]
        if speculate != 0:
            state.append(_drafter(llm.model.setup)(llm.model.weights, loop.state))
        state = jax.device_get(state)
        for item, sample in zip(step.work, flight.samples, strict=True):
            length, *block = (leaf[item.slot] for leaf in state)
            place = int(length) - len(sample.prompt)
            seen.setdefault((tuple(sample.prompt), place), block)
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
    pairs, parts = [], ("ids", "confidence", "logits")
    for name, prompt in zip(NAMES, prompts, strict=True):
        pairs.append((seen[tuple(prompt), 0], [golden[f"{kind}.dspark.{p}.{name}"] for p in parts]))
    steps = [golden[f"{kind}.dspark_steps.{part}.len40"] for part in parts[:2]]
    prompt, rows = tuple(prompts[NAMES.index("len40")]), 0
    for place, (ids, confidence) in enumerate(zip(*steps, strict=True)):
        if (prompt, place) in seen:  # a step whose drafts stood skips places
            pairs.append((seen[prompt, place], [ids, confidence]))
            rows += 1
    assert rows >= 3
    worst = 0.0
    for (drafts, *found), (ids, *expected) in pairs:
        assert drafts.tolist() == ids[1:].tolist()
        for one, wanted in zip(found, expected, strict=False):  # steps have no logits
            worst = max(worst, float(np.abs(one - wanted).max()))
    print(f"largest difference {worst:.1e}")
    # With cache quantisation a value near a rounding step can move one bin.
    assert worst < (5e-2 if kind == "kvq_on" else 5e-5)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # 45,000 decoded tokens
@pytest.mark.parametrize("invariant", [True, False])
def test_prefill_and_decode_agree_for_every_k(invariant):
    """prefill(300) = prefill(k) + decode(300 - k) for k in 1..299, in a batch of 32 different k:
    the logits of every prompt row and of every step, to the last bit with invariant=True and within
    5e-5 without."""
    numerics = dj.Numerics.preset("float32", cache_qdq=False, invariant=invariant)
    llm = _engine(numerics, speculate=0, max_slots=32)
    tokens = values.independent()["ids.len300"].astype(int).tolist()

    def ask(k):
        return dj.SamplingParams(
            temperature=0.0,
            forced_token_ids=tokens[k:] or None,
            max_tokens=max(len(tokens) - k, 1),
            ignore_eos=True,
        )

    (whole,) = llm.generate([tokens], [ask(300)], capture=("logits",), strict=True)
    ((_, wanted),) = whole.prompt_captured["logits"].items()
    assert np.abs(wanted - values.independent()["kvq_off.logits.len300"]).max() < 5e-5
    worst = 0.0
    for first in range(1, len(tokens), 32):
        splits = range(first, min(first + 32, len(tokens)))
        work, params = [tokens[:k] for k in splits], [ask(k) for k in splits]
        for k, out in zip(
            splits, llm.generate(work, params, capture=("logits",), strict=True), strict=True
        ):
            (prompt,) = out.prompt_captured["logits"].values()
            (steps,) = out.outputs[0].captured["logits"].values()
            found = np.concatenate([prompt, steps[1:]])  # the first id's row is the prompt's last
            if invariant:
                same_rows(wanted[:-1], found, f"prompt of {k}")
            else:
                worst = max(worst, float(np.abs(wanted[:-1] - found).max()))
    print(f"largest difference {worst:.1e}")
    assert worst < 5e-5
