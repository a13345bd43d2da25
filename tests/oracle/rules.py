"""How the transcription computes: which values are quantised, and whether bfloat16 rounds.

Products are float64 whatever the rules, so with `half` every module output is the bfloat16 nearest
to the exact result of its rounded inputs: what the released code computes up to the order of its
float32 sums. Those orders are not known, and a value near a bfloat16 midpoint shows them; `mixing`
chooses between two correct ones for mHC, whose sums decide nearly all of it.
"""

from typing import NamedTuple

import numpy as np

from tests.oracle import formats


class Rules(NamedTuple):
    """act_quant: FP8 inputs of FP8 and FP4 products; cache_qdq: caches through their formats;
    half: modules hand over bfloat16; mixing: what mHC computes in (float32: pairwise sums)."""

    act_quant: bool = False
    cache_qdq: bool = False
    half: bool = False
    mixing: type = np.float64

    def out(self, x: np.ndarray) -> np.ndarray:
        """A module's output."""
        return formats.half(x) if self.half else x

    def product(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """x W^T with an FP8 or FP4 weight: the input is quantised if the rules say so."""
        return self.out((formats.fp8_groups(x) if self.act_quant else x) @ weight.T)

    def stored(self, x: np.ndarray, quantise) -> np.ndarray:
        """A row as a cache hands it back."""
        return quantise(x) if self.cache_qdq else x


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    """1 / root mean square over the last axis."""
    return 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def norm(rules: Rules, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm."""
    return rules.out(weight * (x * rms(x, eps)))


def exp(x: np.ndarray) -> np.ndarray:
    """Correctly rounded, whatever vector unit numpy was built for."""
    return np.exp(x.astype(np.float64)).astype(x.dtype)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def best(score: np.ndarray, count: int) -> np.ndarray:
    """Ascending indices of the `count` highest scores above -inf, ties to the lowest index."""
    order = np.argsort(-score, kind="stable")[:count]
    return np.sort(order[score[order] > -np.inf])


def gap(score: np.ndarray, chosen: np.ndarray) -> float:
    """Distance from the worst chosen to the best rejected score, in standard deviations of the
    finite scores; infinite if nothing was rejected or both are exactly equal (ties are ordered)."""
    finite = score[np.isfinite(score)]
    rejected = np.delete(score, chosen)
    rejected = rejected[rejected > -np.inf]
    if not rejected.size or not chosen.size:
        return np.inf
    distance = score[chosen].min() - rejected.max()
    return np.inf if distance == 0 else distance / finite.std()
