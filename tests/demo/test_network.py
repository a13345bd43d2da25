"""The trainer's network gives the model's logits, on the very bits that the checkpoint holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.demo import network, run, shape, stored
from deepinfer_jax.model import transformer
from deepinfer_jax.model.setup import Setup

CLASSES = 3000


@pytest.fixture(scope="module")
def cfg() -> ModelConfig:
    """The demo's shape with less of each: 96 tokens then reach past the window and the top k."""
    raw = shape.hf_config(CLASSES)
    raw["text_config"] |= {
        "sliding_window": 16,
        "index_topk": 12,
        "candidate_topk_blocks": 4,
        "hidden_size": 64,
    }
    return ModelConfig.from_hf(raw)


@pytest.fixture(scope="module")
def params(cfg) -> run.Flat:
    """Random weights, none of them zero or one, so that every term shows."""
    found = run.initial(cfg, 0)
    rng = np.random.default_rng(1)

    def moved(name: str, value: jax.Array) -> jax.Array:
        factor = 0.3 if name.endswith("table") else 0.1
        return value + factor * rng.standard_normal(value.shape, dtype=np.float32)

    return {name: moved(name, value) for name, value in found.items()}


def test_the_trainers_logits_are_the_models(cfg, params):
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.integers(10, shape.VOCAB, (2, 96)), jnp.int32)
    classes = jnp.asarray(rng.integers(0, CLASSES, shape.VOCAB), jnp.int32)
    numerics = Numerics(compute="float32", act_quant=False, cache_qdq=False)
    setup = Setup(cfg, numerics=numerics)

    rows = run.hashed(cfg, classes, tokens)
    weights = run.prepared(cfg, params, rows, True)
    ours = jax.jit(network.forward, static_argnums=0, static_argnames="stored")(
        setup, weights, tokens, stored=False
    )

    leaves = run.declared(cfg)
    bits = {name: stored.packed(value, leaves[name]) for name, value in params.items()}
    model = run.tree_of(cfg, bits).replace(token_map=classes)
    lengths = jnp.full((2,), 96, jnp.int32)
    logits, _ = jax.jit(transformer.forward, static_argnums=0)(setup, model, tokens, lengths)
    np.testing.assert_allclose(ours.logits, logits, atol=2e-4, rtol=0)
