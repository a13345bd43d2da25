"""`bench decode`: what its rows say, and a whole run on the small model."""

import json

import pytest

from deepinfer_jax.runtime import bench
from deepinfer_jax.runtime.outputs import DraftCounts
from tests.runtime import small_model


def _row(name, batch, seconds, device=None, drafts=None):
    return bench.Row(name, batch, 600, seconds, 30, device, drafts or DraftCounts(), 1.5)


def test_a_row_says_rates_spread_and_the_share_of_the_device():
    row = _row("plain", 8, [3.0, 2.0, 6.0], 2.5, DraftCounts([4, 2], [3, 1], [2.0, 1.0]))
    assert (row.rate, row.rates) == (200.0, [100.0, 200.0, 300.0])
    text = row.text()
    assert "200.0 tokens/s (100.0 to 300.0)" in text and "engine/device 1.200" in text
    assert "1.50 tokens a step, drafts accepted 0.75 0.50" in text
    assert json.loads(json.dumps(row.plain()))["acceptance"] == [0.75, 0.5]


def test_ratios_between_rows(capsys):
    rows = [_row("plain", 1, [8.0]), _row("plain", 32, [1.0]), _row("invariant", 32, [1.5])]
    assert bench.summary(rows) == [
        "batch 32 / batch 1: 8.0x",
        "invariant=True: 1.50x the time at batch 32",
    ]
    assert bench.report(iter(rows), as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("invariant=True: 1.50x")


@pytest.mark.slow
def test_a_run(folder, capsys):
    rows = bench.decode(
        lambda _: str(folder),
        bench.Load(4, 8, 6, 2),
        batches=[2, 1],
        numerics=small_model.numerics(),
        breakdown=True,
        speculate=0,
    )
    assert bench.report(rows, as_json=True) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["name"], row["batch"]) for row in found] == [
        ("plain", 1),
        ("plain", 2),
        ("invariant", 2),
    ]
    for row in found:
        assert row["generated"] == 24 and len(row["seconds"]) == 2
        assert row["steps"] >= 4 / row["batch"] * 6 and row["device"] > 0
