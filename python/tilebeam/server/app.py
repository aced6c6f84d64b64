"""The HTTP side: routes, errors, and what is measured of every request."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilebeam.server.admission import ClientGone
from tilebeam.server.errors import ApiError, from_exception, from_validation
from tilebeam.server.metrics import Metrics
from tilebeam.server.models import Models
from tilebeam.server.openai.chat_completions import ChatAnswer
from tilebeam.server.openai.completions import CompletionAnswer
from tilebeam.server.openai.embedding_routes import add_embedding_routes
from tilebeam.server.openai.responses import add_response_routes
from tilebeam.server.other.adapter_routes import add_adapter_routes
from tilebeam.server.other.infill import InfillAnswer, InfillRequest
from tilebeam.server.other.rerank import add_rerank_routes
from tilebeam.server.other.scores import add_score_routes
from tilebeam.server.other.tokens import add_token_routes
from tilebeam.server.pages import add_page_routes
from tilebeam.server.requests import ChatRequest, CompletionRequest
from tilebeam.server.security import ApiKeys, Guard, is_loopback
from tilebeam.server.settings import Settings

log = logging.getLogger("tilebeam.server")

# nginx's status for a client that did not wait for its answer. It is never sent.
_CLIENT_CLOSED_REQUEST = 499


def create_app(models: Models) -> FastAPI:
    """An ASGI application that serves models; it frees them when it ends."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        models.start()
        try:
            yield
        finally:
            await models.close()

    # No pages that load scripts from elsewhere: the schema is at /openapi.json.
    app = FastAPI(title="Tilebeam", lifespan=life, docs_url=None, redoc_url=None)
    app.state.models = models
    _routes(app, models)
    add_token_routes(app, models)
    add_response_routes(app, models)
    add_embedding_routes(app, models)
    add_rerank_routes(app, models)
    add_score_routes(app, models)
    add_page_routes(app, models)
    add_adapter_routes(app, models)
    add_error_handlers(app)
    add_access_rules(app, models.settings)
    app.add_middleware(_Measured, metrics=models.metrics, paths={route.path for route in app.routes})  # type: ignore[attr-defined]
    return app


def add_access_rules(app: FastAPI, settings: Settings) -> None:
    """Have an application answer only who may ask, and take no more than it should."""
    keys = ApiKeys(settings.api_keys)
    names_allowed = bool(keys) or not is_loopback(settings.host)
    # The last one added is the first to see a request.
    app.add_middleware(Guard, keys=keys, max_body=settings.max_body, names_allowed=names_allowed)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )


def _routes(app: FastAPI, models: Models) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await models.of(body.model).complete(body, request, CompletionAnswer)

    @app.post("/infill", response_model=None)
    async def infill(body: InfillRequest, request: Request) -> Response:
        """Write what stands between two texts, in llama-server's form."""
        answer = partial(InfillAnswer, body)
        return await models.of(body.model).complete(body.completion(), request, answer)

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
        """The models, under each of their names."""
        return models.listed()

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model of that name."""
        return models.entry(name)

    @app.get("/health")
    @app.get("/v1/health", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.head("/v1/health", include_in_schema=False)
    async def health() -> JSONResponse:
        """200 while requests are answered, be it after a model is loaded; 503 with the reason while not."""
        status, body = models.health()
        return JSONResponse(body, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(models.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def add_error_handlers(app: FastAPI) -> None:
    """Have an application put all errors as OpenAI puts them."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(ValidationError)
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError | ValidationError) -> Response:
        return from_validation(error).response()

    @app.exception_handler(ClientGone)
    async def gone(_request: Request, _error: ClientGone) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        said = {404: f"Unknown path {request.url.path}.", 405: f"{request.url.path} does not take {request.method}."}
        code = "request_timeout" if error.status_code == 408 else None
        return ApiError(error.status_code, said.get(error.status_code, str(error.detail)), code=code).response()

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return from_exception(error).response()  # the traceback goes to the log


class _Measured:
    """Middleware that counts and times every request."""

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
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            status = scope.get("tilebeam.status", status)
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.request_seconds.labels(path).observe(time.monotonic() - began)
            log.info("%s %s %d %.3f s", scope["method"], path, status, time.monotonic() - began)
