"""The released configuration traces, with abstract weights: shapes and types only, no memory."""

import resource

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax import shipped, spec
from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.model import transformer
from deepinfer_jax.model.setup import Setup

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def released() -> tuple[ModelConfig, transformer.Weights]:
    cfg = ModelConfig.from_json(shipped.find("models", "v41-flash"))
    token_map = jax.ShapeDtypeStruct((cfg.vocab_size,), jnp.int32)
    return cfg, spec.abstract(transformer.abstract(cfg)).replace(token_map=token_map)


def peak() -> int:
    """Largest resident size so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("preset", ["reference", pytest.param("float32", marks=pytest.mark.slow)])
def test_forward(released, preset):
    """One sequence of 4096 tokens, as `Model.forward` would compile it."""
    cfg, weights = released
    setup = Setup(cfg, numerics=Numerics.preset(preset))
    before = peak()
    logits, found = jax.eval_shape(
        lambda weights, tokens, lengths: transformer.forward(
            setup, weights, tokens, lengths, ("streams", "index_topk", "taps")
        ),
        weights,
        jax.ShapeDtypeStruct((1, 4096), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    assert peak() - before < 2**30
    assert (logits.shape, logits.dtype) == ((1, 4096, 129_280), jnp.float32)
    assert found["streams"][40].shape == (1, 4096, 4, 5120)
    assert found["streams"][0].dtype == jnp.dtype(setup.numerics.compute)
    assert sorted(found["index_topk"]) == [2, 8, 14, 20, 24, 28, 32, 36]
    assert all(entries.shape == (1, 4096, 512) for entries in found["index_topk"].values())
    assert sorted(found["taps"]) == [37, 38, 39]


@pytest.mark.slow
def test_draft(released):
    cfg, weights = released
    setup = Setup(cfg, numerics=Numerics.preset("reference"))
    ids, logits, confidence = jax.eval_shape(
        lambda *args: transformer.draft(setup, *args),
        weights,
        jax.ShapeDtypeStruct((1, 256), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    assert (ids.shape, logits.shape, confidence.shape) == ((1, 5), (1, 5, 129_280), (1, 5))
