"""One sample of one request on the host: its tokens, its text, and when it ends.

The device decides where a sample stops (stop ids, length) and the host repeats that decision on the
tokens it reads, one step late; stop strings are the host's alone. What the device computed past a
stop string is dropped here.
"""

import dataclasses
import time
from typing import Any, NamedTuple

import numpy as np

from deepinfer_jax.runtime.outputs import CompletionOutput, Logprobs, RequestMetrics, RequestOutput
from deepinfer_jax.runtime.sampling_params import SamplingParams
from deepinfer_jax.runtime.text import TextStream, Tokenizer


@dataclasses.dataclass(eq=False)
class Sample:
    """A sample as the engine works on it.

    number: unique in the engine. request, output: where results go. prompt: token ids; key: noise
    key, uint32 [2]; limit: tokens it may have in all, prompt included; stops: ids that end it;
    prompt_seen: prompt rows whose captures are recorded. begin, own: of its prefill, as of `Rows`.
    grown: where it enters its number when it has a new token or has ended.
    """

    number: int
    request: RequestOutput
    output: CompletionOutput
    params: SamplingParams
    prompt: list[int]
    key: np.ndarray
    limit: int
    stops: frozenset[int]
    eos: int | None
    stream: TextStream | None  # brought up to the tokens when its text is wanted
    watched: TextStream | None  # the same, if it looks for stop strings at each token
    grammar_row: int = -1
    matcher: Any = None
    forced: tuple[int, ...] = ()
    routes: np.ndarray | None = None
    prompt_seen: int = 0
    begin: int = 0
    own: int = 0
    grown: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def new(
        cls,
        number: int,
        request: RequestOutput,
        index: int,
        params: SamplingParams,
        key: np.ndarray,
        *,
        context: int,
        eos: int | None,
        tokenizer: Tokenizer | None,
    ) -> "Sample":
        """A sample with its output entry; context: most tokens a request may have."""
        output = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        stops = set(params.stop_token_ids or ())
        if eos is not None and not params.ignore_eos:
            stops.add(eos)
        prompt = request.prompt_token_ids
        stream = watched = None
        if tokenizer is not None:
            stream = TextStream(tokenizer, tuple(params.stop or ()), params.min_tokens)
            watched = stream if params.stop else None
        return cls(
            number,
            request,
            output,
            params,
            prompt,
            key,
            min(len(prompt) + params.max_tokens, context),
            frozenset(stops),
            eos,
            stream,
            watched,
            forced=tuple(params.forced_token_ids or ()),
            routes=params.forced_routes,
        )

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output: what a request that lost its slot is computed again from."""
        return self.prompt + self.output.token_ids

    def forced_from(self, position: int) -> tuple[int, ...]:
        """The forced ids from an absolute position of the output on."""
        return self.forced[position - len(self.prompt) :]

    @property
    def metrics(self) -> RequestMetrics:
        return self.request.metrics

    def push(self, token: int, logprobs: Logprobs | None) -> bool:
        """Takes the next token; whether the sample has ended."""
        output, metrics = self.output, self.request.metrics
        if metrics.first_token is None:
            metrics.first_token = time.monotonic()
        metrics.generated_tokens += 1
        output.token_ids.append(token)
        self.grown.add(self.number)
        if output.logprobs is not None and logprobs is not None:
            output.logprobs.append(logprobs)
        if token in self.stops:
            return self.end("stop", None if token == self.eos else token, silent=1)
        if self.watched is not None and (stopped := self.watched.push(token)) is not None:
            kept = self.watched.kept
            del output.token_ids[kept:]
            if output.logprobs is not None:
                del output.logprobs[kept:]
            return self.end("stop", stopped)
        if len(self.prompt) + len(output.token_ids) >= self.limit:
            return self.end("length")
        return False

    def show(self) -> None:
        """Brings the text of a sample that has not ended up to its tokens."""
        if self.stream is not None and not self.finished:
            self.stream.extend(self.output.token_ids[self.stream.kept :])
            self.output.text = self.stream.text

    def record(self, name: str, layer: int, rows: np.ndarray) -> None:
        """Captured rows of the next ids."""
        self.output.captured.setdefault(name, {}).setdefault(layer, []).append(rows)

    def record_prompt(self, name: str, layer: int, rows: np.ndarray) -> None:
        """Captured rows of the prompt that come after those recorded."""
        self.request.prompt_captured.setdefault(name, {}).setdefault(layer, []).append(rows)

    def move(self) -> None:
        """Forgets where it was computed: another engine loop goes on from its tokens."""
        self.grammar_row, self.matcher = -1, None
        self.metrics.moves += 1
        kept = len(self.output.token_ids)
        for layers in self.output.captured.values():
            for layer, parts in layers.items():
                layers[layer] = [np.concatenate(parts)[:kept]]

    def close(self) -> None:
        """Joins what was captured, cut like the ids. Called once, when the sample has ended."""
        kept = len(self.output.token_ids)
        for layers in self.output.captured.values():
            for layer, parts in layers.items():
                layers[layer] = np.concatenate(parts)[:kept]
        if self.output.index == 0:
            for layers in self.request.prompt_captured.values():
                for layer, parts in layers.items():
                    layers[layer] = np.concatenate(parts)

    def end(self, reason: str, detail: int | str | None = None, silent: int = 0) -> bool:
        """Closes the sample; always True. silent: tokens at the end that give no text."""
        self.output.finish_reason, self.output.stop_reason = reason, detail
        self.grown.add(self.number)
        if self.stream is not None:
            tokens = self.output.token_ids
            self.stream.extend(tokens[self.stream.kept : len(tokens) - silent])
            self.output.text = self.stream.finish()
        self.metrics.finished = time.monotonic()
        return True

    def fail(self, message: str) -> None:
        """Closes the sample with an error; the request's first message is kept."""
        self.end("error")
        if self.request.error is None:
            self.request.error = message


class Handed(NamedTuple):
    """A sample whose prompt is done, on its way to another loop: its state as of `state.take`, how
    many of the pages in it are its own, confidences of the block that was drafted."""

    sample: Sample
    saved: Any
    pages: int
    ahead: np.ndarray | None


def entry(token: int, logprob: float, ids: np.ndarray, values: np.ndarray, count: int) -> Logprobs:
    """A log-probability entry: the token, then its `count` likeliest alternatives."""
    found = {token: float(logprob)}
    for other, value in zip(ids[:count].tolist(), values[:count].tolist(), strict=True):
        found.setdefault(other, value)
    return found
