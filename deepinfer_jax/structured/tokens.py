"""Byte automaton x vocabulary -> token tables.

A token acts on the automaton as a function from states to outcomes. Few of these functions differ:
for the 128,000 tokens of DeepSeek there are 11 for a date and 250 for a JSON string of bounded
length, because a function only sees a token through the classes of its bytes. So the tables are

    class of token          uint16 [vocabulary]
    pattern[state, class]   which of the state's few distinct outcomes, 0 for none
    outcome                 next state, or an edge that moves the stack

One walk over the trie of the vocabulary finds them: a node's function is its parent's followed by
one byte, and equal functions are shared, so the cost is (pairs of function and byte class) x
states, not tokens x states. The end of sequence is a byte class of its own, so EOS ids are tokens
like any other.

States share patterns (all states inside strings tell tokens apart in the same way), and lists of
outcomes too: next states are stored relative to the state, so that counted states have equal ones.
An outcome is ``BIAS + next - state``, or ``-1 - edge``; see `stack` for edges.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, UInt16

from deepinfer_jax.structured.dfa import Dfa
from deepinfer_jax.structured.errors import Budget
from deepinfer_jax.structured.pushdown import DONE, START
from deepinfer_jax.structured.vocabulary import Vocabulary

BIAS = 1 << 24
NEVER = (1 << 24) - 1  # need of a state that cannot finish


@runtime_checkable
class Machine(Protocol):
    """What the walk needs: the class of each byte and how a column of outcomes takes one byte."""

    byte_class: Int[np.ndarray, "256"]
    end_class: int

    def first(self) -> np.ndarray:
        """The column of the empty text: every state to itself."""
        ...

    def step(self, column: np.ndarray, byte_class: int) -> np.ndarray:
        """The column after one more byte."""
        ...


class FiniteMachine:
    """A byte automaton with the states of `pushdown`: dead, done, start, ..."""

    def __init__(self, dfa: Dfa):
        sizes = np.diff(np.append(dfa.starts, 256))
        self.byte_class = np.repeat(dfa.classes, sizes).astype(np.int32)
        self.end_class = dfa.table.shape[1]
        shifted = np.where(dfa.table > 0, dfa.table + 1, 0)[1:]
        table = np.zeros((dfa.states + 1, self.end_class + 1), np.int32)
        table[START:, :-1] = shifted
        table[START:, -1] = np.where(dfa.accept[1:], DONE, 0)
        self.columns = np.ascontiguousarray(table.T)

    def first(self) -> np.ndarray:
        return np.arange(self.columns.shape[1], dtype=np.int32)

    def step(self, column: np.ndarray, byte_class: int) -> np.ndarray:
        return self.columns[byte_class][column]


def classify(
    vocabulary: Vocabulary, machine: Machine, budget: Budget
) -> tuple[Int[np.ndarray, "classes states"], UInt16[np.ndarray, " vocabulary"]]:
    """Columns of the distinct token functions, column 0 all dead, and the column of each token."""
    first = machine.first()
    columns = [np.zeros_like(first), first]
    number = {columns[0].tobytes(): 0, columns[1].tobytes(): 1}
    steps: dict[int, int] = {}
    width = machine.end_class + 1

    def after(function: int, byte_class: int) -> int:
        key = function * width + byte_class
        if function and key not in steps:
            column = machine.step(columns[function], byte_class)
            steps[key] = number.setdefault(column.tobytes(), len(columns))
            if steps[key] == len(columns):
                columns.append(column)
                cells = len(columns) * len(first)
                budget.check("cells of states x token classes", cells, budget.limits.cells)
        return steps[key] if function else 0

    of_token = np.zeros(vocabulary.width, np.int64)
    functions = np.array([1])
    for level in vocabulary.levels:
        keys = functions[level.parents] * width + machine.byte_class[level.bytes]
        distinct, inverse = np.unique(keys, return_inverse=True)
        found = [after(*divmod(key, width)) for key in distinct.tolist()]
        functions = np.array(found, np.int64)[inverse.reshape(-1)]
        of_token[level.tokens] = functions[level.nodes]
        if not functions.any():
            break
    of_token[list(vocabulary.eos)] = after(1, machine.end_class)
    used = np.union1d([0], of_token)
    budget.check("token classes", len(used), budget.limits.classes)
    classes = np.searchsorted(used, of_token).astype(np.uint16)
    return np.stack([columns[i] for i in used.tolist()]), classes


def distinct(
    columns: Int[np.ndarray, "classes states"], classes: UInt16[np.ndarray, " vocabulary"]
) -> tuple[Int[np.ndarray, "kept states"], UInt16[np.ndarray, " vocabulary"]]:
    """Columns without repetitions, and the tokens' columns among them."""
    number: dict[bytes, int] = {}
    renamed = np.array([number.setdefault(c.tobytes(), len(number)) for c in columns], np.uint16)
    first = np.unique(renamed, return_index=True)[1]
    return columns[first], renamed[classes]


