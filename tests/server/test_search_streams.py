"""Searches that stream: what happens comes in order, the answer is that of the same request without a stream, and a
client that goes away ends the search."""

from __future__ import annotations

import json
import threading
from itertools import count
from typing import Any

import pytest

pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
httpx = pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from server_kit import CHAT, MESSAGES, PATIENCE, PROMPT, TEXT, Running, idle, until  # noqa: E402
from tilebeam.engine.engine import Engine  # noqa: E402

SEARCHES: dict[str, dict[str, Any]] = {
    "vote": {"method": "vote", "budget": 6, "extract": "text"},
    "best": {"method": "best-of-n", "budget": 4},
    "beam": {"method": "beam", "budget": 4, "beam_width": 2, "max_steps": 3, "step_stop": "e"},
    "dvts": {"method": "dvts", "budget": 4, "beam_width": 2, "max_steps": 2, "step_stop": "e"},
    "adaptive": {"method": "adaptive", "budget": 6, "extract": "text"},
}


def streamed(server: Running, path: str, body: Any) -> list[dict[str, Any]]:
    """All chunks of a stream that ends well."""
    with httpx.stream("POST", f"{server.url}{path}", json=body | {"stream": True}, timeout=PATIENCE) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("name", SEARCHES)
def test_events_then_the_answer(server: Running, name: str, candidates: bool) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "seed": 3, "search": SEARCHES[name] | {"candidates": candidates}}
    chunks = streamed(server, CHAT, body | {"stream_options": {"include_usage": True}})
    assert len({(c["id"], c["object"], c["model"]) for c in chunks}) == 1
    opening, *happened, last, usage = chunks
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert happened
    for chunk in happened:
        (choice,) = chunk["choices"]
        assert (choice["index"], choice["delta"], choice["finish_reason"]) == (0, {}, None)
        assert choice["search"]["object"] == "tilebeam.search.event"
        assert ("text" in choice["search"]) == candidates
    whole = server.post(CHAT, body).json()
    (answer,) = last["choices"]
    expected = whole["choices"][0]
    assert answer["delta"].get("content", "") == expected["message"]["content"]
    assert answer["finish_reason"] == expected["finish_reason"]
    assert answer["search"].pop("object") == "tilebeam.search"
    assert answer["search"] == expected["search"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["tilebeam"]["seed"] == 3
    events = [chunk["choices"][0]["search"] for chunk in happened]
    ended = [e for e in events if e["event"] == "candidate"]
    assert sorted(e["index"] for e in ended) == list(range(len(expected["search"]["scores"])))
    if name in ("vote", "adaptive"):
        assert [e for e in events if e["event"] != "step"][-1]["votes"] == expected["search"]["votes"]
    if name in ("beam", "dvts"):
        rounds = [e["round"] for e in events if e["event"] == "step"]
        assert rounds == sorted(rounds)
        assert rounds[-1] == expected["search"]["rounds"]
    if candidates:
        texts = {e["index"]: e["text"] for e in ended}
        assert texts == {c["index"]: c["text"] for c in expected["search"]["candidates"]}


def test_several_prompts_of_a_completion(server: Running) -> None:
    search = {"method": "best-of-n", "budget": 3, "scorer": "logprob"}
    body = {"prompt": [PROMPT, "so"], "max_tokens": 8, "seed": 3, "echo": True, "search": search}
    chunks = streamed(server, TEXT, body)
    whole = server.post(TEXT, body).json()["choices"]
    for i, choice in enumerate(whole):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == i]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert own[0]["text"] == body["prompt"][i]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        assert len([c for c in own if c.get("search", {}).get("event") == "candidate"]) == 3


def test_ordinary_clients_read_the_text(client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "seed": 4}
    asked["extra_body"] = {"search": {"method": "vote", "budget": 4, "extract": "text"}}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(parts) == whole


def test_candidates_come_while_others_decode(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four decode at a time: the first end while others wait."""
    first_came = threading.Event()
    steps, step = count(1), Engine.step

    def held(engine: Engine) -> None:
        # Of 8 tokens each the first four have ended by then, and the last four have not begun.
        if engine is server.lm.engine and next(steps) == 14:
            assert first_came.wait(PATIENCE)
        step(engine)

    monkeypatch.setattr(Engine, "step", held)
    search = {"method": "vote", "budget": 12, "extract": "text"}
    body = {"messages": MESSAGES, "max_tokens": 8, "search": search, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}{CHAT}", json=body, timeout=PATIENCE) as answer:
        events = (line for line in answer.iter_lines() if '"candidate"' in line)
        try:
            assert next(events)
            assert server.metric("tilebeam_samples_admitted") == 12
        finally:
            first_came.set()
        assert len(list(events)) == 11
    until(lambda: idle(server))


@pytest.mark.parametrize("name", ["vote", "beam"])
def test_a_client_that_goes_away_ends_its_search(server: Running, name: str) -> None:
    search = SEARCHES[name] | ({"step_stop": "\n\n\n", "max_step_tokens": 200} if name == "beam" else {})
    body = {"messages": MESSAGES, "max_tokens": 900, "search": search, "stream": True, "ignore_eos": True}
    done = f'tilebeam_searches_total{{method="{ {"vote": "self-consistency"}.get(name, name) }"}}'
    before = server.metrics().get(done, 0)
    with httpx.stream("POST", f"{server.url}{CHAT}", json=body, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        until(lambda: server.metric("tilebeam_samples_running") > 0)
    until(lambda: idle(server))
    assert server.metrics().get(done, 0) == before


def test_what_is_wrong_is_said_before_the_stream(server: Running) -> None:
    for search, code in (({"method": "no"}, "invalid_search"), ({"method": "beam", "max_steps": -1}, "invalid_search")):
        answer = server.post(CHAT, {"messages": MESSAGES, "stream": True, "search": search})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == code


def test_a_search_that_fails_ends_its_stream_with_an_error(server: Running) -> None:
    search = {"method": "vote", "budget": 2, "weighting": "reward", "extract": "text", "scorer": "logprob"}
    body = {"messages": MESSAGES, "max_tokens": 4, "stream": True, "search": search}
    with httpx.stream("POST", f"{server.url}{CHAT}", json=body, timeout=PATIENCE) as answer:
        assert answer.status_code == 200
        last = [line for line in answer.iter_lines() if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], "scores >= 0" in error["message"]) == ("search_failed", True)
