"""Engram: table rows from python integers, then the gated lookup (V4.1 report 2.4)."""

import numpy as np

from tests.oracle.checkpoint import Checkpoint
from tests.oracle.rules import Rules, rms, sigmoid

DEAD = -1


def prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def constants(cfg: dict) -> dict[int, tuple[list[list[int]], list[int]]]:
    """layer -> (primes [n-gram size][head], multipliers one a look-back)."""
    seen: set[int] = set()
    made = {}
    for layer in cfg["engram_layer_ids"]:
        primes = []
        for _ in range(2, cfg["engram_max_ngram_size"] + 1):
            row, current = [], cfg["engram_vocab_size"] - 1
            for _ in range(cfg["engram_n_heads"]):
                current += 1
                while not prime(current) or current in seen:
                    current += 1
                seen.add(current)
                row.append(current)
            primes.append(row)
        bound = ((2**63 - 1) // cfg["engram_compressed_vocab_size"]) // 2
        drawn = np.random.default_rng(10007 * layer).integers(
            0, bound, size=cfg["engram_max_ngram_size"], dtype=np.int64
        )
        made[layer] = primes, [2 * int(m) + 1 for m in drawn]
    return made


def table_rows(classes: list[int], pad: int, primes: list[list[int]], multipliers: list[int]):
    """Row numbers of every position, int64 [s, columns]; a class may be DEAD."""
    rows = []
    for p in range(len(classes)):
        blocked, terms = False, []
        for s in range(len(multipliers)):
            blocked = blocked or p < s or classes[p - s] == DEAD
            terms.append(pad if blocked else int(classes[p - s]))
        value, offset, row = terms[0] * multipliers[0], 0, []
        for s, heads in enumerate(primes, start=1):
            value ^= terms[s] * multipliers[s]
            for modulus in heads:
                row.append(value % modulus + offset)
                offset += modulus
        rows.append(row)
    return np.array(rows)


def lookup(rules: Rules, store: Checkpoint, layer: int, rows: np.ndarray, streams: np.ndarray):
    """streams [s, n, d] with the gated memory of `rows` added."""
    cfg, prefix = store.config, f"layers.{layer}.engram"
    n, d, eps = cfg["hc_mult"], cfg["hidden_size"], cfg["rms_norm_eps"]
    memory = store[f"{prefix}.embed"][rows].reshape(len(rows), -1)
    projected = rules.product(memory, store[f"{prefix}.wkv"])
    key, value = projected[:, : n * d].reshape(-1, n, d), projected[:, n * d :]
    weight = store[f"{prefix}.q_weight"] * store[f"{prefix}.k_weight"]
    dot = (streams * weight * key).sum(-1) * (rms(streams, eps) * rms(key, eps))[..., 0]
    dot = dot / np.sqrt(d)
    gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot))
    return rules.out(streams + gate[..., None] * value[:, None, :])
