"""Final norm and language-model head: logits = RMSNorm(x) W^T in float32, no bias, no soft cap.

The normed state is rounded to the compute type first; bfloat16 operands with float32 accumulation
are then the same product as the reference's widened float32 one, up to the order of summation.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from deepinfer_jax.model import parallel
from deepinfer_jax.model.linear import linear
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.model.setup import Setup


def embedded(
    setup: Setup, embed: Float[Array, "vocab d"], token: Int32[Array, " rows"]
) -> Float[Array, "rows d"]:
    """Embedding rows of tokens, in the compute type."""
    with jax.named_scope("embed"):
        found = parallel.take(embed, token, setup.layout, "vocab", setup.phase)
        return found.astype(setup.dtype)


def head_logits(
    setup: Setup,
    x: Float[Array, "rows d"],
    weight: Float[Array, " d"],
    head: Float[Array, "held d"],
) -> Float32[Array, "rows vocab"]:
    """Logits of collapsed rows; weight: the norm's, head [vocab, d]."""
    with jax.named_scope("head"):
        normed = rms_norm(x, weight, setup.cfg.rms_norm_eps)
        return parallel.columns(
            lambda rows: linear(setup, rows, head, dtype=jnp.dtype(jnp.float32)),
            normed,
            setup.layout,
            "vocab",
            setup.phase,
        )
