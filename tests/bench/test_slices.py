"""`bench slice` and `bench plot` from end to end on a small model, and what they refuse."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from deepinfer_jax import cli, shipped
from deepinfer_jax.bench import counts, drawn, measure, plots, slices, sweeps, values
from deepinfer_jax.bench.counts import Rows
from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.runtime import packing
from deepinfer_jax.spec import Param
from tests.runtime import small_model

RELEASED = ModelConfig.from_json(shipped.find("models", "v41-flash"))
FEW = ["--repeats", "3", "--burst", "2", "--side", "64"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("config") / "config.json"
    three = {
        "num_hidden_layers": 3,
        "compress_ratios": [0, 2, 1, 0],
        "index_source_layer_ids": [1, 2],
        "dspark_target_layer_ids": [2],
    }
    raw = {**small_model.CONFIG, "text_config": {**small_model.TEXT, **three}}
    file.write_text(json.dumps(raw))
    return str(file)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_a_decode_sweep_profiled(config: str, tmp_path: Path, capsys) -> None:
    out = str(tmp_path / "decode.jsonl")
    words = ["bench", "slice", "decode", "--model", config, "--ranks", "2", "--requests", "3"]
    words += ["--rows", "3", "--context", "128", "--acceptance", "0.5,0.5,0.5", *FEW, "--json"]
    assert cli.main([*words, "--out", out, "--profile", str(tmp_path / "profile")]) == 0
    (found,) = lines(capsys)
    assert sweeps.read([out]) == [found]
    assert found["rows"] == {"sequences": 3, "width": 3, "start": 125}
    assert found["experts_held"] == [2, 4] and found["network"] == "left out"
    assert found["draft_block"] == small_model.BLOCK
    median = found["seconds"]["median"]
    assert len(found["seconds"]["samples"]) == 3 and found["seconds"]["least"] <= median
    assert 0 < found["dispatch"]["least"] <= found["dispatch"]["most"] <= found["seconds"]["most"]
    assert found["tokens_per_turn"] == pytest.approx(3 * 1.75)
    assert found["tokens_s"] == pytest.approx(3 * 1.75 / median)
    reached, best = found["reached"], found["ceilings"]
    flop = sum(found["needed"]["flop"].values())
    assert reached["of_arithmetic"] == pytest.approx(flop / median / best["bf16"])
    assert best["fp8"] is None and best["copy"] > 0
    assert found["idle"]["runs"] == 2
    assert sum(line["share"] for line in found["ranking"]) == pytest.approx(1)
    assert {one["op"] for one in found["kernels"]} >= {"mla_attention", "grouped_gemm"}
    environment = found["environment"]
    assert environment["platform"] == "cpu" and environment["clocks"] == "as found, not read"
    assert found["layout"] == "single" and found["numerics"]["act_quant"]


@pytest.mark.slow
def test_a_prefill_sweep(config: str, tmp_path: Path, capsys) -> None:
    out = str(tmp_path / "prefill.jsonl")
    words = ["bench", "slice", "prefill", "--model", config, "--ranks", "2", "--tokens", "64"]
    assert cli.main([*words, "--prompt", "32", *FEW, "--out", out]) == 0
    shown = capsys.readouterr().out
    assert "prefill, 64 tokens in prompts of 32" in shown and "tokens/s" in shown
    (found,) = sweeps.read([out])
    assert found["numerics"]["replay"] == "compact"
    assert found["tokens_s"] == pytest.approx(64 / found["seconds"]["median"])


def test_a_layer_slice(config: str, capsys) -> None:
    words = ["bench", "slice", "decode", "--model", config, "--layers", "1,2", "--ranks", "2"]
    words += ["--requests", "4", "--rows", "2", "--context", "128", "--invariant", *FEW, "--json"]
    assert cli.main(words) == 0
    (found,) = lines(capsys)
    assert found["numerics"]["invariant"] and found["name"].endswith(", invariant")
    assert found["slice"] == "layers" and found["layers"] == [1, 2]
    assert found["experts_held"] == 4, "a layer slice holds all experts"
    assert found["tokens_per_turn"] is None and found["tokens_s"] is None
    assert found["reached"]["rows_s"] == pytest.approx(8 / found["seconds"]["median"])


def test_points_compile_together_and_run_in_turn(config: str) -> None:
    """Each in a process of its own; one that ends early costs its own point alone."""
    words = ["bench", "slice", "decode", "--model", config, "--layers", "1", "--ranks", "2"]
    words += ["--requests", "2,3", "--rows", "1", "--context", "128", *FEW, "--jobs", "2", "--json"]
    command = [sys.executable, "-m", "deepinfer_jax.cli", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["rows"]["sequences"] for record in found] == [2, 3]
    assert all(len(record["seconds"]["samples"]) == 3 for record in found)
    broken = subprocess.run([*command, "--kernels", "hopper"], capture_output=True, text=True)
    assert broken.returncode == 1
    found = [json.loads(line) for line in broken.stdout.splitlines()]
    assert [record["seconds"] for record in found] == [None, None]
    assert all("its process ended early" in record["error"] for record in found)
    assert "NotImplementedError" in broken.stderr


def test_what_is_only_traced_is_not_compiled_first(capsys) -> None:
    assert cli.main(["bench", "slice", "decode", "--trace", "--jobs", "2"]) == 2
    assert "--jobs: --trace compiles nothing" in capsys.readouterr().err


def test_the_released_width_is_traced(capsys) -> None:
    words = ["bench", "slice", "decode", "--trace", "--layers", "20,24", "--requests", "256"]
    assert cli.main([*words, "--rows", "1", "--json"]) == 0
    (found,) = lines(capsys)
    assert found["seconds"] is None
    need = sum(found["needed"]["flop"].values())
    assert found["traced"]["flop"] == pytest.approx(need, rel=0.03)
    assert 14e9 < found["traced"]["held_bytes"] < 30e9, "two layers of 7.2 GB and a cache"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["prefill", "--tokens", "64k"],
        ["decode", "--requests", "256", "--rows", "6"],
        ["prefill", "--layers", "20,21", "--tokens", "64k"],
    ],
    ids=" ".join,
)
def test_every_slice_fits_one_device(words: list[str], capsys) -> None:
    assert cli.main(["bench", "slice", *words, "--trace", "--json"]) == 0
    (found,) = lines(capsys)
    assert found["traced"]["held_bytes"] + found["traced"]["peak_bytes"] < 130 * 2**30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decode", "--ranks", "7"], "divisor of n_routed_experts = 384"),
        (["decode", "--layers", "3,2"], "increasing layer numbers"),
        (["decode", "--layers", "40"], "no layer 40"),
        (["decode", "--rows", "7", "--requests", "1"], "at most 6"),
        (["decode", "--rows", "3", "--acceptance", "0.5"], "3 rows verify 2"),
        (["decode", "--acceptance", "2"], "between 0 and 1"),
        (["decode", "--context", "eight"], "--context eight"),
        (["prefill", "--tokens", "5000"], "multiple of the prompt"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str, capsys) -> None:
    assert cli.main(["bench", "slice", *words, "--trace"]) == 2
    assert message in capsys.readouterr().err


def test_a_rank_has_its_share() -> None:
    cfg, weights = slices.share(RELEASED, 64)
    assert weights.layers[7].ffn.w13.values.shape[0] == 6
    assert weights.layers[7].ffn.gate.shape[0] == 384, "the router knows every expert"
    assert weights.draft.stages[0].ffn.w13.values.shape[0] == 3, "as many as a row takes"
    for here, all_rows in zip(
        cfg.engram_num_embeddings, RELEASED.engram_num_embeddings, strict=True
    ):
        assert here == pytest.approx(all_rows / 64, rel=0.01)
    alone, _ = slices.share(RELEASED, 1)
    assert alone.engram_num_embeddings == RELEASED.engram_num_embeddings


def test_a_point_that_does_not_fit_is_a_record() -> None:
    def full(_: object) -> dict:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    part = sweeps.Part(RELEASED, Numerics(), (21,))
    points = [sweeps.Point("one", part, "decode", Rows(1, 1, 127), False, 4.0)]
    (found,) = sweeps.records(sweeps.measured(points, full), {})
    assert found["error"].startswith("RESOURCE_EXHAUSTED") and found["tokens_s"] is None
    assert "failed: RESOURCE_EXHAUSTED" in sweeps.text(found)
    assert sweeps.report([found], None, False) == 1

    def broken(_: object) -> dict:
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        list(sweeps.measured(points, broken))


def test_a_turn_that_computes_less_than_asked_is_an_error() -> None:
    one = slices.rank(RELEASED, 64, Numerics(), "decode", Rows(2, 3, 125))
    failed = np.zeros(2, np.bool_)

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Output:
        verified: np.ndarray
        failed: np.ndarray

    def check(verified: list[int], failed: np.ndarray) -> None:
        measure._check(one, packing.pack(Output(np.array(verified, np.int32), failed)))

    check([2, 2], failed)
    with pytest.raises(ArithmeticError, match="3 draft rows were fed, asked for 4"):
        check([2, 1], failed)
    with pytest.raises(ArithmeticError, match="no valid distribution"):
        check([2, 2], ~failed)


@pytest.mark.parametrize("side", [10, 300], ids=["by the host", "on the device"])
def test_drawn_values_are_not_zero_and_repeat(side: int) -> None:
    tree = {
        "w": Param((side, 300), "float8_e4m3fn", (None, None)),
        "s": Param((side, 300), "float8_e8m0fnu", (None, None), "exponent", 0.125),
        "b": Param((side, 300), "uint8", (None, None), "bits"),
        "z": Param((side, 300), "int32", (None, None), "zeros"),
        "given": np.arange(3),
    }
    found, again = drawn.materialise(tree), drawn.materialise(tree)
    for name, leaf in found.items():
        assert np.array_equal(
            np.asarray(leaf).view(np.uint8), np.asarray(again[name]).view(np.uint8)
        )
    wide = np.asarray(found["w"]).astype(np.float32)
    assert abs(wide.mean()) < 0.1 and 0.9 < wide.std() < 1.1
    assert set(np.asarray(found["s"]).astype(np.float32).ravel().tolist()) == {0.0625, 0.125}
    assert len(np.unique(np.asarray(found["b"]))) == 256
    assert not np.asarray(found["z"]).any()
    other = np.asarray(drawn.materialise(tree, seed=1)["b"])
    assert not np.array_equal(other, np.asarray(found["b"]))


def test_large_stacks_are_drawn_matrix_by_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "LARGE", 1 << 16)
    stack = Param((3, 150, 160), "uint8", (None, None, None), "bits")
    found = np.asarray(drawn.materialise(stack))
    assert found.shape == stack.shape and len(np.unique(found)) == 256
    assert not np.array_equal(found[0], found[1])


def test_the_front_is_what_nothing_beats() -> None:
    points = [(1.0, 9.0), (2.0, 8.0), (2.0, 5.0), (3.0, 6.0), (1.0, 4.0)]
    assert plots.front(points) == [(1.0, 9.0), (2.0, 8.0), (3.0, 6.0)]
    with pytest.raises(ValueError, match="--acceptance"):
        plots.draw([{"phase": "decode", "tokens_s": None}], "none.png")


def test_a_picture_of_records(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot'")
    decode = [
        {"phase": "decode", "rows": {"width": width, "sequences": many}, "tokens_s": many * 9.0}
        for width in (1, 3)
        for many in (16, 64)
    ]
    assert plots.decode_points(decode)[3] == [(9.0, 144.0), (9.0, 576.0)]
    prefill = {"phase": "prefill", "tokens_per_turn": 4096.0, "tokens_s": 9e4}
    prefill["reached"] = {"of_arithmetic": 0.4}
    one, two = tmp_path / "decode.jsonl", tmp_path / "prefill.jsonl"
    one.write_text("".join(json.dumps(record) + "\n" for record in decode))
    two.write_text(json.dumps(prefill) + "\n")
    for files in ([one], [two], [one, two]):
        png = tmp_path / "some.png"
        assert cli.main(["bench", "plot", *map(str, files), "--png", str(png)]) == 0
        assert png.read_bytes().startswith(b"\x89PNG")
        png.unlink()
    two.write_text("no json\n")
    with pytest.raises(ValueError, match=r"prefill.jsonl:1: no JSON"):
        sweeps.read([str(two)])


def test_rates_are_of_what_is_needed() -> None:
    one = slices.layers(RELEASED, [21], Numerics(), Rows(256, 1, 8191))
    best = {"bf16": 800e12, "copy": 4.2e12, "fp8": None}
    found = measure.reached(one, 1e-3, best)
    assert found["bound"] == "memory"
    assert found["of_memory"] == pytest.approx(one.needed.moved / 1e-3 / 4.2e12)
    assert found["of_floor"] == found["of_memory"]
    many = slices.layers(RELEASED, [21], Numerics(), Rows(1, 4096))
    assert measure.reached(many, 0.1, best)["bound"] == "arithmetic"
    assert values.numbers("--tokens", "4k,100") == [4096, 100]
    assert counts.accepted([1.0, 1.0]) == 3
