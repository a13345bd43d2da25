"""Deterministic automata: subset construction, minimisation, products.

A ``Dfa`` has a table ``table[state, class]`` over classes of symbols; state 0 is dead and stays so,
state 1 is the start. ``starts`` and ``classes`` map a symbol to its class by intervals, so that one
type serves bytes (256 symbols) and code points (0x110000). Every automaton made here is trimmed: a
live state can reach acceptance, so that a mask never leads into a dead end.

Minimisation is Moore's refinement with hashed signatures, started from the partition by longest
remaining word, which equal states share and which cuts the rounds of counted languages from
thousands to a few. States are numbered breadth first: counted languages then repeat with a fixed
step, which `tokens` uses to share table rows.
"""

import dataclasses
from collections import deque
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int

from deepinfer_jax.structured.errors import Budget
from deepinfer_jax.structured.nfa import Nfa, code_points
from deepinfer_jax.structured.ranges import MAX, Path, Ranges, union

_MINIMISE = 8192  # above, what the builders give is nearly minimal and the rounds would dominate


@dataclasses.dataclass(frozen=True)
class Dfa:
    """starts: first symbol of each interval, starts[0] = 0. classes: class of each interval."""

    starts: Int[np.ndarray, " intervals"]
    classes: Int[np.ndarray, " intervals"]
    table: Int[np.ndarray, "states classes"]
    accept: Bool[np.ndarray, " states"]

    @property
    def states(self) -> int:
        return len(self.accept)

    def empty(self) -> bool:
        """Whether no word is accepted."""
        return self.states < 2

    def column(self, symbol: int) -> int:
        """Class of a symbol."""
        return int(self.classes[np.searchsorted(self.starts, symbol, side="right") - 1])

    def step(self, state: int, symbol: int) -> int:
        """Next state."""
        return int(self.table[state, self.column(symbol)])

    def accepts(self, word: str | bytes) -> bool:
        """Whether a word is in the language; a text's symbols are its code points."""
        state = min(1, self.states - 1)
        for symbol in word if isinstance(word, bytes) else map(ord, word):
            state = self.step(state, symbol)
        return bool(self.accept[state])

    def ranges(self, state: int, size: int = MAX + 1) -> dict[int, Ranges]:
        """Target state -> symbols that lead there, live targets only."""
        ends = np.append(self.starts[1:], size) - 1
        targets = self.table[state][self.classes]
        return {
            int(t): union(
                zip(self.starts[targets == t].tolist(), ends[targets == t].tolist(), strict=True)
            )
            for t in np.unique(targets)
            if t
        }


