"""Structured output through the engine: device and host tier, drafts, mixed batches, preemption."""

import json
import re

import pytest

import deepinfer_jax as dj
from tests.runtime.runs import same, scarce

PATTERN = r"[a-c]{2,5}(-[0-9]{1,3})?"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
KINDS = {
    "regex": {"regex": PATTERN},
    "json_schema": {"json_schema": SCHEMA},
    "ebnf": {"ebnf": 'root ::= "(" root ")" | "x"'},
    "choice": {"choice": ["yes", "no", "nope"]},
}


def _params(structured, seed, **options):
    fields = {"temperature": 1.0, "max_tokens": 40, "logprobs": 0, **options}
    return dj.SamplingParams(structured=structured, seed=seed, **fields)


def _right(text, kind):
    if kind == "regex":
        return re.fullmatch(PATTERN, text) is not None
    if kind == "choice":
        return text in KINDS["choice"]["choice"]
    if kind == "ebnf":
        return re.fullmatch(r"\(*x\)*", text) and text.count("(") == text.count(")")
    value = json.loads(text)
    return value["a"] in ("x", "y") and isinstance(value["n"], int) and len(value) == 2


def test_every_kind_in_one_batch_with_and_without_drafts(llm, prompts):
    work, kinds = prompts(4, 9, 14, 21, 7, 30), [*KINDS, None, "regex"]
    params = [
        dj.SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0)
        if kind is None
        else _params(KINDS[kind], seed)
        for seed, kind in enumerate(kinds)
    ]
    plain = llm({"speculate": 0}, invariant=True).generate(work, params)
    engine = llm(invariant=True)
    drafted = engine.generate(work, params)
    same(plain, drafted)
    for out, kind in zip(drafted, kinds, strict=True):
        sample = out.outputs[0]
        if kind is not None:
            assert sample.finish_reason == "stop", (kind, sample.text)
            assert _right(sample.text, kind), (kind, sample.text)
    same([drafted[4]], engine.generate([work[4]], [params[4]]))  # not changed by its neighbours
    assert sum(out.metrics.accepted_rows for out in drafted) > 0


def test_few_tokens_left_still_complete(llm, prompts):
    """The mask steers to an end within max_tokens."""
    params = [_params(KINDS["json_schema"], n, max_tokens=24) for n in range(4)]
    for out in llm(invariant=True).generate(prompts(5, 6, 7, 8), params):
        sample = out.outputs[0]
        assert sample.finish_reason == "stop" and _right(sample.text, "json_schema")


def test_a_trigger_starts_the_grammar_at_any_place_of_a_block(llm, prompts):
    """Free until the trigger's id has been sampled, then constrained, within a block as well."""
    trigger, count = 300, 8
    work = prompts(*[6] * count)
    structured = {**KINDS["regex"], "trigger": [trigger]}
    params = [
        _params(structured, n, max_tokens=60, logit_bias={trigger: 5.0}) for n in range(count)
    ]
    plain = llm({"speculate": 0}, invariant=True).generate(work, params)
    engine = llm(invariant=True)
    same(plain, engine.generate(work, params))
    places = set()
    for out in plain:
        ids = out.outputs[0].token_ids
        if trigger in ids:
            places.add(ids.index(trigger))
            assert ids[-1] == 1
            tail = engine.tokenizer.decode(ids[ids.index(trigger) + 1 :])
            assert re.fullmatch(PATTERN, tail)
    assert len(places) > 2, "the trigger came at one place only"


def test_preemption_keeps_the_place_in_a_grammar(llm, prompts):
    engine, work = llm(invariant=True), prompts(110, 120, 115, 100)
    pattern = "([a-c]{3}-){20}[0-9]"
    params = [_params({"regex": pattern}, n, max_tokens=120) for n in range(4)]
    wanted = engine.generate(work, params)
    for host_pages in (4096, 0):
        with scarce(engine, pages=5, host_pages=host_pages):
            found = engine.generate(work, params)
        assert sum(out.metrics.preemptions for out in found) > 0
        same(wanted, found)
    assert all(re.fullmatch(pattern, out.outputs[0].text) for out in wanted)


def test_bad_grammars_end_alone(llm, prompts):
    params = [_params({"regex": "a("}, 0), _params(KINDS["regex"], 1), _params({"ebnf": "x"}, 2)]
    outs = llm(invariant=True).generate(prompts(5, 6, 7), params)
    assert [out.error is None for out in outs] == [False, True, False]
    assert _right(outs[1].outputs[0].text, "regex")


def test_too_few_tokens_for_any_output_are_an_error(llm, prompts):
    """Forty letters and the end of sequence; a limit of the context counts like max_tokens."""
    spec = {"regex": "[a-c]{40}"}
    work = [*prompts(5, 6), [5] * 248]
    params = [_params(spec, n, max_tokens=tokens) for n, tokens in enumerate((41, 3, 41))]
    outs = llm(invariant=True).generate(work, params)
    assert re.fullmatch("[a-c]{40}", outs[0].outputs[0].text)
    for out, room in zip(outs[1:], (3, 8), strict=True):
        assert out.outputs[0].finish_reason == "error"
        assert f"leave room for {room}" in out.error and "structured" in out.error


def test_the_host_tier_waits_for_its_own_mask(llm, prompts):
    """A grammar that the device tiers decline: llguidance makes its masks between steps."""
    pytest.importorskip("llguidance")
    palindrome = {"ebnf": 'root ::= "a" root "a" | "b" root "b" | ""'}
    work = prompts(5, 9, 12)
    params = [
        _params(palindrome, 0, max_tokens=60),
        dj.SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0),
        _params(KINDS["regex"], 2),
    ]
    plain = llm({"speculate": 0}, invariant=True).generate(work, params)
    drafted = llm(invariant=True).generate(work, params)
    same(plain, drafted)
    sample = drafted[0].outputs[0]
    assert set(sample.text) <= set("ab")
    assert sample.finish_reason == "length" or sample.text == sample.text[::-1]
    assert drafted[0].metrics.verified_rows == 0 < drafted[1].metrics.verified_rows
