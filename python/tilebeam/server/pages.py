"""The page of the server, to chat on; the page of a search is a part of its answer."""

from __future__ import annotations

import hashlib

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, Response

from tilebeam.pages.chat_page import PageOptions, chat_page, chat_policy
from tilebeam.server.models import Models
from tilebeam.server.searches import EXTRACTORS

_HEADERS = {
    "cache-control": "no-cache",  # ask whether it is still the same
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def add_page_routes(app: FastAPI, models: Models) -> None:
    """Serve it. It holds nothing that needs a key."""

    @app.get("/", include_in_schema=False)
    async def chat(request: Request) -> Response:
        """Return the page to chat on."""
        settings, names = models.settings, [service.name for service in models.services]
        options = PageOptions(
            name="" if settings.api_keys or len(names) > 1 else names[0],
            models=[] if settings.api_keys or len(names) == 1 else names,
            key=bool(settings.api_keys),
            methods=[*(["tir"] if settings.programs else []), "adaptive"]
            + (["beam", "dvts"] if models.rates_steps else []),
            extractors=EXTRACTORS,
            most=settings.max_samples,
        )
        page = chat_page(options)
        tag = f'"{hashlib.sha256(page.encode("utf-8")).hexdigest()[:32]}"'
        headers = _HEADERS | {"content-security-policy": chat_policy(), "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return HTMLResponse(page, headers=headers)
