"""The HTTP side: routes, errors, and what is measured of every request."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilebeam.server.admission import ClientGone
from tilebeam.server.errors import ApiError, from_exception, from_validation
from tilebeam.server.logs import begin_notes, note
from tilebeam.server.metrics import Metrics
from tilebeam.server.models import Models
from tilebeam.server.openai.chat_completions import ChatAnswer
from tilebeam.server.openai.completions import CompletionAnswer
from tilebeam.server.openai.responses import add_response_routes
from tilebeam.server.other.messages import add_message_routes
from tilebeam.server.pages import add_page_routes
from tilebeam.server.reading_routes import add_reading_routes
from tilebeam.server.requests import ChatRequest, CompletionRequest
from tilebeam.server.security import ApiKeys, Guard, is_loopback

log = logging.getLogger("tilebeam.server")

# nginx's status for a client that did not wait for its answer. It is never sent.
_CLIENT_CLOSED_REQUEST = 499
# A request's name in the log and in its answer; a client's own is taken.
_ID_HEADER = "x-request-id"
_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
# What is asked every few seconds is logged with --verbose only.
_PROBES = frozenset({"/health", "/v1/health", "/metrics"})
_MOST_PATH = 200  # characters of a path in the log


def create_app(models: Models) -> FastAPI:
    """Return an ASGI application that serves models; it frees them when it ends."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await models.close()

    # FastAPI's own pages load scripts from elsewhere.
    app = FastAPI(title="Tilebeam", lifespan=life, docs_url=None, redoc_url=None)
    app.state.models = models
    _routes(app, models)
    for add in (add_response_routes, add_message_routes, add_reading_routes, add_page_routes):
        add(app, models)
    _add_error_handlers(app)
    settings = models.settings
    keys = ApiKeys(settings.api_keys)
    names_allowed = bool(keys) or not is_loopback(settings.host)
    # The last one added is the first to see a request.
    app.add_middleware(Guard, keys=keys, max_body=settings.max_body, names_allowed=names_allowed)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    app.add_middleware(_Measured, metrics=models.metrics, paths={route.path for route in app.routes})  # type: ignore[attr-defined]
    return app


def _routes(app: FastAPI, models: Models) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await models.of(body.model).complete(body, request, CompletionAnswer)

    @app.post("/v1/chat/completions", response_model=None)
    @app.post("/chat/completions", response_model=None, include_in_schema=False)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer in a conversation."""
        return await models.of(body.model).chat(body, request, ChatAnswer)

    @app.get("/v1/models")
    @app.get("/models", include_in_schema=False)
    @app.head("/v1/models", include_in_schema=False)
    @app.head("/models", include_in_schema=False)
    async def listed() -> dict[str, Any]:
        """Return the models, under each of their names."""
        return models.listed()

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Return the model of that name."""
        return models.entry(name)

    @app.get("/health")
    @app.get("/v1/health", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.head("/v1/health", include_in_schema=False)
    async def health() -> JSONResponse:
        """Return 200 while requests are answered, be it after a model is loaded; 503 with the reason while not."""
        status, body = models.health()
        return JSONResponse(body, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return figures for Prometheus."""
        return Response(models.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_error_handlers(app: FastAPI) -> None:
    """Have an application put all errors in the form of the API that was asked."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response(request.url.path)

    @app.exception_handler(ValidationError)
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError | ValidationError) -> Response:
        return from_validation(error).response(request.url.path)

    @app.exception_handler(ClientGone)
    async def gone(_request: Request, _error: ClientGone) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        said = {404: f"Unknown path {path}.", 405: f"{path} does not take {request.method}."}
        code = {408: "request_timeout", 413: "body_too_large"}.get(error.status_code)
        if isinstance(error.__cause__, ClientDisconnect):
            return await gone(request, ClientGone())
        return ApiError(error.status_code, said.get(error.status_code, str(error.detail)), code=code).response(path)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        answer = from_exception(error).response(request.url.path)  # the traceback goes to the log
        answer.headers[_ID_HEADER] = request.scope.get("tilebeam.request_id", "-")  # no middleware sees this answer
        return answer


class _Measured:
    """Middleware that names, counts, times and logs every request.

    Args:
        app: what answers.
        metrics: where requests are counted.
        paths: those that are counted by name.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on, and look at the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        given = Headers(scope=scope).get(_ID_HEADER, "")
        name = scope["tilebeam.request_id"] = given if _ID.fullmatch(given) else f"req_{secrets.token_hex(8)}"
        noted = begin_notes()
        note(status=500)

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                note(status=message["status"])
                MutableHeaders(scope=message)[_ID_HEADER] = name
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            from_exception(error).note()
            raise
        finally:
            seconds, status = time.monotonic() - began, noted.pop("status")
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.request_seconds.labels(path).observe(seconds)
            level = logging.WARNING if status >= 500 else logging.DEBUG if path in _PROBES else logging.INFO
            place = {"method": scope["method"], "path": quote(scope["path"])[:_MOST_PATH], "status": status}
            client = (scope.get("client") or ("-",))[0]
            told = {**place, "seconds": round(seconds, 3), "client": client, **noted, "id": name}
            log.log(level, "request", extra={"fields": told})
