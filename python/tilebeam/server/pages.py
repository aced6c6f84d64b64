"""Pages of the server: `/` to ask questions on, and `POST /ui`, which makes the page of a search out of its answer."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import HTMLResponse, Response

from tilebeam.errors import TilebeamError
from tilebeam.outputs import Usage
from tilebeam.pages.ask import AskOptions, ask_page, ask_policy
from tilebeam.pages.document import policy
from tilebeam.pages.search import search_page
from tilebeam.search.result_from_json import read_report
from tilebeam.search.search_defaults import BUDGET
from tilebeam.server.errors import bad_request
from tilebeam.server.models import Models
from tilebeam.server.searches import EXTRACTORS

_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


_MOST = 1e15  # tokens or seconds that a page shows


class AnswerOfSearch(BaseModel):
    """POST /ui: an answer of /v1/completions or /v1/chat/completions to a request with a search and "candidates": true.

    Attributes:
        question: what to show as its prompt; for several prompts a list.
    """

    model_config = ConfigDict(extra="ignore")

    choices: list[dict[str, Any]] = Field(min_length=1)
    question: str | list[str] = ""
    usage: dict[str, Any] | None = None
    tilebeam: dict[str, Any] | None = None


def add_page_routes(app: FastAPI, models: Models) -> None:
    """Serve these paths."""

    @app.get("/", include_in_schema=False)
    @app.get("/ui", include_in_schema=False)
    async def ask() -> Response:
        """Ask questions. The page holds nothing that needs a key."""
        headers = _HEADERS | {"content-security-policy": ask_policy()}
        return HTMLResponse(ask_page(_options(models)), headers=headers)

    @app.post("/ui", response_class=HTMLResponse)
    async def shown(body: AnswerOfSearch) -> Response:
        """The page of a search, one HTML file."""
        page = await asyncio.to_thread(_rendered, body)
        rules = policy("search", more="frame-ancestors 'none'; sandbox allow-scripts")
        headers = {"content-security-policy": rules, "content-disposition": 'attachment; filename="search.html"'}
        return HTMLResponse(page, headers=_HEADERS | headers)


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
        max_body=settings.max_body,
    )


def _rendered(body: AnswerOfSearch) -> str:
    """The page, or a refusal."""
    reports = [choice.get("search") for choice in body.choices]
    try:
        results = [read_report(report if isinstance(report, dict) else {}) for report in reports]
    except TilebeamError as error:
        raise bad_request(str(error), param="choices", code="invalid_value") from None
    method = str(reports[0].get("method", "")) if reports[0] is not None else ""
    asked = [body.question] if isinstance(body.question, str) else body.question
    if len(asked) != len(results):
        raise bad_request(f"question: {len(asked)} for {len(results)} choices.", param="question")
    usage, seed = _spent(body)
    for result in results:
        result.usage, result.seed = (usage, seed) if len(results) == 1 else (Usage(), seed)
    return search_page(method, results, asked)


def _spent(body: AnswerOfSearch) -> tuple[Usage, int]:
    """What an answer says of tokens and seconds, and its seed."""
    told = (body.usage or {}) | (body.tilebeam or {})
    details = told.get("prompt_tokens_details")
    if isinstance(details, dict):
        told |= {"cached_tokens": details.get("cached_tokens")}
    found: dict[str, Any] = {}
    for name in Usage.__dataclass_fields__:
        value = told.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST:
            found[name] = float(value) if name.endswith("seconds") else int(value)
    seed = told.get("seed")
    return Usage(**found), seed if isinstance(seed, int) else 0
