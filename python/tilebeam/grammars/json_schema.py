"""JSON schemas as grammars.

Every text that a grammar lets through is valid under its schema. The other way round not quite: objects hold their
properties in the schema's order and no others, white space is little, numbers are short where nothing bounds them. What
a grammar cannot promise is refused with the name of the keyword.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, ClassVar

from tilebeam.grammars import ranges
from tilebeam.grammars.combining import (
    BY_TYPE,
    Combiner,
    Plain,
    SchemaError,
    facts,
    has_type,
    or_null,
    type_names,
    unsupported,
)
from tilebeam.grammars.gbnf import either, json_literal, repeated
from tilebeam.grammars.patterns import CHAR, FORMATS, PatternError, string_rule
from tilebeam.grammars.ranges import Bound

# White space is limited: a model that may write spaces for ever sometimes does.
_BASE = {
    "ws": r'( " " | "\n" [ \t]{0,16} )?',
    "hex": "[0-9a-fA-F]",
    "char": CHAR,
    "string": r'"\"" char* "\""',
    "natural": f'"0" | [1-9] [0-9]{{0,{ranges.DIGITS - 1}}}',
    "integer": '"-"? natural',
    "number": f'"-"? natural ( "." [0-9]{{1,{ranges.DIGITS}}} )? ( [eE] [-+]? [0-9]{{1,2}} )?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" ws ( pair ( "," ws pair )* )? "}"',
    "pair": 'string ":" ws value ws',
    "array": '"[" ws ( element ( "," ws element )* )? "]"',
    "element": "value ws",
}
_REFERENCE = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|([a-zA-Z][a-zA-Z0-9-]*)')
_MAX_RULES = 2000
_MOST_MULTIPLES = 128  # they are written one by one
# Longest text of a schema that asks for more: subsets are valid, too.
_LONGEST = 100_000


def grammar_of_schema(schema: Any) -> str:
    """Make a GBNF grammar of texts that are valid under a JSON schema.

    Args:
        schema: as parsed from JSON: an object or a boolean.

    Raises:
        SchemaError: it is no schema, nothing is valid under it, or it asks for what a grammar cannot promise; the
            sentence tells where (#/properties/..) and which keyword.
    """
    converter = _Converter(schema)
    try:
        root = converter.rule_of(schema, "#")
    except RecursionError:
        raise SchemaError("#: the schema is too deep") from None
    return converter.text(root)


class _Converter:
    """Collects the rules of one schema."""

    def __init__(self, root: Any) -> None:
        self._combiner = Combiner(root)
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}  # of bodies
        self._references: dict[str, str] = {}  # rules of $ref
        self._combined: dict[str, str] = {}  # rules of what has allOf, by the schema

    def text(self, root: str) -> str:
        """Write the whole grammar: the rules made, and those of the base that they use."""
        rules = {"root": root, **self._rules}
        wanted = list(rules)
        for name in wanted:
            for found in _REFERENCE.finditer(rules[name]):
                used = found[1]
                if used and used not in rules:
                    rules[used] = _BASE[used]
                    wanted.append(used)
        return "\n".join(f"{name} ::= {body}" for name, body in rules.items()) + "\n"

    def rule(self, path: str, body: str) -> str:
        """Name a rule with this body."""
        if re.fullmatch(r"[a-zA-Z][a-zA-Z0-9-]*", body):
            return body
        if body in self._names:
            return self._names[body]
        name = self._reserve(path)
        self._names[body] = name
        self._rules[name] = body
        return name

    def _reserve(self, path: str) -> str:
        """Reserve a new name that tells where in the schema a rule comes from."""
        words = re.findall(r"[a-zA-Z0-9]+", path.rpartition("/")[2])
        stem = "-".join(["s", *words])[:40]
        name, count = stem, 1
        while name in self._rules or name in _BASE or name == "root":
            count += 1
            name = f"{stem}-{count}"
        if len(self._rules) >= _MAX_RULES:
            raise SchemaError(f"the schema makes more than {_MAX_RULES} rules")
        self._rules[name] = ""
        return name

    # --- schemas --------------------------------------------------------------------------------------------------

    def rule_of(self, schema: Any, path: str) -> str:
        """Make the rule of a schema, under which something must be valid."""
        found = self._optional_rule(schema, path)
        if found is None:
            raise SchemaError(f"{path}: nothing is valid under this schema")
        return found

    def _optional_rule(self, schema: Any, path: str) -> str | None:
        """Make the rule of a schema, None if nothing is valid under it."""
        try:
            if (options := or_null(schema)) is not None:
                return self._any_of(options, path, keyword="")
            if isinstance(schema, dict):
                restricting = facts(schema)
                if [*restricting] == ["$ref"]:
                    return self._referred(restricting["$ref"])
                if [*restricting] == ["anyOf"] and isinstance(schema["anyOf"], list):
                    return self._any_of(schema["anyOf"], path)
                if "allOf" in restricting:
                    return self._all_of(schema, path)
            return self._whole(schema, path)
        except SchemaError as error:
            raise _located(error, path) from None

    def _whole(self, schema: Any, path: str) -> str | None:
        bodies = [body for plain in self._combiner.plain(schema) for body in self._plain(plain, path)]
        return self.rule(path, " | ".join(dict.fromkeys(bodies))) if bodies else None

    def _all_of(self, schema: Plain, path: str) -> str | None:
        """Make the rule of schemas that are combined; where recursive ones are, the same combination comes again."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._combined:
            name = self._combined[key] = self._reserve(path)
            body = self._whole(schema, path)
            if body is None:
                del self._combined[key], self._rules[name]
                return None
            self._rules[name] = body
        return self._combined[key]

    def _referred(self, reference: Any) -> str | None:
        if not isinstance(reference, str) or reference not in self._references:
            target = self._combiner.resolve(reference)
            name = self._references[reference] = self._reserve(reference)
            body = self._optional_rule(target, reference)
            if body is None:
                raise SchemaError(f"$ref: nothing is valid under {reference!r}", "$ref")
            if body == name:
                raise SchemaError(f"$ref: {reference!r} refers to itself without anything between", "$ref")
            self._rules[name] = body
        return self._references[reference]

    def _any_of(self, options: list[Any], path: str, keyword: str = "/anyOf") -> str | None:
        if not options:
            raise SchemaError("anyOf is a list of schemas", "anyOf")
        paths = [f"{path}{keyword}/{i}" if keyword else path for i in range(len(options))]
        rules = [self._optional_rule(option, where) for option, where in zip(options, paths, strict=True)]
        found = [rule for rule in rules if rule is not None]
        return self.rule(path, " | ".join(dict.fromkeys(found))) if found else None

    def _plain(self, schema: Plain, path: str) -> list[str]:
        """Make the bodies of a schema without combinators, one for each type or value."""
        if "enum" in schema:
            return [json_literal(value) for value in _values(schema)]
        by_keywords = [name for name, keywords in BY_TYPE.items() if keywords & schema.keys()]
        types = type_names(schema["type"]) if "type" in schema else by_keywords
        if not types:
            return ["value"]
        if "number" in types and "integer" in types:
            types.remove("integer")
        made = [self._of_type[name](self, schema, path) for name in types]
        return [body for body in made if body is not None]

    # --- numbers and strings --------------------------------------------------------------------------------------

    def _integer(self, schema: Plain, path: str) -> str | None:  # noqa: ARG002
        low, high = _bounds(schema)
        if (step := schema.get("multipleOf", 1)) == 1:
            return "integer" if low is None and high is None else ranges.decimals(low, high, places=0)
        if step < 1 or step != int(step) or low is None or high is None:
            raise unsupported("multipleOf", "for integers but with a whole number, between a minimum and a maximum")
        least, most = ranges.whole_range(low, high)
        first, last = -(-least // int(step)), most // int(step)
        if last - first >= _MOST_MULTIPLES:
            raise unsupported("multipleOf", f"of {step} with more than {_MOST_MULTIPLES} multiples in the range")
        return either(*[f'"{n * int(step)}"' for n in range(first, last + 1)]) if first <= last else None

    def _number(self, schema: Plain, path: str) -> str | None:
        low, high = _bounds(schema)
        if "multipleOf" not in schema:
            return "number" if low is None and high is None else ranges.decimals(low, high)
        digits = Decimal(repr(schema["multipleOf"])).normalize().as_tuple()
        places = -int(digits.exponent)
        if places <= 0:
            return self._integer(schema, path)
        if digits.digits != (1,) or digits.sign or places > ranges.DIGITS:
            raise unsupported("multipleOf", "but for whole numbers, 0.1, 0.01 and so on")
        return ranges.decimals(low, high, places)

    def _string(self, schema: Plain, path: str) -> str | None:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if "pattern" in schema or "format" in schema:
            return self._matching(schema, path)
        if not least and most is None:
            return "string"
        least, most = int(least), None if most is None else min(int(most), max(int(least), _LONGEST))
        if least > _LONGEST:
            raise unsupported("minLength", f"above {_LONGEST}")
        if most is not None and most < least:
            return None
        return f'"\\"" {repeated("char", least, most)} "\\""'.replace("  ", " ")

    def _matching(self, schema: Plain, path: str) -> str:
        keyword, *others = [k for k in ("pattern", "format", "minLength", "maxLength") if k in schema]
        if others:
            raise unsupported(others[0], f"beside {keyword!r}")
        if keyword == "format" and schema["format"] not in FORMATS:
            raise unsupported("format", f"with {schema['format']!r}, only with {', '.join(FORMATS)}")
        pattern = schema["pattern"] if keyword == "pattern" else FORMATS[schema["format"]]
        try:
            body = string_rule(pattern, lambda group: self.rule(f"{path}/{keyword}", group))
            text = self.rule(f"{path}/{keyword}", body)
        except PatternError as error:
            raise unsupported("pattern", f"with {error} ({pattern!r:.80})") from None
        return f'"\\"" {text} "\\""'

    # --- arrays ---------------------------------------------------------------------------------------------------

    def _array(self, schema: Plain, path: str) -> str | None:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):  # as before 2020
            first, rest = rest, schema.get("additionalItems", True)
        elif "additionalItems" in schema:
            raise unsupported("additionalItems", "without a list of items")
        least = int(schema.get("minItems", 0))
        most = None if "maxItems" not in schema else int(schema["maxItems"])
        if schema.get("uniqueItems") and (most is None or most > 1):
            raise unsupported("uniqueItems", "for more than one item")
        first = first[:most]
        named = [self.rule_of(item, f"{path}/prefixItems/{i}") for i, item in enumerate(first)]
        others = self._optional_rule(rest, f"{path}/items")
        if others is None or ("items" not in schema and first and least <= len(first)):
            most = len(first)  # nothing else may follow, or need not
        if most is not None and most < least:
            return None
        if least > _LONGEST:
            raise unsupported("minItems", f"above {_LONGEST}")
        least = max(0, least - len(named))
        most = None if most is None else min(most - len(named), max(least, _LONGEST))
        inner = self._listed([f"{item} ws" for item in named], f"{others or 'value'} ws", least, most, path)
        return f'"[" ws {inner} "]"'.replace("  ", " ")

    def _listed(self, first: Sequence[str], other: str, least: int, most: int | None, path: str) -> str:
        """Return items in their order, then `least` to `most` others, with commas between them all."""
        inner = ' "," ws '.join(first)
        if most == 0:
            return inner
        following = self.rule(f"{path}/more", f'"," ws {other}')
        if first:
            return f"{inner} {repeated(following, least, most)}"
        rest = repeated(following, max(0, least - 1), None if most is None else most - 1)
        inner = f"{other} {rest}".strip()
        return inner if least else f"( {inner} )?"

    # --- objects --------------------------------------------------------------------------------------------------

    def _object(self, schema: Plain, path: str) -> str | None:
        properties: dict[str, Any] = dict(schema.get("properties", {}))
        required = schema.get("required", [])
        additional = schema.get("additionalProperties", True)
        for name in required:
            properties.setdefault(name, additional)
        if not properties:
            return self._dictionary(schema, additional, path)
        if not isinstance(additional, bool) and additional != {}:
            raise unsupported("additionalProperties", "with a schema beside properties or required")
        if "propertyNames" in schema:
            raise unsupported("propertyNames", "beside properties or required")
        members: list[tuple[str, bool]] = []
        for name, value in properties.items():
            rule = self._optional_rule(value, f"{path}/properties/{name}")
            if rule is not None:
                member = self.rule(f"{path}/{name}-member", f'{json_literal(name)} ":" ws {rule} ws')
                members.append((member, name in required))
            elif name in required:
                return None
        if schema.get("minProperties", 0) > sum(needed for _, needed in members):
            raise unsupported("minProperties", "above the number of required properties")
        if schema.get("maxProperties", len(members)) < len(members):
            raise unsupported("maxProperties", "below the number of properties")
        return f'"{{" ws {self._in_order(members, path)} "}}"'.replace("  ", " ")

    def _dictionary(self, schema: Plain, additional: Any, path: str) -> str | None:
        """Make the body of an object whose properties may have any name, or those that "propertyNames" allows."""
        value = self._optional_rule(additional, f"{path}/additionalProperties")
        key: str | None = "string"
        if "propertyNames" in schema:
            key = self._optional_rule({"allOf": [schema["propertyNames"], {"type": "string"}]}, f"{path}/propertyNames")
        least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        if value is None or key is None:
            most = 0
        most = None if most is None else min(int(most), max(least, _LONGEST))
        if most is not None and most < least:
            return None
        if least > _LONGEST:
            raise unsupported("minProperties", f"above {_LONGEST}")
        if most == 0:
            return '"{" ws "}"'
        other = self.rule(f"{path}/other-member", f'{key} ":" ws {value} ws')
        return f'"{{" ws {self._listed([], other, least, most, path)} "}}"'

    def _in_order(self, members: Sequence[tuple[str, bool]], path: str) -> str:
        """Return members in their order, those left out that may be.

        A rule for what may come behind at least one member, and one for what may come first, each from the last
        member to the first: the grammar grows with the number of members, not with that of their combinations.
        """
        after, first = "", ""
        for i, (member, required) in reversed(list(enumerate(members))):
            here = f"{member} {after}".strip()
            first = here if required else either(here, first) if first else f"( {here} )?"
            after = f'"," ws {member} {after}' if required else f'( "," ws {member} )? {after}'
            after = self.rule(f"{path}/after-{i}", after.strip()) if i else ""
            first = self.rule(f"{path}/from-{i}", first) if i else first
        return first

    _of_type: ClassVar[dict[str, Callable[[_Converter, Plain, str], str | None]]] = {
        "null": lambda *_: "null",
        "boolean": lambda *_: "boolean",
        "integer": _integer,
        "number": _number,
        "string": _string,
        "array": _array,
        "object": _object,
    }


def _located(error: SchemaError, path: str) -> SchemaError:
    """Add the place in the schema to an error, unless it has one."""
    text = str(error)
    return error if text.startswith("#") else SchemaError(f"{path}: {text}", error.keyword)


def _values(schema: Plain) -> list[Any]:
    """Return the values of enum that have the schema's type."""
    values = list(schema["enum"])
    if others := schema.keys() - {"enum", "type"}:
        raise unsupported(min(others), "beside enum or const")
    if "type" in schema:
        types = type_names(schema["type"])
        values = [v for v in values if any(has_type(v, name) for name in types)]
    return values


def _bounds(schema: Plain) -> tuple[Bound | None, Bound | None]:
    """Find the tightest ends of a number's range."""
    lows = [Bound(Decimal(repr(schema[k])), k != "minimum") for k in ("minimum", "exclusiveMinimum") if k in schema]
    highs = [Bound(Decimal(repr(schema[k])), k != "maximum") for k in ("maximum", "exclusiveMaximum") if k in schema]
    kind = schema.get("format", "double")
    if size := re.fullmatch(r"(u?)int(8|16|32|64)", kind):  # OpenAPI's formats of numbers
        unsigned, bits = bool(size[1]), int(size[2])
        lows.append(Bound(Decimal(0 if unsigned else -(1 << (bits - 1)))))
        highs.append(Bound(Decimal((1 << (bits if unsigned else bits - 1)) - 1)))
    elif kind not in ("float", "double"):
        raise unsupported("format", f"with {kind!r} for numbers")
    low = max(lows, key=lambda b: (b.value, b.open), default=None)
    high = min(highs, key=lambda b: (b.value, not b.open), default=None)
    return low, high
