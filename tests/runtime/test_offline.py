"""Offline batches: one result a request whatever happens, killed at any moment and resumed."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console

from deepinfer_jax.runtime import offline
from deepinfer_jax.runtime.outputs import DraftCounts, RequestMetrics, RequestOutput

ROOT = Path(__file__).parents[2]


def _rows(count):
    for number in range(count):
        yield {
            "id": f"r{number}",
            "prompt_token_ids": [3 + number % 200, 4, 5 + number % 7],
            "max_tokens": 2 + number % 5,
            "temperature": 0.8,
            "ignore_eos": True,
        }


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _strictly(text):
    """A line of JSON as a reader elsewhere takes it: without NaN and infinities."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in {text}"))


def _read(path):
    """id -> (outputs, error); fails on a repeated id or a broken line."""
    lines = [_strictly(line) for line in path.read_bytes().decode().split("\n")[:-1]]
    found = {line["id"]: (line["outputs"], line["error"]) for line in lines}
    assert len(found) == len(lines)
    return found


@pytest.fixture
def engine(llm):
    return llm(invariant=True)


@pytest.fixture
def quiet():
    return Console(file=io.StringIO())


def test_every_request_has_one_result_errors_included(engine, quiet, tmp_path):
    rows = list(_rows(12))
    rows[2]["temperature"] = -1
    rows[4]["prompt_token_ids"] = []
    rows[5]["colour"] = "red"
    rows[6]["prompt"] = "both"
    rows[7] = {"id": 7, "prompt": "a text", "max_tokens": 3, "structured": {"regex": "("}}
    source, target = _write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert offline.run(engine, source, target, {}, quiet) == 5
    found = _read(target)
    assert set(found) == {row["id"] for row in rows}
    wrong = {key for key, (_, error) in found.items() if error is not None}
    assert wrong == {"r2", "r4", "r5", "r6", 7}
    assert "colour" in found["r5"][1] and "empty" in found["r4"][1]
    text = quiet.file.getvalue()
    assert "12/12 requests, 5 failed" in text and "tokens/s" in text
    assert "tokens a step, drafts accepted" in text and "calibration error" in text


NESTED = "[" * 100_000
WRONG = {
    "stop": {"stop": "a\ud800"},
    "choice": {"structured": {"choice": ["a", "\udfff"]}},
    "regex": {"structured": {"regex": "\ud800"}},
    "constant": {"structured": {"json_schema": {"const": "\ud800"}}},
    "nested": {"structured": {"json_schema": NESTED}},
    "prompt": {"prompt": "a\ud800"},
    "digits": {"temperature": 10**400},
    "logit_bias[7]": {"logit_bias": {"7": 10**400}},
    "\ud800": {"\ud800": 1},
}


def test_what_python_can_not_handle_is_the_error_of_its_line(engine, quiet, tmp_path):
    """Lone surrogates, integers beyond all floats, brackets without end; ids of the first kind."""
    rows = list(_rows(len(WRONG) + 2))
    for row, (key, fields) in zip(rows, WRONG.items(), strict=False):
        row |= {"id": f"{key} \ud83d"} | fields
        if "prompt" in fields:
            del row["prompt_token_ids"]
        if "structured" in fields:
            del row["ignore_eos"]
    source, target = _write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert offline.run(engine, source, target, {}, quiet) == len(WRONG)
    found = _read(target)
    for row in rows[: len(WRONG)]:
        assert found[row["id"]][1] is not None and len(found[row["id"]][1]) < 200, row["id"]
    assert [found[row["id"]][1] for row in rows[len(WRONG) :]] == [None, None]
    before = target.read_bytes()
    assert offline.run(engine, source, target, {}, quiet) == len(WRONG)
    assert target.read_bytes() == before


def test_text_with_line_separators_is_resumed(engine, quiet, tmp_path):
    rows = list(_rows(3))
    for row, separator in zip(rows, "\u2028\u2029\u0085", strict=True):
        row["id"] = f"a{separator}b"
    source, target = _write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert offline.run(engine, source, target, {}, quiet) == 0
    before = target.read_bytes()
    assert offline.run(engine, source, target, {}, quiet) == 0
    assert target.read_bytes() == before and set(_read(target)) == {row["id"] for row in rows}


