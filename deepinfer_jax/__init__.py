"""DeepSeek-V4.1-Flash inference in JAX: one model, every layout, the same bits.

The public names are loaded when they are first used, so that importing the package costs nothing
and pulls in no jax: ``deepinfer-jax --help`` and the converters stay quick.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Group": "deepinfer_jax.runtime.handover",
    "LLM": "deepinfer_jax.runtime.engine",
    "Layout": "deepinfer_jax.layout",
    "ModelConfig": "deepinfer_jax.config",
    "Numerics": "deepinfer_jax.config",
    "SamplingParams": "deepinfer_jax.runtime.sampling_params",
    "load": "deepinfer_jax.runtime.model",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import the module that a public name lives in, and keep the name here."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
