"""A loaded model: weights on devices and the four static choices, with whole-sequence calls.

`load` reads an official safetensors folder or a converted folder. `Model.forward` and
`Model.draft` run whole sequences without a cache kept between calls; they are the reference that
the engine (`runtime/engine.py`) is compared with, and what a researcher probes with `capture`.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float32, Int32

from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.layout import Layout
from deepinfer_jax.model import transformer
from deepinfer_jax.model.compile import jit
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.runtime import checkpoint, experts, groups, platform
from pallas_kernels import Kernels


class ForwardOutput(NamedTuple):
    """logits f32 [batch, seq, vocab]; captured: name -> layer -> array, rows as [batch, seq, ..]"""

    logits: Float32[Array, "batch seq vocab"]
    captured: dict[str, dict[int, Array]]


class DraftOutput(NamedTuple):
    """A DSpark block after each sequence: token_ids int32 [batch, k], logits f32 [batch, k, vocab],
    confidence f32 [batch, k] (logits; acceptance estimate = sigmoid)."""

    token_ids: Int32[Array, "batch k"]
    logits: Float32[Array, "batch k vocab"]
    confidence: Float32[Array, "batch k"]


@dataclasses.dataclass(frozen=True)
class Model:
    """setup: cfg, layout, kernels, numerics. tokenizer: path of tokenizer.json (may not exist)."""

    setup: Setup
    weights: transformer.Weights
    tokenizer: Path

    @property
    def cfg(self) -> ModelConfig:
        return self.setup.cfg

    @property
    def devices(self) -> tuple[Any, ...]:
        """Where the weights lie, in the mesh's order."""
        return groups.of(self.weights.norm)

    def with_numerics(self, numerics: Numerics) -> "Model":
        """The same weights, computed with other numerics."""
        return dataclasses.replace(self, setup=self.setup._replace(numerics=numerics))

    def on(self, devices: Sequence[Any]) -> "Model":
        """This model on another group of devices, the weights copied from device to device: a
        checkpoint is read once for all groups. Raises ValueError as `load` does."""
        layout = self.setup.layout
        there = groups.checked(devices, layout)
        if there == self.devices:
            return self
        return dataclasses.replace(self, weights=groups.moved(self.weights, layout, there))

    def forward(
        self, tokens: Any, lengths: Any = None, capture: Sequence[str] = ()
    ) -> ForwardOutput:
        """Logits of whole sequences, no cache.

        tokens: int [batch, seq]; lengths: int [batch], valid tokens of each row (default: all);
        capture: names of `model.capture`. Raises ValueError for a wrong shape, an id outside the
        vocabulary or a length outside 1..seq.
        """
        ids, count = self._checked(tokens, lengths)
        return ForwardOutput(*_forward(self.setup, self.weights, ids, count, tuple(capture)))

    def draft(self, tokens: Any, lengths: Any = None) -> DraftOutput:
        """The greedy DSpark block after each sequence's own greedy next token.

        Raises ValueError if the checkpoint has no drafter.
        """
        if self.weights.draft is None:
            raise ValueError("draft: this checkpoint has no DSpark drafter")
        ids, count = self._checked(tokens, lengths)
        return DraftOutput(*_draft(self.setup, self.weights, ids, count))

    def _checked(self, tokens: Any, lengths: Any) -> tuple[np.ndarray, np.ndarray]:
        ids = np.asarray(tokens)
        if ids.ndim != 2 or 0 in ids.shape or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"tokens: {ids.dtype} of shape {ids.shape}; expected integers [batch, seq]"
            )
        outside = ids[(ids < 0) | (ids >= self.cfg.vocab_size)]
        if outside.size:
            raise ValueError(f"tokens: id {outside[0]}; expected 0..{self.cfg.vocab_size - 1}")
        if (ids == self.cfg.image_token_id).any():
            raise ValueError(
                f"tokens: id {self.cfg.image_token_id} is the image token; images are not supported"
            )
        count = np.full(ids.shape[0], ids.shape[1]) if lengths is None else np.asarray(lengths)
        if count.shape != ids.shape[:1] or (count < 1).any() or (count > ids.shape[1]).any():
            raise ValueError(
                f"lengths: {count.tolist()}; expected {ids.shape[0]} numbers in 1..{ids.shape[1]}"
            )
        return ids.astype(np.int32), count.astype(np.int32)


_forward = jit(transformer.forward, static_argnums=(0, 4))
_draft = jit(transformer.draft, static_argnums=0)


def load(
    path: str | Path,
    layout: Layout | None = None,
    kernels: str | dict[str, str] | Kernels = "auto",
    numerics: str | Numerics = "reference",
    devices: Sequence[Any] | None = None,
) -> Model:
    """Reads a checkpoint onto the devices of a layout.

    path: official safetensors folder or converted folder; kernels: "auto", one implementation for
    all operations, or a mapping; numerics: a preset's name or a `Numerics`; devices: the layout's,
    in the order of its mesh (default: jax's first). The device is probed first unless it is one
    that this project tests (`platform.prepared`). Raises PlatformError, CheckpointError (one line a
    finding) or ValueError before any weight is read.
    """
    named = Kernels.parse(kernels)
    used = None if devices is None else groups.checked(devices, layout or Layout.single())
    chosen = Numerics.preset(numerics) if isinstance(numerics, str) else numerics
    layout = platform.prepared(layout, used)
    found = checkpoint.read(path, layout, used)
    setup = Setup(found.cfg, layout or Layout.single(), named, chosen)
    weights = found.weights
    if found.token_map is not None:
        weights = dataclasses.replace(
            weights, token_map=checkpoint.replicated(found.token_map, weights.norm)
        )
    return Model(setup, experts.first(weights, setup), found.tokenizer)
