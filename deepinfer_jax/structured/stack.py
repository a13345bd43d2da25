"""Token tables of a pushdown automaton: what a token does to the stack.

Seen from a state, a token leads to a next state in the same frame, pushes return symbols, or leaves
the frame after some bytes with the rest of the token still to read. The last two are *edges*:

    push edge   next state and the symbols to push
    exit edge   a row of ``exits[edge, return symbol]``: the outcome of the rest, from the state
                that the symbol on top of the stack returns to; it may be an exit again

An exit depends on its token only through the rest's outcomes, so tokens share few of them. They are
found as functions of return symbols in the same way as `tokens` finds functions of states, then
merged by partition refinement (an exit may lead to itself, so they are compared as automata).

Two numbers steer. ``need`` of a state: tokens that surely complete its frame (of the outermost
frame: the text, EOS included); a sequence needs that of its state plus those of the return symbols
on its stack. ``height``: stack levels this takes. Tokens are counted inside one frame, so ``need``
is an upper bound where one token closes several frames.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from deepinfer_jax.structured.errors import Budget, GrammarError
from deepinfer_jax.structured.pushdown import DEAD, DONE, START, Pushdown
from deepinfer_jax.structured.tokens import NEVER

MAX_PUSH = 8  # levels that one token may open

_Push = tuple[tuple[int, ...], int]  # return symbols, next state
_Exit = tuple[int, tuple[int, ...]]  # completed set of rules, byte classes still to read


class StackMachine:
    """A pushdown automaton as `tokens.classify` walks it.

    Outcomes are numbers: states, then edges in the order in which they are found.
    """

    def __init__(self, machine: Pushdown, budget: Budget):
        self.pushdown, self.budget = machine, budget
        self.byte_class = machine.byte_class
        self.end_class = machine.action.shape[1] - 1
        self.states, self.pure = len(machine.final), machine.pure.tolist()
        self.edges: list[_Push | None] = []  # None: an exit
        self.number: dict[_Push | _Exit, int] = {}
        self.exits: dict[int, list[int]] = {}  # exit -> outcome of each return symbol
        self.same: dict[tuple[int, ...], int] = {}  # those outcomes -> exit
        self.known: dict[int, np.ndarray] = {}  # byte class -> outcome after it, by outcome
        self.key_of: dict[int, _Exit] = {}
        self.local: set[int] = set()  # exits with nothing left to read

    def first(self) -> np.ndarray:
        return np.arange(self.states, dtype=np.int32)

    def step(self, column: np.ndarray, byte_class: int) -> np.ndarray:
        known = self._table(byte_class)
        after = known[column]
        if (after < 0).any():
            for outcome in np.unique(column[after < 0]).tolist():
                self.after(outcome, byte_class)
            after = self._table(byte_class)[column]
        return after

    def _table(self, symbol: int) -> np.ndarray:
        """What is known of a byte class, -1 where it is not; moves inside a frame are from the
        start."""
        size = self.states + len(self.edges)
        known = self.known.get(symbol)
        if known is None:
            machine = self.pushdown
            target = machine.action[:, symbol]
            inside = (target > 0) & (machine.push[:, symbol] == 0) & ~machine.pure[target]
            known = np.where(inside, target, np.where((target > 0) | (machine.final > 0), -1, DEAD))
        if len(known) < size:
            more = np.full(2 * size - len(known), -1, np.int32)
            known = self.known[symbol] = np.concatenate([known.astype(np.int32), more])
        return known

    def after(self, outcome: int, symbol: int) -> int:
        """An outcome after one more byte class."""
        found = int(self._table(symbol)[outcome])
        if found < 0:
            if outcome < self.states:
                found = self.move((), outcome, symbol)
            elif (edge := self.edges[outcome - self.states]) is not None:
                found = self.move(*edge, symbol)
            else:
                final, rest = self.key_of[outcome]
                found = self.exit(final, (*rest, symbol))
            self._table(symbol)[outcome] = found
        return found

    def move(self, pushed: tuple[int, ...], state: int, symbol: int) -> int:
        machine = self.pushdown
        while not machine.action[state, symbol]:
            if not machine.final[state]:
                return DEAD
            if not pushed:
                return self.exit(int(machine.final[state]) - 1, (symbol,))
            state = int(machine.goto[pushed[-1], machine.final[state] - 1])
            pushed = pushed[:-1]
        pushed = pushed + machine.pushes[machine.push[state, symbol]]
        return self.settle(pushed, int(machine.action[state, symbol]))

    def settle(self, pushed: tuple[int, ...], state: int) -> int:
        """Return at once from states that can only return; then the outcome's number."""
        machine = self.pushdown
        while self.pure[state]:
            if not pushed:
                return self.exit(int(machine.final[state]) - 1, ())
            state = int(machine.goto[pushed[-1], machine.final[state] - 1])
            pushed = pushed[:-1]
        if not pushed or state == DEAD:
            return state
        if len(pushed) > MAX_PUSH:
            return DEAD
        return self.intern((pushed, state), (pushed, state))

    def intern(self, key: _Push | _Exit, edge: _Push | None) -> int:
        if key not in self.number:
            self.number[key] = self.states + len(self.edges)
            self.edges.append(edge)
            self.budget.check("edges before merging", len(self.edges), 200_000)
        return self.number[key]

    def exit(self, final: int, rest: tuple[int, ...]) -> int:
        """The number of an exit; dead if no return symbol lets the rest follow. Exits of equal
        outcomes share one, so that the rest is read on once for all of them."""
        key = (final, rest)
        if key not in self.number:
            number = self.intern(key, None)
            self.key_of[number] = key
            self.exits[number] = [number]  # alive while its own outcomes are being found
            if rest:
                before = self.exit(final, rest[:-1])
                found = [self.after(o, rest[-1]) for o in self.exits[before]] if before else []
            else:
                found = [self.settle((), int(state)) for state in self.pushdown.goto[:, final]]
            self.exits[number] = found
            if not any(found):
                self.number[key] = DEAD
            else:
                shape = tuple(-1 if o == number else o for o in found)
                self.number[key] = self.same.setdefault(shape, number)
        if not rest:
            self.local.add(self.number[key])
        return self.number[key]


