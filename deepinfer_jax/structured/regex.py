"""Regular expressions -> automata over code points.

The syntax is python's: `re`'s own parser reads the pattern, so that nothing is accepted that python
would read otherwise, and what is not regular (lookaround, backreferences, atomic groups, ``\\b``)
is refused by name. Small plain patterns then go through interegular, whose automata agree with ours
there; it misreads lookaheads and possessive repeats, is quadratic in states and knows only ASCII
classes, so everything else takes our own path (tree -> graph -> subsets).

Two readings of a pattern: ``search=False`` matches the whole text (the "regex" request);
``search=True`` matches anywhere (``pattern`` of a JSON schema, ECMA-262). Anchors may stand
anywhere: the text is framed by two marker symbols that ``^`` and ``$`` consume, and the frame is
divided out again.

``\\d \\w \\s`` mean their ASCII members, and ``\\D \\W \\S`` and negated sets leave the Unicode
members out too: what is produced matches in python with and without ``re.ASCII``, and in ECMA-262.
"""

import functools
import re
from re import _constants as sre  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser as sre_parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

import interegular
import numpy as np
from interegular.fsm import anything_else

from deepinfer_jax.structured.dfa import Dfa, determinise, minimise
from deepinfer_jax.structured.errors import Budget, RegexError
from deepinfer_jax.structured.nfa import (
    EMPTY,
    Characters,
    Choice,
    Nfa,
    Repeat,
    Sequence,
    Tree,
    code_points,
)
from deepinfer_jax.structured.ranges import (
    DIGIT,
    EVERYTHING,
    MAX,
    SPACE,
    WORD,
    Ranges,
    complement,
    intersection,
    points,
    unicode_category,
    union,
)

_BEGIN, _END = MAX + 1, MAX + 2
_ASCII = {"digit": DIGIT, "word": WORD, "space": SPACE}
_CATEGORIES = {
    getattr(sre, f"CATEGORY_{negation}{name.upper()}"): (name, bool(negation))
    for name in _ASCII
    for negation in ("", "NOT_")
}
_REFUSED = {
    "ASSERT": "lookahead or lookbehind",
    "ASSERT_NOT": "negative lookahead or lookbehind",
    "GROUPREF": "backreference",
    "GROUPREF_EXISTS": "conditional group",
    "ATOMIC_GROUP": "atomic group",
    "POSSESSIVE_REPEAT": "possessive repeat",
}
_INTEREGULAR = 64  # characters and repetitions of a pattern that interegular may handle


@functools.lru_cache(maxsize=1)
def _case_variants() -> dict[int, frozenset[int]]:
    """Each cased code point -> all code points of equal lower or upper case, itself included."""
    group: dict[int, set[int]] = {}
    for c in range(0x20000):  # planes above have no cased characters
        character = chr(c)
        for other in (character.lower(), character.upper()):
            if len(other) == 1 and other != character:
                merged = group.get(c, {c}) | group.get(ord(other), {ord(other)})
                for member in merged:
                    group[member] = merged
    return {c: frozenset(members) for c, members in group.items()}


def _fold(ranges: Ranges, wide: bool) -> Ranges:
    """A set with its case variants; narrow: those that every reading of (?i) agrees on."""
    extra = []
    for c, variants in _case_variants().items():
        if intersection(ranges, ((c, c),)):
            for v in variants:
                same = chr(v).lower() == chr(c).lower() and (v < 128) == (c < 128)
                if wide or same:
                    extra.append((v, v))
    return union(ranges, extra)


class _Reader:
    """Turns the parser's output into a tree. Sets have a narrow reading, used as they stand, and a
    wide one, used under negation."""

    def __init__(self, pattern: str, search: bool):
        self.pattern = pattern
        self.dot = complement(points("\n\r\u2028\u2029" if search else "\n"))
        self.anchored = False
        self.plain = True

    def refuse(self, what: str) -> RegexError:
        return RegexError(f"regex {self.pattern!r}: {what} is not supported")

    def category(self, av: Any, flags: int, wide: bool) -> Ranges:
        name, negative = _CATEGORIES[av]
        if flags & re.ASCII:
            inside = _ASCII[name]
        elif wide != negative:
            inside = union(_ASCII[name], unicode_category(name), points("\ufeff"))
        else:
            inside = _ASCII[name]
        self.plain &= not negative
        return complement(inside) if negative else inside

    def members(self, items: Any, flags: int) -> Ranges:
        negative = bool(items) and items[0][0] is sre.NEGATE
        found: list[Ranges] = []
        for op, av in items[negative:]:
            if op is sre.LITERAL:
                found.append(((av, av),))
            elif op is sre.RANGE:
                found.append((tuple(av),))
            elif op is sre.CATEGORY:
                found.append(self.category(av, flags, negative))
                self.plain &= not negative
            else:
                raise self.refuse(str(op).lower())
        ranges = union(*found)
        if flags & re.IGNORECASE:
            ranges = _fold(ranges, negative)
        return complement(ranges) if negative else ranges

    def sequence(self, items: Any, flags: int) -> Tree:
        trees = tuple(self.one(op, av, flags) for op, av in items)
        return trees[0] if len(trees) == 1 else Sequence(trees)

    def one(self, op: Any, av: Any, flags: int) -> Tree:
        name = str(op)
        if name in _REFUSED:
            raise self.refuse(_REFUSED[name])
        if op is sre.LITERAL:
            return Characters(self.members([(op, av)], flags))
        if op is sre.NOT_LITERAL:
            return Characters(self.members([(sre.NEGATE, None), (sre.LITERAL, av)], flags))
        if op is sre.ANY:
            return Characters(EVERYTHING if flags & re.DOTALL else self.dot)
        if op is sre.IN:
            return Characters(self.members(av, flags))
        if op is sre.BRANCH:
            return Choice(tuple(self.sequence(branch, flags) for branch in av[1]))
        if op is sre.SUBPATTERN:
            _, added, removed, inner = av
            self.plain &= not added and not removed
            return self.sequence(inner, (flags | added) & ~removed)
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, inner = av
            return Repeat(
                self.sequence(inner, flags), low, None if high is sre.MAXREPEAT else int(high)
            )
        if op is sre.AT:
            return self.anchor(str(av), flags)
        raise self.refuse(name.lower())

    def anchor(self, name: str, flags: int) -> Tree:
        if "BOUNDARY" in name:
            raise self.refuse("word boundary")
        if flags & re.MULTILINE and not name.endswith("STRING"):
            raise self.refuse("multi-line anchor")
        self.anchored = True
        mark = _BEGIN if "BEGINNING" in name else _END
        return Characters(((mark, mark),))


