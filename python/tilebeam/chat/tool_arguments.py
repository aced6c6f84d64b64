"""Arguments of calls that are not written as JSON, read into objects.

    elements  <parameter=KEY>VALUE</parameter>, <parameter name="KEY">VALUE</parameter> and the like
    pairs     <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>
    python    KEY=VALUE, as in a call of Python
    gemma     {KEY:VALUE}, where a text stands between two <|"|>

A VALUE without quotes has the type that the function's schema gives it: a text stays what it is.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from tilebeam.grammars.combining import has_type

Schema = Mapping[str, Any]

# Before the name: which mark; behind it: other attributes.
_ELEMENT = re.compile(
    r"<(?P<tag>[\w:]*(?:parameter|param))(?:=|\s+name=\"?)(?P<key>[^\s<>\"]+)\"?(?:\s[^<>]*)?>(?P<value>.*?)"
    r"(?:</(?P=tag)>|(?=<(?P=tag)[= ])|$)",
    re.DOTALL,
)
_PAIR = re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL)
_CDATA = re.compile(r"\A<!\[CDATA\[(.*)\]\]>\Z", re.DOTALL)
_GEMMA = re.compile(r'\s*(?:<\|"\|>(?P<text>.*?)<\|"\|>|(?P<mark>[{}\[\],:])|(?P<word>[^{}\[\],:<]+))', re.DOTALL)
_CLOSES = {"{": "}", "[": "]"}
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def read(kind: str, text: str, schema: Schema) -> str | None:
    """Return the arguments as JSON, None: they are none.

    Args:
        kind: how they are written.
        text: they themselves.
        schema: of the function's parameters.
    """
    try:
        found = _READERS[kind](text, schema)
        return json.dumps(found, ensure_ascii=False, allow_nan=False) if isinstance(found, dict) else None
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError, IndexError):
        return None


def _elements(text: str, schema: Schema) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in _ELEMENT.finditer(text):
        value = one["value"].removeprefix("\n").removesuffix("\n")  # Qwen3-Coder writes values on lines of their own
        found[one["key"]] = _typed(value, _member(schema, one["key"], schema), schema)
    return found


def _pairs(text: str, schema: Schema) -> dict[str, Any]:
    found = [(one["key"].strip(), one["value"]) for one in _PAIR.finditer(text)]
    return {key: _typed(value, _member(schema, key, schema), schema) for key, value in found}


def _python(text: str, schema: Schema) -> dict[str, Any]:  # noqa: ARG001 - its values have quotes
    text = _QUOTED.sub(lambda quoted: quoted[0].replace("\n", "\\n"), text)  # templates leave them as they are
    call = ast.parse(f"f({text})", mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call with names")
    return {str(word.arg): _literal(word.value) for word in call.keywords}


def _literal(node: ast.expr) -> Any:
    """Return a value of Python, where JSON's names of constants are values too."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return json.loads(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(ast.literal_eval(key)): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)


def _gemma(text: str, schema: Schema) -> Any:  # noqa: ARG001 - its texts are marked
    """Read it as the JSON that it is with names and texts in quotes, and a comma between any two members."""
    tokens: list[re.Match[str]] = []
    at = 0
    while text[at:].strip():
        token = _GEMMA.match(text, at)
        if token is None:
            raise ValueError("what stands here?")
        tokens += [] if token["mark"] == "," else [token]
        at = token.end()
    written = ""
    closing: list[str] = []
    for token, after in zip_longest(tokens, tokens[1:]):
        mark, follows = token["mark"], after["mark"] if after else "}"
        if mark in _CLOSES:
            closing.append(_CLOSES[mark])
        if mark is not None:
            written += closing.pop() if mark in ("}", "]") else mark  # either closes what is open
        elif follows == ":":
            written += json.dumps(token[token.lastgroup or 0].strip())
        else:
            written += json.dumps(token["text"] if token["word"] is None else json.loads(token["word"]))
        if mark not in ("{", "[", ":") and follows not in ("}", "]", ":"):
            written += ","
    return json.loads(written)


_READERS = {"elements": _elements, "pairs": _pairs, "python": _python, "gemma": _gemma}


# --- types ------------------------------------------------------------------------------------------------------------


def _typed(text: str, schema: Schema, root: Schema) -> Any:
    """Return a value without quotes."""
    if inner := _CDATA.match(text):
        text = inner[1]
    types = _types(schema, root)
    if types == {"string"} or text in (_resolved(schema, root).get("enum") or ()):
        return text
    for reader in (json.loads, ast.literal_eval):
        try:
            value = reader(text.strip())
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return text if "string" in types and not any(has_type(value, kind) for kind in types) else value
    return text


def _types(schema: Schema, root: Schema) -> set[str]:
    """Return what a schema allows by name; empty: it does not say."""
    schema = _resolved(schema, root)
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {kind for kind in given if isinstance(kind, str)}
    parts = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or ()
    if parts:
        return {kind for part in parts if isinstance(part, dict) for kind in _types(part, root)}
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return {"string"} if values and all(isinstance(value, str) for value in values) else set()


def _member(schema: Schema, key: str, root: Schema) -> Schema:
    """Return the schema of a member of an object."""
    schema = _resolved(schema, root)
    found = (schema.get("properties") or {}).get(key, schema.get("additionalProperties"))
    return found if isinstance(found, dict) else {}


def _resolved(schema: Schema, root: Schema, depth: int = 8) -> Schema:
    """Return what a schema refers to within the same document."""
    place = schema.get("$ref")
    if not isinstance(place, str) or not place.startswith("#/") or depth == 0:
        return schema
    found: Any = root
    for name in place[2:].split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return _resolved(found, root, depth - 1) if isinstance(found, dict) else {}
