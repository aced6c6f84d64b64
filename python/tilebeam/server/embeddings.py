"""Embeddings in OpenAI's form, and documents by relevance in that of Jina and Cohere."""

from __future__ import annotations

import base64
import threading
import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, Request
from pydantic import Field, field_validator
from starlette.responses import Response

from tilebeam.outputs import Usage
from tilebeam.server.admission import ClientGone
from tilebeam.server.errors import bad_request
from tilebeam.server.model_host import Loaded
from tilebeam.server.models import Models
from tilebeam.server.prompts import check_tokens
from tilebeam.server.requests import Strict, Text
from tilebeam.server.responses import Json, dumped_in_parts

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

_MOST_TEXTS = 2048  # of one request
# Elements of all vectors of one answer: as base64 they take 5 bytes each, as numbers about 20.
_MOST_ELEMENTS = {"base64": 1 << 23, "float": 1 << 22}
# Tokens of texts that the model reads without letting others in between.
_AT_ONCE = 2048


class EmbeddingRequest(Strict):
    """POST /v1/embeddings."""

    input: (
        Text
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=_MOST_TEXTS)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=_MOST_TEXTS)]
    )
    model: Text | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None

    @field_validator("encoding_format", mode="before")
    @classmethod
    def _format_default(cls, value: object) -> object:
        return "float" if value is None else value

    @property
    def texts(self) -> list[str | list[int]]:
        """One or several, each a text or token ids."""
        if isinstance(self.input, str):
            return [self.input]
        tokens = [item for item in self.input if isinstance(item, int)]
        return [tokens] if tokens else [item for item in self.input if not isinstance(item, int)]


class Document(Strict):
    """A document of /v1/rerank as an object."""

    text: Text


class RerankRequest(Strict):
    """POST /v1/rerank."""

    query: Text
    documents: list[Text | Document] = Field(min_length=1, max_length=_MOST_TEXTS)
    model: Text | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [d if isinstance(d, str) else d.text for d in self.documents]


def add_embedding_routes(app: FastAPI, models: Models) -> None:
    """Serve these paths."""

    @app.post("/v1/embeddings", response_model=None)
    @app.post("/embeddings", response_model=None, include_in_schema=False)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Texts as vectors of length 1."""
        service = models.of(body.model)

        def answer(loaded: Loaded, stopped: threading.Event) -> tuple[Response, int]:
            vectors, tokens = _embedded(loaded.lm, body, stopped)
            data = [
                {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
                for i, vector in enumerate(vectors)
            ]
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            told = {"object": "list", "data": data, "model": service.name, "usage": usage}
            return Response(dumped_in_parts(told), media_type="application/json"), tokens

        response, tokens = await service.in_thread(request, answer)
        service.metrics.observe(Usage(prompt_tokens=tokens))
        return response

    @app.post("/v1/rerank")
    @app.post("/rerank", include_in_schema=False)
    @app.post("/v2/rerank", include_in_schema=False)
    @app.post("/reranking", include_in_schema=False)
    @app.post("/v1/reranking", include_in_schema=False)
    async def rerank(body: RerankRequest, request: Request) -> Json:
        """Documents by their relevance to a query, the most relevant first."""
        service = models.of(body.model)
        scores, tokens = await service.in_thread(request, lambda loaded, stopped: _ranked(loaded, body, stopped))
        service.metrics.observe(Usage(prompt_tokens=tokens))
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n]
        results: list[Json] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if body.return_documents:
            texts = body.texts
            results = [result | {"document": {"text": texts[result["index"]]}} for result in results]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "object": "list",
            "model": service.name,
            "results": results,
            "usage": usage,
        }


def _embedded(lm: LM, body: EmbeddingRequest, stopped: threading.Event) -> tuple[npt.NDArray[np.float32], int]:
    """The vectors, and how many tokens the texts have."""
    if lm.info.pooling == "rank" and not lm.info.generates:
        raise bad_request("This server's model ranks documents: /v1/rerank.", code="no_embeddings")
    if body.dimensions not in (None, lm.embedding_size):
        raise bad_request(
            f"dimensions: this model's embeddings have {lm.embedding_size} elements, no others can be asked for.",
            param="dimensions",
            code="invalid_value",
        )
    texts = body.texts
    most = _MOST_ELEMENTS[body.encoding_format]
    if len(texts) * lm.embedding_size > most:
        raise bad_request(
            f"input has {len(texts)} texts, each of which makes {lm.embedding_size} elements; an answer holds at most "
            f"{most} with encoding_format {body.encoding_format!r}: send fewer texts at once.",
            param="input",
            code="too_many_elements",
        )
    ids = [lm.tokenize(text, parse_special=False) if isinstance(text, str) else text for text in texts]
    for i, text in enumerate(ids):
        check_tokens(lm, text, f"input[{i}]")
        _check_length(lm, text, f"input[{i}]", "input")
    parts = [lm.embed(group) for group in _groups(ids, stopped)]
    return np.concatenate(parts), sum(map(len, ids))


def _ranked(loaded: Loaded, body: RerankRequest, stopped: threading.Event) -> tuple[list[float], int]:
    """The documents' scores, and how many tokens were read."""
    lm = loaded.lm
    if lm.info.pooling != "rank":
        raise bad_request(
            "This server's model is no rerank model (its file does not say pooling by rank): compare /v1/embeddings.",
            code="no_rerank_model",
        )
    if body.query:
        _check_length(lm, lm.tokenize(body.query, add_special=False, parse_special=False), "The query", "query")

    def prompts() -> Iterator[list[int]]:
        for i, ids in enumerate(lm.rerank_prompts(body.query, body.texts)):
            _check_length(lm, ids, f"documents[{i}], with the query,", "documents")
            yield ids

    # Made while the model reads: all of them hold the query, and may be much longer than the request.
    scores: list[float] = []
    tokens = 0
    for group in _groups(prompts(), stopped):
        scores += lm.rank(group).tolist()
        tokens += sum(map(len, group))
    return scores, tokens


def _groups(texts: Iterable[list[int]], stopped: threading.Event) -> Iterator[list[list[int]]]:
    """Texts to be read together: other requests get their turn between them.

    Raises:
        ClientGone: nobody waits for the texts any more.
    """
    group: list[list[int]] = []
    tokens = 0
    for text in texts:
        if stopped.is_set():
            raise ClientGone
        if group and tokens + len(text) > _AT_ONCE:
            yield group
            group, tokens = [], 0
        group.append(text)
        tokens += len(text)
    yield group


def _check_length(lm: LM, ids: list[int], what: str, param: str) -> None:
    if not ids:
        raise bad_request(f"{what} has no tokens.", param=param, code="invalid_value")
    if len(ids) > lm.longest_text:
        raise bad_request(
            f"{what} has {len(ids)} tokens; this model takes at most {lm.longest_text}.",
            param=param,
            code="context_length_exceeded",
        )


def _encoded(vector: npt.NDArray[np.float32], how: str) -> Any:
    if how == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
