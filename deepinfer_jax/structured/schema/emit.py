"""Alternatives of a schema -> the graph of its JSON texts over bytes.

    value  = alternative | ...
    object = "{" ws (member ws ("," ws member ws)*)? ws "}"      members in order
    array  = "[" ws (value ws ("," ws value ws)*)? ws "]"
    ws     = [ \\t\\n\\r]*

Members are a ladder: one rung for "no member yet", one for "some member", so that optional members
need no doubling of what follows. A container that can contain itself is a rule and is called; its
first byte is its bracket, which keeps the calls deterministic. ``calls_everywhere`` makes every
container a rule: for alternatives that are partly recursive, and for schemas that are very large
when written out.
"""

import json
from typing import Any

from deepinfer_jax.structured.dfa import Dfa, embed, product
from deepinfer_jax.structured.errors import Budget
from deepinfer_jax.structured.nfa import ENTRY, Nfa
from deepinfer_jax.structured.ranges import json_paths, points, utf8_paths
from deepinfer_jax.structured.schema.cases import Cases
from deepinfer_jax.structured.schema.document import Document
from deepinfer_jax.structured.schema.specs import (
    Alternative,
    ArraySpec,
    Keys,
    ObjectSpec,
    Pointers,
    Values,
)
from deepinfer_jax.structured.schema.strings import StringSpec, texts

_WHITESPACE = points(" \t\n\r")
Container = ArraySpec | ObjectSpec


