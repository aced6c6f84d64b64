"""What stands before every request: who may ask, how the server was addressed, and how much may be sent.

Plain ASGI, so that a request's own `receive` still tells when its client goes away.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilebeam.server.errors import ApiError

# A body must be there within this many seconds and those that its most bytes take at this rate; then 408.
_BODY_SECONDS = 30.0
_SLOWEST_BODY = 64 << 10  # bytes a second
# Requests at the same time: those that wait hold their bodies.
MOST_REQUESTS = 1024
# Answers whether the server runs, which load balancers ask without a key.
PUBLIC_PATHS = frozenset({"/health", "/v1/health"})
# The page that a browser loads before anybody can give it a key. It holds nothing but a form.
PUBLIC_PAGE = "/"
# What curl -d and programs that say nothing send JSON as.
_UNTYPED = ("", "application/x-www-form-urlencoded")


class ApiKeys:
    """Keys, compared in constant time: neither a key's content nor its length shows in how long a refusal takes."""

    def __init__(self, keys: Collection[str]) -> None:
        self._digests = [self._digest(key.encode("utf-8", "surrogateescape")) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def fits(self, given: str) -> bool:
        """Return whether this is one of the keys, as a header has it: a character for each byte."""
        digest = self._digest(given.encode("latin-1"))
        fits = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, whatever the first say
        return any(fits)

    @staticmethod
    def _digest(key: bytes) -> bytes:
        return hashlib.sha256(key).digest()


def given_key(headers: Headers) -> str | None:
    """Return the key of a request: `Authorization: Bearer KEY`, or `X-Api-Key: KEY`. None: there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_name(host: str) -> bool:
    """Return whether the Host header names the server by a DNS name, which its owner can point anywhere."""
    bare = host[1 : host.index("]")] if host.startswith("[") and "]" in host else host.rsplit(":", 1)[0]
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return bare.lower().rstrip(".") != "localhost"
    return False


class Guard:
    """Middleware.

    Args:
        app: what is guarded.
        keys: API keys; none: everybody may ask.
        max_body: bytes.
        names_allowed: whether requests may address the server by any name. A server without keys that listens on
            loopback only says no: otherwise a web page could reach it by pointing its own name at 127.0.0.1.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, max_body: int, names_allowed: bool) -> None:
        self._app = app
        self._keys = keys
        self._max_body = max_body
        self._names_allowed = names_allowed
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then hand on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = self._refusal(scope["path"], scope["method"], headers)
        if error is not None:
            await error.response(scope["path"])(scope, receive, send)
            return
        # Not from web pages, of which browsers tell: they would be spared asking for permission (CORS).
        if headers.get("content-type", "") in _UNTYPED and not {"origin", "sec-fetch-site"} & {*headers.keys()}:
            MutableHeaders(scope=scope)["content-type"] = "application/json"
        self._inside += 1
        try:
            await self._app(scope, _limited(receive, self._max_body), send)
        finally:
            self._inside -= 1

    def _refusal(self, path: str, method: str, headers: Headers) -> ApiError | None:
        if not self._names_allowed and _is_name(headers.get("host", "localhost")):
            return ApiError(
                403,
                "This server answers on this machine only, to localhost and IP addresses: "
                "start it with --api-key or another --host to reach it by a name.",
                code="host_not_allowed",
            )
        # A browser asks for permission (CORS) without the key.
        public = path in PUBLIC_PATHS or (path == PUBLIC_PAGE and method in ("GET", "HEAD"))
        if self._keys and not public and method != "OPTIONS":
            key = given_key(headers)
            if key is None:
                return ApiError(401, "This server needs an API key: Authorization: Bearer KEY.", code="missing_api_key")
            if not self._keys.fits(key):
                return ApiError(401, "Invalid API key.", code="invalid_api_key")
        if self._inside >= MOST_REQUESTS and path not in PUBLIC_PATHS:
            return ApiError(
                429, f"{self._inside} requests are in progress. Try again later.", code="queue_full", retry_after=5
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body:
            return ApiError(413, _too_large(self._max_body), code="body_too_large")
        return None


def _limited(receive: Receive, limit: int) -> Receive:
    """Return what counts what a request sends, whatever its headers said: HTTPException 413 for a body that is too
    large, 408 for one that does not come."""
    seen, complete, deadline = 0, False, time.monotonic() + _BODY_SECONDS + limit / _SLOWEST_BODY

    async def limited() -> Message:
        nonlocal seen, complete
        if complete:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise HTTPException(408, "The request's body did not arrive in time.") from None
        seen += len(message.get("body", b""))
        complete = message["type"] != "http.request" or not message.get("more_body", False)
        if seen > limit:
            raise HTTPException(413, _too_large(limit))
        return message

    return limited


def _too_large(limit: int) -> str:
    return f"The body is larger than the {limit} bytes that this server takes."
