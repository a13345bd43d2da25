"""What a request gives back: texts, ids, log-probabilities, timings, or an error.

A log-probability entry is ``{token id: natural-log probability}``: the chosen token always, then as
many alternatives as were asked for, likeliest first (ties: lowest id); -inf is that of what cannot
happen. All entries of a request are of one kind, raw or processed, as
``SamplingParams.logprobs_mode`` says.
"""

import dataclasses
import json
import math
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
    captured: what ``generate(capture=...)`` recorded, name -> layer -> one row per id: the row that
        the id was sampled from, which fed the token before it.
    reply: of `LLM.chat`, the parsed message (`reply.Reply`).
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    captured: dict[str, Any] = dataclasses.field(default_factory=dict)
    reply: Any = None


@dataclasses.dataclass
class DraftCounts:
    """What became of drafted tokens, one entry a place of the block.

    A draft is judged if it was verified and every one before it stood: only then does its fate say
    something about the drafter. expected: sum of the confidences of the judged ones.
    """

    judged: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    expected: list[float] = dataclasses.field(default_factory=list)

    def count(self, judged: int, stood: int, chance: list[float]) -> None:
        """One turn: the first `judged` drafts were, and the first `stood` of them stood."""
        self._reach(judged)
        for place in range(judged):
            self.judged[place] += 1
            self.accepted[place] += place < stood
            self.expected[place] += chance[place]

    def add(self, other: "DraftCounts") -> None:
        """Adds the counts of another."""
        self._reach(len(other.judged))
        for place, judged in enumerate(other.judged):
            self.judged[place] += judged
            self.accepted[place] += other.accepted[place]
            self.expected[place] += other.expected[place]

    def _reach(self, places: int) -> None:
        more = places - len(self.judged)
        if more > 0:
            self.judged += [0] * more
            self.accepted += [0] * more
            self.expected += [0.0] * more

    @property
    def acceptance(self) -> list[float | None]:
        """Accepted share of the judged drafts by place; None where none was judged."""
        pairs = zip(self.accepted, self.judged, strict=True)
        return [accepted / judged if judged else None for accepted, judged in pairs]

    @property
    def calibration_error(self) -> float | None:
        """|mean confidence - acceptance|, averaged over the judged drafts."""
        gaps = zip(self.expected, self.accepted, strict=True)
        total = sum(self.judged)
        return sum(abs(a - b) for a, b in gaps) / total if total else None


@dataclasses.dataclass
class RequestMetrics:
    """Seconds on one monotonic clock, and counts, of one request (all its samples together).

    verified_rows and accepted_rows count draft rows only: a step without drafts adds to neither.
    recomputed: samples whose state came damaged from another process.
    moves: times that a sample went on in another replica because its own failed.
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
    recomputed: int = 0
    moves: int = 0
    drafts: DraftCounts = dataclasses.field(default_factory=DraftCounts)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token on the host."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens a decode step emitted (1 without speculation); 0 before the first step."""
        emitted = self.decode_steps + self.accepted_rows
        return emitted / self.decode_steps if self.decode_steps else 0.0

    @property
    def verified_per_accepted(self) -> float | None:
        """Draft rows fed for each draft that stood; None if none did."""
        return self.verified_rows / self.accepted_rows if self.accepted_rows else None


@dataclasses.dataclass
class RequestOutput:
    """One prompt's result. ``error`` is set exactly when a finish_reason is "error".

    prompt_logprobs: one entry per prompt token if asked for; None at the first, which nothing
    predicts. prompt_captured: what ``generate(capture=...)`` recorded of the prompt's own rows,
    name -> layer -> one row per prompt token (the last ones, where bounded replay computed only
    those).
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None
    prompt_captured: dict[str, dict[int, Any]] = dataclasses.field(default_factory=dict)
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return None not in [output.finish_reason for output in self.outputs]


def json_line(found: Any) -> str:
    """A result's fields as one line of JSON: numbers that JSON lacks, such as the log-probability
    of what cannot happen, are null, and lone surrogates, which UTF-8 lacks, are spelled."""
    try:
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(found), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclasses.dataclass
class PromptScore:
    """Raw-model log-probability of each prompt token given those before it; None at the first."""

    token_ids: list[int]
    logprobs: list[float | None]

    @property
    def total(self) -> float:
        """Log-probability of all tokens after the first together."""
        return sum(value for value in self.logprobs if value is not None)
