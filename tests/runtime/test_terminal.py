"""`generate --prompt` on a terminal: streamed text, JSON lines, exit codes; the cache folder."""

import argparse
import json

import jax
import pytest

import deepinfer_jax as dj
from deepinfer_jax import cli
from deepinfer_jax.runtime import terminal, warmup

PARAMS = dj.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_one_prompt_streams_and_several_are_printed(llm, capsys):
    engine = llm(invariant=True)
    wanted = [out.outputs[0].text for out in engine.generate(["a", "bc"], PARAMS)]
    assert terminal.show(engine, ["bc"], PARAMS, False) == 0
    assert capsys.readouterr().out == wanted[1] + "\n"
    assert terminal.show(engine, ["a", "bc"], PARAMS, False) == 0
    assert capsys.readouterr().out == "".join(text + "\n" for text in wanted)


def test_json_lines_hold_the_whole_result(llm, capsys):
    params = dj.SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1)
    assert terminal.show(llm(invariant=True), ["a", "b"], params, True) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(line["outputs"][0]["token_ids"]) for line in lines] == [3, 3]
    assert lines[0]["prompt"] == "a" and lines[0]["metrics"]["generated_tokens"] == 3


def test_a_json_line_has_no_infinities(llm, capsys):
    params = dj.SamplingParams(
        temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2, logprobs_mode="processed"
    )
    assert terminal.show(llm(invariant=True), ["a"], params, True) == 0
    line = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [list(entry.values()) for entry in line["outputs"][0]["logprobs"]] == [[0.0, None]] * 2


def test_a_failed_request_is_a_line_on_stderr_and_exit_code_1(llm, capsys):
    assert terminal.show(llm(invariant=True), ["a" * 2000], PARAMS, False) == 1
    shown = capsys.readouterr()
    assert "max_context" in shown.err and len(shown.err.splitlines()) == 1


def test_an_interrupt_ends_the_line(llm, capsys, monkeypatch):
    engine = llm(invariant=True)
    turn, turns = engine._loop.turn, []

    def interrupted():
        turns.append(1)
        if len(turns) == 5:
            raise KeyboardInterrupt
        turn()

    monkeypatch.setattr(engine._loop, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        terminal.show(engine, ["a"], dj.SamplingParams(max_tokens=50, ignore_eos=True), False)
    assert capsys.readouterr().out.endswith("\n")
    assert len(engine._loop) == 0


def test_a_trace_is_a_profile_on_disk(tmp_path):
    with terminal.traced(None):
        assert not list(tmp_path.iterdir())
    with terminal.traced(str(tmp_path)):
        jax.block_until_ready(jax.jit(lambda x: x + 1)(3.0))
    (profile,) = tmp_path.rglob("*.xplane.pb")
    assert profile.stat().st_size > 0


def test_compiled_programs_are_kept_in_the_cache_folder(tmp_path):
    """Unless jax was told of another one."""
    before = jax.config.jax_compilation_cache_dir
    given = argparse.Namespace(cache=str(tmp_path))
    try:
        assert cli._cache(given) == tmp_path
        assert jax.config.jax_compilation_cache_dir == before
        jax.config.update("jax_compilation_cache_dir", None)
        assert cli._cache(given) == tmp_path
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
        assert cli._cache(argparse.Namespace(cache=None)) == warmup.default_folder()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
