"""How many drafted tokens a decode step verifies, from confidences and measured step times.

The drafter's confidence of place j, a logit c_j, estimates the chance that draft j stands given
that those before it do; survival a_j = prod_{i <= j} sigmoid(c_i / T_i) is the chance that it is
emitted. A step that feeds n turns and the best drafts in a program of R rows emits

    E(R) = n + sum of the R - n largest survivals         tokens in a measured time t(R),

and the budget is the R with the largest E(R) / t(R) (DeepInfer's confidence-scheduled
verification). Which drafts get the rows is decided on the device with their own confidences
(`verify.widths`). The budget itself comes from confidences that the host has read, at least two
rounds old (`Confidences`): a later confidence of a block says something about the drafts before it,
so a budget from the block itself would choose which drafts are verified by what they are, and
acceptance would be biased (the non-anticipation rule).

T_j are calibration temperatures, fitted to what happened. Plain numpy, no clock, no randomness.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float

HISTORY = 4096  # judged drafts a place that a temperature is fitted to
REFIT = 256  # least newly judged drafts between fits; later an eighth of those kept
PRIOR = 32.0  # weight of T = 1, in judged drafts of even odds


def acceptance(
    confidence: Float[np.ndarray, "*turns block"], temperature: Float[np.ndarray, " block"]
) -> Float[np.ndarray, "*turns block"]:
    """Chance of each draft to stand if those before it do."""
    return _sigmoid(confidence / temperature)


def survival(
    confidence: Float[np.ndarray, "*turns block"], temperature: Float[np.ndarray, " block"]
) -> Float[np.ndarray, "*turns block"]:
    """Chance of each draft to be emitted."""
    return np.cumprod(acceptance(confidence, temperature), axis=-1)


def best_rows(
    chances: Float[np.ndarray, "turns block"], turns: int, seconds: Mapping[int, float]
) -> int:
    """The row count, of those whose step time is known, that emits most tokens a second.

    chances: as of `survival`; turns: running requests, each with one sure row; seconds: time of a
    step by its rows. Ties go to fewer rows. Raises ValueError if no program has room for the turns.
    """
    falling = np.sort(chances.reshape(-1))[::-1]
    expected = turns + np.concatenate([[0.0], np.cumsum(falling)])
    best, rate = -1, -1.0
    for rows in sorted(rows for rows in seconds if rows >= turns):
        drafts = min(rows - turns, falling.size)
        if expected[drafts] / seconds[rows] > rate:
            best, rate = rows, float(expected[drafts]) / seconds[rows]
    if best < 0:
        raise ValueError(f"{turns} turns; expected at most {max(seconds, default=0)}")
    return best


class Confidences:
    """What a budget may know of each request's drafts: confidences of blocks that a step already
    sent has verified. Those of the block that the next step will verify are kept back, however
    early the host reads them (a prefill in between gives it the time)."""

    def __init__(self) -> None:
        self._known: dict[int, np.ndarray] = {}
        self._ahead: dict[int, np.ndarray] = {}

    def read(self, request: int, confidence: np.ndarray, *, verified: bool) -> None:
        """Of the block that a step made; verified: a later step of the request has been sent."""
        (self._known if verified else self._ahead)[request] = confidence

    def sent(self, request: int) -> None:
        """A step that verifies the request's newest block has been sent."""
        if request in self._ahead:
            self._known[request] = self._ahead.pop(request)

    def known(self, request: int) -> np.ndarray | None:
        """The newest that may be used; None before the first."""
        return self._known.get(request)

    def ahead(self, request: int) -> np.ndarray | None:
        """Of the newest block, which no step sent has verified."""
        return self._ahead.get(request)

    def forget(self, request: int) -> None:
        """The request has ended."""
        self._known.pop(request, None)
        self._ahead.pop(request, None)


class Calibration:
    """One temperature a draft place, of the likelihood of what happened; starts at 1."""

    def __init__(self, block: int):
        self.temperature = np.ones(block, np.float32)
        self._logits: list[list[float]] = [[] for _ in range(block)]
        self._stood: list[list[bool]] = [[] for _ in range(block)]
        self._sums = [0.0] * block  # of the logits
        self._new, self._due = 0, REFIT

    def observe(self, confidence: Sequence[float], judged: int, accepted: int) -> None:
        """One turn: confidences of its block, drafts judged (verified with all before them
        standing) and drafts that stood."""
        for place in range(judged):
            logit = float(confidence[place])
            self._logits[place].append(logit)
            self._stood[place].append(place < accepted)
            self._sums[place] += logit
        self._new += judged
        if self._new >= self._due:
            for place in range(len(self._logits)):
                self._refit(place)
            # A fit reads all that is kept, so many turns a step must not mean a fit a step.
            self._new, self._due = 0, max(REFIT, sum(map(len, self._logits)) // 8)

    def expected(self) -> Float[np.ndarray, " block"]:
        """Mean confidence of each place as a logit: what to expect of a block not yet read."""
        pairs = zip(self._sums, self._logits, strict=True)
        return np.array([total / max(len(seen), 1) for total, seen in pairs], np.float32)

    def _refit(self, place: int) -> None:
        logits, stood = self._logits[place], self._stood[place]
        del logits[:-HISTORY], stood[:-HISTORY]
        if logits:
            kept = np.array(logits)
            self._sums[place] = float(kept.sum())
            # A new array: a step in flight may still read the old one.
            fitted = self.temperature.copy()
            fitted[place] = fit_temperature(kept, np.array(stood))
            self.temperature = fitted


def fit_temperature(logits: Float[np.ndarray, " n"], stood: Bool[np.ndarray, " n"]) -> float:
    """The T in [1/8, 8] that makes sigmoid(logits / T) likeliest, drawn towards 1 by PRIOR.

    With a = 1 / T the negative log-likelihood is convex in a; Newton's method with its bounds.
    """
    z = np.clip(logits.astype(np.float64), -60, 60)
    a = 1.0
    for _ in range(30):
        chance = _sigmoid(a * z)
        slope = np.sum((chance - stood) * z) + PRIOR / 4 * (a - 1)
        bend = np.sum(chance * (1 - chance) * z * z) + PRIOR / 4
        before, a = a, float(np.clip(a - slope / bend, 1 / 8, 8))
        if abs(a - before) < 1e-9:
            break
    return 1 / a


def _sigmoid(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    return 1 / (1 + np.exp(-np.clip(x, -60, 60)))
