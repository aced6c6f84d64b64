"""The page of the server, to ask questions on; the page of a search is a part of its answer."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

from tilebeam.pages.ask import AskOptions, ask_page, ask_policy
from tilebeam.search.search_defaults import BUDGET
from tilebeam.server.models import Models
from tilebeam.server.searches import EXTRACTORS

_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def add_page_routes(app: FastAPI, models: Models) -> None:
    """Serve it."""

    @app.get("/", include_in_schema=False)
    @app.get("/ui", include_in_schema=False)
    async def ask() -> Response:
        """Ask questions. The page holds nothing that needs a key."""
        headers = _HEADERS | {"content-security-policy": ask_policy()}
        return HTMLResponse(ask_page(_options(models)), headers=headers)


def _options(models: Models) -> AskOptions:
    settings, names = models.settings, [service.name for service in models.services]
    methods = ["vote", "adaptive", "best-of-n"]
    if models.rates_steps:
        methods += ["beam", "dvts"]
    return AskOptions(
        name="" if settings.api_keys or len(names) > 1 else names[0],
        models=[] if settings.api_keys or len(names) == 1 else names,
        key=bool(settings.api_keys),
        methods=methods,
        extractors=EXTRACTORS,
        budget=BUDGET,
        most=settings.max_samples,
    )
