"""`bench idle` and `bench prefill`: the engine profiled and timed on the small model."""

import json
from pathlib import Path

import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax import cli
from deepinfer_jax.bench import engines
from pallas_kernels import Kernels
from tests.runtime import small_model


@pytest.mark.slow
def test_idle_time_between_decode_steps(llm, tmp_path: Path) -> None:
    engine = llm()
    found = engines.idle_between_steps(engine, 20, 3, tmp_path)
    assert found["requests"] == 4 and found["draft_block"] == small_model.BLOCK
    assert found["groups"] == [4], "every profiled step has all requests"
    assert found["steps"] >= 3 and "decode" in found["module"]
    idle = found["idle"]
    assert 0 < idle["busy"] <= idle["span"]
    assert 0 <= idle["between"] <= idle["idle"] < 1
    # The step in flight when the profile began may be in it, and the next one.
    assert found["steps"] - 1 <= idle["runs"] <= found["steps"] + 2
    assert len(engine._loop) == 0, "what was served is aborted"


def test_too_little_room_for_the_steps_is_said(llm, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_context = 512; expected 8\d\d or more"):
        engines.idle_between_steps(llm(invariant=True), 20, 200, tmp_path)


def test_an_engine_over_a_loaded_model(llm, prompts) -> None:
    """`LLM(model)` has the model's weights and numerics, and its tokens."""
    engine = llm(invariant=True)
    settings = {"max_context": small_model.CONTEXT, "shapes": small_model.SHAPES}
    shared = dj.LLM(engine.model, max_slots=4, **settings)
    assert shared.model is engine.model
    params = dj.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (one,), (other,) = (it.generate(prompts(9), params) for it in (engine, shared))
    assert one.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.slow
def test_prompts_through_the_engine(folder, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "prefill", "--model", str(folder), "--tokens", "16,32", "--prompt", "16"]
    assert cli.main([*words, "--requests", "4", "--runs", "2", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["tokens_per_turn"], row["steps"]) for row in found] == [(16, 4), (32, 2)]
    for row in found:
        assert row["tokens_s"] == pytest.approx(64 / np.median(row["seconds"]))
        assert row["step_tokens_s"] == pytest.approx(row["tokens_per_turn"] / row["step_seconds"])


@pytest.mark.slow
def test_a_rank_through_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small_model.CONFIG))
    words = ["bench", "idle", "--model", str(config), "--ranks", "2", "--requests", "2"]
    words += ["--prompt", "20", "--context", "128", "--steps", "3"]
    assert cli.main([*words, "--profile", str(tmp_path / "profile")]) == 0
    shown = capsys.readouterr().out
    assert "engine decode, 2 requests" in shown and "idle between steps" in shown


@pytest.mark.slow
def test_decode_of_a_ranks_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small_model.CONFIG))
    words = ["bench", "decode", "--model", str(config), "--ranks", "2", "--batch", "2", "--json"]
    words += ["--requests", "2", "--prompt", "8", "--tokens", "6", "--runs", "1", "--breakdown"]
    assert cli.main([*words, "--speculate", "0"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in found] == ["plain", "invariant"]
    assert all(row["generated"] == 12 and row["device"] > 0 for row in found)


def test_a_rank_model_keeps_its_rows_here() -> None:
    cfg = dj.ModelConfig.from_hf(small_model.CONFIG)
    model = engines.rank_model(cfg, 2, small_model.numerics(), Kernels.auto())
    assert model.cfg.n_routed_experts == 2
    ffn = model.weights.layers[0].ffn
    assert ffn.gate.shape[0] == 2 and ffn.w13.values.shape[0] == 2
