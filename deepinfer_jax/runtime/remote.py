"""Disaggregation between processes: one computes prompts and gives frames, another goes on.

    frames = prefilled(engine, prompts, params)      # bytes, whenever a prompt is done
    for number, request in resumed(engine, frames): ...

The frame (`frames.py`) carries everything, so the second engine needs no prompt and gives what the
first would have given. A frame whose state is damaged is not lost: its request is computed again
from its ids, with the same key. What brings frames across is not said here; `transport.py` has a
socket. Captures stay where they are recorded and cannot cross.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.runtime import frames
from deepinfer_jax.runtime import state as states
from deepinfer_jax.runtime.loop import Loop
from deepinfer_jax.runtime.outputs import RequestOutput
from deepinfer_jax.runtime.requests import Handed, Sample
from deepinfer_jax.runtime.transport import Arriving


def prefilled(llm: Any, work: Sequence[tuple[Any, Any]]) -> Iterator[bytes]:
    """Computes prompts and gives a frame for each sample, in the order in which they are done.

    llm: an engine.LLM that computes its own prompts; work: (prompt, params). Samples that end with
    their first token, or cannot be served, have frames too, without a state. Raises ValueError
    while requests are in flight.
    """
    loop, identity = llm._loop, llm.identity
    if not isinstance(loop, Loop):
        raise ValueError("prefilled: this engine has a prefill group and hands over by itself")
    if len(loop):
        raise ValueError("prefilled: requests are in flight")
    live: dict[int, tuple[int, Sample]] = {}
    _decodes(loop, False)
    try:
        for number, (prompt, params) in enumerate(work):
            request = RequestOutput(prompt if isinstance(prompt, str) else None, [])
            for sample in llm._enter(request, prompt, params):
                live[sample.number] = number, sample
        while live:
            for key in [key for key, (_, sample) in live.items() if sample.finished]:
                yield frames.pack(*live.pop(key), identity, None)
            while loop.ready:
                number, sample = live.pop(loop.ready.popleft().number)
                yield frames.pack(number, sample, identity, loop.give(sample))
            if live:
                loop.turn()
        loop.drain()
    except BaseException:  # also where the reader stopped: nobody waits for the rest
        loop.reset()
        raise
    finally:
        _decodes(loop, True)


def resumed(llm: Any, source: Iterable[bytes]) -> Iterator[tuple[int, RequestOutput]]:
    """Goes on with frames of another engine: (number of the request there, result), as they finish.

    source: frames, in any order; it is read on a thread, no further than there are slots. Raises
    FrameError for a frame that does not belong to these weights, numerics or shapes, and ValueError
    while requests are in flight or where the frames end before all samples of a request have come.
    """
    loop, identity = llm._loop, llm.identity
    if len(loop):
        raise ValueError("resumed: requests are in flight")
    arriving, like = Arriving(source), states.share_like(loop.state, loop.pages.per_slot)
    requests: dict[int, tuple[RequestOutput, int]] = {}
    try:
        while not arriving.ended or len(loop):
            while loop.accepts and (data := arriving.take(wait=not len(loop))) is not None:
                _take_up(llm, requests, frames.unpack(data, identity, like))
            if len(loop):
                loop.turn()
            for number, (request, samples) in list(requests.items()):
                if len(request.outputs) == samples and request.finished:
                    request.outputs.sort(key=lambda output: output.index)
                    yield number, requests.pop(number)[0]
        loop.drain()
        if requests:
            number, (request, samples) = next(iter(requests.items()))
            raise ValueError(
                f"resumed: {len(request.outputs)} of {samples} samples of request {number} came"
            )
    except BaseException:
        loop.reset()
        raise


def _take_up(llm: Any, requests: dict[int, Any], frame: frames.Frame) -> None:
    head = frame.head
    request, _ = requests.setdefault(
        head["number"], (RequestOutput(head["text"], head["prompt"]), head["samples"])
    )
    request.metrics.arrival = request.metrics.arrival or time.monotonic()
    request.metrics.prompt_tokens = len(head["prompt"])
    request.metrics.cached_tokens += head["cached_tokens"]
    sample = llm._sample(
        request, head["index"], frames.params_of(head), np.array(head["key"], np.uint32)
    )
    reason, detail, text = head["finish"]
    if reason is not None:
        output = sample.output
        frames.restore(head, sample)
        output.finish_reason, output.stop_reason, output.text = reason, detail, text
        request.error = request.error or head["error"]
    elif frame.saved is None:
        request.metrics.recomputed += 1
        llm._loop.add(sample)
    else:
        frames.restore(head, sample)
        ahead = None if head["ahead"] is None else np.array(head["ahead"], np.float32)
        llm._loop.receive(Handed(sample, frame.saved, head["pages"], ahead))


def _decodes(loop: Loop, decodes: bool) -> None:
    loop.policy = loop.scheduler.policy = dataclasses.replace(loop.policy, decodes=decodes)
