"""Router and experts (V4.1 report 2.5), expert by expert."""

import numpy as np

from tests.oracle.checkpoint import Checkpoint
from tests.oracle.rules import Rules, best, gap, silu


def route(x: np.ndarray, gate: np.ndarray, bias: np.ndarray, count: int, factor: float) -> tuple:
    """x [s, d] -> ids [s, k] ascending, weights [s, k], smallest selection gap."""
    ids, weights, margin = [], [], np.inf
    for token in x:
        score = np.sqrt(np.logaddexp(0, gate @ token))
        chosen = best(score + bias, count)
        margin = min(margin, gap(score + bias, chosen))
        ids.append(chosen)
        weights.append(score[chosen] / (score[chosen].sum() + 1e-20) * factor)
    return np.array(ids), np.array(weights), margin


def expert(rules: Rules, x: np.ndarray, w1, w2, w3, limit: float, weight=None) -> np.ndarray:
    """w2(weight * silu(min(w1 x, limit)) * clamp(w3 x)); the weight is applied before w2."""
    gate = np.minimum(rules.product(x, w1), limit)
    up = np.clip(rules.product(x, w3), -limit, limit)
    hidden = silu(gate) * up
    if weight is not None:
        hidden = weight[:, None] * hidden
    return rules.product(rules.out(hidden), w2)


def moe(rules: Rules, store: Checkpoint, prefix: str, x: np.ndarray, experts: int, count: int):
    """One MoE sublayer on normed rows x: (output, ids, weights, gap)."""
    cfg = store.config
    limit = cfg["swiglu_limit"]
    ids, weights, margin = route(
        x,
        store[f"{prefix}.gate"],
        store[f"{prefix}.gate.bias"],
        count,
        cfg["routed_scaling_factor"],
    )
    total = np.zeros_like(x)
    for number in range(experts):
        token, place = np.nonzero(ids == number)
        if token.size:
            w1, w2, w3 = (store[f"{prefix}.experts.{number}.{w}"] for w in ("w1", "w2", "w3"))
            total[token] += expert(rules, x[token], w1, w2, w3, limit, weights[token, place])
    w1, w2, w3 = (store[f"{prefix}.shared_experts.{w}"] for w in ("w1", "w2", "w3"))
    out = rules.out(total + expert(rules, x, w1, w2, w3, limit))
    return out, ids, weights, margin
