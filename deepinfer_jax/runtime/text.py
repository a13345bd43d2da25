"""Text to ids and back: the checkpoint's own tokenizer, and text that grows token by token.

The tokenizer is byte-level BPE: each token stands for a fixed byte string, and the text of some ids
is the UTF-8 decoding of their bytes in a row, U+FFFD for what is no UTF-8. So text can be built
byte by byte, with nothing decoded twice and nothing guessed:

    stream = TextStream(tokenizer, stop=("\\n\\n",))
    for token in ids: ...  stream.push(token) -> the stop string that is now complete, or None
    stream.text      # all that can no longer change: no half character, no half stop string
    stream.finish()  # no more tokens: the text equals tokenizer.decode(ids)

A conversation becomes ids in the V4.1 prompt format by `conversation_ids`.

Special tokens give no text. An id that the tokenizer does not know (a head padded past it) gives
none either; a tokenizer with more ids than the head is the engine's business, which refuses ids
outside the vocabulary.
"""

import bisect
import codecs
import importlib.util
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT, THINK, NO_THINK = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)
EFFORTS = ("low", "high", "xhigh", "max")
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
Piece = tuple[str, bool]  # text, and whether it is one special token


def refuse_surrogates(name: str, text: str) -> None:
    """Raises ValueError, with the name, for a lone surrogate: JSON can spell one, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: character {error.start} is a lone surrogate") from None


def _object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


class Tokenizer:
    """``tokenizer.json`` of a checkpoint folder, with the markers its config names.

    bos_id, eos_id: from ``tokenizer_config.json`` (strings or objects with "content"), else those
    given (from config.json), else None. add_bos: whether a prompt begins with bos by itself.
    size: one more than the highest id.
    """

    def __init__(self, folder: str | Path, bos_id: int | None = None, eos_id: int | None = None):
        """Raises ValueError, naming file and field, for a tokenizer that cannot be used."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path}: no such file; text needs the checkpoint's tokenizer")
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises its bare base class
            raise ValueError(f"{path}: not a tokenizer: {error}") from None
        decoder = _object(path).get("decoder")
        if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
            raise ValueError(f"{path}: decoder {decoder!r}: expected byte-level BPE")
        self._inner.no_padding()
        self._inner.no_truncation()
        path = path.with_name("tokenizer_config.json")
        config = _object(path) if path.is_file() else {}
        self.bos_id = self._marker(path, config, "bos_token", bos_id)
        self.eos_id = self._marker(path, config, "eos_token", eos_id)
        self.add_bos = config.get("add_bos_token") is True
        added = self._inner.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}
        # Not above: it brings jax, which parameters and command lines do without.
        from deepinfer_jax.structured.vocabulary import byte_of_character

        self._byte_of = byte_of_character()
        self._bytes: dict[int, bytes] = {}
        self._plain: tokenizers.Tokenizer | None = None  # without added tokens
        self.size = 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)

    def _marker(
        self, path: Path, config: dict[str, Any], name: str, given: int | None
    ) -> int | None:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is None:
            return given
        token = self._inner.token_to_id(value) if isinstance(value, str) else None
        if token is None:
            raise ValueError(f"{path}: {name} {value!r} is not a token of tokenizer.json")
        return token

    def encode(self, text: str) -> list[int]:
        """Ids of a text, bos in front if the checkpoint asks for it. Raises ValueError for a lone
        surrogate."""
        refuse_surrogates("prompt", text)
        ids = self._inner.encode(text, add_special_tokens=False).ids
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of a prompt in pieces: special tokens as such, the rest as plain text even where it
        spells one. Raises ValueError for a special token that this tokenizer lacks, and for a lone
        surrogate."""
        if self._plain is None:
            bare = json.loads(self.text())
            bare["added_tokens"] = []
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(bare))
        ids: list[int] = []
        for text, special in pieces:
            if not special:
                refuse_surrogates("conversation", text)
                ids += self._plain.encode(text, add_special_tokens=False).ids
                continue
            token = self._inner.token_to_id(text)
            if token is None:
                raise ValueError(f"conversation: this tokenizer has no token {text!r}")
            ids.append(token)
        return ids

    def text(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        return self._inner.to_str()

    def spelled(self, ids: Sequence[int]) -> str:
        """Text of ids with special tokens spelled out."""
        parts = [
            (self._inner.id_to_token(i) or "").encode() if i in self._special else self.bytes_of(i)
            for i in ids
        ]
        return b"".join(parts).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special and unknown ones left out."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> bytes:
        """What one id adds to the text."""
        found = self._bytes.get(token)
        if found is None:
            text = None if token in self._special else self._inner.id_to_token(token)
            found = b"" if text is None else self._raw(text)
            self._bytes[token] = found
        return found

    def _raw(self, text: str) -> bytes:
        """Bytes of a vocabulary entry; an added token that is not spelt in byte letters is
        itself."""
        if all(character in self._byte_of for character in text):
            return bytes(self._byte_of[character] for character in text)
        return text.encode()


def conversation_ids(
    tokenizer: Tokenizer | None,
    messages: Sequence[Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool | str | None = None,
) -> list[int]:
    """Ids of a V4.1 prompt that asks for the next assistant message.

    messages: chat-completion messages (role, content, and where they apply reasoning_content,
    tool_calls, tool_call_id, prefix). tools: chat-completion tool definitions. thinking: None or
    False, no reasoning; True, or an effort ("low", "high", "xhigh", "max"): the reply begins with
    it. Plain conversations are rendered here; tools and thinking by DeepSeek's own deepseek-recipe
    (the chat extra). Raises ValueError for what is no conversation, and without a tokenizer.
    """
    if tokenizer is None:
        raise ValueError("chat: needs the checkpoint's tokenizer.json")
    if isinstance(messages, Mapping | str) or not messages:
        raise ValueError(f"conversation: {messages!r}; expected a list of messages")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{number}]: {message!r}; expected a role and content")
    if thinking not in (None, False, True, *EFFORTS):
        raise ValueError(f"thinking = {thinking!r}; expected True, False or {', '.join(EFFORTS)}")
    plain = all(
        message["role"] in _ROLES
        and isinstance(message.get("content"), str)
        and not message.get("tool_calls")
        for message in messages
    )
    if plain and not tools and not thinking:
        return tokenizer.encode_pieces(_plain_pieces(messages))
    return tokenizer.encode_pieces(_recipe_pieces(messages, tools, thinking))


def _plain_pieces(messages: Sequence[Mapping[str, Any]]) -> list[Piece]:
    """A conversation without tools and thinking, as the official encoding renders it."""
    pieces: list[Piece] = [(BOS, True)]
    before = None
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "system" and not content:
            continue
        if role == before == "user":
            content = "\n\n" + content
        else:
            pieces.append((_ROLES[role], True))
        if role == "assistant":
            pieces.append((NO_THINK, True))
        pieces.append((content, False))
        if role == "assistant":
            if message.get("prefix") and number == len(messages) - 1:
                return pieces
            pieces.append((EOS, True))
        before = role
    return [*pieces, (ASSISTANT, True), (NO_THINK, True)]


def _recipe_pieces(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    thinking: bool | str | None,
) -> list[Piece]:
    if importlib.util.find_spec("deepseek_recipe") is None:
        raise ValueError(
            "conversation: tools and thinking are rendered by DeepSeek's deepseek-recipe; "
            "install deepinfer-jax[chat]"
        )
    import deepseek_recipe as recipe

    body: dict[str, Any] = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [dict(message) for message in messages],
        "thinking": {"type": "enabled" if thinking else "disabled"},
    }
    if isinstance(thinking, str):
        body["reasoning_effort"] = thinking
    try:
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        asked = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    except (recipe.ConversionError, ValueError, TypeError) as error:
        raise ValueError(f"conversation: {' '.join(str(error).split())}") from None
    rendered = recipe.DeepseekV41Encoding().render_conversation(asked.conversation)
    pieces, at = [], 0
    for begin, end in rendered.special_ranges:
        pieces += [(rendered.prompt[at:begin], False), (rendered.prompt[begin:end], True)]
        at = end
    return [piece for piece in (*pieces, (rendered.prompt[at:], False)) if piece[0]]


class TextStream:
    """The text of one sample as its tokens arrive.

    A stop string is found at the first token that completes one, wherever it began; of several, the
    one that began first. The text is cut in front of it, and ``kept`` counts the tokens that have a
    byte in what is left, so that ids and log-probabilities can be cut alike. Stop strings completed
    by a token before the ``min_tokens``-th do not count.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0):
        self._tokenizer, self._min = tokenizer, min_tokens
        self._stops = [(text, text.encode()) for text in stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes = bytearray()
        self._starts: list[int] = []  # where each token's bytes begin
        self._shown = 0  # bytes given to the decoder
        self._text = ""  # what it gave
        self.stopped: str | None = None

    @property
    def kept(self) -> int:
        """Tokens that the text is made of: all of them, or those before the stop string."""
        if self.stopped is None:
            return len(self._starts)
        return bisect.bisect_left(self._starts, self._shown)

    def push(self, token: int) -> str | None:
        """Add a token; the stop string it completes, if any: then the text is final."""
        if self.stopped is not None:
            raise ValueError(f"the text has ended at {self.stopped!r}")
        begin = len(self._bytes)
        self._starts.append(begin)
        self._bytes += self._tokenizer.bytes_of(token)
        if len(self._starts) >= self._min:
            found = [
                (at, text)
                for text, raw in self._stops
                if (at := self._bytes.find(raw, max(0, begin - len(raw) + 1))) >= 0
            ]
            if found:
                cut, self.stopped = min(found, key=lambda pair: pair[0])
                self._show(cut, final=True)
        return self.stopped

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens without looking for stop strings."""
        pieces = [self._tokenizer.bytes_of(token) for token in tokens]
        sizes = [len(piece) for piece in pieces[:-1]]
        self._starts += itertools.accumulate(sizes, initial=len(self._bytes)) if pieces else ()
        self._bytes += b"".join(pieces)

    @property
    def text(self) -> str:
        """All that can no longer change, decoded when it is asked for."""
        if self.stopped is None:
            self._show(len(self._bytes) - self._held(), final=False)
        return self._text

    def finish(self) -> str:
        """The whole text: what was held back is shown, half a character as U+FFFD."""
        if self.stopped is None:
            self._show(len(self._bytes), final=True)
        return self._text

    def _held(self) -> int:
        """Bytes at the end that may be the beginning of a stop string."""
        longest = 0
        for _, raw in self._stops:
            for size in range(min(len(raw) - 1, len(self._bytes)), longest, -1):
                if self._bytes.endswith(raw[:size]):
                    longest = size
                    break
        return longest

    def _show(self, end: int, final: bool) -> None:
        self._text += self._decoder.decode(bytes(self._bytes[self._shown : end]), final)
        self._shown = max(self._shown, end)
