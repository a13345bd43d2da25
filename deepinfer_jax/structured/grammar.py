"""A compiled grammar: its tables as the device reads them, and a report of what it became.

``pack`` lays the tables out as one block of int32 cells that a pool copies to any place:

    states   (pattern, list of outcomes, cost) of each state      cost = need + height << 24
    rows     the patterns and lists of `tokens`
    edges    (next state or -1, cost, return symbols)             `stack`
    exits    outcome by edge and return symbol, next states absolute
    returns  need of each return symbol
    trigger  its distinct tokens, then the next progress by progress and token
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Int32, UInt16

from deepinfer_jax.structured.device import (
    EDGE,
    EDGES,
    EXITS,
    HEADER,
    HEIGHT,
    MAX_TRIGGER,
    RETURN_COUNT,
    RETURNS,
    STATE,
    TRIGGER,
    TRIGGER_LENGTH,
)
from deepinfer_jax.structured.errors import GrammarError
from deepinfer_jax.structured.stack import MAX_PUSH, Edges, Steering
from deepinfer_jax.structured.tokens import BIAS, NEVER, Rows


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a request's grammar.

    tier: 1 finite automaton, 2 pushdown automaton, 3 host masks. reason: why not a lower tier.
    states, classes, patterns, edges, exits: sizes. bytes: of the tables and the token classes.
    seconds: compilation. min_tokens: shortest output, EOS included (0: unknown). levels: least
    stack. warnings: what "lenient" ignored.
    """

    tier: int
    reason: str
    states: int = 0
    classes: int = 0
    patterns: int = 0
    edges: int = 0
    exits: int = 0
    bytes: int = 0
    seconds: float = 0.0
    min_tokens: int = 0
    levels: int = 0
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Block:
    """cells: int32 [n]; header: offsets relative to the block (`device`); both immutable."""

    cells: Int32[np.ndarray, " cells"]
    header: Int32[np.ndarray, " fields"]


def trigger_table(tokens: Sequence[int]) -> Int32[np.ndarray, " cells"]:
    """Distinct tokens (-1 padded), then for each progress the next one after each of them."""
    if len(tokens) > MAX_TRIGGER:
        raise GrammarError(f"trigger has {len(tokens)} token ids, at most {MAX_TRIGGER} fit")
    distinct = list(dict.fromkeys(tokens))
    table = np.full((1 + len(tokens), MAX_TRIGGER), -1, np.int32)
    table[0, : len(distinct)] = distinct
    for seen in range(len(tokens)):
        for slot, token in enumerate(distinct):
            text = [*tokens[:seen], token]
            best = next(
                n for n in range(len(text), -1, -1) if text[len(text) - n :] == [*tokens[:n]]
            )
            table[1 + seen, slot] = best
    return table.reshape(-1)


def pack(rows: Rows, steering: Steering, edges: Edges | None, trigger: Sequence[int]) -> Block:
    """One block of all tables."""
    states = len(rows.pattern)
    classes = rows.patterns.shape[1]
    number = len(edges.target) if edges else 0
    returns = edges.exits.shape[1] if edges else 0
    patterns_at = STATE * states
    outcomes_at = patterns_at + rows.patterns.size
    header = np.zeros(HEADER, np.int32)
    header[EDGES] = outcomes_at + rows.outcomes.size
    header[EXITS] = header[EDGES] + number * EDGE
    header[RETURNS] = header[EXITS] + number * returns
    header[RETURN_COUNT] = returns
    header[TRIGGER] = header[RETURNS] + max(returns, 1)
    header[TRIGGER_LENGTH] = len(trigger)
    state_cells = np.zeros((states, STATE), np.int32)
    state_cells[:, 0] = patterns_at + rows.pattern.astype(np.int64) * classes
    state_cells[:, 1] = outcomes_at + rows.begin - 1  # positions count from 1
    state_cells[:, 2] = _cost(steering.need, steering.height)
    parts = [state_cells, rows.patterns, rows.outcomes]
    if edges:
        table = np.full((number, EDGE), -1, np.int32)
        table[:, 0] = edges.target
        exits = edges.target < 0  # never an outcome in themselves
        table[:, 1] = _cost(np.where(exits, NEVER, steering.edge_need), steering.edge_height)
        table[:, 2:] = edges.pushed
        then = edges.exits
        absolute = np.where(then >= states, states - then - 1, np.where(then, then + BIAS, 0))
        parts += [table, absolute.astype(np.int32)]
    parts.append(steering.return_need if returns else np.zeros(1))
    parts.append(trigger_table(trigger))
    cells = np.concatenate([np.asarray(part, np.int32).reshape(-1) for part in parts])
    assert edges is None or edges.pushed.shape[1] == MAX_PUSH
    return Block(cells, header)


def _cost(need: Int[np.ndarray, " n"], height: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    return need + (np.minimum(height, 127) << HEIGHT)


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """A grammar that a pool can load (tiers 1 and 2) or a host matcher can run (tier 3).

    key: of its content, vocabulary and options. block, token_class: the tables; of the host tier
    those of an automaton with one state, whose token classes are its mask. host: what llguidance
    compiles, None in the device tiers.
    """

    key: str
    report: Report
    block: Block
    token_class: UInt16[np.ndarray, " vocabulary"]
    trigger: tuple[int, ...] = ()
    host: str | None = None
