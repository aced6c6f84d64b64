"""/docs, which tells the paths of this server and how to ask them; and where a browser finds the page."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tilebeam.pages.markup import Html, tag
from tilebeam.server.errors import ApiError

_TALK = [{"role": "user", "content": "What is 17 + 25?"}]
# A request for some of the paths; tests send them.
EXAMPLES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": _TALK, "max_tokens": 64},
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 8},
    "/v1/responses": {"input": "What is 17 + 25?", "max_output_tokens": 64},
    "/v1/embeddings": {"input": ["a cat", "a dog"]},
    "/tokenize": {"content": "a cat"},
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "td{padding:.2rem 1rem .2rem 0;vertical-align:top}pre{overflow-x:auto}"
)
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
}


def add_api_page(app: FastAPI) -> None:
    """Serve these paths."""

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        """Return what the server's own description says, as a page."""
        return HTMLResponse(_page(app.openapi(), str(request.base_url).rstrip("/")), headers=_HEADERS)

    @app.get("/v1", include_in_schema=False)
    @app.get("/v1/", include_in_schema=False)
    async def base(request: Request) -> Response:
        """Send a browser to the page; programs learn what the address is."""
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/")
        raise ApiError(404, "This is the API's base address: ask /v1/chat/completions, or see /docs. The page is at /.")


def _page(described: dict[str, Any], url: str) -> str:
    rows = [
        tag("tr", tag("td", tag("code", f"{method.upper()} {path}")), tag("td", told.get("description", "")))
        for path, methods in described["paths"].items()
        for method, told in methods.items()
    ]
    asked = [tag("pre", f"curl {url}{path} -d '{json.dumps(body)}'") for path, body in EXAMPLES.items()]
    lead = ("All fields of requests are described in ", tag("a", "/openapi.json", href="/openapi.json"), ".")
    title = "Paths of this server"
    body = (tag("h1", title), tag("p", *lead), tag("table", rows), tag("h2", "Examples"), asked)
    head = (tag("meta", charset="utf-8"), tag("title", title), tag("style", Html(_STYLE)))
    return "<!doctype html>" + tag("html", tag("head", head), tag("body", body), lang="en")
