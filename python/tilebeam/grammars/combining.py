"""Schemas without combinators: $ref, allOf, anyOf and oneOf become a list of plain schemas, any of which may hold.

Where schemas meet, each keyword of the result is as strict as all of them together; what cannot be combined is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from tilebeam.errors import TilebeamError

Plain = dict[str, Any]
_MOST = 128  # alternatives of one schema
_MOST_DIGITS = 30  # of a number
_MOST_STEPS = 20_000  # references and combinations that are followed

COMBINATORS = ("$ref", "allOf", "anyOf", "oneOf")
# Keywords that say something of a schema, and do not restrict what is valid.
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "$comment", "$schema", "$id", "id", "$anchor"}
    | {"$defs", "definitions", "deprecated", "readOnly", "writeOnly", "discriminator"}
    | {"contentMediaType", "contentEncoding"}
)
BY_TYPE = {
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties", "propertyNames"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"},
}
TYPES = ("null", "boolean", "integer", "number", "string", "object", "array")
KNOWN = frozenset({"type", "enum", "const"}.union(*BY_TYPE.values()))


class SchemaError(TilebeamError):
    """A schema that cannot be turned into a grammar.

    Attributes:
        keyword: the one that is to blame, None for the schema as a whole.
    """

    def __init__(self, message: str, keyword: str | None = None) -> None:
        super().__init__(message)
        self.keyword = keyword


def unsupported(keyword: str, why: str = "") -> SchemaError:
    """Make the error for a keyword that would change what is valid, and that no grammar is made of."""
    return SchemaError(f"the keyword {keyword!r} is not supported{f' {why}' if why else ''}", keyword)


def facts(schema: Mapping[str, Any]) -> Plain:
    """Keep what restricts: a schema without its annotations and keywords of the user's own (x-..)."""
    found = {k: v for k, v in schema.items() if k not in ANNOTATIONS and not k.startswith("x-")}
    return {k: v for k, v in found.items() if k != "nullable" or v is not False}


def or_null(schema: Any) -> list[Any] | None:
    """Write a nullable schema of OpenAPI as what it says otherwise, or null. None: it is not nullable."""
    if not isinstance(schema, dict) or schema.get("nullable") is not True:
        return None
    return [{k: v for k, v in schema.items() if k != "nullable"}, {"type": "null"}]


