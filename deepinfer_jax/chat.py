"""A small terminal chat: one line in, the reply as it is made, until end of file or /quit.

/reset forgets the conversation. When the turns no longer fit the model's context the oldest pair
is forgotten. Reasoning, where asked for, is shown before the answer.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

PROMPT = "> "
HELP = "/reset forgets the conversation, /quit ends it"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command, the device's left out."""
    parser.add_argument("--model", metavar="DIR", help="folder or Hub id; default: the demo")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--thinking", metavar="EFFORT", help="on, low, high, xhigh or max")
    parser.add_argument("--temperature", type=float, default=0.6, metavar="float")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="int", help="of a reply")
    parser.add_argument("--seed", type=int, metavar="int")
    parser.add_argument("--numerics", default="reference", help="reference, bf16 or float32")
    parser.add_argument("--max-context", type=int, default=1024, help="most tokens of all turns")


def run(options: argparse.Namespace, device: Any, cache: Any) -> int:
    """The command; device: a `platform.Request`; cache: folder of compiled programs."""
    from deepinfer_jax.runtime import platform
    from deepinfer_jax.runtime.engine import LLM, Shapes
    from deepinfer_jax.runtime.sampling_params import SamplingParams

    given = {name: getattr(options, name) for name in ("temperature", "max_tokens", "seed")}
    params = SamplingParams(**{k: v for k, v in given.items() if v is not None})
    for notice in platform.ready(device).notices:
        print(f"deepinfer-jax: {notice}", file=sys.stderr)
    llm = LLM(
        options.model,
        numerics=options.numerics,
        max_slots=1,
        max_context=options.max_context,
        shapes=Shapes(prefill=((1, 32), (1, 128))),
        cache=cache,
    )
    thinking = True if options.thinking == "on" else options.thinking
    return talk(llm, params, options.max_context, system=options.system, thinking=thinking)


def talk(
    llm: Any,
    params: Any,
    context: int,
    *,
    system: str | None = None,
    thinking: bool | str | None = None,
    lines: Any = None,
    out: Any = None,
) -> int:
    """Runs the chat on an engine of `context` tokens; 0. lines, out: default to the terminal's.

    Raises ValueError, before anything is asked, where no conversation can be rendered.
    """
    from deepinfer_jax.runtime.text import conversation_ids

    lines, out = lines or sys.stdin, out or sys.stdout
    first = [] if system is None else [{"role": "system", "content": system}]
    turns: list[dict[str, Any]] = []
    conversation_ids(llm.tokenizer, [*first, {"role": "user", "content": ""}], None, thinking)
    print(HELP, file=out)
    for line in _asked(lines, out):
        if line == "/quit":
            break
        if line == "/reset":
            turns = []
            continue
        turns.append({"role": "user", "content": line})
        ids = conversation_ids(llm.tokenizer, first + turns, None, thinking)
        while len(ids) + params.max_tokens >= context and len(turns) > 2:
            del turns[:2]
            ids = conversation_ids(llm.tokenizer, first + turns, None, thinking)
        content = _stream(llm, ids, params, out)
        if content is None:
            turns.pop()
        else:
            turns.append({"role": "assistant", "content": content})
    return 0


def _asked(lines: Any, out: Any) -> Iterator[str]:
    """Non-empty lines, each asked for by the prompt."""
    while True:
        print(PROMPT, end="", file=out, flush=True)
        line = lines.readline()
        if not line:
            print(file=out)
            return
        if line.strip():
            yield line.strip()


def _stream(llm: Any, ids: list[int], params: Any, out: Any) -> str | None:
    """Prints the reply as it grows; what of it belongs to the conversation, or None if the request
    failed."""
    from deepinfer_jax.runtime import reply

    shown, result = 0, None
    for result in llm.stream([ids], params):
        text = result.outputs[0].text
        print(text[shown:], end="", file=out, flush=True)
        shown = len(text)
    print(file=out)
    if result is None or result.error is not None:
        print(f"deepinfer-jax: {result.error if result else 'no result'}", file=sys.stderr)
        return None
    return reply.parse(llm.tokenizer, ids, result.outputs[0].token_ids).content
