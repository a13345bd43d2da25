"""What a set of subschemas allows together, as a list of alternatives, each of one JSON type.

Subschemas that apply to the same value (``allOf``, ``$ref`` with siblings, two patterns that match
one key) are a tuple of pointers; the empty tuple is "anything". ``alternatives`` expands references
and ``allOf``, multiplies out ``anyOf`` and ``oneOf``, and merges what is left by type. Arrays and
objects keep pointers to their members, so recursion is expanded only when it is reached.

``oneOf`` becomes a union only if its branches are provably disjoint: by type, by value, by language
of strings or numbers, or by a required member that the other branch cannot have.
"""

import dataclasses
import itertools
import json
import math
from decimal import Decimal
from typing import Any

from deepinfer_jax.structured.dfa import Dfa, unite
from deepinfer_jax.structured.errors import Budget, RegexError, SchemaError
from deepinfer_jax.structured.regex import language
from deepinfer_jax.structured.schema.disjoint import excludes
from deepinfer_jax.structured.schema.document import Document
from deepinfer_jax.structured.schema.numbers import (
    MAX_MULTIPLE,
    Bound,
    NumberSpec,
    decimal,
    whole_multiple,
)
from deepinfer_jax.structured.schema.objects import merge_arrays, merge_objects
from deepinfer_jax.structured.schema.specs import (
    Alternative,
    Pointers,
    Schemas,
    Values,
    bounds,
    unique,
)
from deepinfer_jax.structured.schema.strings import FORMATS, StringSpec, texts

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_STRUCTURAL = {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "additionalItems"}
_STRUCTURAL |= {"properties", "patternProperties", "additionalProperties", "propertyNames"}
_STRUCTURAL |= {"required", "minProperties", "maxProperties", "unevaluatedProperties"}
_MAX_CASES = 256


