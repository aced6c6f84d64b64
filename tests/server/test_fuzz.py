"""Random requests for every path, drawn from the server's own description of them: whatever comes, the answer is one
that the manual names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from server_kit import HI, PATIENCE, Running, idle, running, until
from tilebeam import LM, TokenReward

POSTS = ("completions", "chat/completions", "responses", "embeddings", "rerank", "score")
PATHS = tuple(f"/v1/{name}" for name in POSTS)
PATHS += ("/v1/messages", "/v1/messages/count_tokens")
# What a request may end with besides an answer, and what 503 may say (docs/server.md).
NAMED = {400, 404, 413, 429, 503}
GONE = {"npu_failed", "model_restarting", "model_failed", "model_load_failed", "shutting_down"}
QUICK = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
# A request of few tokens: the fuzz is for what is sent, not for what is decoded.
SHORT = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 1}

WORDS = st.sampled_from(["the number", "", "a\0b", "é\U0001f600", "</s>", "{", "user", "tiny", "x" * 300, "{}", "[1]"])
NUMBERS = st.one_of(
    st.integers(-3, 40), st.sampled_from([2**31, 2**63, 10**30, -(2**40), 0.5, 1e308, -1.5]), st.booleans(), st.none()
)
SCALARS = st.one_of(WORDS, NUMBERS)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=8
)
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "</s>"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "[ab]{1,3}"}}}}}
# What makes a request get further than its checks.
SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["tiny", "other", None]),
    "role": st.sampled_from(["user", "assistant", "system", "tool"]),
    "search": st.sampled_from([None, {"method": "vote", "budget": 2}, {"method": "beam"}, {"method": "best-of-n"}]),
    "grammar": st.sampled_from([None, 'root ::= "a"', "root ::= [a-z]+", "root ::= (", ""]),
    "regex": st.sampled_from(["[ab]{1,3}", "(", "a|b"]),
    "messages": st.sampled_from([HI, [*HI, {"role": "assistant", "tool_calls": [CALL]}, RESULT], [*HI, *HI]]),
    "tools": st.sampled_from([None, [], [TOOL], [TOOL, TOOL]]),
    "pattern": st.sampled_from(["a", "(?=", "[0-9]"]),
    "tokens": st.lists(st.integers(-1, 1100), max_size=4),
    "arguments": st.sampled_from(["{}", '{"a": 1}', "[", "5"]),
}


def drawn(schema: Any, root: Any, name: str = "", depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that a JSON schema describes, and now and then others."""
    if depth > 6:
        return SCALARS
    if "$ref" in schema:
        found = root
        for part in schema["$ref"].split("/")[1:]:
            found = found[part]
        return drawn(found, root, name, depth + 1)
    options: list[st.SearchStrategy[Any]] = []
    for part in schema.get("anyOf", []) + schema.get("oneOf", []):
        options.append(drawn(part, root, name, depth + 1))
    if "const" in schema:
        options.append(st.just(schema["const"]))
    if "enum" in schema:
        options.append(st.sampled_from(schema["enum"]))
    kind = schema.get("type")
    if kind == "object":
        options.append(_object(schema, root, depth))
    elif kind == "array":
        options.append(st.lists(drawn(schema.get("items", {}), root, name, depth + 1), max_size=3))
    elif kind in ("integer", "number", "boolean", "null"):
        options.append(NUMBERS if kind != "null" else st.none())
    elif kind == "string" and not options:
        options.append(WORDS)
    usual = st.one_of(options) if options else ANYTHING
    if name in SENSIBLE:
        usual = SENSIBLE[name] | usual
    return st.integers(0, 24).flatmap(lambda n: ANYTHING if n == 0 else usual)


def _object(schema: Any, root: Any, depth: int) -> st.SearchStrategy[Any]:
    required = set(schema.get("required", []))
    members = {name: drawn(value, root, name, depth + 1) for name, value in schema.get("properties", {}).items()}
    if not members:
        return st.dictionaries(WORDS, ANYTHING, max_size=2)
    needed = st.fixed_dictionaries({name: members[name] for name in members if name in required})
    # Few of many: with all of them, one is always wrong.
    optional = st.lists(st.sampled_from(sorted(members)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: members[name] for name in names})
    )
    return st.tuples(needed, optional).map(lambda both: {**both[1], **both[0]})


@pytest.fixture(scope="module")
def hasty(lm: LM, reward: TokenReward) -> Iterator[Running]:
    """A server whose chats are short unless they ask for more."""
    with running(lm, reward=reward, max_tokens=2, max_body=1 << 16) as it:
        yield it


@pytest.mark.parametrize("where", PATHS)
def test_every_answer_is_a_named_one(hasty: Running, where: str) -> None:
    root = httpx.get(f"{hasty.url}/openapi.json", timeout=PATIENCE).json()
    schema = root["paths"][where]["post"]["requestBody"]["content"]["application/json"]["schema"]
    known = set(_resolved(schema, root).get("properties", ()))
    short = {name: value for name, value in SHORT.items() if name in known}
    statuses = set()
    with httpx.Client(base_url=hasty.url, timeout=PATIENCE) as client:

        @settings(QUICK, max_examples=40)
        @given(drawn(schema, root), st.integers(0, 3))
        def fuzz(body: Any, tame: int) -> None:
            if tame and isinstance(body, dict):
                body |= {name: value for name, value in short.items() if name in body}
            answer = client.post(where, content=json.dumps(body), headers={"content-type": "application/json"})
            statuses.add(answer.status_code)
            if answer.status_code != 200:
                assert answer.status_code in NAMED, (answer.status_code, answer.text, body)
                error = answer.json()["error"]
                assert error["message"], body
                assert answer.status_code != 503 or error["code"] in GONE, (error, body)

        fuzz()
    assert 400 in statuses
    until(lambda: idle(hasty))


def _resolved(schema: Any, root: Any) -> Any:
    return root["components"]["schemas"][schema["$ref"].split("/")[-1]] if "$ref" in schema else schema
