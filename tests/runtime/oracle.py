"""The sampling rules again, in plain numpy float64, one row and one option at a time."""

import numpy as np

from deepinfer_jax.runtime.sampling_params import SamplingParams


def adjusted(logits, params: SamplingParams, prompt, output, stop=(), allowed=None) -> np.ndarray:
    """Logits of one row after penalties, biases, bans, held-back stop ids and the grammar mask."""
    out = np.asarray(logits, np.float64).copy()
    for token in set(prompt) | set(output):
        r = params.repetition_penalty
        out[token] = out[token] / r if out[token] > 0 else out[token] * r
    for token in output:
        out[token] -= params.frequency_penalty
    for token in set(output):
        out[token] -= params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        out[token] += bias
    if params.banned_token_ids:
        out[list(params.banned_token_ids)] = -np.inf
    if params.allowed_token_ids:
        rest = np.setdiff1d(np.arange(len(out)), params.allowed_token_ids)
        out[rest] = -np.inf
    if len(output) < params.min_tokens:
        out[list(stop)] = -np.inf
    if allowed is not None:
        out[~np.asarray(allowed)] = -np.inf
    return out


def probabilities(logits, params: SamplingParams) -> np.ndarray:
    """What is sampled from: temperature, top-k, top-p of the rest, min-p, renormalised."""
    logits = np.asarray(logits, np.float64)
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    p = np.zeros(len(logits))
    if params.temperature == 0:
        p[order[0]] = 1.0
        return p
    with np.errstate(over="ignore"):
        p = np.exp((logits - logits.max()) / params.temperature)
    kept = order[: params.top_k] if params.top_k else order
    total, mass = p[kept].sum(), 0.0
    if params.top_p < 1:
        nucleus = []
        # Probabilities that float32 cannot tell apart are equals: the lowest id comes first.
        for token in sorted(kept, key=lambda v: (-np.float32(p[v]), v)):
            nucleus.append(token)
            mass += p[token]
            if mass >= params.top_p * total:
                break
        kept = nucleus
    kept = [token for token in kept if p[token] >= params.min_p]
    out = np.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


def log_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    top = logits.max()
    return logits - top - np.log(np.exp(logits - top).sum())
