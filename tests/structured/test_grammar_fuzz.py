"""Random small grammars: the automaton against a plain recogniser, its tables against a simulation.

A grammar has one to three rules over ``a b ( ) x`` that call each other at will, so that calls
share first bytes, end together and recurse in every way; what is declined must say so.
"""

import random
from collections import Counter

import numpy as np

from deepinfer_jax.structured import Limits, network
from deepinfer_jax.structured.dfa import determinise
from deepinfer_jax.structured.errors import Budget, TierError
from deepinfer_jax.structured.nfa import (
    ENTRY,
    Characters,
    Choice,
    Reference,
    Repeat,
    Sequence,
    Text,
    Tree,
)
from deepinfer_jax.structured.pushdown import DONE, START, pushdown
from tests.structured.grammar_walk import LEVELS, advance, mask
from tests.structured.simulation import Simulation


def random_tree(rnd: random.Random, names: list[str], depth: int) -> Tree:
    kind = rnd.random()
    if depth == 0 or kind < 0.3:
        return Text(rnd.choice(["a", "b", "(", ")", "ab", "x"])) if rnd.random() < 0.8 else AB
    if kind < 0.5:
        opening, closing = Text(rnd.choice("(a")), Text(rnd.choice(")bx"))
        return Sequence((opening, Reference(rnd.choice(names)), closing))
    if kind < 0.58:
        return Reference(rnd.choice(names))
    items = tuple(random_tree(rnd, names, depth - 1) for _ in range(rnd.randint(2, 3)))
    if kind < 0.75:
        return Sequence(items)
    if kind < 0.9:
        return Choice(items)
    low = rnd.choice([0, 1])
    return Repeat(items[0], low, rnd.choice([None, low + 1]))


AB = Characters(((97, 98),))


def recognises(rules: dict[str, Tree], text: str) -> bool:
    """Least fixed point of where each rule can end from each place."""
    ends: dict[tuple[str, int], set[int]] = {}

    def run(tree: Tree, at: int) -> set[int]:
        if isinstance(tree, Text):
            return {at + len(tree.text)} if text.startswith(tree.text, at) else set()
        if isinstance(tree, Characters):
            return {at + 1} if text[at : at + 1] in ("a", "b") else set()
        if isinstance(tree, Reference):
            return set(ends.get((tree.name, at), ()))
        if isinstance(tree, Choice):
            return set().union(*(run(item, at) for item in tree.items))
        if isinstance(tree, Sequence):
            places = {at}
            for item in tree.items:
                places = {end for place in places for end in run(item, place)}
            return places
        found, places = {at} if tree.low == 0 else set(), {at}
        for _ in range(tree.high or len(text) + 2):
            places = {end for place in places for end in run(tree.item, place)}
            found |= places
        return found

    while True:
        before = sum(map(len, ends.values()))
        for name, tree in rules.items():
            for at in range(len(text) + 1):
                ends.setdefault((name, at), set()).update(run(tree, at))
        if sum(map(len, ends.values())) == before:
            return len(text) in ends["root", 0]


def random_rules(seed: int) -> tuple[random.Random, dict[str, Tree]]:
    rnd = random.Random(seed)
    names = ["root", "p", "q"][: rnd.randint(1, 3)]
    return rnd, {name: random_tree(rnd, names, 3) for name in names}


def test_automata_recognise_their_grammars():
    seen: Counter[str] = Counter()
    for seed in range(100):
        rnd, rules = random_rules(seed)
        texts = ["".join(rnd.choices("ab()x", k=rnd.randint(0, 5))) for _ in range(40)]
        for everywhere in (False, True):
            nfa = network.build(rules, Budget(Limits()), calls_everywhere=everywhere)
            try:
                stack = any(nfa.calls)
                machine = pushdown(nfa) if stack else determinise(nfa, *nfa.rules[ENTRY], 256)
            except TierError:
                seen["declined"] += 1
                continue
            seen["with a stack" if stack else "without"] += 1
            for text in texts:
                expected = recognises(rules, text)
                assert machine.accepts(text.encode()) == expected, (seed, rules, text)
                seen["accepted"] += expected
    assert seen["with a stack"] > 30 and seen["accepted"] > 60 and seen["declined"] < 30, seen


def write(tree: Tree) -> str:
    """A tree as EBNF."""
    if isinstance(tree, Text):
        return f'"{tree.text}"'
    if isinstance(tree, Characters):
        return "[ab]"
    if isinstance(tree, Reference):
        return tree.name
    if isinstance(tree, Repeat):
        return f"({write(tree.item)}){{{tree.low},{'' if tree.high is None else tree.high}}}"
    joined = (" | " if isinstance(tree, Choice) else " ").join(map(write, tree.items))
    return f"({joined})"


def test_tables_follow_their_automata(walker, vocabulary):
    tested = 0
    for seed in range(80):
        rnd, rules = random_rules(seed)
        text = "\n".join(f"{name} ::= {write(tree)}" for name, tree in rules.items())
        try:
            grammar = walker.compile({"ebnf": text})
        except ValueError:
            continue  # no text at all, or the host tier is not installed
        if grammar.report.tier != 2:
            continue
        simulation = Simulation(text, vocabulary, LEVELS)
        row, tested = walker.load(grammar), tested + 1
        state, config = walker.state(grammar, row, 1), (START, ())
        for _ in range(8):
            allowed = mask(walker.pool, state)[0]
            possible = simulation.mask(config)
            assert not (allowed & ~possible).any(), (text, config)
            token = rnd.choice(np.nonzero(allowed)[0].tolist())
            state, config = advance(walker.pool, state, token), simulation.token(config, token)
            if config[0] == DONE:
                break
        walker.manager.release(row)
    assert tested > 6, tested
