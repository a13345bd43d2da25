"""Hub ids: wherever a folder is taken, an `owner/name` works; failures say what to do."""

import sys
import types

import pytest

from converters import check, source
from converters.source import CheckpointError


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for huggingface_hub, so that no test needs the network or the extra."""
    module = types.ModuleType("huggingface_hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_local_folders_need_no_hub(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert source.resolve(checkpoint) == checkpoint
    assert source.resolve("no such/folder at all") is not None


def test_an_id_is_downloaded(checkpoint, hub):
    calls = []

    def snapshot_download(name, revision, allow_patterns):
        calls.append((name, revision, allow_patterns))
        return str(checkpoint)

    hub.snapshot_download = snapshot_download
    assert source.resolve("deepseek-ai/Some-Model", "abc") == checkpoint
    assert calls[0][:2] == ("deepseek-ai/Some-Model", "abc")
    assert {"config.json", "tokenizer.json", "*.safetensors"} <= set(calls[0][2])
    assert check.main(["deepseek-ai/Some-Model", "--revision", "abc"]) == 0


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert check.main(["deepseek-ai/Some-Model"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "pip install 'deepinfer-jax[hub]'" in line


def test_without_the_network(hub):
    def snapshot_download(*_, **__):
        raise ConnectionError("name resolution failed\nand a long trace")

    hub.snapshot_download = snapshot_download
    with pytest.raises(CheckpointError, match="check the network") as caught:
        source.resolve("deepseek-ai/Some-Model")
    (line,) = caught.value.problems
    assert "ConnectionError: name resolution failed" in line and "\n" not in line
