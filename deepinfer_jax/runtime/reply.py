"""What an assistant answered: reasoning, content and tool calls, out of one generated text.

The V4.1 format, special tokens spelled out:

    [reasoning</think>]content

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="NAME">
    <｜DSML｜ parameter name="KEY" string="true">as it is</｜DSML｜ parameter>
    <｜DSML｜ parameter name="KEY" string="false">JSON</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

A block of calls that is broken off or does not parse stays in the content.
"""

import dataclasses
import json
import re
from collections.abc import Sequence

from deepinfer_jax.runtime.text import EOS, NO_THINK, THINK, Tokenizer

_BLOCK = re.compile(r"\s*<｜DSML｜ calls>\s*(.*?)\s*</｜DSML｜ calls>\s*\Z", re.DOTALL)
_CALL = re.compile(r'<｜DSML｜ invoke name="([^"]*)">\s*(.*?)\s*</｜DSML｜ invoke>\s*', re.DOTALL)
_ARGUMENT = re.compile(
    r'<｜DSML｜ parameter name="([^"]*)" string="(true|false)">(.*?)</｜DSML｜ parameter>\s*',
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call as asked for by the model; arguments: a JSON object as text."""

    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class Reply:
    """One parsed assistant message; reasoning is None where none was asked for."""

    reasoning: str | None
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


def parse(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> Reply:
    """The reply in the ids generated after a prompt of `text.conversation_ids`."""
    return parse_text(tokenizer.spelled(ids), tokenizer.spelled(prompt[-1:]) == THINK)


def parse_text(text: str, thinking: bool) -> Reply:
    """The reply in a text; thinking: it begins inside the reasoning."""
    text = text.removesuffix(EOS)
    reasoning = None
    if thinking:
        reasoning, _, text = text.partition(NO_THINK)
    found = _BLOCK.search(text)
    calls = _calls(found[1]) if found else None
    if found is None or calls is None:
        return Reply(reasoning, text)
    return Reply(reasoning, text[: found.start()], calls)


def _calls(block: str) -> tuple[ToolCall, ...] | None:
    """The calls of a block, None if it holds anything else."""
    if _CALL.sub("", block):
        return None
    calls = []
    for name, inside in _CALL.findall(block):
        if _ARGUMENT.sub("", inside):
            return None
        arguments = {}
        for key, is_text, value in _ARGUMENT.findall(inside):
            try:
                arguments[key] = value if is_text == "true" else json.loads(value)
            except json.JSONDecodeError:
                return None
        calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
    return tuple(calls)