@dataclasses.dataclass(frozen=True)
class Rows:
    """patterns: 1 + position in the list of outcomes, 0 where a class is not allowed. outcomes: all
    lists, encoded as the module says. pattern, begin, length: pattern and list of each state."""

    patterns: Int[np.ndarray, "patterns classes"]
    outcomes: Int[np.ndarray, " outcomes"]
    pattern: Int[np.ndarray, " states"]
    begin: Int[np.ndarray, " states"]
    length: Int[np.ndarray, " states"]


def share_rows(columns: Int[np.ndarray, "classes states"]) -> Rows:
    """Encode columns of outcomes: next states below the number of states, edges from there on."""
    states = columns.shape[1]
    outcome = columns.T.astype(np.int32)
    relative = outcome - np.arange(states, dtype=np.int32)[:, None] + BIAS
    outcome = np.where(outcome >= states, states - outcome - 1, np.where(outcome, relative, 0))
    rows: dict[bytes, tuple[int, int, int]] = {}
    patterns: dict[bytes, int] = {}
    lists: dict[bytes, int] = {}
    size, found = 0, []
    for row in outcome:
        key = row.tobytes()
        if key not in rows:
            values, first, inverse = np.unique(row, return_index=True, return_inverse=True)
            first[values == 0] = -1  # position 0, also where every class is allowed
            order = np.argsort(first)
            rank = np.empty(len(values), np.int32)
            rank[order] = np.arange(len(values)) + (0 not in values)
            listed = values[order][values[order] != 0]
            number = patterns.setdefault(rank[inverse].tobytes(), len(patterns))
            begin = lists.setdefault(listed.tobytes(), size)
            size += len(listed) if begin == size else 0
            rows[key] = number, begin, len(listed)
        found.append(rows[key])
    table = np.array(found, np.int32)
    shape = (len(patterns), columns.shape[0])
    return Rows(
        np.frombuffer(b"".join(patterns), np.int32).reshape(shape),
        np.frombuffer(b"".join(lists), np.int32),
        *(np.ascontiguousarray(part) for part in table.T),
    )


def shortest(rows: Rows) -> Int[np.ndarray, " states"]:
    """Tokens from each state to done, EOS included; `NEVER` where there is no way.

    For automata without a stack. Exact: breadth-first over the distinct next states.
    """
    states = len(rows.pattern)
    sources = np.repeat(np.arange(states), rows.length)
    within = np.arange(len(sources)) - np.repeat(np.cumsum(rows.length) - rows.length, rows.length)
    targets = sources + rows.outcomes[np.repeat(rows.begin, rows.length) + within] - BIAS
    order = np.argsort(targets, kind="stable")
    sources, targets = sources[order], targets[order]
    begin = np.searchsorted(targets, np.arange(states + 1))
    need = np.full(states, NEVER, np.int64)
    need[DONE] = 0
    frontier, steps = np.array([DONE]), 0
    while len(frontier):
        steps += 1
        before = np.concatenate([sources[begin[t] : begin[t + 1]] for t in frontier.tolist()])
        frontier = np.unique(before[need[before] == NEVER])
        need[frontier] = steps
    return need
