"""What a request gives back: texts, ids, log-probabilities, timings, or an error.

A log-probability entry is ``{token id: natural-log probability}``: the chosen token always, then as
many alternatives as were asked for, likeliest first (ties: lowest id). All entries of a request are
of one kind, raw or processed, as ``SamplingParams.logprobs_mode`` says.
"""

import dataclasses
from typing import Any

Logprobs = dict[int, float]
FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclasses.dataclass
class CompletionOutput:
    """One sample.

    text: decode of the ids, cut before a stop string; never half a character while it grows.
    token_ids: the sampled ids, the end-of-sequence or stop id included; cut alike at a stop string.
    logprobs: one entry per id if asked for.
    finish_reason: None while it grows, then one of FINISH_REASONS. stop_reason: the stop string or
        id that ended it (None for the end-of-sequence id).
    captured: what ``generate(capture=...)`` recorded, by name, one row per id.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    captured: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class RequestMetrics:
    """Seconds on one monotonic clock, and counts, of one request (all its samples together).

    verified_rows and accepted_rows count draft rows only: a step without drafts adds to neither.
    """

    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    verified_rows: int = 0
    accepted_rows: int = 0
    preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token on the host."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens a decode step emitted (1 without speculation); 0 before the first step."""
        emitted = self.decode_steps + self.accepted_rows
        return emitted / self.decode_steps if self.decode_steps else 0.0


@dataclasses.dataclass
class RequestOutput:
    """One prompt's result. ``error`` is set exactly when a finish_reason is "error".

    prompt_logprobs: one entry per prompt token if asked for; None at the first, which nothing
    predicts.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


@dataclasses.dataclass
class PromptScore:
    """Raw-model log-probability of each prompt token given those before it; None at the first."""

    token_ids: list[int]
    logprobs: list[float | None]

    @property
    def total(self) -> float:
        """Log-probability of all tokens after the first together."""
        return sum(value for value in self.logprobs if value is not None)
