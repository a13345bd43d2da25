"""The Engram token map: token id -> class of its normalised text (V4.1 report 2.4).

Tokens that differ only in case, accents, compatibility forms or surrounding spaces share a class:
129,280 ids of the released tokenizer fall into 99,092 classes, and every hash multiplier depends on
that number. The table is computed once, at conversion, and stored beside the weights, so that a
later tokenizer library cannot move it. Rules of the reference inference/engram.py:

    text = decode([id]), special tokens kept, nothing cleaned up
    key  = the raw vocabulary string  if text holds U+FFFD (a piece of a UTF-8 sequence)
           normalise(text) or text    otherwise
    class = number of keys first seen before this one
"""

from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Int32
from tokenizers import Regex, normalizers

_LONE_SPACE = "\ue000"  # stands for a single space while both ends are stripped

_NORMALISE = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)


def token_map(
    tokenizer_json: str | Path, vocab: int, classes: int | None = None
) -> Int32[np.ndarray, " vocab"]:
    """The class of each of `vocab` token ids, int32.

    tokenizer_json: the checkpoint's `tokenizer.json`. classes: the config's
    `engram_compressed_vocab_size`; None leaves it unchecked. Raises `ValueError` if the file has
    another number of tokens, or the map of classes: rows would be hashed to the wrong places.
    """
    file = Path(tokenizer_json)
    if not file.is_file():
        raise ValueError(f"{file}: no such file; the Engram token map is computed from it")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != vocab:
        raise ValueError(f"{file}: {size} tokens; config.json says vocab_size = {vocab}")
    seen: dict[str, int] = {}
    found = np.empty(vocab, np.int32)
    for token in range(vocab):
        found[token] = seen.setdefault(_key(tokenizer, token), len(seen))
    if classes is not None and len(seen) != classes:
        raise ValueError(
            f"{file}: its tokens fall into {len(seen)} classes; config.json says "
            f"engram_compressed_vocab_size = {classes}"
        )
    return found


def _key(tokenizer: tokenizers.Tokenizer, token: int) -> str:
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        return tokenizer.id_to_token(token) or text
    return _NORMALISE.normalize_str(text) or text
