"""The host tier: llguidance computes the mask of one sequence between steps.

It runs what the device tiers decline: grammars that are not deterministic, and very large ones.
Such a request is decoded at verify width 1 and waits for its own mask; see `compiler`. llguidance
(MIT) is the optional extra ``grammar``. What it raises is a `GrammarError` here: the end of that
request and of no other.

A matcher that has reached its end accepts EOS without recording it, so EOS is counted here and
never reaches it. Its vocabulary is ours: texts only, every added token is special, and the tail of
the logits past the tokenizer is cut off again after each mask.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import UInt16, UInt32

from deepinfer_jax.structured.errors import GrammarError, reason_of
from deepinfer_jax.structured.grammar import Grammar
from deepinfer_jax.structured.vocabulary import Vocabulary


class _Tokenizer:
    """The interface that llguidance asks of a tokenizer; a text is tokenised byte by byte."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        self.eos_token_id = vocabulary.eos[0]
        missing = [t for t, text in enumerate(vocabulary.texts) if not text]
        self.tokens = [
            text or b"<no text %d>" % token for token, text in enumerate(vocabulary.texts)
        ]
        self.special_token_ids = missing
        self.single = {text: t for t, text in enumerate(vocabulary.texts) if len(text) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self.single[data[i : i + 1]] for i in range(len(data))]


@functools.lru_cache(maxsize=4)
def _tokenizer(vocabulary: Vocabulary) -> Any:
    llguidance = library()
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokenizer(vocabulary)))


def library() -> Any:
    """llguidance, or a `GrammarError` that says how to get it."""
    try:
        import llguidance
    except ModuleNotFoundError:
        raise GrammarError(
            "this grammar needs the host tier: install deepinfer-jax[grammar] (llguidance)"
        ) from None
    return llguidance


def grammar_text(kind: str, source: str) -> str:
    """What llguidance compiles, from a regex, a JSON schema text or a Lark grammar.

    Raises `GrammarError` with its message, on one line, for what it does not support.
    """
    llguidance = library()
    make = getattr(llguidance.LLMatcher, f"grammar_from_{kind}")
    try:
        text = make(source)
    except ValueError as error:
        raise GrammarError(f"host tier: {' '.join(str(error).split())}") from None
    message = llguidance.LLMatcher.validate_grammar(text, None)
    if message:
        raise GrammarError(f"host tier: {' '.join(message.split())}")
    return text


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except GrammarError:
        raise
    except Exception as error:
        raise GrammarError(f"host tier: {reason_of(error)}") from error


class HostMatcher:
    """The grammar of one host-tier sequence; not for two threads at once.

    vocabulary: the one the grammar was compiled with. Every method raises `GrammarError` where
    llguidance can go no further.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary):
        if grammar.host is None:
            raise ValueError(f"tier {grammar.report.tier} runs on the device, it has no matcher")
        self._eos = frozenset(vocabulary.eos)
        self._width = vocabulary.width
        with _faults():
            self._matcher = library().LLMatcher(_tokenizer(vocabulary), grammar.host)
        self._trigger = list(grammar.trigger)
        self._seen: list[int] = []
        self._text = np.zeros(-(-self._width // 32) * 32, bool)
        self._text[: self._width] = [bool(text) for text in vocabulary.texts]
        self.ended = False
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"host tier: {' '.join(self._matcher.get_error().split())}")

    @property
    def free(self) -> bool:
        """Whether everything is allowed: before the trigger and after the end."""
        return self.ended or bool(self._trigger)

    def mask(self) -> UInt32[np.ndarray, " words"]:
        """Tokens allowed next, bit t % 32 of word t // 32; EOS exactly where the text may end."""
        words = -(-self._width // 32)
        if self.free:
            return np.full(words, 2**32 - 1, np.uint32)
        with _faults():
            found = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        bits = np.unpackbits(found, bitorder="little")[: len(self._text)].astype(bool)
        bits = np.pad(bits, (0, len(self._text) - len(bits))) & self._text
        bits[list(self._eos)] = self._matcher.is_accepting()
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> bool:
        """Move on by a sampled token; False, and nothing moves, if the grammar forbids it."""
        if self.ended:
            return True
        if self._trigger:
            self._seen = [*self._seen, token][-len(self._trigger) :]
            if self._seen == self._trigger:
                self._trigger = []
            return True
        if token in self._eos:
            self.ended = self._matcher.is_accepting()
            return self.ended
        with _faults():
            return self._matcher.try_consume_tokens([token]) == 1


def token_classes(vocabulary: Vocabulary) -> UInt16[np.ndarray, " vocabulary"]:
    """Class 1 for a text, 2 for EOS: what an allowed token gets in the pool."""
    classes = np.array([bool(text) for text in vocabulary.texts], np.uint16)
    classes[list(vocabulary.eos)] = 2
    return classes
