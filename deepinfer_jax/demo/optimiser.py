"""Muon for matrices, Adam for the rest; one step over a flat dictionary of float32 arrays.

Muon: momentum m <- 0.95 m + g; the update is the nearest (semi-)orthogonal matrix to g + 0.95 m, by
five Newton-Schulz steps X <- a X + (b A + c A^2) X with A = X X^T, times sqrt(max(1, rows/cols)).
Matrices of one shape go through it in one batched product. Adam: betas 0.9 and 0.95. Decay is
decoupled, on Muon's matrices, the embedding and the head, and strongest on Engram rows: Adam moves
a row by about the same however rarely it is read, so only decay makes rare n-grams say little.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MOMENTUM = 0.95
BETAS = 0.9, 0.95
EPS = 1e-10
DECAY = 0.05
ADAM_DECAY = {"table": 0.5, "embed": 0.1, "head": 0.1}  # by the last part of the name
NEWTON = (3.4445, -4.7750, 2.0315)

Flat = Mapping[str, Array]


class State(NamedTuple):
    """first: momentum of every array; second: of Adam's arrays only; step: done so far."""

    first: dict[str, Array]
    second: dict[str, Array]
    step: Array


def is_matrix(name: str) -> bool:
    """Whether Muon updates this array: projections and experts, not tables, heads, norms, mixes."""
    other = ("embed", "head", "norm", "table", "hc_", "sink", "bias", "gate", "confidence")
    part = name.split("/")
    return not any(word in piece for piece in part for word in other) and part[-1] not in (
        "q_weight",
        "k_weight",
    )


def start(params: Flat) -> State:
    """No momentum yet."""
    return State(
        {name: jnp.zeros_like(value) for name, value in params.items()},
        {name: jnp.zeros_like(v) for name, v in params.items() if not is_matrix(name)},
        jnp.zeros((), jnp.int32),
    )


def update(
    params: Flat, grads: Flat, state: State, *, matrix_rate: Any, rate: Any
) -> tuple[dict[str, Array], State]:
    """One step. matrix_rate: Muon's; rate: Adam's."""
    step = state.step + 1
    count = step.astype(jnp.float32)
    first, second, new = {}, {}, {}
    directions: dict[tuple[int, int], list[tuple[str, Array]]] = {}
    for name, p in params.items():
        g = grads[name]
        if is_matrix(name):
            first[name] = MOMENTUM * state.first[name] + g
            direction = g + MOMENTUM * first[name]
            shape = (p.shape[-2], p.shape[-1])
            directions.setdefault(shape, []).append((name, direction.reshape(-1, *shape)))
            continue
        first[name] = BETAS[0] * state.first[name] + (1 - BETAS[0]) * g
        second[name] = BETAS[1] * state.second[name] + (1 - BETAS[1]) * jnp.square(g)
        mean = first[name] / (1 - BETAS[0] ** count)
        scale = jnp.sqrt(second[name] / (1 - BETAS[1] ** count)) + EPS
        decay = ADAM_DECAY.get(name.split("/")[-1], 0.0)
        new[name] = p * (1 - rate * decay) - rate * mean / scale
    for shape, items in directions.items():
        stacked = orthogonal(jnp.concatenate([direction for _, direction in items]))
        stacked = stacked * jnp.float32(max(1.0, shape[0] / shape[1]) ** 0.5)
        at = 0
        for name, direction in items:
            p, some = params[name], direction.shape[0]
            turned = stacked[at : at + some].reshape(p.shape)
            new[name] = p * (1 - matrix_rate * DECAY) - matrix_rate * turned
            at += some
    return new, State(first, second, step)


def orthogonal(g: Float[Array, "n rows cols"]) -> Float[Array, "n rows cols"]:
    """U V^T of each matrix, about."""
    wide = g if g.shape[1] <= g.shape[2] else g.transpose(0, 2, 1)
    x = wide / (jnp.sqrt(jnp.sum(jnp.square(wide), axis=(1, 2), keepdims=True)) + 1e-7)
    a, b, c = NEWTON
    for _ in range(5):
        gram = jnp.einsum("nik,njk->nij", x, x)
        poly = b * gram + c * jnp.einsum("nij,njk->nik", gram, gram)
        x = a * x + jnp.einsum("nij,njk->nik", poly, x)
    return x if g.shape[1] <= g.shape[2] else x.transpose(0, 2, 1)


def clip(grads: Flat, limit: float) -> tuple[dict[str, Array], Array]:
    """Gradients scaled to a global norm of at most `limit`, and that norm."""
    norm = jnp.sqrt(jax.tree.reduce(jnp.add, jax.tree.map(lambda g: jnp.sum(g * g), dict(grads))))
    factor = jnp.minimum(1.0, limit / (norm + 1e-6))
    return {name: g * factor for name, g in grads.items()}, norm