@dataclasses.dataclass(frozen=True)
class Edges:
    """Edges of a grammar after merging, for the tables of the device; exits come first.

    target: next state of a push edge, -1 for an exit. pushed: its return symbols, -1 padded.
    exits: outcomes by return symbol, numbered like a column's: states, then edges.
    """

    target: Int[np.ndarray, " edges"]
    pushed: Int[np.ndarray, "edges push"]
    exits: Int[np.ndarray, "edges returns"]
    local: np.ndarray  # bool [edges]: an exit that can end exactly with its token


def merge(
    machine: StackMachine, columns: Int[np.ndarray, "classes states"]
) -> tuple[Int[np.ndarray, "classes states"], Edges]:
    """Merge exits of equal outcomes and drop what no column needs; columns with new numbers."""
    states, returns = machine.states, len(machine.pushdown.goto)
    needed: dict[int, None] = {}
    stack = [o for o in np.unique(columns).tolist() if o >= states]
    while stack:
        one = stack.pop()
        if one not in needed:
            needed[one] = None
            stack += [o for o in machine.exits.get(one, ()) if o >= states]
    exits = [o for o in needed if o in machine.exits]
    vectors = np.array([machine.exits[o] for o in exits], np.int64).reshape(len(exits), returns)
    class_of = np.arange(states + len(machine.edges))
    class_of[exits] = states + len(machine.edges)  # one class to begin with
    count = 0
    while exits:
        distinct, inverse = np.unique(class_of[vectors], axis=0, return_inverse=True)
        class_of[exits] = states + len(machine.edges) + inverse.reshape(-1)
        if len(distinct) == count:
            break
        count = len(distinct)
    final: dict[int, int] = {}
    for one in sorted(needed, key=lambda one: one not in machine.exits):  # exits come first
        final.setdefault(int(class_of[one]), len(final))
    machine.budget.check("stack outcomes", len(final), machine.budget.limits.edges)
    machine.budget.check("stack exits", count, machine.budget.limits.exits)
    target = np.full(len(final), -1, np.int32)
    pushed = np.full((len(final), MAX_PUSH), -1, np.int32)
    table = np.zeros((len(final), returns), np.int32)
    local = np.zeros(len(final), bool)
    renamed = np.arange(states + len(machine.edges), dtype=np.int32)
    for one in needed:
        renamed[one] = states + final[int(class_of[one])]
    for one in needed:
        at = final[int(class_of[one])]
        if (edge := machine.edges[one - states]) is not None:
            target[at] = edge[1]
            pushed[at, : len(edge[0])] = edge[0]
        else:
            table[at] = renamed[machine.exits[one]]
            local[at] |= one in machine.local
    return renamed[columns], Edges(target, pushed, table, local)


