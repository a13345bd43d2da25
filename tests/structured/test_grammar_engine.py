"""Grammars through `LLM`: equal tokens with speculation, the host tier beside others.

One small random model; its engines are those of the runtime's tests, so that their programs are
compiled once. Outputs of all authored cases are in `test_grammar_outputs`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import deepinfer_jax as dj
from converters import synthetic
from tests.runtime import small_model

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
ITEM = {"type": "object", "properties": {"id": {"type": "integer"}, "ok": {"type": "boolean"}}}
ARITHMETIC = 'root ::= term ([-+] term)*\nterm ::= [0-9]{1,3} | "(" root ")"'
ADAPTIVE = {"speculate": "adaptive"}
PALINDROME = 'root ::= "a" root "a" | "b" root "b" | ""'
KINDS: dict[str, dict[str, Any]] = {
    "regex": {"regex": r"[a-f]{3,20}(, [0-9]+)*é?"},
    "json_schema": {"json_schema": ITEM},
    "recursive json_schema": {"json_schema": TREE},
    "ebnf": {"ebnf": ARITHMETIC},
    "choice": {"choice": ["yes", "no", "perhaps", "中文"]},
    "json": {"json": True},
}


def valid(kind: str, text: str) -> bool:
    """Judged by other code than ours, where there is some."""
    if kind == "regex":
        return re.fullmatch(KINDS[kind]["regex"], text) is not None
    if kind == "choice":
        return text in KINDS[kind]["choice"]
    if kind == "ebnf":
        return set(text) <= set("0123456789-+()") and bool(eval(f"{_decimal(text)}, True"))
    schema = {"json": {"type": "object"}, "json_schema": ITEM, "recursive json_schema": TREE}[kind]
    jsonschema.validate(json.loads(text), schema)
    return True


def _decimal(text: str) -> str:
    """Digits as Python reads them: without leading zeros."""
    return re.sub(r"\b0+(?=\d)", "", text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write(tmp_path_factory.mktemp("small") / "model", small_model.CONFIG)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Callable[[str], dj.LLM]:
    """An engine with speculation "off", "fixed" or "adaptive", rows invariant, made when asked."""
    options: dict[str, Any] = {"off": {"speculate": 0}, "fixed": {}, "adaptive": ADAPTIVE}
    num = small_model.numerics(invariant=True)
    return lambda name: small_model.engine(folder, num, tuple(options[name].items()))


@pytest.mark.slow
def test_speculation_changes_no_token(engine: Callable[[str], dj.LLM]) -> None:
    """Every kind of the device tiers, some after a trigger, in a batch with free requests."""
    prompts = np.random.default_rng(4).integers(3, small_model.VOCAB - 2, (6, 9)).tolist()
    free = dj.SamplingParams(temperature=0.9, max_tokens=12, seed=1, ignore_eos=True)
    (out,) = engine("off").generate([prompts[0]], free, strict=True)
    trigger = out.outputs[0].token_ids[2:4]  # what this request says before any grammar
    specs = [*KINDS.values(), {**KINDS["json"], "trigger": trigger}, None]
    work = [prompts[0], *prompts[1:], prompts[0], prompts[3]]
    params = [
        dj.SamplingParams(temperature=0.9, max_tokens=40, seed=1, structured=spec) for spec in specs
    ]
    found = {
        name: engine(name).generate(work, params, strict=True)
        for name in ("off", "fixed", "adaptive")
    }
    for name in ("fixed", "adaptive"):
        for spec, one, other in zip(specs, found["off"], found[name], strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids, (name, spec)
            assert one.outputs[0].finish_reason == other.outputs[0].finish_reason
    for kind, out in zip(KINDS, found["off"], strict=False):
        assert out.outputs[0].finish_reason == "stop", kind
        assert valid(kind, out.outputs[0].text), (kind, out.outputs[0].text)
    late = found["off"][-2].outputs[0]
    assert late.token_ids[2:4] == trigger and late.finish_reason == "stop"
    after = engine("off").tokenizer.decode(late.token_ids[4:-1])
    assert valid("json", after), after
    assert sum(out.metrics.accepted_rows for out in found["fixed"]) > 0


def test_the_end_is_reached_in_time(engine: Callable[[str], dj.LLM]) -> None:
    """Device tiers steer to an end, also with no token to spare; both tiers, drafts on."""
    compiler = engine("fixed")._loop.grammars._compiler
    prompt = [5, 6, 7]
    for kind, spec in KINDS.items():
        least = compiler.submit(spec).result().report.min_tokens
        params = [
            dj.SamplingParams(temperature=1.2, max_tokens=least + more, seed=more, structured=spec)
            for more in (0, 1, 3, 6)
        ]
        for out in engine("fixed").generate([prompt] * 4, params, strict=True):
            assert out.outputs[0].finish_reason == "stop", (kind, out.outputs[0].text)
            assert valid(kind, out.outputs[0].text), (kind, out.outputs[0].text)
        short = dj.SamplingParams(max_tokens=least - 1, structured=spec)
        (out,) = engine("fixed").generate([prompt], short)
        assert out.error is not None and f"takes {least} tokens" in out.error, kind


def test_the_host_tier_waits_alone(engine: Callable[[str], dj.LLM]) -> None:
    """Verify width 1 for it, no drafts; the others take the steps that they take without it."""
    pytest.importorskip("llguidance", reason="the host tier is the extra 'grammar'")
    llm = engine("fixed")
    free = dj.SamplingParams(temperature=0.8, max_tokens=24, seed=3, ignore_eos=True)
    masked = dj.SamplingParams(
        temperature=0.8, max_tokens=24, seed=3, structured={"ebnf": PALINDROME}
    )
    beside = [[9, 8, 7], [30, 31], [44, 45, 46, 47]]
    alone = llm.generate(beside, free, strict=True)
    mixed = llm.generate([[5, 6, 7], *beside], [masked, free, free, free], strict=True)
    host = mixed[0]
    assert host.metrics.verified_rows == host.metrics.accepted_rows == 0
    text = host.outputs[0].text
    assert host.outputs[0].finish_reason in ("stop", "length")
    assert set(text) <= {"a", "b"}
    if host.outputs[0].finish_reason == "stop":
        assert text == text[::-1]
    for one, other in zip(alone, mixed[1:], strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.metrics.decode_steps == other.metrics.decode_steps
        assert other.metrics.verified_rows > 0
