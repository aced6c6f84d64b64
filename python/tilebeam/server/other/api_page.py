"""/docs, which tells the paths of this server and how to ask them; and where a browser finds the page."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tilebeam.pages.markup import tag
from tilebeam.server.errors import ApiError

_EXAMPLE = """'{"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 64}'"""
_HEADERS = {"content-security-policy": "default-src 'none'", "x-content-type-options": "nosniff"}


def add_api_page(app: FastAPI) -> None:
    """Serve these paths."""

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        """Return what the server's own description says, as a page."""
        rows = [
            tag("tr", tag("td", tag("code", f"{method.upper()} {path}")), tag("td", told.get("description", "")))
            for path, methods in app.openapi()["paths"].items()
            for method, told in methods.items()
        ]
        asked = tag("pre", f"curl {request.base_url}v1/chat/completions -d {_EXAMPLE}")
        more = tag("a", "All fields of requests", href="/openapi.json")
        title = "Paths of this server"
        body = tag("body", tag("h1", title), asked, tag("table", rows), tag("p", more))
        return HTMLResponse("<!doctype html>\n" + tag("title", title) + body, headers=_HEADERS)

    @app.get("/v1", include_in_schema=False)
    async def base(request: Request) -> Response:
        """Send a browser to the page; programs learn what the address is."""
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/")
        raise ApiError(404, "This is the API's base address: ask /v1/chat/completions, or see /docs. The page is at /.")
