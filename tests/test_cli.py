"""The command line refuses bad input with one line and exit code 2, and prices layouts."""

import json
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax import cli
from deepinfer_jax.runtime.experts import Counts

TINY = Path(__file__).parent / "golden" / "v41-tiny"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "nowhere", "--prompt", "a"], "nowhere"),
        (["generate", "--model", str(TINY)], "--prompt"),
        (["generate", "--model", str(TINY), "--input", "a.jsonl"], "--output"),
        (
            ["generate", "--model", str(TINY), "--prompt", "a", "--temperature", "nan"],
            "temperature",
        ),
        (["generate", "--model", str(TINY), "--prompt", "a", "--numerics", "fp16"], "fp16"),
        (["generate", "--model", str(TINY), "--prompt", "a", "--replay", "half"], "half"),
        (["layout", "diff", "ep", "nowhere"], "nowhere"),
        (["layout", "show", "ep", "--axis", "expert"], "NAME=SIZE"),
        (["generate", "--prompt", "a", "--axis", "expert=2"], "--axis: give --layout too"),
        (["generate", "--prompt", "a", "--prefix-restore", "replay"], "give --prefix-cache too"),
        (["layout", "show", "ep", "--axis", "ring=8"], "ring"),
        (["inspect", "nowhere"], "nowhere"),
        (["convert", "nowhere", "elsewhere"], "nowhere"),
    ],
)
def test_refused_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert message in error


def test_unknown_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["serve"])
    assert stopped.value.code == 2


def test_inspect_names_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(TINY)]) == 0
    shown = capsys.readouterr().out
    assert "layers" in shown
    assert "990" in shown  # tensors


def test_layout_show_prints_local_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["layout", "show", "ep", "--axis", "expert=8", "--depth", "5"]) == 0
    assert "uint8[48, 2," in capsys.readouterr().out


def test_layout_balance_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counts(8)
    routes = np.array([[[0, 1], [0, 2], [0, 3]]], np.int32)
    for _ in range(12):
        counts.add({3: routes}, [(0, 3)])
    counts.save(tmp_path / "trace.npz")
    given = ["layout", "balance", str(tmp_path / "trace.npz"), "--shards", "2", "--spare", "2"]
    assert cli.main([*given, "--interval", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["layers"]["3"]
    # Six tokens a step: four on the shard that has experts 2 and 3; three replicas of 0 are even.
    assert found["none"]["cost"] == 12 * 4.0
    assert found["sum_of_max"]["cost"] == 4 * 4.0 + 8 * 3.0
    assert cli.main(given) == 0 and "perfect balance" in capsys.readouterr().out


def test_convert_then_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "converted"
    assert cli.main(["convert", str(TINY), str(target), "--quiet"]) == 0
    assert cli.main(["inspect", str(target)]) == 0
    assert "990" in capsys.readouterr().out
