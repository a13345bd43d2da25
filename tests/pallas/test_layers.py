"""Whole layers at released width on a GPU: with the kernels chosen for it against the references.

    python -m pytest -q -m gpu tests/pallas/test_layers.py

Routes are given, so that no near tie sends a row to another expert.
"""

import dataclasses

import numpy as np
import pytest

from deepinfer_jax import shipped
from deepinfer_jax.bench import drawn, slices
from deepinfer_jax.bench.counts import Rows
from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.model.compile import jit
from pallas_kernels import Kernels

pytestmark = pytest.mark.gpu

EXPERTS = 12
LAYERS = [2, 3, 20, 21]
"""A gated compressor, a layer that reads it, the decoder half's source and one that reads it."""
RELATIVE = 1e-2
"""Frobenius norm of the residual streams after four layers: their sublayers round to bfloat16."""


def streams(rows: Rows, kernels: Kernels, invariant: bool) -> np.ndarray:
    """The residual streams that the layers give for drawn weights, caches and rows."""
    released = ModelConfig.from_json(shipped.find("models", "v41-flash"))
    cfg = dataclasses.replace(released, n_routed_experts=EXPERTS)
    numerics = Numerics.preset("reference", invariant=invariant)
    one = slices.layers(cfg, LAYERS, numerics, rows, kernels=kernels)

    def turn(weights, cache, given):
        return one.turn(weights, cache, given)[1].streams

    arguments = map(drawn.materialise, (one.weights, one.carry, one.given))
    return np.asarray(jit(turn)(*arguments).astype(np.float32), np.float64)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("rows", [Rows(5, 3, 1021), Rows(2, 200, 0)], ids=["decode", "prefill"])
def test_kernels_give_the_references_layers(rows: Rows, invariant: bool) -> None:
    want = streams(rows, Kernels.parse("reference"), invariant)
    got = streams(rows, Kernels.auto(), invariant)
    assert np.isfinite(want).all()
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error <= RELATIVE, error