def test_ids_of_logit_bias_are_keys_of_an_object(engine, quiet, tmp_path):
    rows = list(_rows(3))
    rows[0] |= {"logit_bias": {"77": 1000.0}, "temperature": 0, "max_tokens": 3}
    rows[1]["logit_bias"] = {"077": 1.0}
    rows[2]["logit_bias"] = [[77, 1.0]]
    target = tmp_path / "out.jsonl"
    offline.run(engine, _write(tmp_path / "in.jsonl", rows), target, {}, quiet)
    found = _read(target)
    assert found["r0"][0][0]["token_ids"] == [77, 77, 77]
    assert "'077'" in found["r1"][1] and "logit_bias" in found["r2"][1]


def test_a_seed_of_null_is_none(engine, quiet, tmp_path):
    """The line's own noise then, whatever the engine did before."""
    rows = [{**row, "temperature": 1.0, "max_tokens": 6} for row in _rows(2)]
    found = []
    for name, fields in (("without", {}), ("null", {"seed": None}), ("again", {"seed": None})):
        source = _write(tmp_path / f"{name}.jsonl", [row | fields for row in rows])
        offline.run(engine, source, tmp_path / name, {"seed": 3}, quiet)
        found.append(_read(tmp_path / name))
    assert found[0] == found[1] == found[2]


def test_what_cannot_happen_is_null_in_json(engine, quiet, tmp_path):
    """At temperature 0 all but one: the likeliest alternatives, and a forced token too."""
    row = next(_rows(1)) | {"temperature": 0, "logprobs": 2, "logprobs_mode": "processed"}
    target = tmp_path / "out.jsonl"
    rows = [row, {**row, "id": "forced", "forced_token_ids": [9]}]
    assert offline.run(engine, _write(tmp_path / "in.jsonl", rows), target, {}, quiet) == 0
    found = _read(target)
    for entry in found["r0"][0][0]["logprobs"]:
        assert list(entry.values()) == [0.0, None]
    assert found["forced"][0][0]["logprobs"][0]["9"] is None


def test_progress_says_what_became_of_the_drafts():
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    with offline.Report(console, total=2, done=0) as report:
        for accepted in (3, 1):
            request = RequestOutput("a", [5])
            request.metrics = RequestMetrics(
                decode_steps=4,
                verified_rows=8,
                accepted_rows=accepted,
                drafts=DraftCounts([4, accepted], [accepted, 0], [2.0, 0.5]),
            )
            report.add(request)
    (line,) = shown.getvalue().splitlines()
    assert line.startswith("2/2 requests, ")
    # 4 of 16 drafts fed stood, in 8 steps; places were expected to stand 4 and 1 times, and 4 and 0
    # of 8 and 4 judged ones did.
    assert line.endswith(
        "1.50 tokens a step, drafts accepted 0.50 0.00, 4.00 verified for each, "
        "calibration error 0.08"
    )


def test_a_run_resumes_where_it_was_cut(engine, quiet, tmp_path):
    source, target = _write(tmp_path / "in.jsonl", _rows(10)), tmp_path / "out.jsonl"
    assert offline.run(engine, source, target, {"seed": 9}, quiet) == 0
    whole, wanted = target.read_bytes(), _read(target)
    for cut in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1, len(whole)):
        target.write_bytes(whole[:cut])
        offline.run(engine, source, target, {"seed": 9}, quiet)
        assert _read(target) == wanted  # with invariant=True the texts too
    other = tmp_path / "other.jsonl"
    offline.run(engine, source, other, {"seed": 10}, quiet)
    assert _read(other) != wanted


def test_requests_of_a_batch_draw_different_noise(engine, quiet, tmp_path):
    row = next(_rows(1))
    rows = [{**row, "id": n, "max_tokens": 6} for n in range(3)]
    for defaults in ({}, {"seed": 5}):
        target = tmp_path / f"out{len(defaults)}.jsonl"
        offline.run(engine, _write(tmp_path / "in.jsonl", rows), target, defaults, quiet)
        ids = {tuple(outputs[0]["token_ids"]) for outputs, _ in _read(target).values()}
        assert len(ids) == 3


