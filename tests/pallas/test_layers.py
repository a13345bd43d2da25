"""Layers at released width on a GPU, operation by operation: every kernel that is called there
against its reference, on the arguments that it is called with.

    python -m pytest -q -m gpu tests/pallas/test_layers.py

The layer goes on with what the kernels gave. Its output as a whole says little: drawn weights make
sharp attention, and a change of one rounding in a thousand input values moves it by tens of
percent, whoever computes it.
"""

import contextvars
import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from deepinfer_jax import shipped
from deepinfer_jax.bench import drawn, slices
from deepinfer_jax.bench.counts import Rows
from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.model.compile import jit

pytestmark = pytest.mark.gpu

EXPERTS = 12
LAYERS = [2, 3, 20, 21]
"""A gated compressor, a layer that reads it, the decoder half's source and one that reads it."""
RELATIVE = 4e-3
"""Frobenius norm of a result in bfloat16."""
SAME = 0.99
"""Share of the index's entries: near ties may go either way."""


def apart(op: str, function: str, got: Any, want: Any) -> float:
    """How far a result is from the reference's; of parts of K their sum counts."""
    wide = [np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in (got, want)]
    if function.startswith("partial_products"):
        wide = [x.sum(0) for x in wide]
    if not jnp.issubdtype(got.dtype, jnp.floating):
        equal = np.mean(wide[0] == wide[1])
        return float(equal < (SAME if op == "index_topk" else 1))
    return float(np.linalg.norm(wide[0] - wide[1]) / max(np.linalg.norm(wide[1]), 1e-30))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("rows", [Rows(5, 3, 1021), Rows(2, 200, 0)], ids=["decode", "prefill"])
def test_kernels_give_the_references_results_in_layers(rows: Rows, invariant: bool) -> None:
    released = ModelConfig.from_json(shipped.find("models", "v41-flash"))
    cfg = dataclasses.replace(released, n_routed_experts=EXPERTS)
    one = slices.layers(cfg, LAYERS, Numerics.preset("reference", invariant=invariant), rows)
    bad: list[str] = []
    kernels: set[str | None] = set()

    def both(op: str, function: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        called = getattr(importlib.import_module(f"pallas_kernels.{op}"), function)

        def by(name: str) -> Any:
            with pallas_kernels.record() as choices, jax.default_matmul_precision("highest"):
                out = jit(functools.partial(called, implementation=name, **kwargs))(*args)
            kernels.update(choice.chosen for choice in choices)
            return out

        # Each in a context of its own, in which calls do not come back to here.
        got, want = (contextvars.Context().run(by, name) for name in ("auto", "reference"))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            if (error := apart(op, function, a, b)) > RELATIVE:
                bad.append(f"{op}.{function} {jax.tree.map(jnp.shape, args)}: {error:.1e}")
        return got

    arguments = map(drawn.materialise, (one.weights, one.carry, one.given))
    with pallas_kernels.stand_in(both):
        _, hidden = one.turn(*arguments)
    assert not bad, "\n".join(bad)
    assert "hopper" in kernels or "blackwell" in kernels
    assert bool(jnp.isfinite(hidden.streams).all())
