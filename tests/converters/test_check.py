"""Broken checkpoints: each kind gets its one line, and nothing is written.

The kinds come from public bug reports about loaders of this model family: shards that the index
names and the folder lacks, an index left over from other shards, configs copied without weights or
weights without config, block sizes that config.json lies about, a drafter that lost one tensor.
"""

import re
import shutil

import numpy as np
import pytest

from converters import census, check, from_hf, synthetic
from converters.source import INDEX, CheckpointError

SHARD = "model-00002-of-00003.safetensors"


def problems(path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        check.examine(path)
    assert all("\n" not in line for line in caught.value.problems)
    return list(caught.value.problems)


def test_a_good_one(checkpoint, capsys):
    assert check.main([str(checkpoint)]) == 0
    assert "450 tensors" in capsys.readouterr().out
    assert check.main([str(checkpoint), "--deep"]) == 0


def test_no_folder_no_config_no_shards(tmp_path, checkpoint):
    assert "no such folder" in problems(tmp_path / "nothing")[0]
    assert "not a folder" in problems(checkpoint / "config.json")[0]
    empty = tmp_path / "empty"
    empty.mkdir()
    found = problems(empty)
    assert "needs its config.json" in found[0] and "no *.safetensors file" in found[1]
    (empty / "model-Q4.gguf").write_bytes(b"GGUF")
    assert "GGUF file(s) model-Q4.gguf, not supported" in problems(empty)[1]


def test_config_missing_or_foreign(broken, edit):
    for value in ("deepseek_v4", "llama", None):
        edit(broken / "config.json", lambda config, v=value: config.update(model_type=v))
        assert (
            f"model_type {value!r} is not supported; supported: deepseek_v41" in problems(broken)[0]
        )
    (broken / "config.json").write_text("{")
    assert "not valid JSON" in problems(broken)[0]
    (broken / "config.json").unlink()
    assert problems(broken) == [
        f"{broken}/config.json: no such file; a model folder needs its config.json"
    ]


def test_missing_shard(broken):
    (broken / SHARD).unlink()
    assert problems(broken) == [f"{broken}: 1 missing shard(s): {SHARD}"]
    (broken / INDEX).unlink()  # the numbers in the names still tell
    assert f"1 missing shard(s): {SHARD}" in problems(broken)[0]


def test_stale_index(broken):
    (broken / SHARD).rename(broken / "requantised-00002-of-00003.safetensors")
    (found,) = problems(broken)
    assert "the index is stale" in found
    assert SHARD in found and "requantised-00002-of-00003.safetensors" in found


def test_three_ways_a_tensor_is_not_there(broken, edit):
    """Never in the index; shard absent (above); shard there without it."""
    name = "layers.0.attn.wkv.weight"
    edit(broken / INDEX, lambda index: index["weight_map"].pop(name))
    (found,) = problems(broken)
    assert (
        f"does not place 1 tensor(s) that model-00001-of-00003.safetensors declares: {name}"
        in found
    )
    edit(broken / INDEX, lambda index: index["weight_map"].update({name: SHARD}))
    found = problems(broken)
    assert f"{SHARD}: the shard is there but does not declare 1 tensor(s)" in found[0]
    assert f"in it: {name}" in found[0]


def test_index_total_size(broken, edit):
    edit(broken / INDEX, lambda index: index["metadata"].update(total_size=7))
    assert "metadata.total_size is 7" in problems(broken)[0]
    edit(broken / INDEX, lambda index: index.update(metadata={}))
    check.examine(broken)


def test_truncated_and_overwritten_shards(broken):
    file = broken / SHARD
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 5)
    assert "truncated" in problems(broken)[0]
    file.write_bytes(b"<html>404</html>" * 10)
    assert "bad header length" in problems(broken)[0]


def test_a_tensor_in_two_shards(broken):
    (broken / INDEX).unlink()
    shutil.copy(broken / SHARD, broken / "copy.safetensors")
    assert "is in both copy.safetensors and model-00002" in problems(broken)[0]


def test_one_lost_or_strange_tensor(checkpoint):
    """Any single tensor of the drafter, or any at all, is missed by name; extra ones are named."""
    table = check.examine(checkpoint).table
    kinds = {re.sub(r"\d+", "#", name): name for name in table.by_name if name.startswith("mtp.")}
    assert len(kinds) >= 35
    for lost in kinds.values():
        tensors = {n: None for n in table.by_name if n != lost}
        assert _compare(checkpoint, tensors) == [f"missing: {_braced(lost)}"]
    extra = {**dict.fromkeys(table.by_name), "layers.0.attn.q_b_norm.weight": None}
    assert _compare(checkpoint, extra) == ["unknown: layers.{0}.attn.q_b_norm.weight"]