def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(
    engine, quiet, tmp_path, monkeypatch
):
    source, target = _write(tmp_path / "in.jsonl", _rows(30)), tmp_path / "out.jsonl"
    inner, calls = engine._loop._consume, []

    def interrupted(flight):
        calls.append(flight)
        if len(calls) == 14:
            raise KeyboardInterrupt
        inner(flight)

    monkeypatch.setattr(engine._loop, "_consume", interrupted)
    with pytest.raises(KeyboardInterrupt) as stopped:
        offline.run(engine, source, target, {}, quiet)
    monkeypatch.undo()
    kept = _read(target)
    assert 0 < len(kept) < 30
    assert f"{len(kept)} of 30 results are in {target}" in str(stopped.value)
    assert offline.run(engine, source, target, {}, quiet) == 0
    found, whole = _read(target), tmp_path / "whole.jsonl"
    assert {key: found[key] for key in kept} == kept
    offline.run(engine, source, whole, {}, quiet)
    assert found == _read(whole)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n', "line 2: id 1 appears twice"),
        ('{"id": 1, "prompt": "a"}\nnot json\n', "line 2: not JSON"),
        ('{"prompt": "a"}\n', 'line 1: expected an object with an "id"'),
        ("[1]\n", "line 1: expected an object"),
        ('{"id": true, "prompt": "a"}\n', 'an "id", text or a number'),
        ('{"id": NaN, "prompt": "a"}\n', 'an "id", text or a number'),
        ('{"id": 1e999, "prompt": "a"}\n', 'an "id", text or a number'),
        ('{"id": [1], "prompt": "a"}\n', 'an "id", text or a number'),
        ('{"id": 1, "prompt": "a"}\n{"id": 1.0, "prompt": "b"}\n', "line 2: id 1.0 appears twice"),
        ('{"id": 1, "stop": ' + NESTED + "\n", "line 1: nested too deeply"),
        (b'{"id": 1, "prompt": "\xff"}\n', "line 1: not JSON"),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_written(engine, quiet, tmp_path, text, message):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        offline.run(engine, source, target, {}, quiet)
    assert not target.exists()


def test_another_file_is_not_taken_for_results(engine, quiet, tmp_path):
    source, target = _write(tmp_path / "in.jsonl", _rows(2)), tmp_path / "out.jsonl"
    target.write_text('{"name": "something else"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: not a result of such a run"):
        offline.run(engine, source, target, {}, quiet)


def test_a_full_disk_is_named(engine, quiet, tmp_path, monkeypatch):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    monkeypatch.setattr(offline.cluster, "results", lambda _: full.open("w", encoding="utf-8"))
    source, target = _write(tmp_path / "in.jsonl", _rows(3)), tmp_path / "out.jsonl"
    with pytest.raises(OSError, match=f"No space left on device: '{target}'"):
        offline.run(engine, source, target, {}, quiet)
    assert len(engine._loop) == 0 and engine._loop.pages.used == 0


def test_the_window_of_open_requests_is_bounded(engine, quiet, tmp_path, monkeypatch):
    taken, most = set(), []
    add, forget = engine._loop.add, engine._loop._forget

    def enter(sample):
        taken.add(sample.number)
        most.append(len(taken))
        add(sample)

    def leave(sample):
        taken.discard(sample.number)
        forget(sample)

    monkeypatch.setattr(engine._loop, "add", enter)
    monkeypatch.setattr(engine._loop, "_forget", leave)
    source = _write(tmp_path / "in.jsonl", _rows(60))
    offline.run(engine, source, tmp_path / "out.jsonl", {}, quiet)
    assert len(_read(tmp_path / "out.jsonl")) == 60
    assert max(most) <= 4 * engine._loop.policy.slots


PROGRAM = """
    import sys
    import jax
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", sys.argv[4])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    from pathlib import Path
    from rich.console import Console
    from deepinfer_jax.runtime import offline
    from tests.runtime import small_model
    options = (("speculate", 0),)
    engine = small_model.engine(Path(sys.argv[1]), small_model.numerics(invariant=True), options)
    offline.run(engine, sys.argv[2], sys.argv[3], {}, Console(quiet=True))
"""


@pytest.mark.slow
def test_killed_at_any_moment(folder, tmp_path):
    """kill -9 at random times until a run ends by itself; then compare with an undisturbed one."""
    source, program = _write(tmp_path / "in.jsonl", _rows(400)), tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")

    def start(target):
        command = [sys.executable, str(program), str(folder), str(source), str(target)]
        return subprocess.Popen(
            [*command, str(tmp_path / "cache")], cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}
        )

    def size(path):
        return path.stat().st_size if path.exists() else 0

    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert start(whole).wait() == 0
    rng, kills = random.Random(3), 0
    while True:
        process, enough = start(target), size(target) + rng.randrange(1, 8000)
        while process.poll() is None and size(target) <= enough:
            time.sleep(0.002)
        if process.poll() is not None:
            assert process.returncode == 0
            break
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills >= 3
    assert _read(target) == _read(whole)