@dataclasses.dataclass(frozen=True)
class Steering:
    """need and height of states and edges, need of return symbols; see the module."""

    need: Int[np.ndarray, " states"]
    height: Int[np.ndarray, " states"]
    edge_need: Int[np.ndarray, " edges"]
    edge_height: Int[np.ndarray, " edges"]
    return_need: Int[np.ndarray, " returns"]


def steer(machine: Pushdown, columns: Int[np.ndarray, "classes states"], edges: Edges) -> Steering:
    """Least fixed point: heights first, then needs along outcomes that keep the least height."""
    states = len(machine.final)
    base = np.full(states, NEVER, np.int64)
    base[machine.final > 0] = 0
    base[DONE] = 0
    push = edges.target >= 0
    where = [np.nonzero(p >= 0)[0] for p in edges.pushed]

    def over_returns(value: np.ndarray) -> np.ndarray:
        """The worst case over the ways a frame can end."""
        rows = [
            value[machine.goto[s, list(e)]] if e else [NEVER] for s, e in enumerate(machine.ends)
        ]
        return np.array([max(row) for row in rows], np.int64)

    def of_edges(value: np.ndarray, levels: bool) -> np.ndarray:
        back = over_returns(value)
        out = np.where(edges.local, 0, NEVER)
        for e in np.nonzero(push)[0]:
            symbols = edges.pushed[e, where[e]]
            inside = value[edges.target[e]]
            if levels:
                out[e] = max(inside + len(symbols), *(back[symbols] + np.arange(len(symbols))))
            else:
                out[e] = inside + back[symbols].sum()
        return np.minimum(out, NEVER)

    # The distinct outcomes of each state, one after another; ``first``: where a state's begin.
    outcomes = np.sort(columns.T, axis=1)
    new = np.diff(outcomes, axis=1, prepend=-1) > 0
    source, outcomes = np.nonzero(new)[0], outcomes[new]
    first = np.searchsorted(source, np.arange(states))

    def solve(step: int, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value = base.copy()
        while True:
            edge = of_edges(value, step == 0)
            cost = np.where(allowed, np.concatenate([value, edge])[outcomes] + step, NEVER)
            best = np.minimum(np.minimum(base, np.minimum.reduceat(cost, first)), NEVER)
            if (best == value).all():
                return value, edge
            value = best

    height, edge_height = solve(0, outcomes != DEAD)
    level = np.concatenate([height, edge_height])[outcomes]
    need, edge_need = solve(1, (level <= height[source]) & (outcomes != DEAD))
    if height[START] >= NEVER or need[START] >= NEVER:
        raise GrammarError("no text of this vocabulary completes the grammar")
    return Steering(need, height, edge_need, edge_height, over_returns(need))


def prune(
    columns: Int[np.ndarray, "classes states"], edges: Edges, steering: Steering
) -> tuple[Int[np.ndarray, "classes states"], Edges]:
    """Outcomes that no text completes become dead, in columns and behind exits."""
    pushes = edges.target >= 0
    need = np.concatenate([steering.need, np.where(pushes, steering.edge_need, 0)])
    dead = need >= NEVER
    kept = dataclasses.replace(edges, exits=np.where(dead[edges.exits], DEAD, edges.exits))
    return np.where(dead[columns], DEAD, columns).astype(np.int32), kept
