"""Grammars through `LLM`: every kind with drafts, triggers, preemption, both tiers, bad requests.

Outputs of all authored cases are in `tests/structured/test_grammar_outputs.py`.
"""

import json
import re
from typing import Any

import jsonschema
import pytest

import deepinfer_jax as dj
from deepinfer_jax.structured import HostMatcher, network
from tests.runtime.runs import same, scarce
from tests.runtime.small_model import CONTEXT

PATTERN = r"[a-f]{3,20}(, [0-9]+)*é?"
ITEM = {"type": "object", "properties": {"id": {"type": "integer"}, "ok": {"type": "boolean"}}}
TREE = {
    "$defs": {
        "n": {
            "type": "object",
            "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}},
            "required": ["c"],
        }
    },
    "$ref": "#/$defs/n",
}
KINDS: dict[str, dict[str, Any]] = {
    "regex": {"regex": PATTERN},
    "json_schema": {"json_schema": ITEM},
    "recursive json_schema": {"json_schema": TREE},
    "ebnf": {"ebnf": 'root ::= term ([-+] term)*\nterm ::= [0-9]{1,3} | "(" root ")"'},
    "choice": {"choice": ["yes", "no", "perhaps", "中文"]},
    "json": {"json": True},
}
PALINDROME = {"ebnf": 'root ::= "a" root "a" | "b" root "b" | ""'}
FREE = dj.SamplingParams(temperature=0.9, max_tokens=12, seed=1, ignore_eos=True, logprobs=0)


def constrained(structured: dict[str, Any], seed: int, **options: Any) -> dj.SamplingParams:
    fields = {"temperature": 1.0, "max_tokens": 40, "logprobs": 0, **options}
    return dj.SamplingParams(structured=structured, seed=seed, **fields)


def valid(kind: str, text: str) -> bool:
    """Judged by other code than ours, where there is some."""
    if kind == "regex":
        return re.fullmatch(PATTERN, text) is not None
    if kind == "choice":
        return text in KINDS[kind]["choice"]
    if kind == "ebnf":
        decimal = re.sub(r"\b0+(?=\d)", "", text)  # as Python reads it: without leading zeros
        return set(text) <= set("0123456789-+()") and bool(eval(f"{decimal}, True"))
    schema = {"json": {"type": "object"}, "json_schema": ITEM, "recursive json_schema": TREE}[kind]
    jsonschema.validate(json.loads(text), schema)
    return True


@pytest.mark.parametrize("speculate", [None, pytest.param("adaptive", marks=pytest.mark.slow)])
def test_speculation_changes_no_token(speculate, llm, prompts):
    """Every kind of the device tiers, one of them after a trigger, in a batch with a free one."""
    off, on = llm({"speculate": 0}, invariant=True), llm({"speculate": speculate}, invariant=True)
    work = prompts(4, 9, 14, 21, 7, 30)
    work = [*work, work[0], work[3]]
    (out,) = off.generate([work[0]], FREE, strict=True)
    trigger = out.outputs[0].token_ids[2:4]  # what this request says before any grammar
    late = constrained({**KINDS["json"], "trigger": trigger}, 1, temperature=0.9)
    params = [*(constrained(spec, n) for n, spec in enumerate(KINDS.values())), late, FREE]
    plain, drafted = (engine.generate(work, params, strict=True) for engine in (off, on))
    same(plain, drafted)
    for kind, out in zip(KINDS, plain, strict=False):
        assert out.outputs[0].finish_reason == "stop", kind
        assert valid(kind, out.outputs[0].text), (kind, out.outputs[0].text)
    sample = plain[-2].outputs[0]
    assert sample.token_ids[2:4] == trigger and sample.finish_reason == "stop"
    assert valid("json", off.tokenizer.decode(sample.token_ids[4:-1]))
    same([drafted[-1]], on.generate([work[-1]], [FREE]))  # not changed by its neighbours
    assert sum(out.metrics.accepted_rows for out in drafted) > 0


