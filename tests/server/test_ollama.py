"""Ollama's API with its own client and with plain requests: the same answers as chats and completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest
from tilebeam import LM

pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
httpx = pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from server_kit import CHAT, PATIENCE, TEXT, Running, running  # noqa: E402
from tilebeam.chat.answer_reader import AnswerReader  # noqa: E402
from tilebeam.chat.tools import tool_use, tools_of  # noqa: E402
from tilebeam.outputs import Delta, ToolCallDelta, Usage  # noqa: E402
from tilebeam.sampling_params import SamplingParams  # noqa: E402
from tilebeam.server.answer_events import Ended, SampleEvents, Started  # noqa: E402
from tilebeam.server.other.ollama import OllamaAnswer, OllamaChat  # noqa: E402
from tilebeam.server.plan import AnswerPlan, Ready  # noqa: E402
from tools_kit import HERMES, NAMED, THINKS, TOOLS  # noqa: E402

USER: Any = [{"role": "user", "content": "how many"}]

SAME = {"temperature": 0.6, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 3, "repeat_penalty": 1.1}
OPTIONS: dict[str, Any] = SAME | {"num_predict": 12, "num_ctx": 4096, "num_thread": 2}


def told(server: Running, path: str, body: Any) -> dict[str, Any]:
    """The whole answer, which the lines of the streamed one add up to."""
    body = {"model": "tiny", "options": OPTIONS} | body
    whole = server.post(path, body | {"stream": False})
    assert whole.status_code == 200, whole.text
    found: dict[str, Any] = whole.json()
    streamed = server.post(path, body)  # a stream unless it says otherwise
    assert streamed.headers["content-type"] == "application/x-ndjson"
    *lines, last = [json.loads(line) for line in streamed.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * len(lines)
    counted = ("done", "done_reason", "prompt_eval_count", "eval_count", "model")
    assert [last[name] for name in counted] == [found[name] for name in counted]
    said = found.get("message", found)
    pieces = [line.get("message", line) for line in (*lines, last)]
    for name in ("content", "response", "thinking"):
        assert "".join(piece.get(name, "") for piece in pieces) == said.get(name, "")
    assert [c for piece in pieces for c in piece.get("tool_calls", [])] == said.get("tool_calls", [])
    return found


def chat(server: Running, **fields: Any) -> dict[str, Any]:
    answer = server.post(CHAT, {"messages": USER, "max_tokens": 12} | SAME | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_chat(server: Running) -> None:
    other = chat(server)
    found = told(server, "/api/chat", {"messages": USER, "model": "tiny:latest", "keep_alive": "5m"})
    assert found["message"] == {"role": "assistant", "content": other["choices"][0]["message"]["content"]}
    assert (found["prompt_eval_count"], found["eval_count"]) == (
        other["usage"]["prompt_tokens"],
        other["usage"]["completion_tokens"],
    )
    assert found["done_reason"] == other["choices"][0]["finish_reason"]
    text = found["message"]["content"]
    stopped = told(server, "/api/chat", {"messages": USER, "options": OPTIONS | {"stop": [text[4:6]]}})
    assert (stopped["message"]["content"], stopped["done_reason"]) == (text[: text.index(text[4:6])], "stop")


def test_a_text(server: Running) -> None:
    found = told(server, "/api/generate", {"prompt": "how many", "system": "answer"})
    other = chat(server, messages=[{"role": "system", "content": "answer"}, *USER])
    assert found["response"] == other["choices"][0]["message"]["content"]
    raw = told(server, "/api/generate", {"prompt": "how many", "raw": True})
    same = server.post(TEXT, {"prompt": "how many", "max_tokens": 12} | SAME).json()
    assert raw["response"] == same["choices"][0]["text"]


def test_forms(server: Running) -> None:
    schema = {"type": "object", "properties": {"ok": {"enum": ["yes", "no"]}}, "required": ["ok"]}
    options = OPTIONS | {"num_predict": 60}
    found = told(server, "/api/chat", {"messages": USER, "format": schema, "options": options})
    assert json.loads(found["message"]["content"])["ok"] in ("yes", "no")
    found = told(server, "/api/generate", {"prompt": "a", "format": "json", "options": options})
    assert found["response"].lstrip().startswith("{")


@pytest.fixture(scope="module")
def hermes(lm: LM) -> Iterator[Running]:
    with running(lm, chat_template=HERMES) as server:
        yield server


def test_functions(hermes: Running) -> None:
    plain = chat(hermes, messages=USER, tools=TOOLS)["choices"][0]["message"]["content"]
    assert told(hermes, "/api/chat", {"messages": USER, "tools": TOOLS})["message"]["content"] == plain
    forced = chat(hermes, tools=TOOLS, tool_choice=NAMED, max_tokens=200)["choices"][0]["message"]
    function = forced["tool_calls"][0]["function"]
    called = {"function": {"index": 0, "name": function["name"], "arguments": json.loads(function["arguments"])}}
    result = {"role": "tool", "tool_name": "weather", "content": "rain", "images": []}
    talk = [*USER, {"role": "assistant", "content": None, "tool_calls": [called]}, result]
    ided = [{"id": "x", "type": "function", "function": function}]
    same = [*USER, {"role": "assistant", "content": "", "tool_calls": ided}]
    same += [{"role": "tool", "tool_call_id": "x", "name": "weather", "content": "rain"}]
    found = told(hermes, "/api/chat", {"messages": talk, "tools": TOOLS})
    assert found["message"]["content"] == chat(hermes, messages=same, tools=TOOLS)["choices"][0]["message"]["content"]


def test_calls_are_told_when_they_are_complete(lm: LM) -> None:
    body = OllamaChat.model_validate({"model": "m", "messages": USER, "tools": TOOLS}).chat()
    plan = AnswerPlan(body, lambda *_: writer, False, SamplingParams(), 1, "m", lambda _, params: Ready([], params))
    writer = OllamaAnswer(True, plan, lm.spelling)
    growing = SampleEvents(0, lm.piece, reader=AnswerReader(tool_use(tools_of(TOOLS), None, HERMES), None))
    said = (
        'See.<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "weather", "arguments": {"days": 2}}</tool_call>'
    )
    deltas = [*(Delta(0, char, []) for char in said), Delta(0, "", [], finish_reason="stop")]
    events = [grown for delta in deltas if (grown := growing.grown(delta)) is not None]
    lines = b"".join(map(writer.add, [Started(0), *events, Ended(Usage(), 1)])).splitlines()
    messages = [json.loads(line)["message"] for line in lines]
    assert "".join(message["content"] for message in messages) == "See."
    calls = [
        {"function": {"name": "now", "arguments": {}}},
        {"function": {"name": "weather", "arguments": {"days": 2}}},
    ]
    assert [message.get("tool_calls") for message in messages[-2:]] == [calls, None]
    assert json.loads(lines[-1])["done_reason"] == "stop"
    grown = replace(events[-1], parts=[part for event in events for part in event.parts])
    whole = OllamaAnswer(True, plan, lm.spelling).whole([Started(0), grown, Ended(Usage(), 1)])
    assert (whole["message"]["content"], whole["message"]["tool_calls"]) == ("See.", calls)
    half = replace(grown, parts=[*grown.parts, ToolCallDelta(2, '{"days', "weather", "x")], finish="length")
    cut = OllamaAnswer(True, plan, lm.spelling).whole([Started(0), half, Ended(Usage(), 1)])
    assert (cut["message"]["tool_calls"], cut["done_reason"]) == (calls, "length")


def test_thoughts(lm: LM) -> None:
    with running(lm, chat_template=THINKS) as server:
        found = told(server, "/api/chat", {"messages": USER})["message"]
        assert (found["content"], bool(found["thinking"])) == ("", True)
        assert told(server, "/api/generate", {"prompt": "how many"})["thinking"] == found["thinking"]
        off = told(server, "/api/chat", {"messages": USER, "think": False})["message"]
        assert "thinking" not in off
        assert off["content"]


def test_what_is_served(server: Running) -> None:
    (entry,) = httpx.get(f"{server.url}/api/tags", timeout=PATIENCE).json()["models"]
    assert (entry["name"], entry["size"]) == ("tiny", server.lm.n_bytes)
    shown = server.post("/api/show", {"model": "tiny:latest"}).json()
    assert shown["model_info"][f"{server.lm.info.architecture}.context_length"] == 1024
    assert (shown["template"], shown["capabilities"]) == ("chatml", ["completion", "tools"])
    assert httpx.get(f"{server.url}/api/version", timeout=PATIENCE).json().keys() == {"version"}
    for path in ("/api/chat", "/api/generate"):
        loaded = server.post(path, {"model": "tiny"}).json()
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")
        assert server.post(path, {"model": "tiny", "keep_alive": 0}).json()["done_reason"] == "unload"
        assert server.post(path, {"model": "b", "keep_alive": 0}).status_code == 404
    assert server.post("/api/show", {"name": "tiny"}).json() == shown | {"modified_at": ANY}
    assert httpx.head(server.url, timeout=PATIENCE).status_code == 200  # which Ollama's commands ask first


DEEP = {"function": {"name": "f", "arguments": json.loads('{"a":' * 80 + "1" + "}" * 80)}}
WRONG: list[tuple[str, Any, int, str]] = [
    ("/api/chat", {"messages": USER, "model": "llama3"}, 404, "'llama3' is not served here"),
    ("/api/chat", {"messages": USER, "temperature": 1}, 400, "temperature"),
    ("/api/chat", {"messages": USER, "options": {"mirostat": 2}}, 400, "options.mirostat"),
    ("/api/chat", {"messages": USER, "options": {"top_p": 2}}, 400, "options.top_p"),
    ("/api/chat", {"messages": USER, "options": {"num_predict": 0}}, 400, "options.num_predict"),
    ("/api/chat", {"messages": USER, "options": {"stop": ["x"] * 17}}, 400, "options.stop: at most 16 stop strings"),
    ("/api/chat", {"messages": USER, "think": "most"}, 400, "think: has a wrong type"),
    ("/api/chat", {"messages": USER, "format": "json", "tools": TOOLS}, 400, "format with tools: leave out one"),
    ("/api/chat", {"messages": USER, "format": {"not": {}}}, 400, "format cannot be turned into a grammar"),
    ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}, 400, "messages[0].images"),
    (
        "/api/chat",
        {"messages": [*USER, {"role": "assistant", "tool_calls": [DEEP]}]},
        400,
        "messages[1]: is nested deeper",
    ),
    (
        "/api/chat",
        {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
        400,
        "messages[1].tool_calls[0].function.arguments",
    ),
    ("/api/generate", {"prompt": "very " * 2000}, 400, "context holds"),
    ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "cannot fill gaps"),
    ("/api/show", {"model": "b"}, 404, "'b'"),
]


@pytest.mark.parametrize(("path_", "body", "status", "said"), WRONG, ids=range(len(WRONG)))
def test_errors_have_ollamas_form(server: Running, path_: str, body: Any, status: int, said: str) -> None:
    answer = server.post(path_, {"model": "tiny"} | body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert said in answer.json()["error"]


def test_keys_and_sizes(lm: LM) -> None:
    with running(lm, api_keys=("secret",), max_body=1000) as server:
        for path in ("/api/chat", "/api/generate", "/api/show"):
            assert server.post(path, {"model": "tiny"}).status_code == 401
            key = {"authorization": "Bearer secret"}
            assert server.post(path, {"model": "x" * 1000}, headers=key).status_code == 413
            assert server.post(path, {"model": "tiny"}, headers=key).status_code == 200
        for path in ("/api/tags", "/api/version"):
            assert httpx.get(f"{server.url}{path}", timeout=PATIENCE).status_code == 401


# --- Ollama's client --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ollama_client(server: Running) -> Any:
    ollama = pytest.importorskip("ollama", reason="ollama is not installed: pip install ollama")
    return ollama.Client(host=server.url, timeout=PATIENCE)


def test_the_client(ollama_client: Any, server: Running) -> None:
    def forecast(city: str, days: int = 1) -> str:
        """Tell the weather.

        Args:
            city: where.
            days: how long.
        """
        return f"{city}: {days}"

    whole = ollama_client.chat("tiny", USER, options=OPTIONS, tools=[forecast])
    pieces = list(ollama_client.chat("tiny", USER, options=OPTIONS, tools=[forecast], stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert (pieces[-1].eval_count, pieces[-1].done_reason) == (whole.eval_count, whole.done_reason)
    sent = [*USER, whole.message, *USER]
    assert ollama_client.chat("tiny", sent, options=OPTIONS).message.content
    text = ollama_client.generate("tiny", "how many", options=OPTIONS)
    assert text.response == told(server, "/api/generate", {"prompt": "how many"})["response"]
    assert [model.model for model in ollama_client.list().models] == ["tiny"]
    assert ollama_client.show("tiny").capabilities == ["completion", "tools"]
    with pytest.raises(type(ollama_client)._request.__globals__["ResponseError"], match="not served here"):
        ollama_client.chat("llama3", USER)
