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
predicted, so one pass over X (`update`) writes it back, collapses it for the next sublayer and
takes the mean of its squares. Kernels: pallas_kernels/hyper_connections.
"""

import functools
import operator

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.compile import shared
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.spec import Leaf, plain
from pallas_kernels import hyper_connections, row_matmul


@flax.struct.dataclass
class HyperWeights:
    """fn [2n + n^2, n d], base [2n + n^2], scale [3]; all float32."""

    fn: Leaf
    base: Leaf
    scale: Leaf


@flax.struct.dataclass
class Hidden:
    """What flows between sublayers.

    streams: [rows, n, d] in the compute type. pre: float32 [rows, n], what they are collapsed with.
    collapsed: [rows, d] in the compute type. mean_square: float32 [rows], of a row's streams.
    """

    streams: Leaf
    pre: Leaf
    collapsed: Leaf
    mean_square: Leaf


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


def first(x: Float[Array, "rows d"], cfg: ModelConfig) -> Hidden:
    """The state at the first sublayer: n streams equal to x, of which it sees stream 0."""
    return hidden(expand(x, cfg), first_pre(x.shape[0], cfg))


@shared()
def hidden(streams: Float[Array, "rows n d"], pre: Float[Array, "rows n"]) -> Hidden:
    """The state between sublayers of streams that no `update` made."""
    with jax.named_scope("mhc_enter"):
        wide = streams.astype(jnp.float32)
        collapsed = jnp.sum(pre[:, :, None] * wide, axis=1).astype(streams.dtype)
        mean_square = jnp.mean(jnp.square(wide.reshape(wide.shape[0], -1)), axis=-1)
        return Hidden(streams, pre, collapsed, mean_square)


def whole(parts: Float[Array, "parts rows d"], dtype: jnp.dtype) -> Float[Array, "rows d"]:
    """A sublayer's output as `update` takes it: its parts added in order, rounded once."""
    return functools.reduce(operator.add, list(parts)).astype(dtype)


@shared("setup")
def mixes(
    setup: Setup,
    weights: HyperWeights,
    streams: Float[Array, "rows n d"],
    mean_square: Float[Array, " rows"],
) -> Mixes:
    """Predicts pre, post and comb of one sublayer from the streams at its entry and the mean of
    their squares."""
    with jax.named_scope("mhc_mixes"):
        cfg = setup.cfg
        parts = row_matmul.partial_products(
            streams.reshape(streams.shape[0], -1),
            weights.fn,
            invariant=setup.numerics.invariant,
            implementation=setup.kernels["row_matmul"],
        )
        return Mixes(
            *hyper_connections.mixes(
                parts,
                mean_square,
                weights.scale,
                weights.base,
                n=cfg.hc_mult,
                eps=cfg.rms_norm_eps,
                hc_eps=cfg.hc_eps,
                iterations=cfg.hc_sinkhorn_iters,
                implementation=setup.kernels["hyper_connections"],
            )
        )


@shared("setup")
def update(
    setup: Setup,
    parts: Float[Array, "parts rows d"],
    streams: Float[Array, "rows n d"],
    mix: Mixes,
) -> Hidden:
    """The state after a sublayer whose output is `whole(parts)`; the next one collapses it with
    mix.pre."""
    with jax.named_scope("mhc_update"):
        streams, collapsed, mean_square = hyper_connections.update(
            parts,
            streams,
            mix.post,
            mix.comb,
            mix.pre,
            implementation=setup.kernels["hyper_connections"],
        )
        return Hidden(streams, mix.pre, collapsed, mean_square)
