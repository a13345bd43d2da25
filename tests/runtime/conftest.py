"""The small random model, written once, and engines over it that tests share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deepinfer_jax as dj
from converters import synthetic
from tests.runtime import small_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model's checkpoint."""
    return synthetic.write(tmp_path_factory.mktemp("small") / "model", small_model.CONFIG)


@pytest.fixture(scope="session")
def llm(folder: Path) -> Callable[..., dj.LLM]:
    """`llm({"speculate": 0}, **numerics)`: an engine, shared by all that ask for the same one."""

    def make(options: dict[str, Any] | None = None, **fields: Any) -> dj.LLM:
        num = small_model.numerics(**fields)
        chosen = {"speculate": None, **(options or {})}
        return small_model.engine(folder, num, tuple(sorted(chosen.items())))

    return make


@pytest.fixture(scope="session")
def adaptive(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of an engine that chooses widths; step times in a folder of this run."""
    return {"speculate": "adaptive", "cache": str(tmp_path_factory.getbasetemp() / "steps")}


@pytest.fixture(scope="session")
def prompts() -> Callable[..., list[list[int]]]:
    """`prompts(7, 40, seed=1)`: random prompts of these lengths, without special ids."""

    def make(*lengths: int, seed: int = 0) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        return [rng.integers(3, small_model.VOCAB - 2, n).tolist() for n in lengths]

    return make
