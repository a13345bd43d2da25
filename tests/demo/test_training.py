"""A stage's bookkeeping and dropout, without the model."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.demo import drafting, run
from deepinfer_jax.demo.dropout import Dropout


class Cut(Exception):
    """The process ended."""


@pytest.fixture
def folder(tmp_path) -> run.Run:
    """A run over streams of numbers, with the tokenizer's files left out."""
    made = run.Run.__new__(run.Run)
    made.folder, made.seed, made.batch, made.steps = tmp_path, 0, 4, 2
    made.train = {kind: np.arange(3000, dtype=np.uint16) for kind in run.KINDS}
    return made


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Seconds that only a step lets pass."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(run.time, "monotonic", lambda: now.seconds)
    return now


def test_a_stage_that_is_cut_goes_on_and_gives_the_best_weights(folder, clock):
    """40 s a call of 2 steps, 200 s: held-out nats 3, 2 | cut | 1, 4, 5 of which 1 is the best."""
    nats, kept, shapes = iter((3.0, 2.0, 1.0, 4.0, 5.0)), [], []

    def steps(params, state, batches, key, share):
        shapes.append(batches.shape)
        clock.seconds += 40.0
        return {"w": params["w"] + 1}, state, {"loss": jnp.float32(0)}

    def call(calls):
        def limited(*args):
            if len(shapes) == calls:
                raise Cut
            return steps(*args)

        return run.stage(
            folder,
            "backbone",
            lambda: {"w": jnp.zeros((2,))},
            0.75,
            limited,
            200.0,
            lambda params: {"bible": next(nats)},
            lambda best: kept.append(float(best["w"][0])),
        )

    with pytest.raises(Cut):
        call(2)
    assert float(call(5)["w"][0]) == 3.0
    assert kept == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert shapes == [(2, 4, run.LENGTH + 1)] * 5
    assert float(call(5)["w"][0]) == 3.0  # over: nothing more is run
    lines = (folder.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    checks = [line for line in map(json.loads, lines) if "check" in line]
    assert [line["step"] for line in checks] == [2, 4, 6, 8, 10]


def test_a_drafter_of_another_backbone_is_begun_anew(folder, clock, monkeypatch):
    """20 s a call, 40 s: two calls for each backbone, none for one that has its drafter."""
    calls = []

    def steps(cfg, draft, state, backbone, classes, batches, key, share):
        clock.seconds += 20.0
        calls.append(float(draft["draft/w"][0]))
        return {"draft/w": draft["draft/w"] + backbone["w"]}, state, {"loss": jnp.float32(0)}

    folder.cfg = folder.classes = None
    monkeypatch.setattr(drafting, "initial", lambda *_: {"draft/w": jnp.zeros(2), "w": jnp.ones(2)})
    monkeypatch.setattr(drafting, "draft_steps", steps)

    def train(backbone):
        return float(
            drafting.train(folder, {"w": backbone}, 40.0, lambda draft: None)["draft/w"][0]
        )

    first, second = jnp.asarray([1.0, 2.0]), jnp.asarray([3.0, 2.0])
    assert [train(first), train(first), train(second), train(second)] == [2.0, 2.0, 6.0, 6.0]
    assert calls == [0.0, 1.0, 0.0, 3.0]


def test_dropout_keeps_the_mean_and_drops_rows_whole():
    drop = Dropout(jax.random.key(0), rate=0.3, memory=0.5)
    x = jnp.ones((400, 6, 32))
    once, again, rows = np.asarray(drop(x)), np.asarray(drop(x)), np.asarray(drop.rows(x))
    for y, rate in ((once, 0.3), (rows, 0.5)):
        assert np.mean(y == 0) == pytest.approx(rate, abs=0.05)
        assert np.mean(y) == pytest.approx(1.0, abs=0.1)
    assert (once != again).any()
    assert (rows == rows[:, :, :1]).all() and (once != once[:, :, :1]).any()
