"""One block: an attention and a MoE sublayer, each wrapped in single-pass mHC (V4.1 report 2.1).

The `pre` that collapses the streams comes from the sublayer before; post and comb are the
sublayer's own:
  mix_a = mixes(X),   a = attention(norm(c)),   X1, c1 = update(a, X, mix_a)
  mix_f = mixes(X1),  f = moe(norm(c1)),        X2, c2 = update(f, X1, mix_f)
where c is X collapsed with the mix that the sublayer before predicted, and (X2, c2) go to the next
block. What "attention" is differs between the backbone and the draft stages, so it is passed in.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
from jaxtyping import Array, Bool, Float, Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import attention, engram, hyper, moe
from deepinfer_jax.model.attention import AttentionWeights
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.hyper import Hidden, HyperWeights
from deepinfer_jax.model.moe import MoEWeights
from deepinfer_jax.model.norm import Prepared, normed
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.schedule import LayerPlan
from deepinfer_jax.spec import Leaf, Param, norm


@flax.struct.dataclass
class BlockWeights:
    """Weights of one backbone layer or draft stage; engram: EngramWeights or None."""

    hc_attn: HyperWeights
    attn_norm: Leaf
    attn: AttentionWeights
    hc_ffn: HyperWeights
    ffn_norm: Leaf
    ffn: MoEWeights
    engram: Leaf


def abstract(cfg: ModelConfig, plan: LayerPlan, experts: int) -> BlockWeights:
    """The declared weights of one block."""
    return BlockWeights(
        hc_attn=hyper.abstract(cfg),
        attn_norm=norm(cfg.hidden_size, "embed"),
        attn=attention.abstract(cfg, plan),
        hc_ffn=hyper.abstract(cfg),
        ffn_norm=norm(cfg.hidden_size, "embed"),
        ffn=moe.abstract(cfg, experts),
        engram=engram.abstract(cfg, plan.index) if plan.engram else None,
    )


def with_placement(declared: BlockWeights, weights: BlockWeights) -> BlockWeights:
    """A block's declaration with the expert placement that the weights have, if they have one."""
    placement = jax.tree.map(
        lambda leaf: Param(leaf.shape, "int32", (None,) * leaf.ndim), weights.ffn.placement
    )
    ffn = dataclasses.replace(declared.ffn, placement=placement)
    return dataclasses.replace(declared, ffn=ffn)


def block(
    setup: Setup,
    weights: BlockWeights,
    hidden: Hidden,
    valid: Bool[Array, " rows"],
    attend: Callable[[Prepared], tuple[Float[Array, "parts rows d"], Any]],
    *,
    layer: int,
    experts_per_token: int,
    capture: Capture,
    routes: Int32[Array, "rows k"] | None = None,
) -> tuple[Hidden, Any]:
    """Both sublayers; `attend` maps normed rows to (parts of the output, state) and the state is
    handed back."""
    mix = hyper.mixes(setup, weights.hc_attn, hidden.streams, hidden.mean_square)
    x = normed(setup, hidden.collapsed, weights.attn_norm)
    capture.add("attn_in", layer, x.rows)
    parts, state = attend(x)
    if capture.wants("attn_out"):
        capture.add("attn_out", layer, hyper.whole(parts, hidden.streams.dtype))
    hidden = hyper.update(setup, parts, hidden.streams, mix)

    after = hyper.mixes(setup, weights.hc_ffn, hidden.streams, hidden.mean_square)
    x = normed(setup, hidden.collapsed, weights.ffn_norm)
    capture.add("ffn_in", layer, x.rows)
    out = moe.moe(
        setup,
        weights.ffn,
        x,
        valid,
        experts_per_token=experts_per_token,
        layer=layer,
        capture=capture,
        routes=routes,
    )
    capture.add("ffn_out", layer, out)
    capture.add("pre_mix", layer, after.pre)
    return hyper.update(setup, out[None], hidden.streams, after), state
