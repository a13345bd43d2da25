"""mHC in its single-pass form, one token after another (V4.1 report 2.1).

From the n streams of a token: pre (collapses the streams for the NEXT sublayer), post (how the
sublayer's output is added) and comb (how streams mix; rows are sources, columns destinations).
"""

import numpy as np

from tests.oracle.rules import Rules, exp, rms, sigmoid


def sinkhorn(logits: np.ndarray, iterations: int, eps: float) -> np.ndarray:
    """[n, n] -> nearly doubly stochastic; the last step normalises columns."""
    a = exp(logits - logits.max(axis=1, keepdims=True))
    a = a / a.sum(axis=1, keepdims=True) + eps
    a = a / (a.sum(axis=0, keepdims=True) + eps)
    for _ in range(iterations - 1):
        a = a / (a.sum(axis=1, keepdims=True) + eps)
        a = a / (a.sum(axis=0, keepdims=True) + eps)
    return a


def split(m: np.ndarray, scale: np.ndarray, base: np.ndarray, cfg: dict) -> tuple:
    """Statistics of one token [2n + n^2] -> pre [n], post [n], comb [n, n]."""
    n, eps = cfg["hc_mult"], cfg["hc_eps"]
    pre = sigmoid(m[:n] * scale[0] + base[:n]) + eps
    post = 2 * sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n])
    square = (m[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
    return pre, post, sinkhorn(square, cfg["hc_sinkhorn_iters"], eps)


def mixes(rules: Rules, streams: np.ndarray, fn, base, scale, cfg: dict) -> tuple:
    """streams [s, n, d] -> pre [s, n], post [s, n], comb [s, n, n]."""
    fn, base, scale = (part.astype(rules.mixing) for part in (fn, base, scale))
    parts = []
    for token in streams.astype(rules.mixing):
        flat = token.reshape(-1)
        m = (fn * flat).sum(axis=-1) * rms(flat, cfg["rms_norm_eps"])
        parts.append(split(m, scale, base, cfg))
    return tuple(np.stack(part) for part in zip(*parts, strict=True))


def collapse(rules: Rules, streams: np.ndarray, pre: np.ndarray) -> np.ndarray:
    """sum_n pre_n X_n."""
    return rules.out(np.einsum("sn,snd->sd", pre, streams))


def write_back(rules: Rules, out: np.ndarray, streams: np.ndarray, post, comb) -> np.ndarray:
    """X'_j = post_j out + sum_i comb_ij X_i."""
    wide = streams.astype(rules.mixing)
    mixed = comb[:, 0, :, None] * wide[:, 0, None, :]
    for i in range(1, wide.shape[1]):
        mixed = mixed + comb[:, i, :, None] * wide[:, i, None, :]
    new = post[:, :, None] * out.astype(rules.mixing)[:, None, :]
    return rules.out((new + mixed).astype(streams.dtype))
