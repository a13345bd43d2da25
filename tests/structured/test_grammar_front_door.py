"""compile, its cache and threads, the vocabulary, and the host tier."""

import json
import sys
import threading

import numpy as np
import pytest

from deepinfer_jax import structured
from deepinfer_jax.structured import GrammarError, Limits, Vocabulary, compiler, ebnf, host
from deepinfer_jax.structured.grammar import Grammar
from tests.structured.grammar_walk import ADDED, EOS, WIDTH, advance, mask, write_tokenizer

NESTED: dict = {}
for _ in range(3000):
    NESTED = {"items": NESTED}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "ebnf": "b"}, "exactly one of"),
        ({"regex": "a", "flavour": 1}, "exactly one of"),
        ({"regex": 1}, "regex must be a string"),
        ({"choice": []}, "non-empty list"),
        ({"json": False}, "json must be True"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": [1]}, "a schema or its JSON text"),
        ({"regex": "a", "trigger": [WIDTH]}, "token ids below 512"),
        ({"regex": "a", "trigger": []}, "token ids below 512"),
        ({"regex": "a", "trigger": list(range(17))}, "at most 16"),
        ({"regex": "a" * 1_000_001}, "longer than 1000000"),
        ({"ebnf": "root ::= " + "(" * 5000}, "nested too deeply"),
        ({"json_schema": {"enum": [{1, 2}]}}, "'#/enum/0': JSON has no value of type set"),
        ({"json_schema": {"default": b"x"}}, "'#/default': JSON has no value of type bytes"),
        ({"json_schema": {"const": int}}, "'#/const': JSON has no value of type type"),
        ({"json_schema": {"examples": [(1, 1j)]}}, "'#/examples/0/1': JSON has no value of type c"),
        ({"json_schema": {"minimum": 10**5000}}, "structured json_schema: ValueError: Exceeds"),
        ({"json_schema": NESTED}, "structured json_schema is nested too deeply"),
    ],
)
def test_bad_requests(spec, message, walker):
    with pytest.raises(GrammarError, match=message) as error:
        walker.compile(spec)
    assert "\n" not in str(error.value)


def test_kinds_and_reports(walker):
    for spec, tier in (
        ({"choice": ["a", "bc", "中"]}, 1),
        ({"json": True}, 2),
        ({"json_schema": json.dumps({"type": "integer"})}, 1),
    ):
        report = walker.compile(spec).report
        assert report.tier == tier and report.bytes > 0 and report.seconds > 0
    texts = [t.decode() for t, _ in walker.sample(walker.compile({"json": True}), 30)]
    assert all(isinstance(json.loads(text), dict) for text in texts)
    assert walker.accepts(walker.compile({"json": True}), ["[]", '{"a":[{}]}']) == [False, True]
    assert walker.accepts(walker.compile({"choice": ["", "a"]}), ["", "a", "b"]) == [
        True,
        True,
        False,
    ]


