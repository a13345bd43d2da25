"""JSON schemas: valid instances pass, invalid ones do not, and what is sampled validates."""

import json
import math

import jsonschema
import pytest

from deepinfer_jax.structured import GrammarError, SchemaError
from tests.structured.grammar_walk import CASES as FOLDER
from tests.structured.grammar_walk import layouts, read_cases

CASES = read_cases("schemas_authored.json")
THIRD_PARTY = FOLDER / "schemas_jsts_mit.json"  # never committed


def validator(schema):
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["id"])
def test_authored(case, walker):
    grammar = walker.compile({"json_schema": case["schema"]})
    assert grammar.report.tier == (2 if "recursive" in case["tags"] else 1), grammar.report
    valid = [text for value in case["valid"] for text in sorted(layouts(value))]
    invalid = [text for value in case["invalid"] for text in sorted(layouts(value))]
    verdicts = dict(
        zip([*valid, *invalid], walker.accepts(grammar, [*valid, *invalid]), strict=True)
    )
    assert [text for text in valid if not verdicts[text]] == []
    assert [text for text in invalid if verdicts[text]] == []


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["id"])
def test_samples_validate(case, walker):
    """Also with no token to spare: the mask finds the shortest text."""
    grammar = walker.compile({"json_schema": case["schema"]})
    check = validator(case["schema"])
    for budget in (grammar.report.min_tokens, max(48, grammar.report.min_tokens)):
        for text, ended in walker.sample(grammar, budget, seed=budget):
            assert ended, (budget, text)
            check.validate(json.loads(text))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["id"])
def test_many_samples_validate(case, walker):
    grammar = walker.compile({"json_schema": case["schema"]})
    check = validator(case["schema"])
    for seed in range(7):
        for text, ended in walker.sample(grammar, 96 + 16 * seed, seed=seed):
            assert ended, text
            check.validate(json.loads(text))


@pytest.mark.parametrize("case", CASES["must_refuse_or_honour"], ids=lambda case: case["id"])
def test_refused_or_honoured(case, walker):
    if case["id"] == "propertyNames":
        grammar = walker.compile({"json_schema": case["schema"]})
        assert walker.accepts(grammar, ['{"ab": 1}', "{}", '{"b": 1}']) == [True, True, False]
        return
    with pytest.raises(GrammarError) as error:
        walker.compile({"json_schema": case["schema"]})
    assert "\n" not in str(error.value)
    if case["id"] not in ("false-schema", "contradiction"):
        assert isinstance(error.value, SchemaError) and error.value.pointer


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a": {"items": {"not": {}}}}}, "/properties/a/items/not"),
        ({"properties": {"a/b": {"minLenght": 1}}}, "/properties/a~1b/minLenght"),
        ({"anyOf": [{}, {"pattern": "(?=a)"}]}, "/anyOf/1/pattern"),
        ({"$defs": {"x": {"format": "no-such"}}, "$ref": "#/$defs/x"}, "/$defs/x/format"),
        ({"minLength": -1}, "/minLength"),
        ({"required": "a"}, "/required"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf"),
        ({"enum": [[1]], "minItems": 2}, "/minItems"),
        # A fixed value that both branches allow, whichever way its number is written.
        ({"oneOf": [{"enum": [6.0], "minimum": 1}, {"type": "integer"}]}, "/oneOf"),
        ({"oneOf": [{"type": "integer"}, {"const": 6.0, "type": "integer"}]}, "/oneOf"),
        ({"oneOf": [{"enum": [1e-7], "minimum": 0}, {"type": "number"}]}, "/oneOf"),
        ({"oneOf": [{"enum": [[6.0]]}, {"type": "array"}]}, "/oneOf"),
        ({"oneOf": [{"const": {"a": 6.0}}, {"properties": {"a": {"const": 6}}}]}, "/oneOf"),
        ({"oneOf": [{"enum": ["x"], "format": "date"}, {"type": "string"}]}, "/oneOf"),
        ({"properties": {"a": {"enum": [[1, math.inf]]}}}, "/properties/a/enum"),
        ({"minimum": math.nan}, "/minimum"),
    ],
)
def test_the_place_is_named(schema, pointer, walker):
    with pytest.raises(SchemaError) as error:
        walker.compile({"json_schema": schema})
    assert error.value.pointer == pointer
    assert f"'#{pointer}'" in str(error.value)


def test_lenient_ignores_with_a_warning(walker):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "colour": 1}
    grammar = walker.compile({"json_schema": schema, "lenient": True})
    assert [w.split(":")[0] for w in grammar.report.warnings] == ["#/colour", "#/uniqueItems"]
    assert walker.accepts(grammar, ["[1,1]"]) == [True]


