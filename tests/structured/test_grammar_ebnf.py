"""EBNF: the dialect, its errors, and recursion without a host."""

import pytest

from deepinfer_jax.structured import EbnfError, GrammarError, Limits, ebnf, network
from deepinfer_jax.structured.dfa import determinise
from deepinfer_jax.structured.errors import Budget, TierError
from deepinfer_jax.structured.nfa import ENTRY
from deepinfer_jax.structured.pushdown import pushdown
from tests.structured.grammar_walk import read_cases

CASES = read_cases("ebnf.json")
RECURSIVE = {"arithmetic", "json", "left-recursion", "xml-like", "balanced"}
MORE = {
    "s-expression": (
        'root ::= sexp\nsexp ::= atom | "(" sexp (" " sexp)* ")"\natom ::= [a-z]+',
        ["a", "(a b)", "(a (b c) d)"],
        ["(", "()", "(a"],
    ),
    "nested repeats": (
        'root ::= "a" root "b" | "ab"',
        ["ab", "aabb", "aaabbb"],
        ["aab", "abb", ""],
    ),
    "operators": (
        'root ::= e\ne ::= t (("+" | "-") e)?\nt ::= f ("*" t)?\nf ::= [0-9]+ | "(" e ")"',
        ["1+2*3", "(1+2)*3", "((1))"],
        ["(1", "1+"],
    ),
}


def automaton(text: str, calls_everywhere: bool = False):
    """The automaton that runs on the device, and its tier."""
    nfa = network.build(
        ebnf.parse(text), Budget(Limits(seconds=60)), calls_everywhere=calls_everywhere
    )
    return (pushdown(nfa), 2) if any(nfa.calls) else (determinise(nfa, *nfa.rules[ENTRY], 256), 1)


@pytest.mark.parametrize("case", CASES["grammars"], ids=lambda case: case["id"])
def test_authored(case, walker):
    grammar = walker.compile({"ebnf": case["grammar"]})
    assert grammar.report.tier == (2 if case["id"] in RECURSIVE else 1), grammar.report
    texts = [*case["accept"], *case["reject"]]
    expected = [True] * len(case["accept"]) + [False] * len(case["reject"])
    assert walker.accepts(grammar, texts) == expected
    for everywhere in (False, True):
        machine, _ = automaton(case["grammar"], everywhere)
        assert [machine.accepts(text.encode()) for text in texts] == expected


@pytest.mark.parametrize("name", MORE)
def test_more_recursion(name, walker):
    text, accept, reject = MORE[name]
    grammar = walker.compile({"ebnf": text})
    assert grammar.report.tier == 2
    expected = [True] * len(accept) + [False] * len(reject)
    assert walker.accepts(grammar, [*accept, *reject]) == expected


@pytest.mark.parametrize("case", CASES["grammars"], ids=lambda case: case["id"])
def test_samples_are_in_the_language(case, walker):
    grammar = walker.compile({"ebnf": case["grammar"]})
    machine, _ = automaton(case["grammar"])
    for budget in {grammar.report.min_tokens, grammar.report.min_tokens + 3, 40}:
        if budget >= grammar.report.min_tokens:
            for text, ended in walker.sample(grammar, budget, seed=budget):
                assert ended and machine.accepts(text), (budget, text)


def test_right_recursion_is_a_loop():
    """Lists of any length without a stack: tail calls, also through another rule."""
    for text in (
        'root ::= item | item "," root\nitem ::= [0-9]',
        'root ::= a\na ::= "x" b | "e"\nb ::= "y" a | "z"',
    ):
        assert automaton(text)[1] == 1


@pytest.mark.parametrize("case", CASES["errors"], ids=lambda case: case["why"])
def test_malformed(case, walker):
    with pytest.raises(EbnfError, match="^ebnf") as error:
        walker.compile({"ebnf": case["grammar"]})
    assert "\n" not in str(error.value)
    if case["why"] != "no root":
        assert "line " in str(error.value) and "column " in str(error.value)


def test_macros_are_refused_by_name(walker):
    with pytest.raises(EbnfError, match=r"macro TagDispatch\(...\) is not supported"):
        walker.compile({"ebnf": 'root ::= TagDispatch(("<a>", b))\nb ::= "x"'})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('root ::= "a" root "a" | "b" root "b" | ""', "may go on or end"),
        ('root ::= a "x" | "y"\na ::= root "z"', "left recursion"),
    ],
)
def test_what_the_device_declines(text, reason, walker):
    with pytest.raises(TierError, match=reason):
        automaton(text)
    pytest.importorskip("llguidance", reason="the host tier is the extra 'grammar'")
    grammar = walker.compile({"ebnf": text})
    assert grammar.report.tier == 3 and reason in grammar.report.reason


def test_languages_without_a_text(walker):
    for text in ('root ::= "a" root', "root ::= []"):
        with pytest.raises(GrammarError, match="no text"):
            walker.compile({"ebnf": text})
