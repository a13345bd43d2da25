"""Nondeterministic automata with rule calls, and the syntax trees they are built from.

All front ends end here. An ``Nfa`` is one graph over integer symbols: bytes for what the device
runs, code points for the strings of a schema before they are spelled in bytes. Its edges are
labelled with sets of symbols; besides there are empty edges and calls ``(rule, return node)``,
which make it a recursive network (Woods 1970). A rule is a pair of nodes of the same graph.

Trees are plain tuples, so that they can be compared and hashed: ``Characters``, ``Text``,
``Sequence``, ``Choice``, ``Repeat`` (high None: unbounded), ``Reference`` to a named rule.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from deepinfer_jax.structured.errors import Budget
from deepinfer_jax.structured.ranges import Path, Ranges, points


class Characters(NamedTuple):
    ranges: Ranges


class Text(NamedTuple):
    text: str


class Sequence(NamedTuple):
    items: tuple["Tree", ...]


class Choice(NamedTuple):
    items: tuple["Tree", ...]


class Repeat(NamedTuple):
    item: "Tree"
    low: int
    high: int | None


class Reference(NamedTuple):
    name: str


Tree = Characters | Text | Sequence | Choice | Repeat | Reference
EMPTY = Sequence(())
ENTRY = ""  # name of the rule that a graph starts with


def references(tree: Tree) -> set[str]:
    """Names of the rules that a tree refers to."""
    if isinstance(tree, Reference):
        return {tree.name}
    if isinstance(tree, Repeat):
        return references(tree.item)
    if isinstance(tree, Sequence | Choice):
        return set().union(*map(references, tree.items))
    return set()


def code_points(ranges: Ranges) -> tuple[Path, ...]:
    """Spelling over the alphabet of code points: one symbol."""
    return ((ranges,),) if ranges else ()


@dataclasses.dataclass
class Nfa:
    """spell: the paths that a set of characters stands for (`code_points`, `utf8_paths`)."""

    spell: Callable[[Ranges], tuple[Path, ...]]
    budget: Budget
    empty: list[list[int]] = dataclasses.field(default_factory=list)
    edges: list[list[tuple[Ranges, int]]] = dataclasses.field(default_factory=list)
    calls: list[list[tuple[str, int]]] = dataclasses.field(default_factory=list)
    rules: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def node(self) -> int:
        """A new node without edges."""
        self.empty.append([])
        self.edges.append([])
        self.calls.append([])
        count = len(self.empty)
        if count % 1024 == 0:
            self.budget.check("automaton nodes", count, self.budget.limits.nodes)
        return count - 1

    def follow(self, start: int, paths: tuple[Path, ...], end: int | None = None) -> int:
        """Lead any of the paths from one node to another (a new one); equal tails share nodes."""
        end = self.node() if end is None else end
        shared: dict[tuple[Ranges, int], int] = {}
        for path in paths:
            target = end
            for symbols in reversed(path[1:]):
                key = (symbols, target)
                if key not in shared:
                    shared[key] = self.node()
                    self.edges[shared[key]].append(key)
                target = shared[key]
            self.edges[start].append((path[0], target))
        return end

    def text(self, start: int, text: str) -> int:
        """One fixed text."""
        for character in text:
            start = self.follow(start, self.spell(points(character)))
        return start

    def skip(self, start: int, end: int) -> None:
        """An empty edge."""
        self.empty[start].append(end)

    def call(self, start: int, rule: str) -> int:
        """Run a rule from here; gives the node where it returns to."""
        end = self.node()
        self.calls[start].append((rule, end))
        return end

    def repeat(self, start: int, build: Callable[[int], int], low: int, high: int | None) -> int:
        """low..high copies of what ``build`` appends to a node (high None: no bound)."""
        most = low if high is None else high
        self.budget.check("repetitions", most, self.budget.limits.repeat)
        for _ in range(low):
            start = build(start)
        end = self.node()
        if high is None:
            loop = self.node()
            self.skip(start, loop)
            self.skip(build(loop), loop)
            self.skip(loop, end)
            return end
        self.skip(start, end)
        for _ in range(most - low):
            start = build(start)
            self.skip(start, end)
        return end

    def tree(
        self,
        tree: Tree,
        start: int,
        refer: Callable[[str, int, bool], int] | None = None,
        last: bool = True,
    ) -> int:
        """Append a tree; ``refer(name, start, last)`` appends a rule, ``last`` if nothing follows
        it in the tree, and returns where it ends."""
        if isinstance(tree, Characters):
            return self.follow(start, self.spell(tree.ranges))
        if isinstance(tree, Text):
            return self.text(start, tree.text)
        if isinstance(tree, Sequence):
            for i, item in enumerate(tree.items):
                start = self.tree(item, start, refer, last and i == len(tree.items) - 1)
            return start
        if isinstance(tree, Choice):
            end = self.node()
            for item in tree.items:
                branch = self.node()
                self.skip(start, branch)
                self.skip(self.tree(item, branch, refer, last), end)
            return end
        if isinstance(tree, Repeat):
            once = last and (tree.low, tree.high) == (0, 1)
            return self.repeat(
                start, lambda p: self.tree(tree.item, p, refer, once), tree.low, tree.high
            )
        assert refer is not None, "this front end has no rules"
        return refer(tree.name, start, last)