class Combiner:
    """Makes plain schemas of the parts of one document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        self._comparing = False  # two options of a oneOf

    def resolve(self, reference: object) -> Any:
        """Follow a $ref.

        Raises:
            SchemaError: another document, or nothing.
        """
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise unsupported("$ref", f"with {reference!r}: only to other parts of the same schema (#/..)")
        found = self._root
        for part in reference[1:].split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise SchemaError(f"$ref: the schema has no {reference!r}", "$ref")
        return found

    def plain(self, schema: Any, within: tuple[str, ...] = ()) -> list[Plain]:
        """Write a schema as alternatives without combinators; none if nothing is valid.

        Args:
            within: references that are being followed.

        Raises:
            SchemaError: what is not supported.
        """
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise SchemaError("the schema has too many combinations", "allOf")
        if (options := or_null(schema)) is not None:
            return [found for option in options for found in self.plain(option, within)]
        if isinstance(schema, bool):
            return [{}] if schema else []
        if not isinstance(schema, dict):
            raise SchemaError(f"a schema is an object or a boolean, not {json.dumps(schema)[:60]}")
        restricting = facts(schema)
        own = {k: v for k, v in restricting.items() if k not in COMBINATORS}
        for keyword, value in own.items():
            _check(keyword, value)
        only = [{"enum": [own.pop("const")]}] if "const" in own else [{}]
        found = _product(only, [own])
        if "$ref" in restricting:
            reference = restricting["$ref"]
            if reference in within:
                raise SchemaError(f"$ref: {reference!r} refers to itself without anything between", "$ref")
            found = _product(found, self.plain(self.resolve(reference), (*within, reference)))
        for part in _schemas(restricting, "allOf"):
            found = _product(found, self.plain(part, within))
        for keyword in ("anyOf", "oneOf"):
            if keyword in restricting:
                options = [self.plain(part, within) for part in _schemas(restricting, keyword)]
                if keyword == "oneOf" and not self._comparing:
                    self._check_disjoint(options)
                found = _product(found, [alternative for option in options for alternative in option])
        return found

    def _check_disjoint(self, options: Sequence[Sequence[Plain]]) -> None:
        """Raise `SchemaError` unless no value is valid under two of the options, as far as can be seen."""
        for i, one in enumerate(options):
            for other in options[:i]:
                if not all(self._disjoint(a, b) for a in one for b in other):
                    raise unsupported("oneOf", "where its schemas may overlap: write anyOf")

    def _disjoint(self, a: Plain, b: Plain) -> bool:
        """Tell whether two schemas have no type and no value in common, or are of objects, one of whose properties has
        to be there and cannot be what both say. Whether the options of a oneOf in there overlap does not matter: such a
        schema may hold itself."""
        self._comparing = True
        try:
            both = _both(a, b)
            if both is None:
                return True
            if any(schema.get("type") not in ("object", ["object"]) for schema in (a, b)):
                return False
            parts, ours = both.get("properties", {}), a.get("properties", {})
            tells = {
                name for name, part in ours.items() if isinstance(part, dict) and ("const" in part or "enum" in part)
            }
            # First those that most likely tell: there, no reference has to be followed.
            names = sorted(both.get("required", []), key=lambda name: name not in tells)
            return any(not self.plain(parts.get(name, True)) for name in names)
        except SchemaError:
            return False
        finally:
            self._comparing = False


def _check(keyword: str, value: Any) -> None:
    """Raise `SchemaError` for a keyword that is not supported, or that has a value of another kind than it takes."""
    if keyword.startswith("unevaluated") and value is False:
        return  # nothing is written that is not declared
    if keyword not in KNOWN:
        raise unsupported(keyword)
    for keywords, what, fits in _SHAPES:
        if keyword in keywords and not fits(value):
            raise SchemaError(f"{keyword} is {what}, not {json.dumps(value)[:60]}", keyword)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 10**_MOST_DIGITS


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_SHAPES: tuple[tuple[frozenset[str], str, Callable[[Any], bool]], ...] = (
    (frozenset(BY_TYPE["number"]), f"a number of at most {_MOST_DIGITS} digits", _is_number),
    (frozenset(k for k in KNOWN if k[:3] in ("min", "max") and k[3:] != "imum"), "a count", _is_count),
    (frozenset({"pattern", "format"}), "a text", lambda v: isinstance(v, str)),
    (frozenset({"properties"}), "an object", lambda v: isinstance(v, dict)),
    (frozenset({"required"}), "a list of names", _is_names),
    (frozenset({"enum"}), "a list of values", lambda v: isinstance(v, list) and bool(v)),
    (frozenset({"prefixItems"}), "a list of schemas", lambda v: isinstance(v, list) and bool(v)),
    (frozenset({"uniqueItems"}), "true or false", lambda v: isinstance(v, bool)),
)


def _schemas(schema: Plain, keyword: str) -> list[Any]:
    found = schema.get(keyword, [])
    if not isinstance(found, list) or (keyword in schema and not found):
        raise SchemaError(f"{keyword} is a list of schemas", keyword)
    return found


def _product(left: Sequence[Plain], right: Sequence[Plain]) -> list[Plain]:
    if len(left) * len(right) > _MOST:
        raise SchemaError(f"allOf and anyOf make more than {_MOST} alternatives", "allOf")
    return [both for a in left for b in right if (both := _both(a, b)) is not None]


# --- two schemas at once ----------------------------------------------------------------------------------------------


def _both(a: Plain, b: Plain) -> Plain | None:
    """Combine two schemas to what is valid under both; None: nothing."""
    if not a or not b:
        return a or b
    found = {**b, **a}
    # First those that tell that nothing is valid: then the others need not combine.
    for keyword in sorted(a.keys() & b.keys(), key=lambda name: (name not in ("type", "enum"), name)):
        if not same(a[keyword], b[keyword]):
            if keyword not in _COMBINE:
                raise SchemaError(f"{keyword!r} has several values that would have to hold together", keyword)
            found[keyword] = _COMBINE[keyword](a[keyword], b[keyword])
        if keyword in ("type", "enum") and not found[keyword]:
            return None
    if "properties" in found or "additionalProperties" in found:
        found["properties"] = _properties(a, b)
    return found


def type_names(given: Any) -> list[str]:
    """Return the types of "type".

    Raises:
        SchemaError: there is no such type.
    """
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or any(name not in TYPES for name in names):
        raise SchemaError(f"type: {given!r} is none of {', '.join(TYPES)}", "type")
    return list(names)


def has_type(value: Any, name: str) -> bool:
    """Tell whether a value has one of `TYPES`; a boolean is no number."""
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    kinds = {"null": type(None), "number": (int, float), "string": str, "object": dict, "array": list}
    return name in kinds and isinstance(value, kinds[name])  # type: ignore[arg-type]


def _common_types(a: Any, b: Any) -> list[str]:
    one, other = type_names(a), type_names(b)
    numbers = {"integer", "number"}
    found = [name for name in one if name in other]
    if "integer" not in found and "number" not in found and numbers & {*one} and numbers & {*other}:
        found.append("integer")
    return found


def _all_of(a: Any, b: Any) -> Any:
    """Combine schemas in one list without repetition: combining recursive schemas comes to an end."""
    parts: list[Any] = []
    for schema in (a, b):
        inner = schema["allOf"] if isinstance(schema, dict) and [*schema] == ["allOf"] else [schema]
        parts += [part for part in inner if not any(part == known and same(part, known) for known in parts)]
    return parts[0] if len(parts) == 1 else {"allOf": parts}


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "type": _common_types,
    "enum": lambda a, b: [v for v in a if any(same(v, w) for w in b)],
    "required": lambda a, b: list(dict.fromkeys([*a, *b])),
    "properties": _all_of,  # see _properties
    "additionalProperties": _all_of,
    "propertyNames": _all_of,
    "items": _all_of,
    "uniqueItems": lambda a, b: bool(a) or bool(b),
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}


def key_of(value: Any, text: Callable[[str], str] = str) -> Hashable:
    """Return what equal JSON values have in common: numbers by value, no boolean is one, members in any order.

    Args:
        text: what equal texts have in common.
    """
    if isinstance(value, dict):
        return "object", frozenset((name, key_of(part, text)) for name, part in value.items())
    if isinstance(value, list):
        return "array", tuple(key_of(part, text) for part in value)
    if isinstance(value, str):
        return "text", text(value)
    return type(value) is bool, value


def same(a: Any, b: Any) -> bool:
    """Tell whether two values are one to JSON: 1 and 1.0 are, 1 and true are not."""
    return key_of(a) == key_of(b)


def _properties(a: Plain, b: Plain) -> dict[str, Any]:
    """Combine the properties of both; those that only one names are additional ones to the other."""
    found: dict[str, Any] = {}
    for own, other in ((a, b), (b, a)):
        rest = other.get("additionalProperties", True)
        for name, schema in own.get("properties", {}).items():
            if name in other.get("properties", {}):
                found[name] = _all_of(a["properties"][name], b["properties"][name])
            elif rest is True:
                found[name] = schema
            else:
                found[name] = _all_of(schema, rest)
    return found
