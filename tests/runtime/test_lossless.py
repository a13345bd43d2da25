"""Speculation on the golden checkpoint: the same tokens, and the same logits to the last bit.

32 requests of 63 tokens each, prompts of 2 to 188 tokens, so that decoding crosses the window and
the page of 128. Every second request may emit three ids only: drafts of a random drafter then stand
often enough that every number of accepted drafts occurs.
"""

import functools

import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.runtime.engine import Shapes
from tests.golden import values
from tests.runtime.runs import same, same_rows

TOKENS, LENGTHS = 63, range(2, 194, 6)
FEW = [10, 11, 12]
STYLES = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    "hot": {
        "temperature": 1.3,
        "top_p": 0.9,
        "top_k": 100,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "logit_bias": {11: 0.5},
    },
}


def _work():
    rng = np.random.default_rng(7)
    return [rng.integers(3, 509, length).tolist() for length in LENGTHS]


def _params(style):
    fields = {**STYLES[style], "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
    few = {"allowed_token_ids": FEW}
    return [
        dj.SamplingParams(seed=n, **fields, **(few if n % 2 else {})) for n in range(len(LENGTHS))
    ]


@functools.lru_cache(maxsize=2)
def _engine(speculate, folder, invariant=True):
    return dj.LLM(
        values.TINY,
        numerics=dj.Numerics.preset("float32", cache_qdq=False, invariant=invariant),
        max_slots=32,
        max_context=256,
        speculate=speculate,
        shapes=Shapes(prefill=((8, 64),)),
        cache=folder,
    )


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """`engine(speculate, invariant)`; step times of "adaptive" in a folder of this run."""
    folder = tmp_path_factory.getbasetemp() / "steps"
    return lambda speculate, invariant=True: _engine(speculate, folder, invariant)


@functools.cache
def _plain(style, llm):
    return llm.generate(_work(), _params(style), capture=("logits",), strict=True)


def _same_logits(one, other):
    """Of every prompt row and every sampled token."""
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        for found, wanted in (
            (a.prompt_captured, b.prompt_captured),
            (a.outputs[0].captured, b.outputs[0].captured),
        ):
            ((layer, rows),) = wanted["logits"].items()
            same_rows(rows, found["logits"][layer], f"logits of request {number}")


@pytest.mark.slow
@pytest.mark.timeout(3600)  # the first of a width compiles up to seven programs
@pytest.mark.parametrize("batch", [32, 1])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("speculate", [2, "adaptive", 1, 3, 4, 5])
def test_two_thousand_tokens(engine, speculate, style, batch):
    """Without drafts, with k of them and with chosen widths; all requests at once, one by one."""
    work, params = _work(), _params(style)
    plain = _plain(style, engine(0))
    assert sum(len(out.outputs[0].token_ids) for out in plain) == 2016
    llm = engine(speculate)
    drafted = []
    for first in range(0, len(work), batch):
        some = slice(first, first + batch)
        drafted += llm.generate(work[some], params[some], capture=("logits",), strict=True)
    same(plain, drafted)
    _same_logits(plain, drafted)
    stood = sum(out.metrics.accepted_rows for out in drafted)
    assert 0 < stood < sum(out.metrics.verified_rows for out in drafted)


@pytest.mark.slow
def test_where_tokens_part_without_invariant(engine):
    """invariant=False: tokens may part from a near tie on. Printed: how far they agree, and the
    margin between the two ids where they part."""
    work, params = _work(), _params("greedy")
    plain, drafted = (
        engine(speculate, False).generate(work, params, capture=("logits",), strict=True)
        for speculate in (0, 5)
    )
    agreed, worst, margins = 0, 0.0, []
    for number, (a, b) in enumerate(zip(plain, drafted, strict=True)):
        one, other = a.outputs[0], b.outputs[0]
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        same_to = next((i for i, (x, y) in enumerate(pairs) if x != y), TOKENS)
        (left,), (right,) = one.captured["logits"].values(), other.captured["logits"].values()
        worst = max(worst, float(np.abs(left[: same_to + 1] - right[: same_to + 1]).max()))
        agreed += same_to
        if same_to < TOKENS:
            ids = one.token_ids[same_to], other.token_ids[same_to]
            margins.append((number, same_to, float(left[same_to, ids[0]] - left[same_to, ids[1]])))
    print(f"{agreed} of {TOKENS * len(work)} tokens before the first divergence of their request")
    print(f"logits up to there within {worst:.1e}; (request, token, margin): {margins}")
    assert worst < 5e-5
    assert all(0 <= margin < 1e-4 for _, _, margin in margins)
