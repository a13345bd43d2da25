"""The trainer's network gives the model's logits, on the very bits that the checkpoint holds."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import spec
from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.demo import drafting, network, run, shape, stored
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
        "hc_sinkhorn_iters": 5,
        "num_nextn_predict_layers": 1,
        "compress_ratios": raw["text_config"]["compress_ratios"][:7],
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


@pytest.fixture(scope="module")
def both(cfg, params):
    """Tokens, the trainer's outcome and weights, and the model's setup and weights."""
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.integers(10, shape.VOCAB, (2, 96)), jnp.int32)
    classes = jnp.asarray(rng.integers(0, CLASSES, shape.VOCAB), jnp.int32)
    numerics = Numerics(compute="float32", act_quant=False, cache_qdq=False)
    setup = Setup(cfg, numerics=numerics)

    rows = run.hashed(cfg, classes, tokens)
    weights = run.prepared(cfg, params, rows)
    forward = jax.jit(network.forward, static_argnums=0, static_argnames="stored")
    ours = forward(setup, weights, tokens, stored=False)

    leaves = run.declared(cfg)
    bits = {name: stored.packed(value, leaves[name]) for name, value in params.items()}
    model = run.tree_of(cfg, bits).replace(token_map=classes)
    return SimpleNamespace(
        setup=setup,
        tokens=tokens,
        lengths=jnp.full((2,), 96, jnp.int32),
        weights=weights,
        ours=ours,
        model=model,
    )


def test_the_trainers_logits_are_the_models(both):
    forward = jax.jit(transformer.forward, static_argnums=0)
    logits, _ = forward(both.setup, both.model, both.tokens, both.lengths)
    np.testing.assert_allclose(both.ours.logits, logits, atol=2e-4, rtol=0)


def test_the_trained_draft_blocks_are_the_models(both):
    draft = jax.jit(transformer.draft, static_argnums=0)
    ids, logits, confidence = draft(both.setup, both.model, both.tokens, both.lengths)
    anchor = jnp.argmax(both.ours.logits[:, -1], axis=-1).astype(jnp.int32)
    block = jnp.concatenate([anchor[:, None], ids[:, :-1]], axis=1)[:, None]
    context, _ = network.rows_of(both.setup, both.tokens)
    ours = jax.jit(drafting.block_logits, static_argnums=0, static_argnames="stored")
    drafted, sure = ours(
        both.setup, both.weights, both.ours.taps, context, block, both.lengths[:1], stored=False
    )
    np.testing.assert_allclose(drafted[:, 0], logits, atol=2e-4, rtol=0)
    np.testing.assert_allclose(sure[:, 0], confidence, atol=2e-4, rtol=0)


def test_the_bits_are_what_training_rounds_to():
    """Every format: dequantising the packed bits gives `rounded`, also for rows of zeros."""
    rng = np.random.default_rng(3)
    w = jnp.asarray(rng.standard_normal((48, 96)) * 10.0 ** rng.integers(-6, 3, (48, 1)))
    w = w.astype(jnp.float32).at[5].set(0.0)
    axes, block = (None, None), (32, 32)
    for declared in (
        spec.dense(48, 96, axes, block=block, dtype="fp8"),
        spec.fp8_rows(48, 96, axes),
        spec.fp4(48, 96, axes=axes),
        spec.plain(48, 96, axes=axes),
    ):
        wide = stored.numbers(stored.packed(w, declared))
        near = stored.rounded(w, stored.kind(declared))
        np.testing.assert_array_equal(near, wide)
        np.testing.assert_array_equal(near, stored.rounded(wide, stored.kind(declared)))
        assert float(jnp.max(jnp.abs(near - w))) <= float(jnp.max(jnp.abs(w))) / 4
