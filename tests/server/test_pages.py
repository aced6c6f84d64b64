"""The server's page and those of searches: what they hold, what a browser may do on them, who may load them.

Conversations in a browser are in test_chat_page.py.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from html_kit import Page
from server_kit import CHAT, MESSAGES, PATIENCE, Running, running
from tilebeam import LM

VOTE: dict[str, Any] = {"method": "vote", "budget": 4, "extract": "text", "candidates": True}


def judges(page: str) -> set[str | None]:
    """How the page may have one of several answers chosen."""
    return {option["value"] for option in Page(page).named("option")}


def test_the_page(server: Running) -> None:
    answer = httpx.get(f"{server.url}/", timeout=PATIENCE)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    rules = answer.headers["content-security-policy"]
    assert rules.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'self'" in rules
    assert "unsafe" not in rules
    assert "http" not in rules
    assert answer.headers["x-content-type-options"] == "nosniff"
    page = Page(answer.text)
    labelled = {a["for"] for a in page.named("label") if "for" in a}
    assert {a["id"] for kind in ("input", "select", "textarea") for a in page.named(kind)} == labelled
    assert {"adaptive", "beam", "dvts", "best-of-n", "vote last-number"} <= judges(answer.text)
    again = httpx.get(f"{server.url}/", headers={"if-none-match": answer.headers["etag"]}, timeout=PATIENCE)
    assert (again.status_code, again.content) == (304, b"")


def test_a_page_needs_no_key_and_tells_nothing(lm: LM) -> None:
    with running(lm, api_keys=("secret",)) as server:
        page = httpx.get(f"{server.url}/", timeout=PATIENCE)
        assert page.status_code == 200
        assert "key" in {a["id"] for a in Page(page.text).named("input")}
        assert "tiny" not in page.text.split("<script>")[0]
        assert "secret" not in page.text
        assert not {"beam", "tir"} & judges(page.text)  # no reward model, no programs
        assert server.post("/", {}).status_code == 401


@pytest.mark.parametrize(
    "search",
    [VOTE, {"method": "beam", "budget": 4, "beam_width": 2, "max_steps": 2, "step_stop": "e", "candidates": True}],
)
def test_the_page_of_an_answer(server: Running, search: Any) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8, "seed": 3, "search": search | {"page": True}}
    answer = server.post(CHAT, body).json()
    (choice,) = answer["choices"]
    page = Page(choice["search"]["page"])
    assert page.texts["pre"][0] == "how many"  # the question, not the prompt with its template
    shown = [row["id"] for row in page.named("tr") if "id" in row]
    assert sorted(shown) == sorted(f"q0-c{i}" for i in range(len(choice["search"]["scores"])))
    assert f"{answer['usage']['completion_tokens']:,}" in page.texts["dd"]
    assert "3" in page.texts["dd"]
    lines = httpx.post(f"{server.url}{CHAT}", json=body | {"stream": True}, timeout=PATIENCE).text.split("\n\n")
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    (streamed,) = (c["search"]["page"] for chunk in told for c in chunk["choices"] if "page" in c.get("search", ()))
    assert Page(streamed).texts["pre"] == page.texts["pre"]
    assert "page" not in server.post(CHAT, body | {"search": search}).json()["choices"][0]["search"]


def test_every_prompt_has_its_page(server: Running) -> None:
    body = {"prompt": ["how <many>", "the people"], "max_tokens": 4, "seed": 3, "search": VOTE | {"page": True}}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert [Page(choice["search"]["page"]).texts["pre"][0] for choice in choices] == body["prompt"]
