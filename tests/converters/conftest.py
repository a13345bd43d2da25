"""Checkpoints that the converter tests share: small, synthetic, in the official on-disk format."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converters import from_hf, synthetic
from converters import safetensors_io as st
from converters.source import INDEX


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """One checkpoint with every kind of tensor of the release; never written to."""
    folder = tmp_path_factory.mktemp("source") / "model"
    return synthetic.write(folder, synthetic.draw_config(3, vision=True), seed=3, shards=3)


@pytest.fixture(scope="session")
def converted(checkpoint, tmp_path_factory) -> Path:
    """The same, converted; never written to."""
    return from_hf.convert(checkpoint, tmp_path_factory.mktemp("out") / "model", quiet=True)


@pytest.fixture(scope="session")
def converted_folder(converted) -> Path:
    """The fixture `converted`, under a name that the module of that name does not hide."""
    return converted


@pytest.fixture
def broken(checkpoint, tmp_path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "broken"))


@pytest.fixture
def edit() -> Callable[..., None]:
    """Edit a JSON file of a folder in place: `edit(file, change)` with change(value) -> None."""

    def apply(file: Path, change: Callable[[Any], None]) -> None:
        value = json.loads(file.read_text(encoding="utf-8"))
        change(value)
        file.write_text(json.dumps(value), encoding="utf-8")

    return apply


@pytest.fixture
def rewrite() -> Callable[..., None]:
    """Rewrite every shard and the index of a folder after a change of each tensor.

    `rewrite(folder, change)` calls change(name, {"dtype", "shape", "data"}) and expects the tensors
    that stand in its place: {name: the same keys}, possibly renamed, several or none.
    """

    def apply(folder: Path, change: Callable[[str, dict], dict]) -> None:
        placed = {}
        for file in sorted(folder.glob("*.safetensors")):
            header, kept = st.read_header(file), {}
            with st.Reader() as reader:
                for name, tensor in header.tensors.items():
                    data = np.empty(tensor.nbytes, np.uint8)
                    reader.read_into(tensor, memoryview(data))
                    item = {"dtype": tensor.dtype, "shape": tensor.shape, "data": data}
                    kept |= change(name, item)
            entries = [(name, item["dtype"], item["shape"]) for name, item in kept.items()]
            st.write(file, st.header_bytes(entries), [item["data"] for item in kept.values()])
            placed |= dict.fromkeys(kept, file.name)
        index = {"metadata": {}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")

    return apply
