"""The vocabulary as grammars see it: the byte string of every token that may be text.

Read from a ``tokenizer.json`` with byte-level BPE: each character of an entry stands for one byte.
All ``added_tokens`` are left out, also those not flagged special (role tags and ``</think>`` are
not, and would otherwise be legal inside a JSON string). Ids from the highest entry up to the width
of the logits have no bytes and stay disallowed; entries past the width cannot be sampled.

``levels`` is the trie of all texts, level by level, which `tokens` walks once a grammar.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8


class Level(NamedTuple):
    """Trie nodes of one depth. parents: index into the level above (0 for the first); bytes: the
    byte of each node; tokens, nodes: tokens that end here, and at which node."""

    parents: Int[np.ndarray, " nodes"]
    bytes: UInt8[np.ndarray, " nodes"]
    tokens: Int[np.ndarray, " tokens"]
    nodes: Int[np.ndarray, " tokens"]


def byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 as itself and the other bytes as U+0100 onwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    pairs = [(b, chr(b)) for b in printable] + [(b, chr(256 + i)) for i, b in enumerate(others)]
    return {character: byte for byte, character in pairs}


def _decoders(node: Any) -> set[str]:
    inner = node.get("decoders", []) if isinstance(node, dict) else []
    return {node["type"] if isinstance(node, dict) else "none"}.union(*map(_decoders, inner))


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """texts: bytes of each id, empty where the id is no text; len(texts) is the logits width.
    eos: ids that end a sequence. key: content hash, part of every cache key.
    """

    texts: tuple[bytes, ...]
    eos: tuple[int, ...]
    key: str

    @property
    def width(self) -> int:
        return len(self.texts)

    @staticmethod
    def load(source: str | Path, *, width: int, eos: Sequence[int]) -> "Vocabulary":
        """From a tokenizer.json, or the folder that holds it; the same content is read once.

        width: columns of the logits. eos: ids that end a sequence, each below the width.
        """
        path = Path(source)
        path = path / "tokenizer.json" if path.is_dir() else path
        content = path.read_bytes()
        return _parsed(content, str(path), width, tuple(sorted(set(eos))))

    @functools.cached_property
    def levels(self) -> tuple[Level, ...]:
        """The trie, built with numpy on first use (0.9 s for 128,000 tokens)."""
        order = sorted((t for t, text in enumerate(self.texts) if text), key=self.texts.__getitem__)
        ids = np.array(order, np.int64)
        length = np.array([len(self.texts[t]) for t in order])
        depth = int(length.max(initial=0))
        table = np.zeros((len(order), depth), np.uint8)
        for row, token in enumerate(order):
            table[row, : length[row]] = np.frombuffer(self.texts[token], np.uint8)
        shared = np.zeros(len(order), np.int64)  # bytes in common with the text before
        if len(order) > 1:
            shared[1:] = np.cumprod(table[1:] == table[:-1], axis=1).sum(1)
            shared[1:] = np.minimum(shared[1:], np.minimum(length[1:], length[:-1]))
        node = np.zeros(len(order), np.int64)
        levels = []
        for at in range(depth):
            rows = np.nonzero(length > at)[0]
            first = shared[rows] <= at
            number = np.cumsum(first) - 1
            ends = length[rows] == at + 1
            levels.append(
                Level(
                    node[rows[first]].copy(),
                    table[rows[first], at],
                    ids[rows[ends]],
                    number[ends],
                )
            )
            node[rows] = number
        return tuple(levels)


@functools.lru_cache(maxsize=4)
def _parsed(content: bytes, where: str, width: int, eos: tuple[int, ...]) -> Vocabulary:
    data = json.loads(content)
    kind = data.get("model", {}).get("type")
    if kind != "BPE" or "ByteLevel" not in _decoders(data.get("decoder")):
        raise ValueError(f"{where}: expected a byte-level BPE tokenizer, found model type {kind!r}")
    if not eos or not all(0 <= e < width for e in eos):
        raise ValueError(f"eos ids {eos} must be in [0, {width}), the width of the logits")
    byte_of = byte_of_character()
    added = {entry["id"] for entry in data.get("added_tokens", [])}
    texts = [b""] * width
    for text, token in data["model"]["vocab"].items():
        if token not in added and token < width:
            unknown = next((c for c in text if c not in byte_of), None)
            if unknown is not None:
                raise ValueError(
                    f"{where}: token {token} has {unknown!r}, which stands for no byte"
                )
            texts[token] = bytes(byte_of[c] for c in text)
    digest = hashlib.sha256(content)
    digest.update(f"{width} {eos}".encode())
    return Vocabulary(tuple(texts), eos, digest.hexdigest())