MORE = {
    "keys cannot be repeated under another rule": (
        {"properties": {"ab": {"type": "null"}}, "additionalProperties": True, "type": "object"},
        ['{"ab":null,"c":1}', "{}"],
        ['{"ab":1}', '{"ab":null,"ab":1}', '{"\\u0061b":1}', '{"c":1,"ab":null}'],
    ),
    "what allOf parts say of keys holds for each other's": (
        {
            "type": "object",
            "allOf": [{"properties": {"a": {"type": "integer"}}}],
            "additionalProperties": {"type": "boolean"},
        },
        ['{"b":true}'],
        ['{"a":1}', '{"a":true}'],
    ),
    "repeated keys count once": (
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
        ['{"a":1}', '{"a":1,"a":2}'],
        ["{}"],
    ),
    "bounds on declared members": (
        {
            "type": "object",
            "properties": {k: {"type": "null"} for k in "abc"},
            "minProperties": 2,
            "maxProperties": 2,
        },
        ['{"a":null,"b":null}', '{"a":null,"c":null}', '{"b":null,"c":null}'],
        ["{}", '{"b":null}', '{"a":null,"b":null,"c":null}'],
    ),
    "references through ids and anchors": (
        {
            "$id": "http://x.test/root",
            "$defs": {"a": {"$id": "inner", "$defs": {"b": {"$anchor": "n", "type": "null"}}}},
            "prefixItems": [{"$ref": "inner#n"}, {"$ref": "http://x.test/inner#/$defs/b"}],
            "type": "array",
            "minItems": 2,
        },
        ["[null,null]"],
        ["[null]", "[1,null]"],
    ),
    "a branch that is the schema itself": (
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        ["null"],
        ["1"],
    ),
    "draft 7 tuples": (
        {"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "boolean"}},
        ["[]", "[null]", "[null,true]"],
        ["[true]", "[null,null]"],
    ),
    "multiples": (
        {"type": "integer", "multipleOf": 6, "minimum": -7},
        ["0", "-6", "126"],
        ["3", "-12"],
    ),
    "exclusive bounds of decimals": (
        {"type": "number", "exclusiveMinimum": 1.1, "maximum": 20},
        ["1.11", "2", "20", "20.0", "19.99"],
        ["1.1", "1.10", "1", "20.01", "-3", "1.10000000000000001"],
    ),
    "negative ranges": (
        {"type": "number", "minimum": -2.5, "exclusiveMaximum": -1},
        ["-2.5", "-1.01", "-2"],
        ["-1", "-1.0", "-2.51", "0", "1"],
    ),
    "discriminated branches": (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
                {"type": "object", "properties": {"k": {"const": "b"}, "n": {}}, "required": ["k"]},
            ],
            "discriminator": {"propertyName": "k"},
        },
        ['{"k":"a"}', '{"k":"b","n":[{}]}'],
        ['{"k":"a","n":1}', '{"k":"c"}'],
    ),
    "whole floats in an enum are integers": (
        {"type": "integer", "enum": [6.0, 7, 8.5], "minimum": 2},
        ["6", "6.0", "7"],
        ["8.5", "8", "5"],
    ),
    "fixed numbers beside bounds that exclude them from the other branch": (
        {
            "oneOf": [
                {"enum": [6.0, 1e-7], "minimum": 0},
                {"type": "integer", "minimum": 7},
                {"type": "object", "properties": {"a": {"const": 6.0}}, "required": ["a"]},
                {"type": "object", "properties": {"a": {"minimum": 6.5}}, "required": ["a"]},
            ]
        },
        ["6", "6.0", "1e-07", "7", '{"a":6}', '{"a":6.0}', '{"a":7}'],
        ["5", "0", '{"a":6.1}', "{}"],
    ),
    "leap years": (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"2000-02-29"', '"0001-01-01"'],
        ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"', '"2024-04-31"'],
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_more(name, walker):
    schema, accept, reject = MORE[name]
    grammar = walker.compile({"json_schema": schema})
    assert grammar.report.tier < 3
    texts = [*accept, *reject]
    verdicts = dict(zip(texts, walker.accepts(grammar, texts), strict=True))
    assert [t for t in accept if not verdicts[t]] == [] and [t for t in reject if verdicts[t]] == []


@pytest.mark.slow
@pytest.mark.skipif(
    not THIRD_PARTY.exists(), reason=f"{THIRD_PARTY.name} is not in the cases folder"
)
def test_third_party_has_no_wrong_accept(walker):
    wrong = []
    for case in json.loads(THIRD_PARTY.read_text())["cases"]:
        try:
            grammar = walker.compile({"json_schema": case["schema"]})
        except GrammarError:
            continue
        texts = [text for value in case["invalid"] for text in sorted(layouts(value))]
        wrong += [
            (case["id"], t)
            for t, ok in zip(texts, walker.accepts(grammar, texts), strict=True)
            if ok
        ]
    assert wrong == []
