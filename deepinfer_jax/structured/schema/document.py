"""A schema document: its subschemas by JSON pointer, checked keywords, resolved references.

Every keyword is one of four: supported, an annotation (ignored), a known assertion that automata
cannot keep (refused), or unknown: an annotation by the standard, ignored with a warning, unless it
looks like a misspelled keyword, which would constrain nothing (refused). "lenient" turns refusals
into warnings. References resolve inside the document, through ``$id``
(relative to the enclosing one), ``$anchor`` and pointers; another document is refused.
"""

import dataclasses
import difflib
import json
import math
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from deepinfer_jax.structured.errors import GrammarError, SchemaError

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_SUBSCHEMA = ("items", "additionalItems", "additionalProperties", "propertyNames", "contains")
_SUBSCHEMA += ("not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties")
_SUBSCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SUBSCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_WITH_SUBSCHEMAS = {*_SUBSCHEMA, *_SUBSCHEMA_LISTS, *_SUBSCHEMA_MAPS}
_ANNOTATIONS = {
    *("$schema", "$comment", "$vocabulary", "$id", "$anchor", "$defs", "definitions", "title"),
    *("description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("discriminator", "externalDocs", "xml", "contentEncoding", "contentMediaType"),
    *("contentSchema",),
}
_REFUSED = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired"),
    *("dependentSchemas", "dependencies", "unevaluatedItems", "$dynamicRef", "$dynamicAnchor"),
    *("$recursiveRef", "$recursiveAnchor"),
}


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and value >= 0


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _is_types(value: Any) -> bool:
    return all(v in _TYPES for v in (value if isinstance(value, list) else [value]))


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _is_schema_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


