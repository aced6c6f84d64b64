"""The pages of the server: one to chat on, one to search on; the page of a search is a part of its answer."""

from __future__ import annotations

import hashlib

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, Response

from tilebeam.pages.ask import AskOptions, ask_page, ask_policy
from tilebeam.pages.chat_page import chat_page, chat_policy
from tilebeam.search.search_defaults import BUDGET
from tilebeam.server.models import Models
from tilebeam.server.searches import EXTRACTORS

_HEADERS = {
    "cache-control": "no-cache",  # ask whether it is still the same
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def add_page_routes(app: FastAPI, models: Models) -> None:
    """Serve them. They hold nothing that needs a key."""

    @app.get("/", include_in_schema=False)
    @app.get("/ui", include_in_schema=False)
    async def chat(request: Request) -> Response:
        """Return the page to chat on."""
        return _answer(request, chat_page(_options(models)), chat_policy())

    @app.get("/search", include_in_schema=False)
    async def ask(request: Request) -> Response:
        """Return the page to ask questions on that searches answer."""
        return _answer(request, ask_page(_options(models)), ask_policy())


def _answer(request: Request, page: str, policy: str) -> Response:
    tag = f'"{hashlib.sha256(page.encode("utf-8")).hexdigest()[:32]}"'
    headers = _HEADERS | {"content-security-policy": policy, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return HTMLResponse(page, headers=headers)


def _options(models: Models) -> AskOptions:
    settings, names = models.settings, [service.name for service in models.services]
    methods = ["vote", "adaptive", "best-of-n"]
    if models.rates_steps:
        methods += ["beam", "dvts"]
    if settings.programs:
        methods.append("tir")
    return AskOptions(
        name="" if settings.api_keys or len(names) > 1 else names[0],
        models=[] if settings.api_keys or len(names) == 1 else names,
        key=bool(settings.api_keys),
        methods=methods,
        extractors=EXTRACTORS,
        budget=BUDGET,
        most=settings.max_samples,
    )
