"""Grammars of JSON schemas: whatever they let through is valid, usual values pass, and the rest is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from ipaddress import ip_address
from typing import Any
from uuid import UUID

import pytest
import tilebeam
from gbnf_kit import Gbnf
from hypothesis import given
from hypothesis import strategies as st
from tilebeam import LM, SamplingParams, TilebeamError
from tilebeam.grammars import ranges
from tilebeam.grammars.combining import SchemaError
from tilebeam.grammars.constraint import GrammarError, of_regex
from tilebeam.grammars.json_schema import grammar_of_schema
from tilebeam.grammars.patterns import PatternError, text_grammar
from tilebeam.grammars.ranges import Bound

from bench.lib.synth import preset, write_model

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "score": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age"],
}
TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["v", "next"],
        }
    },
    "$ref": "#/$defs/node",
}
SHAPES: dict[str, Any] = {
    "oneOf": [
        {"type": "object", "properties": {"k": {"const": "c"}, "r": {"type": "number"}}, "required": ["k", "r"]},
        {"type": "object", "properties": {"k": {"const": "s"}, "w": {"type": "number"}}, "required": ["k", "w"]},
    ],
    "discriminator": {"propertyName": "k"},
}
# schema, texts that pass, texts that do not
CASES: list[tuple[Any, list[str], list[str]]] = [
    (
        PERSON,
        ['{"name": "Jo", "age": 150}', '{"name":"é","age":0,"score":0.5,"tags":["a","b"]}'],
        [
            *('{"name": "Jo", "age": 151}', '{"name": "Jo", "age": -1}', '{"name": "", "age": 1}', '{"age": 1}'),
            *('{"name": "Jo", "age": 1.5}', '{"name":"x","age":1,"score":0}', '{"name":"x","age":1,"score":1.01}'),
            *(
                '{"name":"x","age":1,"tags":[]}',
                '{"name":"x","age":1,"tags":["a","a","a","a"]}',
                '{"name":"x","age":1,}',
            ),
            *('{"name":"x","age":1,"tags":["c"]}', f'{{"name":"{21 * "x"}","age":1}}', '{"name":"x","age":1,"more":1}'),
        ],
    ),
    (TREE, ['{"v": 1, "next": {"v": -2, "next": null}}'], ['{"v": 1}', '{"v": 1, "next": {"v": 1}}']),
    (SHAPES, ['{"k": "c", "r": 1.5}', '{"k": "s", "w": 2}'], ['{"k": "c", "w": 1}', '{"k": "x", "r": 1}']),
    ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 7}, ["6"], ["5", "7", "6.0", "60"]),
    ({"type": "integer", "minimum": -12.5, "maximum": -3}, ["-12", "-3", "-9"], ["-13", "-2", "0", "3", "-0"]),
    ({"type": "integer", "minimum": 10**20}, [str(10**20), str(10**20 + 5)], [str(10**20 - 1), "5"]),
    ({"type": "integer", "maximum": -5}, ["-5", "-123456"], ["-4", "0"]),
    ({"minimum": 3, "maximum": 4.25}, ["3", "3.99", "4.25", "4.2"], ["2.99", "4.26", "4.3", "3e1"]),
    ({"type": "number", "multipleOf": 0.01, "minimum": 0}, ["0", "9.99", "1.5"], ["0.001", "-1"]),
    (
        {"type": "integer", "multipleOf": 7, "minimum": -20, "maximum": 500},
        ["0", "-14", "7", "497"],
        ["1", "-0", "07", "-21", "504", "7.0"],
    ),
    ({"type": "number", "multipleOf": 15, "minimum": 20, "maximum": 100}, ["30", "90"], ["15", "105", "31", "30.0"]),
    ({"multipleOf": 997, "minimum": -997, "maximum": 99999}, ["-997", "0", "99700"], ["99", "-1994", "9971"]),
    ({"type": "number", "multipleOf": 1, "maximum": 3}, ["3", "-17"], ["3.5", "4"]),
    ({"type": "integer", "format": "uint8"}, ["0", "255"], ["256", "-1"]),
    ({"type": ["string", "null"], "minLength": 2, "maxLength": 3}, ['"ab"', '"a\\n"', "null"], ['"a"', '"abcd"', "1"]),
    ({"type": "string", "minLength": 3, "maxLength": 1200}, ['"abc"', f'"{1200 * "x"}"'], ['"ab"', f'"{1201 * "x"}"']),
    (
        {"type": "string", "pattern": "^[A-Z]{2}\\d+(-\\d{3})?$"},
        ['"AB1"', '"AB12-123"'],
        ['"A1"', '"AB1-12"', '"AB1x"'],
    ),
    ({"type": "string", "pattern": "b+"}, ['"b"', '"abba"', '"b\\u00e9"'], ['"aa"', '""']),
    ({"type": "string", "pattern": '^["\\\\\\n]$'}, ['"\\""', '"\\\\"', '"\\n"'], ['"n"', '"""']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"', '"1999-12-31"'], ['"2023-02-29"', '"2024-13-01"']),
    ({"enum": ["a", 1, None, {"b": [1]}]}, ['"a"', "1", "null", '{"b": [1]}'], ['"b"', "2", "true"]),
    ({"type": "integer", "enum": [1, "a", 2.0, True]}, ["1", "2.0"], ['"a"', "true"]),
    ({"const": "x"}, ['"x"'], ['"y"']),
    ({"type": "array", "items": {"type": "boolean"}}, ["[]", "[true]", "[true, false]"], ["[1]", "[true,]"]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 2}, ["[null,null]"], ["[]", "[null]"]),
    ({"type": "array", "prefixItems": [{"type": "null"}, {"const": 2}]}, ["[null, 2]"], ["[2, null]", "[null, 2, 3]"]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}}, ["[1]", "[1,2,2]"], ["[1,1]", "[]"]),
    ({"type": "array", "items": False}, ["[]"], ["[1]"]),
    ({"type": "object"}, ["{}", '{"a": [1, {"b": "c"}]}'], ["[]", '{"a"}']),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", '{"a": 1}'], ['{"a": "b"}']),
    ({"additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2}, ['{"a":null}'], ["{}"]),
    (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": {"const": 1}},
        ['{"abc": 1}'],
        ['{"abd": 1}', '{"": 1}'],
    ),
    (
        {"properties": {"ab": {"const": 1}, "b": True}, "required": ["c"], "additionalProperties": {}},
        ['{"c": 2}', '{"ab": 1, "c": []}', '{"ab": 1, "b": {}, "c": null}'],
        ['{"ab": 2, "c": 2}', "{}", '{"c": 2, "ab": 1}', '{"c": 2, "d": 1}'],
    ),
    (
        {"properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}},
        ["{}", '{"a": 1}', '{"b": 2}', '{"a": 1, "c": 3}', '{"a":1,"b":2,"c":3}'],
        ['{"b": 2, "a": 1}', "{,}", '{"a": 1,}'],
    ),
    (
        {"allOf": [{"$ref": "#/$defs/low"}, {"maximum": 9, "type": "number"}], "$defs": {"low": {"minimum": 8.5}}},
        ["8.5", "9"],
        ["8", "9.1"],
    ),
    (
        {"type": "object", "properties": {"a": True, "b": True}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}'],
        ["{}"],
    ),
    (
        {
            "allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {"minimum": 3}}}],
            "type": "object",
        },
        ['{"a": 3}'],
        ['{"a": 2}', '{"a": "x"}'],
    ),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ['"a"', "1"], ["null", "1.5"]),
    ({"oneOf": [{"const": 1}, {"const": True}]}, ["1", "true"], ["2"]),
    (  # whichever keyword is looked at first: the order of a set of names differs from process to process
        {"oneOf": [{"type": "string", "format": "date"}, {"type": "null", "format": "a", "pattern": "b", "items": 1}]},
        ['"2024-02-29"', "null"],
        ['"a"'],
    ),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"type": "object", "properties": {"a": {"type": "string"}}},
            ]
        },
        ['{"a": 1}', '{"a": "x"}', "{}"],
        ['{"a": null}'],
    ),
    (  # a oneOf that holds itself, in a property that is compared before the one that tells its options apart
        {
            "oneOf": [
                {"type": "number"},
                *(
                    {"type": "object", "properties": {"a": {"$ref": "#"}, "op": {"const": op}}, "required": ["a", "op"]}
                    for op in ("-", "!")
                ),
            ]
        },
        ["1", '{"a": {"a": 2, "op": "!"}, "op": "-"}'],
        ['{"a": 1, "op": "+"}', '{"a": "x", "op": "-"}'],
    ),
    (True, ["1", "{}", '"a"'], ["", "nul"]),
    ({"title": "T", "description": "d", "default": 1, "x-mine": 2, "type": "null"}, ["null"], ["1"]),
]
REFUSED: list[tuple[Any, str, str]] = [
    ({"type": "integer", "multipleOf": 2.5}, "multipleOf", "for integers"),
    ({"type": "integer", "multipleOf": 0}, "multipleOf", "for integers"),
    ({"type": "integer", "multipleOf": 7}, "multipleOf", "between a minimum and a maximum"),
    ({"type": "integer", "multipleOf": 2, "minimum": 1, "maximum": 999}, "multipleOf", "more than 128 multiples"),
    ({"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 1e20}, "multipleOf", "more than 128 multiples"),
    ({"type": "number", "multipleOf": 0.3}, "multipleOf", "0.01"),
    ({"type": "object", "properties": {"a": {"type": "string", "format": "color"}}}, "format", "#/properties/a: "),
    ({"type": "string", "pattern": "(?=a)b"}, "pattern", "look-around"),
    ({"type": "string", "pattern": "a\\b"}, "pattern", "\\b"),
    ({"type": "string", "pattern": "a$b"}, "pattern", "$ elsewhere"),
    ({"type": "string", "pattern": "("}, "pattern", "an unmatched ("),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "maxLength", "beside 'pattern'"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "more than one item"),
    ({"type": "array", "contains": {"const": 1}}, "contains", ""),
    ({"not": {"type": "null"}}, "not", ""),
    ({"if": {}, "then": {}}, "if", ""),
    ({"type": "object", "patternProperties": {"^a": {}}}, "patternProperties", ""),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired", ""),
    ({"properties": {"a": {}}, "minProperties": 1}, "minProperties", "required properties"),
    ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "maxProperties", "number of properties"),
    ({"properties": {"a": {}}, "additionalProperties": {"const": 1}}, "additionalProperties", "with a schema"),
    ({"properties": {"a": {}}, "propertyNames": {"pattern": "^a"}}, "propertyNames", "beside properties"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", "write anyOf"),
    ({"type": "integer", "minimun": 3}, "minimun", ""),
    ({"type": "integer", "minimum": "3"}, "minimum", "is a number"),
    ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum", "is a number"),
    ({"type": "float"}, "type", "none of null"),
    ({"$ref": "http://example.com/a"}, "$ref", "same schema"),
    ({"properties": {"a": {"$ref": "#n"}}, "$defs": {"n": {"$anchor": "n", "const": 1}}}, "$ref", "same schema"),
    ({"minProperties": 100_001, "type": "object"}, "minProperties", "above 100000"),
    ({"$ref": "#/$defs/none"}, "$ref", "no '#/$defs/none'"),
    ({"$ref": "#"}, "$ref", "itself"),
    ({"enum": [1], "minimum": 0}, "minimum", "beside enum"),
    ({"anyOf": []}, "anyOf", "list of schemas"),
]


@pytest.mark.parametrize(
    ("schema", "good", "bad"), CASES, ids=lambda v: json.dumps(v)[:60] if isinstance(v, dict) else ""
)
def test_usual_values_pass_and_others_do_not(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = Gbnf(grammar_of_schema(schema))
    for text in good:
        json.loads(text)
        assert grammar.matches(text), text
    for text in bad:
        assert not grammar.matches(text), text


@pytest.mark.parametrize("schema", [schema for schema, _, _ in CASES], ids=lambda v: json.dumps(v)[:60])
def test_whatever_passes_is_valid(schema: Any) -> None:
    """Random derivations of the grammar, against another implementation of JSON Schema."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema)
    grammar, rng = Gbnf(grammar_of_schema(schema)), random.Random(7)
    for _ in range(60):
        text = grammar.sample(rng)
        value = json.loads(text, parse_float=Decimal)
        assert json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8")  # whole characters
        if "multipleOf" not in json.dumps(schema):  # binary fractions
            validator.validate(json.loads(text))
        elif isinstance(schema.get("multipleOf"), float):
            assert value % Decimal(repr(schema["multipleOf"])) == 0


@pytest.mark.parametrize(("schema", "keyword", "why"), REFUSED, ids=lambda v: json.dumps(v)[:50])
def test_what_cannot_be_promised_is_refused_by_name(schema: Any, keyword: str, why: str) -> None:
    with pytest.raises(SchemaError) as error:
        grammar_of_schema(schema)
    assert error.value.keyword == keyword
    assert str(error.value).startswith("#")
    assert keyword in str(error.value)
    assert why in str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"allOf": [{"const": 1}, {"const": 2}]},
        {"allOf": [{"properties": {"a": {"const": value}}, "required": ["a"]} for value in (1, True)]},
    ],
)
def test_schemas_that_nothing_fits(schema: Any) -> None:
    with pytest.raises(SchemaError, match="nothing is valid"):
        grammar_of_schema(schema)


def test_null_is_no_schema_however_often_it_is_given() -> None:
    with pytest.raises(SchemaError, match="a schema is an object or a boolean, not null"):
        grammar_of_schema({"type": "array", "allOf": [{"items": None}, {"items": None}]})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date-time",
            ["2024-02-29T23:59:59Z", "0001-01-01T00:00:00.5+02:00"],
            ["2024-02-29 23:59:59Z", "2024-02-29T24:00:00Z"],
        ),
        ("time", ["12:00:00Z"], ["12:00", "12:60:00Z"]),
        ("duration", ["P1Y2M3DT4H5M6S", "PT5M", "P2W"], ["P", "PT", "5M"]),
        ("email", ["a.b@example.com"], ["a@b", "@example.com", "a b@example.com"]),
        ("hostname", ["a", "www.example.com"], ["-a", "a.", "a b"]),
        ("ipv4", ["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
        ("ipv6", ["2001:db8:0:0:0:0:0:1"], ["2001:db8", "g:0:0:0:0:0:0:1"]),
        ("uri", ["https://example.com:80/a?b=c#d"], ["example.com", "https://a b"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ("date", ["2000-02-29"], ["1900-02-29", "2001-04-31"]),
    ],
)
def test_formats(name: str, good: list[str], bad: list[str]) -> None:
    grammar, rng = Gbnf(grammar_of_schema({"type": "string", "format": name})), random.Random(3)
    for text in good:
        assert grammar.matches(json.dumps(text)), text
    for text in bad:
        assert not grammar.matches(json.dumps(text)), text
    readers = {"date": date.fromisoformat, "date-time": datetime.fromisoformat, "uuid": UUID}
    readers |= {"ipv4": ip_address, "ipv6": ip_address}
    for _ in range(100):
        readers.get(name, str)(json.loads(grammar.sample(rng)))


def test_combinations_of_recursive_schemas_end() -> None:
    """The same combination comes again and is one rule; what doubles at every level is refused, not followed."""
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}}}
    other = {"type": "object", "properties": {"next": {"$ref": "#/$defs/other"}, "v": {"minimum": 3}}}
    schema = {"$defs": {"node": node, "other": other}, "allOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/other"}]}
    grammar = Gbnf(grammar_of_schema(schema))
    assert grammar.matches('{"next": {"next": {"v": 3}, "v": 4}}')
    assert not grammar.matches('{"next": {"next": {"v": 2}}}')
    levels = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)}
    with pytest.raises(SchemaError, match="too many combinations"):
        grammar_of_schema({"$defs": {**levels, "d40": {"type": "null"}}, "$ref": "#/$defs/d0"})
    for end in ({"type": "null"}, {"$ref": "#"}):
        deep: Any = end
        for _ in range(3000):
            deep = {"items": deep}
        with pytest.raises(SchemaError, match=r"too deep|rules"):
            grammar_of_schema(deep)


NULLABLE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "string", "nullable": False, "maxLength": 1},
                "next": {"$ref": "#/$defs/node", "nullable": True},
                "both": {"allOf": [{"enum": [1, 2], "nullable": True}, {"enum": [2, 3], "nullable": True}]},
            },
            "required": ["v", "next"],
        }
    },
    "$ref": "#/$defs/node",
}


def test_what_openapi_calls_nullable() -> None:
    plain = Gbnf(grammar_of_schema({"type": "integer", "maximum": 9, "minimum": 8, "nullable": True}))
    assert [text for text in ("8", "9", "null", "7", '"8"') if plain.matches(text)] == ["8", "9", "null"]
    grammar = Gbnf(grammar_of_schema(NULLABLE))
    inner = '{"v": "b", "next": null}'
    for text in (inner, f'{{"v": "a", "next": {inner}}}', '{"v": "", "next": null, "both": null}'):
        assert grammar.matches(text), text
    assert grammar.matches('{"v": "", "next": null, "both": 2}')
    for text in ("null", '{"v": null, "next": null}', '{"v": "", "next": null, "both": 1}'):
        assert not grammar.matches(text), text
    with pytest.raises(SchemaError, match=r"^#/properties/a: the keyword 'not'"):
        grammar_of_schema({"properties": {"a": {"not": {}, "nullable": True}}})
    with pytest.raises(SchemaError, match="nullable"):
        grammar_of_schema({"nullable": "yes"})


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    path = write_model(tmp_path_factory.mktemp("grammars") / "m.gguf", preset("tiny", n_layer=1))
    with tilebeam.load(path, "cpu", n_ctx=2048, n_seq_max=4, threads=1) as model:
        yield model


@pytest.mark.parametrize("schema", [schema for schema, _, _ in CASES], ids=lambda v: json.dumps(v)[:60])
def test_llama_cpp_reads_the_grammars(lm: LM, schema: Any) -> None:
    """And keeps to them: what a random model writes to its end is valid."""
    jsonschema = pytest.importorskip("jsonschema")
    params = SamplingParams(n=4, max_tokens=40, seed=3, temperature=2, grammar=grammar_of_schema(schema))
    for sample in lm.generate("the", params)[0].outputs:
        if sample.finish_reason == "stop" and not isinstance(schema, bool) and "multipleOf" not in schema:
            jsonschema.Draft202012Validator(schema).validate(json.loads(sample.text))


# --- numbers ----------------------------------------------------------------------------------------------------------


def of_range(text: str | None) -> Gbnf:
    return Gbnf(f"root ::= {text}")


@given(st.integers(-1200, 1200), st.integers(0, 1500), st.integers(-2000, 2000))
def test_whole_numbers_of_a_range(low: int, size: int, other: int) -> None:
    high = low + size
    grammar = of_range(ranges.decimals(Bound(Decimal(low)), Bound(Decimal(high)), places=0))
    for n in (low - 1, low, low + 1, high - 1, high, high + 1, other):
        assert grammar.matches(str(n)) == (low <= n <= high)
    assert low <= int(grammar.sample(random.Random(other))) <= high


bounds = st.none() | st.builds(Bound, st.decimals(-30, 30, places=2), st.booleans())


@given(bounds, bounds, st.integers(1, 3), st.lists(st.integers(-40000, 40000), min_size=20, max_size=20))
def test_decimals_of_a_range(low: Bound | None, high: Bound | None, places: int, numbers: list[int]) -> None:
    def inside(x: Decimal) -> bool:
        above = low is None or x > low.value or (x == low.value and not low.open)
        return above and (high is None or x < high.value or (x == high.value and not high.open))

    step = Decimal(1).scaleb(-places)
    points = [Decimal(n) * step for n in numbers]
    points += [b.value.quantize(step) + d * step for b in (low, high) if b is not None for d in (-1, 0, 1)]
    text = ranges.decimals(low, high, places)
    if text is None:
        assert not any(map(inside, points))
        return
    grammar = of_range(text)
    for point in points:
        written = format(point.normalize(), "f") if point else "0"
        assert grammar.matches(written) == inside(point), (written, text)
    for seed in range(5):
        drawn = Decimal(grammar.sample(random.Random(seed)))
        assert inside(drawn)
        assert drawn == drawn.quantize(step)


def test_long_ranges_stay_small() -> None:
    text = ranges.decimals(Bound(Decimal(1)), Bound(Decimal(10**29)), places=0)
    assert text is not None
    assert len(text) < 200


# --- patterns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^(?:a|bc)*$", ["", "abc", "bca"], ["b", "abd"]),
        ("^a|b$", ["ax", "xb", "a"], ["xa", "bx"]),
        (r"^[^a-c\s]{2,}?$", ["de", "ü€"], ["d", "da", "d e"]),
        (r"^\u00e9\x41\.$", ["éA."], ["éAx"]),
        (r"^[\w.-]+$", ["a-b.c_9"], ["a b", ""]),
        (r"^(?<year>\d{4})$", ["2024"], ["24"]),
        ("^.$", ["a", "😀", '"', "\\", "\t"], ["ab", "\n", ""]),
        (r"^\W$", ["-", " ", "é"], ["a", "_"]),
        ("^[]$", [], []),
        ("^[-a]$", ["-", "a"], ["b"]),
        ("^x{0}$", [""], ["x"]),
    ],
)
def test_patterns(pattern: str, good: list[str], bad: list[str]) -> None:
    if pattern == "^[]$":
        with pytest.raises(SchemaError, match="no character"):
            grammar_of_schema({"type": "string", "pattern": pattern})
        return
    grammar = Gbnf(grammar_of_schema({"type": "string", "pattern": pattern}))
    for text in good:
        assert grammar.matches(json.dumps(text, ensure_ascii=False)), text
    for text in bad:
        assert not grammar.matches(json.dumps(text, ensure_ascii=False)), text


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("a|bc+", ["a", "bc", "bccc"], ["", "ab", "b", "xa"]),  # as a whole, anchors or not
        ("^(yes|no)$", ["yes", "no"], ["maybe", "yes no"]),
        (r'"\w+"\n', ['"a"\n', '"b_9"\n'], ['\\"a\\"', '"a"']),
        (r"[^\d\\]{2}", ["é\t", '"x'], ["1a", "a\\", "a"]),
        ("(?:x|y){0,2}", ["", "x", "yx"], ["xyx"]),
        ("", [""], ["a"]),
        ("a{٣}", ["a{٣}"], ["aaa"]),  # other scripts' digits are characters
    ],
)
def test_patterns_of_plain_text(pattern: str, good: list[str], bad: list[str]) -> None:
    grammar = Gbnf(text_grammar(pattern))
    for text in good:
        assert grammar.matches(text), text
    for text in bad:
        assert not grammar.matches(text), text


def test_nested_repetitions_are_written_once() -> None:
    """A group that is repeated is a rule: copies of it are names, so that nested groups do not multiply."""
    short, deep = ("(" * n + "ab" + "){2,1000}" * n for n in (4, 8))
    sizes = [len(of_regex(pattern)) for pattern in (short, deep, f"{deep}{deep}")]
    assert sizes[1] < 3 * sizes[0]
    assert sizes[2] < 2 * sizes[1]
    grammar = Gbnf(of_regex("(x(a|b){2,1000}-){2,1000}"))
    assert grammar.matches("xab-xba-xaa-")
    assert not grammar.matches("xab-")
    assert not grammar.matches("xab-xb-")
    deepest = "(" * 16 + "a" + "){100,1000}" * 16
    assert len(of_regex(deepest)) < 8192
    assert len(grammar_of_schema({"type": "string", "pattern": f"^{deepest}$"})) < 8192


@pytest.mark.parametrize(
    "pattern", ["(a?b?){33}", "(" * 16 + "a" + "){0,1000}" * 16, "((a*)?(b|c{0,2})*?){0,40}", "([a-z]*-)?" * 30 + "x"]
)
def test_parts_that_may_all_be_empty_keep_nobody_busy(lm: LM, pattern: str) -> None:
    """The matcher counts its steps: either there is a text, or the sentence says why not."""
    try:
        assert lm.generate("the", regex=pattern, max_tokens=5)[0].outputs
    except TilebeamError as error:
        assert "in too many ways" in str(error)  # noqa: PT017


def test_long_sets_of_short_patterns_are_refused_while_they_are_read() -> None:
    with pytest.raises(GrammarError, match="more than 65536 characters as a grammar"):
        of_regex(r"[^a-z\s]" * 4000)
    with pytest.raises(SchemaError, match="more than 65536 characters as a grammar"):
        grammar_of_schema({"type": "string", "pattern": "." * 4000})


@pytest.mark.parametrize(
    "pattern",
    ["(a", "a)", "a**", "(?=a)b", "[]", r"\u00", "a{5,2}", r"\0", r"[!-\d]", "a{10000000000}", "a{1,9999999999999}"],
)
def test_wrong_patterns_of_plain_text(pattern: str) -> None:
    with pytest.raises(PatternError):
        text_grammar(pattern)
