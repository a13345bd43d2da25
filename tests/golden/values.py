"""The golden files as numpy arrays; PROVENANCE.md says what each name means."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.checkpoint import plain, read_safetensors

FOLDER = Path(__file__).parent
TINY = FOLDER / "v41-tiny"  # the checkpoint


@functools.cache
def independent() -> dict[str, np.ndarray]:
    """Values of an independent PyTorch implementation in float32."""
    return _read("v41_tiny.safetensors")


@functools.cache
def official() -> dict[str, np.ndarray]:
    """Values of the released code itself."""
    return _read("v41_tiny_official.safetensors")


def release_engram() -> dict[str, Any]:
    """Engram constants and table rows of the released configuration."""
    return json.loads((FOLDER / "v41_release_engram.json").read_text())


def _read(name: str) -> dict[str, np.ndarray]:
    return {key: plain(*stored) for key, stored in read_safetensors(FOLDER / name).items()}