def test_the_end_is_reached_in_time(llm, prompts):
    """The mask steers to an end, also with no token to spare; with fewer, or with fewer left in
    the context, an error says how many it takes."""
    engine = llm(invariant=True)
    compiler = engine._loop.grammars._compiler
    (prompt,) = prompts(3)
    for kind, spec in KINDS.items():
        least = compiler.submit(spec).result().report.min_tokens
        params = [constrained(spec, more, max_tokens=least + more) for more in (0, 1, 3, 6)]
        params.append(constrained(spec, 9, max_tokens=least - 1))
        *whole, short = engine.generate([prompt] * len(params), params)
        for out in whole:
            assert out.outputs[0].finish_reason == "stop", (kind, out.outputs[0].text)
            assert valid(kind, out.outputs[0].text), (kind, out.outputs[0].text)
        assert short.error is not None and f"takes {least} tokens" in short.error, kind
    (out,) = engine.generate(
        [[5] * (CONTEXT - 8)], constrained({"regex": "[a-c]{40}"}, 0, max_tokens=41)
    )
    assert out.outputs[0].finish_reason == "error"
    assert "leave room for 8" in out.error and "structured" in out.error


def test_a_trigger_starts_the_grammar_at_any_place_of_a_block(llm, prompts):
    """Free until the trigger's id has been sampled, then constrained, within a block as well."""
    trigger, count = 300, 8
    work = prompts(*[6] * count)
    spec = {"regex": "[a-c]{2,5}(-[0-9]{1,3})?", "trigger": [trigger]}
    params = [constrained(spec, n, max_tokens=60, logit_bias={trigger: 5.0}) for n in range(count)]
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
            assert re.fullmatch(spec["regex"], tail)
    assert len(places) > 2, "the trigger came at one place only"


def test_preemption_keeps_the_place_in_a_grammar(llm, prompts):
    engine, work = llm(invariant=True), prompts(110, 120, 115, 100)
    pattern = "([a-c]{3}-){20}[0-9]"
    params = [constrained({"regex": pattern}, n, max_tokens=120) for n in range(4)]
    wanted = engine.generate(work, params)
    for host_pages in (4096, 0):
        with scarce(engine, pages=5, host_pages=host_pages):
            found = engine.generate(work, params)
        assert sum(out.metrics.preemptions for out in found) > 0
        same(wanted, found)
    assert all(re.fullmatch(pattern, out.outputs[0].text) for out in wanted)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def schema(value: Any, message: str) -> tuple[dict[str, Any], str]:
    return {"json_schema": value}, f"json_schema at '#{message}"


# What `SamplingParams` accepts and no grammar can be made of, and what it is told.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a("}, "unterminated subpattern"),
    ({"ebnf": "x"}, "ebnf line 1, column 2"),
    schema('{"maxLength": 1e999}', "/maxLength': maxLength must be a whole number"),
    schema({"maxItems": float("inf")}, "/maxItems': maxItems must be a whole number"),
    schema({"properties": {1: {}}}, "/properties': key 1 must be a string"),
    schema({"const": {"a": {2: 3}}}, "/const/a': key 2 must be a string"),
    schema({"$id": "http://[bad", "$ref": "#"}, "/$ref': reference '#' from 'http://[bad' is no"),
    schema({"$id": "http://[bad#x"}, "/$id': not an address"),
    ({"json_schema": nested(900)}, "structured json_schema is nested too deeply"),
    ({"ebnf": f'root ::= "a"{{{"9" * 5000}}}'}, "column 13: the bound of a repetition"),
    ({"regex": f"a{{{'9' * 5000}}}"}, "the bound of a repetition has too many digits"),
]


def test_bad_grammars_end_alone(llm, prompts):
    params = [constrained(spec, n) for n, (spec, _) in enumerate([(KINDS["regex"], ""), *BAD])]
    good, *outs = llm(invariant=True).generate([prompts(5)[0]] * len(params), params)
    assert good.error is None and valid("regex", good.outputs[0].text)
    for (_, message), out in zip(BAD, outs, strict=True):
        assert out.error is not None and message in out.error, (message, out.error)
        assert "\n" not in out.error and len(out.error) < 300, message


def test_a_fault_of_the_compiler_ends_one_request(llm, prompts, monkeypatch):
    """What nobody foresaw is told by its type and its first line."""

    def broken(*given: Any) -> Any:
        raise KeyError("no such\nthing")

    monkeypatch.setattr(network, "build", broken)
    params = [constrained({"ebnf": 'root ::= "never seen"'}, 1), constrained(KINDS["regex"], 1)]
    bad, good = llm(invariant=True).generate(prompts(5, 5), params)
    assert bad.error == r"structured ebnf: KeyError: 'no such\nthing'"
    assert good.error is None and valid("regex", good.outputs[0].text)


