"""What operators read: a line for each request, as text and as JSON, and nothing of what was said."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_kit import ANSWER, CHAT, PATIENCE, TEXT, Running, until
from tilebeam.server import service
from tilebeam.server.errors import ApiError
from tilebeam.server.logs import LogLines, begin_notes

SECRET = "xyzzy"
TALK = [{"role": "user", "content": SECRET}]


class Lines(logging.Handler):
    """Keeps what is logged, in both forms."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.told: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(LogLines("text").format(record))
        self.told.append(json.loads(LogLines("json").format(record)))

    def of(self, name: str) -> dict[str, Any]:
        """The line of a request; it may be written after the client has its answer."""
        until(lambda: any(told.get("id") == name for told in self.told))
        (found,) = [told for told in self.told if told.get("id") == name]
        return found


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, log = Lines(), logging.getLogger("tilebeam.server")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


def test_a_line_for_each_request(server: Running, lines: Lines) -> None:
    whole = server.post(CHAT, {"messages": TALK, "max_tokens": 3}, headers={"x-request-id": "job-1"})
    usage = whole.json()["usage"]
    assert whole.headers["x-request-id"] == "job-1"
    told = lines.of("job-1")
    assert told["message"] == "request"
    assert (told["method"], told["path"], told["status"], told["client"]) == ("POST", CHAT, 200, "127.0.0.1")
    assert (told["model"], told["finish"]) == ("tiny", whole.json()["choices"][0]["finish_reason"])
    assert (told["tokens_in"], told["tokens_out"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert told["cached"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert "first_token_seconds" not in told
    streamed = server.post(CHAT, {"messages": TALK, "max_tokens": 3, "stream": True})
    told = lines.of(streamed.headers["x-request-id"])
    assert 0 <= told["first_token_seconds"] <= told["seconds"]
    assert re.fullmatch(r"req_[0-9a-f]{16}", told["id"])
    proxied = server.post(TEXT, {"prompt": SECRET, "max_tokens": 1}, headers={"x-forwarded-for": "10.0.0.7"})
    told = lines.of(proxied.headers["x-request-id"])
    assert (told["client"], told["model"]) == ("10.0.0.7", "tiny")
    read = server.post("/v1/embeddings", {"input": SECRET})
    assert lines.of(read.headers["x-request-id"])["tokens_in"] == read.json()["usage"]["prompt_tokens"]
    assert f" path={CHAT} status=200 " in lines.text[0]
    assert SECRET not in "".join(lines.text) + json.dumps(lines.told)


def test_lines_of_requests_that_fail(server: Running, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = server.post(CHAT, {"messages": TALK, SECRET: 1}, headers={"x-request-id": "a b\tc"})
    told = lines.of(wrong.headers["x-request-id"])
    assert (told["status"], told["error"], told["level"]) == (400, "unknown_parameter", "info")
    # Nothing that a client sends begins a line of its own.
    odd = httpx.get(f"{server.url}/v1/a%0A2026%20INFO%20b", timeout=PATIENCE)
    assert lines.of(odd.headers["x-request-id"])["path"] == "/v1/a%0A2026%20INFO%20b"
    named = httpx.get(f"{server.url}/v1/models", headers=[(b"x-forwarded-for", b"a\x85b")], timeout=PATIENCE)
    assert lines.of(named.headers["x-request-id"])["client"] == "a\x85b"
    assert r' client="a\u0085b" ' in lines.text[-1]
    assert not any("\n" in line for line in lines.text)

    def broken(*_: Any) -> None:
        raise ValueError("unforeseen")

    monkeypatch.setattr(type(server.models), "listed", broken)
    failed = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "job-2"}, timeout=PATIENCE)
    assert (failed.status_code, failed.headers["x-request-id"]) == (500, "job-2")
    told = lines.of("job-2")
    assert (told["status"], told["level"], told["error"]) == (500, "warning", "internal_error")
    assert SECRET not in "".join(lines.text)


SAID: dict[str, Any] = {"messages": TALK, "max_tokens": 3, "model": "tiny"}


@pytest.mark.parametrize(
    ("where", "body"),
    [
        (CHAT, SAID),
        (ANSWER, {"input": "a"}),
        ("/v1/messages", SAID),
    ],
)
def test_what_breaks_in_the_middle_of_a_stream_is_told(
    server: Running, lines: Lines, monkeypatch: pytest.MonkeyPatch, where: str, body: Any
) -> None:
    real = service.streamed

    async def broken(*args: Any) -> AsyncIterator[Any]:
        async for events in real(*args):
            yield events
            raise ValueError("unforeseen")

    monkeypatch.setattr(service, "streamed", broken)
    answer = server.post(where, body | {"stream": True})
    assert answer.status_code == 200
    assert "Unexpected ValueError" in answer.text.strip().splitlines()[-1]
    told = lines.of(answer.headers["x-request-id"])
    assert (told["status"], told["level"], told["error"]) == (500, "warning", "internal_error")


def test_probes_are_quiet(server: Running, lines: Lines) -> None:
    for where in ("/health", "/metrics"):
        assert httpx.get(f"{server.url}{where}", timeout=PATIENCE).status_code == 200
    last = server.post(TEXT, {"prompt": "a", "max_tokens": 1}).headers["x-request-id"]
    lines.of(last)
    assert [told["path"] for told in lines.told] == [TEXT]
    assert "_created" not in httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text


def test_figures_of_the_manual_exist(server: Running) -> None:
    """Alerts and panels ask for names that /metrics has."""
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    families = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    known = {name for name, _ in families}
    known |= {f"{name}_{end}" for name, kind in families if kind == "histogram" for end in ("bucket", "sum", "count")}
    manual = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\btilebeam_[a-z_]+", manual))
    assert len(named) > 12
    assert named <= known


def test_why_the_server_could_not_answer() -> None:
    noted = begin_notes()
    ApiError(400, f"no {SECRET}", code="invalid_value").note()
    assert noted == {"status": 400, "error": "invalid_value"}
    ApiError(503, "It broke:\n2026 b", code="npu_failed").note()
    record = logging.LogRecord("x", logging.WARNING, "", 0, "request", (), None)
    record.fields = noted
    assert LogLines("text").format(record).endswith(r'request status=503 error=npu_failed reason="It broke:\n2026 b"')
    told = json.loads(LogLines("json").format(record))
    assert (told["message"], told["reason"]) == ("request", "It broke:\n2026 b")


def test_an_error_with_its_traceback_is_one_object() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "loading %s failed", ("m",), (ValueError, error, None))
    written = LogLines("json").format(record)
    assert "\n" not in written
    told = json.loads(written)
    assert (told["level"], told["message"]) == ("error", "loading m failed")
    assert told["traceback"].startswith("ValueError: a\nb")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told["time"])
