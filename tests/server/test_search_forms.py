"""Searches among calls of functions and JSON: what is chosen comes back as without a search."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import jsonschema
import pytest
from server_kit import CHAT, HI, running
from tilebeam import LM
from tools_kit import HERMES, TOOLS, WEATHER

ASKED: Any = {"messages": HI, "tools": TOOLS, "tool_choice": "required", "seed": 3, "max_tokens": 120}


def called(message: Any) -> list[Any]:
    """Name and arguments of a message's calls."""
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]


@pytest.mark.parametrize("template", ["chatml", HERMES], ids=["json", "hermes"])
def test_calls_vote(lm: LM, template: str) -> None:
    with running(lm, chat_template=template) as server:
        search = {"method": "vote", "budget": 6, "candidates": True}
        choice = server.post(CHAT, ASKED | {"search": search}).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        found = called(choice["message"])
        samples = server.post(CHAT, ASKED | {"n": 6}).json()["choices"]
        assert found in [called(s["message"]) for s in samples if s["finish_reason"] == "tool_calls"]
        calls = [{"name": name, "arguments": arguments} for name, arguments in found]
        assert json.loads(choice["search"]["answer"]) == calls
        names = Counter(called(s["message"])[0][0] for s in samples if s["finish_reason"] == "tool_calls")
        assert names[found[0][0]] == max(names.values())
        best = choice["search"]["candidates"][choice["search"]["best_index"]]
        assert [c["function"]["name"] for c in best["tool_calls"]] == [name for name, _ in found]

        streamed: dict[int, list[str]] = {}
        finish, logprobs = None, 0
        for line in server.post(CHAT, ASKED | {"search": search, "stream": True, "logprobs": True}).text.splitlines():
            if line.startswith("data: {"):
                (piece,) = json.loads(line[6:])["choices"]
                finish = piece["finish_reason"] or finish
                logprobs += bool(piece["logprobs"])
                for part in piece["delta"].get("tool_calls", ()):
                    told = streamed.setdefault(part["index"], ["", ""])
                    told[0] += part["function"].get("name", "")
                    told[1] += part["function"]["arguments"]
        assert (finish, [(n, json.loads(a)) for n, a in streamed.values()]) == ("tool_calls", found)
        assert logprobs

        rated = server.post(CHAT, ASKED | {"search": {"method": "best-of-n", "scorer": "consensus", "budget": 4}})
        assert called(rated.json()["choices"][0]["message"])


@pytest.mark.parametrize("method", ["vote", "adaptive"])
def test_json_votes(lm: LM, method: str) -> None:
    schema = WEATHER | {"required": []}  # an empty object is valid, too
    body = {"messages": HI, "seed": 5, "max_tokens": 120, "search": {"method": method, "budget": 5}}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
    with running(lm) as server:
        choice = server.post(CHAT, body).json()["choices"][0]
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        assert json.loads(choice["search"]["answer"]) == json.loads(choice["message"]["content"])