def test_tables_larger_than_the_pool_are_for_the_host_tier(llm, prompts):
    pytest.importorskip("llguidance", reason="the host tier is the extra 'grammar'")
    engine, spec = llm(invariant=True), {"regex": "[a-f]([0-9]{1,1000}|[^g]{1,3000})"}
    report = engine._loop.grammars._compiler.submit(spec).result().report
    assert report.tier == 3 and report.reason == "more than 65536 cells of tables"
    params = [constrained(spec, 1, max_tokens=30), constrained(KINDS["regex"], 2)]
    outs = engine.generate(prompts(5, 7), params, strict=True)
    assert re.fullmatch("[a-f][^g]+", outs[0].outputs[0].text, re.DOTALL)
    assert valid("regex", outs[1].outputs[0].text)


class Breaking:
    """A matcher of llguidance with a method that raises when it is called once too often."""

    def __init__(self, matcher: Any, method: str, good: int):
        self._matcher, self._method, self._left = matcher, method, good

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("too\ncomplex")
        return getattr(self._matcher, name)


@pytest.mark.parametrize(
    ("method", "good"), [("compute_bitmask", 0), ("compute_bitmask", 3), ("try_consume_tokens", 2)]
)
def test_a_fault_of_a_matcher_ends_one_request(method, good, llm, prompts, monkeypatch):
    """At its first token and later, while others are at every stage; they get what they got."""
    pytest.importorskip("llguidance", reason="the host tier is the extra 'grammar'")
    engine, work = llm(invariant=True), prompts(5, 40, 12, 4)
    long = {"ebnf": 'root ::= "c"{40} half\nhalf ::= "a" half "a" | "b" half "b" | ""'}
    params = [constrained(spec, 3, max_tokens=60) for spec in (PALINDROME, KINDS["regex"], long)]
    params.append(FREE)
    wanted = engine.generate(work, params, strict=True)
    start = HostMatcher.__init__

    def breaking(self: HostMatcher, grammar: Any, vocabulary: Any) -> None:
        start(self, grammar, vocabulary)
        if "c" in grammar.host:
            self._matcher = Breaking(self._matcher, method, good)

    monkeypatch.setattr(HostMatcher, "__init__", breaking)
    found = engine.generate(work, params)
    assert found[2].error == "host tier: RuntimeError: too"
    sample = found[2].outputs[0]
    assert sample.finish_reason == "error" and len(sample.token_ids) == good
    assert sample.token_ids == wanted[2].outputs[0].token_ids[:good]
    for number in (0, 1, 3):
        same(found[number : number + 1], wanted[number : number + 1])
    assert len(engine._loop) == 0 and engine._loop.pages.used == 0
    assert not engine._loop.grammars._held


def test_the_host_tier_waits_alone(llm, prompts):
    """A grammar that the device tiers decline: llguidance makes its masks between steps. No drafts
    for it; its neighbours take the steps that they take without it."""
    pytest.importorskip("llguidance", reason="the host tier is the extra 'grammar'")
    work = prompts(5, 9, 12, 4)
    params = [constrained(PALINDROME, 3, max_tokens=60), FREE, constrained(KINDS["regex"], 2), FREE]
    plain = llm({"speculate": 0}, invariant=True).generate(work, params, strict=True)
    engine = llm(invariant=True)
    mixed = engine.generate(work, params, strict=True)
    alone = engine.generate(work[1:], params[1:], strict=True)
    same(plain, mixed)
    same(alone, mixed[1:])
    for one, other in zip(alone, mixed[1:], strict=True):
        assert one.metrics.decode_steps == other.metrics.decode_steps
        assert other.metrics.verified_rows > 0
    assert mixed[0].metrics.verified_rows == mixed[0].metrics.accepted_rows == 0
    sample = mixed[0].outputs[0]
    assert set(sample.text) <= set("ab")
    assert sample.finish_reason == "length" or sample.text == sample.text[::-1]
