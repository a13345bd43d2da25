"""A graph of rules that call each other -> a deterministic pushdown automaton over bytes.

The state of the automaton is a set of items of one stack frame, as in subset construction. An item
is a node with its *pending* calls: calls that some items have entered and others have not, so that
the stack cannot grow yet. As soon as all items have an outermost pending call, that level is
pushed. ``<`` in an XML-like grammar may open a child or start a closing tag: both items live in one
state, and the next byte decides whether a level is pushed.

    action[state, byte class] -> next state and the return symbols to push
    a state with no action whose items complete the rules F pops: next = goto[return symbol, F]

A return symbol maps each called rule to the nodes it returns to, so alternatives that call
different rules share a frame. What stays ambiguous is refused with a `TierError`: a byte on which
a rule may both go on and end (the stack below would decide), and calls nested without a byte
between them (indirect left recursion).

States 0, 1 and 2 are dead, done (after the end of sequence) and the start. The end of sequence is
the last byte class.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from deepinfer_jax.structured.dfa import symbol_classes
from deepinfer_jax.structured.errors import TierError
from deepinfer_jax.structured.nfa import ENTRY, Nfa

DEAD, DONE, START = 0, 1, 2
MAX_POP = 8  # levels that one token may close, and so one byte
_PENDING = 6  # calls that may be open without being pushed

Pending = tuple[tuple[str, int], ...]
Item = tuple[Pending, int]
Frame = frozenset[str]
Return = tuple[Frame, tuple[tuple[str, frozenset[int]], ...]]


@dataclasses.dataclass(frozen=True)
class Pushdown:
    """action: next state, 0 none. push: index into ``pushes``, tuples of return symbols, outermost
    first. final: 1 + index of the set of rules that a state completes, 0 none. goto: next state
    after a return. pure: states that can only return, which happens at once. ends: for each return
    symbol, the final sets its frame can end with.
    """

    byte_class: Int[np.ndarray, "256"]
    action: Int[np.ndarray, "states classes"]
    push: Int[np.ndarray, "states classes"]
    pushes: tuple[tuple[int, ...], ...]
    final: Int[np.ndarray, " states"]
    goto: Int[np.ndarray, "returns finals"]
    ends: tuple[tuple[int, ...], ...]

    @property
    def pure(self) -> np.ndarray:
        return (self.final > 0) & ~self.action.any(1)

    def accepts(self, text: bytes) -> bool:
        """Whether a text is in the language, with an unbounded stack: the reference in tests."""
        state, stack = START, []
        for symbol in [*self.byte_class[list(text)].tolist(), self.action.shape[1] - 1]:
            while not self.action[state, symbol]:
                if not self.final[state] or not stack:
                    return False
                state = int(self.goto[stack.pop(), self.final[state] - 1])
            stack.extend(self.pushes[self.push[state, symbol]])
            state = int(self.action[state, symbol])
        return state == DONE


def _productive(nfa: Nfa) -> set[int]:
    """Nodes from which their rule can end; what hangs on others would only cloud the states."""
    before: dict[int, list[tuple[int, str | None]]] = {}
    for node in range(len(nfa.empty)):
        for target in [*nfa.empty[node], *(t for label, t in nfa.edges[node] if label)]:
            before.setdefault(target, []).append((node, None))
        for rule, back in nfa.calls[node]:
            before.setdefault(back, []).append((node, rule))
    ends: set[str] = set()  # rules that are known to end
    while True:
        good = {end for _, end in nfa.rules.values()}
        stack = list(good)
        while stack:
            for node, rule in before.get(stack.pop(), ()):
                if node not in good and (rule is None or rule in ends):
                    good.add(node)
                    stack.append(node)
        found = {rule for rule, (start, _) in nfa.rules.items() if start in good}
        if found == ends:
            return good
        ends = found


class _Construction:
    def __init__(self, nfa: Nfa):
        self.nfa, self.good = nfa, _productive(nfa)
        labels = list({label: None for edges in nfa.edges for label, _ in edges})
        starts, classes, member = symbol_classes(labels, 256)
        sizes = np.diff(np.append(starts, 256))
        self.byte_class = np.repeat(classes, sizes).astype(np.int32)
        self.classes = member.shape[1]
        of_label = {label: np.nonzero(member[i])[0].tolist() for i, label in enumerate(labels)}
        self.edges = [[(of_label[label], target) for label, target in edges] for edges in nfa.edges]
        self.end_of = {rule: end for rule, (_, end) in nfa.rules.items()}
        self.rule_ends = frozenset(self.end_of.values())
        self.reached: dict[int, tuple[tuple[Item, ...], int | None]] = {}
        self.states: dict[tuple[Frame, frozenset[Item]], int] = {}
        self.returns: dict[Return, int] = {}
        self.callee: list[Frame] = []  # frame that a return symbol comes back from
        self.finals: dict[frozenset[str], int] = {}
        self.ends: dict[Frame, set[frozenset[str]]] = {}

    def inside(self, node: int) -> tuple[tuple[Item, ...], int | None]:
        """What a node reaches without a byte, calls included: items that can move, and the end of
        the node's own rule if that is reached."""
        if node not in self.reached:
            nfa, first = self.nfa, ((), node)
            seen: set[Item] = {first}
            stack: list[Item] = [first]
            while stack:
                pending, at = stack.pop()
                fresh = [(pending, target) for target in nfa.empty[at]]
                calls = [call for call in nfa.calls[at] if call[1] in self.good]
                if calls and len(pending) >= _PENDING:
                    raise TierError("rules call each other before the first byte (left recursion)")
                fresh += [((*pending, call), nfa.rules[call[0]][0]) for call in calls]
                if pending and at == self.end_of[pending[-1][0]]:
                    fresh.append((pending[:-1], pending[-1][1]))
                fresh = [item for item in fresh if item not in seen and item[1] in self.good]
                seen.update(fresh)
                stack += fresh
                nfa.budget.check("items of one state", len(seen), 20_000)
            moving = tuple(item for item in seen if self.edges[item[1]])
            end = next((n for p, n in seen if not p and n in self.rule_ends), None)
            self.reached[node] = moving, end
        return self.reached[node]

    def closure(self, kernel: set[Item]) -> frozenset[Item]:
        """Items reachable without a byte that can move or complete the frame."""
        found: set[Item] = set()
        seen, stack = set(kernel), list(kernel)
        while stack:
            pending, node = stack.pop()
            moving, end = self.inside(node)
            if not pending:
                found.update(moving)
                if end is not None:
                    found.add(((), end))
                continue
            found.update((pending + more, at) for more, at in moving)
            after = (pending[:-1], pending[-1][1])
            if end is not None and after not in seen:
                seen.add(after)
                stack.append(after)
        if any(len(pending) > _PENDING for pending, _ in found):
            raise TierError("rules call each other before the first byte (left recursion)")
        return frozenset(found)

    def state(self, frame: Frame, kernel: set[Item]) -> int:
        """Number of a state, made when first asked for."""
        key = (frame, self.closure(kernel))
        if key not in self.states:
            self.states[key] = len(self.states) + START
            self.nfa.budget.check("states", len(self.states), self.nfa.budget.limits.states)
        return self.states[key]

    def commit(self, frame: Frame, kernel: set[Item]) -> tuple[Frame, set[Item], tuple[int, ...]]:
        """Push the calls that all items have entered."""
        pushed: list[int] = []
        while all(pending for pending, _ in kernel):
            back: dict[str, set[int]] = {}
            inside: dict[str, set[Item]] = {}
            for pending, node in kernel:
                back.setdefault(pending[0][0], set()).add(pending[0][1])
                inside.setdefault(pending[0][0], set()).add((pending[1:], node))
            if sum(len(back[r]) * len(inside[r]) for r in back) != len(kernel):
                break  # which return belongs to which item is still open
            key = (frame, tuple(sorted((r, frozenset(nodes)) for r, nodes in back.items())))
            if key not in self.returns:
                self.returns[key] = len(self.returns)
                self.callee.append(frozenset(back))
            pushed.append(self.returns[key])
            frame, kernel = frozenset(back), set().union(*inside.values())
        return frame, kernel, tuple(pushed)

    def completes(self, frame: Frame, items: frozenset[Item]) -> frozenset[str]:
        return frozenset(r for r in frame if ((), self.end_of[r]) in items)

    def run(self) -> Pushdown:
        entry = frozenset({ENTRY})
        self.state(entry, {((), self.nfa.rules[ENTRY][0])})
        width = self.classes + 1
        action, push, final = [[0] * width] * 2, [[0] * width] * 2, [0, 0]
        pushes: dict[tuple[int, ...], int] = {(): 0}
        goto: dict[tuple[int, int], int] = {}
        done = 0
        while done < len(self.states):
            for frame, items in list(self.states)[done:]:
                kernels: dict[int, set[Item]] = {}
                for pending, node in items:
                    for classes, target in self.edges[node]:
                        for k in classes:
                            if target in self.good:
                                kernels.setdefault(k, set()).add((pending, target))
                actions, pushed = [0] * width, [0] * width
                for k, kernel in kernels.items():
                    inner, rest, symbols = self.commit(frame, kernel)
                    actions[k] = self.state(inner, rest)
                    pushed[k] = pushes.setdefault(symbols, len(pushes))
                ended = self.completes(frame, items)
                if frame == entry:
                    actions[-1] = DONE if ended else DEAD
                elif ended:
                    self.finals.setdefault(ended, len(self.finals))
                    self.ends.setdefault(frame, set()).add(ended)
                action.append(actions)
                push.append(pushed)
                final.append(self.finals[ended] + 1 if ended and frame != entry else 0)
                done += 1
            for (frame, back), symbol in self.returns.items():
                for ended in self.ends.get(self.callee[symbol], ()):
                    key = (symbol, self.finals[ended])
                    if key not in goto:
                        nodes = set().union(*(nodes for rule, nodes in back if rule in ended))
                        goto[key] = self.state(frame, {((), node) for node in nodes})
        table = np.zeros((len(self.returns), max(len(self.finals), 1)), np.int32)
        for key, target in goto.items():
            table[key] = target
        return Pushdown(
            self.byte_class,
            np.array(action, np.int32),
            np.array(push, np.int32),
            tuple(pushes),
            np.array(final, np.int32),
            table,
            tuple(
                tuple(self.finals[e] for e in self.ends.get(callee, ())) for callee in self.callee
            ),
        )

    def check(self, machine: Pushdown) -> None:
        """Refuse a byte on which a state may go on and also end, given some stack below it, and
        rules that end together in any number."""
        own = machine.action != 0
        frames = [frozenset(), frozenset(), *(frame for frame, _ in self.states)]
        follow = {
            (frame, self.finals[e]): np.zeros(own.shape[1], bool)
            for frame, ends in self.ends.items()
            for e in ends
        }
        closed = dict.fromkeys(follow, 1)
        changed = True
        while changed:
            changed = False
            for (caller, _), symbol in self.returns.items():
                for ended in machine.ends[symbol]:
                    target = machine.goto[symbol, ended]
                    after, levels = own[target].copy(), 1
                    if machine.final[target]:
                        below = (caller, int(machine.final[target]) - 1)
                        after |= follow[below]
                        levels += closed[below]
                    if levels > MAX_POP:
                        raise TierError(f"more than {MAX_POP} rules may end at one byte")
                    key = (self.callee[symbol], ended)
                    changed |= levels > closed[key] or bool((after & ~follow[key]).any())
                    follow[key] |= after
                    closed[key] = max(closed[key], levels)
        for state in np.nonzero(machine.final)[0]:
            both = own[state] & follow[(frames[state], int(machine.final[state]) - 1)]
            if both.any():
                byte = int(np.nonzero(machine.byte_class == np.nonzero(both)[0][0])[0][0])
                rules = " or ".join(sorted(frames[state]))
                raise TierError(f"at byte {bytes([byte])!r} rule {rules} may go on or end")


def pushdown(nfa: Nfa) -> Pushdown:
    """The deterministic automaton of a graph with calls; raises `TierError` if there is none."""
    construction = _Construction(nfa)
    machine = construction.run()
    construction.check(machine)
    return machine
