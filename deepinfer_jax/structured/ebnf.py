"""EBNF text -> syntax trees. The dialect is xgrammar's, a superset of llama.cpp's GBNF:

    root ::= item{2,3} ("," item)* | "none"     # comment; a body may span lines
    item ::= [a-z0-9_-]+ | "\\u4f60" | [^"\\\\]

``root`` is the entry. Literals are in double quotes and know the escapes of C, ``\\uXXXX`` too;
``[^]`` is any character, ``[]`` none; repetitions ``* + ? {n} {n,} {n,m} {n,-1}``. A lookahead
``(= ...)`` at the end of alternatives is read and ignored, as xgrammar does: it is a hint. Macros
(``TagDispatch(...)``, ``Token(...)``) are refused by name.

``to_lark`` writes the trees in llguidance's dialect, for grammars that only the host tier can run.
"""

import json
import re

from deepinfer_jax.structured.errors import EbnfError, GrammarError
from deepinfer_jax.structured.nfa import (
    EMPTY,
    Characters,
    Choice,
    Reference,
    Repeat,
    Sequence,
    Text,
    Tree,
)
from deepinfer_jax.structured.ranges import MAX, Ranges, complement, union

_NAME = re.compile(r"[A-Za-z_.\-][A-Za-z0-9_.\-]*")
_DEFINED = re.compile(r"[ \t\r\n]*::=")
_BOUNDS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(-1|\d+)?\s*)?\}")
_HEX = re.compile(r"[0-9a-fA-F]+")
_ESCAPES = dict(zip("nrtbfav0e\"'\\/?", "\n\r\t\b\f\a\v\0\x1b\"'\\/?", strict=True))
_SET_ESCAPES = "^$\\.*+?()[]{}|/-"
_QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_QUANTIFIER_STARTS = (*_QUANTIFIERS, "{")


class _Parser:
    def __init__(self, text: str):
        self.text, self.at = text, 0
        self.used: dict[str, int] = {}

    def error(self, message: str) -> EbnfError:
        before = self.text[: self.at]
        line, column = before.count("\n") + 1, self.at - before.rfind("\n")
        return EbnfError(f"ebnf line {line}, column {column}: {message}")

    def peek(self, *what: str) -> bool:
        return self.text.startswith(what, self.at)

    def take(self, what: str) -> bool:
        if self.peek(what):
            self.at += len(what)
            return True
        return False

    def expect(self, what: str) -> None:
        if not self.take(what):
            found = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
            raise self.error(f"expected {what!r}, found {found}")

    def space(self) -> None:
        while self.at < len(self.text):
            if self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif self.text[self.at] in " \t\r\n":
                self.at += 1
            else:
                return

    def rules(self) -> dict[str, Tree]:
        rules: dict[str, Tree] = {}
        self.space()
        while self.at < len(self.text):
            start, match = self.at, _NAME.match(self.text, self.at)
            if not match:
                raise self.error("expected a rule name")
            self.at = match.end()
            self.space()
            self.expect("::=")
            if match.group() in rules:
                self.at = start
                raise self.error(f"rule {match.group()!r} is defined twice")
            rules[match.group()] = self.choice()
            self.space()
        return rules

    def choice(self) -> Tree:
        items = [self.sequence()]
        while self.take("|"):
            items.append(self.sequence())
        if self.take("(="):
            self.choice()
            self.expect(")")
            self.space()
        return Choice(tuple(items)) if len(items) > 1 else items[0]

    def sequence(self) -> Tree:
        items: list[Tree] = []
        while True:
            self.space()
            if self.at >= len(self.text) or self.peek("|", ")", "(=") or self.rule_starts():
                break
            items.append(self.quantified(self.element()))
        if not items:
            raise self.error('expected an element; the empty text is written "" or ()')
        return Sequence(tuple(items)) if len(items) > 1 else items[0]

    def rule_starts(self) -> bool:
        match = _NAME.match(self.text, self.at)
        return bool(match and _DEFINED.match(self.text, match.end()))

    def element(self) -> Tree:
        if self.take('"'):
            return self.literal()
        if self.take("["):
            return Characters(self.members())
        if self.take("("):
            self.space()
            if self.take(")"):
                return EMPTY
            inner = self.choice()
            self.expect(")")
            return inner
        match = _NAME.match(self.text, self.at)
        if not match:
            raise self.error(f"unexpected character {self.text[self.at]!r}")
        if self.text.startswith("(", match.end()):
            raise self.error(f"macro {match.group()}(...) is not supported")
        self.used.setdefault(match.group(), self.at)
        self.at = match.end()
        return Reference(match.group())

    def literal(self) -> Tree:
        out = []
        while not self.take('"'):
            if self.at >= len(self.text) or self.peek("\n"):
                raise self.error('string literal without closing "')
            out.append(self.character(""))
        return Text("".join(out)) if out else EMPTY

    def character(self, extra: str) -> str:
        """One possibly escaped character; ``extra`` may be escaped too."""
        if not self.take("\\"):
            self.at += 1
            return self.text[self.at - 1]
        letter = self.text[self.at : self.at + 1]
        if letter and letter in "xuU":
            width = {"x": None, "u": 4, "U": 8}[letter]
            end = None if width is None else self.at + 1 + width
            match = _HEX.match(self.text[:end], self.at + 1)
            if not match or (width and len(match.group()) != width):
                raise self.error(f"\\{letter} without its hexadecimal digits")
            if int(match.group(), 16) > MAX:
                raise self.error(f"\\{letter}{match.group()} is not a character")
            self.at = match.end()
            return chr(int(match.group(), 16))
        if letter in _ESCAPES or (letter and letter in extra):
            self.at += 1
            return _ESCAPES.get(letter, letter)
        raise self.error(f"invalid escape sequence \\{letter}")

    def members(self) -> Ranges:
        negative = self.take("^")
        found = []
        while not self.take("]"):
            low = self.member()
            high = low
            if self.peek("-") and not self.peek("-]"):
                self.at += 1
                high = self.member()
            if high < low:
                raise self.error("lower bound of a range is above its upper bound")
            found.append((low, high))
        return complement(union(found)) if negative else union(found)

    def member(self) -> int:
        if self.at >= len(self.text) or self.peek("\n"):
            raise self.error("character class without closing ]")
        return ord(self.character(_SET_ESCAPES))

    def quantified(self, item: Tree) -> Tree:
        self.space()
        if not self.peek(*_QUANTIFIER_STARTS):
            return item
        if self.peek("{"):
            match = _BOUNDS.match(self.text, self.at)
            if not match:
                raise self.error("expected {n}, {n,} or {n,m}")
            try:
                low = int(match[1])
                high = low if not match[2] else None if match[3] in (None, "-1") else int(match[3])
            except ValueError:  # int reads 4300 digits
                raise self.error("the bound of a repetition has too many digits") from None
            if high is not None and high < low:
                raise self.error("lower bound of a repetition is above its upper bound")
            self.at = match.end()
        else:
            low, high = _QUANTIFIERS[self.text[self.at]]
            self.at += 1
        self.space()
        if self.peek(*_QUANTIFIER_STARTS):
            raise self.error(f"expected an element, found {self.text[self.at]!r}")
        return Repeat(item, low, high)