def symbol_classes(labels: list[Ranges], size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Intervals of [0, size) on which all labels are constant, the class of each interval, and
    which label holds which class, bool [labels, classes]."""
    cuts = {0, size}
    for ranges in labels:
        for low, high in ranges:
            cuts |= {low, high + 1}
    starts = np.array(sorted(c for c in cuts if c < size), np.int64)
    member = np.zeros((len(labels), len(starts)), bool)
    for i, ranges in enumerate(labels):
        for low, high in ranges:
            member[i, np.searchsorted(starts, low) : np.searchsorted(starts, high + 1)] = True
    columns, classes = np.unique(member, axis=1, return_inverse=True)
    return starts, classes.reshape(-1), columns


def determinise(nfa: Nfa, start: int, end: int, size: int) -> Dfa:
    """Subset construction over the symbols [0, size) of a graph without calls, then `minimise`."""
    labels = list({label: None for edges in nfa.edges for label, _ in edges})
    number = {label: i for i, label in enumerate(labels)}
    starts, classes, member = symbol_classes(labels, size)
    count = member.shape[1]
    class_labels = [sum(1 << int(i) for i in np.nonzero(member[:, k])[0]) for k in range(count)]
    edges = [[(1 << number[label], target) for label, target in node] for node in nfa.edges]
    closures: dict[int, frozenset[int]] = {}

    def closure(node: int) -> frozenset[int]:
        if node not in closures:
            seen, stack = {node}, [node]
            while stack:
                fresh = [t for t in nfa.empty[stack.pop()] if t not in seen]
                seen.update(fresh)
                stack += fresh
            closures[node] = frozenset(n for n in seen if edges[n] or n == end)
        return closures[node]

    # For labels that leave a state, which is a matter of few combinations: the groups of classes
    # that they tell apart, each the labels it takes part in, and the group of each class.
    splits: dict[int, tuple[list[int], np.ndarray]] = {}

    def split(present: int) -> tuple[list[int], np.ndarray]:
        if present not in splits:
            here = [labels_ & present for labels_ in class_labels]
            groups = list(dict.fromkeys(here))
            splits[present] = groups, np.array([groups.index(h) for h in here])
        return splits[present]

    first = closure(start)
    numbers = {first: 1}
    order, rows, limit = [first], [np.zeros(count, np.int32)], nfa.budget.limits.states
    for state in order:
        targets: dict[int, list[int]] = {}
        for node in state:
            for bit, target in edges[node]:
                targets.setdefault(bit, []).append(target)
        groups, of_class = split(sum(targets))
        reached = []
        for group in groups:
            after = [t for bit, found in targets.items() if bit & group for t in found]
            subset = closure(after[0]) if after else frozenset()
            if len(after) > 1:
                subset = subset.union(*map(closure, after[1:]))
            if subset not in numbers and subset:
                numbers[subset] = len(order) + 1
                order.append(subset)
            reached.append(numbers.get(subset, 0))
        rows.append(np.array(reached, np.int32)[of_class])
        if len(rows) % 256 == 0:
            nfa.budget.check("states", len(rows), limit)
    nfa.budget.check("states", len(rows), limit)
    accept = np.array([False] + [end in state for state in order])
    return minimise(Dfa(starts, classes, np.stack(rows), accept), nfa.budget)


def _trim(table: np.ndarray, accept: np.ndarray) -> np.ndarray:
    """The table with transitions into states that never accept sent to state 0."""
    before: list[set[int]] = [set() for _ in accept]
    for state, row in enumerate(table):
        for target in set(row.tolist()):
            before[target].add(state)
    live = accept.copy()
    queue = deque(np.nonzero(accept)[0].tolist())
    while queue:
        for state in before[queue.popleft()]:
            if state and not live[state]:
                live[state] = True
                queue.append(state)
    return np.where(live[table], table, 0)


def _longest(table: np.ndarray) -> np.ndarray:
    """Length of the longest path from each live state, -1 where there is none (a cycle)."""
    after = [set(row.tolist()) - {0} for row in table]
    before: list[list[int]] = [[] for _ in after]
    for state, targets in enumerate(after):
        for target in targets:
            before[target].append(state)
    missing = [len(targets) for targets in after]
    longest = np.full(len(after), -1, np.int64)
    queue = deque(s for s, n in enumerate(missing) if n == 0)
    longest[list(queue)] = 0
    while queue:
        state = queue.popleft()
        for previous in before[state]:
            missing[previous] -= 1
            if missing[previous] == 0:
                longest[previous] = 1 + max(longest[t] for t in after[previous])
                queue.append(previous)
    return longest


def minimise(dfa: Dfa, budget: Budget) -> Dfa:
    """The trimmed automaton with fewest states, breadth-first numbers and merged classes."""
    table, accept = _trim(dfa.table, dfa.accept), dfa.accept
    table, inverse = np.unique(table, axis=1, return_inverse=True)
    classes = inverse.reshape(-1)[dfa.classes]
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 2**63, table.shape[1], dtype=np.uint64) | np.uint64(1)
    keys = np.stack([_longest(table), accept], 1)
    block = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    count = -1
    while len(accept) <= _MINIMISE and block.max() + 1 != count:
        budget.check("minimisation")
        count = block.max() + 1
        value = rng.integers(1, 2**63, count, dtype=np.uint64)[block]
        signature = value * np.uint64(0x9E3779B97F4A7C15)
        for k in range(table.shape[1]):
            signature = signature + value[table[:, k]] * weights[k]
        block = np.unique(signature, return_inverse=True)[1].reshape(-1)
    if len(accept) > _MINIMISE:
        block = np.arange(len(accept))
    return _renumber(dfa, table, classes, accept, block)


def _renumber(
    dfa: Dfa, table: np.ndarray, classes: np.ndarray, accept: np.ndarray, block: np.ndarray
) -> Dfa:
    sample = np.zeros(block.max() + 1, np.int64)
    sample[block[::-1]] = np.arange(len(block))[::-1]
    merged = block[table[sample]]
    number = {int(block[0]): 0}
    order: list[int] = []
    if len(block) > 1 and block[1] != block[0]:
        number[int(block[1])] = 1
        order.append(int(block[1]))
    for state in order:
        for target in dict.fromkeys(merged[state].tolist()):
            if target not in number:
                number[target] = len(number)
                order.append(target)
    old = [int(block[0]), *order]
    names = np.zeros(len(merged), np.int32)
    names[list(number)] = list(number.values())
    final, inverse = np.unique(names[merged[old]], axis=1, return_inverse=True)
    return Dfa(
        dfa.starts, inverse.reshape(-1)[classes], final.astype(np.int32), accept[sample[old]]
    )


def product(a: Dfa, b: Dfa, budget: Budget, *, subtract: bool = False) -> Dfa:
    """Words of ``a`` that are in ``b`` (``subtract``: that are not)."""
    starts = np.union1d(a.starts, b.starts)
    left = a.classes[np.searchsorted(a.starts, starts, side="right") - 1]
    right = b.classes[np.searchsorted(b.starts, starts, side="right") - 1]
    pairs, classes = np.unique(np.stack([left, right], 1), axis=0, return_inverse=True)
    first = (min(1, a.states - 1), min(1, b.states - 1))
    numbers, order, rows = {first: 1}, [first], [[0] * len(pairs)]
    for x, y in order:
        row = []
        for target in zip(
            a.table[x, pairs[:, 0]].tolist(), b.table[y, pairs[:, 1]].tolist(), strict=True
        ):
            if target[0] == 0 or (target[1] == 0 and not subtract):
                row.append(0)
                continue
            if target not in numbers:
                numbers[target] = len(order) + 1
                order.append(target)
            row.append(numbers[target])
        rows.append(row)
        if len(rows) % 256 == 0:
            budget.check("states", len(rows), budget.limits.states)
    accept = [False] + [bool(a.accept[x] and b.accept[y] != subtract) for x, y in order]
    table = np.array(rows, np.int32)
    return minimise(Dfa(starts, classes.reshape(-1), table, np.array(accept)), budget)


def unite(dfas: list[Dfa], budget: Budget) -> Dfa:
    """Texts of any of some languages over code points."""
    nfa = Nfa(code_points, budget)
    start, end = nfa.node(), nfa.node()
    for dfa in dfas:
        nfa.skip(embed(nfa, start, dfa), end)
    return determinise(nfa, start, end, MAX + 1)


def embed(
    nfa: Nfa, start: int, dfa: Dfa, spell: Callable[[Ranges], tuple[Path, ...]] | None = None
) -> int:
    """Append a language over code points to a graph, spelled as the graph spells or as given."""
    spell = spell or nfa.spell
    nodes = [nfa.node() for _ in range(dfa.states)]
    end = nfa.node()
    if not dfa.empty():
        nfa.skip(start, nodes[1])
    for state in range(1, dfa.states):
        for target, ranges in dfa.ranges(state).items():
            nfa.follow(nodes[state], spell(ranges), nodes[target])
        if dfa.accept[state]:
            nfa.skip(nodes[state], end)
    return end
