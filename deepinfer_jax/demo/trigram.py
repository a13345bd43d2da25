"""The yardstick: an interpolated Kneser-Ney trigram model over the same tokens.

    p(w | u v) = max(c(u v w) - d, 0) / c(u v) + d N(u v .) / c(u v) p(w | v)

and so on down to unigrams, lower orders on the counts of different left contexts, discounts d from
the counts of counts (n1 / (n1 + 2 n2)), and a uniform share at the bottom.
"""

from collections import Counter, defaultdict

import numpy as np


class Trigram:
    """Counted once; `nats` gives the loss of a text."""

    def __init__(self, ids: np.ndarray, vocab: int):
        tokens = [int(i) for i in ids]
        three = Counter(zip(tokens, tokens[1:], tokens[2:], strict=False))
        two = Counter((v, w) for _, v, w in three)  # different left neighbours
        one = Counter(w for _, w in two)
        self._levels = [_Level(three, 2), _Level(two, 1), _Level(one, 0)]
        self._vocab = vocab

    def nats(self, ids: np.ndarray) -> float:
        """Mean nats a token, the first two left out."""
        tokens = [int(i) for i in ids]
        probability = [
            self._of(u, v, w) for u, v, w in zip(tokens, tokens[1:], tokens[2:], strict=False)
        ]
        return float(-np.mean(np.log(probability)))

    def _of(self, u: int, v: int, w: int) -> float:
        p = 1.0 / self._vocab
        for level, context in zip(reversed(self._levels), ((), (v,), (u, v)), strict=True):
            p = level.of(context, w, p)
        return p


class _Level:
    """Counts of one order; a key is (context.., token), or the token itself at order 1."""

    def __init__(self, counts: Counter, context: int):
        self._counts, self._bare = counts, context == 0
        often = Counter(counts.values())
        self._discount = often[1] / (often[1] + 2 * often[2]) if often[1] else 0.5
        total: dict[tuple[int, ...], int] = defaultdict(int)
        kinds: dict[tuple[int, ...], int] = defaultdict(int)
        for key, count in counts.items():
            before = () if self._bare else key[:-1]
            total[before] += count
            kinds[before] += 1
        self._total, self._kinds = dict(total), dict(kinds)

    def of(self, context: tuple[int, ...], token: int, lower: float) -> float:
        """Probability of the token after the context, given the lower order's."""
        total = self._total.get(context, 0)
        if not total:
            return lower
        count = self._counts.get(token if self._bare else (*context, token), 0)
        share = self._discount * self._kinds[context] / total
        return max(count - self._discount, 0.0) / total + share * lower
