"""The embedded checkpoint: what `LLM()` uses when nothing is named, and that it was trained.

The held-out text is `made_text` with a seed that training never saw, so nothing need be fetched;
the bars are looser than what demo/README.md reports, which is over more text.
"""

import numpy as np
import pytest

import deepinfer_jax as dj
from converters.check import examine
from deepinfer_jax import demo
from deepinfer_jax.demo import corpus
from deepinfer_jax.demo.made_text import Writer
from deepinfer_jax.runtime.engine import Shapes
from deepinfer_jax.runtime.text import Tokenizer

UNSEEN = 77
SIZE = {
    "max_slots": 4,
    "max_context": 256,
    "shapes": Shapes(prefill=((4, 32),)),
}


@pytest.fixture(scope="module")
def llm() -> dj.LLM:
    return dj.LLM(**SIZE)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Beginnings of unseen generated documents."""
    tokenizer = Tokenizer(demo.checkpoint())
    writer = Writer(UNSEEN)
    return [tokenizer.encode(writer.story())[:120] for _ in range(4)]


def test_it_is_a_whole_official_checkpoint_with_every_mechanism():
    cfg = examine(demo.checkpoint()).cfg
    assert {plan.mode for plan in cfg.plan} == {"window", "full", "reindex", "reuse"}
    assert {plan.half for plan in cfg.plan} == {"encoder", "decoder"}
    assert {plan.ratio for plan in cfg.plan} == {0, 1, 2}
    assert cfg.candidate_source_layer_id is not None and len(cfg.engram_layer_ids) == 2
    assert cfg.num_nextn_predict_layers == 3 and cfg.expert_dtype == "fp4"
    assert sum(file.stat().st_size for file in demo.checkpoint().iterdir()) <= 12e6
    tokenizer = Tokenizer(demo.checkpoint())
    assert tokenizer.encode_pieces([(text, True) for text in corpus.SPECIALS]) == [*range(10)]


@pytest.mark.slow
def test_it_was_trained(llm, texts):
    """Unseen stories: far from the uniform 8.3 nats a token, and from a trigram's 0.9."""
    scores = llm.score(texts)
    nats = -np.mean([value for one in scores for value in one.logprobs[1:]])
    assert nats < 0.8


@pytest.mark.slow
def test_drafting_changes_no_token(llm, texts):
    params = dj.SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    prompts = [ids[:40] for ids in texts]
    plain = dj.LLM(**SIZE, speculate=0)
    ours, theirs = llm.generate(prompts, params), plain.generate(prompts, params)
    for one, other in zip(ours, theirs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert np.mean([out.metrics.tokens_per_step for out in ours]) > 2.0
