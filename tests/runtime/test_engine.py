"""The engine end to end: golden tokens, equal tokens with and without speculation, errors alone."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import deepinfer_jax as dj
from converters import safetensors_io as st
from deepinfer_jax.runtime import offline
from deepinfer_jax.runtime.engine import Shapes
from tests.runtime.small_model import SHAPES, VOCAB

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ["len1", "len7", "len40", "len129", "len200", "len300", "text", "eos_mid", "repeat"]
Engines = Callable[..., dj.LLM]
Prompts = Callable[..., list[list[int]]]


def _golden(name: str) -> np.ndarray:
    file = GOLDEN / "v41_tiny.safetensors"
    tensor = st.read_header(file).tensors[name]
    return np.asarray(st.Reader().read(tensor))


@pytest.mark.long
def test_golden_greedy_tokens_with_the_whole_draft_block() -> None:
    numerics = dj.Numerics.preset("float32", cache_qdq=False)
    shapes = Shapes(prefill=((4, 128),))
    llm = dj.LLM(
        GOLDEN / "v41-tiny", numerics=numerics, max_slots=8, max_context=384, shapes=shapes
    )
    prompts = [_golden(f"ids.{name}").astype(int).tolist() for name in NAMES]
    wanted = [_golden(f"kvq_off.greedy.{name}").astype(int).tolist() for name in NAMES]
    params = [
        dj.SamplingParams(temperature=0.0, max_tokens=len(tokens), ignore_eos=True)
        for tokens in wanted
    ]
    found = [out.outputs[0].token_ids for out in llm.generate(prompts, params, strict=True)]
    assert dict(zip(NAMES, found, strict=True)) == dict(zip(NAMES, wanted, strict=True))


def _close(one: list[dict[int, float]] | None, other: list[dict[int, float]] | None) -> float:
    """Largest difference of two lists of log-probabilities of the same tokens."""
    assert one is not None and other is not None
    pairs = zip(one, other, strict=True)
    return max(abs(a[token] - b[token]) for a, b in pairs for token in a)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_speculation_changes_no_token(llm: Engines, prompts: Prompts, temperature: float) -> None:
    params = dj.SamplingParams(
        temperature=temperature,
        top_p=0.9,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        max_tokens=40,
        ignore_eos=True,
        seed=5,
        logprobs=0,
    )
    work = prompts(1, 17, 40, 33)
    plain = llm({"speculate": 0}, invariant=True).generate(work, params, strict=True)
    drafted = llm(invariant=True).generate(work, params, strict=True)
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert _close(one.outputs[0].logprobs, other.outputs[0].logprobs) < 5e-5
    assert sum(out.metrics.accepted_rows for out in drafted) > 0


def test_speculation_changes_no_bit(llm: Engines, prompts: Prompts) -> None:
    params = dj.SamplingParams(temperature=0.7, max_tokens=40, ignore_eos=True, seed=5, logprobs=0)
    work = prompts(1, 17, 40, 33)
    plain = llm({"speculate": 0}, invariant=True).generate(work, params, strict=True)
    drafted = llm(invariant=True).generate(work, params, strict=True)
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_a_request_does_not_depend_on_its_neighbours(llm: Engines, prompts: Prompts) -> None:
    engine = llm(invariant=True)
    work = prompts(5, 30, 12, 48, 9, 21)
    params = [
        dj.SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, seed=n, logprobs=0)
        for n in range(len(work))
    ]
    together = engine.generate(work, params, strict=True)
    alone = [engine.generate([one], p, strict=True)[0] for one, p in zip(work, params, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_score_equals_forward(llm: Engines, folder: Path, prompts: Prompts) -> None:
    engine = llm()
    tokens = prompts(45)[0]
    (mark,) = engine.score([tokens])
    logits = np.asarray(engine.model.forward([tokens]).logits)[0].astype(np.float64)
    norm = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))
    norm = norm + logits.max(-1)
    wanted = logits[np.arange(44), tokens[1:]] - norm[:-1]
    assert mark.logprobs[0] is None
    assert np.abs(np.array(mark.logprobs[1:], np.float64) - wanted).max() < 5e-5


def test_bad_requests_end_alone_and_in_order(llm: Engines, prompts: Prompts) -> None:
    good = prompts(8)[0]
    work = [good, [], [3, VOCAB], good, list(range(3, 300)), [3, VOCAB - 2]]
    params = dj.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    outs = llm().generate(work, params)
    assert [out.error is None for out in outs] == [True, False, False, True, False, False]
    reasons = [out.outputs[0].finish_reason for out in outs]
    assert reasons == ["length", "error", "error", "length", "error", "error"]
    assert outs[0].outputs[0].token_ids == outs[3].outputs[0].token_ids
    for out, word in zip(outs[1:3], ("empty", str(VOCAB)), strict=True):
        assert word in (out.error or "")
    with pytest.raises(ValueError, match="prompt 1"):
        llm().generate(work, params, strict=True)


def test_samples_of_a_prompt_differ_and_repeat(llm: Engines, prompts: Prompts) -> None:
    params = dj.SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, n=3, seed=7)
    first = llm().generate(prompts(6), params, strict=True)[0]
    again = llm().generate(prompts(6), params, strict=True)[0]
    ids = [tuple(output.token_ids) for output in first.outputs]
    assert len(set(ids)) == 3
    assert ids == [tuple(output.token_ids) for output in again.outputs]


def test_structured_output_with_and_without_speculation(llm: Engines, prompts: Prompts) -> None:
    pattern = r"[a-c]{2,5}(-[0-9]{1,3})?"
    params = dj.SamplingParams(
        temperature=1.0, max_tokens=24, seed=3, structured={"regex": pattern}
    )
    free = dj.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    work = prompts(4, 9, 14)
    mixed = [params, free, params]
    plain = llm({"speculate": 0}, invariant=True).generate(work, mixed, strict=True)
    drafted = llm(invariant=True).generate(work, mixed, strict=True)
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    for out in (drafted[0], drafted[2]):
        assert out.outputs[0].finish_reason == "stop"
        assert re.fullmatch(pattern, out.outputs[0].text)


def test_preemption_changes_nothing(folder: Path, llm: Engines, prompts: Prompts) -> None:
    work = prompts(100, 110, 90, 120)
    params = dj.SamplingParams(temperature=0.7, max_tokens=60, ignore_eos=True, seed=1, logprobs=0)
    wanted = llm(invariant=True).generate(work, params, strict=True)
    tight = Shapes(prefill=SHAPES.prefill, pages=5)
    found = llm({"shapes": tight}, invariant=True).generate(work, params, strict=True)
    assert sum(out.metrics.preemptions for out in found) > 0
    for one, other in zip(wanted, found, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_offline_batch_resumes(llm: Engines, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": f"r{n}", "prompt_token_ids": [3 + n, 4, 5], "max_tokens": 4} for n in range(6)]
    rows[2]["temperature"] = -1
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine, quiet = llm(invariant=True), Console(quiet=True)
    assert offline.run(engine, source, target, {}, quiet) == 1
    whole = target.read_text().splitlines(keepends=True)
    records = {json.loads(line)["id"]: json.loads(line)["outputs"] for line in whole}
    assert len(records) == len(whole) == 6
    target.write_text("".join(whole[:3]) + whole[3][: len(whole[3]) // 2])
    offline.run(engine, source, target, {}, quiet)
    again = {
        json.loads(line)["id"]: json.loads(line)["outputs"]
        for line in target.read_text().splitlines()
    }
    assert again == records
    source.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[0]) + "\n")
    with pytest.raises(ValueError, match="twice"):
        offline.run(engine, source, tmp_path / "other.jsonl", {}, quiet)
