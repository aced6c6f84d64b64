"""What goes wrong, in the shape that clients of OpenAI's API know: {"error": {"message", "type", "param", "code"}}; on
the paths of Anthropic's API in its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from tilebeam.chat.chat_template import MessagesRefused, NoTemplate
from tilebeam.chat.refused import FieldRefused
from tilebeam.errors import GrammarTooComplexError, NpuError, TilebeamError
from tilebeam.native import llama
from tilebeam.server.logs import note

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
# As Anthropic names those that it names otherwise.
_MESSAGES_TYPES = {413: "request_too_large", 503: "overloaded_error"}

# What fields of several types take.
_UNIONS = {
    "prompt": "must be a text, a list of token ids, or a list of texts or of lists of token ids",
    "stop": "must be a text or a list of texts",
    "content": 'must be a text or a list of parts {"type": "text", "text": ..}; there are no images and no audio',
    "schema": "must be a JSON schema",
    "input": "must be a text or a list: of messages, function_call and function_call_output items for a response; of "
    "texts, of token ids or of lists of them for embeddings",
    "texts": "must be a text or a list of texts",
}


class ApiError(Exception):
    """A request that ends with an error.

    Args:
        status: of HTTP.
        message: a sentence for the user.
        code: a name for programs, such as "context_length_exceeded".
        param: the request's field that is wrong.
        retry_after: seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the JSON of the answer, in the form of the API that a path is part of; without one OpenAI's."""
        kind = _TYPES.get(self.status, "server_error")
        if path.startswith("/v1/messages"):
            kind = _MESSAGES_TYPES.get(self.status, kind if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return what goes with it."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 408:
            headers["connection"] = "close"  # what is left of the request is not waited for
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def response(self, path: str = "") -> JSONResponse:
        """Return the answer to a request of this path, whose log tells of it, too."""
        self.note()
        return JSONResponse(self.body(path), self.status, self.headers())

    def note(self) -> None:
        """Tell the log. Messages about a client's mistake may hold what it sent."""
        note(status=self.status, error=self.code or _TYPES.get(self.status, "server_error"))
        if self.status >= 500:
            note(reason=self.message)


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Make an error of the client's mistake."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, code: str, retry_after: float | None = None) -> ApiError:
    """Make an error that says why nothing can be generated now."""
    return ApiError(503, message, code=code, retry_after=retry_after)


def from_exception(error: BaseException) -> ApiError:
    """Return what the client learns of an exception: of the library's the sentence, of others their type alone."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NpuError):
        return unavailable(str(error), code="npu_failed")
    if isinstance(error, TilebeamError):
        return ApiError(500, str(error), code="generation_failed")
    return ApiError(500, f"Unexpected {type(error).__name__}; the server's log has more.", code="internal_error")


def from_validation(error: RequestValidationError | ValidationError) -> ApiError:
    """Return the first thing that is wrong with a body, named as OpenAI names it."""
    errors: Sequence[Mapping[str, Any]] = error.errors()
    # Of a list that is too long, the other types that a field takes say what it is not.
    first = next((e for e in errors if e["type"] == "too_long" and e["loc"][:2] == errors[0]["loc"][:2]), errors[0])
    kind, where = str(first["type"]), list(first["loc"][first["loc"][:1] == ("body",) :])
    # Where a field takes several types, the path goes on with the name of the type that was tried. What a client calls
    # an unknown field may look like one.
    last = len(where) - (kind == "extra_forbidden")
    tried = next((i for i, part in enumerate(where[:last]) if _is_type(part)), len(where))
    several, where = tried < len(where), where[:tried]
    if kind == "json_invalid":
        return bad_request(f"The body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}.")
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in where).lstrip(".") or None
    if kind == "extra_forbidden":
        return bad_request(f"Unrecognized request argument: {param}.", param=param, code="unknown_parameter")
    if kind == "missing":
        what = f"a value for {param}" if param else "a JSON object as its body (content-type: application/json)"
        return bad_request(f"The request needs {what}.", param=param, code="missing_required_parameter")
    if several and kind not in ("value_error", "too_long"):
        takes = _UNIONS.get(str(where[-1]), "has a wrong type")
        return bad_request(f"{param}: {takes}.", param=param, code="invalid_value")
    message = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    if not param:
        what = "The body must be a JSON object, sent with content-type: application/json."
        return bad_request(f"{message}." if kind == "value_error" else what)
    return bad_request(f"{param}: {message}.", param=param, code="invalid_value")


def _is_type(part: object) -> bool:
    return isinstance(part, str) and (not part.isidentifier() or part in ("bool", "float", "int", "str"))


def check_tokens(lm: LM, ids: Sequence[int], param: str) -> None:
    """Raise `ApiError` for a token that the model does not have."""
    try:
        llama.check_tokens(ids, lm.n_vocab, param)
    except TilebeamError as error:
        raise bad_request(str(error), param=param) from None


@contextmanager
def errors_for_client(lm: LM) -> Iterator[None]:
    """Raise what the library says of a request as `ApiError`: the client's mistake, unless the model has failed."""
    try:
        yield
    except GrammarTooComplexError:
        raise
    except FieldRefused as error:
        message = f"messages: {error}" if isinstance(error, MessagesRefused) else str(error)
        raise bad_request(message, param=error.param, code=error.code) from None
    except NoTemplate as error:
        raise bad_request(f"{error} Or start the server with --chat-template.", code="no_chat_template") from None
    except UnicodeEncodeError:  # in JSON, of which no field is checked by itself
        raise bad_request("The request holds half of a surrogate pair.", code="invalid_value") from None
    except TilebeamError as error:
        if lm.failure is not None:
            raise
        raise bad_request(str(error), code="invalid_value") from None
