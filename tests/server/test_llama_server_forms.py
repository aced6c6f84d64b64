"""What clients of llama-server send: paths without /v1, and fields that it takes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from tilebeam import LM

pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from server_kit import CHAT, HI, PATIENCE, TEXT, Running
from tilebeam.server.openai import chat_completions as chat
from tilebeam.server.requests import ChatRequest

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("where", "body"),
    [
        ("/chat/completions", {"messages": HI, "max_tokens": 3, "seed": 1}),
        ("/embeddings", {"input": "a cat"}),
        ("/responses", {"input": "hi", "max_output_tokens": 3, "seed": 1}),
    ],
)
def test_paths_without_a_version(server: Running, where: str, body: Any) -> None:
    short, long = (server.post(prefix + where, body).json() for prefix in ("", "/v1"))
    assert short["usage"] == long["usage"]
    for key in ("choices", "data"):
        assert short.get(key) == long.get(key)
    listed = [httpx.get(f"{server.url}{prefix}/models", timeout=PATIENCE).json() for prefix in ("", "/v1")]
    assert [m["id"] for m in listed[0]["data"]] == [m["id"] for m in listed[1]["data"]]


@pytest.mark.parametrize(
    ("where", "body"),
    [
        (TEXT, {"prompt": "a", "json_schema": SCHEMA}),
        (CHAT, {"messages": HI, "json_schema": SCHEMA}),
        (CHAT, {"messages": HI, "response_format": {"type": "json_object", "schema": SCHEMA}}),
    ],
)
def test_schemas_by_llama_servers_names(server: Running, where: str, body: Any) -> None:
    answer = server.post(where, body | {"max_tokens": 60, "seed": 2}).json()
    (choice,) = answer["choices"]
    text = choice["text"] if where == TEXT else choice["message"]["content"]
    assert json.loads(text) in ({"n": 1}, {"n": 2})


def test_a_conversation_has_a_limit() -> None:
    with pytest.raises(ValidationError, match="at most 8192 items"):
        ChatRequest.model_validate({"messages": HI * 8193})


def test_a_conversation_of_thousands_of_messages_is_read_quickly(lm: LM) -> None:
    """In time that grows with them, not with their square; with one that holds a control token, too."""
    messages = [{"role": "user", "content": f"m{i}"} for i in range(2000)]
    ids = chat.prompt_of(lm, ChatRequest.model_validate({"messages": messages}), "chatml").ids
    messages[7]["content"] = "</s>"
    others = chat.prompt_of(lm, ChatRequest.model_validate({"messages": messages}), "chatml").ids
    assert ids.count(lm.eos) == others.count(lm.eos)
