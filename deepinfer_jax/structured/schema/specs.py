"""Alternatives of a value, one JSON type each, and the small things that all schema files share.

Subschemas that apply to the same value are a tuple of JSON pointers; the empty tuple is "anything".
"""

import dataclasses
from collections.abc import Iterable

from deepinfer_jax.structured.schema.numbers import NumberSpec
from deepinfer_jax.structured.schema.strings import StringSpec

Pointers = tuple[str, ...]
Schemas = list[tuple[str, dict]]  # (pointer, subschema) that hold together


@dataclasses.dataclass(frozen=True)
class Values:
    """Fixed values, as JSON texts."""

    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """prefix: subschemas by position. rest: those of the items after it, None: there are none."""

    prefix: tuple[Pointers, ...]
    rest: Pointers | None
    least: int
    most: int | None


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys that no member declares: all ``matched`` patterns are found in them, no ``other``."""

    matched: tuple[str, ...]
    other: tuple[str, ...]
    value: Pointers


@dataclasses.dataclass(frozen=True)
class ObjectSpec:
    """members: (key, subschemas, required) in order. free: the other keys. names: subschemas of
    all keys. least, most: number of members."""

    members: tuple[tuple[str, Pointers, bool], ...]
    free: tuple[Keys, ...]
    names: Pointers
    least: int
    most: int | None


Alternative = Values | NumberSpec | StringSpec | ArraySpec | ObjectSpec


def unique(pointers: Iterable[str]) -> Pointers:
    """Without repetitions, in order."""
    return tuple(dict.fromkeys(pointers))


def bounds(schemas: Schemas, least: str, most: str) -> tuple[int, int | None]:
    """The closest bounds of a pair of keywords."""
    low = max((int(s[least]) for _, s in schemas if least in s), default=0)
    return low, min((int(s[most]) for _, s in schemas if most in s), default=None)
