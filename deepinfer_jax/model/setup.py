"""The four static arguments of every model function, in their fixed order.

A researcher changes one of them at a time: the numbers (`cfg`), where things live (`layout`), which
implementation computes each operation (`kernels`) and how it is computed (`numerics`). All four are
hashable, so a `Setup` is one static argument of `jax.jit`.
"""

from typing import NamedTuple

import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.layout import Layout
from pallas_kernels import Kernels


class Setup(NamedTuple):
    """cfg, layout, kernels, numerics; `phase` picks the layout's per-phase activation rules."""

    cfg: ModelConfig
    layout: Layout = Layout.single()
    kernels: Kernels = Kernels.auto()
    numerics: Numerics = Numerics()
    phase: str | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """The arithmetic type between modules."""
        return jnp.dtype(self.numerics.compute)
