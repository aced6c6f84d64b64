"""Between texts, chats and tokens, and what is served: /tokenize, /detokenize, /apply-template and /props, in
llama-server's form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from tilebeam._version import __version__
from tilebeam.server.answer_events import Json
from tilebeam.server.errors import check_tokens
from tilebeam.server.models import Models
from tilebeam.server.openai import chat_completions
from tilebeam.server.requests import ChatRequest, Strict, Text
from tilebeam.server.service import Service
from tilebeam.server.writing import dumped

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

# Of one request. A body of the default size holds no more.
_MOST_TOKENS = 1 << 19

Token = Annotated[int, Field(ge=0, lt=2**31)]


class TokenizeRequest(Strict):
    """POST /tokenize."""

    content: Text | Annotated[list[Token | Text], Field(max_length=_MOST_TOKENS)]
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    model: Text | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    tokens: list[Token] = Field(max_length=_MOST_TOKENS)
    model: Text | None = None


def add_token_routes(app: FastAPI, models: Models) -> None:
    """Serve these paths."""

    @app.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the tokens of a text."""
        return await models.of(body.model).run_quick(request, lambda lm: _answer(_tokenized(lm, body)))

    @app.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of tokens, control tokens spelled out."""
        return await models.of(body.model).run_quick(request, lambda lm: _answer(_detokenized(lm, body)))

    @app.post("/apply-template", response_model=None)
    async def apply_template(body: ChatRequest, request: Request) -> Response:
        """Return the prompt that a chat's messages and functions make; nothing is generated."""
        service = models.of(body.model)
        settings = service.settings

        def prompt(lm: LM) -> Response:
            made = chat_completions.prompt_of(lm, body, settings.chat_template, settings.chat_template_kwargs)
            return _answer({"prompt": made.text})

        return await service.run_quick(request, prompt, chat=True)

    @app.get("/props")
    async def props(request: Request, model: str | None = None) -> dict[str, Any]:
        """Return what is served, and how requests are sampled that do not say."""
        service = models.of(model)
        return await service.run_quick(request, lambda lm: _props(lm, service))


def _answer(data: Json) -> Response:
    """Write it in the thread that made it: it may be long."""
    return Response(dumped(data), media_type="application/json")


def _tokenized(lm: LM, body: TokenizeRequest) -> dict[str, Any]:
    """Return the tokens of texts that follow each other; the first one alone may get BOS."""
    parts = [body.content] if isinstance(body.content, str) else body.content
    ids: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            ids += lm.tokenize(part, add_special=body.add_special and i == 0, parse_special=body.parse_special)
        else:
            ids.append(part)
    check_tokens(lm, ids, "content")
    if not body.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": token, "piece": _piece(lm.spelling(token))} for token in ids]}


def _piece(raw: bytes) -> str | list[int]:
    """Return a text, or the bytes of what is none by itself."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def _detokenized(lm: LM, body: DetokenizeRequest) -> dict[str, Any]:
    check_tokens(lm, body.tokens, "tokens")
    text = b"".join(map(lm.spelling, body.tokens)).decode("utf-8", "replace")
    return {"content": text}


def _props(lm: LM, service: Service) -> dict[str, Any]:
    settings = service.settings
    default = settings.sampling
    sampling = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "penalty_last_n")
    params = {name: getattr(default, name) for name in sampling}
    return {
        "default_generation_settings": {
            "n_ctx": lm.n_ctx,
            "params": params | {"n_predict": -1 if settings.max_tokens is None else settings.max_tokens},
        },
        "total_slots": lm.n_seq_max,
        "model_alias": service.name,
        "model_path": lm.info.path,
        "chat_template": settings.chat_template or lm.chat_template or "",
        "bos_token": lm.spelling(lm.bos).decode() if lm.bos >= 0 else "",
        "eos_token": lm.spelling(lm.eos).decode() if lm.eos >= 0 else "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"tilebeam {__version__}",
    }
