"""What clients of several replicas are told: by the ingress, with replicas that are made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from tilebeam.server.replicas.ingress import create_ingress, merged_metrics  # noqa: E402
from tilebeam.server.replicas.replica import _Exchange  # noqa: E402
from tilebeam.server.replicas.routing import Ticket  # noqa: E402
from tilebeam.server.settings import Settings  # noqa: E402


class Died(Exception):
    pass


def start(kind: str = "application/json") -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]}


def body(text: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Told:
    """An answer that was written before."""

    def __init__(self, steps: list[Any]) -> None:
        self._steps = steps
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[list[Any]]:
        for step in self._steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
            else:
                yield step

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    lost = (Died,)

    def __init__(self, *steps: Any, about: dict[str, Any] | None = None) -> None:
        self.answer = Told(list(steps))
        self.about = about or {}
        self.asked: list[tuple[Ticket, dict[str, Any], bytes]] = []

    def ask(self, ticket: Ticket, scope: dict[str, Any], body: bytes) -> Told:
        ticket.replica = "r1"
        self.asked.append((ticket, scope, body))
        return self.answer

    async def all(self, method: str, patience: float) -> dict[str, Any]:
        assert patience > 0
        return {name: value[method] for name, value in self.about.items()}


def asked(replicas: Replicas, method: str, path: str, settings: Settings | None = None, **options: Any) -> Any:
    async def run() -> Any:
        transport = httpx.ASGITransport(create_ingress(replicas, settings or Settings()))
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


@pytest.mark.parametrize("steps", [[Died()], [[start()], Died()], [[start(), body(b"{", more=True)], Died()]])
def test_a_replica_that_dies_is_an_error_that_clients_know(steps: list[Any]) -> None:
    answer = asked(Replicas(*steps), "POST", "/v1/chat/completions", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert answer.headers["retry-after"] == "1"


def test_in_a_stream_it_is_the_last_event() -> None:
    steps = [[start("text/event-stream"), body(b'data: {"n": 1}\n\n', more=True)], Died()]
    answer = asked(Replicas(*steps), "POST", "/v1/chat/completions", json={})
    first, last, end = answer.text.split("\n\n")
    assert (answer.status_code, first, end) == (200, 'data: {"n": 1}', "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"


def test_streams_of_responses_have_their_own_events() -> None:
    steps = [[start("text/event-stream"), body(b"event: a\ndata: 0\n\nevent: b\ndata: 1\n\n", more=True)], Died()]
    *_, last, end = asked(Replicas(*steps), "POST", "/v1/responses", json={}).text.split("\n\n")
    name, data = last.splitlines()
    assert (name, end) == ("event: error", "")
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["code"], told["sequence_number"]) == ("error", "replica_lost", 2)


@pytest.mark.parametrize(
    ("path", "kind", "before"),
    [
        ("/v1/messages", "text/event-stream", b'event: message_start\ndata: {"type": "message_start"}\n\n'),
        ("/api/chat", "application/x-ndjson", b'{"done": false}\n'),
    ],
)
def test_streams_of_other_forms_end_in_theirs(path: str, kind: str, before: bytes) -> None:
    text = asked(Replicas([start(kind), body(before, more=True)], Died()), "POST", path, json={}).text
    assert text.startswith(before.decode())
    rest = text.removeprefix(before.decode())
    if path == "/api/chat":
        assert "died" in json.loads(rest)["error"]
    else:
        name, data = rest.strip().split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert (name, told["type"], told["error"]["type"]) == ("event: error", "error", "overloaded_error")


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
    answer = asked(Replicas(about={"r1": {"health": bad}, "r2": {"health": good}}), "GET", "/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    assert {name: body["status"] for name, body in answer.json()["replicas"].items()} == {
        "r1": "restarting",
        "r2": "ok",
    }
    assert asked(Replicas(about={"r1": {"health": bad}}), "GET", "/v1/health").status_code == 503
    assert asked(Replicas(), "GET", "/health").status_code == 503
    assert asked(Replicas(about={"r1": {"health": good}}), "HEAD", "/health").status_code == 200


METRICS = b"""# HELP tilebeam_slots Samples.
# TYPE tilebeam_slots gauge
tilebeam_slots 4.0
# HELP tilebeam_requests_total Requests.
# TYPE tilebeam_requests_total counter
tilebeam_requests_total{path="/v1/completions",status="200"} 2.0
"""


def test_figures_have_the_replica_s_name_and_each_family_stands_once() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    told = asked(Replicas(about={r: {"metrics": METRICS} for r in ("r2", "r1")}), "GET", "/metrics").text
    families = {family.name: family for family in parser.text_string_to_metric_families(told)}
    assert len(families) == 2
    assert [s.labels for s in families["tilebeam_slots"].samples] == [{"replica": "r1"}, {"replica": "r2"}]
    labels = families["tilebeam_requests"].samples[0].labels
    assert labels == {"path": "/v1/completions", "status": "200", "replica": "r1"}
    assert merged_metrics({}) == ""


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
        await asyncio.wait_for(create_ingress(replicas, Settings())(scope, receive, send), 30)
        return sent

    assert len(asyncio.run(run())) == 2
    assert replicas.answer.cancelled


def test_an_application_that_ends_in_the_middle_ends_its_stream() -> None:
    async def scenario() -> list[str]:
        exchange = _Exchange(b"")
        await exchange.send({"type": "http.response.start", "status": 200, "headers": []})
        await exchange.send({"type": "http.response.body", "body": b"a", "more_body": True})
        exchange.end()
        return [message["type"] async for messages in exchange.sent() for message in messages]

    async def within() -> list[str]:
        return await asyncio.wait_for(scenario(), 10)

    found = asyncio.run(within())
    assert found == ["http.response.start", "http.response.body"]
