"""When a text made for one alternative can never be valid under another (for ``oneOf``).

The test may say "not provable", never the opposite by mistake: what we generate for an alternative
is a subset of what it allows, so the second one is read as widely as JSON schema reads it (its
formats dropped, its objects open).
"""

from typing import Protocol, runtime_checkable

from deepinfer_jax.structured.dfa import Dfa, product
from deepinfer_jax.structured.errors import Budget
from deepinfer_jax.structured.schema.numbers import NumberSpec
from deepinfer_jax.structured.schema.specs import (
    Alternative,
    ArraySpec,
    ObjectSpec,
    Pointers,
    Values,
)
from deepinfer_jax.structured.schema.strings import StringSpec

_DEPTH = 5  # members inside members that are looked at


@runtime_checkable
class Expander(Protocol):
    """What is asked of `cases.Cases`."""

    budget: Budget

    def alternatives(self, pointers: Pointers) -> list[Alternative]: ...

    def language(self, spec: NumberSpec | StringSpec) -> Dfa: ...

    def search(self, pointer: str, pattern: str) -> Dfa: ...

    def parsed(self, values: Values) -> list[object]: ...


def excludes(cases: Expander, a: Alternative, b: Alternative, depth: int = 0) -> bool:
    """Whether no text made for ``a`` is valid under ``b``."""
    if isinstance(a, Values):
        return not any(_may_hold(cases, value, b, depth) for value in cases.parsed(a))
    if isinstance(b, Values):
        return all(
            _kind(value) is not type(a) or _outside(cases, value, a) for value in cases.parsed(b)
        )
    if isinstance(a, NumberSpec) and isinstance(b, NumberSpec):
        return product(cases.language(a), cases.language(b), cases.budget).empty()
    if isinstance(a, StringSpec) and isinstance(b, StringSpec):
        wide = cases.language(b._replace(formats=()))
        return product(cases.language(a), wide, cases.budget).empty()
    if isinstance(a, ArraySpec) and isinstance(b, ArraySpec):
        return _arrays(cases, a, b, depth)
    if isinstance(a, ObjectSpec) and isinstance(b, ObjectSpec):
        return _objects(cases, a, b, depth)
    return True


def _kind(value: object) -> type | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return NumberSpec
    return {str: StringSpec, list: ArraySpec, dict: ObjectSpec}[type(value)]


def _outside(cases: Expander, value: object, spec: Alternative) -> bool:
    """Whether a fixed value is none of those made for an alternative of its type."""
    if isinstance(spec, StringSpec) and isinstance(value, str):
        return not cases.language(spec).accepts(value)
    if isinstance(spec, NumberSpec) and isinstance(value, int | float):
        return not spec.holds(value)
    return False


def _may_hold(cases: Expander, value: object, b: Alternative, depth: int) -> bool:
    """Whether a fixed value may be valid under an alternative."""
    if isinstance(b, Values):
        return any(type(value) is type(other) and value == other for other in cases.parsed(b)) or (
            _kind(value) is NumberSpec and value in [v for v in cases.parsed(b) if _kind(v)]
        )
    if _kind(value) is not type(b):
        return False
    if isinstance(b, StringSpec):
        b = b._replace(formats=())
    if isinstance(b, ObjectSpec) and isinstance(value, dict):
        return not any(
            required and (key not in value or _never(cases, value[key], pointers, depth))
            for key, pointers, required in b.members
        )
    return not _outside(cases, value, b)


def _never(cases: Expander, value: object, pointers: Pointers, depth: int) -> bool:
    if depth >= _DEPTH:
        return False
    return not any(_may_hold(cases, value, b, depth + 1) for b in cases.alternatives(pointers))


def _all_exclude(cases: Expander, a: Pointers, b: Pointers, depth: int) -> bool:
    if depth >= _DEPTH:
        return False
    return all(
        excludes(cases, x, y, depth + 1)
        for x in cases.alternatives(a)
        for y in cases.alternatives(b)
    )


def _arrays(cases: Expander, a: ArraySpec, b: ArraySpec, depth: int) -> bool:
    longest = len(a.prefix) if a.rest is None else a.most
    if a.most is not None and longest is not None:
        longest = min(longest, a.most)
    if (longest is not None and longest < b.least) or (b.most is not None and a.least > b.most):
        return True
    for i in range(min(a.least, max(len(a.prefix), len(b.prefix), 1))):
        left = a.prefix[i] if i < len(a.prefix) else a.rest
        right = b.prefix[i] if i < len(b.prefix) else b.rest
        if left is not None and right is not None and _all_exclude(cases, left, right, depth):
            return True
    return False


def _objects(cases: Expander, a: ObjectSpec, b: ObjectSpec, depth: int) -> bool:
    """A member that ``b`` requires and ``a`` cannot have, or has with values that ``b`` refuses."""
    mine = {key: pointers for key, pointers, _ in a.members}
    for key, theirs, required in b.members:
        values = (
            [mine[key]]
            if key in mine
            else [
                keys.value
                for keys in a.free
                if all(cases.search("", p).accepts(key) for p in keys.matched)
                and not any(cases.search("", p).accepts(key) for p in keys.other)
            ]
        )
        if required and all(_all_exclude(cases, value, theirs, depth) for value in values):
            return True
    return False
