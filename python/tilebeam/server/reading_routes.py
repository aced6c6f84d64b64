"""Paths that read texts and write none: /v1/embeddings in OpenAI's form, /v1/rerank in that of Jina and Cohere, and
/v1/score, by the server's reward model."""

from __future__ import annotations

import base64
import threading
import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from tilebeam.errors import NpuError, TilebeamError
from tilebeam.outputs import Usage
from tilebeam.prompt import Prompt
from tilebeam.scoring.own_reward import OwnReward
from tilebeam.scoring.reward_model import RatedText
from tilebeam.server.admission import ClientGone
from tilebeam.server.answer_events import Json
from tilebeam.server.errors import bad_request, check_tokens
from tilebeam.server.model_host import LoadedModel
from tilebeam.server.models import Models
from tilebeam.server.requests import Strict, Text, each_of
from tilebeam.server.writing import dumped_in_parts

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

_MOST_TEXTS = 2048  # of one request
_MOST_SCORED = 256
# Tokens of texts that are read before it is seen whether the client still waits.
_AT_ONCE = 2048
# Elements of all vectors of one answer: as base64 they take 5 bytes each, as numbers about 20.
_MOST_ELEMENTS = {"base64": 1 << 23, "float": 1 << 22}


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
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreRequest(Strict):
    """POST /v1/score: texts that answer one prompt."""

    prompt: Text
    texts: Text | Annotated[list[Text], Field(min_length=1, max_length=_MOST_SCORED)]
    model: Text | None = None


def add_reading_routes(app: FastAPI, models: Models) -> None:
    """Serve these paths."""

    @app.post("/v1/embeddings", response_model=None)
    @app.post("/embeddings", response_model=None, include_in_schema=False)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Return texts as vectors of length 1."""
        service = models.of(body.model)

        def answer(loaded: LoadedModel, stopped: threading.Event) -> tuple[Response, int]:
            vectors, tokens = _embedded(loaded.lm, body, stopped)
            data = [
                {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
                for i, vector in enumerate(vectors)
            ]
            told = {"object": "list", "data": data, "model": service.name, "usage": _counts(tokens)}
            return Response(dumped_in_parts(told), media_type="application/json"), tokens

        response, tokens = await service.in_thread(request, answer)
        service.metrics.observe(Usage(prompt_tokens=tokens))
        return response

    @app.post("/v1/rerank")
    @app.post("/rerank", include_in_schema=False)
    async def rerank(body: RerankRequest, request: Request) -> Json:
        """Return documents by their relevance to a query, the most relevant first."""
        service = models.of(body.model)
        scores, tokens = await service.in_thread(request, lambda loaded, stopped: ranked(loaded.lm, body, stopped))
        service.metrics.observe(Usage(prompt_tokens=tokens))
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n]
        results: list[Json] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if body.return_documents:
            results = [result | {"document": {"text": body.texts[result["index"]]}} for result in results]
        head = {"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "model": service.name}
        return head | {"results": results, "usage": _counts(tokens)}

    @app.post("/v1/score")
    async def score(body: ScoreRequest, request: Request) -> Json:
        """Return scores of texts and of their steps, by the server's reward model."""
        service = models.of(body.model)
        rated = await service.in_thread(request, lambda loaded, stopped: _rated(loaded, body, stopped))
        usage = sum((r.usage for r in rated), Usage())
        service.metrics.observe(usage)
        data = [
            {"object": "score", "index": i, "score": r.score, "steps": r.steps, "scores": r.scores}
            for i, r in enumerate(rated)
        ]
        counts = _counts(usage.full_scoring_tokens) | {"scored_tokens": usage.scored_tokens}
        return {"object": "list", "data": data, "model": service.name, "usage": counts}


def _counts(tokens: int) -> Json:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _read_groups(texts: Iterable[list[int]], stopped: threading.Event) -> Iterator[list[list[int]]]:
    """Yield texts to be read together.

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
    """Raise `ApiError` for a text that the model cannot read.

    Args:
        ids: its tokens.
        what: it is, for the error.
        param: the request's field.
    """
    if not ids:
        raise bad_request(f"{what} has no tokens.", param=param, code="invalid_value")
    if len(ids) > lm.longest_text:
        raise bad_request(
            f"{what} has {len(ids)} tokens; this model takes at most {lm.longest_text}.",
            param=param,
            code="context_length_exceeded",
        )


def _embedded(lm: LM, body: EmbeddingRequest, stopped: threading.Event) -> tuple[npt.NDArray[np.float32], int]:
    """Return the vectors, and how many tokens the texts have."""
    if lm.info.pooling == "rank" and not lm.info.generates:
        raise bad_request("This server's model ranks documents: /v1/rerank.", code="no_embeddings")
    if body.dimensions not in (None, lm.embedding_size):
        raise bad_request(
            f"dimensions: this model's embeddings have {lm.embedding_size} elements, no others can be asked for.",
            param="dimensions",
            code="invalid_value",
        )
    texts = each_of(body.input)
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
    parts = [lm.embed(group) for group in _read_groups(ids, stopped)]
    return np.concatenate(parts), sum(map(len, ids))


def _encoded(vector: npt.NDArray[np.float32], how: str) -> Any:
    if how == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")


def ranked(lm: LM, body: RerankRequest, stopped: threading.Event) -> tuple[list[float], int]:
    """Return scores of documents, and how many tokens were read.

    Raises:
        ApiError: the model does not rank, or a text is too long for it.
        ClientGone: nobody waits any more.
    """
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
    for group in _read_groups(prompts(), stopped):
        scores += lm.rank(group).tolist()
        tokens += sum(map(len, group))
    return scores, tokens


def _rated(loaded: LoadedModel, body: ScoreRequest, stopped: threading.Event) -> list[RatedText]:
    scorer = loaded.scorer
    if scorer is None:
        raise bad_request("This server has no reward model: start it with --prm or --orm.", code="no_reward_model")
    if isinstance(scorer, OwnReward):
        raise bad_request(
            "This server's reward head rates what its own model writes (search, scorer reward), not given texts: start "
            "it with --prm or --orm.",
            code="no_reward_model",
        )
    found, asked = [], Prompt(body.prompt, question=body.prompt)
    with scorer.session():
        for text in [body.texts] if isinstance(body.texts, str) else body.texts:
            if stopped.is_set():
                raise ClientGone
            try:
                found.append(scorer.rate_text(asked, text))
            except NpuError:
                raise
            except TilebeamError as error:
                if loaded.failure is not None:
                    raise
                raise bad_request(f"texts: {error}", param="texts", code="invalid_value") from None
    return found