def test_cache(vocabulary):
    cache = structured.GrammarCache()
    spec = {"json_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}
    one = structured.compile(spec, vocabulary, cache=cache)
    assert structured.compile(spec, vocabulary, cache=cache) is one
    other = {"json_schema": {"type": "object", "properties": {"b": {}, "a": {}}}}
    assert structured.compile(other, vocabulary, cache=cache) is not one  # members are in order
    small = structured.GrammarCache(max_bytes=1)
    structured.compile(spec, vocabulary, cache=small)
    first = structured.compile(spec, vocabulary, cache=small)
    structured.compile(other, vocabulary, cache=small)
    assert structured.compile(spec, vocabulary, cache=small) is not first
    with pytest.raises(GrammarError):
        structured.compile({"regex": "("}, vocabulary, cache=cache)
    with pytest.raises(GrammarError):  # an error is not kept as a result
        structured.compile({"regex": "("}, vocabulary, cache=cache)


def test_threads_compile_once(vocabulary, monkeypatch):
    calls = []
    real = compiler._compile
    monkeypatch.setattr(
        compiler, "_compile", lambda *a: calls.append(threading.get_ident()) or real(*a)
    )
    threads = structured.Compiler(vocabulary, workers=3)
    futures = [threads.submit({"regex": "[a-z]{1,40}"}) for _ in range(6)]
    bad = threads.submit({"regex": "("})
    with pytest.raises(structured.RegexError):
        bad.result()
    assert len({id(f.result()) for f in futures}) == 1 and len(calls) == 2
    assert threading.get_ident() not in calls
    threads.close()


def test_limits_are_named(vocabulary, monkeypatch):
    """Past a limit the host tier is tried, and its error says what the limit was."""
    monkeypatch.setattr(host, "grammar_text", lambda kind, source: "")
    wide = {"regex": "([a-z]{1,400}é?,){3}.{5}"}
    for limits, reason in (
        (Limits(states=50), "50 states"),
        (Limits(nodes=1000), "1000 automaton nodes"),
        (Limits(repeat=20), "20 repetitions"),
        (Limits(seconds=0), "within 0 s"),
        (Limits(classes=4), "4 token classes"),
        (Limits(cells=100), "100 cells"),
    ):
        report = structured.compile(wide, vocabulary, limits=limits).report
        assert report.tier == 3 and reason in report.reason


def test_without_llguidance(vocabulary, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r"deepinfer-jax\[grammar\]"):
        structured.compile({"ebnf": PALINDROME}, vocabulary)


class TestVocabulary:
    def test_texts(self, vocabulary):
        assert vocabulary.width == WIDTH and vocabulary.eos == (EOS,)
        assert not any(vocabulary.texts[token] for token in ADDED)
        assert not any(vocabulary.texts[503:])
        assert sum(len(level.tokens) for level in vocabulary.levels) == sum(
            map(bool, vocabulary.texts)
        )
        assert sorted(t for t in vocabulary.texts if len(t) == 1) == [
            bytes([b]) for b in range(256)
        ]

    def test_widths(self, tmp_path):
        path = write_tokenizer(tmp_path)
        wide = Vocabulary.load(tmp_path, width=600, eos=[EOS, 2])
        narrow = Vocabulary.load(path, width=300, eos=[EOS])
        assert (wide.width, narrow.width) == (600, 300) and wide.key != narrow.key
        assert Vocabulary.load(path, width=300, eos=[EOS]) is narrow
        grammar = structured.compile({"regex": "a"}, wide)
        assert len(grammar.token_class) == 600 and not grammar.token_class[503:].any()
        assert grammar.token_class[EOS] == grammar.token_class[2] != 0

    def test_refusals(self, tmp_path):
        path = write_tokenizer(tmp_path)
        with pytest.raises(ValueError, match="eos ids"):
            Vocabulary.load(path, width=WIDTH, eos=[WIDTH])
        path.write_text(json.dumps({"model": {"type": "Unigram", "vocab": []}}))
        with pytest.raises(ValueError, match="'Unigram'"):
            Vocabulary.load(path, width=WIDTH, eos=[EOS])


PALINDROME = 'root ::= "a" root "a" | "b" root "b" | ""'


class TestHostTier:
    @pytest.fixture(autouse=True)
    def needs_llguidance(self):
        pytest.importorskip("llguidance", reason="the host tier is the extra 'grammar'")

    def test_samples(self, walker, vocabulary):
        grammar = walker.compile({"ebnf": PALINDROME})
        assert grammar.report.tier == 3 and "may go on or end" in grammar.report.reason
        rng = np.random.default_rng(0)
        for _ in range(5):
            matcher, text = structured.HostMatcher(grammar, vocabulary), b""
            while not matcher.ended and len(text) < 200:
                bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
                allowed = np.nonzero(bits)[0]
                assert not set(allowed.tolist()) & {t for t in ADDED if t != EOS}
                assert allowed.max() < WIDTH and not matcher.accept(500)
                token = int(rng.choice(allowed))
                text += vocabulary.texts[token]
                assert matcher.accept(token)
            assert not matcher.ended or text == text[::-1]

    def test_masks_reach_the_device(self, walker, vocabulary):
        grammar = walker.compile({"ebnf": PALINDROME})
        row = walker.load(grammar)
        second = walker.load(grammar)
        assert row != second  # each sequence has its own mask
        matcher = structured.HostMatcher(grammar, vocabulary)
        state = structured.start(row, levels=4)
        for text in (b"a", b"b", b"b", b"a", b""):
            walker.pool = walker.manager.write_mask(walker.pool, row, matcher.mask())
            allowed = mask(walker.pool, state)
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little").astype(bool)
            np.testing.assert_array_equal(allowed, bits[:WIDTH])
            token = vocabulary.texts.index(text) if text else EOS
            assert allowed[token] and matcher.accept(token)
            state = advance(walker.pool, state, token)
        assert int(state.grammar) == structured.FREE
        walker.manager.release(row)
        walker.manager.release(second)

    def test_trigger(self, walker, vocabulary):
        grammar = walker.compile({"ebnf": PALINDROME, "trigger": [7, 9]})
        matcher = structured.HostMatcher(grammar, vocabulary)
        assert matcher.free and matcher.accept(7) and matcher.accept(9) and not matcher.free

    def test_same_masks_as_the_device(self, walker, vocabulary):
        """llguidance and our tables allow the same tokens along random texts."""
        text = (
            'root ::= "[" (item ("," item)*)? "]"\nitem ::= [0-9]+ | root | "\\"" [^"\\\\]* "\\""'
        )
        grammar = walker.compile({"ebnf": text})
        assert grammar.report.tier == 2
        lark = host.grammar_text("lark", ebnf.to_lark(ebnf.parse(text)))
        same = Grammar("key", grammar.report, grammar.block, grammar.token_class, host=lark)
        row, rng = walker.load(grammar), np.random.default_rng(2)
        for _ in range(3):
            matcher = structured.HostMatcher(same, vocabulary)
            state = structured.start(row, levels=32)
            for _ in range(20):
                allowed = mask(walker.pool, state)
                bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little").astype(bool)
                np.testing.assert_array_equal(allowed, bits[:WIDTH])
                token = int(rng.choice(np.nonzero(allowed)[0]))
                assert matcher.accept(token)
                state = advance(walker.pool, state, token)
                if token == EOS:
                    break
        walker.manager.release(row)