def parse(text: str, root: str = "root") -> dict[str, Tree]:
    """Rules of a grammar by name, in the order of their definition.

    Raises `EbnfError`, with line and column where the text is malformed.
    """
    parser = _Parser(text)
    rules = parser.rules()
    if root not in rules:
        raise EbnfError(f"ebnf: no rule {root!r}, the entry of the grammar")
    for name, place in parser.used.items():
        if name not in rules:
            parser.at = place
            raise parser.error(f"rule {name!r} is not defined")
    return rules


def _lark(tree: Tree, names: dict[str, str]) -> str:
    if isinstance(tree, Text):
        return json.dumps(tree.text)
    if isinstance(tree, Characters):
        if tree.ranges and tree.ranges[-1][1] > MAX:
            raise GrammarError("host tier: anchors of a regex only work in the device tiers")
        spans = (f"\\x{{{a:X}}}" + (f"-\\x{{{b:X}}}" if b > a else "") for a, b in tree.ranges)
        return f"/[{''.join(spans)}]/" if tree.ranges else "/[^\\x{0}-\\x{10FFFF}]/"
    if isinstance(tree, Reference):
        return names[tree.name]
    if isinstance(tree, Sequence):
        return (
            "(" + " ".join(_lark(item, names) for item in tree.items) + ")" if tree.items else '""'
        )
    if isinstance(tree, Choice):
        return "(" + " | ".join(_lark(item, names) for item in tree.items) + ")"
    if tree.high == 0:
        return '""'
    bounds = f"{{{tree.low},{'' if tree.high is None else tree.high}}}"
    return f"({_lark(tree.item, names)}){bounds}"


def to_lark(rules: dict[str, Tree], root: str = "root") -> str:
    """The same grammar for llguidance."""
    names = {name: "start" if name == root else f"r{i}" for i, name in enumerate(rules)}
    return "\n".join(f"{names[name]}: {_lark(tree, names)}" for name, tree in rules.items())
