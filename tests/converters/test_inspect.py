"""Inspection: what a folder holds, by part, dtype and tree, without reading a weight."""

import json

from converters import from_hf, inspect
from deepinfer_jax.layout import Layout


def test_official_and_converted_agree(checkpoint, converted):
    one, two = (inspect.inspect(path).plain() for path in (checkpoint, converted))
    assert (one["kind"], two["kind"]) == ("official", "converted")
    same = ("tensors", "bytes", "parameters", "parts", "dtypes", "tree", "layers")
    assert all(one[key] == two[key] for key in same)
    assert one["tensors"] == 450 and one["layers"] == [0, 1, 2, 3, 4]
    assert sum(part["bytes"] for part in one["parts"].values()) == one["bytes"]
    assert sum(part["tensors"] for part in one["dtypes"].values()) == one["tensors"]
    assert sum(row["bytes"] for row in one["tree"]) == one["bytes"]
    assert "other" not in one["parts"]
    assert json.loads(json.dumps(one)) == one


def test_text_and_command_line(converted, capsys):
    text = inspect.inspect(converted).text(2)
    assert "layers/{0-4}/attn" not in text and "layers/{0-4}" in text
    assert "layers/{0-4}/attn" in inspect.inspect(converted).text(3)
    assert inspect.main([str(converted), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "converted"
    assert inspect.main([str(converted / "nothing")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_bytes_a_device(converted):
    whole = inspect.inspect(converted, Layout.single()).plain()
    assert whole["per_device"] == whole["bytes"]
    rules = (("vocab", ("x",)), ("engram_rows", ("x",)))
    spread = inspect.inspect(converted, Layout("spread", (("x", 4),), rules)).plain()
    # The rows of the tables are rounded up to a multiple of the devices.
    assert 0 <= spread["per_device"] - (whole["bytes"] - _sharded(whole) * 3 / 4) < 4096


def _sharded(found) -> int:
    rows = (row for row in found["tree"] if {"vocab", "engram_rows"} & set(row["axes"]))
    return sum(row["bytes"] for row in rows)


def test_unfinished_conversions(checkpoint, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(from_hf.store, "write_metadata", stop)
    try:
        from_hf.convert(checkpoint, tmp_path / "out", quiet=True)
    except KeyboardInterrupt:
        found = inspect.inspect(tmp_path / "out.partial")
    assert found.plain()["kind"] == "unfinished conversion" and found.plain()["pieces"] > 300
    assert "run the converter again" in found.text()
