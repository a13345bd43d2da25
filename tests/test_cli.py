"""The command line refuses bad input with one line and exit code 2, and prices layouts."""

import json
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax import cli
from deepinfer_jax.runtime import experts
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "a", "--json-schema", "FOLDER"], "Is a directory: 'FOLDER'"),
        (["generate", "--prompt", "a", "--ebnf", "FOLDER/file/b"], "Not a directory"),
        (["inspect", "FOLDER/" + "x" * 300], "File name too long"),
        (["layout", "balance", "FOLDER", "--shards", "2"], "Is a directory: 'FOLDER'"),
    ],
)
def test_what_the_system_refuses_is_a_line_too(arguments, message, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert cli.main([one.replace("FOLDER", str(tmp_path)) for one in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("deepinfer-jax: ")
    assert message.replace("FOLDER", str(tmp_path)) in line


TRACE = ["layout", "balance", "trace.npz", "--shards", "2"]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["bench", "traffic", "--rate", "0"], "--rate"),
        (["bench", "traffic", "--rate", "nan"], "--rate"),
        (["bench", "traffic", "--efficiency", "0"], "--efficiency"),
        (["bench", "traffic", "--requests", "0"], "--requests"),
        (["bench", "traffic", "--slots", "0"], "--slots"),
        (["bench", "traffic", "--texts", "-1"], "--texts"),
        (["bench", "decode", "--requests", "0"], "--requests"),
        (["bench", "decode", "--batch", "0"], "--batch"),
        (["bench", "decode", "--runs", "0"], "--runs"),
        (["bench", "slice", "decode", "--repeats", "0"], "--repeats"),
        (["bench", "kernels", "--runs", "-3"], "--runs"),
        ([*TRACE[:3], "--shards", "0"], "--shards"),
        ([*TRACE, "--interval", "0"], "--interval"),
        ([*TRACE, "--window", "0"], "--window"),
        ([*TRACE, "--spare", "-1"], "--spare"),
        (["layout", "compare", "ep", "--devices", "h200x8", "--batch", "0"], "--batch"),
    ],
)
def test_numbers_that_mean_nothing_are_usage_errors(arguments, option, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: expected a" in line and repr(arguments[-1]) in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "traffic", "--prompt", "0"], "--prompt 0: expected at least 1"),
        (["bench", "traffic", "--new", "1k,2k"], "--new 1k,2k: expected one number"),
        (["bench", "slice", "decode", "--rows", "1,0"], "--rows 1,0: expected at least 1"),
        (["layout", "compare", "ep", "--devices", "h200x8", "--context", "x"], "--context x: "),
    ],
)
def test_texts_of_numbers_are_refused_by_name(arguments, message, capsys) -> None:
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_unknown_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["serve"])
    assert stopped.value.code == 2


def test_inspect_names_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(TINY)]) == 0
    shown = capsys.readouterr().out
    assert "layers" in shown
    assert "990" in shown  # tensors


def test_inspect_gives_the_bytes_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["inspect", str(TINY), "--json", "--layout", "ep"]
    found = []
    for size in (2, 4):
        assert cli.main([*given, "--axis", f"expert={size}"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["bytes"] > found[0]["per_device"] > found[1]["per_device"] > 0
    assert cli.main(["inspect", str(TINY), "--axis", "expert=2"]) == 2
    assert "--axis: give --layout too" in capsys.readouterr().err


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


def _npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros((3, 4), np.int64))


def _text(path: Path) -> None:
    path.write_text("layer_3", encoding="utf-8")


def _cut_off(path: Path) -> None:
    _arrays(layer_3=np.arange(4000).reshape(-1, 4))(path)
    path.write_bytes(path.read_bytes()[:-30])


def _broken(path: Path) -> None:
    _arrays(layer_3=np.arange(4000).reshape(-1, 4))(path)
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)
    path.write_bytes(data)


def _arrays(**arrays: np.ndarray):
    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, **arrays)

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_npy, "not an npz file"),
        (_text, "not an npz file"),
        (_cut_off, "not an npz file"),
        (_broken, "not a file of recorded experts"),
        (_arrays(), "expected arrays layer_N, found none"),
        (_arrays(layer_x=np.zeros((1, 4), np.int64)), "expected arrays layer_N, found layer_x"),
        (_arrays(layer_3=np.zeros(4, np.int64)), r"layer_3: int64\[4\]; expected integers"),
        (_arrays(layer_3=np.zeros((1, 4))), r"layer_3: float64\[1, 4\]; expected integers"),
        (_arrays(layer_3=np.array([[{}]])), "not a file of recorded experts"),
    ],
)
def test_another_file_is_no_trace(write, message, tmp_path: Path) -> None:
    write(tmp_path / "trace.npz")
    with pytest.raises(ValueError, match=message) as refused:
        experts.load(tmp_path / "trace.npz")
    assert str(refused.value).startswith(f"{tmp_path / 'trace.npz'}: ")
    assert len(str(refused.value).splitlines()) == 1


def test_convert_then_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "converted"
    assert cli.main(["convert", str(TINY), str(target), "--quiet"]) == 0
    assert cli.main(["inspect", str(target)]) == 0
    assert "990" in capsys.readouterr().out