class Emitter:
    """Builds the graph of one document."""

    def __init__(self, cases: Cases, budget: Budget, calls_everywhere: bool = False):
        self.cases, self.budget, self.everywhere = cases, budget, calls_everywhere
        self.nfa = Nfa(utf8_paths, budget)
        self.names: dict[Container, str] = {}
        self.waiting: list[Container] = []
        self.inside: dict[Container, set[Container]] = {}

    def run(self, pointers: Pointers) -> Nfa:
        """The graph of everything valid."""
        start, end = self.nfa.node(), self.nfa.node()
        self.nfa.rules[ENTRY] = (start, end)
        self.nfa.skip(self.value(pointers, start), end)
        while self.waiting:
            container = self.waiting.pop()
            start, end = self.nfa.rules[self.names[container]]
            self.nfa.skip(self.container(container, start), end)
        return self.nfa

    def space(self, start: int) -> int:
        """Whitespace, or none."""
        loop = self.nfa.node()
        self.nfa.skip(start, loop)
        return self.nfa.follow(loop, ((_WHITESPACE,),), loop)

    def value(self, pointers: Pointers, start: int) -> int:
        return self.alternatives(self.cases.alternatives(pointers), start)

    def alternatives(self, found: list[Alternative], start: int) -> int:
        end = self.nfa.node()
        for alternative in found:
            branch = self.nfa.node()
            self.nfa.skip(start, branch)
            self.nfa.skip(self.alternative(alternative, branch), end)
        return end

    def alternative(self, alternative: Alternative, start: int) -> int:
        if isinstance(alternative, Values):
            end = self.nfa.node()
            for text in alternative.texts:
                self.nfa.skip(self.fixed(json.loads(text), start), end)
            return end
        if isinstance(alternative, ArraySpec | ObjectSpec):
            if self.everywhere or alternative in self._reached(alternative):
                return self.call(alternative, start)
            return self.container(alternative, start)
        language = self.cases.language(alternative)
        if isinstance(alternative, StringSpec):
            return self.string(language, start)
        return embed(self.nfa, start, language)

    def string(self, language: Dfa, start: int) -> int:
        """A quoted string of a language over code points."""
        opened = self.nfa.text(start, '"')
        return self.nfa.text(embed(self.nfa, opened, language, json_paths), '"')

    def fixed(self, value: Any, start: int) -> int:
        """One value, spelled canonically but for whitespace and the escapes of its strings."""
        nfa = self.nfa
        if isinstance(value, str):
            start = nfa.text(start, '"')
            for character in value:
                start = nfa.follow(start, json_paths(points(character)))
            return nfa.text(start, '"')
        if isinstance(value, list | dict):
            opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
            start = self.space(nfa.text(start, opening))
            for i, item in enumerate(value):
                start = self.space(nfa.text(start, ",")) if i else start
                if isinstance(value, dict):
                    start = self.space(nfa.text(self.space(self.fixed(item, start)), ":"))
                    item = value[item]
                start = self.space(self.fixed(item, start))
            return nfa.text(start, closing)
        return nfa.text(start, json.dumps(value))

    def call(self, container: Container, start: int) -> int:
        if container not in self.names:
            kind = "object" if isinstance(container, ObjectSpec) else "array"
            self.names[container] = f"{kind} {len(self.names) + 1}"
            self.nfa.rules[self.names[container]] = (self.nfa.node(), self.nfa.node())
            self.waiting.append(container)
        return self.nfa.call(start, self.names[container])

    def _reached(self, container: Container) -> set[Container]:
        """Containers that may occur inside one, at any depth."""
        reached: set[Container] = set()
        stack = [container]
        while stack:
            one = stack.pop()
            if one not in self.inside:
                self.inside[one] = {
                    a
                    for pointers in _children(one)
                    for a in self.cases.alternatives(pointers)
                    if isinstance(a, ArraySpec | ObjectSpec)
                }
                self.budget.check("containers of a schema", len(self.inside), 5_000)
            stack += self.inside[one] - reached
            reached |= self.inside[one]
        return reached

    def container(self, container: Container, start: int) -> int:
        if isinstance(container, ArraySpec):
            return self.array(container, start)
        return self.object(container, start)

    def array(self, spec: ArraySpec, start: int) -> int:
        nfa, end = self.nfa, self.nfa.node()
        most = spec.most if spec.rest is not None else len(spec.prefix)
        if spec.most is not None:
            most = min(spec.most, len(spec.prefix)) if spec.rest is None else spec.most
        self.budget.check("array items", max(spec.least, most or 0), self.budget.limits.repeat)
        place = self.space(nfa.text(start, "["))
        count = 0
        while True:
            if count >= spec.least and (most is None or count <= most):
                nfa.skip(nfa.text(place, "]"), end)
            if most is not None and count >= most:
                return end
            looping = most is None and count >= max(spec.least, len(spec.prefix))
            item = nfa.node()
            nfa.skip(self.space(nfa.text(place, ",")) if count else place, item)
            pointers = spec.prefix[count] if count < len(spec.prefix) else spec.rest
            assert pointers is not None
            place = self.space(self.value(pointers, item))
            if looping:
                nfa.skip(self.space(nfa.text(place, ",")), item)
                nfa.skip(nfa.text(place, "]"), end)
                return end
            count += 1

    def object(self, spec: ObjectSpec, start: int) -> int:
        return _Object(self, spec).run(start)

    def keys(self, spec: ObjectSpec, keys: Keys) -> Dfa:
        """The language of the keys that fall under one rule of an object."""
        dfa = StringSpec(patterns=keys.matched).language(self.budget)
        for pattern in keys.other:
            dfa = product(dfa, self.cases.search("", pattern), self.budget, subtract=True)
        if spec.members:
            declared = texts([key for key, _, _ in spec.members], self.budget)
            dfa = product(dfa, declared, self.budget, subtract=True)
        if spec.names:
            dfa = product(dfa, self.cases.strings(spec.names), self.budget)
        return dfa


