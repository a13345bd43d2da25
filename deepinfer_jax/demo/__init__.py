"""The embedded demo: a small trained checkpoint in the official on-disk format.

It is what ``LLM()`` and ``deepinfer-jax generate`` use when no checkpoint is named, and the script
that trained it lies beside it.
"""

from importlib import resources
from pathlib import Path


def checkpoint() -> Path:
    """Folder of the embedded checkpoint."""
    return Path(str(resources.files("deepinfer_jax.demo").joinpath("checkpoint")))
