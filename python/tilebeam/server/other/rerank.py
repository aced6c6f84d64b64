"""/v1/rerank: documents by relevance, in the form of Jina and Cohere and in that of Text Embeddings Inference."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal

from fastapi import FastAPI, Request
from pydantic import Field, model_validator

from tilebeam.outputs import Usage
from tilebeam.server.answer_events import Json
from tilebeam.server.errors import bad_request
from tilebeam.server.model_host import LoadedModel
from tilebeam.server.models import Models
from tilebeam.server.requests import Strict, Text
from tilebeam.server.text_groups import MOST_TEXTS, check_length, read_groups


class Document(Strict):
    """A document of /v1/rerank as an object."""

    text: Text


class RerankRequest(Strict):
    """POST /v1/rerank: `documents`, or `texts` as in the form of Text Embeddings Inference."""

    query: Text
    documents: list[Text | Document] | None = Field(None, min_length=1, max_length=MOST_TEXTS)
    texts: list[Text] | None = Field(None, min_length=1, max_length=MOST_TEXTS)
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


def add_rerank_routes(app: FastAPI, models: Models) -> None:
    """Serve these paths."""

    @app.post("/v1/rerank")
    @app.post("/rerank", include_in_schema=False)
    @app.post("/v2/rerank", include_in_schema=False)
    @app.post("/reranking", include_in_schema=False)
    @app.post("/v1/reranking", include_in_schema=False)
    async def rerank(body: RerankRequest, request: Request) -> Json | list[Json]:
        """Return documents by their relevance to a query, the most relevant first."""
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


def ranked(
    loaded: LoadedModel, asked: Sequence[tuple[str, Sequence[str]]], stopped: threading.Event, fields: tuple[str, str]
) -> tuple[list[float], int]:
    """Return scores of documents, and how many tokens were read.

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
        check_length(lm, lm.tokenize(query, add_special=False, parse_special=False), "The query", fields[0])

    def prompts() -> Iterator[list[int]]:
        for i, ids in enumerate(chain.from_iterable(lm.rerank_prompts(*pair) for pair in asked)):
            check_length(lm, ids, f"{fields[1]}[{i}], with the query,", fields[1])
            yield ids

    # Made while the model reads: all of them hold the query, and may be much longer than the request.
    scores: list[float] = []
    tokens = 0
    for group in read_groups(prompts(), stopped):
        scores += lm.rank(group).tolist()
        tokens += sum(map(len, group))
    return scores, tokens
