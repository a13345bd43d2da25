"""What the host takes from a step's results: tokens, log-probabilities, captures, draft counts.

Results are read one step late. A sample that has ended meanwhile (a stop string, an abort) is
skipped by the caller; what the device computed beyond a sample's end is dropped here.
"""

from collections.abc import Sequence
from typing import Any

from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.runtime.experts import Counts
from deepinfer_jax.runtime.plans import Chunk, Turn
from deepinfer_jax.runtime.requests import Sample, entry
from deepinfer_jax.runtime.speculation import Calibration, acceptance
from deepinfer_jax.runtime.step_types import StepOutput


def read_tokens(sample: Sample, found: StepOutput, place: int) -> tuple[int, bool]:
    """Gives a sample the tokens of its group: (tokens the device added, whether it has ended)."""
    count = int(found.count[place])
    for at in range(count):
        token = int(found.tokens[place, at])
        wanted = sample.params.logprobs
        logprobs = None
        if wanted is not None:
            logprobs = entry(
                token,
                float(found.logprob[place, at]),
                found.top_ids[place, at],
                found.top_logprobs[place, at],
                wanted,
            )
        if sample.matcher is not None:
            sample.matcher.accept(token)
        if sample.push(token, logprobs):
            return count, True
    if bool(found.failed[place]):
        sample.fail("the model's logits are not finite, or no token is allowed here")
        return count, True
    return count, False


def read_extras(
    setup: Setup,
    sample: Sample,
    chunk: Chunk | None,
    found: StepOutput,
    place: int,
    calibration: Calibration,
) -> None:
    """Gives a sample all but the tokens of its group; chunk: None for a turn."""
    if chunk is not None:
        read_prompt(sample, chunk, found, place)
    else:
        read_drafts(sample, found, place, calibration)
    if found.captured:
        score = sample.params.prompt_logprobs is not None
        first = None
        if chunk is not None:
            first = first_rows(setup.cfg, setup.numerics, chunk, len(sample.prompt), score)
        read_captures(sample, found, place, chunk, first)


def count_experts(setup: Setup, groups: Any, found: StepOutput, counts: Counts) -> None:
    """Adds the experts that a step's rows went to; groups: as of `used_rows`."""
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
    groups: Sequence[tuple[int, Chunk | Turn, Sample]],
    found: StepOutput,
) -> list[tuple[int, int]]:
    """(place, rows that the layers of a half computed for it), rejected drafts included.

    groups: place, work and sample of each group of the step.
    """
    score = any(sample.params.prompt_logprobs is not None for *_, sample in groups)
    used = []
    for place, item, sample in groups:
        if isinstance(item, Chunk):
            first = first_rows(cfg, numerics, item, len(sample.prompt), score)
            used.append((place, item.start + item.count - first[half]))
        else:
            used.append((place, 1 + int(found.verified[place])))
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
                count = int(found.count[place])
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


def read_drafts(sample: Sample, found: StepOutput, place: int, calibration: Calibration) -> None:
    """Counts what became of a turn's drafts."""
    metrics, confidence = sample.metrics, found.confidence[place]
    judged, stood = int(found.judged[place]), int(found.stood[place])
    metrics.decode_steps += 1
    metrics.verified_rows += int(found.verified[place])
    metrics.accepted_rows += max(int(found.count[place]) - 1, 0)
    if judged:
        chance = acceptance(confidence, calibration.temperature)
        metrics.drafts.count(judged, stood, chance.tolist())
        calibration.observe(confidence.tolist(), judged, stood)
