"""Checkpoints that the converter tests share: small, synthetic, in the official on-disk format."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converters import from_hf, synthetic


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """One checkpoint with every kind of tensor of the release; never written to."""
    folder = tmp_path_factory.mktemp("source") / "model"
    return synthetic.write(folder, synthetic.draw_config(3, vision=True), seed=3, shards=3)


@pytest.fixture(scope="session")
def converted(checkpoint, tmp_path_factory) -> Path:
    """The same, converted; never written to."""
    return from_hf.convert(checkpoint, tmp_path_factory.mktemp("out") / "model", quiet=True)


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
