"""Prefix cache: the same bits wherever a prefix comes from, right counts, damage is noticed.

What the host does (sharing, waiting, eviction, tiers) is tested with random traffic in
`test_scheduler.py`.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import deepinfer_jax as dj
from converters import synthetic
from deepinfer_jax.runtime.pages import PAGE, Pages
from deepinfer_jax.runtime.plans import Policy
from deepinfer_jax.runtime.prefix_files import Files
from deepinfer_jax.runtime.prefix_types import PrefixPolicy
from tests.runtime import small_model
from tests.runtime.runs import measured, same
from tests.runtime.simulated import Engine, Request

FREE = dj.SamplingParams(
    temperature=0.8, repetition_penalty=1.2, max_tokens=12, logprobs=0, seed=5, ignore_eos=True
)
GRAMMAR = dj.SamplingParams(
    temperature=0.8, max_tokens=20, logprobs=0, seed=5, structured={"regex": "[a-c]{3,9}"}
)
PARAMS = [FREE, FREE, GRAMMAR, FREE, GRAMMAR]
WARM = [256, 256, 384, 256, 256]  # tokens found when all of the work has been seen


@pytest.fixture(scope="module")
def work(prompts):
    """Prompts of 300 and more ids: two begin alike for 200, two for 280; one is another."""
    base, other, more = prompts(300, 320, 130, seed=9)
    return [base, base[:200] + other[200:], base[:280] + more, base[:280] + other[:40], other]


@pytest.fixture(scope="module")
def cold(llm, work):
    """Without a prefix cache."""
    return llm(invariant=True).generate(work, PARAMS, strict=True)


@pytest.fixture
def run(llm, work, cold):
    """`run(engine)`: the work again; fails if a bit has changed; the tokens found."""

    def again(engine):
        outs = engine.generate(work, PARAMS, strict=True)
        same(cold, outs)
        return [out.metrics.cached_tokens for out in outs]

    return again


def evict(engine):
    """All pages that nobody holds leave the device."""
    engine._loop.pages.evict(0)
    assert not engine._loop.pages._kept


def test_warm_from_the_device_and_from_the_host(llm, run):
    engine = llm({"prefix_cache": PrefixPolicy(every=2)}, invariant=True)
    assert run(engine) == [0, 0, 256, 256, 0]
    assert run(engine) == WARM
    evict(engine)
    assert run(engine) == WARM
    counts = engine._loop.prefix.counts
    assert (counts.requests, counts.hits, counts.damaged) == (15, 12, 0)
    assert counts.found == 512 + 2 * sum(WARM)
    evict(engine)
    engine._loop.reset()  # as after an interrupt: the device's state is a new one
    assert run(engine) == WARM


def test_warm_from_files(llm, run, tmp_path):
    policy = PrefixPolicy(every=2, host_bytes=1, folder=tmp_path)
    engine = llm({"prefix_cache": policy}, invariant=True)
    run(engine)
    evict(engine)
    assert run(engine) == WARM  # what is on its way to the host cannot leave it yet
    evict(engine)
    engine.generate([[5]], FREE)
    assert not engine._loop.prefix._host and len(list(tmp_path.rglob("*.page"))) == 6
    assert run(engine) == WARM
    with pytest.raises(ValueError, match="prefix_cache has no folder"):
        llm({"prefix_cache": PrefixPolicy(every=2)}, invariant=True).save_prefixes()


def test_a_later_engine_finds_what_was_saved_unless_it_is_damaged(llm, run, tmp_path):
    policy = PrefixPolicy(every=2, folder=tmp_path)
    engine = llm({"prefix_cache": policy, "seed": 1}, invariant=True)
    run(engine)
    engine.save_prefixes()
    assert run(engine) == WARM
    other = llm({"prefix_cache": policy, "seed": 2}, invariant=True)
    assert run(other) == WARM
    for file in tmp_path.rglob("*.page"):
        data = bytearray(file.read_bytes())
        data[-7] ^= 1
        file.write_bytes(data)
    last = llm({"prefix_cache": policy, "seed": 3}, invariant=True)
    assert run(last) == [0, 0, 256, 256, 0]
    assert last._loop.prefix.counts.damaged > 0
    assert run(last) == WARM


def test_samples_of_one_prompt_share_it(llm, work):
    params = dj.SamplingParams(n=3, temperature=1.0, max_tokens=8, logprobs=0, seed=2)
    plain = llm(invariant=True).generate(work[:1], params, strict=True)
    engine = llm({"prefix_cache": PrefixPolicy(every=3)}, invariant=True)
    shared = engine.generate(work[:1], params, strict=True)
    same(plain, shared)
    assert shared[0].metrics.cached_tokens == 2 * 256


@pytest.mark.slow
def test_what_needs_every_row_computes_every_row(llm, prompts):
    """Prompt log-probabilities, captures, forced routes."""
    engine, work = llm({"prefix_cache": True}, invariant=True), prompts(200)
    engine.generate(work, FREE, strict=True)
    (out,) = engine.generate(work, FREE, strict=True)
    assert out.metrics.cached_tokens == 128
    scored = engine.score(work)[0]
    assert len(scored.logprobs) == 200 and None not in scored.logprobs[1:]
    (out,) = engine.generate(work, FREE, capture=("routes", "index_topk"), strict=True)
    assert out.metrics.cached_tokens == 0 and len(out.prompt_captured["routes"][0]) == 200


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["mask", "compact"])
def test_bounded_replay(replay, llm, work):
    """The decoder half's last rows are computed anew: a prefix ends before them."""
    plain = llm(invariant=True, replay=replay).generate(work, PARAMS, strict=True)
    options = {"prefix_cache": PrefixPolicy(every=1)}
    engine = llm(options, invariant=True, replay=replay)
    same(plain, engine.generate(work, PARAMS, strict=True))
    again = engine.generate(work, PARAMS, strict=True)
    same(plain, again)
    keep = small_model.KEEP
    found = [out.metrics.cached_tokens for out in again]
    assert found == [(len(ids) - keep) // PAGE * PAGE for ids in work]


def _replay(tokens: int = 128, states: int = 0) -> PrefixPolicy:
    return PrefixPolicy(every=2, restore="replay", replay=tokens, states=states)


def test_rings_rebuilt_by_replay_where_windows_reach_no_further(llm, run):
    """5 layers of window 16 look 75 tokens back, so 128 tokens give the same bits: n-grams across
    their border, drafts and penalties too. What is computed again is not counted as found."""
    engine = llm({"prefix_cache": _replay()}, invariant=True)
    assert run(engine) == [0, 0, 128, 128, 0]
    again = [found - 128 for found in WARM]
    assert run(engine) == again
    evict(engine)
    before = engine._loop.prefix.counts.replayed
    assert run(engine) == again
    assert engine._loop.prefix.counts.replayed - before == 128 * len(WARM)
    assert not engine._loop.prefix._states


def test_replay_uses_states_that_are_there(llm, run):
    engine = llm({"prefix_cache": _replay(16, states=9)}, invariant=True)
    assert run(engine) == [0, 0, 256, 256, 0] and run(engine) == WARM
    assert engine._loop.prefix.counts.replayed == 0


def test_the_difference_of_a_short_replay(llm, prompts):
    """Of random weights, one window before the end. most: about four times what was measured
    (1.5e-1); of trained ones see test_replay.py."""
    engines = [llm({"prefix_cache": one}, invariant=True) for one in (False, _replay(16))]
    ids = prompts(520, seed=11)[0]
    work = [ids[:400] + ids[start:end] for start, end in ((400, 440), (440, 457), (457, 517))]
    found = measured(*engines, work, replay=16, ends=(384, 384, 384))
    assert 0 < found.worst <= 0.6


def test_replay_refuses(llm):
    with pytest.raises(ValueError, match="replay = 8; expected at least this model's window, 16"):
        llm({"prefix_cache": _replay(8)})
    with pytest.raises(ValueError, match="replay = 20; expected a multiple of 8"):
        _replay(20)
    with pytest.raises(ValueError, match="restore = 'rings'; expected state or replay"):
        PrefixPolicy(restore="rings")
    with pytest.raises(ValueError, match="states at least 1"):
        PrefixPolicy(states=0)


def test_other_weights_find_nothing_of_the_old(llm, work, folder, tmp_path):
    changed = synthetic.write(tmp_path / "changed", small_model.CONFIG, seed=8)
    options = {"prefix_cache": PrefixPolicy(every=2), "seed": 4}
    engine = llm(options, invariant=True)
    first = engine.generate(work[:2], FREE, strict=True)
    engine.swap_weights(changed)
    second = engine.generate(work[:2], FREE, strict=True)
    assert [out.metrics.cached_tokens for out in second] == [0, 0]
    assert [o.outputs[0].token_ids for o in first] != [o.outputs[0].token_ids for o in second]
    engine.swap_weights(folder)
    same(first, engine.generate(work[:2], FREE, strict=True))
    with pytest.raises(ValueError, match="its config is not the one of the weights in use"):
        engine.swap_weights(synthetic.write(tmp_path / "other", synthetic.draw_config(1), seed=1))


def _traffic(folder, **options):
    """Requests with texts in common over a simulated device of few pages; the engine after them."""
    prefix = PrefixPolicy(every=1, folder=folder, **options)
    engine = Engine(Policy(2, (2,), ((2, 4), (2, 16))), Pages(9, 2, 8, 8), prefix=prefix)
    for number in range(8):
        engine.add(number, Request(30 + number, 4, 4, shared=24, text=number % 3))
    engine.run()
    for number, request in engine.requests.items():
        assert len(engine.outputs[number]) == request.new
    return engine


def test_no_room_on_the_host_leaves_the_files(tmp_path):
    engine = _traffic(str(tmp_path), host_bytes=0)  # a folder may be text
    assert list(tmp_path.rglob("*.page")) and not engine.device.prefix._host
    engine.device.prefix.save()
    kept = engine.device.prefix._nodes
    written = {file.stem for file in tmp_path.rglob("*.page")}
    assert {key.hex() for key in kept} <= written and len(written) >= 3 * 3


def test_a_folder_that_cannot_be_written_costs_no_request(tmp_path, monkeypatch):
    """A disk that is full after three pages: what they hold is used, what came of the fourth is
    removed, and nobody tries again."""
    write, tried = Path.write_bytes, []

    def full(path, data):
        tried.append(path)
        if len(tried) > 3:
            write(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(UserWarning, match="prefix cache: .* No space left .* no more pages") as told:
        _traffic(tmp_path, host_bytes=1)
    assert len(told) == 1 and len(tried) == 4
    assert [file.suffix for file in tmp_path.rglob("*") if file.is_file()] == [".page"] * 3


def test_files_of_killed_runs_are_removed_and_foreign_ones_left(tmp_path):
    like = (jax.ShapeDtypeStruct((4,), np.float32), jax.ShapeDtypeStruct((99,), np.float32))
    files = Files(tmp_path, 1 << 20, like)
    page, rings = np.arange(4, dtype=np.float32), np.ones(99, np.float32)
    files.write(b"\x0a", page, None)
    files.write(b"\x0b", page, rings)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"0c.{ended.pid}", f"0d.{os.getpid()}", f"0e.{1 << 70}", f"0f.{os.getppid()}"):
        (tmp_path / name).write_bytes(b"half")
    for name in ("x.page", "0A.page", "notes.txt", f"notes.{ended.pid}"):
        (tmp_path / name).write_text("mine", encoding="utf-8")
    (tmp_path / "10.page").mkdir()
    again = Files(tmp_path, 1 << 20, like)
    left = {item.name for item in tmp_path.iterdir()}
    mine = {"x.page", "0A.page", "notes.txt", f"notes.{ended.pid}", "10.page"}
    assert left == {"0a.page", "0b.page", f"0f.{os.getppid()}"} | mine
    assert set(again._held) == {b"\x0a", b"\x0b"}
    assert again._used == sum((tmp_path / name).stat().st_size for name in ("0a.page", "0b.page"))
    assert again.has_state(b"\x0b") and not again.has_state(b"\x0a")
    content, state = again.read(b"\x0b")
    np.testing.assert_array_equal(content, page)
    np.testing.assert_array_equal(state, rings)


def test_two_hundred_questions_after_one_text():
    """2,000 tokens in common: at most 15% of all prompt tokens are computed."""
    rng = np.random.default_rng(0)
    policy = Policy(8, (8,), ((4, 128), (1, 512)))
    engine = Engine(policy, Pages(8 * 20, 8, 20, PAGE), prefix=PrefixPolicy())
    for number in range(200):
        engine.add(number, Request(2000 + int(rng.integers(20, 120)), 4, 4, shared=2000))
    engine.run()
    computed = sum(chunk.count for step in engine.steps if step.prefill for chunk in step.work)
    total = sum(request.prompt for request in engine.requests.values())
    print(f"{computed / total:.1%} of {total} prompt tokens computed")
    assert computed <= 0.15 * total
