"""The page that describes the API, its address in a browser, and requests as people type them."""

from __future__ import annotations

import html
import json
import re
import shlex
from typing import Any

import pytest
from tilebeam import LM

pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
httpx = pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from server_kit import CHAT, PATIENCE, TEXT, Running, running  # noqa: E402

FORM = "application/x-www-form-urlencoded"  # what curl -d says


def sent(server: Running, path: str, body: Any, **headers: str) -> Any:
    return httpx.post(f"{server.url}{path}", content=json.dumps(body), headers=headers, timeout=PATIENCE)


def test_the_page_has_every_path(server: Running) -> None:
    answer = httpx.get(f"{server.url}/docs", timeout=PATIENCE)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["content-security-policy"] == "default-src 'none'"
    described = httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE).json()["paths"]
    for path, methods in described.items():
        for method, told in methods.items():
            assert f"<code>{method.upper()} {path}</code>" in answer.text
            assert told["description"]
    assert 'href="/openapi.json"' in answer.text
    (example,) = re.findall("<pre>(.*?)</pre>", answer.text)
    words = shlex.split(html.unescape(example))
    assert (words[:2], words[2]) == (["curl", f"{server.url}/v1/chat/completions"], "-d")
    assert sent(server, CHAT, json.loads(words[3]), **{"content-type": FORM}).status_code == 200


def test_the_address_of_the_api_in_a_browser(lm: LM) -> None:
    with running(lm, api_keys=("secret",)) as server:
        there = httpx.get(f"{server.url}/v1", headers={"accept": "text/html,*/*;q=0.8"}, timeout=PATIENCE)
        assert (there.status_code, there.headers["location"]) == (307, "/")
        told = httpx.get(f"{server.url}/v1", timeout=PATIENCE)
        assert told.status_code == 404
        assert "/docs" in told.json()["error"]["message"]
        assert httpx.get(f"{server.url}/docs", timeout=PATIENCE).status_code == 200
        assert server.post("/docs", {}).status_code == 401


def test_json_without_its_content_type(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for headers in ({}, {"content-type": FORM}):
        assert sent(server, TEXT, body, **headers).status_code == 200
        # A web page would be spared asking for permission.
        assert sent(server, TEXT, body, origin="http://a.example", **headers).status_code == 400
        assert sent(server, TEXT, body, **headers | {"sec-fetch-site": "cross-site"}).status_code == 400
    assert sent(server, TEXT, body, **{"content-type": "text/plain"}).status_code == 400