class _Object:
    """The ladder of one object. Nodes are (rung, members so far); members are counted only where
    the bounds need it, and a repeated free key counts once towards the least."""

    def __init__(self, emitter: Emitter, spec: ObjectSpec):
        self.emitter, self.spec, self.nfa = emitter, spec, emitter.nfa
        required = sum(need for _, _, need in spec.members)
        self.counted = spec.least > required or spec.most is not None
        self.cap = spec.most if spec.most is not None else spec.least

    def after(self, count: int) -> int:
        return min(count + 1, self.cap) if self.counted else 0

    def run(self, start: int) -> int:
        nfa, spec, emitter = self.nfa, self.spec, self.emitter
        end = nfa.node()
        names = emitter.cases.strings(spec.names) if spec.names else None
        open_ = {(False, 0): emitter.space(nfa.text(start, "{"))}  # (some member, count) -> node
        for key, pointers, required in spec.members:
            following: dict[tuple[bool, int], int] = {}
            allowed = names is None or names.accepts(key)
            entries: dict[int, int] = {}
            for (some, count), node in open_.items():
                if not required:
                    self._join(following, (some, count), node)
                if allowed and (spec.most is None or count < spec.most):
                    entry = entries.setdefault(count, nfa.node())
                    nfa.skip(emitter.space(nfa.text(node, ",")) if some else node, entry)
            for count, entry in entries.items():
                place = emitter.space(emitter.fixed(key, entry))
                place = emitter.value(pointers, emitter.space(nfa.text(place, ":")))
                self._join(following, (True, self.after(count)), emitter.space(place))
            open_ = following
        for (some, count), node in open_.items():
            if not self.counted or count >= spec.least:
                nfa.skip(nfa.text(node, "}"), end)
            if spec.free and (not self.counted or self.after(count) >= spec.least):
                self.free(some, count, node, end)
        return end

    def _join(self, places: dict[tuple[bool, int], int], key: tuple[bool, int], node: int) -> None:
        if key not in places:
            places[key] = self.nfa.node()
        self.nfa.skip(node, places[key])

    def free(self, some: bool, count: int, node: int, end: int) -> None:
        """Members under other keys, in any number that the upper bound leaves."""
        nfa, spec, emitter = self.nfa, self.spec, self.emitter
        left = None if spec.most is None else spec.most - count
        if left is not None and left < 1:
            return
        entry = nfa.node()
        nfa.skip(emitter.space(nfa.text(node, ",")) if some else node, entry)
        emitter.budget.check("object members", left or 0, emitter.budget.limits.repeat)
        while True:
            place = nfa.node()
            for keys in spec.free:
                named = emitter.space(emitter.string(emitter.keys(spec, keys), entry))
                value = emitter.value(keys.value, emitter.space(nfa.text(named, ":")))
                nfa.skip(emitter.space(value), place)
            nfa.skip(nfa.text(place, "}"), end)
            following = emitter.space(nfa.text(place, ","))
            if left is None:
                nfa.skip(following, entry)
                return
            left -= 1
            if left < 1:
                return
            entry = following


def _children(container: Container) -> list[Pointers]:
    if isinstance(container, ArraySpec):
        return [*container.prefix, *([] if container.rest is None else [container.rest])]
    return [p for _, p, _ in container.members] + [keys.value for keys in container.free]


def network(
    schema: Any, budget: Budget, *, lenient: bool = False, calls_everywhere: bool = False
) -> tuple[Nfa, tuple[str, ...]]:
    """The graph of a schema (or its text), and what "lenient" ignored.

    Raises `SchemaError` with the pointer and keyword of what is unsupported or malformed, and if
    nothing at all is valid.
    """
    document = Document.parse(schema, lenient)
    cases = Cases(document, budget)
    nfa = Emitter(cases, budget, calls_everywhere).run(("",))
    return nfa, tuple(dict.fromkeys(document.warnings))


def closed_text(schema: Any) -> str:
    """The schema as JSON text for the host tier, its undeclared members closed as ours are."""

    def close(node: Any) -> Any:
        if isinstance(node, list):
            return [close(item) for item in node]
        if not isinstance(node, dict):
            return node
        node = {
            key: value if key in ("enum", "const", "default", "examples") else close(value)
            for key, value in node.items()
        }
        if isinstance(node.get("properties"), dict) and node.get("type", "object") == "object":
            node.setdefault("additionalProperties", False)
        if isinstance(node.get("prefixItems"), list):
            node.setdefault("items", False)
        return node

    return json.dumps(close(json.loads(schema) if isinstance(schema, str) else schema))
