"""The tiny golden checkpoint, what other implementations computed with it, and our model of it."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.config import Numerics
from deepinfer_jax.runtime.model import Model
from tests.golden import values


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    """Values of an independent PyTorch implementation in float32 (see golden/PROVENANCE.md)."""
    return values.independent()


@pytest.fixture(scope="session")
def official() -> dict[str, np.ndarray]:
    """Values of the released code itself."""
    return values.official()


@functools.cache
def _tiny(numerics: Numerics) -> Model:
    return dj.load(values.TINY, numerics=numerics)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Model]:
    """`tiny(preset, **fields)`: the golden checkpoint under some numerics, read once."""
    return lambda preset, **fields: _tiny(Numerics.preset(preset, **fields))


@pytest.fixture(scope="session")
def batch(golden) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """`batch(names, width)`: golden sequences right-padded with other tokens, and their lengths."""

    def make(names: Sequence[str], width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.random.default_rng(seed).integers(3, 509, (len(names), width))
        lengths = np.array([len(golden[f"ids.{name}"]) for name in names])
        for row, name, length in zip(tokens, names, lengths, strict=True):
            row[:length] = golden[f"ids.{name}"]
        return tokens, lengths

    return make
