"""Drives the device functions over a small vocabulary made for these tests.

512 logits columns: 256 single bytes, pieces that cross every boundary that grammars have (brackets
that open and close several levels, halves of UTF-8 characters, a key with its quotes), six added
tokens of which two are not flagged special, and a tail that belongs to no token.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import structured
from deepinfer_jax.structured import vocabulary as vocabulary_module

WIDTH = 512
EOS = 1
CASES = Path(__file__).parent / "cases"
ROWS, LENGTHS, LEVELS = 32, (24, 96, 384, 1536), 32
PIECES = (
    '{"|":|",|"}|"]|{}|[]|[[|]]|}}|]}|}]|}},|],[|},{|":"|":{|":[|"},|", "|": |, |,"|{"a|"a"'
    "|true|false|null|tr|ue|nu|ll|fal|00|10|12|123|2024|-0|0.|.5|e1|e+|E-|1,|1]|1}|0}|-1"
    '|\\u|\\u00|\\n|\\\\|\\"|00e9|  |\n|\n  | \n|name|value|id|the|and|ing|er|abc|xyz|AB|a.|.c|@'
    "|@ex|://|yes|no|maybe|SELECT| FROM | WHERE |red|gre|blue|foo|bar|(1|((|))|1)|)+|)-|+1|*2|=7"
    "|</|<a|<a>|</a>|&l|lt;|INV-|-01|:00|Z|T1|+02| a|ab|bc|ca|aa|bb|xx|yyy|xxx|zz|()|())|()()|(()"
    "|é|中|文|中文|😀|字符|é中|x中"
)
HALVES = (
    b"\xe4\xb8",
    b"\xb8\xad",
    b"\xad\xe6",
    b"\xf0\x9f",
    b"\x9f\x98",
    b"\xc3",
    b'\xa9"',
    b"a\xe4",
)
ADDED = {0: "<bos>", 1: "<eos>", 2: "<pad>", 500: "<think>", 501: "</think>", 502: "<user>"}


def write_tokenizer(folder: Path) -> Path:
    """A byte-level BPE tokenizer.json (without merges, which grammars never read)."""
    character_of = {b: c for c, b in vocabulary_module.byte_of_character().items()}
    texts = [bytes([b]) for b in range(256)]
    texts += [*(p.encode() for p in PIECES.split("|")), *HALVES]
    vocab = {text: token for token, text in ADDED.items() if token < 3}
    for text in dict.fromkeys(texts):
        vocab["".join(character_of[b] for b in text)] = len(vocab)
    assert len(vocab) < 500
    added = [
        {"id": token, "content": text, "special": token not in (500, 501)}
        for token, text in ADDED.items()
    ]
    data = {
        "added_tokens": added,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(data))
    return path


def read_cases(name: str) -> dict:
    return json.loads((CASES / name).read_text())


def layouts(value: object) -> set[str]:
    """A JSON value as encoders write it."""
    return {
        json.dumps(value),
        json.dumps(value, separators=(",", ":")),
        json.dumps(value, indent=2),
        json.dumps(value, ensure_ascii=False),
    }


_masks = jax.jit(structured.mask)
_advances = jax.jit(structured.advance)


def mask(pool, state, remaining=1 << 20) -> np.ndarray:
    """`structured.mask`, compiled; ``remaining`` is for all rows if it is one number."""
    remaining = jnp.broadcast_to(jnp.asarray(remaining, jnp.int32), state.state.shape)
    return np.asarray(_masks(pool, state, remaining))


def advance(pool, state, token):
    """`structured.advance`, compiled."""
    return _advances(
        pool, state, jnp.broadcast_to(jnp.asarray(token, jnp.int32), state.state.shape)
    )


def compiled_shapes() -> tuple[int, int]:
    return _masks._cache_size(), _advances._cache_size()


@jax.jit
def _replay(pool, state, tokens):
    """Whether each token of each row was allowed, bool [length, rows]."""
    remaining = jnp.full(tokens.shape[:1], 1 << 20, jnp.int32)

    def step(state, token):
        allowed = structured.mask(pool, state, remaining)
        ok = jnp.take_along_axis(allowed, token[:, None], axis=1)[:, 0]
        return structured.advance(pool, state, token), (ok, allowed.any(axis=1))

    return jax.lax.scan(step, state, tokens.T)[1]


@jax.jit
def _sample(pool, state, remaining, key):
    allowed = structured.mask(pool, state, remaining)
    noise = jnp.where(allowed, jax.random.gumbel(key, allowed.shape), -jnp.inf)
    token = jnp.argmax(noise, axis=1).astype(jnp.int32)
    return token, structured.advance(pool, state, token), allowed.any(axis=1)


class Walker:
    """One vocabulary and one pool for all grammars of a test session."""

    def __init__(self, vocabulary: structured.Vocabulary, rows: int = ROWS):
        self.vocabulary, self.rows = vocabulary, rows
        limits = structured.Limits(edges=384, exits=96)
        self.manager = structured.PoolManager(
            vocabulary.width, grammars=4, cells=1 << 19, limits=limits
        )
        self.pool = self.manager.empty()
        self.compile = functools.partial(structured.compile, vocabulary=vocabulary, limits=limits)

    def state(self, grammar: structured.Grammar, row: int, rows: int):
        one = structured.start(row, levels=LEVELS, trigger=bool(grammar.trigger))
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), one)

    def load(self, grammar: structured.Grammar) -> int:
        self.pool, row = self.manager.acquire(self.pool, grammar)
        return row

    def tokenise(self, text: bytes, rng: np.random.Generator | None) -> list[int]:
        """Longest pieces first, or with ``rng`` a random segmentation."""
        ids = self._ids
        longest = max(map(len, ids))
        out, at = [], 0
        while at < len(text):
            fits = [n for n in range(1, longest + 1) if text[at : at + n] in ids]
            fits = [n for n in fits if at + n <= len(text)]
            size = int(rng.choice(fits)) if rng else fits[-1]
            out.append(ids[text[at : at + size]])
            at += size
        return out

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        return {text: token for token, text in enumerate(self.vocabulary.texts) if text}

    def accepts(self, grammar: structured.Grammar, texts: list[str]) -> list[bool]:
        """Whether each text, with EOS after it, passes the masks: cut into single bytes, into the
        longest pieces and at random, which must agree."""
        rng = np.random.default_rng(0)
        sequences = []
        for text in texts:
            data = text.encode()
            sequences.append([self._ids[data[i : i + 1]] for i in range(len(data))])
            sequences += [self.tokenise(data, None), self.tokenise(data, rng)]
        row = self.load(grammar)
        found = [
            ok
            for i in range(0, len(sequences), ROWS)
            for ok in self._passes(grammar, row, sequences[i : i + ROWS])
        ]
        self.manager.release(row)
        for i, text in enumerate(texts):
            assert len(set(found[3 * i : 3 * i + 3])) == 1, (text, found[3 * i : 3 * i + 3])
        return found[::3]

    def _passes(self, grammar, row, sequences) -> list[bool]:
        ends = [len(sequence) + 1 for sequence in sequences]
        length = next(n for n in LENGTHS if n >= max(ends))
        tokens = np.full((ROWS, length), EOS, np.int32)
        for i, sequence in enumerate(sequences):
            tokens[i, : len(sequence)] = sequence
        ok, some = _replay(self.pool, self.state(grammar, row, ROWS), tokens)
        assert np.asarray(some).all(), "a mask forbids everything"
        return [bool(np.asarray(ok)[:end, i].all()) for i, end in enumerate(ends)]

    def sample(
        self, grammar: structured.Grammar, budget: int, seed: int = 0
    ) -> list[tuple[bytes, bool]]:
        """Uniform choices among what the mask allows: (text, whether it ended) of each row."""
        row = self.load(grammar)
        state = self.state(grammar, row, self.rows)
        key = jax.random.key(seed)
        texts, ended = [b""] * self.rows, np.zeros(self.rows, bool)
        for step in range(budget):
            remaining = jnp.full((self.rows,), budget - step, jnp.int32)
            token, state, some = _sample(self.pool, state, remaining, jax.random.fold_in(key, step))
            assert np.asarray(some).all(), "a mask forbids everything"
            for i, t in enumerate(np.asarray(token).tolist()):
                if not ended[i]:
                    ended[i] = t in self.vocabulary.eos
                    texts[i] += self.vocabulary.texts[t]
            if ended.all():
                break
        self.manager.release(row)
        return list(zip(texts, ended.tolist(), strict=True))