@dataclasses.dataclass
class Cases:
    """Alternatives of a document, each set of subschemas expanded once."""

    document: Document
    budget: Budget

    def __post_init__(self) -> None:
        self._known: dict[Pointers, list[Alternative]] = {}
        self._languages: dict[Any, Dfa] = {}

    def alternatives(self, pointers: Pointers) -> list[Alternative]:
        """All that may be valid; empty if nothing is."""
        if pointers not in self._known:
            self.budget.check("schema alternatives", len(self._known), 20_000)
            found = [a for case in self._cases(pointers) for a in self._typed(case)]
            self._known[pointers] = list(dict.fromkeys(found))
        return self._known[pointers]

    def language(self, spec: NumberSpec | StringSpec) -> Dfa:
        if spec not in self._languages:
            self._languages[spec] = spec.language(self.budget)
        return self._languages[spec]

    def _cases(self, pointers: Pointers, open_: frozenset[str] = frozenset()) -> list[Pointers]:
        """Tuples of plain subschemas, one of which must hold; ``open_`` guards against loops."""
        plain: list[str] = []
        choices: list[tuple[str, str]] = []
        todo, seen = list(reversed(pointers)), set()
        while todo:
            pointer = todo.pop()
            schema = self.document.at(pointer)
            if schema is False or pointer in open_:
                return []  # a schema that is one of its own branches adds nothing to them
            if schema is True or pointer in seen:
                continue
            seen.add(pointer)
            plain.append(pointer)
            todo += [f"{pointer}/allOf/{i}" for i in reversed(range(len(schema.get("allOf", ()))))]
            if "$ref" in schema:
                todo.append(self.document.resolve(pointer))
            choices += [(pointer, keyword) for keyword in ("anyOf", "oneOf") if keyword in schema]
        cases = [tuple(plain)]
        for pointer, keyword in choices:
            count = len(self.document.at(pointer)[keyword])
            branches = [
                self._cases((f"{pointer}/{keyword}/{i}",), open_ | {pointer}) for i in range(count)
            ]
            if keyword == "oneOf":
                self._check_one_of(pointer, cases, branches)
            cases = [unique(a + b) for a in cases for branch in branches for b in branch]
            self.budget.check("cases of anyOf and oneOf", len(cases), _MAX_CASES)
        return cases

    def _check_one_of(
        self, pointer: str, context: list[Pointers], branches: list[list[Pointers]]
    ) -> None:
        made, wide = (
            [
                [alt for a in context for b in branch for alt in self._typed(unique(a + b), wide)]
                for branch in branches
            ]
            for wide in (False, True)
        )
        for i, j in itertools.permutations(range(len(made)), 2):
            if not all(excludes(self, a, b) for a in made[i] for b in wide[j]):
                self.document.refuse(
                    f"{pointer}/oneOf", f"branches {min(i, j)} and {max(i, j)} may both match"
                )
                return

    def _typed(self, case: Pointers, wide: bool = False) -> list[Alternative]:
        """Alternatives by type of plain subschemas that hold together.

        wide: fixed values also where a format beside them, which a reader may ignore, is not met.
        """
        schemas = [(p, self.document.at(p)) for p in case]
        types = set[str](_TYPES)
        for _, schema in schemas:
            named = schema.get("type", list(_TYPES))
            named = set(named if isinstance(named, list) else [named])
            types &= named | ({"integer"} if "number" in named else set())
        fixed = [s["enum"] if "enum" in s else [s["const"]] for _, s in schemas if _has_values(s)]
        both = [[s["const"]] for _, s in schemas if "enum" in s and "const" in s]
        if fixed:
            values = [
                v for v in fixed[0] if all(any(_same(v, w) for w in o) for o in fixed[1:] + both)
            ]
            values = [v for v in values if self._admits(v, types, schemas, wide)]
            spelled = [json.dumps(w) for v in values for w in (v, _whole(v))]
            return [Values(unique(spelled))] if values else []
        found: list[Alternative] = []
        if "null" in types:
            found.append(Values(("null",)))
        if "boolean" in types:
            found.append(Values(("true", "false")))
        if types & {"integer", "number"}:
            found.append(self._number(schemas, "number" not in types))
        if "string" in types:
            found.append(self._string(schemas))
        if "array" in types:
            found.append(merge_arrays(schemas, self.document))
        if "object" in types:
            found.append(merge_objects(schemas, self.document, self.search))
        return found

    def _admits(self, value: Any, types: set[str], schemas: Schemas, wide: bool) -> bool:
        """Whether a fixed value also satisfies the keywords beside it, numbers by their value."""
        kind = _type_of(value)
        if kind not in types:
            return False
        if kind in ("integer", "number"):
            return self._number(schemas, "number" not in types).holds(value)
        if kind == "string":
            spec = self._string(schemas)
            return self.language(spec._replace(formats=()) if wide else spec).accepts(value)
        for pointer, schema in schemas:
            beside = _STRUCTURAL & schema.keys()
            if beside and kind in ("array", "object"):
                keyword = min(beside)
                self.document.refuse(f"{pointer}/{keyword}", f"{keyword!r} beside enum or const")
        return True

    def _number(self, schemas: Schemas, integer: bool) -> NumberSpec:
        low = high = None
        multiple = 1
        for pointer, schema in schemas:
            for bound in _limits(schema, "minimum", "exclusiveMinimum"):
                low = bound if low is None else max(low, bound)
            for bound in _limits(schema, "maximum", "exclusiveMaximum"):
                high = bound if high is None else min(high, bound, key=_upper)
            if "multipleOf" in schema:
                divisor = whole_multiple(schema["multipleOf"])
                if divisor is None or math.lcm(multiple, divisor) > MAX_MULTIPLE:
                    self.document.refuse(
                        f"{pointer}/multipleOf",
                        f"only whole numbers up to {MAX_MULTIPLE} are supported",
                    )
                else:
                    multiple, integer = math.lcm(multiple, divisor), True
        return NumberSpec(integer, low, high, multiple if multiple > 1 else 0)

    def _string(self, schemas: Schemas) -> StringSpec:
        shortest, longest = bounds(schemas, "minLength", "maxLength")
        patterns, formats = [], []
        for pointer, schema in schemas:
            if "pattern" in schema:
                self.search(f"{pointer}/pattern", schema["pattern"])
                patterns.append(schema["pattern"])
            if schema.get("format") in FORMATS:
                formats.append(schema["format"])
            elif "format" in schema:
                self.document.refuse(
                    f"{pointer}/format", f"format {schema['format']!r} is not supported"
                )
        return StringSpec(shortest, longest, unique(patterns), unique(formats))

    def search(self, pointer: str, pattern: str) -> Dfa:
        """The texts in which a pattern is found; errors name the place of the pattern."""
        if pattern not in self._languages:
            try:
                self._languages[pattern] = language(pattern, self.budget, search=True)
            except RegexError as error:
                raise SchemaError(pointer, str(error)) from None
        return self._languages[pattern]

    def parsed(self, values: Values) -> list[Any]:
        """Fixed values as python values, whole numbers as int."""
        return [_whole(json.loads(text)) for text in values.texts]

    def strings(self, pointers: Pointers) -> Dfa:
        """The texts of all strings that subschemas allow (the keys of ``propertyNames``)."""
        found = []
        for alternative in self.alternatives(pointers):
            if isinstance(alternative, StringSpec):
                found.append(self.language(alternative))
            elif isinstance(alternative, Values):
                fixed = [v for v in self.parsed(alternative) if isinstance(v, str)]
                found.append(texts(fixed, self.budget))
        return unite(found, self.budget)


def _has_values(schema: dict) -> bool:
    return "enum" in schema or "const" in schema


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON: numbers by value, no truth value is a number."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b or _is_number(a) and _is_number(b) and a == b


def _whole(value: Any) -> Any:
    """A value with 6.0 written 6, which JSON schema takes for the same number."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]


def _limits(schema: dict, plain: str, exclusive: str) -> list[Bound]:
    """The bounds of one side; in draft 4 the exclusive keyword is a flag of the plain one."""
    found, flag = [], schema.get(exclusive)
    if plain in schema:
        found.append(Bound(decimal(schema[plain]), flag is True))
    if flag is not None and not isinstance(flag, bool):
        found.append(Bound(decimal(flag), True))
    return found


def _upper(bound: Bound) -> tuple[Decimal, bool]:
    """Order of upper bounds: an exclusive one is lower."""
    return bound.value, not bound.strict
