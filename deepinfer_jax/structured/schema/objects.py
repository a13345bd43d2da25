"""Arrays and objects of several subschemas that hold together.

Each subschema judges a key by its own ``properties``, ``patternProperties`` and
``additionalProperties``; what applies to the key is the union over the subschemas. Declared keys
come in order, required ones that nobody declares after them. The other keys are split by which
patterns match, so that no key can be repeated under another rule.

What is not said is closed: other keys are allowed if a subschema says so, or if none declares any.
"""

import itertools
from collections.abc import Callable

from deepinfer_jax.structured.dfa import Dfa
from deepinfer_jax.structured.schema.document import Document, escape
from deepinfer_jax.structured.schema.specs import (
    ArraySpec,
    Keys,
    ObjectSpec,
    Pointers,
    Schemas,
    bounds,
    unique,
)

MAX_PATTERNS = 4  # of one object: other keys split into 2 ** patterns languages
Search = Callable[[str, str], Dfa]  # (pointer, pattern) -> the texts in which it is found


def _items(pointer: str, schema: dict) -> tuple[list[str], str | None]:
    """Pointers of the subschemas by position and of the rest; a list of ``items`` is draft 7's
    spelling of ``prefixItems``."""
    listed = "items" if isinstance(schema.get("items"), list) else "prefixItems"
    prefix = [f"{pointer}/{listed}/{i}" for i in range(len(schema.get(listed, ())))]
    rest = "additionalItems" if listed == "items" else "items"
    return prefix, f"{pointer}/{rest}" if rest in schema else None


def merge_arrays(schemas: Schemas, document: Document) -> ArraySpec:
    """What arrays look like under all subschemas."""
    least, most = bounds(schemas, "minItems", "maxItems")
    parts = [_items(pointer, schema) for pointer, schema in schemas]
    width = max((len(prefix) for prefix, _ in parts), default=0)
    places = tuple(
        unique(
            prefix[i] if i < len(prefix) else str(rest)
            for prefix, rest in parts
            if i < len(prefix) or rest is not None
        )
        for i in range(width)
    )
    rests = unique(rest for _, rest in parts if rest is not None)
    for pointer, schema in schemas:
        if schema.get("uniqueItems") and (most is None or most > 1):
            document.refuse(f"{pointer}/uniqueItems", "keyword 'uniqueItems' is not supported")
    return ArraySpec(places, None if width and not rests else rests, least, most)


def merge_objects(schemas: Schemas, document: Document, search: Search) -> ObjectSpec:
    """What objects look like under all subschemas."""
    patterns = [
        (pointer, pattern, search(f"{pointer}/patternProperties", pattern))
        for pointer, schema in schemas
        for pattern in schema.get("patternProperties", ())
    ]
    if len({pattern for _, pattern, _ in patterns}) > MAX_PATTERNS:
        document.refuse(
            f"{patterns[0][0]}/patternProperties",
            f"more than {MAX_PATTERNS} patterns of one object",
        )
        patterns = patterns[:MAX_PATTERNS]

    def value(key: str | None, matched: set[str]) -> Pointers:
        """What applies to the value of a key; None: to that of a key that nobody declares."""
        found: list[str] = []
        for pointer, schema in schemas:
            own = []
            if key is not None and key in schema.get("properties", ()):
                own.append(f"{pointer}/properties/{escape(key)}")
            own += [
                f"{pointer}/patternProperties/{escape(pattern)}"
                for owner, pattern, _ in patterns
                if owner == pointer and pattern in matched
            ]
            if not own and "additionalProperties" in schema:
                own = [f"{pointer}/additionalProperties"]
            found += own
        return unique(found)

    required = unique(key for _, schema in schemas for key in schema.get("required", ()))
    declared = unique(key for _, schema in schemas for key in schema.get("properties", ()))
    members = tuple(
        (key, value(key, {p for _, p, dfa in patterns if dfa.accepts(key)}), key in required)
        for key in unique((*declared, *required))
    )
    free = []
    names = unique(pattern for _, pattern, _ in patterns)
    for choice in itertools.product((True, False), repeat=len(names)):
        matched = tuple(name for name, yes in zip(names, choice, strict=True) if yes)
        if matched or _open(schemas, document):
            other = tuple(name for name in names if name not in matched)
            free.append(Keys(matched, other, value(None, set(matched))))
    keys = unique(f"{p}/propertyNames" for p, schema in schemas if "propertyNames" in schema)
    return ObjectSpec(
        members, tuple(free), keys, *bounds(schemas, "minProperties", "maxProperties")
    )


def _open(schemas: Schemas, document: Document) -> bool:
    """Whether keys are allowed that nobody declares and no pattern matches."""
    for pointer, schema in schemas:
        if schema.get("unevaluatedProperties", True) not in (True, False):
            document.refuse(f"{pointer}/unevaluatedProperties", "only true and false are supported")
    if any("additionalProperties" in schema for _, schema in schemas):
        return True
    closing = ("properties", "patternProperties")
    return not any(
        schema.get("unevaluatedProperties") is False or any(k in schema for k in closing)
        for _, schema in schemas
    )
