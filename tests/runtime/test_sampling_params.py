"""Every wrong, contradictory or unknown option is a one-line ValueError that names it."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from deepinfer_jax.runtime.outputs import CompletionOutput, PromptScore, RequestOutput
from deepinfer_jax.runtime.sampling_params import SamplingParams

WRONG = [
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": None}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 2.0}, "top_k"),
    ({"top_k": True}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ({"presence_penalty": float("nan")}, "presence_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"logit_bias": [(1, 2.0)]}, "logit_bias"),
    ({"logit_bias": {}}, "logit_bias is empty"),
    ({"logit_bias": {"1": 2.0}}, "logit_bias"),
    ({"logit_bias": {1: float("-inf")}}, "logit_bias\\[1\\]"),
    ({"logit_bias": {-1: 0.0}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": "12"}, "allowed_token_ids"),
    ({"allowed_token_ids": [1, -1]}, "allowed_token_ids"),
    ({"banned_token_ids": []}, "banned_token_ids is empty"),
    ({"banned_token_ids": [1.0]}, "banned_token_ids"),
    ({"stop_token_ids": []}, "stop_token_ids is empty"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"n": 0}, "n must"),
    ({"stop": []}, "stop is empty"),
    ({"stop": ""}, "stop is empty"),
    ({"stop": ["a", ""]}, "stop is empty"),
    ({"stop": [b"a"]}, "stop must"),
    ({"stop": ["a", "b\ud800"]}, "stop: character 1 is a lone surrogate"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 65}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logprobs_mode": "tempered"}, "logprobs_mode"),
    ({"structured": "regex"}, "structured"),
    ({"structured": {}}, "exactly one of"),
    ({"structured": {"regex": "a", "json": True}}, "exactly one of"),
    ({"structured": {"regexp": "a"}}, "no key 'regexp'"),
    ({"structured": {"regex": ""}}, "structured\\['regex'\\]"),
    ({"structured": {"ebnf": 3}}, "structured\\['ebnf'\\]"),
    ({"structured": {"json": False}}, "structured\\['json'\\]"),
    ({"structured": {"choice": []}}, "structured\\['choice'\\]"),
    ({"structured": {"json_schema": "{"}}, "not JSON"),
    ({"structured": {"json_schema": "3"}}, "structured\\['json_schema'\\]"),
    ({"structured": {"json_schema": "[" * 100_000}}, "nested too deeply"),
    ({"structured": {"json_schema": {"const": {1}}}}, "not JSON"),
    ({"structured": {"json_schema": {"const": "\udc00"}}}, "lone surrogate"),
    ({"structured": {"regex": "\ud800"}}, "lone surrogate"),
    ({"structured": {"json": True, "trigger": []}}, "trigger"),
    ({"structured": {"json": True, "lenient": 1}}, "lenient"),
    ({"forced_token_ids": []}, "forced_token_ids is empty"),
    ({"forced_routes": [[1, 2]]}, "forced_routes"),
    ({"forced_routes": [[[0, 2**32 + 1]]]}, "forced_routes: experts 0..4294967297 are no int32"),
    ({"forced_routes": np.full((1, 1, 2), 2**63, np.uint64)}, "forced_routes"),
    ({"forced_routes": np.zeros((2, 3, 2))}, "forced_routes"),
    # contradictions
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is above max_tokens 4"),
    ({"allowed_token_ids": [1, 2], "banned_token_ids": [2]}, "id 2 is both allowed and banned"),
    ({"logit_bias": {4: 1.0}, "banned_token_ids": [4]}, "id 4 has a logit_bias"),
    ({"logit_bias": {4: 1.0}, "allowed_token_ids": [5]}, "id 4 has a logit_bias"),
    ({"prompt_logprobs": 1, "logprobs_mode": "processed"}, "prompt_logprobs"),
    ({"structured": {"json": True}, "ignore_eos": True}, "ignore_eos"),
    ({"forced_token_ids": [1, 2, 3], "max_tokens": 2}, "forced_token_ids has 3"),
    ({"forced_token_ids": [1], "structured": {"json": True}}, "forced_token_ids and structured"),
    # unknown
    ({"temprature": 1.0}, "no option 'temprature'; did you mean temperature"),
    ({"best_of": 2}, "no option 'best_of'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        SamplingParams(**options)
    assert "\n" not in str(caught.value)


def test_values_that_cannot_even_be_printed():
    nested: dict = {}
    for _ in range(100_000):
        nested = {"not": nested}
    with pytest.raises(ValueError, match="json_schema'\\] is nested too deeply"):
        SamplingParams(structured={"json_schema": nested})
    with pytest.raises(ValueError, match="regex'\\] must be a non-empty string, got a dict"):
        SamplingParams(structured={"regex": nested})
    with pytest.raises(ValueError, match="temperature must be .* got an? int"):
        SamplingParams(temperature=10**5000)


def test_by_name_only():
    with pytest.raises(ValueError, match="by name only"):
        SamplingParams(0.5)


def test_values_come_out_in_one_form():
    params = SamplingParams(
        temperature=1,
        top_k=np.int64(3),
        top_p=np.float32(0.5),
        stop="end",
        stop_token_ids={9, 3},
        allowed_token_ids=np.array([7, 5, 7]),
        forced_token_ids=[4, 4, 2],
        logit_bias={np.int32(5): 2},
        structured=None,
        seed=2**64 - 1,
        logprobs=0,
    )
    assert type(params.temperature) is float and type(params.top_k) is int
    assert params.top_p == 0.5 and params.stop == ("end",)
    assert params.stop_token_ids == (3, 9) and params.allowed_token_ids == (5, 7)
    assert params.forced_token_ids == (4, 4, 2)
    assert params.logit_bias == {5: 2.0}
    assert params.logprobs == 0 and not params.greedy
    assert SamplingParams(temperature=0).greedy


def test_structured_shapes():
    good = [
        {"regex": "a+"},
        {"ebnf": 'root ::= "a"'},
        {"json": True, "lenient": True},
        {"choice": ["yes", "no"], "trigger": [3, 4]},
        {"json_schema": {"type": "object"}},
    ]
    for spec in good:
        assert set(SamplingParams(structured=spec).structured) == set(spec)
    parsed = SamplingParams(structured={"json_schema": '{"type": "null"}'}).structured
    assert parsed == {"json_schema": {"type": "null"}}


def test_frozen_copies_and_pickles():
    params = SamplingParams(temperature=0.5, stop=["a"], forced_routes=np.ones((2, 3, 2), np.int64))
    assert params.forced_routes.dtype == np.int32
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    for twin in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert twin == params
    assert dataclasses.replace(params, top_k=4).top_k == 4
    with pytest.raises(ValueError, match="top_k"):
        dataclasses.replace(params, top_k=-4)


def test_outputs():
    out = RequestOutput("a", [1], [CompletionOutput(0), CompletionOutput(1, finish_reason="stop")])
    assert not out.finished
    out.outputs[0].finish_reason = "length"
    assert out.finished and out.error is None
    assert out.metrics.tokens_per_step == 0.0 and out.metrics.time_to_first_token is None
    out.metrics.decode_steps, out.metrics.accepted_rows, out.metrics.first_token = 4, 6, 2.0
    assert out.metrics.tokens_per_step == 2.5 and out.metrics.time_to_first_token == 2.0
    assert PromptScore([1, 2, 3], [None, -1.0, -0.5]).total == -1.5
