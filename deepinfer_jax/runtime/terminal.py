"""Results of `deepinfer-jax generate --prompt` on a terminal, or as JSON lines.

One prompt streams: its text appears as it grows. Several are printed whole, in the order given. In
JSON a log-probability of null is that of what cannot happen.
Errors of requests go to stderr, one line each. An interrupt ends the line that was being written.
"""

import contextlib
import dataclasses
import sys
from typing import Any

import jax

from deepinfer_jax.runtime import cluster
from deepinfer_jax.runtime.engine import LLM
from deepinfer_jax.runtime.outputs import RequestOutput, json_line
from deepinfer_jax.runtime.sampling_params import SamplingParams


def traced(folder: str | None) -> Any:
    """A context in which jax writes a profile, if a folder is given."""
    return contextlib.nullcontext() if folder is None else jax.profiler.trace(folder)


def show(llm: LLM, prompts: list[str], params: SamplingParams, as_json: bool) -> int:
    """Prints what the prompts give; the exit code: 1 if a request failed. Only the first process
    prints."""
    if not cluster.is_first():
        results = llm.generate(prompts, params)
        return 1 if any(result.error is not None for result in results) else 0
    if as_json:
        results = llm.generate(prompts, params)
        for result in results:
            print(json_line(plain(result)))
    elif len(prompts) == 1 and params.n == 1:
        results = [_streamed(llm, prompts, params)]
    else:
        results = llm.generate(prompts, params)
        for result in results:
            for output in result.outputs:
                print(output.text)
    for result in results:
        if result.error is not None:
            print(f"deepinfer-jax: {result.error}", file=sys.stderr)
    return 1 if any(result.error is not None for result in results) else 0


def _streamed(llm: LLM, prompts: list[str], params: SamplingParams) -> RequestOutput:
    shown, result = 0, RequestOutput(None, [])
    try:
        for result in llm.stream(prompts, params):
            text = result.outputs[0].text
            print(text[shown:], end="", flush=True)
            shown = len(text)
    finally:
        print(flush=True)
    return result


def plain(result: RequestOutput) -> dict[str, Any]:
    """As JSON, without captures."""
    found = dataclasses.asdict(result)
    del found["prompt_captured"]
    for output in found["outputs"]:
        del output["captured"]
    return found
