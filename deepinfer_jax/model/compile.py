"""`jit` with the one compiler option this model depends on.

XLA may keep a value in float32 where the program rounds it to bfloat16 and widens it again
("excess precision"); whether it does depends on what it fuses. The rounding points are part of the
model's numerics and of the promise of equal bits, so every program of ours is compiled without it.
"""

from collections.abc import Callable
from typing import Any

import jax

COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` of a model function; options as there."""
    return jax.jit(function, compiler_options=COMPILER_OPTIONS, **options)
