"""Manifold-constrained hyper-connections (mHC), single-pass form.

The residual is n streams X [rows, n, d]. Each sublayer predicts from X three mixes (V4.1 report
2.1; reference inference/kernel.py hc_split_sinkhorn), all in float32:
  m    = (flat(X) fn^T) * rsqrt(mean(flat(X)^2) + eps)                      [rows, 2n + n^2]
  pre  = sigmoid(m_pre * scale_0 + base) + hc_eps                           [rows, n]
  post = 2 sigmoid(m_post * scale_1 + base)                                 [rows, n]
  comb = Sinkhorn(m_comb * scale_2 + base)                                  [rows, n, n], ends on a
                                                                            column normalisation
and writes back X'_j = post_j * out + sum_i comb_ij X_i: the sum runs over the first index.
"Single-pass": a sublayer collapses the streams with the `pre` that the sublayer before it
predicted, so one pass over X serves both.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.compile import shared
from deepinfer_jax.model.norm import inverse_rms
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.spec import Leaf, plain
from pallas_kernels import row_matmul, sinkhorn


@flax.struct.dataclass
class HyperWeights:
    """fn [2n + n^2, n d], base [2n + n^2], scale [3]; all float32."""

    fn: Leaf
    base: Leaf
    scale: Leaf


@flax.struct.dataclass
class Mixes:
    """pre, post [rows, n]; comb [rows, n, n] (source, destination); float32."""

    pre: Leaf
    post: Leaf
    comb: Leaf


def abstract(cfg: ModelConfig) -> HyperWeights:
    """The declared weights of one predictor."""
    mixes = cfg.hc_mult * (2 + cfg.hc_mult)
    return HyperWeights(
        fn=plain(mixes, cfg.hc_mult * cfg.hidden_size, axes=(None, None), dtype="float32"),
        base=plain(mixes, axes=(None,), dtype="float32", scale=0.5),
        scale=plain(3, axes=(None,), dtype="float32", scale=0.5),
    )


def expand(x: Float[Array, "rows d"], cfg: ModelConfig) -> Float[Array, "rows n d"]:
    """n equal streams."""
    return jnp.repeat(x[:, None, :], cfg.hc_mult, axis=1)


def first_pre(rows: int, cfg: ModelConfig) -> Float[Array, "rows n"]:
    """The mix that the first sublayer collapses with: stream 0."""
    return jnp.zeros((rows, cfg.hc_mult), jnp.float32).at[:, 0].set(1.0)


@shared("setup")
def mixes(setup: Setup, weights: HyperWeights, streams: Float[Array, "rows n d"]) -> Mixes:
    """Predicts pre, post and comb of one sublayer from the streams at its entry."""
    with jax.named_scope("mhc_mixes"):
        cfg = setup.cfg
        flat = streams.reshape(streams.shape[0], -1)
        projected = row_matmul.matmul(
            flat,
            weights.fn,
            out_dtype=jnp.float32,
            invariant=setup.numerics.invariant,
            implementation=setup.kernels["row_matmul"],
        )
        return split(
            setup, projected * inverse_rms(flat, cfg.rms_norm_eps), weights.scale, weights.base
        )


def split(
    setup: Setup,
    m: Float[Array, "rows mix"],
    scale: Float[Array, " 3"],
    base: Float[Array, " mix"],
) -> Mixes:
    """The projected, normalised statistics m as mixes."""
    cfg, n = setup.cfg, setup.cfg.hc_mult
    pre = jax.nn.sigmoid(m[:, :n] * scale[0] + base[None, :n]) + jnp.float32(cfg.hc_eps)
    post = 2.0 * jax.nn.sigmoid(m[:, n : 2 * n] * scale[1] + base[None, n : 2 * n])
    square = m[:, 2 * n :] * scale[2] + base[None, 2 * n :]
    comb = sinkhorn.normalise(
        square.reshape(-1, n, n),
        iterations=cfg.hc_sinkhorn_iters,
        eps=cfg.hc_eps,
        implementation=setup.kernels["sinkhorn"],
    )
    return Mixes(pre, post, comb)


@shared()
def collapse(
    streams: Float[Array, "rows n d"], pre: Float[Array, "rows n"]
) -> Float[Array, "rows d"]:
    """sum_n pre_n X_n, in the streams' dtype."""
    with jax.named_scope("mhc_collapse"):
        return jnp.sum(pre[:, :, None] * streams.astype(jnp.float32), axis=1).astype(streams.dtype)


@shared()
def write_back(
    out: Float[Array, "rows d"], streams: Float[Array, "rows n d"], mix: Mixes
) -> Float[Array, "rows n d"]:
    """The streams after a sublayer whose output is `out`, rounded to the streams' dtype."""
    with jax.named_scope("mhc_write_back"):
        wide = streams.astype(jnp.float32)
        kept = jnp.sum(mix.comb[:, :, :, None] * wide[:, :, None, :], axis=1)
        new = mix.post[:, :, None] * out.astype(jnp.float32)[:, None, :]
        return (new + kept).astype(streams.dtype)
