"""JSON values compared, and whether one is valid under a schema, as far as that is known here."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_NUMBER = (int, float)
# What each bounds, and how.
_BOUNDS: Mapping[str, tuple[type | tuple[type, ...], Callable[[Any, Any], bool]]] = {
    "minimum": (_NUMBER, lambda value, bound: value >= bound),
    "maximum": (_NUMBER, lambda value, bound: value <= bound),
    "exclusiveMinimum": (_NUMBER, lambda value, bound: value > bound),
    "exclusiveMaximum": (_NUMBER, lambda value, bound: value < bound),
    "minLength": (str, lambda value, bound: len(value) >= bound),
    "maxLength": (str, lambda value, bound: len(value) <= bound),
    "minItems": (list, lambda value, bound: len(value) >= bound),
    "maxItems": (list, lambda value, bound: len(value) <= bound),
    "minProperties": (dict, lambda value, bound: len(value) >= bound),
    "maxProperties": (dict, lambda value, bound: len(value) <= bound),
}
# Keywords that make no value invalid, or that others read.
_SILENT = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "optional"}
_SILENT |= {"$schema", "$id", "$comment", "$defs", "definitions", "additionalProperties", "prefixItems", "required"}
# Schemas may refer to themselves, in several ways at each level.
_DEPTH = 128
_LOOKS = 20_000


@dataclass
class _Root:
    """A whole schema, and how many of its parts may still be looked at."""

    schema: Any
    left: int = _LOOKS


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


def fits(value: Any, schema: Any) -> bool | None:
    """Tell whether a JSON value is valid under a schema; None if the schema says what is not known here, or is too
    much to look at."""
    try:
        return _fits(value, schema, _Root(schema), _DEPTH)
    except (TypeError, ValueError, AttributeError, LookupError):  # it is no schema
        return None


def _fits(value: Any, schema: Any, root: _Root, depth: int) -> bool | None:
    if isinstance(schema, bool):
        return schema
    root.left -= 1
    return _all(_checks(value, schema, root, depth - 1)) if depth and root.left > 0 else None


def _all(found: Iterator[bool | None]) -> bool | None:
    """Return whether all are true: False as soon as one is not, None if one is not known."""
    known = True
    for one in found:
        if one is False:
            return False
        known = known and one is not None
    return True if known else None


def _checks(value: Any, schema: Mapping[str, Any], root: _Root, depth: int) -> Iterator[bool | None]:
    """Yield what each keyword says of the value."""
    for word, told in schema.items():
        if word == "type":
            yield any(_is(value, kind) for kind in ([told] if isinstance(told, str) else told))
        elif word in ("enum", "const"):
            yield key_of(value) in [key_of(one) for one in (told if word == "enum" else [told])]
        elif word in _BOUNDS:
            kind, holds = _BOUNDS[word]
            yield not isinstance(value, kind) or isinstance(value, bool) or holds(value, told)
        elif word == "allOf":
            yield _all(_fits(value, part, root, depth) for part in told)
        elif word in ("anyOf", "oneOf"):
            ways = [_fits(value, part, root, depth) for part in told]
            yes, sure = ways.count(True), None not in ways
            yield (yes == 1 if word == "oneOf" else yes > 0) if sure or (yes and word == "anyOf") else None
        elif word == "$ref":
            yield _fits(value, _part(root.schema, told), root, depth)
        elif word == "properties" and isinstance(value, dict):
            yield from (_fits(value[name], part, root, depth) for name, part in told.items() if name in value)
        elif word == "items" and isinstance(value, list):
            yield from (_fits(item, told, root, depth) for item in value[len(schema.get("prefixItems", ())) :])
        elif word not in _SILENT and word not in ("properties", "items"):
            yield None
    if isinstance(value, dict):
        yield all(name in value for name in schema.get("required", ()))
        named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if "patternProperties" not in schema:  # which is not known
            yield from (_fits(part, others, root, depth) for name, part in value.items() if name not in named)
    if isinstance(value, list):
        yield from (_fits(*pair, root, depth) for pair in zip(value, schema.get("prefixItems", ()), strict=False))


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, _TYPES.get(kind, ()))


def _part(root: Any, where: str) -> Any:
    """Find the part of a schema that a reference names, as "#/$defs/place".

    Raises:
        ValueError, LookupError: there is none.
    """
    at, *names = where.split("/")
    if at != "#":
        raise ValueError(where)
    for name in names:
        root = root[name.replace("~1", "/").replace("~0", "~")]
    return root
