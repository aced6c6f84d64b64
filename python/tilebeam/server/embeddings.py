"""Embeddings in OpenAI's form, and documents by relevance in that of Jina and Cohere."""

from __future__ import annotations

import base64
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from tilebeam.outputs import Usage
from tilebeam.server.admission import ClientGone
from tilebeam.server.errors import bad_request
from tilebeam.server.events import Json
from tilebeam.server.model_host import Loaded
from tilebeam.server.models import Models
from tilebeam.server.prompts import check_tokens
from tilebeam.server.requests import Strict, Text
from tilebeam.server.writing import dumped_in_parts

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

_MOST_TEXTS = 2048  # of one request
# Elements of all vectors of one answer: as base64 they take 5 bytes each, as numbers about 20.
_MOST_ELEMENTS = {"base64": 1 << 23, "float": 1 << 22}
# Tokens of texts that are read before it is seen whether the client still waits.
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
    """POST /v1/rerank: `documents`, or `texts` as in the form of Text Embeddings Inference."""

    query: Text
    documents: list[Text | Document] | None = Field(None, min_length=1, max_length=_MOST_TEXTS)
    texts: list[Text] | None = Field(None, min_length=1, max_length=_MOST_TEXTS)
    model: Text | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False
    return_text: bool = False
    raw_scores: Literal[True] | None = None  # as they are
    truncate: Literal[False] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> RerankRequest:
        if (self.documents is None) == (self.texts is None):
            raise ValueError("documents is required, or texts as in the form of Text Embeddings Inference, not both")
        if self.return_text and self.texts is None:
            raise ValueError("return_text goes with texts; with documents it is return_documents")
        return self

    @property
    def candidates(self) -> list[str]:
        """The documents' texts."""
        return [d if isinstance(d, str) else d.text for d in self.documents or self.texts or ()]


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
    async def rerank(body: RerankRequest, request: Request) -> Json | list[Json]:
        """Documents by their relevance to a query, the most relevant first."""
        service = models.of(body.model)
        texts, named = body.candidates, "documents" if body.texts is None else "texts"
        scores, tokens = await service.in_thread(
            request, lambda loaded, stopped: ranked(loaded, [(body.query, texts)], stopped, ("query", named))
        )
        service.metrics.observe(Usage(prompt_tokens=tokens))
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n]
        if body.texts is not None:
            told: list[Json] = [{"index": i, "score": scores[i]} for i in order]
            return [one | {"text": texts[one["index"]]} for one in told] if body.return_text else told
        results: list[Json] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if body.return_documents:
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


def ranked(
    loaded: Loaded, asked: Sequence[tuple[str, Sequence[str]]], stopped: threading.Event, fields: tuple[str, str]
) -> tuple[list[float], int]:
    """Scores of documents, and how many tokens were read.

    Args:
        asked: queries, each with its documents.
        fields: those of the request that hold the queries and the documents.

    Raises:
        ApiError: the model does not rank, or a text is too long for it.
        ClientGone: nobody waits any more.
    """
    lm = loaded.lm
    if lm.info.pooling != "rank":
        raise bad_request(
            "This server's model is no rerank model (its file does not say pooling by rank): compare /v1/embeddings.",
            code="no_rerank_model",
        )
    for query in filter(None, dict(asked)):
        _check_length(lm, lm.tokenize(query, add_special=False, parse_special=False), "The query", fields[0])

    def prompts() -> Iterator[list[int]]:
        for i, ids in enumerate(chain.from_iterable(lm.rerank_prompts(*pair) for pair in asked)):
            _check_length(lm, ids, f"{fields[1]}[{i}], with the query,", fields[1])
            yield ids

    # Made while the model reads: all of them hold the query, and may be much longer than the request.
    scores: list[float] = []
    tokens = 0
    for group in _groups(prompts(), stopped):
        scores += lm.rank(group).tolist()
        tokens += sum(map(len, group))
    return scores, tokens


def _groups(texts: Iterable[list[int]], stopped: threading.Event) -> Iterator[list[list[int]]]:
    """Texts to be read together.

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
