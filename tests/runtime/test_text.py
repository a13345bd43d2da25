"""Text grows without half characters and ends equal to the library's decode of the whole."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.synthetic import tokenizer as byte_tokenizer
from deepinfer_jax.runtime.text import TextStream, Tokenizer

SPECIALS = {0: "<｜begin▁of▁sentence｜>", 1: "<｜end▁of▁sentence｜>", 2: "<|pad|>"}
VOCAB = 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Bytes, pairs of bytes, three special tokens, two added ones that are text."""
    path = tmp_path_factory.mktemp("tokenizer")
    made = byte_tokenizer(VOCAB, SPECIALS)
    made.add_tokens([tokenizers.AddedToken("<think>"), tokenizers.AddedToken("｜DSML｜ end")])
    made.save(str(path / "tokenizer.json"))
    _configure(path, bos_token=SPECIALS[0], eos_token={"content": SPECIALS[1], "lstrip": False})
    return path


def _configure(path: Path, **config) -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer(folder)


def _library(folder: Path):
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_markers(folder, tmp_path):
    """Strings or objects, a config's ids where the file is silent, bos only where asked for."""
    ours = Tokenizer(folder)
    assert (ours.bos_id, ours.eos_id, ours.add_bos) == (0, 1, False)
    assert ours.size == VOCAB + 2
    shutil.copy(folder / "tokenizer.json", tmp_path)
    bare = Tokenizer(tmp_path, bos_id=5, eos_id=6)
    assert (bare.bos_id, bare.eos_id, bare.add_bos) == (5, 6, False)
    asks = Tokenizer(_configure(tmp_path, bos_token=SPECIALS[0], add_bos_token=True))
    assert asks.encode("a")[0] == 0 and asks.encode(SPECIALS[0] + "a").count(0) == 1
    assert asks.encode("") == [0] and ours.encode("") == []


def test_round_trip(tokenizer, folder):
    for text in ("plain", "tab\tnew\nline  two", "größe 漢字 🙂‍↔️ ｜", "", "a" + SPECIALS[1] + "b"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.replace(SPECIALS[1], "")
        assert ids == _library(folder).encode(text, add_special_tokens=False).ids


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB + 1), max_size=40))
def test_stream_equals_the_library(tokenizer, folder, ids):
    """Any ids, broken UTF-8 included: the text only grows, and ends as the library decodes it."""
    stream, before = TextStream(tokenizer), ""
    for token in ids:
        assert stream.push(token) is None
        assert stream.text.startswith(before)
        before = stream.text
    assert stream.finish() == tokenizer.decode(ids) == _library(folder).decode(ids)
    assert stream.kept == len(ids)
    late = TextStream(tokenizer)  # the same in a few parts, the text asked for in between
    for part in (ids[:9], ids[9:11], ids[11:]):
        late.extend(part)
        assert before.startswith(late.text)
    assert late.finish() == tokenizer.decode(ids) and late.kept == len(ids)


def test_no_half_character(tokenizer):
    """A character of four tokens shows up whole or not at all."""
    stream, shown = TextStream(tokenizer), []
    raw = "a🙂b漢".encode()
    single = {tokenizer.bytes_of(i): i for i in range(VOCAB) if len(tokenizer.bytes_of(i)) == 1}
    for byte in raw:
        stream.push(single[bytes([byte])])
        shown.append(stream.text)
    assert sorted(set(shown), key=len) == ["a", "a🙂", "a🙂b", "a🙂b漢"]
    stream.push(single[b"\xe6"])
    assert stream.text == "a🙂b漢" and stream.finish() == "a🙂b漢\ufffd"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abé\n漢", max_size=30),
    stops=st.lists(st.text(alphabet="abé\n漢", min_size=1, max_size=4), min_size=1, max_size=3),
    by_byte=st.booleans(),
)
def test_stop_strings(tokenizer, text, stops, by_byte):
    """Cut where the text first completes a stop string, however it falls into tokens; what was
    shown before is never taken back; the kept ids decode to the text but for a split last token."""
    ids = tokenizer.encode(text)
    if by_byte:
        single = {tokenizer.bytes_of(i): i for i in range(VOCAB) if len(tokenizer.bytes_of(i)) == 1}
        ids = [single[bytes([byte])] for byte in text.encode()]
    stream, found, seen = TextStream(tokenizer, stops), None, ""
    for token in ids:
        found = stream.push(token)
        assert stream.text.startswith(seen)
        seen = stream.text
        if found:
            break
    final = stream.finish()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert found is None and final == text and stream.kept == len(ids)
        return
    assert found in stops and text.startswith(final + found)
    assert all(stop not in final for stop in stops)
    kept = tokenizer.decode(ids[: stream.kept])
    assert kept.startswith(final) or tokenizer.decode(ids[: stream.kept - 1]) + "\ufffd" == kept
    assert stream.kept == 0 or len(tokenizer.decode(ids[: stream.kept - 1])) <= len(final)
    if by_byte:
        assert kept == final and len((final + found).encode()) == min(
            text.encode().find(stop.encode()) + len(stop.encode()) for stop in stops if stop in text
        )
    with pytest.raises(ValueError, match="has ended"):
        stream.push(5)


def test_stop_strings_wait_for_min_tokens(tokenizer):
    ids = tokenizer.encode("x") * 6
    stream = TextStream(tokenizer, ["xx"], min_tokens=4)
    found = [stream.push(token) for token in ids[:4]]
    assert found == [None, None, None, "xx"] and stream.text == "xx" and stream.kept == 2


def test_head_and_tokenizer_of_different_sizes(tokenizer):
    """Ids past the tokenizer have no text (case 116); the stream goes on."""
    stream = TextStream(tokenizer)
    for token in (*tokenizer.encode("a"), 131_071, VOCAB + 2, *tokenizer.encode("b")):
        stream.push(token)
    assert stream.finish() == "ab" and stream.kept == 4


def test_bad_files_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(data | {"decoder": {"type": "Fuse"}}))
    with pytest.raises(ValueError, match="expected byte-level BPE"):
        Tokenizer(tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    for config, message in (
        ({"eos_token": "<none>"}, "eos_token '<none>' is not a token"),
        ({"bos_token": 7}, "bos_token 7 is not a token"),
    ):
        with pytest.raises(ValueError, match=message):
            Tokenizer(_configure(tmp_path, **config))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        Tokenizer(tmp_path)


def test_lone_surrogate_is_no_text(tokenizer):
    with pytest.raises(ValueError, match="character 1 is a lone surrogate"):
        tokenizer.encode("a\ud800b")
