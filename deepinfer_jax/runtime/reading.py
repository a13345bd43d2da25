"""What the host takes from a step's results: tokens, log-probabilities, captures, draft counts.

Results are read one step late. A sample that has ended meanwhile (a stop string, an abort) is
skipped by the caller; what the device computed beyond a sample's end is dropped here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.runtime.experts import Counts
from deepinfer_jax.runtime.packing import unpack
from deepinfer_jax.runtime.plans import Chunk, Outcome, Turn
from deepinfer_jax.runtime.requests import Sample, entry
from deepinfer_jax.runtime.speculation import Calibration, acceptance
from deepinfer_jax.runtime.step_types import Results, StepOutput
from deepinfer_jax.structured import GrammarError

Group = tuple[int, Any, Sample]  # of a step: its place, its `Chunk` or `Turn`, and whose it is


def on_host(results: Results) -> StepOutput:
    """A step's results on the host, those that are read number by number as nested lists."""
    packed, captured = jax.device_get(results)
    found = dataclasses.replace(unpack(packed), captured=captured)
    names = ("tokens", "count", "failed", "logprob", "verified", "judged", "stood")
    return dataclasses.replace(found, **{name: getattr(found, name).tolist() for name in names})


def read_tokens(sample: Sample, found: StepOutput, place: int) -> Outcome:
    """Gives a sample the tokens of its group; found: as of `on_host`, here and below."""
    count, wanted, logprobs = found.count[place], sample.params.logprobs, None
    for at, token in enumerate(found.tokens[place][:count]):
        if wanted is not None:
            ids, values = found.top_ids[place, at], found.top_logprobs[place, at]
            logprobs = entry(token, found.logprob[place][at], ids, values, wanted)
        if sample.matcher is not None:
            try:
                sample.matcher.accept(token)
            except GrammarError as error:
                sample.fail(str(error))
                return Outcome(count, True)
        if sample.push(token, logprobs):
            return Outcome(count, True)
    if found.failed[place]:
        sample.fail("the model's logits are not finite, or no token is allowed here")
        return Outcome(count, True)
    return Outcome(count)


def read_extras(
    setup: Setup, groups: Sequence[Group], found: StepOutput, calibration: Calibration
) -> None:
    """Gives the samples of a step all but their tokens."""
    if groups and isinstance(groups[0][1], Turn):
        read_drafts(groups, found, calibration)
    elif found.prompt is not None:
        for place, chunk, sample in groups:
            read_prompt(sample, chunk, found, place)
    if found.captured:
        for place, item, sample in groups:
            chunk = item if isinstance(item, Chunk) else None
            first = None
            if chunk is not None:
                score = sample.params.prompt_logprobs is not None
                first = first_rows(setup.cfg, setup.numerics, chunk, len(sample.prompt), score)
            read_captures(sample, found, place, chunk, first)


def count_experts(setup: Setup, groups: Any, found: StepOutput, counts: Counts) -> None:
    """Adds the experts that a step's rows went to; groups: all of the step."""
    cfg, numerics = setup.cfg, setup.numerics
    halves: dict[str, dict[int, Any]] = {"encoder": {}, "decoder": {}}
    for layer, chosen in found.captured["routes"].items():
        halves["encoder" if layer < cfg.decoder_start else "decoder"][layer] = chosen
    for half, routes in halves.items():
        counts.add(routes, used_rows(cfg, numerics, half, groups, found))


def used_rows(
    cfg: ModelConfig,
    numerics: Numerics,
    half: str,
    groups: Sequence[Group],
    found: StepOutput,
) -> list[tuple[int, int]]:
    """(place, rows that the layers of a half computed for it), rejected drafts included."""
    score = any(sample.params.prompt_logprobs is not None for *_, sample in groups)
    used = []
    for place, item, sample in groups:
        if isinstance(item, Chunk):
            first = first_rows(cfg, numerics, item, len(sample.prompt), score)
            used.append((place, item.start + item.count - first[half]))
        else:
            used.append((place, 1 + found.verified[place]))
    return used


def read_prompt(sample: Sample, chunk: Chunk, found: StepOutput, place: int) -> None:
    """Log-probabilities of the prompt tokens that follow a chunk's rows."""
    wanted = sample.params.prompt_logprobs
    if wanted is None or found.prompt is None:
        return
    listed = sample.request.prompt_logprobs
    if listed is None:
        listed = sample.request.prompt_logprobs = [None for _ in sample.prompt]
    logprob, ids, values = (leaf[place] for leaf in found.prompt)
    for at in range(chunk.count):
        position = chunk.start + at + 1
        if position < len(sample.prompt):
            listed[position] = entry(
                sample.prompt[position], float(logprob[at]), ids[at], values[at], wanted
            )


def read_captures(
    sample: Sample, found: StepOutput, place: int, chunk: Chunk | None, first: dict[str, int] | None
) -> None:
    """Captured rows of a turn, or of a chunk (with `first`) and the token sampled after it.

    first: position of the first row of a group's rectangle, for the layers of the "encoder" and the
    "decoder" half, and the layer at which the latter begins ("border").
    """
    for name, layers in found.captured.items():
        for layer, rows in layers.items():
            if chunk is None or first is None:
                count = found.count[place]
                sample.record(name, layer, rows[place, :count])
                continue
            begin = first["decoder" if layer >= first["border"] else "encoder"]
            end = chunk.start + chunk.count
            own = rows[place, : max(end - begin, 0)]
            if sample.output.index == 0:
                stop = max(len(sample.prompt) - begin, 0)  # a chunk may lie in the output
                sample.record_prompt(name, layer, own[max(sample.prompt_seen - begin, 0) : stop])
            if chunk.last:
                sample.record(name, layer, own[-1:])
    if chunk is not None:
        sample.prompt_seen = max(sample.prompt_seen, chunk.start + chunk.count)


def first_rows(
    cfg: ModelConfig, numerics: Numerics, chunk: Chunk, prompt: int, score: bool
) -> dict[str, int]:
    """`read_captures`'s `first` for a chunk."""
    begin = chunk.start
    if numerics.replay == "compact" and not score:
        begin = min(max(begin, prompt - cfg.replay_keep), chunk.start + chunk.count)
    return {"encoder": chunk.start, "decoder": begin, "border": cfg.decoder_start}


def read_drafts(groups: Sequence[Group], found: StepOutput, calibration: Calibration) -> None:
    """Counts what became of the drafts of a step's turns."""
    confidences = found.confidence.tolist()
    chances = acceptance(found.confidence, calibration.temperature).tolist()
    for place, _, sample in groups:
        metrics, count, judged = sample.request.metrics, found.count[place], found.judged[place]
        metrics.decode_steps += 1
        metrics.verified_rows += found.verified[place]
        if count > 1:
            metrics.accepted_rows += count - 1
        if judged:
            metrics.drafts.count(judged, found.stood[place], chances[place])
            calibration.observe(confidences[place], judged, found.stood[place])