def _weight(tree: Tree) -> int:
    """Characters of a tree with its bounded repetitions written out; non-ASCII counts its size."""
    if isinstance(tree, Characters):
        named = min((tree.ranges, complement(tree.ranges)), key=lambda r: sum(b - a for a, b in r))
        return 1 + sum(b - a for a, b in intersection(named, ((128, MAX),)))
    if isinstance(tree, Repeat):
        return _weight(tree.item) * max(tree.low, tree.high or 1, 1)
    return sum(map(_weight, tree.items)) if isinstance(tree, Sequence | Choice) else 1


def _from_interegular(pattern: str) -> Dfa | None:
    """interegular's automaton as ours; None if it declines the syntax."""
    try:
        fsm = interegular.parse_pattern(pattern).to_fsm()
    except (interegular.InvalidSyntax, interegular.Unsupported, AttributeError):
        return None
    keys = {key: k for k, key in enumerate(sorted(fsm.alphabet.by_transition))}
    named = {ord(s): keys[k] for s, k in fsm.alphabet.items() if s is not anything_else}
    other = keys[fsm.alphabet[anything_else]] if anything_else in fsm.alphabet else len(keys)
    starts, classes = [0], [named.get(0, other)]
    for c in sorted({p for s in named for p in (s, s + 1)} - {0}):
        starts.append(c)
        classes.append(named.get(c, other))
    order = [fsm.initial, *(s for s in sorted(fsm.states) if s != fsm.initial)]
    number = {s: i + 1 for i, s in enumerate(order)}
    table = np.zeros((len(order) + 1, len(keys) + 1), np.int32)
    for source, row in fsm.map.items():
        for key, target in row.items():
            table[number[source], keys[key]] = number[target]
    accept = np.array([False] + [s in fsm.finals for s in order])
    return Dfa(np.array(starts, np.int64), np.array(classes, np.int64), table, accept)


def _divide(dfa: Dfa, budget: Budget) -> Dfa:
    """From words framed by the markers to the words inside: left and right quotient."""
    first = dfa.step(1, _BEGIN) if dfa.states > 1 else 0
    table, end = dfa.table, dfa.column(_END)
    if first == 0:
        return Dfa(np.zeros(1, np.int64), np.zeros(1, np.int64), table[:1, :1], dfa.accept[:1])
    accept = dfa.accept[table[:, end]]
    swap = np.arange(dfa.states)
    swap[[1, first]] = swap[[first, 1]]
    inside = dfa.starts <= MAX
    columns, classes = np.unique(dfa.classes[inside], return_inverse=True)
    moved = swap[table[swap]][:, columns].astype(np.int32)
    return minimise(Dfa(dfa.starts[inside], classes, moved, accept[swap]), budget)


def tree(pattern: str, *, search: bool = False) -> Tree:
    """The syntax tree of a pattern; `RegexError` if it is malformed or not supported."""
    return _read(pattern, search)[1]


def _read(pattern: str, search: bool) -> tuple[_Reader, Tree, int]:
    try:
        parsed = sre_parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise RegexError(f"regex {pattern!r}: {error}") from None
    except ValueError:  # int reads 4300 digits
        raise RegexError("regex: the bound of a repetition has too many digits") from None
    reader = _Reader(pattern, search)
    return reader, reader.sequence(parsed, parsed.state.flags), parsed.state.flags


def language(pattern: str, budget: Budget, *, search: bool = False) -> Dfa:
    """The automaton over code points of a pattern.

    search: match anywhere in the text, as ``pattern`` in a JSON schema does. Raises `RegexError`
    for a malformed or unsupported pattern, `TierError` where a limit is reached.
    """
    reader, inner, flags = _read(pattern, search)
    simple = reader.plain and not reader.anchored and not search and flags == re.UNICODE.value
    if simple and "[]" not in pattern and _weight(inner) <= _INTEREGULAR:
        dfa = _from_interegular(pattern)
        if dfa is not None:
            return minimise(dfa, budget)
    any_text = Repeat(Characters(EVERYTHING), 0, None)
    before = after = any_text if search else EMPTY
    if reader.anchored:
        begin, end = Characters(((_BEGIN, _BEGIN),)), Characters(((_END, _END),))
        before = Choice((EMPTY, Sequence((begin, before))))
        after = Choice((EMPTY, Sequence((after, end))))
    nfa = Nfa(code_points, budget)
    start = nfa.node()
    end = nfa.tree(Sequence((before, inner, after)), start)
    dfa = determinise(nfa, start, end, MAX + 3 if reader.anchored else MAX + 1)
    return _divide(dfa, budget) if reader.anchored else dfa
