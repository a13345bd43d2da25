"""Declared weights of the vision tower and its aligner, all bfloat16.

They are converted and counted with the rest of a checkpoint; image input is refused for now.
"""

import flax.struct

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.spec import Leaf, norm, plain


@flax.struct.dataclass
class VisionBlockWeights:
    """Pre-norm transformer block: wqkv [3 d, d], wo [d, d], w1 [2 ff, d] (gate rows first), w2 [d,
    ff]."""

    norm1: Leaf
    norm2: Leaf
    wqkv: Leaf
    wqkv_bias: Leaf
    wo: Leaf
    wo_bias: Leaf
    w1: Leaf
    w2: Leaf


@flax.struct.dataclass
class VisionWeights:
    """patch [d, 3 p p] with bias, blocks, norm [d]; aligner: w1 [text, 9 d], w2 [text, text] with
    biases."""

    patch: Leaf
    patch_bias: Leaf
    blocks: tuple[VisionBlockWeights, ...]
    norm: Leaf
    aligner_w1: Leaf
    aligner_w1_bias: Leaf
    aligner_w2: Leaf
    aligner_w2_bias: Leaf


def abstract(cfg: ModelConfig) -> VisionWeights | None:
    """The declared weights, or None for a text-only checkpoint."""
    vision = cfg.vision
    if vision is None:
        return None
    width, ff, text = vision.hidden_size, vision.intermediate_size, cfg.hidden_size

    def matrix(rows: int, cols: int) -> Leaf:
        return plain(rows, cols, axes=(None, None))

    def bias(size: int) -> Leaf:
        return plain(size, axes=(None,), init="zeros")

    block = VisionBlockWeights(
        norm1=norm(width),
        norm2=norm(width),
        wqkv=matrix(3 * width, width),
        wqkv_bias=bias(3 * width),
        wo=matrix(width, width),
        wo_bias=bias(width),
        w1=matrix(2 * ff, width),
        w2=matrix(width, ff),
    )
    return VisionWeights(
        patch=matrix(width, 3 * vision.patch_size**2),
        patch_bias=bias(width),
        blocks=(block,) * vision.num_hidden_layers,
        norm=norm(width),
        aligner_w1=matrix(text, width * vision.downsample_ratio**2),
        aligner_w1_bias=bias(text),
        aligner_w2=matrix(text, text),
        aligner_w2_bias=bias(text),
    )
