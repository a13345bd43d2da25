"""Regular expressions: python's meaning, refused by name where it is not regular."""

import re

import interegular
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.structured import GrammarError, Limits, RegexError, regex
from deepinfer_jax.structured.dfa import minimise, product
from deepinfer_jax.structured.errors import Budget
from tests.structured.grammar_walk import read_cases

CASES = read_cases("regex.json")


def budget() -> Budget:
    return Budget(Limits(seconds=60))


@pytest.mark.parametrize("case", CASES["accept_reject"], ids=lambda case: case["regex"])
def test_authored(case, walker):
    grammar = walker.compile({"regex": case["regex"]})
    assert grammar.report.tier == 1
    accept, reject = case["accept"], case["reject"]
    expected = [True] * len(accept) + [False] * len(reject)
    assert walker.accepts(grammar, [*accept, *reject]) == expected


@pytest.mark.parametrize("case", CASES["accept_reject"], ids=lambda case: case["regex"])
def test_samples_match(case, walker):
    grammar = walker.compile({"regex": case["regex"]})
    for text, ended in walker.sample(grammar, max(24, grammar.report.min_tokens)):
        assert ended
        assert re.fullmatch(case["regex"], text.decode()), text
        assert re.fullmatch(case["regex"], text.decode(), re.ASCII), text


@pytest.mark.parametrize("pattern", CASES["must_refuse_or_honour"])
def test_refused(pattern, vocabulary, walker):
    if pattern == "a{100000}":  # too large for the device, and honoured on the host
        grammar = walker.compile({"regex": pattern})
        assert (grammar.report.tier, grammar.report.reason) == (3, "more than 20000 repetitions")
        return
    with pytest.raises(RegexError) as error:
        walker.compile({"regex": pattern})
    assert "\n" not in str(error.value) and repr(pattern) in str(error.value)


def test_what_interegular_misreads():
    assert regex.language("[]a]", budget()).accepts("]")
    assert regex.language("(?#comment)a{b", budget()).accepts("a{b")
    for pattern in ("a++", "(?>a)b", "(?m)^a", r"a\B"):
        with pytest.raises(RegexError):
            regex.language(pattern, budget())


@pytest.mark.parametrize(
    "pattern",
    ["[0-9]{4}-(0[1-9]|1[0-2])", "a|b*c", r"\d+(\.\d+)?", "[^x]{1,3}", "(ab|a)(c|bcd)", ""],
)
def test_both_paths_agree(pattern):
    ours = regex._Reader(pattern, False)
    assert regex._from_interegular(pattern) is not None
    theirs = minimise(regex._from_interegular(pattern), budget())
    flagged = regex.language(f"(?s:{pattern})", budget())  # a flag group takes our own path
    assert ours.plain
    assert theirs.states == flagged.states
    assert product(theirs, flagged, budget(), subtract=True).empty()
    assert product(flagged, theirs, budget(), subtract=True).empty()


def test_interegular_is_only_asked_what_it_knows(monkeypatch):
    asked = []
    real = interegular.parse_pattern
    monkeypatch.setattr(interegular, "parse_pattern", lambda p: asked.append(p) or real(p))
    for pattern in ("abc", r"\W", "(?i)a", "^a", "a{500}", "[一-龥]", "[]]"):
        regex.language(pattern, budget())
    assert asked == ["abc"]


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("^a|b$", ["a", "ax", "b", "xb"], ["xa", "bx", ""]),
        ("[0-9]{2}", ["a12b", "12"], ["1a2"]),
        ("^a*$", ["", "aa"], ["b", "a\n"]),
        ("(^|,)a(,|$)", ["a", "x,a", "x,a,y"], ["xa", "ab"]),
    ],
)
def test_anchors_in_searches(pattern, inside, outside):
    dfa = regex.language(pattern, budget(), search=True)
    assert all(map(dfa.accepts, inside)) and not any(map(dfa.accepts, outside))


def test_impossible_anchors_match_nothing(walker):
    with pytest.raises(GrammarError, match="no text at all"):
        walker.compile({"regex": "a^b"})


def test_negated_classes_hold_under_every_reading():
    assert not regex.language(r"\W", budget()).accepts("é")
    assert not regex.language(r"[^\d]", budget()).accepts("٣")
    assert not regex.language(r"\S", budget()).accepts("\xa0")
    assert not regex.language(r"(?i)[^k]", budget()).accepts("K")  # the Kelvin sign
    assert regex.language(r"(?i)é", budget()).accepts("É")


ATOMS = st.sampled_from(
    ["a", "b", "é", ".", "[ab]", "[^a]", r"\d", "ab", "1", "中", "[b-d]", r"\w"]
)
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,2}", "{2}", "*?"])).map(
            lambda p: f"({p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(PATTERNS, st.lists(st.text("ab1é中d\n", max_size=6), min_size=5, max_size=5))
def test_like_python(pattern, texts):
    whole = regex.language(pattern, budget())
    found = regex.language(pattern, budget(), search=True)
    for text in texts:
        assert whole.accepts(text) == bool(re.fullmatch(pattern, text, re.ASCII))
        if "." not in pattern:  # '.' of a schema pattern leaves out the line ends of ECMA-262
            assert found.accepts(text) == bool(re.search(pattern, text, re.ASCII))
