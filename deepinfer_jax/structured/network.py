"""EBNF rules -> one graph of rules that call each other, with as few calls as possible.

A call costs a stack level on the device, so a rule becomes callable only where it must:

- direct left recursion turns into a loop, ``a ::= a x | b`` = ``b x*``;
- rules off every cycle, and those whose cycles all pass through a callable rule, are written out;
- a callable rule in last position needs no return: ``a ::= x a | y`` jumps to its own start, and
  another rule's copy inside the frame serves the same way (so right recursion is a loop too).
"""

from deepinfer_jax.structured.errors import Budget
from deepinfer_jax.structured.nfa import (
    ENTRY,
    Choice,
    Nfa,
    Reference,
    Repeat,
    Sequence,
    Tree,
    references,
)
from deepinfer_jax.structured.ranges import utf8_paths


def _loops(name: str, tree: Tree) -> Tree:
    """A rule without direct left recursion."""
    again: list[Tree] = []
    base: list[Tree] = []
    for item in tree.items if isinstance(tree, Choice) else (tree,):
        if item == Reference(name):
            continue  # a ::= a adds nothing
        if isinstance(item, Sequence) and item.items and item.items[0] == Reference(name):
            again.append(Sequence(item.items[1:]))
        else:
            base.append(item)
    if not again:
        return tree
    return Sequence((Choice(tuple(base)), Repeat(Choice(tuple(again)), 0, None)))


def _reachable(rules: dict[str, Tree], name: str) -> set[str]:
    seen: set[str] = set()
    stack = list(references(rules[name]))
    while stack:
        one = stack.pop()
        if one not in seen:
            seen.add(one)
            stack.extend(references(rules[one]))
    return seen


def _acyclic(rules: dict[str, Tree], removed: set[str]) -> bool:
    """Whether every cycle of references meets ``removed``."""
    state: dict[str, int] = {}

    def visit(name: str) -> bool:
        state[name] = 1
        for used in references(rules[name]) - removed:
            if state.get(used) == 1 or (used not in state and not visit(used)):
                return False
        state[name] = 2
        return True

    return all(name in state or visit(name) for name in rules)


def callable_rules(rules: dict[str, Tree]) -> tuple[set[str], set[str]]:
    """(a small set of rules that meets every cycle, all rules on cycles)."""
    recursive = {name for name in rules if name in _reachable(rules, name)}
    uses = {n: sum(n in references(tree) for tree in rules.values()) for n in recursive}
    few = set(recursive)
    for name in sorted(recursive, key=lambda n: (uses[n], n)):
        if _acyclic(rules, few - {name}):
            few -= {name}
    return few, recursive


class _Builder:
    """Builds frames: the graph of one callable rule with everything written out but its calls."""

    def __init__(self, rules: dict[str, Tree], callable_: set[str], nfa: Nfa):
        self.rules, self.callable, self.nfa = rules, callable_, nfa
        self.waiting: list[str] = []

    def frame(self, name: str) -> None:
        nfa = self.nfa
        start, end = nfa.node(), nfa.node()
        nfa.rules[name] = (start, end)
        copies = {name: start}

        def refer(used: str, place: int, last: bool) -> int:
            if used not in self.callable:
                return nfa.tree(self.rules[used], place, refer, last)
            if not last:
                self.waiting.append(used)
                return nfa.call(place, used)
            if used not in copies:
                copies[used] = nfa.node()
                nfa.skip(nfa.tree(self.rules[used], copies[used], refer), end)
            nfa.skip(place, copies[used])
            return nfa.node()  # nothing comes back here: the copy runs to the frame's end

        nfa.skip(nfa.tree(self.rules[name], start, refer), end)


def build(rules: dict[str, Tree], budget: Budget, *, calls_everywhere: bool = False) -> Nfa:
    """The graph over bytes with the rules it calls; ``nfa.rules[ENTRY]`` runs ``root``.

    calls_everywhere: make every recursive rule callable; sometimes deterministic where the small
    set is not.
    """
    rules = {name: _loops(name, tree) for name, tree in rules.items()} | {ENTRY: Reference("root")}
    rules = {name: rules[name] for name in {ENTRY, *_reachable(rules, ENTRY)}}
    few, recursive = callable_rules(rules)
    nfa = Nfa(utf8_paths, budget)
    builder = _Builder(rules, recursive if calls_everywhere else few, nfa)
    builder.waiting.append(ENTRY)
    while builder.waiting:
        name = builder.waiting.pop()
        if name not in nfa.rules:
            builder.frame(name)
    return nfa