def _braced(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", lambda match: f"{{{match[0]}}}", name)


def _compare(path, tensors) -> list[str]:
    """Census of these names, with the checkpoint's own tensors where it has them."""
    checked = check.examine(path)
    known = checked.source.tensors
    given = {n: known.get(n) or next(iter(known.values())) for n in tensors}
    given = {n: census.Found(tensor.dtype, tensor.shape) for n, tensor in given.items()}
    return census.compare(checked.source.cfg, checked.table, given)


def test_pruned_experts_and_layers(checkpoint):
    checked = check.examine(checkpoint)
    cfg, known = checked.source.cfg, checked.source.tensors
    experts, last = cfg.n_routed_experts, cfg.num_hidden_layers - 1
    few = {n for n in known if not re.search(rf"^layers\..*\.experts\.{experts - 1}\.", n)}
    (found,) = _compare(checkpoint, few)
    assert found.startswith(f"missing: layers.{{0-{last}}}.ffn.experts.{{{experts - 1}}}.* (")
    assert found.endswith(f"config.json has n_routed_experts = {experts}")
    few = {n for n in known if not n.startswith(f"layers.{last}.")}
    (found,) = _compare(checkpoint, few)
    assert found.startswith(f"missing: layers.{{{last}}}.* (")
    assert found.endswith(f"config.json has num_hidden_layers = {last + 1}")
    more = {*known, *(n.replace("layers.0.", "layers.77.") for n in known)}
    (found,) = _compare(checkpoint, more)
    assert found.startswith("unknown: layers.{77}.* (")


def test_nothing_matches(broken, rewrite):
    rewrite(broken, lambda name, tensor: {f"transformer.h.{name}": tensor})
    (found,) = problems(broken)
    assert "no tensor of this config is there; the files hold transformer.h." in found


def test_block_size_that_config_lies_about(broken, rewrite):
    def coarser(name, tensor):
        if tensor["dtype"] != "F8_E8M0" or ".experts." in name or ".embed." in name:
            return {name: tensor}
        shape = tuple(-(-size // 4) for size in tensor["shape"])
        return {name: tensor | {"shape": shape, "data": np.full(shape, 120, np.uint8)}}

    rewrite(broken, coarser)
    assert any(
        "it fits blocks of 128x128, config.json has weight_block_size = [32, 32]" in line
        for line in problems(broken)
    )


@pytest.mark.parametrize("claimed", ["fp8", "bf16"])
def test_blocks_that_the_model_does_not_compute_in(claimed, broken, edit):
    """Whether config.json or the tensors say that matrices are FP8."""

    def change(config):
        section = {"weight_block_size": [128, 128], "dense_dtype": claimed}
        config["quantization_config"] |= section

    edit(broken / "config.json", change)
    (found,) = problems(broken)
    assert "config.json: weight_block_size = [128, 128]; expected [32, 32]" in found


def test_wrong_dtype_and_shape(broken, rewrite):
    def change(name, tensor):
        if name == "layers.0.attn.attn_sink":
            tensor = tensor | {"dtype": "I32"}
        if name == "norm.weight":
            tensor = tensor | {"shape": (2, tensor["shape"][0] // 2)}
        return {name: tensor}

    rewrite(broken, change)
    found = problems(broken)
    assert any("layers.{0}.attn.attn_sink: dtype I32, expected F32" in line for line in found)
    assert any("norm.weight: shape [2, " in line for line in found)


def test_engram_rows_must_be_the_sum_of_the_primes(tmp_path, edit):
    folder = synthetic.write(tmp_path / "m", synthetic.draw_config(3), seed=3)

    def shrink(config):
        config["text_config"]["engram_vocab_size"] -= 12

    edit(folder / "config.json", shrink)
    assert any("the sum of its primes" in line for line in problems(folder))


def test_deep_finds_codes_that_are_no_numbers(broken, rewrite, capsys):
    def change(name, tensor):
        if name == "layers.0.attn.wkv.scale":
            tensor["data"][3] = 255
        if name == "layers.1.attn.wkv.weight":
            tensor["data"][:2] = 0x7F, 0xFF
        if name == "mtp.0.attn.attn_sink":
            tensor["data"][:4] = np.frombuffer(np.float32(np.inf).tobytes(), np.uint8)
        return {name: tensor}

    rewrite(broken, change)
    assert check.main([str(broken)]) == 0
    assert check.main([str(broken), "--deep"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == [
        "layers.0.attn.wkv.scale: 1 value(s) NaN",
        "layers.1.attn.wkv.weight: 2 value(s) NaN",
        "mtp.0.attn.attn_sink: 1 value(s) infinite",
    ]


def test_the_converter_refuses_and_writes_nothing(broken, tmp_path, capsys):
    (broken / SHARD).unlink()
    target = tmp_path / "out"
    assert from_hf.main([str(broken), str(target)]) == 2
    err = capsys.readouterr().err
    assert err == f"{broken}: 1 missing shard(s): {SHARD}\n"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["broken"]