_NUMBER, _COUNT = (_is_number, "a number"), (_is_count, "a whole number of at least 0")
_NUMBER_OR_FLAG = (lambda v: _is_number(v) or isinstance(v, bool), "a number (a bool in draft 4)")
_SCHEMA = (_is_schema, "a schema (an object or a boolean)")
_SCHEMAS = (lambda v: _is_schemas(v) and len(v) > 0, "a non-empty list of schemas")
_SCHEMA_MAP = (_is_schema_map, "an object of schemas")
_TEXT, _FLAG = (lambda v: isinstance(v, str), "a string"), (lambda v: isinstance(v, bool), "a bool")
_SUPPORTED = {
    "type": (_is_types, f"one or a list of {', '.join(_TYPES)}"),
    "enum": (lambda v: isinstance(v, list) and len(v) > 0, "a non-empty list"),
    "const": (lambda v: True, ""),
    "$ref": _TEXT,
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _NUMBER_OR_FLAG),
    "multipleOf": (lambda v: _is_number(v) and v > 0, "a number above 0"),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _COUNT),
    **dict.fromkeys(("minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("pattern", "format"), _TEXT),
    "items": (lambda v: _is_schema(v) or _is_schemas(v), "a schema or a list of schemas"),
    **dict.fromkeys(("additionalItems", "additionalProperties", "propertyNames"), _SCHEMA),
    "unevaluatedProperties": _SCHEMA,
    **dict.fromkeys(("properties", "patternProperties"), _SCHEMA_MAP),
    "required": (_is_text_list, "a list of strings"),
    "uniqueItems": _FLAG,
}


def escape(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def check_values(value: Any, pointer: str = "") -> None:
    """Raises `SchemaError` for the first part of a value that JSON has no form for."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise SchemaError(pointer, f"key {key!r} must be a string")
            check_values(inner, f"{pointer}/{escape(key)}")
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            check_values(inner, f"{pointer}/{at}")
    elif value is not None and not isinstance(value, str | int | float):
        raise SchemaError(pointer, f"JSON has no value of type {type(value).__name__}")


@dataclasses.dataclass
class Document:
    """root: the parsed schema. warnings: what was ignored."""

    root: Any
    lenient: bool = False
    warnings: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._base: dict[str, str] = {}
        self._resource: dict[str, str] = {}
        self._checked: set[str] = set()
        if not _is_schema(self.root):
            raise SchemaError("", "a schema is an object or a boolean")
        self._index("", self.root, "")

    @staticmethod
    def parse(schema: Any, lenient: bool) -> "Document":
        """From a schema, or its JSON text."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise GrammarError(f"json_schema is not JSON: {error}") from None
        return Document(schema, lenient)

    def _index(self, pointer: str, schema: Any, base: str) -> None:
        """Record the base address of each subschema, and where ids and anchors are."""
        if isinstance(schema.get("$id") if isinstance(schema, dict) else None, str):
            try:
                base = urljoin(base, schema["$id"])
                address = urldefrag(base)[0]
            except ValueError as error:
                raise SchemaError(f"{pointer}/$id", f"not an address: {error}") from None
            self._resource.setdefault(address, pointer)
        if pointer == "":
            self._resource.setdefault(base, pointer)
        self._base[pointer] = base
        if not isinstance(schema, dict):
            return
        if isinstance(schema.get("$anchor"), str):
            self._resource[f"{urldefrag(base)[0]}#{schema['$anchor']}"] = pointer
        for keyword, value in schema.items():
            at = f"{pointer}/{escape(keyword)}"
            if keyword in _SUBSCHEMA and _is_schema(value):
                self._index(at, value, base)
            elif keyword in _SUBSCHEMA_LISTS and isinstance(value, list):
                for i, inner in enumerate(value):
                    if _is_schema(inner):
                        self._index(f"{at}/{i}", inner, base)
            elif keyword in _SUBSCHEMA_MAPS and isinstance(value, dict):
                for key, inner in value.items():
                    if _is_schema(inner):
                        self._index(f"{at}/{escape(key)}", inner, base)

    def refuse(self, pointer: str, message: str) -> None:
        """Raise for what is not supported; a warning when lenient."""
        if not self.lenient:
            raise SchemaError(pointer, message)
        self.warnings.append(f"#{pointer}: {message}, ignored")

    def at(self, pointer: str) -> Any:
        """The subschema at a pointer, its keywords checked."""
        schema = self.root
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                schema = schema[int(part)] if isinstance(schema, list) else schema[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise SchemaError(pointer, "no such place in the document") from None
        if not _is_schema(schema):
            raise SchemaError(pointer, "expected a schema, an object or a boolean")
        if isinstance(schema, dict) and pointer not in self._checked:
            self._checked.add(pointer)
            for keyword, value in schema.items():
                self._check(pointer, keyword, value)
        return schema

    def _check(self, pointer: str, keyword: str, value: Any) -> None:
        if keyword in _SUPPORTED:
            test, expected = _SUPPORTED[keyword]
            if not test(value):
                raise SchemaError(f"{pointer}/{escape(keyword)}", f"{keyword} must be {expected}")
            if keyword not in _WITH_SUBSCHEMAS and not _finite(value):
                raise SchemaError(f"{pointer}/{escape(keyword)}", "infinity and NaN are no numbers")
        elif keyword in _REFUSED:
            self.refuse(f"{pointer}/{escape(keyword)}", f"keyword {keyword!r} is not supported")
        elif keyword not in _ANNOTATIONS and not keyword.startswith(("x-", "_")):
            place = f"{pointer}/{escape(keyword)}"
            close = difflib.get_close_matches(keyword, [*_SUPPORTED, *_REFUSED], 1, cutoff=0.8)
            if close:
                self.refuse(place, f"unknown keyword {keyword!r} (did you mean {close[0]!r}?)")
            else:
                self.warnings.append(f"#{place}: unknown keyword {keyword!r}, ignored")

    def resolve(self, pointer: str) -> str:
        """Where the ``$ref`` of the subschema at a pointer leads."""
        reference = self.at(pointer)["$ref"]
        place, base = f"{pointer}/$ref", self._base.get(pointer, "")
        try:
            target = urljoin(base, reference)
            if reference.startswith("#"):  # urljoin drops the fragment of some schemes
                target = urldefrag(base)[0] + reference
            address, fragment = urldefrag(target)
        except ValueError as error:
            what = f"reference {reference!r} from {base!r}"
            raise SchemaError(place, f"{what} is no address: {error}") from None
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._resource.get(f"{address}#{fragment}")
        else:
            found = self._resource.get(address)
            found = None if found is None else found + fragment
        if found is None:
            raise SchemaError(place, f"reference {reference!r} leads out of the document")
        try:
            self.at(found)
        except SchemaError as error:
            if error.pointer != found:
                raise
            raise SchemaError(place, f"reference {reference!r} leads nowhere") from None
        return found


def _finite(value: Any) -> bool:
    """Whether no number in a value is infinite or NaN."""
    if isinstance(value, list | dict):
        return all(map(_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)
