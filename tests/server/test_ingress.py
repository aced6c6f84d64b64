"""What clients of several replicas are told: by the ingress, with replicas that are made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from tilebeam.server.replicas.ingress import ReplicaLost, create_ingress
from tilebeam.server.replicas.routing import Ticket
from tilebeam.server.settings import Settings

DIED = ReplicaLost("killed")


def start(kind: str = "application/json") -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]}


def body(text: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Replicas:
    """Ones that give an answer that was written before."""

    def __init__(self, *steps: Any, health: dict[str, Any] | None = None) -> None:
        self._steps = steps
        self._health = health or {}
        self.asked: list[tuple[Ticket, dict[str, Any], bytes]] = []
        self.ended = False

    async def ask(self, ticket: Ticket, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Any]]:
        ticket.replica = "r1"
        self.asked.append((ticket, scope, body))
        try:
            for step in self._steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.ended = True

    async def health(self) -> dict[str, Any]:
        return self._health

    def ingress(self, settings: Settings | None = None) -> Any:
        return create_ingress(self.ask, self.health, settings or Settings())


def asked(replicas: Replicas, method: str, path: str, settings: Settings | None = None, **options: Any) -> Any:
    async def run() -> Any:
        transport = httpx.ASGITransport(replicas.ingress(settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def test_an_answer_goes_back_as_it_is_with_the_replica_s_name() -> None:
    replicas = Replicas([start(), body(b'{"a"', more=True)], [body(b": 1}")])
    answer = asked(replicas, "POST", "/v1/completions?x=1", json={"prompt": "hi", "n": 3})
    assert (answer.status_code, answer.json()) == (200, {"a": 1})
    assert answer.headers["x-tilebeam-replica"] == "r1"
    [(ticket, scope, sent)] = replicas.asked
    assert ticket.samples == 3
    assert (scope["path"], scope["query_string"], json.loads(sent)["n"]) == ("/v1/completions", b"x=1", 3)


@pytest.mark.parametrize("steps", [[DIED], [[start()], DIED], [[start(), body(b"{", more=True)], DIED]])
def test_a_replica_that_dies_is_an_error_that_clients_know(steps: list[Any]) -> None:
    answer = asked(Replicas(*steps), "POST", "/v1/chat/completions", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("where", "before", "told"),
    [
        ("/v1/chat/completions", "data: 1", {"error": {"code": "replica_lost"}}),
        ("/v1/responses", "event: a\ndata: 0\n\nevent: b\ndata: 1", {"code": "replica_lost", "sequence_number": 2}),
        ("/v1/messages", "event: a\ndata: 1", {"type": "error", "error": {"type": "overloaded_error"}}),
    ],
)
def test_in_a_stream_it_is_the_last_event_in_its_form(where: str, before: str, told: dict[str, Any]) -> None:
    steps = [[start("text/event-stream"), body(f"{before}\n\n".encode(), more=True)], DIED]
    answer = asked(Replicas(*steps), "POST", where, json={})
    assert answer.status_code == 200
    *first, last, end = answer.text.split("\n\n")
    assert ("\n\n".join(first), end) == (before, "")
    *_, data = last.split("\n")
    found = json.loads(data.removeprefix("data: "))
    for name, value in told.items():
        assert value.items() <= found[name].items() if isinstance(value, dict) else found[name] == value


def test_an_answer_that_stops_in_the_middle_is_an_error() -> None:
    answer = asked(Replicas([start()]), "GET", "/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


def test_who_may_ask_is_looked_at_first() -> None:
    replicas = Replicas([start(), body(b"{}")])
    settings = Settings(api_keys=("secret",), max_body=100)
    answer = asked(replicas, "POST", "/v1/completions", settings, json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "missing_api_key")
    key = {"authorization": "Bearer secret"}
    answer = asked(replicas, "POST", "/v1/completions", settings, headers=key, json={"prompt": "x" * 200})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert not replicas.asked
    assert asked(replicas, "POST", "/v1/completions", settings, headers=key, json={}).status_code == 200
    answer = asked(replicas, "GET", "/v1/models", headers={"host": "rebound.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")


def test_health_is_that_of_the_best_replica() -> None:
    good, bad = (200, {"status": "ok"}), (503, {"status": "restarting"})
    answer = asked(Replicas(health={"r1": bad, "r2": good}), "GET", "/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    assert {name: body["status"] for name, body in answer.json()["replicas"].items()} == {
        "r1": "restarting",
        "r2": "ok",
    }
    assert asked(Replicas(health={"r1": bad}), "GET", "/v1/health").status_code == 503
    assert asked(Replicas(), "GET", "/health").status_code == 503
    assert asked(Replicas(health={"r1": good}), "HEAD", "/health").status_code == 200


def test_figures_of_one_replica_are_not_those_of_all() -> None:
    assert asked(Replicas([start(), body(b"")]), "GET", "/metrics").status_code == 404


def test_a_client_that_leaves_ends_its_request() -> None:
    never = asyncio.Event()
    replicas = Replicas([start("text/event-stream"), body(b"data: 1\n\n", more=True)], never)

    async def run() -> list[Any]:
        sent: list[Any] = []
        came = asyncio.Event()
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await came.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                came.set()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await asyncio.wait_for(replicas.ingress()(scope, receive, send), 30)
        return sent

    assert len(asyncio.run(run())) == 2
    assert replicas.ended
